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
from typing import ClassVar

import jax.numpy as jnp

from posenc_jax.checks import require
from posenc_jax.rotary.frequencies import FrequencyMap
from posenc_jax.rotary.two_range import attend_views, rope_of, turn
from posenc_jax.scheme import Scheme, Traits


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
      layout: what makes a pair; see `posenc_jax.rotary.layouts`.
      rotary_dim: d, the number of dimensions to rotate; 0 for all from `rotary_start` on.
      rotary_start: the first of them.
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
    layout: str = "half"
    rotary_dim: int = 0
    rotary_start: int = 0
    scaling: FrequencyMap | tuple[FrequencyMap, ...] = FrequencyMap()  # noqa: RUF009, frozen
    name: ClassVar[str] = "rerope"

    def __post_init__(self):
        rope_of(self)
        require(self.window >= 1, f"rerope: window must be at least 1, got {self.window}.")
        require(0 <= self.leak <= 1, f"rerope: leak must be from 0 to 1, got {self.leak}.")
        require(
            self.restart is None or self.restart >= 0,
            f"rerope: restart must not be negative, got {self.restart}.",
        )

    @property
    def traits(self):
        return Traits(relative=True, cache_transformed_keys=False)

    def attend(
        self, params, q, k, v, q_coordinates, k_coordinates, q_features, k_features, attention
    ):
        """Returns the output [B, T, N, V] of the near and the far view."""
        restart = self.window if self.restart is None else self.restart
        ahead = restart - self.leak * self.window
        near = turn(self, q, q_coordinates), turn(self, k, k_coordinates)
        far_q = turn(self, q, q_coordinates, slow=self.leak, ahead=ahead)
        views = near, (far_q, turn(self, k, k_coordinates, slow=self.leak))
        return attend_views(self.name, views, v, Far(self.window), attention, relative=True)
