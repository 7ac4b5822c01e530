"""Whether rules read as many axes as coordinates have, found out on shapes alone."""

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp

from posenc_jax.checks import require
from posenc_jax.engine.problem import Problem, repeat_heads
from posenc_jax.rules import DotBias, LogitsTransform, ValueBias


def check_axes(p: Problem) -> None:
    """Raises `ValueError` for a rule that does not give one number for a pair of tokens."""
    q, k = p.q_coordinates, p.k_coordinates
    if q.ndim < 3 and k.ndim < 3:
        return
    contents = (c.by_pair() if isinstance(c, DotBias) else c for c in p.contents)
    for rule in (*p.biases, *contents, p.row_rule, p.value):
        if rule is None:
            continue
        what = rule.bucket if isinstance(rule, ValueBias) else rule.rule
        said = (
            f"attention: coordinates have {q.shape[2:]} and {k.shape[2:]} axes for each token, "
            f"which is not what the rule {what} reads"
        )
        try:
            shape = jax.eval_shape(_of_a_query(p), *_shapes((rule, q, k))).shape
        except (TypeError, ValueError) as error:
            raise ValueError(f"{said}: {error}") from error
        # Heads, where it has them, then one query and its keys; what follows is too much.
        more = shape[2 if isinstance(rule, ValueBias) else 3 :]
        require(not more, f"{said}: it returned {more} for a pair, not a number.")


def _of_a_query(p: Problem) -> Callable[[Any, jax.Array, jax.Array], jax.Array]:
    """Returns a function of a rule and coordinates: the tile of the first query."""
    heads, keys = p.q.shape[2], p.k.shape[1]

    def first(x):
        return jax.tree.map(lambda a: a[0, :1], x)

    def run(rule, q, k):
        at = q[0, :1], k[0]
        if not hasattr(rule, "k_features"):
            return rule.tile(*at)
        cols = jax.tree.map(lambda a: repeat_heads(a[0], heads, 1), rule.k_features)
        if not isinstance(rule, LogitsTransform):
            return rule.tile(first(rule.q_features), cols, *at)
        if rule.expand is not None:
            cols = rule.expand(rule.shared, rule.heads, cols)
        logits, seen = jnp.zeros((heads, 1, keys), jnp.float32), jnp.ones((1, 1, keys), bool)
        return rule.tile(first(rule.q_features), cols, logits, seen, *at)

    return run


def _shapes(x: Any) -> Any:
    """Arrays as shapes, without their sharding."""
    return jax.tree.map(lambda a: jax.ShapeDtypeStruct(jnp.shape(a), jnp.asarray(a).dtype), x)
