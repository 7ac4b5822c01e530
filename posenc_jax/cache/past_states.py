"""States of a running sum before its last few tokens, so that tokens can be taken back."""

import jax
import jax.numpy as jnp


def states_without(state: jax.Array, past: jax.Array, count: jax.Array) -> jax.Array:
    """Returns the states without the last `count` tokens, [B, any, ...].

    Args:
      state: after all tokens, [B, ...].
      past: without the last 1, 2, ... tokens, [B, R, ...].
      count: int32 [B, any], clipped to 0 .. R.

    >>> states_without(jnp.array([9]), jnp.array([[8, 7]]), jnp.array([[0, 2]]))
    Array([[9, 7]], dtype=int32)
    """
    states = jnp.concatenate([state[:, None], past], 1)
    count = jnp.clip(count, 0, past.shape[1])
    return jnp.take_along_axis(states, _like(count, states), 1)


def appended_states(
    state: jax.Array, past: jax.Array, count: jax.Array, new_past: jax.Array
) -> jax.Array:
    """Returns `past` after more tokens, [B, R, ...].

    Args:
      state, past: before these tokens; see `states_without`.
      count: int32 [B], the number of tokens appended to each row.
      new_past: without the last 1, 2, ... of these tokens, [B, any, ...].

    >>> before = jnp.array([9]), jnp.array([[8, 7]])
    >>> appended_states(*before, jnp.array([1]), jnp.zeros((1, 0), int))
    Array([[9, 8]], dtype=int32)
    """
    size = past.shape[1]
    removed = jnp.arange(1, size + 1, dtype=jnp.int32)[None]
    old = states_without(state, past, removed - count[:, None])
    padding = (0, size - new_past.shape[1])
    new = jnp.pad(new_past, ((0, 0), padding, *((0, 0),) * (past.ndim - 2)))
    return jnp.where(_like(removed < count[:, None], past), new, old)


def _like(x: jax.Array, other: jax.Array) -> jax.Array:
    """Returns x [B, any], with axes of size 1 added up to the rank of `other`."""
    return x.reshape(*x.shape, *(1,) * (other.ndim - 2))
