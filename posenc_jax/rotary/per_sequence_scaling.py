r"""RoPE whose frequencies follow the length of each sequence: LongRoPE and dynamic NTK.

    w_p = map(T),     T = the greatest position of the sequence so far, plus one

for every sequence by itself: one row of a batch, or one segment of a packed row. Rows do
not depend on their neighbours. T counts the tokens up to those of the call, so that a step
of decoding turns all keys, old ones too, by the frequencies of its own T: keys are cached
as they come from their projection, and turned at every step. The step then equals the last
token of one pass over the same text.

Tokens before it do not: in one pass all of them have the length of the whole, while each
step had its own. That is the method, and why training sees whole sequences of one length.
To have parts equal the whole, and keys cached turned, freeze the length:
`RoPE(scaling=map.frozen(T))`.

transformers chooses by the longest row of a batch, so that a row's numbers depend on its
neighbours, and leaves keys in the cache that were turned by other frequencies.

Papers: Ding et al. LongRoPE. 2024. https://arxiv.org/abs/2402.13753
Dynamic NTK: emozilla, 2023, as written down in Peng et al. YaRN.
https://arxiv.org/abs/2309.00071
Reference code: microsoft/LongRoPE, rope/longrope.py; jquesnelle/yarn,
scaled_rope/LlamaDynamicScaledRotaryEmbedding.py; huggingface/transformers,
modeling_rope_utils.py.
"""

import dataclasses
from typing import ClassVar

import jax
import jax.numpy as jnp

from posenc_jax.checks import require
from posenc_jax.rotary.frequencies import FrequencyMap, rope_frequencies
from posenc_jax.rotary.layouts import rotary_dims
from posenc_jax.rotary.rope import RoPE
from posenc_jax.rotary.rotate import apply_rotation
from posenc_jax.rotary.scaling.dynamic_ntk import DynamicNTK
from posenc_jax.scheme import Scheme, Traits


def segment_lengths(
    coordinates: jax.Array, segments: jax.Array | None, of: jax.Array | None
) -> jax.Array:
    """Returns the length of the sequence of each token: its greatest coordinate, plus one.

    Args:
      coordinates: [B, T], of tokens among which is the last of every sequence.
      segments: their sequences, int32 [B, T]; None if each row is one.
      of: the sequences [B, S] whose lengths are asked for. One that is not among `segments`
        gets the length of another.

    Returns:
      [B, S], or [B, 1] where each row is one sequence.
    """
    if segments is None or of is None:
        return coordinates.max(1, keepdims=True) + 1

    def longest(ids, at, of):
        ids, at = jax.lax.sort((ids, at), num_keys=2)
        last = jnp.searchsorted(ids, of, side="right") - 1
        return at[jnp.maximum(last, 0)] + 1

    run = jax.vmap(longest)
    spec = jax.typeof(of).sharding.spec
    if any(spec):  # An explicit mesh: rows stay where they are.
        run = jax.sharding.auto_axes(run, out_sharding=spec)
    return run(segments, coordinates, of)


@dataclasses.dataclass(frozen=True)
class RoPEByLength(Scheme):
    """RoPE with frequencies by the length of each sequence (Ding et al. 2024).

    Attributes:
      head_dim: H.
      theta: the base of the frequencies.
      layout: what makes a pair; see `posenc_jax.rotary.layouts`.
      rotary_dim: d, the number of dimensions to rotate; 0 for all from `rotary_start` on.
      rotary_start: the first of them.
      scaling: `LongRoPE(..., long=None)` or `DynamicNTK(..., length=None)`.

    Raises:
      ValueError: for a map that does not go by length, and as `RoPE`.

    >>> scaling = pe.DynamicNTK(factor=2.0, original_max_position=4, length=None)
    >>> q = k = v = jnp.ones((1, 9, 1, 4))
    >>> scheme = RoPEByLength(head_dim=4, scaling=scaling)
    >>> pe.scheme_attention(scheme, {}, q, k, v, is_causal=True)[0].shape
    (1, 9, 1, 4)
    """

    head_dim: int
    theta: float = 10000.0
    layout: str = "half"
    rotary_dim: int = 0
    rotary_start: int = 0
    scaling: FrequencyMap = DynamicNTK(1.0, 2048, None)  # noqa: RUF009, frozen
    name: ClassVar[str] = "rope_by_length"

    def __post_init__(self):
        require(
            self.scaling.goes_by_length,
            "rope_by_length: scaling must go by length, LongRoPE(..., long=None) or "
            f"DynamicNTK(..., length=None), got {self.scaling!r}; RoPE is for others.",
        )
        RoPE(
            head_dim=self.head_dim,
            theta=self.theta,
            layout=self.layout,
            rotary_dim=self.rotary_dim,
            rotary_start=self.rotary_start,
            scaling=self.scaling.frozen(1),
        )

    @property
    def traits(self):
        return Traits(cache_transformed_keys=False)

    def _turn(self, x, at, lengths):
        require(
            x.shape[-1] == self.head_dim,
            f"rope_by_length: the scheme is for head_dim {self.head_dim}, got q or k {x.shape}.",
        )
        dim = rotary_dims(self.name, self.head_dim, self.rotary_dim, self.rotary_start)
        plain, _ = rope_frequencies(dim, self.theta)
        cos, sin = self.scaling.cos_sin(at, lengths, plain, dim, self.theta)
        return apply_rotation(x, cos, sin, layout=self.layout, start=self.rotary_start)

    def attend(
        self, params, q, k, v, q_coordinates, k_coordinates, q_features, k_features, attention
    ):
        """Returns the output [B, T, N, V] of attention at the lengths so far."""
        # The newest token of a sequence that any query sees is itself a query.
        segments = attention.q_segment_ids
        q_lengths = segment_lengths(q_coordinates, segments, attention.q_segment_ids)
        k_lengths = segment_lengths(q_coordinates, segments, attention.k_segment_ids)
        q = self._turn(q, q_coordinates, q_lengths)
        k = self._turn(k, k_coordinates, k_lengths)
        return attention(q, k, v)
