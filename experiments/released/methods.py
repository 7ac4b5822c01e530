"""Methods that let a trained model with RoPE read beyond its trained length, without training.

Each is a scheme and a window for every layer, from the RoPE of the checkpoint, its trained length L
and the target length N, with f = N / L, at least 1. Parameters have the values that the
authors recommend or use themselves, in proportion to L:

    pi, ntk, ntk_by_parts, yarn, llama3   the factor f; all else as published
    dynamic_ntk      the factor f for a text of N tokens, as transformers' "dynamic" computes it
    rope_by_length   dynamic NTK with the factor 1, as in the YaRN paper: in a pass over N tokens it
                     is NTK with the factor N / L
    rerope           w = L / 4, as in its repository (1024 of 4096)
    self_extend      W = L / 4, as in its repository (1024 of 4096); the smallest power of two as G
                     whose longest distance is trained, (L - W) G + W >= N
    dual_chunk       C = 3 L / 4 with L / 8 of it local, as its authors take them
    window, sinks_N  the last L / 4 tokens, N of them replaced by first ones, as in StreamingLLM's
                     Table 1 (0+1024 and 4+1020 of 4096)

rope, rerope, dual_chunk and windows do not depend on N. Where a checkpoint has layers of several
kinds, methods change the ones that see all tokens.
"""

import dataclasses
import itertools
from collections.abc import Callable, Mapping
from typing import Any

from flax import nnx

import posenc_jax as pe
from posenc_jax.nnx import PositionEncoding


@dataclasses.dataclass(frozen=True)
class Trained:
    """The settings of a checkpoint that methods read.

    Attributes:
      rope: its RoPE.
      length: L, its trained length.
    """

    rope: pe.RoPE
    length: int

    @classmethod
    def of(cls, config: Mapping[str, Any]) -> "Trained":
        """Returns the RoPE and trained length of a config of transformers.

        Raises:
          ValueError: unless all layers have one RoPE, unscaled, and no window, and the config
            states the trained length.
        """
        layers = pe.from_hf(config)
        first = layers[0]
        scheme = first.scheme
        plain = pe.FrequencyMap()
        if not isinstance(scheme, pe.RoPE) or scheme.scaling != plain or set(layers) != {first}:
            raise ValueError(
                "methods: all layers of the checkpoint must have the same RoPE without scaling, "
                f"got {layers[0].scheme!r} in the first of them."
            )
        if first.window is not None or first.chunk_size is not None:
            raise ValueError(
                f"methods: layers of the checkpoint must see all tokens, got window={first.window} "
                f"and chunk_size={first.chunk_size}."
            )
        length = config.get("max_position_embeddings")
        if not length:
            raise ValueError("methods: the checkpoint must state its trained length.")
        return cls(scheme, length)

    def scaled(self, scaling: pe.FrequencyMap) -> pe.LayerSpec:
        """Returns the layer whose frequencies a map changes."""
        return pe.LayerSpec(dataclasses.replace(self.rope, scaling=scaling))

    def by(self, scheme: Callable[..., pe.Scheme], **settings: Any) -> pe.LayerSpec:
        """Returns the layer of another rotary scheme with the settings of this RoPE."""
        names = "head_dim", "theta", "layout", "rotary_dim", "rotary_start"
        return pe.LayerSpec(scheme(**{n: getattr(self.rope, n) for n in names}, **settings))

    def recent(self, sinks: int) -> pe.LayerSpec:
        """Returns the layer that sees L / 4 tokens: the last ones, and first ones as sinks."""
        past = self.length // 4 - sinks - 1
        if past < 0:
            raise ValueError(
                f"methods: {sinks} sinks need a trained length above {4 * sinks + 3}, got "
                f"{self.length}."
            )
        scheme = pe.streaming(self.rope, sinks) if sinks else self.rope
        return pe.LayerSpec(scheme, window=(past, 0))


