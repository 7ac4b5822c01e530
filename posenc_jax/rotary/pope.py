r"""PoPE: content sets the length of a pair, position alone its angle.

    q_c -> softplus(q_c) (cos(m w_c - delta_c), sin(m w_c - delta_c))
    k_c -> softplus(k_c) (cos(n w_c), sin(n w_c)),        w_c = theta^(-c / d)
    q . k = sum_c softplus(q_c) softplus(k_c) cos((m - n) w_c - delta_c)

for each of the d rotated dimensions c, not for pairs: there are d frequencies, q and k become
twice as wide, and so do cached keys. In RoPE the angle between q and k mixes what a token is
with where it is; here it does not. delta is a learned phase per head and dimension, kept in
[-2 pi, 0]; beyond that it has no gradient. The reference adds it to the angle of k; taken from
that of q it gives the same logits, for any number of key heads. The logit scale stays that of
H dimensions.

Paper: Gopalakrishnan et al. Decoupling the "What" and "Where" With Polar Coordinate
Positional Embeddings. 2025. https://arxiv.org/abs/2509.10534
Reference code: lucidrains/PoPE-pytorch, PoPE_pytorch/pope.py; lucidrains/x-transformers.
"""

import dataclasses
import math
from typing import ClassVar

import jax
import jax.numpy as jnp
import numpy as np

from posenc_jax.angles import cos_sin
from posenc_jax.checks import require
from posenc_jax.scheme import Scheme, Traits


@dataclasses.dataclass(frozen=True)
class PoPE(Scheme):
    """Polar coordinate position embedding (Gopalakrishnan et al. 2025).

    Attributes:
      num_heads: N.
      head_dim: H.
      theta: the base of the frequencies.
      rotary_dim: d, the number of leading dimensions that are mapped; 0 for all.
      uniform: whether delta starts uniform in [-2 pi, 0] instead of at zero.

    Raises:
      ValueError: for sizes below one, a rotary dim that exceeds H, or `theta` not positive.

    >>> scheme = PoPE(num_heads=1, head_dim=4)
    >>> q = jnp.ones((1, 3, 1, 4))
    >>> scheme.query(scheme.init(jax.random.key(0)), q, jnp.arange(3)[None]).shape
    (1, 3, 1, 8)
    """

    num_heads: int
    head_dim: int
    theta: float = 10000.0
    rotary_dim: int = 0
    uniform: bool = False
    name: ClassVar[str] = "pope"

    def __post_init__(self):
        for name in ("num_heads", "head_dim"):
            value = getattr(self, name)
            require(value >= 1, f"pope: {name} must be >= 1, got {value}.")
        require(
            0 <= self.rotary_dim <= self.head_dim,
            f"pope: rotary_dim must be in [0, head_dim={self.head_dim}], got {self.rotary_dim}.",
        )
        require(0 < self.theta < math.inf, f"pope: theta must be positive, got {self.theta}.")

    @property
    def traits(self):
        return Traits(relative=True)

    def init(self, key):
        """Returns {"delta": [N, d]}."""
        shape = (self.num_heads, self._dim)
        start = jax.random.uniform(key, shape, minval=-2 * math.pi, maxval=0.0)
        return {"delta": start if self.uniform else jnp.zeros(shape)}

    def query(self, params, q, coordinates, features=None, tables=None):
        """Returns q [B, T, N, H + d] in polar form, turned back by delta."""
        require(
            q.shape[2:] == (self.num_heads, self.head_dim),
            f"pope: q must be [B, T, {self.num_heads}, {self.head_dim}], got {q.shape}.",
        )
        delta = params["delta"]
        inside = (delta >= -2 * math.pi) & (delta <= 0)
        ends = jax.lax.stop_gradient(jnp.clip(delta, -2 * math.pi, 0.0))
        delta = jnp.where(inside, delta, ends)[None, None]
        cos, sin = self._turn(coordinates)
        c, s = jnp.cos(delta), jnp.sin(delta)
        return self._polar(q, cos * c + sin * s, sin * c - cos * s)

    def key(self, params, k, coordinates, features=None, tables=None):
        """Returns k [B, S, K, H + d] in polar form."""
        require(
            k.shape[3] == self.head_dim,
            f"pope: k must be [B, S, K, {self.head_dim}], got {k.shape}.",
        )
        return self._polar(k, *self._turn(coordinates))

    def logit_scale(self, head_dim):
        """Returns 1/sqrt(H), whatever the width of what the logits are made from."""
        return head_dim**-0.5

    @property
    def _dim(self):
        return self.rotary_dim or self.head_dim

    def _turn(self, coordinates):
        frequencies = self.theta ** (-np.arange(self._dim) / self._dim)
        cos, sin = cos_sin(coordinates, frequencies)
        return cos[:, :, None], sin[:, :, None]

    def _polar(self, x, cos, sin):
        length = jax.nn.softplus(x[..., : self._dim].astype(jnp.float32))
        parts = [(length * cos).astype(x.dtype), (length * sin).astype(x.dtype)]
        return jnp.concatenate([*parts, x[..., self._dim :]], -1)
