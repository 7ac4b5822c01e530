"""Splits pytrees into differentiable leaves and the others."""

from typing import Any

import jax
import jax.numpy as jnp


def partition(tree: Any) -> tuple[Any, Any]:
    """Returns the tree of differentiable leaves and the tree of the others, with None elsewhere.

    >>> partition({"x": jnp.float32(1), "i": jnp.int32(2)})[1]["x"] is None
    True
    """

    def is_diff(x):
        return jnp.issubdtype(x.dtype, jnp.inexact)

    diff = jax.tree.map(lambda x: x if is_diff(x) else None, tree)
    return diff, jax.tree.map(lambda x: None if is_diff(x) else x, tree)


def combine(diff: Any, nondiff: Any) -> Any:
    """Returns the tree that `partition` split."""
    return jax.tree.map(
        lambda a, b: b if a is None else a, diff, nondiff, is_leaf=lambda x: x is None
    )