def _group(trained: Trained, target: int) -> int:
    """The smallest power of two G with (L - W) G + W >= N, for W = L / 4.

    >>> [_group(Trained(pe.RoPE(head_dim=64), 8192), n) for n in (8192, 12288, 16384, 24576)]
    [1, 2, 4, 4]
    """
    window, group = trained.length // 4, 1
    while (trained.length - window) * group + window < target:
        group *= 2
    return group


def _factor(trained: Trained, target: int) -> float:
    return max(target / trained.length, 1.0)


METHODS: dict[str, Callable[[Trained, int], pe.LayerSpec]] = {
    "rope": lambda t, n: pe.LayerSpec(t.rope),
    "pi": lambda t, n: t.scaled(pe.PI(_factor(t, n))),
    "ntk": lambda t, n: t.scaled(pe.NTK(_factor(t, n))),
    "ntk_by_parts": lambda t, n: t.scaled(pe.NTKByParts(_factor(t, n), t.length)),
    "yarn": lambda t, n: t.scaled(pe.YaRN(_factor(t, n), t.length)),
    "dynamic_ntk": lambda t, n: t.scaled(pe.DynamicNTK(_factor(t, n), t.length, n)),
    "llama3": lambda t, n: t.scaled(pe.Llama3(_factor(t, n), t.length)),
    "rerope": lambda t, n: t.by(pe.ReRoPE, window=t.length // 4),
    "self_extend": lambda t, n: t.by(pe.SelfExtend, window=t.length // 4, group=_group(t, n)),
    "dual_chunk": lambda t, n: t.by(pe.DualChunk, chunk=3 * t.length // 4, local=t.length // 8),
    "rope_by_length": lambda t, n: t.by(
        pe.RoPEByLength, scaling=pe.DynamicNTK(1.0, t.length, None)
    ),
    "window": lambda t, n: t.recent(0),
    "sinks_1": lambda t, n: t.recent(1),
    "sinks_4": lambda t, n: t.recent(4),
    "sinks_16": lambda t, n: t.recent(16),
}
"""The layer of each method, from what was trained and the target length N."""


def changed(name: str, layer: pe.LayerSpec, length: int, target: int) -> pe.LayerSpec:
    """Returns a layer of any checkpoint as a method has it.

    A layer with a window or chunks of its own stays as it is, and so does one without an encoding,
    but for the methods that are windows.

    Args:
      name: of `METHODS`.
      layer: of the checkpoint.
      length: L, its trained length.
      target: N, the length to which the model shall read.

    Raises:
      ValueError: for a scaling of frequencies that the layer's scheme cannot have.

    >>> layers = pe.LayerSpec(pe.RoPE(head_dim=64), window=512), pe.LayerSpec(pe.RoPE(head_dim=64))
    >>> [changed("window", layer, 8192, 12288).window for layer in layers]
    [512, (2047, 0)]
    >>> changed("ntk", layers[1], 8192, 12288).scheme.scaling
    NTK(factor=1.5)
    """
    scheme: Any = layer.scheme
    windows = name == "window" or name.startswith("sinks_")
    if name == "rope" or layer.window is not None or layer.chunk_size is not None:
        return layer
    if not windows and isinstance(scheme, pe.NoPE):
        return layer
    if not windows and getattr(scheme, "scaling", None) != pe.FrequencyMap():
        raise ValueError(
            f"methods: {name} changes RoPE without scaling, and a layer has {scheme!r}."
        )
    new = METHODS[name](Trained(scheme, length), target)
    return dataclasses.replace(layer, scheme=new.scheme, window=new.window)


def set_method(model: Any, *layers: pe.LayerSpec) -> None:
    """Gives the blocks of an `examples.decoder.Decoder` the schemes and windows of layers.

    One layer is for all blocks. Schemes have no parameters, so the model's are unchanged.
    """
    for block, layer in zip(model.blocks, itertools.cycle(layers), strict=False):
        if block.attention.position != layer.scheme:
            block.attention.encoding = PositionEncoding(layer.scheme, rngs=nnx.Rngs(0))
        block.attention.window = layer.window
