"""Operations on a tile: products, layouts, masks, biases by distance and the running softmax.

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

from posenc_jax.engine.dropout import is_kept
from posenc_jax.engine.mask import LEAST_LOGIT, MASK_VALUE, add_saturated, in_units
from posenc_jax.engine.problem import LogSumExp
from posenc_jax.engine.simplified import AllPairs
from posenc_jax.kernels.operands import LOG2E, Spec, TokenScalars

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


def dot(a: jax.Array, b: jax.Array, contract: tuple[int, int] = (1, 0)) -> jax.Array:
    """Returns a float32 product over the two axes, exact for float32 arrays.

    The dtype alone sets the precision: Mosaic refuses products of bfloat16 at the higher precision
    that `jax_default_matmul_precision` may ask for.
    """
    exact = a.dtype == jnp.float32
    return jax.lax.dot_general(
        a,
        b,
        (((contract[0],), (contract[1],)), ((), ())),
        precision=jax.lax.Precision.HIGHEST if exact else jax.lax.Precision.DEFAULT,
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


def add_pairs(
    spec: Spec, s: jax.Array, term: AllPairs, tile: jax.Array, see: jax.Array | None
) -> jax.Array:
    """Adds an array of all pairs to the logits of a tile; its -inf hides keys, NaN or not.

    Args:
      spec: the static part.
      s: logits in units of `spec.unit`.
      term: has the factor.
      tile: of the array.
      see: `visible`, or None where all pairs are. Hidden entries may be NaN, and so would be the
        derivative of a softcap.
    """
    tile = tile.astype(jnp.float32)
    if see is not None and spec.softcap is not None:
        tile = jnp.where(see, tile, 0.0)
    s = s + in_units(tile, spec.unit * term.factor)
    return jnp.where(tile == MASK_VALUE, MASK_VALUE, s)


def soft_cap(softcap: float, s: jax.Array, bounded: jax.Array, may_hide: bool) -> jax.Array:
    """Returns capped logits in units of log 2.

    Args:
      softcap: the cap.
      s: the logits, divided by the cap.
      bounded: tanh(s).
      may_hide: whether logits may be -inf, which stays.
    """
    capped = softcap * LOG2E * bounded
    return jnp.where(s == -jnp.inf, s, capped) if may_hide else capped


def start_softmax(scratch: dict[str, Any]) -> None:
    """Sets the running maximum, sum and output before the first key."""
    scratch["m"][...] = jnp.full(scratch["m"].shape, LEAST_LOGIT, jnp.float32)
    for name in ("l", "out"):
        scratch[name][...] = jnp.zeros(scratch[name].shape, jnp.float32)


def update_softmax(scratch: dict[str, Any], s: jax.Array) -> tuple[jax.Array, jax.Array]:
    """Updates the running maximum and sum; returns the weights and the decay of earlier ones.

    Args:
      scratch: float32 [T, 128]: "m" and "l", equal in all lanes.
      s: logits [T, K] in units of log 2.
    """
    m = scratch["m"][...]
    m_new = jnp.maximum(m, jnp.max(s, 1, keepdims=True))
    p, decay = jnp.exp2(s - lanes(m_new, s.shape[1])), jnp.exp2(m - m_new)
    scratch["m"][...] = m_new
    scratch["l"][...] = scratch["l"][...] * decay + jnp.sum(p, 1, keepdims=True)
    return p, decay


def finish_softmax(
    scratch: dict[str, Any], out_ref: Any, dropout_rate: float | None = None
) -> LogSumExp:
    """Writes the output, and returns the log-sum-exp, [T, 128], with `top` in units of log 2."""
    m, total = scratch["m"][...], scratch["l"][...]
    share = 1.0 / jnp.where(total == 0.0, 1.0, total)
    share = share if dropout_rate is None else share / (1.0 - dropout_rate)
    out_ref[...] = (scratch["out"][...] * lanes(share, out_ref.shape[1])).astype(out_ref.dtype)
    return LogSumExp(m, total)


def visible(
    spec: Spec,
    shape: tuple[int, ...],
    q_axis: int,
    offset: Any,
    queries: TokenScalars,
    keys: TokenScalars,
    prefix: Any,
) -> jax.Array:
    """Returns bool `shape`, true where the query sees the key.

    Args:
      spec: the static part.
      shape: of the tile.
      q_axis: the axis of the queries.
      offset: slot of the first query minus slot of the first key.
      queries, keys: of the tokens, of shapes that broadcast.
      prefix: the prefix length of the row, or None.
    """
    tests = []
    if spec.visibility.ordered:
        if spec.by_slot:
            before, after = spec.sides
            # One operation per pair, the comparison: indices have one axis, not two.
            sizes = [1, 1]
            sizes[q_axis] = shape[q_axis]
            q = jax.lax.broadcasted_iota(jnp.int32, sizes, q_axis) + offset
            sizes = [1, 1]
            sizes[1 - q_axis] = shape[1 - q_axis]
            k = jax.lax.broadcasted_iota(jnp.int32, sizes, 1 - q_axis)
            if after >= 0:
                tests.append(k - after <= q)
            if before >= 0:
                tests.append(q <= k + before)
        for name, before, after in () if spec.by_slot else spec.comparisons:
            q, k = getattr(queries, name), getattr(keys, name)
            if after >= 0:
                tests.append(k <= add_saturated(q, after))
            if before >= 0:
                tests.append(q <= add_saturated(k, before))
        if prefix is not None:
            tests = [functools.reduce(jnp.logical_and, tests) | (keys.positions < prefix)]
    if spec.visibility.until:
        tests.append(queries.positions < keys.until)
    if spec.mask_mod is not None:
        index = (jnp.broadcast_to(x.index, shape) for x in (queries, keys))
        tests.append(jax.vmap(jax.vmap(spec.mask_mod))(*index))
    if spec.visibility.segments:
        q, k = queries.segments, keys.segments
        tests.append(q == k)  # Padding of queries and of keys has different ids.
    return functools.reduce(jnp.logical_and, tests)
