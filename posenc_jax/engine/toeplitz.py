"""Tiles of a bias per distance: Toeplitz matrices, and the sums of their diagonals."""

import jax
import jax.numpy as jnp


def toeplitz_tile(values: jax.Array, shape: tuple[int, int]) -> jax.Array:
    """Returns the tile that is constant along its diagonals.

    Args:
      values: [Q + K - 1], by ascending distance of query from key.
      shape: (Q, K).
    """
    rows, columns = shape
    values = values[::-1]
    # Sixteen rows at once are read faster than single ones; eight at once are slower.
    group = 1 if rows % 16 else 16
    width = rows + columns - group

    def shifted(i):
        return jax.lax.dynamic_slice_in_dim(values, group - 1 - i, width)

    shifts = jax.vmap(shifted)(jnp.arange(group, dtype=jnp.int32))
    shifts = jax.lax.optimization_barrier(shifts)

    def row_group(i):
        return jax.lax.dynamic_slice_in_dim(shifts, rows - group * (i + 1), columns, 1)

    out = jax.vmap(row_group)(jnp.arange(rows // group, dtype=jnp.int32))
    return out.reshape(rows, columns)


def _toeplitz_forward(values, shape):
    return toeplitz_tile(values, shape), None


def _toeplitz_backward(shape, _, tile):
    sums = jax.lax.platform_dependent(tile, cpu=_row_by_row_sums, default=diagonal_sums)
    return (sums[::-1],)


def diagonal_sums(tile: jax.Array) -> jax.Array:
    """Sums the diagonals of [R, C], from the last row's first entry on: [R + C - 1].

    The rows are padded with R zeros and read again as rows that are shorter by one, which shifts
    every row to the right by one more entry than the row above it.
    """
    rows, columns = tile.shape
    padded = jnp.pad(tile[::-1], ((0, 0), (0, rows))).reshape(-1)
    return padded[:-rows].reshape(rows, rows + columns - 1).sum(0)


def _row_by_row_sums(tile: jax.Array) -> jax.Array:
    """Returns `diagonal_sums` by a loop over rows: faster on CPU, slow on TPU; launches on GPU."""
    rows, columns = tile.shape

    def add_row(r, sums):
        start = rows - 1 - r
        old = jax.lax.dynamic_slice_in_dim(sums, start, columns)
        new = old + jax.lax.dynamic_index_in_dim(tile, r, keepdims=False)
        return jax.lax.dynamic_update_slice_in_dim(sums, new, start, 0)

    sums = jnp.pad(jnp.zeros_like(tile[0]), (rows - 1, 0))
    return jax.lax.fori_loop(0, rows, add_row, sums)


toeplitz_tile_vjp = jax.custom_vjp(toeplitz_tile, nondiff_argnums=(1,))
toeplitz_tile_vjp.defvjp(_toeplitz_forward, _toeplitz_backward)
