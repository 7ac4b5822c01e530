"""Positions of trees: drafts that are verified at once, and answers that share a prompt.

A token of a tree sees the tokens from its root to itself. Positions count the tokens depth first,
so that the tokens below one have the positions after it, up to `visible_until`; the coordinates,
which schemes encode, are depths. Attention with `is_causal` then needs no mask of pairs. Windows
need `SlidingWindow(W, by="coordinates")`: positions also count the tokens of other branches.
"""

import functools
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax.core import Tracer

from posenc_jax.checks import integer_positions, require


class Tree(NamedTuple):
    """Arguments of `scheme_attention` and of layers for the tokens of trees, int32 [T] or [B, T].

    Attributes:
      positions: the number of tokens before each one, depth first.
      visible_until: the first position after the tokens below each one.
      coordinates: depths, 0 for roots.
    """

    positions: jax.Array
    visible_until: jax.Array
    coordinates: jax.Array

    def after(self, start: jax.Array | int) -> "Tree":
        """Returns the tree after `start` other tokens, a number or [B], as in a cache."""
        start = integer_positions("Tree.after", start, "start")
        pairs = (jnp.broadcast_arrays(x, start[..., None]) for x in self)
        return Tree(*(x + first for x, first in pairs))


def from_tree(parents: jax.Array) -> Tree:
    """Returns positions, ends and depths of the tokens of trees.

    The tokens of a packed row with one prompt and several answers are a tree too: the parent of the
    first token of an answer is the last one of the prompt.

    Args:
      parents: integers [T] or [B, T], the slot of the token before each one; below zero for a root.
        Parents come before their children, in any order otherwise.

    Raises:
      ValueError: for parents that are known not to come before their children.

    >>> tree = from_tree(jnp.array([-1, 0, 1, 0]))  # After a token, drafts of two and of one.
    >>> tree.visible_until
    Array([4, 3, 3, 4], dtype=int32)
    >>> q = k = v = jnp.ones((1, 4, 2, 8))
    >>> options = {"is_causal": True, **tree._asdict()}
    >>> out, _ = pe.scheme_attention(pe.RoPE(head_dim=8), {}, q, k, v, **options)
    """
    parents = integer_positions("from_tree", parents, "parents")
    require(
        parents.ndim in (1, 2), f"from_tree: parents must be [T] or [B, T], got {parents.shape}."
    )
    if not isinstance(parents, Tracer):
        late = np.asarray(parents) >= np.arange(parents.shape[-1])
        require(
            not late.any(),
            f"from_tree: parents must come before their children, got {parents[late]} in slots "
            f"{np.nonzero(late)[-1]}.",
        )
    return _of_row(parents) if parents.ndim == 1 else jax.vmap(_of_row)(parents)


@functools.partial(jax.jit, inline=True)  # One program outside of `jit`.
def _of_row(parents: jax.Array) -> Tree:
    """Returns the arrays of one row, in one pass over the tokens for sizes and one for the rest."""
    count = len(parents)
    if not count:
        return Tree(parents, parents, parents)
    slots = jnp.arange(count, dtype=jnp.int32)
    parents = jnp.where(parents < 0, count, parents)  # The last entry is above the roots.

    def add_size(sizes, slot):
        return sizes.at[parents[slot]].add(sizes[slot]), None

    sizes, _ = jax.lax.scan(add_size, jnp.ones(count + 1, jnp.int32), slots[::-1])

    def place(carry, slot):
        free, depths = carry
        parent = parents[slot]
        position, depth = free[parent], depths[parent] + 1
        free = free.at[parent].add(sizes[slot]).at[slot].set(position + 1)
        return (free, depths.at[slot].set(depth)), (position, depth)

    start = jnp.zeros(count + 1, jnp.int32), jnp.full(count + 1, -1, jnp.int32)
    _, (positions, depths) = jax.lax.scan(place, start, slots)
    return Tree(positions, positions + sizes[:count], depths)
