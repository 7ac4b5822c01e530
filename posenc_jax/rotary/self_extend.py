r"""Self-Extend: near keys at their distance, far ones at the distance of their groups.

    g(i, j) = i - j                                  i - j < W
    g(i, j) = i // G - j // G + W - W / G            i - j >= W

Groups of G tokens share a position, so that a model trained with RoPE reads about G times
further without training. The far distance is no function of i - j alone. W / G is a true
division: with G no divisor of W far positions are no integers. The decode step with flash
attention of the reference code rounds it down, and then differs from its own prompt.

Far keys meet a second query; keys are cached as they come from their projection. All of
this is about decoders: keys after a query count as near. The authors may also multiply q
by ln(i + 1) / ln(L), at least 1.

Paper: Jin et al. LLM Maybe LongLM: Self-Extend LLM Context Window Without Tuning. 2024.
https://arxiv.org/abs/2401.01325
Reference code: datamllab/LongLM, self_extend_patch/Llama.py (self_extend_forward).
"""

import dataclasses
from typing import ClassVar

from posenc_jax.checks import require
from posenc_jax.rotary.frequencies import FrequencyMap
from posenc_jax.rotary.rerope import Far
from posenc_jax.rotary.two_range import attend_views, rope_of, turn
from posenc_jax.scheme import Scheme, Traits


@dataclasses.dataclass(frozen=True)
class SelfExtend(Scheme):
    """Self-Extend (Jin et al. 2024).

    Attributes:
      head_dim: H.
      window: W, the distance from which keys are far.
      group: G, the number of tokens that share a far position.
      theta: the base of the frequencies.
      layout: what makes a pair; see `posenc_jax.rotary.layouts`.
      rotary_dim: d, the number of dimensions to rotate; 0 for all from `rotary_start` on.
      rotary_start: the first of them.
      scaling: a map of the frequencies, or a tuple of maps.

    Raises:
      ValueError: for a window or group below one, and as `RoPE`.

    >>> q = k = v = jnp.ones((1, 9, 1, 4))
    >>> scheme = SelfExtend(head_dim=4, window=4, group=2)
    >>> pe.scheme_attention(scheme, {}, q, k, v, is_causal=True)[0].shape
    (1, 9, 1, 4)
    """

    head_dim: int
    window: int = 1024
    group: int = 8
    theta: float = 10000.0
    layout: str = "half"
    rotary_dim: int = 0
    rotary_start: int = 0
    scaling: FrequencyMap | tuple[FrequencyMap, ...] = FrequencyMap()  # noqa: RUF009, frozen
    name: ClassVar[str] = "self_extend"

    def __post_init__(self):
        rope_of(self)
        for name in ("window", "group"):
            value = getattr(self, name)
            require(value >= 1, f"self_extend: {name} must be at least 1, got {value}.")

    @property
    def traits(self):
        return Traits(cache_transformed_keys=False)

    def attend(
        self, params, q, k, v, q_coordinates, k_coordinates, q_features, k_features, attention
    ):
        """Returns the output [B, T, N, V] of the near and the far view."""
        ahead = self.window - self.window / self.group
        near = turn(self, q, q_coordinates), turn(self, k, k_coordinates)
        far_q = turn(self, q, q_coordinates // self.group, ahead=ahead)
        views = near, (far_q, turn(self, k, k_coordinates // self.group))
        return attend_views(self.name, views, v, Far(self.window), attention, relative=True)
