r"""Shaw et al.: a learned vector per clipped distance, added to keys and values.

    logits[i, j] = q_i . (k_j + a_K[c]) / sqrt(H)
    out[i]       = sum_j p[i, j] (v_j + a_V[c]),      c = clip(j - i, -clip, clip)

The first relative position encoding. The tables have 2 clip + 1 rows, from the furthest
past to the furthest future; each layer has its own. The authors share them between heads
(`per_head=False`). Causal attention does not use the rows of the future.

Music Transformer has the table of keys only, and zeros at distances beyond it in place of the last
row (`zero_beyond`): its table of M rows is the past half of a table with `clip=M - 1`.

The term of the keys is inside the 1/sqrt(H) scale, as q . k is. No [T, S, H] array is needed:
q . a_K is one product with the table, from which entries are gathered, and the term of the values
needs only the sum of the probabilities on each row.

Paper: Shaw, Uszkoreit, Vaswani. Self-Attention with Relative Position Representations.
2018. https://arxiv.org/abs/1803.02155
Music Transformer: Huang et al. 2018. https://arxiv.org/abs/1809.04281
Reference code: tensorflow/tensor2tensor, layers/common_attention.py,
dot_product_attention_relative.
"""

import dataclasses
from typing import ClassVar

import jax
import jax.numpy as jnp

from posenc_jax.checks import integers, not_negative, positive_fields, require
from posenc_jax.engine.rules import DotBias, ValueBias
from posenc_jax.schemes.scheme import Acts, Scheme, Traits


@dataclasses.dataclass(frozen=True)
class _Row:
    """The table row of two positions."""

    clip: int

    def __call__(self, q, k):
        return jnp.clip(k - q, -self.clip, self.clip).astype(jnp.int32) + self.clip


@dataclasses.dataclass(frozen=True)
class _Vector:
    """The table row of a distance."""

    row: _Row

    def __call__(self, table, head, distance):
        return (table if head is None else head)[self.row(distance, 0)]


@dataclasses.dataclass(frozen=True)
class Shaw(Scheme):
    """Relative position representations (Shaw et al. 2018).

    Attributes:
      num_heads: the number of query heads, N.
      head_dim: the head dim, H.
      clip: distance from which on all share a row; the paper's k.
      keys: whether keys have a table.
      values: whether values have a table.
      per_head: whether each head has its own tables.
      zero_beyond: whether vectors of distances beyond `clip` are zero.

    Raises:
      ValueError: for sizes below one, a negative clip, or neither keys nor values.

    >>> scheme = Shaw(num_heads=8, head_dim=64, clip=16)
    >>> scheme.init(jax.random.key(0))["keys"].shape
    (1, 33, 64)
    """

    num_heads: int
    head_dim: int
    clip: int = 16
    keys: bool = True
    values: bool = True
    per_head: bool = False
    zero_beyond: bool = False
    name: ClassVar[str] = "shaw"
    traits: ClassVar = Traits(relative=True)

    def __post_init__(self):
        positive_fields(self, "num_heads", "head_dim")
        integers("shaw", clip=self.clip)
        not_negative("shaw", clip=self.clip)
        require(self.keys or self.values, "shaw: keys and values must not both be False.")

    @property
    def acts(self):
        """The logits for a table of keys, the values for a table of values."""
        return (Acts.LOGITS if self.keys else Acts(0)) | (Acts.VALUES if self.values else Acts(0))

    @property
    def param_axes(self):
        axes = f"{'num_heads' if self.per_head else 'one'} distances head_dim"
        return {"keys": axes, "values": axes}

    def init(self, key):
        """Returns {"keys": ..., "values": ...}, float32 [1 or N, 2 clip + 1, H]; Glorot uniform."""
        rows, dim = 2 * self.clip + 1, self.head_dim
        shape = (self.num_heads if self.per_head else 1, rows, dim)
        limit = (6.0 / (rows + dim)) ** 0.5
        used = [name for name in ("keys", "values") if getattr(self, name)]
        keys = jax.random.split(key, 2)
        return {
            name: jax.random.uniform(k, shape, jnp.float32, -limit, limit)
            for name, k in zip(used, keys, strict=False)
        }

    def features(self, params, x, q, k, coordinates, segment_ids, state):
        """Returns q as the feature of the queries, where keys have a table."""
        return (q if self.keys else None), None, state

    def rules(self, params, q_features=None, k_features=None):
        rules = []
        if self.keys:
            clip, table = self._clip_and_table(params["keys"])
            key_bias = DotBias(
                _Vector(_Row(clip)),
                heads=table if self.per_head else None,
                shared=None if self.per_head else table[0],
                q_features=q_features,
                bounds=(-clip, clip),
                scaled=True,
            )
            rules.append(key_bias)
        if self.values:
            clip, table = self._clip_and_table(params["values"])
            value_bias = ValueBias(
                _Row(clip),
                table=jnp.broadcast_to(table, (self.num_heads, *table.shape[1:])),
                relative=True,
                bounds=(-clip, clip),
            )
            rules.append(value_bias)
        return tuple(rules)

    def _clip_and_table(self, table):
        """Returns the distance to clip at and the table, with rows of zeros for `zero_beyond`."""
        if not self.zero_beyond:
            return self.clip, table
        return self.clip + 1, jnp.pad(table, ((0, 0), (1, 1), (0, 0)))
