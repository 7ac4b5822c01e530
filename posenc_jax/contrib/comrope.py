r"""ComRoPE: blocks of several dimensions rotate by learned matrices that commute.

    x_b -> exp(t_b A_b) x_b,       A_b = F_b - F_b^T, [size, size], learned

for each block b of `size` neighbouring dimensions; RoPE is size 2 with fixed A. All t_b A_b of
a block are multiples of one matrix, so rotations commute and logits depend on offsets alone:

    axes="scaled" (default)   t_b = sum_a m[a, b] position_a,   m learned      ComRoPE-LD
    axes="by_block"           t_b = position of axis b modulo A                ComRoPE-AP

A_b is decomposed into its planes of rotation once per call, by the eigenvectors of i A_b, instead
of a matrix exponential per token: angles are then exact at any int32 position. The authors have a
set of A per head; heads share m. Their positions are in [0, 1] for images: give them as float32
coordinates [2, B, T]; [B, T] applies to both axes. `LieRE` has one matrix per axis, which do not
commute.

Paper: Yu et al. ComRoPE: Scalable and Robust Rotary Position Embedding Parameterized by
Trainable Commuting Angle Matrices. 2025. https://arxiv.org/abs/2506.03737
Reference code: Longin-Yu/ComRoPE, model.py, ComRoPELDAttention and ComRoPEAPAttention.
"""

import dataclasses
from typing import ClassVar

import jax
import jax.numpy as jnp
import numpy as np

from posenc_jax.checks import one_of, positive, positive_fields, require
from posenc_jax.schemes.rotary.base import check_coordinates, check_heads
from posenc_jax.schemes.rotary.multi_axis import sum_of_axes
from posenc_jax.schemes.scheme import Scheme, Traits


@dataclasses.dataclass(frozen=True)
class ComRoPE(Scheme):
    """Rotary embedding by trainable commuting matrices (Yu et al. 2025).

    Attributes:
      head_dim: the head dim, H.
      size: the number of dimensions of a block.
      axes: "scaled" or "by_block": how blocks read the axes of coordinates.
      groups: the number of sets of A for consecutive heads; it divides the number of key heads.
      init_std: the initial standard deviation of F.

    Raises:
      ValueError: for a size that does not divide H, an unknown choice of axes, or `groups` below
        one.

    >>> params = ComRoPE(head_dim=8).init(jax.random.key(0))
    >>> params["matrix"].shape, params["multiplier"].shape
    ((1, 2, 4, 4), (2, 2))
    """

    head_dim: int
    size: int = 4
    axes: str = "scaled"
    groups: int = 1
    init_std: float = 1.0
    name: ClassVar[str] = "comrope"
    traits: ClassVar = Traits(num_axes=2, relative=True)

    def __post_init__(self):
        positive_fields(self, "head_dim", "size", "groups")
        require(
            self.size >= 2 and self.head_dim % self.size == 0,
            f"comrope: size={self.size} must be at least 2 and divide head_dim={self.head_dim}.",
        )
        one_of("comrope", ("scaled", "by_block"), axes=self.axes)
        positive("comrope", init_std=self.init_std)  # At zero, equal rates have no gradient.
        require(
            self.axes == "scaled" or self.head_dim % (2 * self.size) == 0,
            f"comrope: both axes need blocks of size={self.size} in head_dim={self.head_dim}.",
        )

    def init(self, key):
        """Returns {"matrix": [groups, blocks, size, size]}, normal.

        For scaled axes there is "multiplier" [2, blocks] too.
        """
        matrix_key, multiplier_key = jax.random.split(key)
        blocks = self.head_dim // self.size
        shape = (self.groups, blocks, self.size, self.size)
        params = {"matrix": self.init_std * jax.random.normal(matrix_key, shape, jnp.float32)}
        if self.axes == "scaled":
            params["multiplier"] = jax.random.normal(multiplier_key, (2, blocks), jnp.float32)
        return params

    def tables(self, params, coordinates):
        """Returns cosine and sine [B, T, G, blocks, rates], and the planes of rotation."""
        coordinates = check_coordinates(self.name, coordinates, 2)
        matrix = params["matrix"].astype(jnp.float32)
        skew = matrix - matrix.mT
        rates, planes = jnp.linalg.eigh(jax.lax.complex(jnp.zeros_like(skew), skew))
        # Rates come in pairs of opposite sign: the positive one of each, and zero if size is odd.
        half, odd = self.size // 2, self.size % 2
        planes = _orthogonal_to_conjugates(planes[..., half:], odd)
        rates = rates[..., half:] * np.array([0.0] * odd + [1.0] * half, np.float32)[None, None]
        if self.axes == "scaled":
            factors = params["multiplier"]
        else:
            block = np.arange(rates.shape[1])[None]
            factors = jnp.asarray(block % 2 == np.arange(2)[:, None], jnp.float32)
        cos, sin = sum_of_axes(coordinates, factors[:, None, :, None] * rates[None])
        return cos, sin, planes

    def query(self, params, q, coordinates, features=None, tables=None):
        check_heads(self.name, q, self.head_dim, self.groups)
        cos, sin, planes = self.tables(params, coordinates) if tables is None else tables
        half, odd = self.size // 2, self.size % 2
        w = np.array([1.0] * odd + [2.0] * half, np.float32)[(None,) * 4]
        batch, length, heads, _ = q.shape
        split = (batch, length, heads, planes.shape[1], self.size)
        x = q.astype(jnp.complex64).reshape(split)  # One axis at a time, for explicit meshes.
        x = x.reshape(batch, length, self.groups, heads // self.groups, *split[3:])
        x = jnp.einsum("btgnis,gisr->btgnir", x, planes.conj(), precision="highest")
        x = x * jax.lax.complex(w * cos, -w * sin)[:, :, :, None]
        x = jnp.einsum("btgnir,gisr->btgnis", x, planes, precision="highest")
        return x.real.reshape(split).reshape(q.shape).astype(q.dtype)

    def key(self, params, k, coordinates, features=None, tables=None):
        return self.query(params, k, coordinates, features, tables)


def _orthogonal_to_conjugates(planes, odd):
    """Returns eigenvectors of positive rates, orthogonal to their conjugates, of negative rates.

    `eigh` mixes both by the rounding divided by the rate, 1e-5 for small rates; one step of
    symmetric orthogonalisation leaves the rounding alone. The first vector of odd sizes is real but
    for its phase, and stays as it is.
    """
    vectors = planes[..., odd:]
    overlaps = jnp.einsum("gisr,gist->girt", vectors, vectors, precision="highest")
    step = jnp.einsum("gisr,girt->gist", vectors.conj(), overlaps, precision="highest")
    return jnp.concatenate([planes[..., :odd], vectors - 0.5 * step], axis=-1)
