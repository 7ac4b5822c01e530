r"""RoPE with learned frequencies.

    w'[g, p] = w_p exp(alpha[g, p] / alpha_scale),     alpha = 0 at first

for the w_p of RoPE, after `scaling`, and the set g of a head. Frequencies stay positive, and
queries and keys of a head share them, so that logits depend on the distance alone.

LeRoPE has one learned number per frequency, and Mistral-Large-4 ships it with one set per layer, on
top of `YaRN`. Mistral's code loads alpha from checkpoints and does not train it. The commuting
GRAPE-M has one set, or one per head, rotates by the negative angle (`layout="half_negative"`), and
stores 16 ln w', which is `alpha_scale=16`: a larger scale learns more slowly.

Frequencies are float32, and angles are exact for these at any int32 position.

Paper: Zhang et al. Group Representational Position Encoding. 2025.
https://arxiv.org/abs/2512.07805. LeRoPE: Learnable RoPE Frequencies Improve Language Modeling.
2026. https://arxiv.org/abs/2607.10134
Reference code: model-architectures/GRAPE, model/llama-mha-grape-m-nonctx.py;
huggingface/transformers, models/mistral_large4/modeling_mistral_large4.py.
"""

import dataclasses
from typing import ClassVar

import jax
import jax.numpy as jnp

from posenc_jax.angles import cos_sin
from posenc_jax.checks import positive
from posenc_jax.schemes.rotary.base import ScalableRotary


@dataclasses.dataclass(frozen=True)
class LearnedRoPE(ScalableRotary):
    """RoPE with learned frequencies (Zhang et al. 2025, LeRoPE, and Mistral-Large-4).

    Attributes:
      head_dim, theta, layout, rotary_dim, rotary_start, scaling: as in `RoPE`, for the initial
        frequencies.
      groups: the number of sets of frequencies for consecutive heads; it divides the number of
        key heads.
      alpha_scale: the divisor of alpha.

    Raises:
      ValueError: as `RoPE`, for fewer than one set, or a scale that is not positive.

    >>> LearnedRoPE(head_dim=8, groups=2).init(jax.random.key(0))["alpha"].shape
    (2, 4)
    """

    groups: int = 1
    alpha_scale: float = 1.0
    name: ClassVar[str] = "learned_rope"

    def __post_init__(self):
        super().__post_init__()
        positive("learned_rope", alpha_scale=self.alpha_scale)

    def init(self, key):
        """Returns {"alpha": zeros [groups, P]}."""
        return {"alpha": jnp.zeros((self.groups, self.num_rotated // 2), jnp.float32)}

    def frequencies(self, params) -> jax.Array:
        """Returns radians per position, float32 [groups, P]."""
        base = jnp.asarray(self.base_frequencies, jnp.float32)
        return base[None] * jnp.exp(params["alpha"].astype(jnp.float32) / self.alpha_scale)

    def cos_sin(self, params, coordinates):
        return cos_sin(coordinates[..., None], self.frequencies(params))
