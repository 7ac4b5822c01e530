"""Arrays with slots for tokens: how they are written, moved and sharded."""

from typing import Any

import jax
import jax.numpy as jnp
from jax.sharding import PartitionSpec

from posenc_jax.checks import require


def write_slots(
    name: str, old: jax.Array, new: jax.Array, slots: jax.Array, batch: int = 0
) -> jax.Array:
    """Returns `old` [B, S, ...] with new tokens [B, T, ...]; slots beyond the end are not written.

    Args:
      name: of the array, for messages.
      old, new: the arrays, with B at the axis `batch` and slots behind it.
      slots: int32 [B, T], different in a row.
      batch: 0, or 1 for [A, B, S].
    """
    new = resharded(name, new, sharded_axes(old))

    def of_row(old, new, slots):
        at = (slice(None),) * batch + (slots,)
        return old.at[at].set(new, mode="drop", unique_indices=True)

    # By row, so that devices that hold some of the rows write theirs.
    put = jax.vmap(of_row, (batch, batch, 0), batch)
    return put(old, new.astype(old.dtype), slots)


def resharded(name: str, new: jax.Array, wanted: tuple) -> jax.Array:
    """Returns new tokens sharded over these axes, as those of the cache are.

    Raises:
      ValueError: for keys or values, which would have to move between devices in each step.
    """
    given = sharded_axes(new)
    if given == wanted:
        return new
    require(
        name not in "kv",
        f"KVCache: {name} is sharded as {PartitionSpec(*given)}, and the cache as "
        f"{PartitionSpec(*wanted)}; make it with new_cache(..., qkv_sharding=...).",
    )
    return jax.sharding.reshard(new, PartitionSpec(*wanted))


def sharded_axes(x: Any) -> tuple:
    """Returns the axes of an explicit mesh that the axes of an array or shape are sharded over."""
    sharding = x.sharding if isinstance(x, jax.ShapeDtypeStruct) else jax.typeof(x).sharding
    return (None,) * x.ndim if sharding is None else tuple(sharding.spec)


def same_sharding(x: jax.Array) -> dict[str, Any]:
    """Returns options of `x.at[rows]` that keep the sharding of rows on an explicit mesh."""
    return {"out_sharding": PartitionSpec(*sharded_axes(x))} if any(sharded_axes(x)) else {}


def batch_first(coordinates: jax.Array) -> jax.Array:
    """Returns coordinates [B, S] or [B, S, A]."""
    return jnp.moveaxis(coordinates, (-2, -1), (0, 1))
