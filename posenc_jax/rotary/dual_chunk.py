r"""Dual chunk attention: no distance is ever longer than a chunk.

    g(i, j) = i % c - j % c                      same chunk of c tokens
    g(i, j) = min(i % c + c, C) - j % c          the chunk before: exact for near keys
    g(i, j) = min(2c - 1, C) - j % c             any earlier chunk

with C = `chunk` and c = C - `local`: the last `local` tokens before a query are at their
own distance even where a chunk ends between. A model trained with RoPE at a length above C
(the authors take C = 3/4 of it, and local = 1/8) reads on without training.

A key is turned by j % c in all three views, so keys are cached turned. All of this is about
decoders. Released code divides positions by a linear factor, which is `scaling=PI(...)`,
and multiplies q and k by 0.05 ln(T / L) + 1 where T is the longest sequence that the module
ever saw: results depend on earlier calls. The paper's results are without; so are these.

Paper: An et al. Training-Free Long-Context Scaling of Large Language Models. 2024.
https://arxiv.org/abs/2402.17463
Reference code: HKUNLP/ChunkLlama, chunkllama_attn_replace.py.
"""

import dataclasses
from typing import ClassVar

import jax.numpy as jnp

from posenc_jax.checks import require
from posenc_jax.rotary.frequencies import FrequencyMap
from posenc_jax.rotary.two_range import attend_views, rope_of, turn
from posenc_jax.scheme import Scheme


@dataclasses.dataclass(frozen=True)
class ChunksBetween:
    """How many chunks a key is before its query: 0, 1, or 2 for more."""

    length: int

    def __call__(self, q, k):
        """Returns int32, 0 to 2."""
        return jnp.clip(q // self.length - k // self.length, 0, 2).astype(jnp.int32)


@dataclasses.dataclass(frozen=True)
class DualChunk(Scheme):
    """Dual chunk attention (An et al. 2024).

    Attributes:
      head_dim: H.
      chunk: C, the longest distance.
      local: how many tokens before a query are at their own distance in any case.
      theta: the base of the frequencies.
      layout: what makes a pair; see `posenc_jax.rotary.layouts`.
      rotary_dim: d, the number of dimensions to rotate; 0 for all from `rotary_start` on.
      rotary_start: the first of them.
      scaling: a map of the frequencies, or a tuple of maps.

    Raises:
      ValueError: unless 0 < local < chunk, and as `RoPE`.

    >>> q = k = v = jnp.ones((1, 9, 1, 4))
    >>> scheme = DualChunk(head_dim=4, chunk=6, local=2)
    >>> pe.scheme_attention(scheme, {}, q, k, v, is_causal=True)[0].shape
    (1, 9, 1, 4)
    """

    head_dim: int
    chunk: int = 3072
    local: int = 512
    theta: float = 10000.0
    layout: str = "half"
    rotary_dim: int = 0
    rotary_start: int = 0
    scaling: FrequencyMap | tuple[FrequencyMap, ...] = FrequencyMap()  # noqa: RUF009, frozen
    name: ClassVar[str] = "dual_chunk"

    def __post_init__(self):
        rope_of(self)
        require(
            0 < self.local < self.chunk,
            f"dual_chunk: local must be from 1 to chunk - 1, got local={self.local} and "
            f"chunk={self.chunk}.",
        )

    def key(self, params, k, coordinates, features=None, tables=None):
        """Returns k [B, S, K, H], turned by its place in its chunk."""
        return turn(self, k, coordinates % (self.chunk - self.local))

    def attend(
        self, params, q, k, v, q_coordinates, k_coordinates, q_features, k_features, attention
    ):
        """Returns the output [B, T, N, V] of the three views."""
        length = self.chunk - self.local
        inside = q_coordinates % length
        last = jnp.full_like(inside, min(2 * length - 1, self.chunk))
        places = inside, jnp.minimum(inside + length, self.chunk), last
        views = tuple((turn(self, q, place), k) for place in places)
        return attend_views(self.name, views, v, ChunksBetween(length), attention)
