r"""RoPE with learned frequencies: each pair may speed up or slow down.

    w'[g, p] = w_p exp(alpha[g, p] / alpha_scale),     alpha = 0 at first

for the w_p of RoPE, after `scaling`. They stay positive, and queries and keys of a head turn
alike, so that logits depend on the distance alone. One set is for all heads (`groups=1`); with
`groups` sets, head n of N has the set n * groups // N, and the same for key heads: it divides
both, and the number of key heads gives each of them its own.

Mistral-Large-4 has one set per layer, on top of `YaRN`. The commuting GRAPE-M
has one or one per head, turns by the negative angle (`layout="half_negative"`), and stores
16 ln w', which is `alpha_scale=16`: a larger scale learns more slowly. Mistral's code does
not train alpha; its checkpoints hold it.

Frequencies are float32 numbers here, and angles are exact for these at any int32 position.

Paper: Zhang et al. Group Representational Position Encoding. 2025.
https://arxiv.org/abs/2512.07805
Reference code: model-architectures/GRAPE, model/llama-mha-grape-m-nonctx.py;
huggingface/transformers, models/mistral_large4/modeling_mistral_large4.py.
"""

import dataclasses
import math
from typing import ClassVar

import jax
import jax.numpy as jnp

from posenc_jax.angles import cos_sin
from posenc_jax.checks import require
from posenc_jax.rotary.frequencies import FrequencyMap, rope_frequencies
from posenc_jax.rotary.layouts import check_layout, rotary_dims
from posenc_jax.rotary.rotate import apply_rotation
from posenc_jax.scheme import Scheme, Traits


@dataclasses.dataclass(frozen=True)
class LearnedRoPE(Scheme):
    """RoPE with learned frequencies (Zhang et al. 2025, and Mistral-Large-4).

    Attributes:
      head_dim: H.
      groups: the number of sets of frequencies; it divides the number of key heads.
      theta: the base of the initial frequencies.
      layout: what makes a pair; see `posenc_jax.rotary.layouts`.
      rotary_dim: the number of dimensions to rotate; 0 for all from `rotary_start` on.
      rotary_start: the first of them.
      scaling: a map of the initial frequencies, or a tuple of maps.
      alpha_scale: what alpha is divided by.

    Raises:
      ValueError: for what `RoPE` refuses, fewer than one set, or a scale not positive.

    >>> LearnedRoPE(head_dim=8, groups=2).init(jax.random.key(0))["alpha"].shape
    (2, 4)
    """

    head_dim: int
    groups: int = 1
    theta: float = 10000.0
    layout: str = "half"
    rotary_dim: int = 0
    rotary_start: int = 0
    scaling: FrequencyMap | tuple[FrequencyMap, ...] = FrequencyMap()  # noqa: RUF009, frozen
    alpha_scale: float = 1.0
    name: ClassVar[str] = "learned_rope"

    def __post_init__(self):
        check_layout(self.name, self.layout)
        require(self.groups >= 1, f"learned_rope: groups must be >= 1, got {self.groups}.")
        require(
            0 < self.alpha_scale < math.inf,
            f"learned_rope: alpha_scale must be positive, got {self.alpha_scale}.",
        )
        self._initial()

    @property
    def traits(self):
        return Traits(relative=True)

    def init(self, key):
        """Returns {"alpha": zeros [groups, P]}."""
        return {"alpha": jnp.zeros((self.groups, len(self._initial()[0])))}

    def frequencies(self, params) -> jax.Array:
        """Returns radians per position, float32 [groups, P]."""
        base = jnp.asarray(self._initial()[0], jnp.float32)
        return base[None] * jnp.exp(params["alpha"] / self.alpha_scale)

    def query(self, params, q, coordinates, features=None, tables=None):
        """Returns q [B, T, N, H], rotated."""
        heads = q.shape[2]
        require(
            q.shape[3] == self.head_dim and heads % self.groups == 0,
            f"learned_rope: q and k must be [B, T, a multiple of groups={self.groups}, "
            f"{self.head_dim}], got {q.shape}.",
        )
        cos, sin = cos_sin(coordinates[..., None], self.frequencies(params))
        factor = self._initial()[1]
        if factor != 1.0:
            cos, sin = factor * cos, factor * sin
        return apply_rotation(q, cos, sin, layout=self.layout, start=self.rotary_start)

    def key(self, params, k, coordinates, features=None, tables=None):
        """Returns k [B, S, K, H], rotated."""
        return self.query(params, k, coordinates)

    def _initial(self):
        dim = rotary_dims(self.name, self.head_dim, self.rotary_dim, self.rotary_start)
        return rope_frequencies(dim, self.theta, self.scaling)
