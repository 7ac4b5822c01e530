"""The static part of a problem for TPU, and the schedule of its tiles.

The grid of a kernel has a step for each tile of `tile_order`. A step takes a fifth of a tile or
more even if the tile is empty, so tiles that causality and windows by slot hide have none. An entry
of the schedule is the kind of a tile, and its place.
"""

import dataclasses
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from posenc_jax.engine.blocks import Blocks, Visibility
from posenc_jax.engine.mask import MASK_VALUE
from posenc_jax.kernels.operands import EMPTY, Hiding, Operands, Spec, tile_kinds
from posenc_jax.kernels.tpu.tile import Strip, line_of

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
    hiding: Hiding,
    blocks: Blocks,
    order: tuple[np.ndarray, np.ndarray],
    by_key: bool,
) -> jax.Array:
    """Returns the schedule of a pass: int32 [B or 1, tiles], for the tiles of `tile_order`.

    Empty tiles repeat the column of the last tile that is not empty, so
    that nothing is copied for them.
    """
    kind = tile_kinds(see, q, k, hiding, blocks)
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
    """Returns the number of an `Entry`."""
    return (column << _COLUMN) + (row << _ROW) + kind + _FIRST * first + _LAST * last


class Entry(NamedTuple):
    """An entry of a schedule: the kind of a tile, and its place."""

    number: Any

    @property
    def row(self) -> Any:
        """The row of the tile."""
        return (self.number >> jnp.int32(_ROW)) & jnp.int32(_MOST - 1)

    @property
    def column(self) -> Any:
        """The column to have in memory."""
        return self.number >> jnp.int32(_COLUMN)

    @property
    def kind(self) -> Any:
        """The kind of the tile."""
        return self.number & jnp.int32(_FIRST - 1)

    @property
    def is_first(self) -> Any:
        """Whether the tile is the first of its row."""
        return self.number & jnp.int32(_FIRST) != 0

    @property
    def is_last(self) -> Any:
        """Whether the tile is the last of its row."""
        return self.number & jnp.int32(_LAST) != 0


@dataclasses.dataclass(frozen=True, kw_only=True)
class TPUSpec(Spec):
    """The static part of a problem.

    Attributes:
      vmem_limit: bytes.
    """

    vmem_limit: int

    def order(self, by_key: bool) -> tuple[np.ndarray, np.ndarray]:
        """Returns `tile_order` of the forward or, with `by_key`, of the backward pass."""
        blocks = self.backward if by_key else self.forward
        sides = self.sides if self.by_slot else (-1, -1)
        return tile_order(self.length, self.keys, blocks, sides, by_key)

    def schedules(self, q: Any, k: Any, hiding: Hiding) -> tuple[Any, ...]:
        """Returns the schedules of both passes, and the kinds of tiles for arrays of all pairs."""
        see = self.visibility
        schedules = tuple(
            schedule(see, q, k, hiding, blocks, self.order(by_key), by_key)
            for blocks, by_key in ((self.forward, False), (self.backward, True))
        )
        return *schedules, tile_kinds(see, q, k, hiding, self.forward) if self.pairs else None


def heads_first(x: Operands) -> Operands:
    """Returns the operands with q, k, v of [B, N, T, H]."""
    return dataclasses.replace(x, **{name: heads_before_tokens(getattr(x, name)) for name in "qkv"})


def heads_before_tokens(x: jax.Array) -> jax.Array:
    """[B, T, N, H] to [B, N, T, H], and back."""
    return jnp.swapaxes(x, 1, 2)


def bias_line(spec: TPUSpec, bias: jax.Array, first: int, strip: Strip, sign: int) -> jax.Array:
    """Returns the line of the bias of `Operands`, [N or 1, 1, L]."""
    fill = MASK_VALUE if spec.visibility.mask_in_bias else 0.0
    return line_of(bias[:, None], first, strip, sign, fill)
