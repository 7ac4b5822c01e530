r"""ComRoPE: blocks of several dimensions turn by learned rotations that commute.

    x_b -> exp(t_b A_b) x_b,       A_b = F_b - F_b^T, [size, size], learned

for each block b of `size` neighbouring dimensions; RoPE is size 2 with fixed A. All t_b A_b of
a block are multiples of one matrix, so rotations commute and logits depend on offsets alone:

    axes="scaled" (default)   t_b = sum_a m[a, b] position_a,   m learned      ComRoPE-LD
    axes="by_block"           t_b = position of axis b modulo A                ComRoPE-AP

A_b is taken apart into its planes of rotation once per call, by the eigenvectors of i A_b, in
place of a matrix exponential per token: angles are then exact at any int32 position. With
`groups` sets of A, head n of N has the set n * groups // N, and so have key heads; the authors
have N. m is shared by heads. Their positions are in [0, 1] for images: give those as float32
coordinates [A, B, T]; [B, T] stands on all axes.

`LieRE`, where each axis has a matrix of its own, does not commute.

Paper: Yu et al. ComRoPE: Scalable and Robust Rotary Position Embedding Parameterized by
Trainable Commuting Angle Matrices. 2025. https://arxiv.org/abs/2506.03737
Reference code: Longin-Yu/ComRoPE, model.py, ComRoPELDAttention and ComRoPEAPAttention.
"""

import dataclasses
from typing import ClassVar

import jax
import jax.numpy as jnp
import numpy as np

from posenc_jax.angles import cos_sin
from posenc_jax.checks import coordinate_values, require
from posenc_jax.scheme import Scheme, Traits


@dataclasses.dataclass(frozen=True)
class ComRoPE(Scheme):
    """Rotary embedding by trainable commuting matrices (Yu et al. 2025).

    Attributes:
      head_dim: H.
      size: the number of dimensions of a block.
      axes: "scaled" or "by_block": how the axes of coordinates share the blocks.
      groups: the number of sets of matrices; it divides the number of key heads.
      init_std: the standard deviation of F at first.

    Raises:
      ValueError: for sizes that do not fit, an unknown choice of axes, or `init_std` not
        positive.

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

    def __post_init__(self):
        require(
            self.size >= 2 and self.head_dim % self.size == 0,
            f"comrope: size={self.size} must be at least 2 and divide head_dim={self.head_dim}.",
        )
        require(
            self.axes in ("scaled", "by_block"),
            f'comrope: axes must be "scaled" or "by_block", got {self.axes!r}.',
        )
        require(
            self.axes == "scaled" or self.head_dim % (2 * self.size) == 0,
            f"comrope: both axes need blocks of size={self.size} in head_dim={self.head_dim}.",
        )
        require(self.groups >= 1, f"comrope: groups must be >= 1, got {self.groups}.")
        require(self.init_std > 0, f"comrope: init_std must be positive, got {self.init_std}.")

    @property
    def traits(self):
        return Traits(num_axes=2, relative=True)

    def init(self, key):
        """Returns {"matrix": [groups, blocks, size, size]}, and "multiplier" [2, blocks]; normal.

        The multiplier is there for scaled axes.
        """
        one, other = jax.random.split(key)
        blocks = self.head_dim // self.size
        shape = (self.groups, blocks, self.size, self.size)
        params = {"matrix": self.init_std * jax.random.normal(one, shape)}
        if self.axes == "scaled":
            params["multiplier"] = jax.random.normal(other, (2, blocks))
        return params

    def query(self, params, q, coordinates, features=None, tables=None):
        """Returns q [B, T, N, H], turned."""
        batch, length, heads, dim = q.shape
        require(
            dim == self.head_dim and heads % self.groups == 0,
            f"comrope: q and k must be [B, T, a multiple of groups={self.groups}, "
            f"{self.head_dim}], got {q.shape}.",
        )
        at = coordinate_values("comrope", coordinates)
        at = jnp.stack([at, at]) if at.ndim == 2 else at
        require(
            at.ndim == 3 and at.shape[0] == 2,
            f"comrope: coordinates must be [2, B, T] or [B, T], got {at.shape}.",
        )
        skew = params["matrix"] - params["matrix"].mT
        rates, planes = jnp.linalg.eigh(jax.lax.complex(jnp.zeros_like(skew), skew))
        # Rates come in pairs of both signs: the positive one of each, and zero if size is odd.
        half, odd = self.size // 2, self.size % 2
        planes = planes[..., half:]
        w = np.array([1.0] * odd + [2.0] * half, np.float32)[(None,) * 4]
        rates = rates[..., half:] * np.array([0.0] * odd + [1.0] * half, np.float32)[None, None]
        cos, sin = self._turn(params, at, rates)
        split = (batch, length, heads, skew.shape[1], self.size)
        x = q.astype(jnp.complex64).reshape(split)  # One axis at a time, for explicit meshes.
        x = x.reshape(batch, length, self.groups, -1, *split[3:])
        x = jnp.einsum("btgnis,gisr->btgnir", x, planes.conj(), precision="highest")
        x = x * jax.lax.complex(w * cos, -w * sin)[:, :, :, None]
        x = jnp.einsum("btgnir,gisr->btgnis", x, planes, precision="highest")
        return x.real.reshape(split).reshape(q.shape).astype(q.dtype)

    def key(self, params, k, coordinates, features=None, tables=None):
        """Returns k [B, S, K, H], turned."""
        return self.query(params, k, coordinates)

    def _turn(self, params, at, rates):
        """Cosine and sine of t times the rates [groups, blocks, size]: [B, T, ...]."""
        if self.axes == "scaled":
            factors = params["multiplier"]
        else:
            count = rates.shape[1]
            factors = jnp.asarray(np.arange(count)[None] % 2 == np.arange(2)[:, None], jnp.float32)
        (cos, sin), (cos2, sin2) = (
            cos_sin(a[..., None, None], f[None, :, None] * rates)
            for a, f in zip(at, factors, strict=True)
        )
        return cos * cos2 - sin * sin2, sin * cos2 + cos * sin2
