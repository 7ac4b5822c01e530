r"""Self-Extend: exact distances to near keys, distances of groups of tokens to far keys.

    g(i, j) = i - j                                  i - j < W
    g(i, j) = i // G - j // G + W - W / G            i - j >= W

Groups of G tokens share a position, which extends the context of a model trained with RoPE about
G times without training. The far distance is not a function of i - j alone. W / G is a true
division: where G does not divide W, far positions are fractions. The flash-attention decode step
of the reference code rounds it down, and then differs from its prompts.

Far keys have a second rotated query; keys are cached as projected. The scheme is for decoders:
keys after a query count as near. The authors may also multiply q by ln(i + 1) / ln(L), at least 1.

Paper: Jin et al. LLM Maybe LongLM: Self-Extend LLM Context Window Without Tuning. 2024.
https://arxiv.org/abs/2401.01325
Reference code: datamllab/LongLM, self_extend_patch/Llama.py (self_extend_forward).
"""

import dataclasses
from typing import ClassVar

from posenc_jax.checks import positive_fields
from posenc_jax.schemes.rotary.two_range import Far, RangeRotary


@dataclasses.dataclass(frozen=True)
class SelfExtend(RangeRotary):
    """Self-Extend (Jin et al. 2024).

    Attributes:
      head_dim, theta, layout, rotary_dim, rotary_start, scaling: as in `RoPE`.
      window: W, the distance from which keys are far. For models trained at L = 4096 the authors
        take 512 to 1536.
      group: G, the number of tokens that share a far position. The farthest of N keys is then at
        distance W + (N - W) / G, which the authors keep below L / 2 to 2 L / 3.

    Raises:
      ValueError: for a window or group below one, and as `RoPE`.

    >>> q = k = v = jnp.ones((1, 9, 1, 4))
    >>> scheme = SelfExtend(head_dim=4, window=4, group=2)
    >>> pe.scheme_attention(scheme, {}, q, k, v, is_causal=True)[0].shape
    (1, 9, 1, 4)
    """

    window: int = 1024
    group: int = 8
    name: ClassVar[str] = "self_extend"

    def __post_init__(self):
        super().__post_init__()
        positive_fields(self, "window", "group")

    def attend(
        self, params, q, k, v, q_coordinates, k_coordinates, q_features, k_features, attention
    ):
        offset = self.window - self.window / self.group
        near = self.rotated(q, q_coordinates), self.rotated(k, k_coordinates)
        far = (
            self.rotated(q, q_coordinates // self.group, offset=offset),
            self.rotated(k, k_coordinates // self.group),
        )
        return self.attend_ranges((near, far), v, Far(self.window), attention, relative=True)
