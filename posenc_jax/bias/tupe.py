r"""TUPE: positions meet positions, with projections of their own.

    logits[n, i, j] = q_i . k_j / sqrt(2H) + (U_Q p_i)_n . (U_K p_j)_n / sqrt(2H)
    p_i = LayerNorm(table[i + 1])

Words and positions are not mixed: the sum of two products takes the place of the product of two
sums, hence sqrt(2H). The table, its LayerNorm and the projections (with their biases) serve all
layers. TUPE-R adds T5's bidirectional bias (`num_buckets=32`).

The first token, at coordinate 0, is [CLS], which stands nowhere. `untie_cls` gives one number to
all logits from it and one to all logits to it: p . p of two rows of the table that have no other
use, the first (from [CLS]) and that of position 0 (to it). So it is for T5's bias: from [CLS] the
bucket that no distance has, to it one more bucket. Packed sequences each have a [CLS]. Positions
past the table raise where they are known; under jit their rows are NaN.

Paper: Ke, He, Liu. Rethinking Positional Encoding in Language Pre-training. 2020.
https://arxiv.org/abs/2006.15595
Reference code: guolinke/TUPE, fairseq/modules/transformer_sentence_encoder.py.
"""

import dataclasses
from typing import ClassVar

import jax
import jax.numpy as jnp

from posenc_jax.bias.t5 import T5, Bucket, check_buckets
from posenc_jax.checks import in_table, require
from posenc_jax.rules import LogitBias
from posenc_jax.scheme import Scheme, Traits


def _row(rows, at):
    """The row of a position; NaN where it has none."""
    at = jnp.where(at < 0, rows.shape[0], at)
    return rows.at[at].get(mode="fill", fill_value=jnp.nan)


def _first(q, k, from_first, to_first, other):
    """One number for pairs with the first token as query, or else as key."""
    return jnp.where(q == 0, from_first, jnp.where(k == 0, to_first, other))


def _products(shared, head, q, k):
    """p_i . p_j of one head; where untied, with the logits from [CLS] and to it."""
    own_q, own_k, *untied = head
    product = jnp.dot(_row(own_q, q), _row(own_k, k), precision="highest")
    return _first(q, k, *untied, product) if untied else product


@dataclasses.dataclass(frozen=True)
class _Buckets:
    """T5's rule, with buckets for [CLS]: the one without a distance, and one more."""

    bucket: Bucket

    def __call__(self, shared, table, q, k):
        count = self.bucket.num_buckets
        return _first(q, k, table[count // 2], table[count], table[self.bucket(q - k)])


@dataclasses.dataclass(frozen=True)
class TUPE(Scheme):
    """Untied positional encoding (Ke et al. 2020).

    Attributes:
      num_heads: N.
      head_dim: H.
      model_dim: D, the size of the table's rows.
      max_length: number of positions.
      untie_cls: whether the first token has logits of its own.
      num_buckets: of T5's bidirectional bias; 0 for none (TUPE-A).
      max_distance: where its last buckets begin, at the latest.
      stddev: of the initial table and projections.

    Raises:
      ValueError: for sizes below one, and as `T5`.

    >>> params = TUPE(num_heads=2, head_dim=4, model_dim=8, max_length=16).init(jax.random.key(0))
    >>> params["table"].shape, params["query"].shape
    ((17, 8), (8, 2, 4))
    """

    num_heads: int
    head_dim: int
    model_dim: int
    max_length: int
    untie_cls: bool = True
    num_buckets: int = 0
    max_distance: int = 128
    stddev: float = 0.02
    name: ClassVar[str] = "tupe"

    def __post_init__(self):
        for name in ("num_heads", "head_dim", "model_dim", "max_length"):
            value = getattr(self, name)
            require(value >= 1, f"tupe: {name} must be >= 1, got {value}.")
        require(self.stddev > 0, f"tupe: stddev must be positive, got {self.stddev}.")
        if self.num_buckets:
            check_buckets(self.num_buckets, self.max_distance, bidirectional=True)

    @property
    def traits(self):
        return Traits(shared_over_layers=True)

    def init(self, key):
        """Returns the table, LayerNorm and projections, and T5's table where there is one."""
        table, query, key, buckets = jax.random.split(key, 4)
        project = (self.model_dim, self.num_heads, self.head_dim)

        def normal(key, *shape):
            return self.stddev * jax.random.normal(key, shape, jnp.float32)

        ones, zeros = (jnp.full(self.model_dim, x, jnp.float32) for x in (1, 0))
        made = {"norm": {"scale": ones, "bias": zeros}}
        made["table"] = normal(table, self.max_length + self.untie_cls, self.model_dim)
        for name, seed in (("query", query), ("key", key)):
            made[name] = normal(seed, *project)
            made[f"{name}_bias"] = jnp.zeros(project[1:], jnp.float32)
        if self.num_buckets:
            made["buckets"] = normal(buckets, self.num_heads, self.num_buckets + self.untie_cls)
        return made

    def features(self, params, x, q, k, coordinates, segment_ids, state):
        """Returns nothing, but raises for positions that are known to have no row."""
        in_table("tupe", coordinates, self.max_length)
        return None, None, state

    def rules(self, params, q_features=None, k_features=None):
        """Returns the products of positions, and T5's bias where there is one."""
        table = params["table"] - params["table"].mean(-1, keepdims=True)
        table = table * jax.lax.rsqrt((table**2).mean(-1, keepdims=True) + 1e-5)
        table = table * params["norm"]["scale"][None] + params["norm"]["bias"][None]
        q, k = (
            jnp.einsum("ld,dnh->nlh", table, params[name], precision="highest")
            + params[f"{name}_bias"][:, None]
            for name in ("query", "key")
        )
        heads = (q * self.logit_scale(self.head_dim), k)
        if self.untie_cls:
            logits = (heads[0][:, :2] * k[:, :2]).sum(-1)
            heads = (heads[0][:, 1:], k[:, 1:], logits[:, 0], logits[:, 1])
        products = LogitBias(_products, heads=heads)
        if not self.num_buckets:
            return products
        sizes = self.num_buckets, self.max_distance, True
        if not self.untie_cls:
            return products, T5(self.num_heads, *sizes).rules({"table": params["buckets"]})
        return products, LogitBias(_Buckets(Bucket(*sizes)), heads=params["buckets"])

    def logit_scale(self, head_dim):
        """Returns 1 / sqrt(2H)."""
        return (2 * head_dim) ** -0.5
