r"""Patterns of layers: which scheme and window each layer of a model has.

Most layers of many models are local, with RoPE and a window; every few layers one is global,
without positions or with a slower RoPE. For `num_layers` layers and head dim H:

    SmolLM3     3 x RoPE(H, 2e6), NoPE
    Cohere 2    3 x RoPE(H, layout="interleaved") in a window of 4096, NoPE
    Llama 4     3 x RoPE(H, 5e5, layout="interleaved") in chunks of 8192,
                QueryTemperature("llama4", 8192)
    Gemma 3     5 x RoPE(H, 1e4) in a window, RoPE(H, 1e6), in larger ones with PI(8.0)
    Gemma 4     5 x RoPE(H, 1e4) in a window, RoPE(H, 1e6, scaling=Proportional(0.25));
                the last layer is global, too

Attention within chunks is attention within segments and a window; `in_chunks` returns both.

DroPE (Gelberg et al. 2025) trains with RoPE, and then briefly with NoPE in its place, in all layers
and at the same length. Beyond that length `QueryTemperature` replaces NoPE. These schemes have no
parameters, so that models with them have states of one structure.

Papers: Yang et al. Rope to Nope and Back Again. 2025. https://arxiv.org/abs/2501.18795
DroPE: https://arxiv.org/abs/2512.12167
Reference code: huggingface/transformers 5.24, configuration_*.py of these models.
"""

import dataclasses
from typing import Literal, get_args

import jax
import jax.numpy as jnp

from posenc_jax.checks import finite, one_of, positive, positive_integers, require
from posenc_jax.engine.mask import SlidingWindow, Window, window_sides
from posenc_jax.qk_norm import QKNorm
from posenc_jax.schemes.scheme import Scheme, call_hint, check_scheme

Mixer = Literal["attention", "linear_attention", "state_space", "convolution", "mlp"]
Sinks = bool | Literal["projected"]


@dataclasses.dataclass(frozen=True)
class LayerSpec:
    """Settings of one attention layer: its scheme, its window, the form of its logits.

    `Attention(position=layer)` takes them. A layer without attention, of a model that has both, has
    `NoPE`, no other setting, and the name of its operation as `mixer`; `Attention` refuses it.

    Attributes:
      scheme: the position encoding.
      window: sliding window, as in `attention`; None: all tokens.
      chunk_size: number of positions in a chunk, if tokens attend within their chunk only. None:
        no chunks.
      scale: the factor on q . k; None: 1/sqrt(H).
      softcap: as in `attention`; None: no cap.
      sinks: whether the softmax includes a logit of each head without a value: True, one that is
        learned (gpt-oss); "projected", one that is projected from each query's token (Inkling-2).
      qk_norm: the normalisation of queries and keys; None: none.
      mixer: the operation that mixes tokens: "attention", "linear_attention", "state_space"
        (Mamba, RG-LRU) or "convolution"; "mlp" for a layer that mixes none (Nemotron-H).

    Raises:
      TypeError: if scheme is not a `Scheme`, or qk_norm no `QKNorm`.
      ValueError, TypeError: for an invalid window, chunk size, scale or softcap.
      ValueError: for an unknown mixer or form of sinks, for chunks with `streaming`, `RoPEByLength`
        or another scheme of `traits.reads_segments`, and for settings of attention with another
        mixer.

    >>> LayerSpec(pe.RoPE(head_dim=8), window=512).window
    512
    """

    scheme: Scheme
    window: Window = None
    chunk_size: int | None = None
    scale: float | None = None
    softcap: float | None = None
    sinks: Sinks = False
    qk_norm: QKNorm | None = None
    mixer: Mixer = "attention"

    def __post_init__(self):
        check_scheme("LayerSpec", self.scheme)
        window_sides(self.window)
        if not isinstance(self.qk_norm, QKNorm | None):
            raise TypeError(f"LayerSpec: qk_norm must be a QKNorm or None, got {self.qk_norm!r}.")
        if self.scale is not None:
            finite("LayerSpec", scale=self.scale)
        if self.softcap is not None:
            positive("LayerSpec", softcap=self.softcap)
        if self.chunk_size is not None:
            positive_integers("LayerSpec", chunk_size=self.chunk_size)
            require(
                not isinstance(self.window, SlidingWindow),
                f"LayerSpec: chunk_size has no SlidingWindow beside it, got {self.window!r}.",
            )
            require(
                not self.scheme.traits.reads_segments,
                "LayerSpec: chunk_size needs a scheme that attends within its window alone, got "
                f"{self.scheme!r}.",
            )
        one_of("LayerSpec", get_args(Mixer), mixer=self.mixer)
        require(
            self.sinks in (False, True, "projected"),
            f"LayerSpec: sinks must be True, False or 'projected', got {self.sinks!r}.",
        )
        others = self.window, self.chunk_size, self.scale, self.softcap, self.qk_norm
        require(
            self.mixer == "attention"
            or not (self.scheme.acts or self.sinks or any(x is not None for x in others)),
            f"LayerSpec: mixer={self.mixer!r} has no settings of attention, got {self!r}.",
        )


