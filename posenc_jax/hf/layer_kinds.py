"""The kind of each layer: full, sliding or chunked attention, or an operation without attention.

Kinds have their names in `layer_types` of configs. A `LayerKinds` reads them from there, or from
older keys as the config class of the model type does.
"""

from collections.abc import Callable, Iterable

from posenc_jax.engine.mask import Window
from posenc_jax.hf.config_reader import TrackedConfig, is_causal, layer_count
from posenc_jax.schemes.additive.none import NoPE
from posenc_jax.schemes.layer_spec import LayerSpec, Mixer
from posenc_jax.schemes.scheme import Scheme

LayerKinds = Callable[[TrackedConfig], list[str]]

FULL, LOCAL, CHUNKED, LINEAR = (
    f"{kind}_attention" for kind in ("full", "sliding", "chunked", "linear")
)
CONVOLUTION, STATE_SPACE, MLP, EXPERTS = "conv", "state_space", "mlp", "moe"
MIXERS: dict[str, Mixer] = {
    LINEAR: "linear_attention",
    CONVOLUTION: "convolution",
    STATE_SPACE: "state_space",
    MLP: "mlp",
    EXPERTS: "mlp",
}
"""The kinds of layers without attention, and their `LayerSpec.mixer`."""

_OLD_NAMES = {"attention": FULL, "mamba": LINEAR}
HYBRID = "hybrid"  # Inkling's attention to all tokens; Zamba's attention before Mamba.
_GLOBAL = {FULL, "indexed_attention", "deepseek_sparse_attention", "minimax_m3_sparse", HYBRID}


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


def from_config(config: TrackedConfig) -> list[str]:
    """Returns the `layer_types`; full attention for all layers without them."""
    return declared(config) or [FULL] * layer_count(config)


def window_of(config: TrackedConfig) -> Window:
    """Returns the window of the layers that have one, as `attention` takes it."""
    switch = "use_sliding_window" in config.defaults  # Whether the model type reads this key.
    window, used = config.get("sliding_window"), config.get("use_sliding_window", False)
    if window is None or (switch and not used):
        return None
    return on_sides_of(config, window)


def on_sides_of(config: TrackedConfig, window: int) -> Window:
    """Returns a window, to both sides unless attention is causal."""
    return window if is_causal(config) else (window, window)


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


def layers_of(
    config: TrackedConfig, kinds: list[str], schemes: Iterable[Scheme], window: Window = None
) -> tuple[LayerSpec, ...]:
    """Returns layers of these kinds with these schemes, as `layer_of`."""
    return tuple(
        layer_of(config, kind, scheme, window) for kind, scheme in zip(kinds, schemes, strict=True)
    )


def uniform(config: TrackedConfig, scheme: Scheme) -> tuple[LayerSpec, ...]:
    """Returns layers with one scheme and no window."""
    kinds = all_global(config)
    return layers_of(config, kinds, [scheme] * len(kinds))


def without_positions(config: TrackedConfig, kinds: list[str]) -> tuple[LayerSpec, ...]:
    """Returns layers of these kinds without positions."""
    return layers_of(config, kinds, [NoPE()] * len(kinds))
