"""Sheared strips: a number per distance, added to a tile by slices of lanes.

The bias of a tile is constant along its diagonals. Rotating every row of a tile is slow on a
TPU, but 128 rows that start at a multiple of 128 read the same sheared array at other lanes:

    strip[r, x] = line[x + 127 - r]        row r, lane x; line[y] is the value at offset low + y

where the offset is lane token minus row token. One strip [128, L] per head serves every tile
of every row of the batch. Its cotangent is a strip too: tiles are added to it at the same
lanes, and its diagonals are summed once per head, in one fixed order.
"""

import dataclasses
import functools
from typing import Any

import jax
import jax.numpy as jnp
from jax.experimental import pallas as pl
from jax.experimental.pallas import tpu as pltpu

LANES = 128
_CHUNK = 512  # Lanes that are sheared at once.


@dataclasses.dataclass(frozen=True)
class Strip:
    """The offsets of a strip.

    Attributes:
      low: offset of `line[0]`; 1 modulo 128.
      width: lanes of the strip, a multiple of 128; a line has 128 more.
      first, last: the least and greatest offset of the first tokens of a tile; tiles beyond them
        read the nearer of the two.
    """

    low: int
    width: int
    first: int
    last: int

    @classmethod
    def of(cls, first: int, last: int, rows: int, lanes: int) -> "Strip":
        """Returns the strip for tiles of `rows` x `lanes`."""
        low = first - rows + 1
        width = last - (LANES - 1) - low + lanes
        return cls(low, -(-width // LANES) * LANES, first, last)

    @property
    def line(self) -> int:
        """The number of offsets."""
        return self.width + LANES

    def lane(self, offset: Any, row: int) -> Any:
        """Returns the lane of the strip where 128 rows of a tile start.

        Args:
          offset: first lane token minus first row token of the tile.
          row: the first of the 128 rows.
        """
        lane = jnp.clip(offset, self.first, self.last) - row - (LANES - 1) - self.low
        return pl.multiple_of(lane, LANES)


def line_of(values: jax.Array, first: int, strip: Strip, sign: int, fill: float = 0.0) -> jax.Array:
    """Returns the line of a strip, [N or 1, F, L].

    Args:
      values: [N or 1, F, R], by ascending distance of query from key.
      first: the least distance.
      strip: the geometry.
      sign: 1 if lanes are queries, -1 if they are keys.
      fill: the value at other distances.
    """
    count = values.shape[2]
    if sign < 0:
        values, first = values[:, :, ::-1], 1 - first - count
    before, after = first - strip.low, strip.low + strip.line - first - count
    return jax.lax.pad(values, jnp.float32(fill), ((0, 0, 0), (0, 0, 0), (before, after, 0)))


def shear(strip: Strip, line: Any, out: Any, rotate: bool) -> None:
    """Writes the strip of `line`, [1, L + 128], to `out`, [128, L].

    Args:
      strip: the geometry.
      line, out: references.
      rotate: use `rotate_rows`, which takes seconds to compile for the interpreter.
    """
    for x in range(0, strip.width, _CHUNK):
        lanes = min(_CHUNK, strip.width - x)
        part = line[:, x : x + lanes + LANES]
        width = lanes + LANES
        if rotate:
            rows = rotate_rows(jnp.broadcast_to(part, (LANES, width)), width - LANES + 1)
        else:
            eight = _within_eight(jnp.broadcast_to(part, (8, width)), -1)
            rows = jnp.concatenate(
                [_roll(eight, width - (LANES - 8) + g) for g in range(0, LANES, 8)]
            )
        out[:, x : x + lanes] = rows[:, :lanes]


def rotate_rows(x: jax.Array, shift: int) -> jax.Array:
    """Rotates row r of [128, W] by `shift + r` lanes.

    It takes two instructions: JAX tests rotations of fewer than 128 rows on hardware.
    """
    half = LANES // 2

    def rotate(row):
        lanes = jnp.int32((shift + row) % x.shape[1])
        return pltpu.roll(x[row : row + half], lanes, 1, stride=1, stride_axis=0)

    return jnp.concatenate([rotate(0), rotate(half)])


def sum_diagonals(strip: Strip, tiles: Any, out: Any) -> None:
    """Adds the diagonals of `tiles`, [128, L], to `out`, [1, L + 128]: the transpose of `shear`.

    Mosaic refuses the strided rotation backwards, so groups of eight rows are rotated alike,
    and within eight rows there are three steps.
    """
    for x in range(0, strip.width, _CHUNK):
        lanes = min(_CHUNK, strip.width - x)
        rows = jnp.pad(tiles[:, x : x + lanes], ((0, 0), (0, LANES)))
        groups = [_roll(rows[g : g + 8], LANES - 8 - g) for g in range(0, LANES, 8)]
        total = _within_eight(functools.reduce(jnp.add, groups), 1)
        line = jnp.sum(total, 0, keepdims=True)
        out[:, x : x + lanes + LANES] += line


def _within_eight(x: jax.Array, sign: int) -> jax.Array:
    """Rotates row r of [8, W] by `sign * (7 - r)` lanes."""
    shift = 7 - jax.lax.broadcasted_iota(jnp.int32, x.shape, 0)
    for bit in (1, 2, 4):
        x = jnp.where((shift & bit) != 0, _roll(x, bit if sign > 0 else x.shape[1] - bit), x)
    return x


def _roll(x: jax.Array, shift: int) -> jax.Array:
    shift %= x.shape[1]
    return pltpu.roll(x, jnp.int32(shift), 1) if shift else x
