"""The kind of each layer: full, sliding or chunked attention, or an operation without attention.

Kinds have their names in `layer_types` of configs. A `LayerKinds` reads them from there, or from
older keys as the config class of the model type does.
"""

from collections.abc import Callable, Iterable

from posenc_jax.engine.mask import Window
from posenc_jax.hf.config_reader import TrackedConfig, is_causal, layer_count
from posenc_jax.hf.rope import refuse_by_length
from posenc_jax.schemes.additive.none import NoPE
from posenc_jax.schemes.layer_spec import LayerSpec, Mixer
from posenc_jax.schemes.scheme import Scheme

LayerKinds = Callable[[TrackedConfig], list[str]]

FULL, LOCAL, CHUNKED, LINEAR = (
    f"{kind}_attention" for kind in ("full", "sliding", "chunked", "linear")
)
CONVOLUTION, STATE_SPACE, MLP, EXPERTS = "conv", "state_space", "mlp", "moe"
HYBRID = "hybrid"  # Inkling's attention to all tokens; Zamba's attention before Mamba.
MIXERS: dict[str, Mixer] = {
    LINEAR: "linear_attention",
    CONVOLUTION: "convolution",
    STATE_SPACE: "state_space",
    MLP: "mlp",
    EXPERTS: "mlp",
}
"""The kinds of layers without attention, and their `LayerSpec.mixer`."""

_OLD_NAMES = {"attention": FULL, "mamba": LINEAR}
_GLOBAL = {FULL, "indexed_attention", "deepseek_sparse_attention", "minimax_m3_sparse", HYBRID}
_LETTERS = {"F": FULL, "L": LOCAL, "N": LINEAR, "C": CONVOLUTION}


def declared(config: TrackedConfig) -> list[str] | None:
    """Returns the `layer_types` of the config, with old names replaced, or None."""
    layer_count(config)
    kinds = config.explicit("layer_types")
    return None if kinds is None else [_OLD_NAMES.get(kind, kind) for kind in kinds]


def all_global(config: TrackedConfig) -> list[str]:
    """Returns full attention for every layer of a type that does not read `layer_types`."""
    return _undeclared(config, FULL)


def all_windowed(config: TrackedConfig) -> list[str]:
    """Returns sliding attention for every layer as `all_global`, if there is a window."""
    if window_of(config) is not None:
        config.implied("max_window_layers", 0)
        return _undeclared(config, LOCAL)
    config.ignore("max_window_layers")  # In Qwen3-MoE's configs.
    return _undeclared(config, FULL)


def _undeclared(config, kind):
    kinds = declared(config) or [kind] * layer_count(config)
    config.check(
        {kind} >= {FULL if k in _GLOBAL else k for k in kinds},
        f"layer_types={sorted(set(kinds))}, which transformers ignores for its type: all its "
        f"layers are {kind!r}",
    )
    return [kind] * len(kinds)


def cycle(letters: str, key: str | None = None, *, first: str = "", last: str = "") -> LayerKinds:
    """Returns a reader of `layer_types`, which repeats a pattern if there are none.

    Args:
      letters: the pattern: F for full, L for sliding and N for linear attention, C for convolution.
      key: the key that changes the length of a pattern with one F, at its start or end.
      first: the letter of the first layer, if it differs from the pattern.
      last: the letter of the last layer.
    """

    def read(config):
        count, length = layer_count(config), config.get(key, len(letters)) if key else len(letters)
        kinds = declared(config)
        if kinds is not None:
            return kinds
        config.check(
            type(length) is int and length >= 1,
            f"{key}={length!r}; without layer_types it must be an integer from 1",
        )
        others = letters.strip("F")[:1] * (length - 1)
        period = letters if key is None else f"F{others}" if letters[0] == "F" else f"{others}F"
        text = first + (period * count)[len(first) : count]
        return [_LETTERS[letter] for letter in text[: count - len(last)] + last]

    return read


def where_local(test: Callable[..., bool], key: str | None = None) -> LayerKinds:
    """Returns a reader of `layer_types`; without them layers have the window, if there is one.

    Args:
      test: whether layer i has it, given i and the value of the key.
      key: None: the test has the number alone.
    """

    def read(config):
        window, values = window_of(config), [config.get(key)] if key else []
        if kinds := declared(config):
            return kinds
        config.check(window is None or None not in values, f"a sliding_window and {key}=null")
        local = [window is not None and test(i, *values) for i in range(layer_count(config))]
        return [LOCAL if x else FULL for x in local]

    return read


from_max_window_layers = where_local(lambda i, start: i >= start, "max_window_layers")


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
    refuse_by_length(config, getattr(scheme, "scaling", None))
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
    return tuple(layer_of(config, kind, scheme) for kind in all_global(config))


def without_positions(kinds: LayerKinds) -> Callable[[TrackedConfig], tuple[LayerSpec, ...]]:
    """Returns a reader of layers of these kinds without positions."""
    return lambda config: tuple(layer_of(config, kind, NoPE()) for kind in kinds(config))


def mamba(kinds: list[str]) -> list[str]:
    """Returns the kinds of a model type whose other layers are Mamba."""
    return [STATE_SPACE if kind == LINEAR else kind for kind in kinds]
