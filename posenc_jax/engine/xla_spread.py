"""From numbers per distance to a tile of query-key pairs, and the cotangent's way back.

Both ways of laying out a tile are needed: [q, k] in the forward pass, [k, q] ("flipped") in
the backward pass, where all five matrix products then have the form that is fast.

What is called `_pulled` has a cotangent of its own making, and can be used only where
`jax.vjp` is applied to it at once: forward mode cannot pass it.
"""

import dataclasses

import jax
import jax.numpy as jnp


def by_diagonal(window: jax.Array, sizes: tuple[int, int, int], flip: bool) -> jax.Array:
    """Spreads a number per distance over a tile, constant along its diagonals.

    Args:
      window: [N, Q + K - 1], in order of growing distance of query from key.
      sizes: B, Q and K.
      flip: whether to return [B, N, K, Q].

    Returns:
      [B, N, Q, K], the same for every batch row.
    """
    batch, *tile = sizes
    rows, columns = tile[::-1] if flip else tile
    line = window if flip else window[:, ::-1]

    # Sixteen rows in one piece are read faster than one by one; of eight it would be slower.
    piece = 1 if rows % 16 else 16
    count = rows + columns - piece

    def shifted(i):
        return jax.lax.dynamic_slice_in_dim(line, piece - 1 - i, count, 1)

    pieces = jax.vmap(shifted, out_axes=1)(jnp.arange(piece, dtype=jnp.int32))
    pieces = jax.lax.optimization_barrier(pieces)

    def some(i):
        return jax.lax.dynamic_slice_in_dim(pieces, rows - piece * (i + 1), columns, 2)

    out = jax.vmap(some, out_axes=1)(jnp.arange(rows // piece, dtype=jnp.int32))
    return jnp.broadcast_to(out.reshape(-1, rows, columns), (batch, len(line), rows, columns))


def _by_diagonal_forward(window, sizes, flip):
    return by_diagonal(window, sizes, flip), None


def _by_diagonal_backward(sizes, flip, _, tile):
    rows, columns = tile.shape[2:]

    def add_row(r, line):
        start = rows - 1 - r
        old = jax.lax.dynamic_slice_in_dim(line, start, columns, 2)
        new = old + jax.lax.dynamic_index_in_dim(tile, r, 2, keepdims=False)
        return jax.lax.dynamic_update_slice_in_dim(line, new, start, 2)

    # Every batch row has a line of its own: XLA would put a sum over them into the loop.
    line = jnp.pad(jnp.zeros_like(tile[:, :, 0]), ((0, 0), (0, 0), (rows - 1, 0)))
    line = jax.lax.fori_loop(0, rows, add_row, line).sum(0)
    return (line if flip else line[:, ::-1],)


by_diagonal_pulled = jax.custom_vjp(by_diagonal, nondiff_argnums=(1, 2))
by_diagonal_pulled.defvjp(_by_diagonal_forward, _by_diagonal_backward)


def by_index(table: jax.Array, index: jax.Array, flip: bool) -> jax.Array:
    """Spreads a table of every query over its keys.

    Args:
      table: [B, N, Q, R], or [B, N, R, Q] flipped.
      index: int32 [B or 1, Q, K], or [B or 1, K, Q] flipped, in [0, R).

    Returns:
      [B, N, Q, K], or [B, N, K, Q] flipped.
    """
    shape = (*table.shape[:2], *index.shape[1:])
    index = jnp.broadcast_to(index[:, None], shape)
    return jnp.take_along_axis(table, index, 2 if flip else 3, mode="clip")


@dataclasses.dataclass(frozen=True)
class Band:
    """The distances low, low + 1, ..., high that a table has entries for.

    Attributes:
      low, high: the first and the last.
      ordered: whether distances are those of slots; else they are those of coordinates.
      open_low, open_high: whether the cotangent of what lies beyond an end matters.
    """

    low: int
    high: int
    ordered: bool
    open_low: bool
    open_high: bool

    @property
    def size(self) -> int:
        """The number of distances."""
        return self.high - self.low + 1

    def mirrored(self) -> "Band":
        """Returns the same distances, seen from the other side."""
        return Band(-self.high, -self.low, self.ordered, self.open_high, self.open_low)

    def index(self, q: jax.Array, k: jax.Array, flip: bool) -> jax.Array:
        """Returns the entries of int32 [B, Q] and [B, K]: [B, Q, K], or [B, K, Q]."""
        return jnp.clip(_distances(q, k, flip), self.low, self.high) - self.low


def by_distance(
    table: jax.Array, q_slots: jax.Array, k_slots: jax.Array, band: Band, flip: bool
) -> jax.Array:
    """`by_index` for queries and keys that stand in order, side by side.

    Every key of a query has a distance of its own, so that the cotangent of the table is
    gathered; that of `by_index` has to be scattered, which is many times slower.

    Args:
      table: [B, N, Q, R], or [B, N, R, Q] flipped, for the distances of `band`.
      q_slots: int32 [1, Q], which grow by one.
      k_slots: int32 [1, K], which grow by one.
      band: the distances of the table; those beyond have the entry of the nearer end.
      flip: the layout.
    """
    return by_index(table, band.index(q_slots, k_slots, flip), flip)


def _by_distance_forward(table, q_slots, k_slots, band, flip):
    return by_distance(table, q_slots, k_slots, band, flip), (q_slots, k_slots)


def _by_distance_backward(band, flip, slots, tile):
    q_slots, k_slots = slots
    axis = 2 if flip else 3
    entries = jnp.arange(band.size, dtype=jnp.int32)[None]
    # The one key at each distance from each query.
    keys = _distances(q_slots - k_slots[:, :1] - band.low, entries, flip)
    last = k_slots.shape[1] - 1
    out = by_index(tile, jnp.clip(keys, 0, last), flip)
    out = jnp.where(((keys >= 0) & (keys <= last))[:, None], out, 0.0)
    distances = _distances(q_slots, k_slots, flip)
    entries = jnp.expand_dims(entries, 2 if flip else 1)[:, None]
    for is_open, entry, beyond in (
        (band.open_low, 0, distances < band.low),
        (band.open_high, band.size - 1, distances > band.high),
    ):
        if is_open:
            rest = jnp.where(beyond[:, None], tile, 0.0).sum(axis, keepdims=True)
            out += jnp.where(entries == entry, rest, 0.0)
    return out, None, None


by_distance_pulled = jax.custom_vjp(by_distance, nondiff_argnums=(3, 4))
by_distance_pulled.defvjp(_by_distance_forward, _by_distance_backward)


def by_band(
    table: jax.Array, q: dict, k: dict, band: Band, *, flip: bool, pulled: bool
) -> jax.Array:
    """Spreads a table for the distances of a band over the tile of two sides."""
    if band.ordered:
        spread = by_distance_pulled if pulled else by_distance
        return spread(table, q["slots"], k["slots"], band, flip)
    index = band.index(q["coordinates"], k["coordinates"], flip)
    return by_index(table, index, flip)


def _distances(q, k, flip):
    """Of [B, Q] and [B, K]: [B, Q, K], or [B, K, Q]."""
    return q[:, None, :] - k[:, :, None] if flip else q[:, :, None] - k[:, None, :]
