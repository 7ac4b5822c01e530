r"""CoPE: positions counted by gates that depend on query and key.

    g[i, t] = sigmoid(q_i . k_t / sqrt(H))
    p[i, j] = min(sum_{j <= t <= i} g[i, t], P - 1)
    logits[i, j] = (q_i . k_j + q_i . e[p[i, j]]) / sqrt(H)

The position of a key is the sum of the gates of the tokens from it to the query, so that a query
can count words, sentences or tokens of one kind. e has P learned rows, shared by all heads and
interpolated linearly between two rows. Gates get their gradients through the interpolation
weights.

In a `chain`, gates are computed from the logits that include the terms of the other schemes; the
authors' code adds its relative bias after the gates. Gates from a separate key projection or from
the values are omitted. The listing in the paper computes gates from masked logits; the
code does not.

Paper: Golovneva et al. Contextual Position Encoding: Learning to Count What's Important.
2024. https://arxiv.org/abs/2405.18719
Reference code: facebookresearch/RAM, projects/cope/src/cope/context_position.py.
"""

import dataclasses
from typing import ClassVar

import jax
import jax.numpy as jnp

from posenc_jax.checks import positive_fields
from posenc_jax.engine.rules import LogitsTransform
from posenc_jax.schemes.scheme import Scheme, Traits


def _add_contextual_positions(shared, heads, q_feature, k_features, logits, seen, q, k):
    """The transform of one query's logits, [N, S].

    `shared` is the scaled table e, [P, H]; `q_feature` is q_i, [N, H].
    """
    position_logits = jnp.dot(q_feature.astype(jnp.float32), shared.T, precision="highest")
    gates = jnp.where(seen, jax.nn.sigmoid(logits), 0.0)
    # XLA on CPUs would fuse the sums into each of their uses and compute them anew there.
    positions = jax.lax.optimization_barrier(jax.lax.cumsum(gates, axis=1, reverse=True))
    positions = jnp.minimum(positions, shared.shape[0] - 1.0)
    below = jnp.floor(positions)
    weight = positions - below
    # One gather of both, whose gradient is one scatter.
    above = jnp.concatenate([position_logits[:, 1:], position_logits[:, -1:]], axis=1)
    both = jnp.stack([position_logits, above], axis=2)
    both = jax.vmap(lambda x, i: x.at[i].get(mode="clip"))(both, below.astype(jnp.int32))
    low = both[:, :, 0]
    high = jnp.where(weight > 0.0, both[:, :, 1], low)  # The ceiling of an integer is itself.
    return logits + high * weight + low * (1.0 - weight)


@dataclasses.dataclass(frozen=True)
class CoPE(Scheme):
    """Contextual position encoding (Golovneva et al. 2024).

    Attributes:
      head_dim: the head dim, H.
      num_positions: P; larger positions are clipped to P - 1.
      scaled: whether the term is divided by sqrt(H), as q . k is.

    >>> CoPE(head_dim=64).init(jax.random.key(0))["table"].shape
    (64, 64)
    """

    head_dim: int
    num_positions: int = 64
    scaled: bool = True
    name: ClassVar[str] = "cope"
    param_axes: ClassVar = {"table": "num_positions head_dim"}
    traits: ClassVar = Traits(
        relative=True,
        order_only=True,
        transforms_rows=True,
        causal_only="keys after the query have position 0, all alike",
    )

    def __post_init__(self):
        positive_fields(self, "head_dim", "num_positions")

    def init(self, key):
        """Returns {"table": zeros, float32 [P, H]}, as the authors do."""
        return {"table": jnp.zeros((self.num_positions, self.head_dim), jnp.float32)}

    def features(self, params, x, q, k, coordinates, segment_ids, state):
        """Returns q as the feature of the queries."""
        return q, None, state

    def rules(self, params, q_features=None, k_features=None):
        scale = self.head_dim**-0.5 if self.scaled else 1.0
        table = params["table"].astype(jnp.float32) * scale
        return LogitsTransform(
            _add_contextual_positions, shared=table, q_features=q_features, reads_seen_only=True
        )
