r"""PoPE: content sets the magnitude of a pair, position alone its angle.

    q_c -> softplus(q_c) (cos(m w_c - delta_c), sin(m w_c - delta_c))
    k_c -> softplus(k_c) (cos(n w_c), sin(n w_c)),        w_c = theta^(-c / d)
    q . k = sum_c softplus(q_c) softplus(k_c) cos((m - n) w_c - delta_c)

for each of the d rotated dimensions c, not for pairs: there are d frequencies, and q, k and cached
keys become twice as wide. The angle between q and k depends on content and position in RoPE, and on
position alone in PoPE. delta is a learned phase per head and dimension, clipped to [-2 pi, 0], with
no gradient outside. The reference adds it to the angle of k; subtracting it from the angle of q
gives the same logits for any number of key heads. The factor is 1/sqrt(H) for the H of projections.

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
from posenc_jax.checks import integers, positive, positive_fields, query_heads, require
from posenc_jax.schemes.rotary.base import check_coordinates, check_heads
from posenc_jax.schemes.rotary.frequencies import static_number
from posenc_jax.schemes.rotary.rotate import materialize
from posenc_jax.schemes.scheme import Scheme, Traits


@dataclasses.dataclass(frozen=True)
class PoPE(Scheme):
    """Polar coordinate position embedding (Gopalakrishnan et al. 2025).

    Attributes:
      num_heads: the number of query heads, N.
      head_dim: the head dim, H.
      theta: the base of the frequencies.
      rotary_dim: d, the number of leading dimensions to map. Default: all.
      uniform: whether delta is initially uniform in [-2 pi, 0] instead of zero.

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
    rotary_dim: int | None = None
    uniform: bool = False
    name: ClassVar[str] = "pope"
    traits: ClassVar = Traits(relative=True)

    def __post_init__(self):
        positive_fields(self, "num_heads", "head_dim")
        integers("pope", rotary_dim=self._dim)
        require(
            1 <= self._dim <= self.head_dim,
            f"pope: rotary_dim must be in [1, head_dim={self.head_dim}], got {self.rotary_dim}.",
        )
        static_number("pope", theta=self.theta)
        positive("pope", theta=self.theta)

    @property
    def param_axes(self):
        return {"delta": f"num_heads {'rotary_dim' if self.rotary_dim else 'head_dim'}"}

    def init(self, key):
        """Returns {"delta": [N, d]}."""
        shape = (self.num_heads, self._dim)
        start = jax.random.uniform(key, shape, jnp.float32, -2 * math.pi, 0.0)
        return {"delta": start if self.uniform else jnp.zeros(shape, jnp.float32)}

    def tables(self, params, coordinates):
        """Returns cosine and sine of m w, float32 [B, T, d]."""
        frequencies = self.theta ** (-np.arange(self._dim) / self._dim)
        return materialize(*cos_sin(check_coordinates(self.name, coordinates, 1), frequencies))

    def query(self, params, q, coordinates, features=None, tables=None):
        """Returns q [B, T, N, H + d] in polar form, with delta subtracted from its angle."""
        query_heads("pope", q, self.num_heads, self.head_dim)
        delta = params["delta"].astype(jnp.float32)
        inside = (delta >= -2 * math.pi) & (delta <= 0)
        ends = jax.lax.stop_gradient(jnp.clip(delta, -2 * math.pi, 0.0))
        delta = jnp.where(inside, delta, ends)[None, None]
        cos, sin = self._per_head(params, coordinates, tables)
        c, s = jnp.cos(delta), jnp.sin(delta)
        return self._polar(q, cos * c + sin * s, sin * c - cos * s)

    def key(self, params, k, coordinates, features=None, tables=None):
        """Returns k [B, S, K, H + d] in polar form."""
        check_heads(self.name, k, self.head_dim)
        return self._polar(k, *self._per_head(params, coordinates, tables))

    @property
    def _dim(self):
        return self.head_dim if self.rotary_dim is None else self.rotary_dim

    def _per_head(self, params, coordinates, tables):
        cos, sin = self.tables(params, coordinates) if tables is None else tables
        return cos[:, :, None], sin[:, :, None]

    def _polar(self, x, cos, sin):
        magnitude = jax.nn.softplus(x[..., : self._dim].astype(jnp.float32))
        parts = [(magnitude * cos).astype(x.dtype), (magnitude * sin).astype(x.dtype)]
        return jnp.concatenate([*parts, x[..., self._dim :]], -1)
