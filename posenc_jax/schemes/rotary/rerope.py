r"""ReRoPE: distances beyond a window stop growing, grow slowly, or restart.

    g(n) = n                                n < w
    g(n) = restart + leak * (n - w)         n >= w          q_i . k_j rotated by g(i - j)

    leak = 0, restart = w (default)    ReRoPE          far keys are all at distance w
    leak = 1/s                         Leaky ReRoPE    far distances are interpolated
    leak = 1, restart = 128            STRING, w = L/3: rarely trained distances are replaced

for a model trained with RoPE, to extend its context without training. For far keys q_i is rotated
by leak * i + restart - leak * w and k_j by leak * j. Keys are cached as projected. The scheme is
for decoders: keys after a query count as near.

ReRoPE's authors also multiply q by ln(i + 1) / ln(L), at least 1. STRING's multiply q and k by
0.1 ln 2 + 1 and include the key at distance w in both ranges, in prompts but not in decode steps;
here it is far.

Papers: Su. Rectified Rotary Position Embeddings. 2023. https://kexue.fm/archives/9708
An et al. Why Does the Effective Context Length of LLMs Fall Short? 2024 (STRING).
https://arxiv.org/abs/2410.18745
Reference code: bojone/rerope, rerope_patch.py, leaky_rerope_patch.py; HKUNLP/STRING,
string_for_llama.py.
"""

import dataclasses
from typing import ClassVar

from posenc_jax.checks import integers_from, positive_fields, require
from posenc_jax.schemes.rotary.two_range import Far, RangeRotary
from posenc_jax.schemes.scheme import Traits


@dataclasses.dataclass(frozen=True)
class ReRoPE(RangeRotary):
    """ReRoPE and Leaky ReRoPE (Su 2023), STRING (An et al. 2024).

    Attributes:
      head_dim, theta, layout, rotary_dim, rotary_start, scaling: as in `RoPE`.
      window: w, the distance from which keys are far. For models trained at L = 4096 the authors of
        ReRoPE take 512 in their code and 1024 in their table; STRING's take L / 3.
      leak: growth of far distances per token, from 0 to 1.
      restart: the first distance of far keys. Default: `window`.

    Raises:
      ValueError: for sizes out of range, and as `RoPE`.

    >>> q = k = v = jnp.ones((1, 9, 1, 4))
    >>> pe.scheme_attention(ReRoPE(head_dim=4, window=4), {}, q, k, v, is_causal=True)[0].shape
    (1, 9, 1, 4)
    """

    window: int = 512
    leak: float = 0.0
    restart: int | None = None
    name: ClassVar[str] = "rerope"
    traits: ClassVar = Traits(relative=True, cache_transformed_keys=False)

    def __post_init__(self):
        super().__post_init__()
        positive_fields(self, "window")
        require(0 <= self.leak <= 1, f"rerope: leak must be from 0 to 1, got {self.leak}.")
        integers_from(0, "rerope", restart=self.restart or 0)

    def attend(
        self, params, q, k, v, q_coordinates, k_coordinates, q_features, k_features, attention
    ):
        restart = self.window if self.restart is None else self.restart
        offset = restart - self.leak * self.window
        near = self.rotated(q, q_coordinates), self.rotated(k, k_coordinates)
        far = (
            self.rotated(q, q_coordinates, slope=self.leak, offset=offset),
            self.rotated(k, k_coordinates, slope=self.leak),
        )
        return self.attend_ranges((near, far), v, Far(self.window), attention, relative=True)
