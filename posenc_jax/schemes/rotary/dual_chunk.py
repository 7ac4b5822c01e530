r"""Dual chunk attention: distances are never longer than a chunk.

    g(i, j) = i % c - j % c                      same chunk of c tokens
    g(i, j) = min(i % c + c, C) - j % c          the chunk before: exact for near keys
    g(i, j) = min(2c - 1, C) - j % c             any earlier chunk

with C = `chunk` and c = C - `local`: the distance to the last `local` tokens before a query is
exact, even across the end of a chunk. This extends the context of a model trained with RoPE at
a length above C without training.

A key is rotated by j % c in all three ranges, so rotated keys are cached. The scheme is for
decoders. Released code divides positions by a linear factor, which is `scaling=PI(...)`, and
multiplies q and k by 0.05 ln(T / L) + 1 where T is the longest sequence that the module has seen:
its results depend on earlier calls. The paper's results are without this, as here. Segment ids of a
row must not differ by multiples of 2**27 - 39.

Paper: An et al. Training-Free Long-Context Scaling of Large Language Models. 2024.
https://arxiv.org/abs/2402.17463
Reference code: HKUNLP/ChunkLlama, chunkllama_attn_replace.py.
"""

import dataclasses
from typing import ClassVar

import jax.numpy as jnp

from posenc_jax.checks import positive_fields, require
from posenc_jax.schemes.layer_spec import in_chunks
from posenc_jax.schemes.rotary.two_range import RangeRotary, keys_before
from posenc_jax.schemes.scheme import Traits


@dataclasses.dataclass(frozen=True)
class ChunksBetween:
    """The number of chunks from a key to its query: 0, 1, or 2 for more."""

    length: int

    def __call__(self, q, k):
        """Returns int32, 0 to 2."""
        return jnp.clip(q // self.length - k // self.length, 0, 2).astype(jnp.int32)

    def calls(self, attention, q, k):
        """Returns causal attention in chunks, to the chunk before, and to all before that."""
        if not attention.is_causal or attention.window is not None:
            return None
        ids, window = in_chunks(self.length, q, attention.q_segment_ids)
        k_ids, _ = in_chunks(self.length, k, attention.k_segment_ids)
        # Ids repeat after 16 chunks: positions go on, so that the window tells these apart.
        by_slot = attention.q_positions is None and attention.q_segment_ids is None
        same = attention.replace(q_segment_ids=ids, k_segment_ids=k_ids, window=window)
        same = same.replace(q_positions=q, k_positions=k, contiguous=by_slot or None)
        count = q % self.length + 1  # Positions back to the chunk before.
        before = keys_before(attention, q, k, count, (self.length - 1, 0))
        return same, before, keys_before(attention, q, k, count + self.length)


@dataclasses.dataclass(frozen=True)
class DualChunk(RangeRotary):
    """Dual chunk attention (An et al. 2024).

    Attributes:
      head_dim, theta, layout, rotary_dim, rotary_start, scaling: as in `RoPE`.
      chunk: C, the longest distance. The authors take 3/4 of the trained length.
      local: the number of tokens before a query whose distance is always exact. The authors take
        1/8 of the trained length.

    Raises:
      ValueError: unless 0 < local < chunk, and as `RoPE`.

    >>> q = k = v = jnp.ones((1, 9, 1, 4))
    >>> scheme = DualChunk(head_dim=4, chunk=6, local=2)
    >>> pe.scheme_attention(scheme, {}, q, k, v, is_causal=True)[0].shape
    (1, 9, 1, 4)
    """

    chunk: int = 3072
    local: int = 512
    name: ClassVar[str] = "dual_chunk"
    traits: ClassVar = Traits(causal_only="distances to keys after the query repeat")

    def __post_init__(self):
        super().__post_init__()
        positive_fields(self, "chunk", "local")
        require(
            self.local < self.chunk,
            f"dual_chunk: local must be from 1 to chunk - 1, got local={self.local} and "
            f"chunk={self.chunk}.",
        )

    def key(self, params, k, coordinates, features=None, tables=None):
        """Returns k [B, S, K, H], rotated by its index in its chunk."""
        return self.rotated(k, coordinates % (self.chunk - self.local))

    def attend(
        self, params, q, k, v, q_coordinates, k_coordinates, q_features, k_features, attention
    ):
        length = self.chunk - self.local
        inside = q_coordinates % length
        last = jnp.full_like(inside, min(2 * length - 1, self.chunk))
        positions = inside, jnp.minimum(inside + length, self.chunk), last
        ranges = tuple((self.rotated(q, x), k) for x in positions)
        return self.attend_ranges(ranges, v, ChunksBetween(length), attention)
