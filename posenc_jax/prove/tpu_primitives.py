"""The parts of the TPU kernels, each alone: what is moved are integers that name their place."""

import functools
from collections.abc import Callable, Iterator
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.experimental import pallas as pl
from jax.experimental.pallas import tpu as pltpu

from posenc_jax.engine.tpu import schedule
from posenc_jax.engine.tpu.bands import map_pairs
from posenc_jax.engine.tpu.decode import head_of_tokens
from posenc_jax.engine.tpu.strip import LANES, Strip, rotate_rows, shear, sum_diagonals
from posenc_jax.engine.tpu.tile import to_column, to_row
from posenc_jax.prove.places import wrong_integer

_STRIP = Strip.of(-256, 128, 128, 128)


def primitives(interpret: Any, small: bool) -> Iterator[tuple[str, str, Callable[[], str | None]]]:
    """Yields names, dtypes and checks; a check returns the first wrong place, or None."""
    call = functools.partial(pl.pallas_call, interpret=interpret)
    for width in (256,) if small else (256, 640, 1152):
        # Strips are rotated to the left, by float32; bands to the right, by int32.
        for dtype, shift in (("float32", width - LANES + 1), ("int32", 3)):
            run = functools.partial(_rotation, call, width, dtype, shift)
            yield f"rotations of rows of {width} lanes, {dtype}", dtype, run
    yield "shear of a strip", "float32", functools.partial(_shear, call, not interpret)
    yield "sums of diagonals", "float32", functools.partial(_diagonals, call)
    yield "row to column and back", "float32", functools.partial(_columns, call)
    yield "two numbers of 16 bits in one of 32", "int32", functools.partial(_pairs, call)
    for dtype in ("bfloat16", "float32"):
        for heads in (2, 4, 8):
            run = functools.partial(_heads, call, heads, dtype)
            yield f"heads of a block of tokens, K = {heads}, {dtype}", dtype, run
    yield "entries of a schedule", "int32", functools.partial(_entries, interpret)


def _rotation(call: Callable, width: int, dtype: str, shift: int) -> str | None:
    x = np.arange(LANES * width).reshape(LANES, width).astype(dtype)

    def kernel(x, out):
        out[...] = rotate_rows(x[...], shift)

    got = call(kernel, out_shape=jax.ShapeDtypeStruct(x.shape, x.dtype))(x)
    want = np.stack([np.roll(x[r], shift + r) for r in range(LANES)])
    return wrong_integer(got, want, ("row", "lane"))


def _shear(call: Callable, rotate: bool) -> str | None:
    line = np.arange(_STRIP.line, dtype=np.float32)[None]

    def kernel(line, out):
        shear(_STRIP, line, out, rotate=rotate)

    shape = LANES, _STRIP.width
    got = call(kernel, out_shape=jax.ShapeDtypeStruct(shape, jnp.float32))(line)
    r, x = np.indices(shape)
    return wrong_integer(got, line[0, x + LANES - 1 - r], ("row", "lane"))


def _diagonals(call: Callable) -> str | None:
    r, x = np.indices((LANES, _STRIP.width))
    tiles = (r * 3 + x % 64).astype(np.float32)

    def kernel(tiles, out):
        out[...] = jnp.zeros(out.shape, out.dtype)
        sum_diagonals(_STRIP, tiles, out)

    got = call(kernel, out_shape=jax.ShapeDtypeStruct((1, _STRIP.line), jnp.float32))(tiles)
    want = np.bincount((x + LANES - 1 - r).ravel(), tiles.ravel(), _STRIP.line)[None]
    return wrong_integer(got, want, ("row", "lane"))


