"""Tokens as rules read them, and functions of all their pairs, rows and heads."""

import functools
from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp

STATIC = {"static": True}  # Marks fields that are part of a pytree's structure.


class Tokens(NamedTuple):
    """Queries or keys of a tile, as a rule reads them for one head.

    Attributes:
      slots: int32 [T], consecutive.
      coordinates: [T] or [T, A].
      features: the rule's arrays of these tokens, leaves [T, ...].
    """

    slots: Any
    coordinates: Any
    features: Any


def in_reach(q: jax.Array, k: jax.Array) -> jax.Array:
    """Returns k, or for int32 the number nearest to it whose distance from q fits int32."""
    if not q.dtype == k.dtype == jnp.int32:
        return k
    most = jnp.iinfo(jnp.int32).max
    return jnp.clip(k, jnp.maximum(q, -1) - most, jnp.minimum(q, 0) + most)


def pairs_of(pair: Callable, q: Tokens, k: Tokens, seen: jax.Array | None) -> jax.Array:
    """Returns `pair` of all pairs [Q, K]; pairs that are not in `seen` may get any number."""
    if seen is None:
        return jax.vmap(jax.vmap(pair, (None, 0)), (0, None))(q, k)
    return jax.vmap(jax.vmap(pair))(*of_seen_pairs(seen, q, k))


def of_seen_pairs(seen: jax.Array, q: Tokens, k: Tokens) -> tuple[Tokens, Tokens]:
    """Returns the tokens of every pair, leaves [Q, K, ...], with a seen pair for each hidden one.

    A rule may be NaN or infinite at hidden pairs, and 0 * NaN would be NaN in the derivatives of
    arrays that all pairs share.

    Args:
      seen: bool [Q, K].
      q, k: queries and keys, leaves [Q, ...] and [K, ...].
    """
    first = jnp.argmax(seen.reshape(-1))
    row, column = first // seen.shape[1], first % seen.shape[1]

    def at(tokens, index):
        return jax.tree.map(lambda x: jnp.take(x, index, 0, mode="clip"), tokens)

    def spread(tokens, one, axis):
        def of_leaf(x, one):
            mask = seen.reshape(*seen.shape, *(1,) * (x.ndim - 1))
            return jnp.where(mask, jnp.expand_dims(x, axis), one[None, None])

        return jax.tree.map(of_leaf, tokens, one)

    query, key = at(q, row), at(k, column)
    # Where nothing is seen, a query and a key at its own place.
    place = jnp.where(jnp.any(seen), key.coordinates, query.coordinates)
    return spread(q, query, 1), spread(k, key._replace(coordinates=place), 0)


def vmap_rows_and_heads(f: Callable, *arguments: Any) -> jax.Array:
    """Returns `f` for all rows and heads, [B or 1, N or 1, ...].

    Leaves of the arguments are [B or 1, N or 1, ...]. Axes of length one are not mapped over, which
    would double the time of FIRE's gradient.
    """
    return _vmap_leading(functools.partial(_vmap_leading, f), *arguments)


def _vmap_leading(f: Callable, *arguments: Any) -> jax.Array:
    """Vmaps over the leading axis of the leaves where it is longer than one."""
    axes = jax.tree.map(lambda x: None if x.shape[0] == 1 else 0, arguments)
    arguments = jax.tree.map(lambda x: x[0] if x.shape[0] == 1 else x, arguments)
    if not jax.tree.leaves(axes):
        return f(*arguments)[None]
    return jax.vmap(f, axes)(*arguments)


def over_heads(function: Callable, heads: Any) -> jax.Array:
    """Returns `function` of every head's slice, [N, ...]; [1, ...] where heads share it."""
    if jax.tree.leaves(heads):
        return jax.vmap(function)(heads)
    return function(heads)[None]
