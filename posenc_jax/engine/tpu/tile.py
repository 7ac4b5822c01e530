"""What both kernels do inside a tile."""

import functools
from typing import Any

import jax
import jax.numpy as jnp

from posenc_jax.engine.dropout import is_kept
from posenc_jax.engine.mask import add_saturated
from posenc_jax.engine.operands import Spec
from posenc_jax.engine.tpu.strip import LANES


def dot(a: jax.Array, b: jax.Array, contract: tuple[int, int] = (1, 0)) -> jax.Array:
    """Returns a float32 product over the two axes; exact products for float32."""
    return jax.lax.dot_general(
        a,
        b,
        (((contract[0],), (contract[1],)), ((), ())),
        precision=jax.lax.Precision.HIGHEST if a.dtype == jnp.float32 else None,
        preferred_element_type=jnp.float32,
    )


def to_column(row: jax.Array) -> jax.Array:
    """[1, T] to [T, 128], equal in all lanes."""
    return jnp.swapaxes(jnp.broadcast_to(row, (LANES, row.shape[1])), 0, 1)


def to_row(column: jax.Array) -> jax.Array:
    """[T, 128], equal in all lanes, to [1, T]."""
    return jnp.swapaxes(column, 0, 1)[:1]


def lanes(column: jax.Array, count: int) -> jax.Array:
    """[T, 128], equal in all lanes, to [T, count]."""
    if count <= LANES:
        return column[:, :count]
    wide = jnp.tile(column, (1, -(-count // LANES)))
    return wide if wide.shape[1] == count else wide[:, :count]


def kept_pairs(spec: Spec, rows: jax.Array, slots: jax.Array) -> jax.Array:
    """Returns the pairs that dropout keeps, of `dropout_rows` and int32 slots of keys."""
    return is_kept(rows, jax.lax.bitcast_convert_type(slots, jnp.uint32), spec.dropout_rate)


def visible(
    spec: Spec,
    shape: tuple[int, ...],
    q_axis: int,
    offset: Any,
    queries: dict[str, jax.Array],
    keys: dict[str, jax.Array],
    prefix: Any,
) -> jax.Array:
    """Returns bool `shape`, true where the query sees the key.

    Args:
      spec: the static part.
      shape: of the tile.
      q_axis: the axis of the queries.
      offset: slot of the first query less that of the first key.
      queries, keys: positions and segments of the tokens, of shapes that broadcast.
      prefix: the prefix length of the row, or None.
    """
    tests = []
    if spec.visibility.ordered:
        left, right = spec.visibility.window or (-1, -1)
        right = 0 if spec.visibility.is_causal else right
        if spec.by_slot:
            # One comparison a pair: what varies over one axis is made for that axis alone.
            sizes = [1, 1]
            sizes[q_axis] = shape[q_axis]
            q = jax.lax.broadcasted_iota(jnp.int32, sizes, q_axis) + offset
            sizes = [1, 1]
            sizes[1 - q_axis] = shape[1 - q_axis]
            k = jax.lax.broadcasted_iota(jnp.int32, sizes, 1 - q_axis)
            if right >= 0:
                tests.append(k - right <= q)
            if left >= 0:
                tests.append(q <= k + left)
        else:
            q, k = queries["positions"], keys["positions"]
            if right >= 0:
                tests.append(k <= add_saturated(q, right))
            if left >= 0:
                tests.append(q <= add_saturated(k, left))
            if prefix is not None:
                tests = [functools.reduce(jnp.logical_and, tests) | (k < prefix)]
    if spec.visibility.segments:
        q, k = queries["segments"], keys["segments"]
        tests.append(q == k)  # Padding has other ids there than here.
    return functools.reduce(jnp.logical_and, tests)