def _columns(call: Callable) -> str | None:
    row = np.arange(2 * LANES, dtype=np.float32)[None]

    def kernel(row, column, back):
        column[...] = to_column(row[...])
        back[...] = to_row(column[...])

    shapes = [jax.ShapeDtypeStruct(s, jnp.float32) for s in ((2 * LANES, LANES), row.shape)]
    column, back = call(kernel, out_shape=shapes)(row)
    place = wrong_integer(column, np.broadcast_to(row.T, column.shape), ("row", "lane"))
    return place or wrong_integer(back, row, ("row", "lane"))


def _pairs(call: Callable) -> str | None:
    """Three arrays: the last one has no partner."""
    x = np.arange(3 * 8 * LANES, dtype=np.int32).reshape(3, 8, LANES) - 1000

    def kernel(x, out):
        parts = [jax.lax.shift_left(x[n], jnp.int32(16)) for n in range(3)]
        moved = map_pairs(lambda y: pltpu.roll(y, jnp.int32(5), 1), parts)
        for n, y in enumerate(moved):
            out[n] = jax.lax.shift_right_arithmetic(y, jnp.int32(16))

    got = call(kernel, out_shape=jax.ShapeDtypeStruct(x.shape, jnp.int32))(x)
    return wrong_integer(got, np.roll(x, 5, 2), ("array", "row", "lane"))


def _heads(call: Callable, heads: int, dtype: str) -> str | None:
    token, head, lane = np.indices((LANES, heads, LANES))
    x = ((token + lane) % 32 * 8 + head).astype(jnp.dtype(dtype))  # bfloat16 is exact up to 256.

    def kernel(x, out):
        for n in range(heads):
            out[n] = head_of_tokens(x, n)

    shape = jax.ShapeDtypeStruct((heads, LANES, LANES), x.dtype)
    got = call(kernel, out_shape=shape)(x)
    return wrong_integer(got, np.moveaxis(x, 1, 0), ("head", "token", "lane"))


def _entries(interpret: Any) -> str | None:
    """Reads entries in SMEM: in an index map, which names a block, and in the kernel."""
    rows, columns = np.array([0, 0, 2, 1, 2, 0]), np.array([1, 0, 3, 2, 0, 3])
    fields = np.stack([rows, columns, rows % 3 + 1, rows % 2, columns % 2])
    x = np.arange(3 * 8 * 4 * LANES, dtype=np.int32).reshape(3 * 8, 4 * LANES)

    def kernel(entries, x, block, numbers):
        entry = entries[pl.program_id(0)]
        block[...] = x[...]
        read = schedule.row_of, schedule.column_of, schedule.kind_of
        flags = schedule.is_first, schedule.is_last
        values = [field(entry) for field in read]
        values += [jnp.where(flag(entry), 1, 0) for flag in flags]
        lane = jax.lax.broadcasted_iota(jnp.int32, (8, LANES), 1)
        total = jnp.zeros((8, LANES), jnp.int32)
        for n, value in enumerate(values):
            total = jnp.where(lane == n, value, total)
        numbers[...] = total

    def place(t, entries):
        return schedule.row_of(entries[t]), schedule.column_of(entries[t])

    one = pl.BlockSpec((None, 8, LANES), lambda t, entries: (t, 0, 0))
    shape = jax.ShapeDtypeStruct((rows.size, 8, LANES), jnp.int32)
    blocks, numbers = pl.pallas_call(
        kernel,
        grid_spec=pltpu.PrefetchScalarGridSpec(
            num_scalar_prefetch=1,
            grid=(rows.size,),
            in_specs=[pl.BlockSpec((8, LANES), place)],
            out_specs=(one, one),
        ),
        out_shape=(shape, shape),
        interpret=interpret,
    )(schedule.entry_of(*fields).astype(np.int32), x)
    want = x.reshape(3, 8, 4, LANES)[rows, :, columns]
    place_of_block = wrong_integer(blocks, want, ("entry", "row", "lane"))
    numbers = np.asarray(numbers)[:, 0, : len(fields)]
    return place_of_block or wrong_integer(numbers, fields.T, ("entry", "field"))
