r"""T5 bias: a learned number per head and bucket of distances.

    logits[n, i, j] = q_i . k_j * scale + table[n, bucket(i - j)]

The first half of the buckets holds one distance each; the others grow logarithmically up to
`max_distance`, beyond which all distances share the last one. Bidirectional: the first half of
the buckets is for keys at or before the query, the second for keys after it. (Bucket
num_buckets/2 is then unused, as distance 0 belongs to the first half; the authors' table
has the row as well.)

The authors compute the bucket with a float32 logarithm. Here the bucket boundaries are integers,
computed on the host with exact arithmetic: distance n is past boundary j when

    (n / exact)^L >= (max_distance / exact)^j,      L = buckets - exact

T5 does not divide q . k by sqrt(H), which its initialisation compensates: its checkpoints need
scale=1.0, which `from_hf` gives. A new layer trains with the default, 1/sqrt(H). The layers of a
stack share one table; umT5 has one per layer.

Paper: Raffel et al. Exploring the Limits of Transfer Learning with a Unified Text-to-Text
Transformer. 2019. https://arxiv.org/abs/1910.10683
Reference code: tensorflow/mesh, mesh_tensorflow/transformer/transformer_layers.py,
_relative_position_bucket.
"""

import bisect
import dataclasses
import functools
from typing import ClassVar

import jax
import jax.numpy as jnp

from posenc_jax.checks import (
    integer_positions,
    positive_fields,
    positive_integers,
    require,
)
from posenc_jax.engine.rules import LogitBias
from posenc_jax.schemes.scheme import Scheme, Traits


@functools.cache
def t5_boundaries(num_buckets: int, max_distance: int) -> tuple[int, ...]:
    """Returns the first distance of every bucket but the first, for one direction.

    >>> t5_boundaries(32, 128)[15:19]
    (16, 19, 21, 24)
    """
    exact = num_buckets // 2
    wide = num_buckets - exact

    def past(n, j):
        return n**wide * exact**j >= max_distance**j * exact**wide

    far = (
        bisect.bisect_left(range(max_distance), True, key=functools.partial(past, j=j))
        for j in range(1, wide)
    )
    return (*range(1, exact + 1), *far)


def t5_bucket(
    distance: jax.Array,
    *,
    num_buckets: int = 32,
    max_distance: int = 128,
    bidirectional: bool = False,
) -> jax.Array:
    """Returns the bucket of each distance, int32 [...].

    Args:
      distance: query position minus key position, integers [...].
      num_buckets: number of buckets, of both directions together.
      max_distance: distance from which on all are in the last bucket.
      bidirectional: whether keys after the query have their own buckets; otherwise
        they share the bucket of distance 0.

    Raises:
      TypeError: for distances that are not integers.
      ValueError: for sizes that leave no logarithmic buckets.

    >>> t5_bucket(jnp.array([0, 15, 16, 19, 112, 113, 5000]))
    Array([ 0, 15, 16, 17, 30, 31, 31], dtype=int32)
    """
    distance = integer_positions("t5", distance, "distance")
    distance = jnp.maximum(distance, -jnp.iinfo(jnp.int32).max)  # Whose negative fits int32.
    check_buckets(num_buckets, max_distance, bidirectional)
    return Bucket(num_buckets, max_distance, bidirectional)(distance)


@dataclasses.dataclass(frozen=True)
class Bucket:
    """`t5_bucket` as a function of the distance alone."""

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
    positive_integers("t5", num_buckets=num_buckets, max_distance=max_distance)
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


@dataclasses.dataclass(frozen=True)
class _Rule:
    bucket: Bucket

    def __call__(self, shared, table, q, k):
        return table[self.bucket(q - k)]


@dataclasses.dataclass(frozen=True)
class T5(Scheme):
    """T5's bucketed relative bias (Raffel et al. 2019).

    Checkpoints of T5 need a layer with scale=1.0.

    Attributes:
      num_heads: the number of query heads, N.
      num_buckets: number of buckets, of both directions together.
      max_distance: distance from which on all are in the last bucket.
      bidirectional: whether keys after the query have their own buckets (encoders).
      stddev: standard deviation of the initial table; 0 for an initial bias of zero.

    Raises:
      ValueError: for sizes below one or that leave no logarithmic buckets.

    >>> scheme = T5(num_heads=8)
    >>> scheme.init(jax.random.key(0))["table"].shape
    (8, 32)
    """

    num_heads: int
    num_buckets: int = 32
    max_distance: int = 128
    bidirectional: bool = False
    stddev: float = 0.02
    name: ClassVar[str] = "t5"
    param_axes: ClassVar = {"table": "num_heads num_buckets"}

    @property
    def traits(self):
        reason = "keys after the query have the bucket of distance 0; bidirectional=True has others"
        reason = "" if self.bidirectional else reason
        return Traits(relative=True, shared_over_layers=True, causal_only=reason)

    def __post_init__(self):
        positive_fields(self, "num_heads")
        check_buckets(self.num_buckets, self.max_distance, self.bidirectional)

    def init(self, key):
        """Returns {"table": float32 [N, num_buckets]}."""
        shape = (self.num_heads, self.num_buckets)
        return {"table": self.stddev * jax.random.normal(key, shape, jnp.float32)}

    def rules(self, params, q_features=None, k_features=None):
        bucket = Bucket(self.num_buckets, self.max_distance, self.bidirectional)
        one_sided = self.num_buckets // (2 if self.bidirectional else 1)
        last = t5_boundaries(one_sided, self.max_distance)[-1]
        low = -last if self.bidirectional else 0
        return LogitBias(
            _Rule(bucket),
            heads=params["table"],
            relative=True,
            bounds=(low, last),
            drop_far=True,
        )
