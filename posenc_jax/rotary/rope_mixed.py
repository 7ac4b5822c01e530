r"""RoPE-Mixed: each pair turns by a learned combination of row and column.

    angle of pair p = row f_p + column g_p,        (f_p, g_p) learned, for every layer and set

Axial RoPE sees offsets along the axes only; a pair here has a direction of its own. At the start
it is r_p (sin a, cos a) for the first half of the pairs and the same turned by a quarter for the
second, r_p = theta^(-4p / d) in each half, with one random a per set. Head n of N has the set
n * groups // N, and so have key heads; the authors have N. Frequencies have no weight decay in
their training, and are not shared by layers.

Coordinates are [2, B, T], row and column; [B, T] stands on both.

Paper: Heo et al. Rotary Position Embedding for Vision Transformer. 2024.
https://arxiv.org/abs/2403.13298
Reference code: naver-ai/rope-vit, models/vit_rope.py (init_random_2d_freqs, compute_mixed_cis);
its frequencies [2, ...] have the column first.
"""

import dataclasses
from typing import ClassVar

import jax
import jax.numpy as jnp
import numpy as np

from posenc_jax.angles import cos_sin
from posenc_jax.checks import coordinate_values, require
from posenc_jax.rotary.layouts import check_layout
from posenc_jax.rotary.rotate import apply_rotation
from posenc_jax.scheme import Scheme, Traits


def mixed_frequencies(
    key: jax.Array, head_dim: int, groups: int = 1, theta: float = 10.0
) -> jax.Array:
    """Returns new frequencies, float32 [2, groups, head_dim / 2]: of the row and of the column.

    Raises:
      ValueError: for a head dim that is no multiple of 4, or `theta` not positive.

    >>> mixed_frequencies(jax.random.key(0), 8, groups=3).shape
    (2, 3, 4)
    """
    require(
        head_dim >= 4 and head_dim % 4 == 0,
        f"rope_mixed: head_dim must be a multiple of 4, got {head_dim}.",
    )
    require(theta > 0, f"rope_mixed: theta must be positive, got {theta}.")
    size = theta ** (-4.0 * np.arange(head_dim // 4) / head_dim)
    size = jnp.asarray(np.tile(size, 2), jnp.float32)
    quarter = jnp.asarray(np.repeat([0.0, np.pi / 2], head_dim // 4), jnp.float32)
    angle = jax.random.uniform(key, (groups, 1), maxval=2 * np.pi) + quarter[None]
    return size[None, None] * jnp.stack([jnp.sin(angle), jnp.cos(angle)])


@dataclasses.dataclass(frozen=True)
class RoPEMixed(Scheme):
    """Rotary embedding of images with learned frequencies for both axes (Heo et al. 2024).

    Attributes:
      head_dim: H.
      groups: the number of sets of frequencies; it divides the number of key heads.
      theta: the base of the first frequencies.
      layout: what makes a pair; see `posenc_jax.rotary.layouts`.

    Raises:
      ValueError: for sizes that do not fit, or an unknown layout.

    >>> scheme = RoPEMixed(head_dim=8)
    >>> at, q = pe.grid_coordinates(1, 2, 3), jnp.ones((1, 6, 4, 8))
    >>> scheme.query(scheme.init(jax.random.key(0)), q, at).shape
    (1, 6, 4, 8)
    """

    head_dim: int
    groups: int = 1
    theta: float = 10.0
    layout: str = "interleaved"
    name: ClassVar[str] = "rope_mixed"

    def __post_init__(self):
        check_layout("rope_mixed", self.layout)
        require(self.groups >= 1, f"rope_mixed: groups must be at least 1, got {self.groups}.")
        jax.eval_shape(self.init, jax.random.key(0))

    @property
    def traits(self):
        return Traits(num_axes=2, relative=True)

    def init(self, key):
        """Returns `{"frequencies": [2, groups, H / 2]}`."""
        return {"frequencies": mixed_frequencies(key, self.head_dim, self.groups, self.theta)}

    def query(self, params, q, coordinates, features=None, tables=None):
        """Returns q [B, T, N, H], rotated."""
        count, size = q.shape[2:]
        require(
            size == self.head_dim and count % self.groups == 0,
            f"rope_mixed: the scheme is for head_dim {self.head_dim} and a multiple of "
            f"groups={self.groups} heads, got q or k of shape {q.shape}.",
        )
        at = coordinate_values("rope_mixed", coordinates)
        at = jnp.stack([at, at]) if at.ndim == 2 else at
        require(
            at.ndim == 3 and at.shape[0] == 2,
            f"rope_mixed: coordinates must be [2, B, T] or [B, T], got {at.shape}.",
        )
        (cos, sin), (cos2, sin2) = (
            cos_sin(a[..., None], f) for a, f in zip(at, params["frequencies"], strict=True)
        )
        cos, sin = cos * cos2 - sin * sin2, sin * cos2 + cos * sin2
        return apply_rotation(q, cos, sin, layout=self.layout)

    def key(self, params, k, coordinates, features=None, tables=None):
        """Returns k [B, S, K, H], rotated."""
        return self.query(params, k, coordinates)
