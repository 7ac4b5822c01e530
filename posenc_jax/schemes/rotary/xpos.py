r"""xPos: RoPE whose products decay with the distance, fast pairs more than slow ones.

    q at m -> z^(m / b) R_m q,       k at n -> z^(-n / b) R_n k
    z_p = (2p + gamma d) / (d + gamma d),    b = scale_base,    p = 0 .. d/2 - 1

so that the part of pair p in q . k is multiplied by z_p^((m - n) / b), at most 1 for past keys. It
is for causal attention: keys after the query would have larger weights than near keys.

The factors overflow when computed separately: z^(-m / b) exceeds float16 at position 4500 and
float32 at 36000. Only their product matters, so m and n may be counted from any common origin. The
authors use the middle of the present keys, which moves while decoding, so that the factor of a
cached key is wrong after each step. Here the origin of a call is the greatest coordinate so far of
the row's last segment (padding does not count), and keys are cached without rotation: the factor of
a key never exceeds 1 at any int32 position. The queries of one call must lie within
80 b / ln(1 + 1 / gamma) coordinates, 30000 by default (4000 in float16), or their output is NaN;
give longer prompts in chunks.

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
from posenc_jax.schemes.rotary.rotate import materialize
from posenc_jax.schemes.scheme import Traits

_GREATEST = 80.0
"""The greatest exponent of a factor: exp(-87) is near the least normal float32."""


def xpos_decay(dim: int, scale_base: float, gamma: float) -> np.ndarray:
    """Returns the decay rate of each pair per position, -ln(z_p) / b, float64 [dim / 2]."""
    positive("xpos", scale_base=scale_base, gamma=gamma)
    return -np.log((np.arange(0, dim, 2) + gamma * dim) / (dim + gamma * dim)) / scale_base


@dataclasses.dataclass(frozen=True)
class XPos(Rotary):
    """Extrapolatable position embedding (Sun et al. 2022).

    The queries of one call must lie within 30000 coordinates by default, 4000 in float16: outputs
    of others are NaN. Give longer prompts to a cache in chunks.

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
    traits: ClassVar = Traits(
        relative=True,
        cache_transformed_keys=False,
        norm_after=False,
        causal_only="q . k grows with the distance to keys after the query",
    )

    def __post_init__(self):
        super().__post_init__()
        xpos_decay(self.head_dim, self.scale_base, self.gamma)

    def cos_sin(self, params, coordinates):
        return cos_sin(coordinates, self.base_frequencies)

    def features(self, params, x, q, k, coordinates, segment_ids, state):
        """Returns the origin of each query, the origin and the age of each key, and the state.

        Features of queries are [B, T]; features of keys are two arrays [B, T], the origin and the
        number of tokens up to the key, so that after `rewind` a new key is the newest one. The
        state is the origin, the last segment and the number of tokens, [B] each. Padding has its
        own coordinate as the origin of its query, which makes its factor 1.
        """
        coordinates = check_coordinates(self.name, coordinates, 1)
        if segment_ids is None:
            segment_ids = jnp.zeros_like(coordinates, jnp.int32)
        tokens, count = segment_ids >= 0, coordinates.shape[1]
        lowest = _lowest(coordinates)
        greatest = jnp.where(tokens, coordinates, lowest).max(1, initial=lowest)
        places = jnp.arange(count)[None]
        last = jnp.where(tokens, places, -1).max(1, keepdims=True, initial=-1)
        segment = jnp.where(places == last, segment_ids, 0).sum(1)
        number, numbers = tokens.sum(1, dtype=jnp.int32), jnp.cumsum(tokens, 1, dtype=jnp.int32)
        if state is None:
            origin = jnp.where(number > 0, greatest, 0)
        else:
            before, of_before, number_before = state
            continues = (tokens & (segment_ids == of_before[:, None])).any(1) & (number_before > 0)
            origin = jnp.where(continues, jnp.maximum(before, greatest), greatest)
            origin = jnp.where(number > 0, origin, before)
            segment = jnp.where(number > 0, segment, of_before)
            number, numbers = number + number_before, numbers + number_before[:, None]
        origins = jnp.broadcast_to(origin[:, None], coordinates.shape)
        state = origin, segment.astype(jnp.int32), number
        return jnp.where(tokens, origins, coordinates), (origins, numbers), state

    def query(self, params, q, coordinates, features=None, tables=None):
        """Returns q [B, T, N, H], rotated and scaled from the origin `features`."""
        coordinates = check_coordinates(self.name, coordinates, 1)
        if features is None:
            features = coordinates.max(1, keepdims=True, initial=_lowest(coordinates))
        origin = features
        return self._scaled(params, q, coordinates, coordinates - origin, -1, tables)

    def key(self, params, k, coordinates, features=None, tables=None):
        """Returns k [B, S, K, H], rotated and scaled from the newest origin in `features`."""
        coordinates = check_coordinates(self.name, coordinates, 1)
        origin, lowest = coordinates, _lowest(coordinates)
        if features is not None:
            origin, numbers = features
            # In a ring cache only the newest slots are certain to be present.
            newest = numbers == numbers.max(1, keepdims=True, initial=0)
            origin = jnp.where(newest, origin, lowest)
        origin = origin.max(1, keepdims=True, initial=lowest)
        # Keys beyond the origin are padding, of another segment, or in unused slots.
        offset = jnp.minimum(coordinates - origin, 0)
        return self._scaled(params, k, coordinates, offset, 1, tables)

    def _scaled(self, params, x, coordinates, offset, sign, tables):
        cos, sin = self.tables(params, coordinates) if tables is None else tables
        decay = xpos_decay(self.head_dim, self.scale_base, self.gamma)
        decay = jnp.asarray(sign * decay, jnp.float32)
        exponent = offset.astype(jnp.float32)[..., None] * decay[None, None]
        # Beyond it, keys underflow before the factors of queries overflow.
        scale = jnp.exp(jnp.where(exponent > _GREATEST, jnp.nan, exponent))
        return self.rotate(x, materialize(scale * cos, scale * sin))


def _lowest(coordinates: jax.Array) -> float:
    """Returns a number below all coordinates of their dtype."""
    return -jnp.inf if coordinates.dtype == jnp.float32 else jnp.iinfo(jnp.int32).min
