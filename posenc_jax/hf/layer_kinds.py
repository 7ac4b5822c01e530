"""The kind of each layer: full, sliding or chunked attention, or an operation without attention.

Kinds have their names in `layer_types` of configs. A `LayerKinds` reads them from there, or from
older keys as the config class of the model type does.
"""

from collections.abc import Callable

from posenc_jax.engine.mask import Window
from posenc_jax.hf.config_reader import TrackedConfig, is_causal, layer_count
from posenc_jax.schemes.additive.none import NoPE
from posenc_jax.schemes.layer_spec import LayerSpec, Mixer
from posenc_jax.schemes.scheme import Scheme

LayerKinds = Callable[[TrackedConfig], list[str]]

FULL, LOCAL, CHUNKED, LINEAR = (
    f"{kind}_attention" for kind in ("full", "sliding", "chunked", "linear")
)
CONVOLUTION, STATE_SPACE = "conv", "state_space"
MIXERS: dict[str, Mixer] = {
    LINEAR: "linear_attention",
    CONVOLUTION: "convolution",
    STATE_SPACE: "state_space",
}
"""The kinds of layers without attention, and their `LayerSpec.mixer`."""

_OLD_NAMES = {"attention": FULL, "mamba": LINEAR}
_GLOBAL = {FULL, "indexed_attention", "deepseek_sparse_attention", "minimax_m3_sparse", "hybrid"}


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
    config.check(
        {kind} >= {FULL if k in _GLOBAL else k for k in kinds},
        f"layer_types={sorted(set(kinds))}, which transformers ignores for its type: all its "
        f"layers are {kind!r}",
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
        config.check(
            type(length) is int and length >= 1,
            f"{key}={length!r}; without layer_types it must be an integer from 1",
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


def from_config(config: TrackedConfig) -> list[str]:
    """Returns the `layer_types`; full attention for all layers without them."""
    return declared(config) or [FULL] * layer_count(config)


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
    config.check(len(flags) == count, f"{len(flags)} no_rope_layers for {count} layers")
    return [bool(flag) for flag in flags]


def smollm3(config: TrackedConfig) -> list[str]:
    """Returns sliding attention for layers that do not rotate, if there is a window."""
    window = window_of(config)
    local = [window is not None and not flag for flag in rotating_flags(config)]
    kinds = declared(config) or [LOCAL if x else FULL for x in local]
    config.check(
        LOCAL not in kinds or config.get("use_sliding_window", False),
        f"layers of type {LOCAL!r} without use_sliding_window, which some attention functions of "
        "transformers mask and others do not",
    )
    return kinds


def llama4(config: TrackedConfig) -> list[str]:
    """Returns chunked attention for layers that rotate."""
    config.ignore("attention_chunk_size")
    return declared(config) or [CHUNKED if x else FULL for x in rotating_flags(config)]


def required(config: TrackedConfig) -> list[str]:
    """Returns the `layer_types` of a model type without a default."""
    config.need("layer_types")
    return from_config(config)


def lfm2(config: TrackedConfig) -> list[str]:
    """Returns full attention for layers in `full_attn_idxs`, convolutions for the others."""
    count, indices = layer_count(config), config.explicit("full_attn_idxs")
    full = range(count) if indices is None else indices
    return declared(config) or [FULL if i in full else CONVOLUTION for i in range(count)]


def lfm3(config: TrackedConfig) -> list[str]:
    """Returns convolutions in every second layer, between sliding and full attention in turn."""
    cycle = LOCAL, CONVOLUTION, FULL, CONVOLUTION
    kinds = [cycle[i % 4] for i in range(layer_count(config))]
    return declared(config) or [CONVOLUTION, *kinds[1:]]


def granite_hybrid(config: TrackedConfig) -> list[str]:
    """Returns Mamba for all layers, unless `layer_types` says otherwise."""
    kinds = declared(config) or [LINEAR] * layer_count(config)
    return [STATE_SPACE if kind == LINEAR else kind for kind in kinds]


def bamba(config: TrackedConfig) -> list[str]:
    """Returns full attention for layers in `attn_layer_indices`, Mamba for the others."""
    count, indices = layer_count(config), config.explicit("attn_layer_indices") or ()
    kinds = [FULL if i in indices else STATE_SPACE for i in range(count)]
    written = [STATE_SPACE if kind == LINEAR else kind for kind in declared(config) or kinds]
    config.check_ignored(written == kinds, f"layer_types={written}")
    return kinds


def olmo_hybrid(config: TrackedConfig) -> list[str]:
    """Returns full attention for one layer in four, or for the last of fewer than four."""
    kinds = every(4, other=LINEAR)(config)
    return kinds if FULL in kinds else [*kinds[:-1], FULL]


def minimax(config: TrackedConfig) -> list[str]:
    """Returns linear attention for every second layer; the others have a window if there is one."""
    kinds = every(2, first=True, other=LINEAR)(config)
    config.check({*kinds} <= {FULL, LINEAR}, f"layer_types={sorted({*kinds})}")
    local = FULL if window_of(config) is None else LOCAL
    return [local if kind == FULL else kind for kind in kinds]


def kimi_linear(config: TrackedConfig) -> list[str]:
    """Returns full attention for layers 4, 8 ..., unless a list of layers says otherwise."""
    count, kinds = layer_count(config), declared(config)
    part = TrackedConfig(
        config.get("linear_attn_config") or {}, f"{config.label} in linear_attn_config"
    )
    full, linear = part.explicit("full_attn_layers"), part.explicit("kda_layers")
    if kinds is not None:
        return kinds
    if full is None or linear is None:
        return [FULL if i and i % 4 == 0 else LINEAR for i in range(count)]
    part.check(
        sorted([*full, *linear]) == [*range(1, count + 1)],
        f"full_attn_layers={full} and kda_layers={linear}, which are not {count} layers from 1 on",
    )
    return [FULL if i + 1 in full else LINEAR for i in range(count)]


def flint(config: TrackedConfig) -> list[str]:
    """Returns full attention for the first two layers, one in four, and the last."""
    count = layer_count(config)
    full = {0, 1, count - 1, *range(1, count, 4)}
    return declared(config) or [FULL if i in full else LOCAL for i in range(count)]


def mimo_v2(config: TrackedConfig) -> list[str]:
    """Returns full attention for the first layer and one in six."""
    return declared(config) or [FULL, *every(6)(config)[1:]]


def muse_spark(config: TrackedConfig) -> list[str]:
    """Returns full attention for the last layer and one in four before it."""
    count = layer_count(config)
    return declared(config) or [LOCAL if (count - 1 - i) % 4 else FULL for i in range(count)]


def gemma4(config: TrackedConfig) -> list[str]:
    """Returns full attention for one layer in six and the last, even if `layer_types` differs."""
    return [*every(6)(config)[:-1], FULL]


def layer_of(config: TrackedConfig, kind: str, scheme: Scheme, window: Window = None) -> LayerSpec:
    """Returns a layer of a kind, with its window or chunk.

    Raises:
      ValueError: for an unknown kind, and a kind whose window or chunk is missing.
    """
    if kind in MIXERS:
        return LayerSpec(NoPE(), mixer=MIXERS[kind])
    if kind in _GLOBAL:
        return LayerSpec(scheme)
    if kind in (LOCAL, "hybrid_sliding"):
        config.check(window is not None, f"{kind!r} and no sliding_window")
        config.check_ignored(
            config.get("use_sliding_window", True),
            f"sliding_window={window} and use_sliding_window=False",
        )
        return LayerSpec(scheme, window)
    config.check(kind == CHUNKED, f"layers of type {kind!r}")
    config.check(
        is_causal(config), "is_causal=false, which transformers ignores in layers with chunks"
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
