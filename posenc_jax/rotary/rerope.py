r"""ReRoPE: distances beyond a window stop growing, or grow slowly, or start again.

    g(n) = n                                n < w
    g(n) = restart + leak * (n - w)         n >= w          q_i . k_j turned by g(i - j)

    leak = 0, restart = w (default)    ReRoPE          far keys are all at distance w
    leak = 1/s                         Leaky ReRoPE    far distances are interpolated
    leak = 1, restart = 128            STRING, w = L/3: rarely trained distances are replaced

for a model that was trained with RoPE and reads on beyond that length without training. Far
keys meet a second query: q_i at leak * i + restart - leak * w, k_j at leak * j. Keys are
cached as they come from their projection. All of this is about decoders: keys after a query
count as near.

ReRoPE's authors also multiply q by ln(i + 1) / ln(L), at least 1. STRING's multiply q and k
by 0.1 ln 2 + 1 and see the key at distance w in both views, in prompts but not in steps;
here it is far.

Paper: Su. Rectified Rotary Position Embeddings. 2023. https://kexue.fm/archives/9708
An et al. Why Does the Effective Context Length of LLMs Fall Short? 2024 (STRING).
https://arxiv.org/abs/2410.18745
Reference code: bojone/rerope, rerope_patch.py, leaky_rerope_patch.py; HKUNLP/STRING,
string_for_llama.py.
"""

import dataclasses
import functools
from typing import ClassVar

import jax.numpy as jnp

from posenc_jax.checks import require
from posenc_jax.rotary.frequencies import FrequencyMap
from posenc_jax.rotary.multi_view import attend_views, turn
from posenc_jax.rotary.rope import RoPE, rope_frequencies
from posenc_jax.scheme import Scheme


@dataclasses.dataclass(frozen=True)
class Far:
    """View 1 from a distance on, view 0 before."""

    window: int

    def __call__(self, q, k):
        """Returns int32, 0 or 1."""
        return (q - k >= self.window).astype(jnp.int32)


@dataclasses.dataclass(frozen=True)
class ReRoPE(Scheme):
    """ReRoPE and Leaky ReRoPE (Su 2023), STRING (An et al. 2024).

    Attributes:
      head_dim: H.
      window: w, the distance from which keys are far.
      leak: how much far distances grow per token, from 0 to 1.
      restart: the distance at which far keys begin. Default: `window`.
      theta: the base of the frequencies.
      interleaved: whether a pair is (2p, 2p + 1) instead of (p, p + d/2).
      rotary_dim: d, the number of leading dimensions to rotate; 0 for all.
      scaling: a map of the frequencies, or a tuple of maps.

    Raises:
      ValueError: for sizes out of range, and as `RoPE`.

    >>> q = k = v = jnp.ones((1, 9, 1, 4))
    >>> pe.scheme_attention(ReRoPE(head_dim=4, window=4), {}, q, k, v, is_causal=True)[0].shape
    (1, 9, 1, 4)
    """

    head_dim: int
    window: int = 512
    leak: float = 0.0
    restart: int | None = None
    theta: float = 10000.0
    interleaved: bool = False
    rotary_dim: int = 0
    scaling: FrequencyMap | tuple[FrequencyMap, ...] = FrequencyMap()  # noqa: RUF009, frozen
    name: ClassVar[str] = "rerope"
    relative: ClassVar[bool] = True
    caches_mapped_keys: ClassVar[bool] = False

    def __post_init__(self):
        RoPE(
            head_dim=self.head_dim,
            theta=self.theta,
            rotary_dim=self.rotary_dim,
            scaling=self.scaling,
        )
        require(self.window >= 1, f"rerope: window must be at least 1, got {self.window}.")
        require(0 <= self.leak <= 1, f"rerope: leak must be from 0 to 1, got {self.leak}.")
        require(
            self.restart is None or self.restart >= 0,
            f"rerope: restart must not be negative, got {self.restart}.",
        )

    def attend(self, params, q, k, v, at, rows, cols, attention):
        """Returns the output [B, T, N, V] of the near and the far view."""
        dim = self.rotary_dim or self.head_dim
        require(
            q.shape[-1] == self.head_dim,
            f"rerope: the scheme is for head_dim {self.head_dim}, got q of shape {q.shape}.",
        )
        plain, factor = rope_frequencies(dim, self.theta, self.scaling)
        slow = self.leak * plain
        restart = self.window if self.restart is None else self.restart
        ahead = restart - self.leak * self.window
        turned = functools.partial(turn, factor=factor, interleaved=self.interleaved)
        near = turned(q, at[0], plain), turned(k, at[1], plain)
        far_q = turned(q, at[0], slow, ahead=ahead, ahead_frequencies=plain)
        views = near, (far_q, turned(k, at[1], slow))
        return attend_views("rerope", views, v, Far(self.window), attention, relative=True)
