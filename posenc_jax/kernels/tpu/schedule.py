"""The schedule of the tiles: the steps of the grid, and the kind of each.

The grid has a step for each tile of `tile_order`. A step takes a fifth of a tile or more even if
the tile is empty, so tiles that causality and windows by slot hide have none.
"""

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from posenc_jax.engine.blocks import Blocks, Visibility
from posenc_jax.kernels.kinds import EMPTY, tile_kinds

_FIRST, _LAST = 4, 8
_ROW, _COLUMN = 4, 17  # First bits of the row and the column of an entry.
_MOST = 1 << _COLUMN - _ROW  # Rows, and columns.


def tile_order(
    length: int, keys: int, blocks: Blocks, sides: tuple[int, int], by_key: bool
) -> tuple[np.ndarray, np.ndarray]:
    """Returns the rows and columns, int [tiles], of the tiles that have a step, by rows.

    Rows are blocks of queries, columns blocks of keys, and every row has a tile. With `by_key`,
    rows are blocks of keys, and the last row has all its tiles; so have all rows if more than 0.7
    of the tiles have a step: steps by schedule take 1.4 times as long in the backward pass.

    Args:
      length, keys: T and S, multiples of the blocks.
      blocks: queries and keys per tile.
      sides: how many slots a query sees before its own and after it; negative for no limit.
      by_key: for the backward pass.

    Raises:
      NotImplementedError: for more blocks than an entry of the schedule can name.
    """
    if max(length // blocks.q, keys // blocks.k) > _MOST:
        raise NotImplementedError(
            f'attention: implementation="pallas": T = {length} and S = {keys} are more than '
            f"{_MOST} blocks of {blocks}; use larger ones."
        )
    q = np.arange(0, length, blocks.q)[:, None]
    k = np.arange(0, keys, blocks.k)[None]
    live, (before, after) = np.ones((q.size, k.size), bool), sides
    if after >= 0:
        live &= k - (q + blocks.q - 1) <= after
    if before >= 0:
        live &= q - (k + blocks.k - 1) <= before
    if by_key:
        live = live.T
        live[-1] = True
        live |= live.mean() > 0.7
    live[~live.any(1), 0] = True
    rows, columns = np.nonzero(live)
    return rows, columns


def schedule(
    see: Visibility,
    q: Any,
    k: Any,
    prefix: jax.Array | None,
    blocks: Blocks,
    order: tuple[np.ndarray, np.ndarray],
    by_key: bool,
) -> jax.Array:
    """Returns the schedule of a pass: int32 [B or 1, tiles], for the tiles of `tile_order`.

    An entry holds the kind of the tile, its row, whether it is the first or last there, and the
    column to have in memory. Empty tiles repeat the column of the last tile that is not empty, so
    that nothing is copied for them.
    """
    kind = tile_kinds(see, q, k, prefix, blocks)
    kind = jnp.swapaxes(kind, 1, 2) if by_key else kind
    live = kind != EMPTY
    column = jnp.broadcast_to(jnp.arange(live.shape[2], dtype=jnp.int32), live.shape)
    last = jax.lax.cummax(jnp.where(live, column, -1), axis=2)
    first = jnp.argmax(live, 2).astype(jnp.int32)[..., None]
    block = jnp.where(last < 0, first, last)
    entry = entry_of(0, block, kind, False, False)
    change = np.diff(order[0], prepend=-1, append=-1) != 0
    known = entry_of(order[0], 0, 0, change[:-1], change[1:])
    return entry[:, *order] + known.astype(np.int32)[None]


def entry_of(row: Any, column: Any, kind: Any, first: Any, last: Any) -> Any:
    """Returns an entry of a schedule."""
    return (column << _COLUMN) + (row << _ROW) + kind + _FIRST * first + _LAST * last


def row_of(entry: Any) -> Any:
    """Returns the row of an entry of a schedule."""
    return (entry >> jnp.int32(_ROW)) & jnp.int32(_MOST - 1)


def column_of(entry: Any) -> Any:
    """Returns the column that an entry of a schedule has in memory."""
    return entry >> jnp.int32(_COLUMN)


def kind_of(entry: Any) -> Any:
    """Returns the kind of the tile of an entry of a schedule."""
    return entry & jnp.int32(_FIRST - 1)


def is_first(entry: Any) -> Any:
    """Returns whether an entry of a schedule is the first of its row."""
    return entry & jnp.int32(_FIRST) != 0


def is_last(entry: Any) -> Any:
    """Returns whether an entry of a schedule is the last of its row."""
    return entry & jnp.int32(_LAST) != 0
