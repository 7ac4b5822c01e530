"""What both kernels do inside a tile, and how blocks of arrays are addressed."""

import functools
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
from jax.experimental import pallas as pl

from posenc_jax.engine.tpu.operands import Spec
from posenc_jax.engine.tpu.strip import LANES
from posenc_jax.mask import add_saturated

At = Callable[..., tuple[Any, Any, Any]]
"""Grid indices to batch row, head and block."""


def matrix_spec(x: jax.Array, block: int, dim: int, at: At) -> pl.BlockSpec:
    """Returns the blocks of tokens of an array in the layout of `to_layout`."""
    if x.ndim == 3:

        def packed(*ids):
            b, head, index = at(*ids)
            return b, index, head

        return pl.BlockSpec((None, block, dim), packed)
    return pl.BlockSpec((None, None, block, dim), lambda *ids: (*at(*ids), 0))


def row_spec(x: jax.Array, block: int, at: At) -> pl.BlockSpec:
    """Returns the blocks of tokens of an array [B or 1, 1, T]."""

    def index(*ids):
        b, _, index = at(*ids)
        return (0 if x.shape[0] == 1 else b), 0, index

    return pl.BlockSpec((None, 1, block), index)


def number_spec(x: jax.Array, block: int, at: At, group: int = 1) -> pl.BlockSpec:
    """Returns the blocks of tokens of an array [B, N, 1, T], or [B, N / group, 1, T]."""

    def index(*ids):
        b, head, index = at(*ids)
        return b, jax.lax.div(head, group), 0, index

    return pl.BlockSpec((None, None, 1, block), index)


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


def visible(
    spec: Spec,
    shape: tuple[int, int],
    q_axis: int,
    offset: Any,
    queries: dict[str, jax.Array],
    keys: dict[str, jax.Array],
    prefix: Any,
) -> jax.Array | None:
    """Returns bool `shape`, true where the query sees the key; None where all are seen.

    Args:
      spec: the static part.
      shape: of the tile.
      q_axis: the axis of the queries.
      offset: slot of the first query less that of the first key.
      queries, keys: positions and segments of the tokens, of shapes that broadcast.
      prefix: the prefix length of the row, or None.
    """
    tests = []
    if spec.ordered:
        left, right = spec.visibility.window or (-1, -1)
        right = 0 if spec.visibility.is_causal else right
        if spec.by_slot:
            q, k = (jax.lax.broadcasted_iota(jnp.int32, shape, n) for n in (q_axis, 1 - q_axis))
            behind = q - k
            if right >= 0:
                tests.append(behind >= -right - offset)
            if left >= 0:
                tests.append(behind <= left - offset)
        else:
            q, k = queries["positions"], keys["positions"]
            if right >= 0:
                tests.append(k <= add_saturated(q, right))
            if left >= 0:
                tests.append(q <= add_saturated(k, left))
            if prefix is not None:
                tests = [functools.reduce(jnp.logical_and, tests) | (k < prefix)]
    if spec.segments:
        q, k = queries["segments"], keys["segments"]
        tests.append((q == k) & (k >= 0))
    return functools.reduce(jnp.logical_and, tests) if tests else None
