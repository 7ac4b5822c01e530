r"""TUPE: attention between words plus attention between positions, with separate projections.

    logits[n, i, j] = q_i . k_j / sqrt(2H) + (U_Q p_i)_n . (U_K p_j)_n / sqrt(2H)
    p_i = LayerNorm(table[i + 1])

The product of two sums of word and position is replaced by the sum of two products, without cross
terms, hence sqrt(2H): give layers scale=(2 * head_dim) ** -0.5 for the first product. All layers
share the table, its LayerNorm and the projections (with biases).
TUPE-R adds T5's bidirectional bias (`num_buckets=32`).

The first token of a sequence, at coordinate 0, is [CLS], which has no meaningful position.
`untie_cls` gives all logits from it one value per head and all logits to it another: p . p of two
rows of the table that are otherwise unused, the first row (from [CLS]) and the row of position 0
(to [CLS]). T5's bias also has two such values: the bucket of no distance (from [CLS]) and an
additional bucket (to [CLS]). Each packed sequence has a separate [CLS]. Positions past the table
raise if they are concrete; under jit their rows are NaN.

Paper: Ke, He, Liu. Rethinking Positional Encoding in Language Pre-training. 2020.
https://arxiv.org/abs/2006.15595
Reference code: guolinke/TUPE, fairseq/modules/transformer_sentence_encoder.py.
"""

import dataclasses
from typing import ClassVar

import jax
import jax.numpy as jnp

from posenc_jax.checks import in_table, integer_positions, positive_fields, require
from posenc_jax.engine.rules import LogitBias
from posenc_jax.schemes.bias.t5 import T5, Bucket, check_buckets
from posenc_jax.schemes.scheme import Scheme, Traits


def _lookup(table, position):
    """Returns the row of a position; NaN outside the table."""
    row = jnp.where(position < 0, table.shape[0], position)
    return table.at[row].get(mode="fill", fill_value=jnp.nan)


def _untie_cls(q, k, from_cls, to_cls, other):
    """Returns `from_cls` where the query is [CLS], else `to_cls` where the key is."""
    return jnp.where(q == 0, from_cls, jnp.where(k == 0, to_cls, other))


def _products(shared, head, q, k):
    """Returns p_i . p_j of one head, or the values from and to an untied [CLS]."""
    q_table, k_table, *cls_logits = head
    product = jnp.dot(_lookup(q_table, q), _lookup(k_table, k), precision="highest")
    return _untie_cls(q, k, *cls_logits, product) if cls_logits else product


@dataclasses.dataclass(frozen=True)
class _Buckets:
    """T5's rule, with the unused bucket from [CLS] and an additional one to it."""

    bucket: Bucket

    def __call__(self, shared, table, q, k):
        count = self.bucket.num_buckets
        return _untie_cls(q, k, table[count // 2], table[count], table[self.bucket(q - k)])


@dataclasses.dataclass(frozen=True)
class TUPE(Scheme):
    """Untied positional encoding (Ke et al. 2020).

    Published with scale=(2 * head_dim) ** -0.5, which the term of positions has by itself.

    Attributes:
      num_heads: the number of query heads, N.
      head_dim: the head dim, H.
      model_dim: D, the size of the table's rows.
      max_length: number of positions.
      untie_cls: whether the logits from and to the first token have separate values.
      num_buckets: buckets of T5's bidirectional bias (TUPE-R); None: no such bias (TUPE-A).
      max_distance: distance from which on all are in T5's last bucket.
      stddev: standard deviation of the initial table and projections.

    Raises:
      ValueError: for sizes below one, a `max_distance` without buckets, and as `T5`.

    >>> params = TUPE(num_heads=2, head_dim=4, model_dim=8, max_length=16).init(jax.random.key(0))
    >>> params["table"].shape, params["query"].shape
    ((17, 8), (8, 2, 4))
    """

    num_heads: int
    head_dim: int
    model_dim: int
    max_length: int
    untie_cls: bool = True
    num_buckets: int | None = None
    max_distance: int = 128
    stddev: float = 0.02
    name: ClassVar[str] = "tupe"
    traits: ClassVar = Traits(shared_over_layers=True)
    param_axes: ClassVar = {
        "norm": {"scale": "model_dim", "bias": "model_dim"},
        "table": "rows model_dim",
        "query": "model_dim num_heads head_dim",
        "query_bias": "num_heads head_dim",
        "key": "model_dim num_heads head_dim",
        "key_bias": "num_heads head_dim",
        "buckets": "num_heads num_buckets",
    }

    def __post_init__(self):
        positive_fields(self, "num_heads", "head_dim", "model_dim", "max_length")
        if self.num_buckets is not None:
            check_buckets(self.num_buckets, self.max_distance, bidirectional=True)
        require(
            self.num_buckets is not None or self.max_distance == TUPE.max_distance,
            f"tupe: max_distance is of buckets, which need num_buckets, got {self.max_distance}.",
        )

    def init(self, key):
        """Returns the table, LayerNorm and projections, and "buckets" with `num_buckets`."""
        table, query, key, buckets = jax.random.split(key, 4)
        project = (self.model_dim, self.num_heads, self.head_dim)

        def normal(key, *shape):
            return self.stddev * jax.random.normal(key, shape, jnp.float32)

        ones, zeros = (jnp.full(self.model_dim, x, jnp.float32) for x in (1, 0))
        params = {
            "norm": {"scale": ones, "bias": zeros},
            "table": normal(table, self.max_length + self.untie_cls, self.model_dim),
            "query": normal(query, *project),
            "query_bias": jnp.zeros(project[1:], jnp.float32),
            "key": normal(key, *project),
            "key_bias": jnp.zeros(project[1:], jnp.float32),
        }
        if self.num_buckets is not None:
            params["buckets"] = normal(buckets, self.num_heads, self.num_buckets + self.untie_cls)
        return params

    def features(self, params, x, q, k, coordinates, segment_ids, state):
        """Returns no features; raises for concrete positions outside the table."""
        in_table("tupe", integer_positions("tupe", coordinates, "coordinates"), self.max_length)
        return None, None, state

    def rules(self, params, q_features=None, k_features=None):
        table = params["table"].astype(jnp.float32)
        table = table - table.mean(-1, keepdims=True)
        table = table * jax.lax.rsqrt((table**2).mean(-1, keepdims=True) + 1e-5)
        table = table * params["norm"]["scale"][None] + params["norm"]["bias"][None]
        q_table, k_table = (
            jnp.einsum("ld,dnh->nlh", table, params[name], precision="highest")
            + params[f"{name}_bias"][:, None]
            for name in ("query", "key")
        )
        q_table = q_table * (2 * self.head_dim) ** -0.5
        heads = q_table, k_table
        if self.untie_cls:
            cls_logits = (q_table[:, :2] * k_table[:, :2]).sum(-1)
            heads = q_table[:, 1:], k_table[:, 1:], cls_logits[:, 0], cls_logits[:, 1]
        products = LogitBias(_products, heads=heads)
        if self.num_buckets is None:
            return products
        sizes = self.num_buckets, self.max_distance, True
        if not self.untie_cls:
            return products, T5(self.num_heads, *sizes).rules({"table": params["buckets"]})
        return products, LogitBias(_Buckets(Bucket(*sizes)), heads=params["buckets"])