def layer_pattern(
    num_layers: int, *pattern: LayerSpec | Scheme, last: LayerSpec | Scheme | None = None
) -> tuple[LayerSpec, ...]:
    """A pattern of layers, repeated from the first layer on.

    Args:
      num_layers: number of layers.
      *pattern: layers in their order; a scheme is a layer that attends to all tokens.
      last: the last layer; None: as in the pattern.

    Returns:
      One layer for each of `num_layers`.

    Raises:
      ValueError: if num_layers is below 1, or the pattern is empty or longer than num_layers.
      TypeError: if an item is neither a layer nor a scheme.

    >>> local = LayerSpec(pe.RoPE(head_dim=8), window=512)
    >>> [layer.window for layer in layer_pattern(6, local, local, pe.NoPE())]
    [512, 512, None, 512, 512, None]
    """
    positive_integers("layer_pattern", num_layers=num_layers)
    require(
        1 <= len(pattern) <= num_layers,
        f"layer_pattern: the pattern must have from 1 to {num_layers} layers, got {len(pattern)}.",
    )
    for x in pattern if last is None else (*pattern, last):
        if not isinstance(x, LayerSpec | Scheme):
            raise TypeError(
                f"layer_pattern: layers must be Schemes or LayerSpecs, got {x!r}{call_hint(x)}."
            )
    layers = [x if isinstance(x, LayerSpec) else LayerSpec(x) for x in pattern]
    repeated = tuple(layers[i % len(layers)] for i in range(num_layers))
    if last is None:
        return repeated
    return (*repeated[:-1], last if isinstance(last, LayerSpec) else LayerSpec(last))


IDS_PER_SEGMENT = 16
"""How many ids `in_chunks` has for a segment: its chunk, modulo 16."""


def in_chunks(
    chunk_size: int, positions: jax.Array, segment_ids: jax.Array | None, window: Window = None
) -> tuple[jax.Array, tuple[int, int]]:
    """Returns `(segment_ids, window)` for attention within chunks of `chunk_size` positions.

    The window limits a query to its chunk and the neighbours, and segments separate the chunks. The
    ids repeat after 16 chunks, so that they stay small for any positions; convolutions over
    segments may have up to 16 C tokens, and schemes with `traits.reads_segments` need other ids.

    >>> in_chunks(4, jnp.arange(10), None)
    (Array([0, 0, 0, 0, 1, 1, 1, 1, 2, 2], dtype=int32), (3, 3))
    """
    positive_integers("in_chunks", chunk_size=chunk_size)
    sides = (s if s >= 0 else chunk_size for s in window_sides(window) or (-1, -1))
    left, right = (min(s, chunk_size - 1) for s in sides)
    chunk = (positions // chunk_size % IDS_PER_SEGMENT).astype(jnp.int32)
    if segment_ids is None:
        return chunk, (left, right)
    # Ids are folded below the greatest prime under 2**27, as 16 of each must fit int32.
    ids = IDS_PER_SEGMENT * (segment_ids.astype(jnp.int32) % (2**27 - 39)) + chunk
    ids = jnp.where(segment_ids < 0, -1, ids)
    return ids, (left, right)
