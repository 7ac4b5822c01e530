"""Writes and reshards arrays of a cache: slots for tokens, and states before the last tokens."""

import functools
from typing import Any

import jax
import jax.numpy as jnp
from jax.sharding import PartitionSpec

from posenc_jax.checks import require


def write_slots(
    name: str, old: jax.Array, new: jax.Array, slots: jax.Array, batch: int = 0
) -> jax.Array:
    """Returns `old` [B, S, ...] with new tokens [B, T, ...] in their slots.

    Args:
      name: name of the array, for messages.
      old, new: the arrays, with B at axis `batch` and the slots or tokens at the next one.
      slots: int32 [B, T], different in each row; slots past the end are not written.
      batch: 0, or 1 for [A, B, S].
    """
    new = _resharded(name, new, old)
    if slots.shape == (1, 1):
        # XLA for CPUs would make a slice update of one token, fuse it into attention, and copy the
        # array for it. The second token is dropped.
        new = jnp.concatenate([new, new], batch + 1)
        slots = jnp.concatenate([slots, jnp.full_like(slots, old.shape[batch + 1])], 1)

    def write_row(old, new, slots):
        index = (slice(None),) * batch + (slots,)
        return old.at[index].set(new, mode="drop", unique_indices=True)

    # One row at a time, so that a device with some of the rows writes only these.
    write = jax.vmap(write_row, (batch, batch, 0), batch)
    # XLA for CPUs would fuse a second write into attention, and copy the array for it.
    return jax.lax.optimization_barrier(write(old, new.astype(old.dtype), slots))


@functools.partial(jax.jit, inline=True)
def finite_values(k: jax.Array, v: jax.Array) -> tuple[jax.Array, jax.Array]:
    """Returns k and v for a cache, with zeros and NaN keys where k or v is not finite.

    An infinite key, such as one too large for float16, can have the logit of a hidden slot.

    Hidden slots have masked logits, even if their keys are NaN. Their values have weight zero, and
    0 * NaN is NaN.
    """
    bad = ~(jnp.isfinite(k).all(-1) & jnp.isfinite(v).all(-1))[..., None]
    return jnp.where(bad, jnp.nan, k).astype(k.dtype), jnp.where(bad, 0, v).astype(v.dtype)


def _resharded(name: str, new: jax.Array, old: jax.Array) -> jax.Array:
    """Returns new tokens with the sharding of the array `old` in the cache.

    Raises:
      ValueError: for keys or values of another sharding: each step would move them between devices.
    """
    new_axes, old_axes = sharded_axes(new), sharded_axes(old)
    if new_axes == old_axes:
        return new
    require(
        name not in "kv",
        f"KVCache: {name} is sharded as {PartitionSpec(*new_axes)}, and the cache as "
        f"{PartitionSpec(*old_axes)}; make it with new_cache(..., qkv_sharding=...).",
    )
    return jax.sharding.reshard(new, PartitionSpec(*old_axes))


def sharded_axes(x: Any) -> tuple:
    """Returns the mesh axes that shard each axis of an array or shape, on an explicit mesh."""
    sharding = x.sharding if isinstance(x, jax.ShapeDtypeStruct) else jax.typeof(x).sharding
    return (None,) * x.ndim if sharding is None else tuple(sharding.spec)


def same_sharding(x: jax.Array) -> dict[str, Any]:
    """Returns the options with which `x.at[rows]` keeps the sharding of x on an explicit mesh."""
    return {"out_sharding": PartitionSpec(*sharded_axes(x))} if any(sharded_axes(x)) else {}


def batch_first(coordinates: jax.Array) -> jax.Array:
    """Returns coordinates [B, S] or [B, S, A]."""
    return jnp.moveaxis(coordinates, (-2, -1), (0, 1))


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
    return jnp.take_along_axis(states, _with_rank(count, states), 1)


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
    return jnp.where(_with_rank(removed < count[:, None], past), new, old)


def _with_rank(x: jax.Array, other: jax.Array) -> jax.Array:
    """Returns x [B, any], with axes of size 1 added up to the rank of `other`."""
    return x.reshape(*x.shape, *(1,) * (other.ndim - 2))
