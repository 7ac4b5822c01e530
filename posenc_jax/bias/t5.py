r"""T5 bias: a learned number per head and bucket of distances.

    logits[n, i, j] = q_i . k_j * scale + table[n, bucket(i - j)]

Near distances have a bucket each; from half of the buckets on, buckets grow
logarithmically up to `max_distance`, beyond which all distances share the last one.
Bidirectional: the first half of the buckets is for keys at or before the query, the
second for keys after it. (Bucket num_buckets/2 is then never used: distance 0 belongs to
the first half. The authors' table has the row all the same.)

The authors find the bucket with a float32 logarithm, we in integers: see `bias.buckets`.

T5 does not divide q . k by sqrt(H); its initialisation makes up for that. This scheme says
so in `logit_scale`. One table serves all layers of a stack; umT5 has one per layer.

Paper: Raffel et al. Exploring the Limits of Transfer Learning with a Unified Text-to-Text
Transformer. 2019. https://arxiv.org/abs/1910.10683
Reference code: tensorflow/mesh, mesh_tensorflow/transformer/transformer_layers.py,
_relative_position_bucket.
"""

import dataclasses
from typing import ClassVar

import jax

from posenc_jax.bias.buckets import Bucket, check_buckets, t5_boundaries
from posenc_jax.checks import require
from posenc_jax.rules import LogitBias
from posenc_jax.scheme import Scheme, Traits


@dataclasses.dataclass(frozen=True)
class _Rule:
    bucket: Bucket

    def __call__(self, shared, table, q, k):
        return table[self.bucket(q - k)]


@dataclasses.dataclass(frozen=True)
class T5(Scheme):
    """T5's bucketed relative bias (Raffel et al. 2019).

    Attributes:
      num_heads: N.
      num_buckets: number of buckets, for both directions together.
      max_distance: where the last bucket begins, at the latest.
      bidirectional: whether keys after the query have buckets of their own (encoders).
      stddev: of the initial table; 0 starts without a bias.

    Raises:
      ValueError: for sizes that leave no logarithmic buckets.

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

    def __post_init__(self):
        require(self.num_heads >= 1, f"t5: num_heads must be >= 1, got {self.num_heads}.")
        require(self.stddev >= 0, f"t5: stddev must not be negative, got {self.stddev}.")
        check_buckets(self.num_buckets, self.max_distance, self.bidirectional)

    @property
    def traits(self):
        return Traits(relative=True, shared_over_layers=True)

    def init(self, key):
        """Returns {"table": float32 [N, num_buckets]}."""
        shape = (self.num_heads, self.num_buckets)
        return {"table": self.stddev * jax.random.normal(key, shape)}

    def rules(self, params, q_features=None, k_features=None):
        """Returns the entry of each distance's bucket."""
        bucket = Bucket(self.num_buckets, self.max_distance, self.bidirectional)
        one_sided = self.num_buckets // (2 if self.bidirectional else 1)
        far = t5_boundaries(one_sided, self.max_distance)[-1]
        low = -far if self.bidirectional else 0
        return LogitBias(_Rule(bucket), heads=params["table"], relative=True, bounds=(low, far))

    def logit_scale(self, head_dim):
        """Returns 1: T5 does not divide by sqrt(H)."""
        return 1.0
