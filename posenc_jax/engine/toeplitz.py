"""Toeplitz tiles: values per distance expanded to query-key pairs, and the transposed sums.

One head and one row of the batch is the unit; callers vmap. Tiles are [Q, K], or [K, Q] with
`transposed`, the layout in which all products of the backward pass are fast on CPUs.

Functions named `*_vjp` have a custom VJP: deterministic sums in place of scatters. Forward
mode cannot pass them, so use them only where `jax.vjp` is applied at once.
"""

import dataclasses

import jax
import jax.numpy as jnp


def toeplitz_tile(values: jax.Array, shape: tuple[int, int], transposed: bool) -> jax.Array:
    """Returns the tile that is constant along its diagonals.

    Args:
      values: [Q + K - 1], by ascending distance of query from key.
      shape: (Q, K).
      transposed: whether to return [K, Q].
    """
    rows, columns = shape[::-1] if transposed else shape
    values = values if transposed else values[::-1]
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


def _toeplitz_forward(values, shape, transposed):
    return toeplitz_tile(values, shape, transposed), None


def _toeplitz_backward(shape, transposed, _, tile):
    rows, columns = tile.shape

    def add_row(r, sums):
        start = rows - 1 - r
        old = jax.lax.dynamic_slice_in_dim(sums, start, columns)
        new = old + jax.lax.dynamic_index_in_dim(tile, r, keepdims=False)
        return jax.lax.dynamic_update_slice_in_dim(sums, new, start, 0)

    sums = jnp.pad(jnp.zeros_like(tile[0]), (rows - 1, 0))
    sums = jax.lax.fori_loop(0, rows, add_row, sums)
    return (sums if transposed else sums[::-1],)


toeplitz_tile_vjp = jax.custom_vjp(toeplitz_tile, nondiff_argnums=(1, 2))
toeplitz_tile_vjp.defvjp(_toeplitz_forward, _toeplitz_backward)


@dataclasses.dataclass(frozen=True)
class DistanceRange:
    """The distances low, low + 1, ..., high for which a table has entries.

    Distances beyond an end use the entry of that end.

    Attributes:
      low, high: the first and the last.
      by_slot: whether distances are those of slots; else those of coordinates.
      open_low, open_high: whether the cotangent of distances beyond an end is needed.
    """

    low: int
    high: int
    by_slot: bool
    open_low: bool
    open_high: bool

    @property
    def size(self) -> int:
        """The number of distances."""
        return self.high - self.low + 1

    def mirrored(self) -> "DistanceRange":
        """Returns the range for distances of key from query."""
        ends = (-self.high, -self.low)
        return DistanceRange(*ends, self.by_slot, self.open_high, self.open_low)

    def entries(self, q: jax.Array, k: jax.Array, transposed: bool) -> jax.Array:
        """Returns the table entry of each pair of int32 [Q] and [K]: [Q, K], or [K, Q]."""
        return jnp.clip(_distances(q, k, transposed), self.low, self.high) - self.low


def gather_tile(table: jax.Array, entries: jax.Array, transposed: bool) -> jax.Array:
    """Returns the tile `table[query, entries[query, key]]`.

    Args:
      table: [Q, R], or [R, Q] transposed.
      entries: int32 [Q, K], or [K, Q] transposed, in [0, R).
      transposed: the layout.
    """
    return jnp.take_along_axis(table, entries, 0 if transposed else 1, mode="clip")


def slot_tile(
    table: jax.Array, q_slots: jax.Array, k_slots: jax.Array, by: DistanceRange, transposed: bool
) -> jax.Array:
    """`gather_tile` for slots that grow by one.

    Each key then has its own distance from a query, so the cotangent of the table is a
    gather; that of `gather_tile` is a scatter, many times slower.

    Args:
      table: [Q, R], or [R, Q] transposed, for the distances of `by`.
      q_slots, k_slots: int32 [Q], [K], consecutive.
      by: the distances of the table.
      transposed: the layout.
    """
    return gather_tile(table, by.entries(q_slots, k_slots, transposed), transposed)


def _slot_forward(table, q_slots, k_slots, by, transposed):
    return slot_tile(table, q_slots, k_slots, by, transposed), (q_slots, k_slots)


def _slot_backward(by, transposed, slots, tile):
    q_slots, k_slots = slots
    axis = 0 if transposed else 1
    entries = jnp.arange(by.size, dtype=jnp.int32)
    # The one key at each distance from each query.
    keys = _distances(q_slots - k_slots[:1] - by.low, entries, transposed)
    last = k_slots.shape[0] - 1
    out = gather_tile(tile, jnp.clip(keys, 0, last), transposed)
    out = jnp.where((keys >= 0) & (keys <= last), out, 0.0)
    distances = _distances(q_slots, k_slots, transposed)
    entries = jnp.expand_dims(entries, 1 - axis)
    for is_open, entry, beyond in (
        (by.open_low, 0, distances < by.low),
        (by.open_high, by.size - 1, distances > by.high),
    ):
        if is_open:
            rest = jnp.where(beyond, tile, 0.0).sum(axis, keepdims=True)
            out += jnp.where(entries == entry, rest, 0.0)
    return out, None, None


slot_tile_vjp = jax.custom_vjp(slot_tile, nondiff_argnums=(3, 4))
slot_tile_vjp.defvjp(_slot_forward, _slot_backward)


def _distances(q, k, transposed):
    """Of [Q] and [K]: [Q, K], or [K, Q]."""
    return q[None, :] - k[:, None] if transposed else q[:, None] - k[None, :]
