r"""RoPE-Mixed: each pair rotates by a learned combination of row and column.

    angle of pair p = row f_p + column g_p,        (f_p, g_p) learned, for every layer and set

Axial RoPE encodes offsets along the axes only; here each pair has its own direction. Initially
it is r_p (sin a, cos a) for the first half of the pairs and the same rotated by 90 degrees for
the second, r_p = theta^(-4p / d) in each half, with one random a per set. The authors have a set
per head and layer, and train them without weight decay.

Coordinates are [2, B, T], row and column; [B, T] applies to both.

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

from posenc_jax.checks import require
from posenc_jax.schemes.rotary.base import Rotary
from posenc_jax.schemes.rotary.multi_axis import sum_of_axes
from posenc_jax.schemes.scheme import Traits


@dataclasses.dataclass(frozen=True)
class RoPEMixed(Rotary):
    """Rotary embedding of images with learned frequencies for both axes (Heo et al. 2024).

    Attributes:
      head_dim: the head dim, H.
      groups: the number of sets of frequencies for consecutive heads; it divides the number of
        key heads.
      theta: the base of the initial frequencies.
      layout: the dimensions of a pair; see `posenc_jax.schemes.rotary.layouts`.

    Raises:
      ValueError: for H that is not a multiple of 4, `groups` below one, or an unknown layout.

    >>> scheme = RoPEMixed(head_dim=8)
    >>> coordinates, q = pe.grid_coordinates(1, 2, 3), jnp.ones((1, 6, 4, 8))
    >>> scheme.query(scheme.init(jax.random.key(0)), q, coordinates).shape
    (1, 6, 4, 8)
    """

    head_dim: int
    groups: int = 1
    theta: float = 10.0
    layout: str = "interleaved"
    name: ClassVar[str] = "rope_mixed"
    traits: ClassVar = Traits(num_axes=2, relative=True)

    def __post_init__(self):
        super().__post_init__()
        require(
            self.head_dim % 4 == 0,
            f"rope_mixed: head_dim must be a multiple of 4, got {self.head_dim}.",
        )

    def init(self, key):
        """Returns {"frequencies": [2, groups, H / 2]}, of the row and of the column."""
        quarter = self.head_dim // 4
        size = self.theta ** (-4.0 * np.arange(quarter) / self.head_dim)
        size = jnp.asarray(np.tile(size, 2), jnp.float32)
        turn = jnp.asarray(np.repeat([0.0, np.pi / 2], quarter), jnp.float32)
        angle = jax.random.uniform(key, (self.groups, 1), jnp.float32, maxval=2 * np.pi)
        angle = angle + turn[None]
        return {"frequencies": size[None, None] * jnp.stack([jnp.sin(angle), jnp.cos(angle)])}

    def cos_sin(self, params, coordinates):
        return sum_of_axes(coordinates, params["frequencies"])
