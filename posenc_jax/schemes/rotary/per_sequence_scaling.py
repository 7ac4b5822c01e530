r"""RoPE whose frequencies follow the length of each sequence: LongRoPE and dynamic NTK.

    w_p = map(T),     T = the greatest position of the sequence so far, plus one

for each sequence separately: a row of a batch, or a segment of a packed row. T includes the tokens
of the call, so a decode step rotates all keys, cached ones too, by the frequencies of the new T:
keys are cached as projected and rotated at every step. The output of a step equals the output at
the last token of one pass over the same text.

For earlier tokens the two differ: one pass uses the length of the whole text for all tokens,
decoding uses the length so far. This is inherent in the method, and the reason to train on whole
sequences of one length. To make both equal and to cache rotated keys, freeze the length:
`RoPE(scaling=map.frozen(T))`.

transformers chooses by the longest row of a batch, so that the output of a row depends on the
others, and keeps cached keys that were rotated by other frequencies.

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
from posenc_jax.schemes.rotary.base import AttendRotary, check_coordinates
from posenc_jax.schemes.rotary.frequencies import PerSequenceMap, rope_frequencies
from posenc_jax.schemes.rotary.rotate import materialize
from posenc_jax.schemes.rotary.scaling.dynamic_ntk import DynamicNTK
from posenc_jax.schemes.scheme import Traits


def segment_lengths(
    coordinates: jax.Array, segment_ids: jax.Array | None, queried: jax.Array | None
) -> jax.Array:
    """Returns the length of the sequence of each token: its greatest coordinate, plus one.

    The tokens [B, T] include the last of every sequence. Lengths are of the sequences `queried`
    [B, S], and undefined for those not in `segment_ids`; without these, [B, 1] of whole rows.
    """
    if not coordinates.shape[1]:
        return jnp.zeros((coordinates.shape[0], 1), coordinates.dtype)
    if segment_ids is None or queried is None:
        return coordinates.max(1, keepdims=True) + 1

    def longest(ids, coordinates, queried):
        ids, coordinates = jax.lax.sort((ids, coordinates), num_keys=2)
        last = jnp.searchsorted(ids, queried, side="right") - 1
        return coordinates[jnp.maximum(last, 0)] + 1

    run = jax.vmap(longest)
    spec = jax.typeof(queried).sharding.spec
    if any(spec):  # An explicit mesh: rows stay where they are.
        run = jax.sharding.auto_axes(run, out_sharding=spec)
    return run(segment_ids, coordinates, queried)


@dataclasses.dataclass(frozen=True)
class RoPEByLength(AttendRotary):
    """RoPE with frequencies by the length of each sequence (Ding et al. 2024).

    Lengths are read from the queries: in cross attention keys have them too. Layers with
    `chunk_size` refuse the scheme.

    Attributes:
      head_dim, theta, layout, rotary_dim, rotary_start: as in `RoPE`.
      scaling: `LongRoPE(...)` without `long`, or `DynamicNTK(..., length=None)`.

    Raises:
      ValueError: for a map with one length for all sequences, and as `RoPE`.

    >>> scaling = pe.DynamicNTK(factor=2.0, original_max_position=4, length=None)
    >>> q = k = v = jnp.ones((1, 9, 1, 4))
    >>> scheme = RoPEByLength(head_dim=4, scaling=scaling)
    >>> pe.scheme_attention(scheme, {}, q, k, v, is_causal=True)[0].shape
    (1, 9, 1, 4)
    """

    scaling: PerSequenceMap = DynamicNTK(1.0, 2048, None)  # noqa: RUF009, frozen
    name: ClassVar[str] = "rope_by_length"
    traits: ClassVar = Traits(cache_transformed_keys=False, reads_segments=True)

    def __post_init__(self):
        require(
            isinstance(self.scaling, PerSequenceMap) and self.scaling.per_sequence,
            "rope_by_length: scaling must be per sequence, LongRoPE(..., long=None) or "
            f"DynamicNTK(..., length=None), got {self.scaling!r}; RoPE is for other maps.",
        )
        super().__post_init__()

    @property
    def base_frequencies(self):
        """Radians per unit of position in a sequence of one token, float64 [P]."""
        return rope_frequencies(self.num_rotated, self.theta, self.scaling.frozen(1))[0]

    def cos_sin(self, params, coordinates, lengths=None):
        """Returns cosine and sine, with the attention factor, for the lengths of sequences.

        Default: each row is one sequence.
        """
        if lengths is None:
            lengths = segment_lengths(coordinates, None, None)
        dim = self.num_rotated
        frequencies, _ = rope_frequencies(dim, self.theta)
        return self.scaling.cos_sin(coordinates, lengths, frequencies, dim, self.theta)

    def attend(
        self, params, q, k, v, q_coordinates, k_coordinates, q_features, k_features, attention
    ):
        # The last token of each sequence is among the queries, but for cross attention.
        segments = attention.q_segment_ids
        q_lengths = segment_lengths(q_coordinates, segments, attention.q_segment_ids)
        k_lengths = segment_lengths(q_coordinates, segments, attention.k_segment_ids)
        q = self._rotated(params, q, q_coordinates, q_lengths)
        k = self._rotated(params, k, k_coordinates, k_lengths)
        return attention(q, k, v)

    def _rotated(self, params, x, coordinates, lengths):
        coordinates = check_coordinates(self.name, coordinates, 1)
        return self.rotate(x, materialize(*self.cos_sin(params, coordinates, lengths)))
