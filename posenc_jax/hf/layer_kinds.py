"""The kind of each layer: full, sliding, chunked or linear attention.

Kinds have their names in `layer_types` of configs. A `LayerKinds` reads them from there, or from
older keys as the config class of the model type does.
"""

from collections.abc import Callable

from posenc_jax.checks import require
from posenc_jax.engine.mask import Window
from posenc_jax.hf.config_reader import TrackedConfig, is_causal, layer_count
from posenc_jax.schemes.layer_spec import LayerSpec
from posenc_jax.schemes.scheme import Scheme

LayerKinds = Callable[[TrackedConfig], list[str]]

FULL, LOCAL, CHUNKED, LINEAR = (
    f"{kind}_attention" for kind in ("full", "sliding", "chunked", "linear")
)
_OLD_NAMES = {"attention": FULL, "mamba": LINEAR}
_GLOBAL = {FULL, LINEAR, "indexed_attention", "deepseek_sparse_attention", "hybrid"}


def declared(config: TrackedConfig) -> list[str] | None:
    """Returns the `layer_types` of the config, with old names replaced, or None."""
    layer_count(config)
    kinds = config.explicit("layer_types")
    return None if kinds is None else [_OLD_NAMES.get(kind, kind) for kind in kinds]


def all_global(config: TrackedConfig) -> list[str]:
    """Returns full attention for every layer."""
    return _undeclared(config, FULL)


def all_windowed(config: TrackedConfig) -> list[str]:
    """Returns sliding attention for every layer, if there is a window."""
    config.ignore("max_window_layers")  # In Qwen3-MoE's configs.
    return _undeclared(config, LOCAL if window_of(config) is not None else FULL)


def _undeclared(config, kind):
    """Returns `kind` for each layer of a model type that does not read `layer_types`."""
    kinds = declared(config) or [kind] * layer_count(config)
    require(
        {kind} >= {FULL if k in _GLOBAL - {LINEAR} else k for k in kinds},
        f"{config.label} has layer_types={sorted(set(kinds))}, which transformers ignores "
        f"for its type: all its layers are {kind!r}.",
    )
    return [kind] * len(kinds)


def every(
    period: int,
    key: str | None = None,
    *,
    first: bool = False,
    last: bool = False,
    other: str = LOCAL,
) -> LayerKinds:
    """Returns a reader of one global layer in each period, unless `layer_types` says otherwise.

    Args:
      period: number of layers from one global layer to the next.
      key: the key that changes the period; None: none does.
      first: whether the first layer of a period is the global one, not the last.
      last: whether the last layer of the model is global too.
      other: the kind of the other layers.
    """

    def read(config):
        count, length = layer_count(config), config.get(key, period) if key else period
        kinds = declared(config)
        if kinds is not None:
            return kinds
        require(
            type(length) is int and length >= 1,
            f"{config.label} has {key}={length!r}; without layer_types it must be an "
            "integer from 1.",
        )
        position = 0 if first else length - 1
        kinds = [FULL if i % length == position else other for i in range(count)]
        return [*kinds[:-1], FULL] if last else kinds

    return read


def from_max_window_layers(config: TrackedConfig) -> list[str]:
    """Returns sliding attention for layers from number `max_window_layers` on."""
    window, start = window_of(config), config.get("max_window_layers")
    local = [window is not None and i >= start for i in range(layer_count(config))]
    return declared(config) or [LOCAL if x else FULL for x in local]


def qwen2_moe(config: TrackedConfig) -> list[str]:
    """Returns sliding attention for every second layer below `max_window_layers`."""
    window, end = window_of(config), config.get("max_window_layers")
    local = [window is not None and i % 2 == 0 and i < end for i in range(layer_count(config))]
    return declared(config) or [LOCAL if x else FULL for x in local]


def ministral(config: TrackedConfig) -> list[str]:
    """Returns sliding attention for all layers, unless `layer_types` says otherwise."""
    kind = FULL if window_of(config) is None else LOCAL
    return declared(config) or [kind] * layer_count(config)


