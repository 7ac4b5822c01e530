"""The kind of each layer: full, sliding, chunked or linear attention.

Kinds have the names that `layer_types` has in configs. A `LayerKinds` reads them from there, or
from older keys as the config class of the model type does.
"""

from collections.abc import Callable

from posenc_jax.checks import require
from posenc_jax.engine.mask import Window
from posenc_jax.hf.config_reader import TrackedConfig, layer_count
from posenc_jax.schemes.layer_spec import LayerSpec
from posenc_jax.schemes.scheme import Scheme

LayerKinds = Callable[[TrackedConfig], list[str]]

FULL, LOCAL, CHUNKED, LINEAR = (
    f"{kind}_attention" for kind in ("full", "sliding", "chunked", "linear")
)
_OLD_NAMES = {"attention": FULL, "mamba": LINEAR}
_GLOBAL = {FULL, LINEAR, "indexed_attention", "deepseek_sparse_attention", "hybrid"}


def declared(config: TrackedConfig) -> list[str] | None:
    """The `layer_types` of the config, with old names replaced, or None."""
    layer_count(config)
    kinds = config.given("layer_types")
    return None if kinds is None else [_OLD_NAMES.get(kind, kind) for kind in kinds]


def all_global(config: TrackedConfig) -> list[str]:
    """No layer has a window."""
    return _undeclared(config, FULL)


def all_windowed(config: TrackedConfig) -> list[str]:
    """Every layer has the window, if there is one."""
    config.given("max_window_layers")  # Qwen3-MoE's configs have it, and transformers ignores it.
    return _undeclared(config, LOCAL if window_of(config) is not None else FULL)


def _undeclared(config, kind):
    """`kind` for each layer of a model type that does not read `layer_types`."""
    kinds = declared(config) or [kind] * layer_count(config)
    require(
        {kind} >= {FULL if k in _GLOBAL - {LINEAR} else k for k in kinds},
        f"{config.where} has layer_types={sorted(set(kinds))}, which transformers ignores "
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
    """One global layer in each period, unless `layer_types` says otherwise.

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
            f"{config.where} has {key}={length!r}; without layer_types it must be an "
            "integer from 1.",
        )
        position = 0 if first else length - 1
        made = [FULL if i % length == position else other for i in range(count)]
        return [*made[:-1], FULL] if last else made

    return read


def from_max_window_layers(config: TrackedConfig) -> list[str]:
    """Layers from number `max_window_layers` on have the window."""
    window, start = window_of(config), config.get("max_window_layers")
    local = [window is not None and i >= start for i in range(layer_count(config))]
    return declared(config) or [LOCAL if x else FULL for x in local]


def qwen2_moe(config: TrackedConfig) -> list[str]:
    """Every second layer below `max_window_layers` has the window."""
    window, end = window_of(config), config.get("max_window_layers")
    local = [window is not None and i % 2 == 0 and i < end for i in range(layer_count(config))]
    return declared(config) or [LOCAL if x else FULL for x in local]


def ministral(config: TrackedConfig) -> list[str]:
    """All layers have the window unless `layer_types` says otherwise."""
    kind = FULL if window_of(config) is None else LOCAL
    return declared(config) or [kind] * layer_count(config)


def exaone4(config: TrackedConfig) -> list[str]:
    """One global layer in four; without a window all are."""
    if config.get("sliding_window") is None:
        config.given("sliding_window_pattern")
        return declared(config) or [FULL] * layer_count(config)
    return every(4, "sliding_window_pattern")(config)


def rotating_flags(config: TrackedConfig, period: int = 4) -> list[bool]:
    """Which layers rotate: `no_rope_layers`, in which 1 means that the layer does.

    Raises:
      ValueError: if there is not one flag for each layer.
    """
    count = layer_count(config)
    period = config.get("no_rope_layer_interval", period)
    flags = config.given("no_rope_layers") or [(i + 1) % period != 0 for i in range(count)]
    require(
        len(flags) == count,
        f"{config.where} has {len(flags)} no_rope_layers for {count} layers.",
    )
    return [bool(flag) for flag in flags]


def smollm3(config: TrackedConfig) -> list[str]:
    """Layers that do not rotate have the window, if there is one."""
    window = window_of(config)
    local = [window is not None and not flag for flag in rotating_flags(config)]
    kinds = declared(config) or [LOCAL if x else FULL for x in local]
    require(
        LOCAL not in kinds or config.get("use_sliding_window", False),
        f"{config.where} has layers of type {LOCAL!r} without use_sliding_window, which some "
        "attention functions of transformers mask and others do not.",
    )
    return kinds


def llama4(config: TrackedConfig) -> list[str]:
    """Layers that rotate attend within chunks."""
    config.given("attention_chunk_size")
    return declared(config) or [CHUNKED if x else FULL for x in rotating_flags(config)]


def gemma4(config: TrackedConfig) -> list[str]:
    """One global layer in six, and the last, whatever `layer_types` says of it."""
    return [*every(6)(config)[:-1], FULL]


def layer_of(config: TrackedConfig, kind: str, scheme: Scheme, window: Window = None) -> LayerSpec:
    """A layer of a kind, with its window or chunk.

    Raises:
      ValueError: for an unknown kind, and a kind whose window or chunk is missing.
    """
    if kind in _GLOBAL:
        return LayerSpec(scheme)
    if kind in (LOCAL, "hybrid_sliding"):
        require(window is not None, f"{config.where} has {kind!r} and no sliding_window.")
        require(
            config.get("use_sliding_window", True),
            f"{config.where} has sliding_window={window} and use_sliding_window=False, "
            "which transformers ignores for its type.",
        )
        return LayerSpec(scheme, window)
    require(kind == CHUNKED, f"{config.where} has layers of type {kind!r}.")
    require(
        is_causal(config),
        f"{config.where} has is_causal=false, which transformers ignores in layers with chunks.",
    )
    return LayerSpec(scheme, chunk_size=config.need("attention_chunk_size"))


def window_of(config: TrackedConfig) -> Window:
    """The window of the layers that have one, as `attention` takes it."""
    switch = "use_sliding_window" in config.defaults  # Whether the model type reads this key.
    window, used = config.get("sliding_window"), config.get("use_sliding_window", False)
    if window is None or (switch and not used):
        return None
    return window if is_causal(config) else (window, window)


def is_causal(config: TrackedConfig) -> bool:
    """Whether tokens see only those before them, by a key that transformers reads for all types."""
    return config.get("is_causal", True)


def modernbert_window(config: TrackedConfig) -> Window:
    """As far to both sides: an encoder."""
    return (config.need("local_attention") // 2,) * 2


def two_sided_window_of(config: TrackedConfig) -> Window:
    """The same for Gemma 3 and 4, as embedding models a window of that many tokens in all.

    Gemma 4's has one token more on each side: |i - j| may be `window // 2 + 1`.
    """
    window = window_of(config)
    config.only("use_bidirectional_attention", False, True, "all", "vision")
    both_ways = config.get("use_bidirectional_attention")
    if window is None or both_ways not in (True, "all"):
        return window
    side = config.need("sliding_window") // 2 + 1
    return (side, side) if both_ways == "all" or not is_causal(config) else side
