r"""T5's buckets of distances: exact near the query, logarithmic further away.

The authors find the bucket with a float32 logarithm. Here the boundaries are integers, made on
the host by exact arithmetic: distance n is past boundary j when

    (n / exact)^L >= (max_distance / exact)^j,      L = buckets - exact

Paper: Raffel et al. Exploring the Limits of Transfer Learning with a Unified Text-to-Text
Transformer. 2019. https://arxiv.org/abs/1910.10683
Reference code: tensorflow/mesh, mesh_tensorflow/transformer/transformer_layers.py,
_relative_position_bucket.
"""

import dataclasses
import functools

import jax
import jax.numpy as jnp

from posenc_jax.checks import integer_positions, require


@functools.cache
def t5_boundaries(num_buckets: int, max_distance: int) -> tuple[int, ...]:
    """Returns the first distance of every bucket but the first, for one direction.

    >>> t5_boundaries(32, 128)[15:19]
    (16, 19, 21, 24)
    """
    exact = num_buckets // 2
    wide = num_buckets - exact
    bounds = list(range(1, exact + 1))
    for j in range(1, wide):
        n = bounds[-1]
        while n**wide * exact**j < max_distance**j * exact**wide:
            n += 1
        bounds.append(n)
    return tuple(bounds)


def t5_bucket(
    distance: jax.Array,
    *,
    num_buckets: int = 32,
    max_distance: int = 128,
    bidirectional: bool = False,
) -> jax.Array:
    """Returns the bucket, int32 [...], of a distance.

    Args:
      distance: query position minus key position, integers [...].
      num_buckets: number of buckets, for both directions together.
      max_distance: where the last bucket begins, at the latest.
      bidirectional: whether keys after the query have buckets of their own; otherwise
        they share that of distance 0.

    Raises:
      TypeError: for distances that are not integers.
      ValueError: for sizes that leave no logarithmic buckets.

    >>> t5_bucket(jnp.array([0, 15, 16, 19, 112, 113, 5000]))
    Array([ 0, 15, 16, 17, 30, 31, 31], dtype=int32)
    """
    distance = integer_positions("t5", distance, "distance")
    check_buckets(num_buckets, max_distance, bidirectional)
    return Bucket(num_buckets, max_distance, bidirectional)(distance)


@dataclasses.dataclass(frozen=True)
class Bucket:
    """The bucket of a distance; `t5_bucket` says what its settings mean."""

    num_buckets: int
    max_distance: int
    bidirectional: bool

    def __call__(self, distance):
        """Returns int32, shaped as `distance`."""
        one_sided = self.num_buckets // (2 if self.bidirectional else 1)
        n = jnp.abs(distance) if self.bidirectional else jnp.maximum(distance, 0)
        exact = one_sided // 2
        bucket = jnp.minimum(n, exact).astype(jnp.int32)
        for bound in t5_boundaries(one_sided, self.max_distance)[exact:]:
            bucket += (n >= bound).astype(jnp.int32)
        if self.bidirectional:
            bucket += jnp.where(distance < 0, jnp.int32(one_sided), jnp.int32(0))
        return bucket


def check_buckets(num_buckets: int, max_distance: int, bidirectional: bool) -> None:
    """Raises `ValueError` for sizes that leave no logarithmic buckets."""
    sides = 2 if bidirectional else 1
    require(
        num_buckets >= 2 * sides and num_buckets % sides == 0,
        f"t5: num_buckets must be at least {2 * sides} and a multiple of {sides}, "
        f"got {num_buckets}.",
    )
    exact = num_buckets // sides // 2
    require(
        max_distance > exact,
        f"t5: max_distance must exceed the {exact} exact buckets, got {max_distance}.",
    )
