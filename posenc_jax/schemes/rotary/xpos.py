r"""xPos: RoPE whose products decay with the distance, fast pairs more than slow ones.

    q at m -> z^(m / b) R_m q,       k at n -> z^(-n / b) R_n k
    z_p = (2p + gamma d) / (d + gamma d),    b = scale_base,    p = 0 .. d/2 - 1

so that the part of pair p in q . k is multiplied by z_p^((m - n) / b), at most 1 for past keys. It
is for causal attention: keys after the query would have larger weights than near keys.

The factors overflow when computed separately: z^(-m / b) exceeds float16 at position 4500 and
float32 at 36000. Only their product matters, so m and n may be counted from any common origin. The
authors use the middle of the present keys, which moves while decoding, so that the factor of a
cached key is wrong after each step. Here the origin is the greatest coordinate so far of each row
(padding does not count), and keys are cached without rotation: the factor of a key never
exceeds 1 at any int32 position. The queries of one call must lie within 30000 coordinates (4000
in float16), or their output is NaN; give longer prompts in chunks.

Paper: Sun et al. A Length-Extrapolatable Transformer. 2022. https://arxiv.org/abs/2212.10554
Reference code: microsoft/torchscale, torchscale/component/xpos_relative_position.py.
"""

import dataclasses
from typing import ClassVar

import jax
import jax.numpy as jnp
import numpy as np

from posenc_jax.angles import cos_sin
from posenc_jax.checks import positive
from posenc_jax.schemes.rotary.base import Rotary, check_coordinates
from posenc_jax.schemes.rotary.frequencies import static_number
from posenc_jax.schemes.rotary.rotate import materialize
from posenc_jax.schemes.scheme import Traits


def xpos_decay(dim: int, scale_base: float = 512.0, gamma: float = 0.4) -> np.ndarray:
    """Returns the decay rate of each pair per position, -ln(z_p) / b, float64 [dim / 2].

    Raises:
      ValueError: for `scale_base` or `gamma` not positive.

    >>> np.exp(-512 * xpos_decay(4))
    array([0.28571429, 0.64285714])
    """
    static_number("xpos", "scale_base", scale_base)
    static_number("xpos", "gamma", gamma)
    positive("xpos", scale_base=scale_base, gamma=gamma)
    return -np.log((np.arange(0, dim, 2) + gamma * dim) / (dim + gamma * dim)) / scale_base


@dataclasses.dataclass(frozen=True)
class XPos(Rotary):
    """Extrapolatable position embedding (Sun et al. 2022).

    Attributes:
      head_dim: the head dim, H.
      theta: the base of the frequencies.
      scale_base: b; the larger, the slower q . k decays.
      gamma: the larger, the more alike the decay of the pairs.
      layout: the dimensions of a pair; see `posenc_jax.schemes.rotary.layouts`.

    Raises:
      ValueError: for an odd head dim, an unknown layout, or numbers that are not positive.

    >>> positions, x = jnp.array([[10**6, 10**6 + 512]]), jnp.ones((1, 2, 1, 2))
    >>> k = XPos(head_dim=2).key({}, x, positions)  # The older key has 0.2857 of the norm.
    >>> round(float(jnp.linalg.norm(k[0, 0]) / jnp.linalg.norm(k[0, 1])), 4)
    0.2857
    """

    head_dim: int
    theta: float = 10000.0
    scale_base: float = 512.0
    gamma: float = 0.4
    layout: str = "interleaved"
    name: ClassVar[str] = "xpos"
    traits: ClassVar = Traits(relative=True, cache_transformed_keys=False, norm_after=False)

    def __post_init__(self):
        super().__post_init__()
        xpos_decay(self.head_dim, self.scale_base, self.gamma)

    def cos_sin(self, params, coordinates):
        return cos_sin(coordinates, self.base_frequencies)

    def features(self, params, x, q, k, coordinates, segment_ids, state):
        """Returns the origin of each query and key, [B, T], and the state [B].

        Padding has its own coordinate as the origin of its query, which makes its factor 1.
        """
        coordinates = check_coordinates(self.name, coordinates, 1)
        if segment_ids is None:
            segment_ids = jnp.zeros_like(coordinates, jnp.int32)
        tokens = segment_ids >= 0
        lowest = _lowest(coordinates)
        origin = jnp.where(tokens, coordinates, lowest).max(1, initial=lowest)
        origin = jnp.where(tokens.any(1), origin, 0 if state is None else state)
        if state is not None:
            origin = jnp.maximum(state, origin)
        # Per key too: in a ring cache only the newest slots are certain to be present.
        origins = jnp.broadcast_to(origin[:, None], coordinates.shape)
        return jnp.where(tokens, origins, coordinates), origins, origin

    def query(self, params, q, coordinates, features=None, tables=None):
        """Returns q [B, T, N, H], rotated and scaled from the origin `features`."""
        coordinates = check_coordinates(self.name, coordinates, 1)
        if features is None:
            features = coordinates.max(1, keepdims=True, initial=_lowest(coordinates))
        origin = features
        return self._scaled(params, q, coordinates, coordinates - origin, -1, tables)

    def key(self, params, k, coordinates, features=None, tables=None):
        """Returns k [B, S, K, H], rotated and scaled from the greatest origin in `features`."""
        coordinates = check_coordinates(self.name, coordinates, 1)
        origin = coordinates if features is None else features
        origin = origin.max(1, keepdims=True, initial=_lowest(coordinates))
        # Only padding and unused slots are beyond the origin.
        offset = jnp.minimum(coordinates - origin, 0)
        return self._scaled(params, k, coordinates, offset, 1, tables)

    def _scaled(self, params, x, coordinates, offset, sign, tables):
        cos, sin = self.tables(params, coordinates) if tables is None else tables
        decay = xpos_decay(self.head_dim, self.scale_base, self.gamma)
        decay = jnp.asarray(sign * decay, jnp.float32)
        scale = jnp.exp(offset.astype(jnp.float32)[..., None] * decay[None, None])
        return self.rotate(x, materialize(scale * cos, scale * sin))


def _lowest(coordinates: jax.Array) -> float:
    """Returns a number below all coordinates of their dtype."""
    return -jnp.inf if coordinates.dtype == jnp.float32 else jnp.iinfo(jnp.int32).min