def exaone4(config: TrackedConfig) -> list[str]:
    """Returns full attention for one layer in four, and for all without a window."""
    if config.get("sliding_window") is None:
        config.ignore("sliding_window_pattern")
        return declared(config) or [FULL] * layer_count(config)
    return every(4, "sliding_window_pattern")(config)


def rotating_flags(config: TrackedConfig, period: int = 4) -> list[bool]:
    """Returns whether each layer rotates: `no_rope_layers`, where 1 stands for a rotating layer.

    Raises:
      ValueError: if there is not one flag for each layer.
    """
    count = layer_count(config)
    period = config.get("no_rope_layer_interval", period)
    flags = config.explicit("no_rope_layers") or [(i + 1) % period != 0 for i in range(count)]
    require(
        len(flags) == count,
        f"{config.label} has {len(flags)} no_rope_layers for {count} layers.",
    )
    return [bool(flag) for flag in flags]


def smollm3(config: TrackedConfig) -> list[str]:
    """Returns sliding attention for layers that do not rotate, if there is a window."""
    window = window_of(config)
    local = [window is not None and not flag for flag in rotating_flags(config)]
    kinds = declared(config) or [LOCAL if x else FULL for x in local]
    require(
        LOCAL not in kinds or config.get("use_sliding_window", False),
        f"{config.label} has layers of type {LOCAL!r} without use_sliding_window, which some "
        "attention functions of transformers mask and others do not.",
    )
    return kinds


def llama4(config: TrackedConfig) -> list[str]:
    """Returns chunked attention for layers that rotate."""
    config.ignore("attention_chunk_size")
    return declared(config) or [CHUNKED if x else FULL for x in rotating_flags(config)]


def gemma4(config: TrackedConfig) -> list[str]:
    """Returns full attention for one layer in six and the last, even if `layer_types` differs."""
    return [*every(6)(config)[:-1], FULL]


def layer_of(config: TrackedConfig, kind: str, scheme: Scheme, window: Window = None) -> LayerSpec:
    """Returns a layer of a kind, with its window or chunk.

    Raises:
      ValueError: for an unknown kind, and a kind whose window or chunk is missing.
    """
    if kind in _GLOBAL:
        return LayerSpec(scheme)
    if kind in (LOCAL, "hybrid_sliding"):
        require(window is not None, f"{config.label} has {kind!r} and no sliding_window.")
        require(
            config.get("use_sliding_window", True),
            f"{config.label} has sliding_window={window} and use_sliding_window=False, "
            "which transformers ignores for its type.",
        )
        return LayerSpec(scheme, window)
    require(kind == CHUNKED, f"{config.label} has layers of type {kind!r}.")
    require(
        is_causal(config),
        f"{config.label} has is_causal=false, which transformers ignores in layers with chunks.",
    )
    return LayerSpec(scheme, chunk_size=config.need("attention_chunk_size"))


def window_of(config: TrackedConfig) -> Window:
    """Returns the window of the layers that have one, as `attention` takes it."""
    switch = "use_sliding_window" in config.defaults  # Whether the model type reads this key.
    window, used = config.get("sliding_window"), config.get("use_sliding_window", False)
    if window is None or (switch and not used):
        return None
    return window if is_causal(config) else (window, window)


def modernbert_window(config: TrackedConfig) -> Window:
    """Returns half of `local_attention` on both sides, for an encoder."""
    return (config.need("local_attention") // 2,) * 2


def two_sided_window_of(config: TrackedConfig) -> Window:
    """Returns the window of Gemma 3 and 4, which embedding models divide between both sides.

    Gemma 3's then has `sliding_window` tokens in all; Gemma 4's has one more on each side, as
    |i - j| may be `sliding_window // 2 + 1`.
    """
    window = window_of(config)
    config.only("use_bidirectional_attention", False, True, "all", "vision")
    both_ways = config.get("use_bidirectional_attention")
    if window is None or both_ways not in (True, "all"):
        return window
    side = config.need("sliding_window") // 2 + 1
    return (side, side) if both_ways == "all" or not is_causal(config) else side
