r"""CoPE: a key's position is the number of tokens since it that the query counts.

    g[i, t] = sigmoid(q_i . k_t / sqrt(H))
    p[i, j] = min(sum_{j <= t <= i} g[i, t], P - 1)
    logits[i, j] = (q_i . k_j + q_i . e[p[i, j]]) / sqrt(H)

e has P learned rows, shared by all heads; between two rows it is interpolated. A query can
so count words, sentences or tokens of one kind. Gradients reach the gates through the
weights of that interpolation.

In a `chain`, gates are of the logits with what the other schemes add; the authors' code adds
its relative bias after the gates. Not here: gates from a key projection of their own or from
the values. The listing in the paper makes gates of masked logits; the code does not.

Paper: Golovneva et al. Contextual Position Encoding: Learning to Count What's Important.
2024. https://arxiv.org/abs/2405.18719
Reference code: facebookresearch/RAM, projects/cope/src/cope/context_position.py.
"""

import dataclasses
from typing import ClassVar

import jax
import jax.numpy as jnp

from posenc_jax.checks import require
from posenc_jax.rules import LogitsTransform
from posenc_jax.scheme import Scheme, Traits


def _count_and_look_up(shared, heads, row, cols, logits, seen, q, k):
    """`shared` is e, scaled, [P, H]; `row` is q, [N, H]."""
    entries = jnp.dot(row.astype(jnp.float32), shared.T, precision="highest")
    gates = jnp.where(seen, jax.nn.sigmoid(logits), 0.0)
    counted = jax.lax.cumsum(gates, axis=1, reverse=True)
    counted = jnp.minimum(counted, shared.shape[0] - 1.0)
    below = jnp.floor(counted).astype(jnp.int32)
    above = jnp.ceil(counted).astype(jnp.int32)
    weight = counted - below.astype(jnp.float32)
    low, high = (jnp.take_along_axis(entries, at, axis=1) for at in (below, above))
    return logits + high * weight + low * (1.0 - weight)


@dataclasses.dataclass(frozen=True)
class CoPE(Scheme):
    """Contextual position encoding (Golovneva et al. 2024).

    Attributes:
      head_dim: H.
      num_positions: P; what is counted beyond P - 1 is one position.
      scaled: whether the term is divided by sqrt(H), as q . k is.

    Raises:
      ValueError: for sizes below one.

    >>> CoPE(head_dim=64).init(jax.random.key(0))["table"].shape
    (64, 64)
    """

    head_dim: int
    num_positions: int = 64
    scaled: bool = True
    name: ClassVar[str] = "cope"

    def __post_init__(self):
        require(self.head_dim >= 1, f"cope: head_dim must be >= 1, got {self.head_dim}.")
        require(
            self.num_positions >= 1,
            f"cope: num_positions must be >= 1, got {self.num_positions}.",
        )

    @property
    def traits(self):
        return Traits(relative=True, order_only=True)

    def init(self, key):
        """Returns {"table": zeros, float32 [P, H]}, as the authors do."""
        return {"table": jnp.zeros((self.num_positions, self.head_dim), jnp.float32)}

    def features(self, params, x, q, k, coordinates, segment_ids, state):
        """Returns q, which will meet the table."""
        require(
            q.shape[-1] == self.head_dim,
            f"cope: q must have head dim {self.head_dim}, got {q.shape[-1]}.",
        )
        return q, None, state

    def rules(self, params, q_features=None, k_features=None):
        """Returns the rule that counts and looks up."""
        scale = self.head_dim**-0.5 if self.scaled else 1.0
        return LogitsTransform(
            _count_and_look_up, shared=params["table"] * scale, q_features=q_features
        )
