r"""LieRE: blocks of dimensions rotate by exponentials of learned matrices, one for each axis.

    x_b -> exp(sum_a position_a A[a, b]) x_b,      A[a, b] = U - U^T, U above the diagonal

for each block b of `size` neighbouring dimensions. Matrices of different axes do not commute:
logits depend on both positions, not on the offset alone. In blocks of two they commute, and the
scheme is RoPE-Mixed with another initialisation: U is uniform in [0, 2 pi), for positions from 0
to 1 across an image, float32 [2, B, T]. Coordinates [B, T] apply to both axes.

The authors have one set of matrices, or one per head. Blocks of two have exact angles at any int32
position. For larger ones the exponential is computed from the eigenvectors of a float32 matrix per
token, whose error grows with its norm: 1e-7 per radian. An incomplete last block is left unchanged,
as in their code.

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

from posenc_jax.checks import positive_fields, require
from posenc_jax.schemes.rotary.base import check_coordinates, check_heads
from posenc_jax.schemes.rotary.multi_axis import sum_of_axes
from posenc_jax.schemes.rotary.rotate import materialize, rotate_pairs
from posenc_jax.schemes.scheme import Scheme, Traits


def _planes(skew):
    """Returns rates [..., size] and planes [..., size, size] of rotation."""
    return jnp.linalg.eigh(jax.lax.complex(jnp.zeros_like(skew), skew))


@jax.custom_jvp
def _exponential(skew):
    """Returns exp of skew-symmetric matrices [..., size, size], differentiable at equal rates."""
    rates, planes = _planes(skew)
    rotated = planes * jnp.exp(jax.lax.complex(jnp.zeros_like(rates), -rates))[..., None, :]
    return jnp.matmul(rotated, planes.conj().mT, precision="highest").real


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
      head_dim: the head dim, H.
      size: the number of dimensions of a block.
      groups: the number of sets of matrices for consecutive heads; it divides the number of key
        heads.

    Second derivatives of blocks larger than 2 are NaN where rates are equal, as at position 0.

    Raises:
      ValueError: for a size outside of [2, H], or `groups` below one.

    >>> LieRE(head_dim=8, size=4).init(jax.random.key(0))["upper"].shape
    (2, 1, 2, 6)
    """

    head_dim: int
    size: int = 2
    groups: int = 1
    name: ClassVar[str] = "liere"
    traits: ClassVar = Traits(num_axes=2)

    def __post_init__(self):
        positive_fields(self, "head_dim", "size", "groups")
        require(
            2 <= self.size <= self.head_dim,
            f"liere: size must be in [2, head_dim={self.head_dim}], got {self.size}.",
        )

    def init(self, key):
        """Returns {"upper": [2, groups, blocks, size (size - 1) / 2]}, the rows of U."""
        entries = self.size * (self.size - 1) // 2
        shape = (2, self.groups, self.head_dim // self.size, entries)
        return {"upper": jax.random.uniform(key, shape, jnp.float32, maxval=2 * math.pi)}

    def tables(self, params, coordinates):
        """Returns cosine and sine for blocks of two, else rotations [B, T, G, blocks, ...]."""
        coordinates = check_coordinates(self.name, coordinates, 2)
        upper = params["upper"]
        if self.size == 2:
            return materialize(*sum_of_axes(coordinates, upper[..., 0]))
        entry = jnp.triu_indices(self.size, 1)
        matrix = jnp.zeros((*upper.shape[:3], self.size, self.size), jnp.float32)
        matrix = matrix.at[..., *entry].set(upper)
        matrix = (matrix - matrix.mT)[:, None, None]
        both = jnp.broadcast_to(coordinates.astype(jnp.float32), (2, *coordinates.shape[-2:]))
        row, column = both[..., None, None, None, None]
        return _exponential(row * matrix[0] + column * matrix[1])

    def query(self, params, q, coordinates, features=None, tables=None):
        check_heads(self.name, q, self.head_dim, self.groups)
        tables = self.tables(params, coordinates) if tables is None else tables
        if self.size == 2:
            return rotate_pairs(q, *tables, layout="interleaved_negative", start=0)
        batch, length, heads = q.shape[:3]
        part = self.head_dim // self.size * self.size
        split = (batch, length, heads, part // self.size, self.size)
        x = q[..., :part].astype(jnp.float32).reshape(split)
        x = x.reshape(batch, length, self.groups, heads // self.groups, *split[3:])
        x = jnp.einsum("btgisr,btgnir->btgnis", tables, x, precision="highest")
        x = x.reshape(split).reshape(batch, length, heads, part).astype(q.dtype)
        return jnp.concatenate([x, q[..., part:]], -1)

    def key(self, params, k, coordinates, features=None, tables=None):
        return self.query(params, k, coordinates, features, tables)
