r"""xPos: RoPE that also shrinks with the distance, fast pairs more than slow ones.

    q at m -> z^(m / b) R_m q,       k at n -> z^(-n / b) R_n k
    z_p = (2p + gamma d) / (d + gamma d),    b = scale_base,    p = 0 .. d/2 - 1

so that the part of pair p in q . k is multiplied by z_p^((m - n) / b), at most 1 for keys in the
past. It is for causal attention: later keys would weigh more than near ones.

The two factors alone are not what to compute: z^(-m / b) leaves float16 at position 4500 and
float32 at 36000. Only their product counts, so m and n may be counted from any common origin. The
authors take the middle of the keys that there are, which moves while decoding; a key cached
with its factor is then wrong by every step since. Here the origin is the greatest coordinate so
far, kept per row, and keys are cached without rotation: the factor of a key never exceeds 1, and
positions and decoding may go as far as int32 does. What remains is the queries of one call: they
must lie within 30000 coordinates (4000 in float16), or their output is NaN; longer prompts go in
chunks.

Paper: Sun et al. A Length-Extrapolatable Transformer. 2022. https://arxiv.org/abs/2212.10554
Reference code: microsoft/torchscale, torchscale/component/xpos_relative_position.py.
"""

import dataclasses
from typing import ClassVar

import jax
import jax.numpy as jnp
import numpy as np

from posenc_jax.angles import cos_sin
from posenc_jax.checks import coordinate_values, require
from posenc_jax.rotary.frequencies import rope_frequencies
from posenc_jax.rotary.layouts import check_layout
from posenc_jax.rotary.rotate import apply_rotation
from posenc_jax.scheme import Scheme, Traits


def xpos_decay(dim: int, scale_base: float = 512.0, gamma: float = 0.4) -> np.ndarray:
    """Returns by how much the logarithm of each pair falls per position, float64 [dim / 2].

    Raises:
      ValueError: for `scale_base` or `gamma` not positive.

    >>> np.exp(-512 * xpos_decay(4))
    array([0.28571429, 0.64285714])
    """
    require(scale_base > 0, f"xpos: scale_base must be positive, got {scale_base}.")
    require(gamma > 0, f"xpos: gamma must be positive, got {gamma}.")
    return -np.log((np.arange(0, dim, 2) + gamma * dim) / (dim + gamma * dim)) / scale_base


@dataclasses.dataclass(frozen=True)
class XPos(Scheme):
    """Extrapolatable position embedding (Sun et al. 2022).

    Attributes:
      head_dim: H.
      theta: the base of the frequencies.
      scale_base: b; the larger, the slower q . k decays.
      gamma: how much the slowest decay differs from the fastest.
      layout: what makes a pair; see `posenc_jax.rotary.layouts`.

    Raises:
      ValueError: for an odd head dim, an unknown layout, or numbers that are not positive.

    >>> at, x = jnp.array([[10**6, 10**6 + 512]]), jnp.ones((1, 2, 1, 2))
    >>> k = XPos(head_dim=2).key({}, x, at)  # The older one weighs 0.2857.
    >>> round(float(jnp.linalg.norm(k[0, 0]) / jnp.linalg.norm(k[0, 1])), 4)
    0.2857
    """

    head_dim: int
    theta: float = 10000.0
    scale_base: float = 512.0
    gamma: float = 0.4
    layout: str = "interleaved"
    name: ClassVar[str] = "xpos"

    def __post_init__(self):
        check_layout("xpos", self.layout)
        rope_frequencies(self.head_dim, self.theta)
        xpos_decay(self.head_dim, self.scale_base, self.gamma)

    @property
    def traits(self):
        return Traits(relative=True, cache_transformed_keys=False)

    def features(self, params, x, q, k, coordinates, segment_ids, state):
        """Returns the origin for queries and for keys, [B, T], and the state [B]."""
        at = self._coordinates(coordinates)
        origin = at.max(1) if state is None else jnp.maximum(state, at.max(1))
        # Per key too: in a ring only the newest slots are sure to be there.
        every = jnp.broadcast_to(origin[:, None], at.shape)
        return every, every, origin

    def query(self, params, q, coordinates, features=None, tables=None):
        """Returns q [B, T, N, H], rotated and scaled from the origin `features`."""
        return self._turn(q, coordinates, features, -1)

    def key(self, params, k, coordinates, features=None, tables=None):
        """Returns k [B, S, K, H], rotated and scaled from the greatest origin in `features`."""
        return self._turn(k, coordinates, features, 1)

    def _coordinates(self, coordinates: jax.Array) -> jax.Array:
        at = coordinate_values("xpos", coordinates)
        require(at.ndim == 2, f"xpos: coordinates must be [B, T], got {at.shape}.")
        return at

    def _turn(self, x, coordinates, origin, sign):
        require(
            x.shape[-1] == self.head_dim,
            f"xpos: the scheme is for head_dim {self.head_dim}, got q or k of shape {x.shape}.",
        )
        at = self._coordinates(coordinates)
        since = at - (at if origin is None else origin).max(1, keepdims=True)
        decay = xpos_decay(self.head_dim, self.scale_base, self.gamma)
        decay = jnp.asarray(sign * decay, jnp.float32)
        scale = jnp.exp(since.astype(jnp.float32)[..., None] * decay[None, None])
        cos, sin = cos_sin(at, rope_frequencies(self.head_dim, self.theta)[0])
        return apply_rotation(x, scale * cos, scale * sin, layout=self.layout)
