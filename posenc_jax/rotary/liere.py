r"""LieRE: blocks of dimensions turn by exponentials of learned matrices, one for each axis.

    x_b -> exp(sum_a position_a A[a, b]) x_b,      A[a, b] = U - U^T, U above the diagonal

for each block b of `size` neighbouring dimensions. Matrices of different axes do not commute:
logits depend on both places, not on the offset alone. In blocks of two they do, and the scheme
is RoPE-Mixed from another start: U is uniform in [0, 2 pi), for positions from 0 to 1 across an
image, float32 [2, B, T]. Coordinates [B, T] stand on both axes.

With `groups` sets of matrices, head n of N has the set n * groups // N, and so have key heads;
the authors have one, or N. Blocks of two have exact angles at any int32 position. Larger ones
go through the eigenvectors of a float32 matrix per token, whose error grows with its norm:
1e-7 per radian. A last block that does not fill the head is left alone, as theirs is.

Paper: Ostmeier et al. LieRE: Lie Rotational Positional Encodings. 2024.
https://arxiv.org/abs/2406.10322
Reference code: StanfordMIMI/LieRE, models/rope_vit.py, LierePositionEncoder; its matrices
have a 0.5 subtracted, which cancels in U - U^T.
"""

import dataclasses
import math
from typing import ClassVar

import jax
import jax.numpy as jnp

from posenc_jax.angles import cos_sin
from posenc_jax.checks import coordinate_values, require
from posenc_jax.rotary.rotate import apply_rotation
from posenc_jax.scheme import Scheme, Traits


def _planes(skew):
    """Rates [..., size] and planes [..., size, size] of rotation."""
    return jnp.linalg.eigh(jax.lax.complex(jnp.zeros_like(skew), skew))


@jax.custom_jvp
def _exponential(skew):
    """exp of skew-symmetric matrices [..., size, size]; it is smooth where planes are not."""
    rates, planes = _planes(skew)
    turned = planes * jnp.exp(jax.lax.complex(jnp.zeros_like(rates), -rates))[..., None, :]
    return jnp.matmul(turned, planes.conj().mT, precision="highest").real


@_exponential.defjvp
def _exponential_slope(primals, tangents):
    rates, planes = _planes(primals[0])
    a, b = rates[..., :, None], rates[..., None, :]
    middle = jnp.exp(jax.lax.complex(jnp.zeros_like(a + b), -(a + b) / 2))
    inside = jnp.einsum(
        "...ji,...jk,...kl->...il", planes.conj(), tangents[0].astype(planes.dtype), planes
    )
    inside = inside * middle * jnp.sinc((a - b) / (2 * math.pi)).astype(planes.dtype)
    slope = jnp.einsum("...ij,...jk,...lk->...il", planes, inside, planes.conj())
    return _exponential(primals[0]), slope.real


@dataclasses.dataclass(frozen=True)
class LieRE(Scheme):
    """Lie rotational position encoding (Ostmeier et al. 2024).

    Attributes:
      head_dim: H.
      size: the number of dimensions of a block.
      groups: the number of sets of matrices; it divides the number of key heads.

    Raises:
      ValueError: for sizes that do not fit.

    >>> LieRE(head_dim=8, size=4).init(jax.random.key(0))["upper"].shape
    (2, 1, 2, 6)
    """

    head_dim: int
    size: int = 2
    groups: int = 1
    name: ClassVar[str] = "liere"

    def __post_init__(self):
        require(
            2 <= self.size <= self.head_dim,
            f"liere: size must be in [2, head_dim={self.head_dim}], got {self.size}.",
        )
        require(self.groups >= 1, f"liere: groups must be >= 1, got {self.groups}.")

    @property
    def traits(self):
        return Traits(num_axes=2)

    def init(self, key):
        """Returns {"upper": [2, groups, blocks, size (size - 1) / 2]}, rows of U one by one."""
        entries = self.size * (self.size - 1) // 2
        shape = (2, self.groups, self.head_dim // self.size, entries)
        return {"upper": jax.random.uniform(key, shape, maxval=2 * math.pi)}

    def query(self, params, q, coordinates, features=None, tables=None):
        """Returns q [B, T, N, H], turned."""
        batch, length, heads, dim = q.shape
        require(
            dim == self.head_dim and heads % self.groups == 0,
            f"liere: q and k must be [B, T, a multiple of groups={self.groups}, {self.head_dim}], "
            f"got {q.shape}.",
        )
        at = coordinate_values("liere", coordinates)
        at = jnp.stack([at, at]) if at.ndim == 2 else at
        require(
            at.ndim == 3 and at.shape[0] == 2,
            f"liere: coordinates must be [2, B, T] or [B, T], got {at.shape}.",
        )
        upper = params["upper"]
        if self.size == 2:
            return self._pairs(q, at, upper[..., 0])
        part = self.head_dim // self.size * self.size
        entry = jnp.triu_indices(self.size, 1)
        matrix = jnp.zeros((*upper.shape[:3], self.size, self.size)).at[..., *entry].set(upper)
        matrix = (matrix - matrix.mT)[:, None, None]
        row, column = at.astype(jnp.float32)[..., None, None, None, None]
        turn = _exponential(row * matrix[0] + column * matrix[1])
        split = (batch, length, heads, part // self.size, self.size)
        x = q[..., :part].astype(jnp.float32).reshape(split)
        x = x.reshape(batch, length, self.groups, -1, *split[3:])
        x = jnp.einsum("btgisr,btgnir->btgnis", turn, x, precision="highest")
        x = x.reshape(split).reshape(batch, length, heads, part).astype(q.dtype)
        return jnp.concatenate([x, q[..., part:]], -1)

    def key(self, params, k, coordinates, features=None, tables=None):
        """Returns k [B, S, K, H], turned."""
        return self.query(params, k, coordinates)

    def _pairs(self, q, at, upper):
        (cos, sin), (cos2, sin2) = (
            cos_sin(a[..., None], f) for a, f in zip(at, upper, strict=True)
        )
        cos, sin = cos * cos2 - sin * sin2, sin * cos2 + cos * sin2
        return apply_rotation(q, cos, sin, layout="interleaved_negative")
