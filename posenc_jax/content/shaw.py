r"""Shaw et al.: a learned vector per clipped distance, on keys and on values.

    logits[i, j] = q_i . (k_j + a_K[c]) / sqrt(H)
    out[i]       = sum_j p[i, j] (v_j + a_V[c]),      c = clip(j - i, -clip, clip)

The first relative position encoding. The tables have 2 clip + 1 rows, from the furthest
past to the furthest future; each layer has its own. The authors share them between heads
(`per_head=False`). A causal model never uses the rows of the future.

Music Transformer has the table of keys alone, and distances beyond it have zeros and not
its last row (`zero_beyond`): its table of M rows is the past half of `clip=M - 1`.

The term is inside the 1/sqrt(H) scale, as q . k is. No [T, S, H] array is needed: q meets
the table once, q . a_K[c] is then an entry of that, and the values' part needs only the
probability that falls on each row.

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

from posenc_jax.checks import require
from posenc_jax.rules import DotBias, ValueBias
from posenc_jax.scheme import Acts, Scheme, Traits


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
      num_heads: N.
      head_dim: H.
      clip: the distance from which on all distances are one; the paper's k.
      keys: whether keys have a table.
      values: whether values have a table.
      per_head: whether each head has tables of its own.
      zero_beyond: whether distances beyond `clip` have zeros.

    Raises:
      ValueError: for a negative clip, sizes below one, or neither keys nor values.

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

    def __post_init__(self):
        require(self.num_heads >= 1, f"shaw: num_heads must be >= 1, got {self.num_heads}.")
        require(self.head_dim >= 1, f"shaw: head_dim must be >= 1, got {self.head_dim}.")
        require(self.clip >= 0, f"shaw: clip must not be negative, got {self.clip}.")
        require(self.keys or self.values, "shaw: neither keys nor values have a table.")

    @property
    def traits(self):
        return Traits(relative=True)

    @property
    def acts(self):
        """The logits with a table for keys, the values with one for values."""
        return (Acts.LOGITS if self.keys else Acts(0)) | (Acts.VALUES if self.values else Acts(0))

    def init(self, key):
        """Returns {"keys": ..., "values": ...}, float32 [1 or N, 2 clip + 1, H]; Glorot uniform."""
        shape = (
            self.num_heads if self.per_head else 1,
            2 * self.clip + 1,
            self.head_dim,
        )
        limit = (6.0 / (shape[1] + shape[2])) ** 0.5
        used = [name for name in ("keys", "values") if getattr(self, name)]
        made = jax.random.split(key, 2)
        return {
            name: jax.random.uniform(k, shape, jnp.float32, -limit, limit)
            for name, k in zip(used, made, strict=False)
        }

    def features(self, params, x, q, k, coordinates, segment_ids, state):
        """Returns q, which will meet the keys' table."""
        require(
            q.shape[2:] == (self.num_heads, self.head_dim),
            f"shaw: q must be [B, T, {self.num_heads}, {self.head_dim}], got {q.shape}.",
        )
        return (q if self.keys else None), None, state

    def rules(self, params, q_features=None, k_features=None):
        """Returns q . a_K[c] and a_V[c], those that there are."""
        rules = []
        if self.keys:
            reach, table = self._reach(params["keys"])
            own = self.per_head
            dot = DotBias(
                _Vector(_Row(reach)),
                heads=table if own else None,
                shared=None if own else table[0],
                q_features=q_features,
                bounds=(-reach, reach),
                scaled=True,
            )
            rules.append(dot)
        if self.values:
            reach, table = self._reach(params["values"])
            value = ValueBias(
                _Row(reach),
                table=jnp.broadcast_to(table, (self.num_heads, *table.shape[1:])),
                relative=True,
                bounds=(-reach, reach),
            )
            rules.append(value)
        return tuple(rules)

    def _reach(self, table):
        """The distance from which on all rows are one, and the table up to there."""
        if not self.zero_beyond:
            return self.clip, table
        return self.clip + 1, jnp.pad(table, ((0, 0), (1, 1), (0, 0)))
