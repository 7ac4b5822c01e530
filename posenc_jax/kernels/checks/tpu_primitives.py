"""The parts of the TPU kernels, each alone: they move integers that name their place."""

import functools
from collections.abc import Callable, Iterator
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.experimental import pallas as pl
from jax.experimental.pallas import tpu as pltpu

from posenc_jax.kernels.checks.places import Primitive
from posenc_jax.kernels.tpu import schedule
from posenc_jax.kernels.tpu.bands import map_pairs
from posenc_jax.kernels.tpu.decode import head_of_tokens
from posenc_jax.kernels.tpu.strip import LANES, Strip, rotate_rows, shear, sum_diagonals
from posenc_jax.kernels.tpu.tile import to_column, to_row

_STRIP = Strip.of(-256, 128, 128, 128)
_PLACE = "row", "lane"


def primitives(interpret: Any, small: bool) -> Iterator[Primitive]:
    """Yields the parts; with `interpret` in the interpreter, with `small` fewer of them."""
    call = functools.partial(pl.pallas_call, interpret=interpret)
    for width in (256,) if small else (256, 640, 1152):
        # As strips and bands are; Mosaic refuses shifts of 2 to 63 modulo 128.
        yield _rotation(call, width, "float32", width - LANES + 1)
        for shift in (0, width - LANES + 1):  # The last row's is 128 in all.
            yield _rotation(call, width, "int32", shift)
    yield _shear(call, rotate=not interpret)
    yield _diagonals(call)
    yield _columns(call)
    yield _pairs(call)
    for dtype in ("bfloat16", "float32"):
        for heads in (2, 4, 8, 16):
            yield _heads(call, heads, dtype)
    yield _entries(interpret)


def _rotation(call: Callable, width: int, dtype: str, shift: int) -> Primitive:
    x = np.arange(LANES * width).reshape(LANES, width).astype(dtype)

    def kernel(x, out):
        out[...] = rotate_rows(x[...], shift)

    return Primitive(
        f"rotations by {shift} and more of rows of {width} lanes, {dtype}",
        call(kernel, out_shape=jax.ShapeDtypeStruct(x.shape, x.dtype)),
        (x,),
        np.stack([np.roll(x[r], shift + r) for r in range(LANES)]),
        _PLACE,
    )


def _shear(call: Callable, rotate: bool) -> Primitive:
    line = np.arange(_STRIP.line, dtype=np.float32)[None]

    def kernel(line, out):
        shear(_STRIP, line, out, rotate=rotate)

    shape = LANES, _STRIP.width
    r, x = np.indices(shape)
    return Primitive(
        "shear of a strip",
        call(kernel, out_shape=jax.ShapeDtypeStruct(shape, jnp.float32)),
        (line,),
        line[0, x + LANES - 1 - r],
        _PLACE,
    )


def _diagonals(call: Callable) -> Primitive:
    r, x = np.indices((LANES, _STRIP.width))
    tiles = (r * 3 + x % 64).astype(np.float32)

    def kernel(tiles, out):
        out[...] = jnp.zeros(out.shape, out.dtype)
        sum_diagonals(_STRIP, tiles, out)

    return Primitive(
        "sums of diagonals",
        call(kernel, out_shape=jax.ShapeDtypeStruct((1, _STRIP.line), jnp.float32)),
        (tiles,),
        np.bincount((x + LANES - 1 - r).ravel(), tiles.ravel(), _STRIP.line)[None],
        _PLACE,
    )


def _columns(call: Callable) -> Primitive:
    """The second half of the result comes back from columns."""
    row = np.arange(2 * LANES, dtype=np.float32)[None]

    def kernel(row, out):
        column = to_column(row[...])
        out[: 2 * LANES] = column
        out[2 * LANES :] = to_column(to_row(column) + 1000.0)

    want = np.broadcast_to(np.concatenate([row[0], row[0] + 1000])[:, None], (4 * LANES, LANES))
    shape = jax.ShapeDtypeStruct(want.shape, jnp.float32)
    return Primitive("row to column and back", call(kernel, out_shape=shape), (row,), want, _PLACE)


def _pairs(call: Callable) -> Primitive:
    """Three arrays: the last one has no partner."""
    x = np.arange(3 * 8 * LANES, dtype=np.int32).reshape(3, 8, LANES) - 1000

    def kernel(x, out):
        parts = [jax.lax.shift_left(x[n], jnp.int32(16)) for n in range(3)]
        moved = map_pairs(lambda y: pltpu.roll(y, jnp.int32(5), 1), parts)
        for n, y in enumerate(moved):
            out[n] = jax.lax.shift_right_arithmetic(y, jnp.int32(16))

    return Primitive(
        "two numbers of 16 bits in one of 32",
        call(kernel, out_shape=jax.ShapeDtypeStruct(x.shape, jnp.int32)),
        (x,),
        np.roll(x, 5, 2),
        ("array", *_PLACE),
    )


def _heads(call: Callable, heads: int, dtype: str) -> Primitive:
    token, head, lane = np.indices((LANES, heads, LANES))
    x = ((token + lane) % 32 * 8 + head).astype(jnp.dtype(dtype))  # bfloat16 is exact up to 256.

    def kernel(x, out):
        for n in range(heads):
            out[n] = head_of_tokens(x, n)

    return Primitive(
        f"heads of a block of tokens, K = {heads}, {dtype}",
        call(kernel, out_shape=jax.ShapeDtypeStruct((heads, LANES, LANES), x.dtype)),
        (x,),
        np.moveaxis(x, 1, 0),
        ("head", "token", "lane"),
    )


def _entries(interpret: Any) -> Primitive:
    """Reads entries in SMEM: in an index map, which names a block, and in the kernel.

    The result is the block, and below it in lanes 0 to 4 the fields of the entry.
    """
    rows, columns = np.array([0, 0, 2, 1, 2, 0]), np.array([1, 0, 3, 2, 0, 3])
    fields = np.stack([rows, columns, rows % 3 + 1, rows % 2, columns % 2])
    x = np.arange(3 * 8 * 4 * LANES, dtype=np.int32).reshape(3 * 8, 4 * LANES)

    def kernel(entries, x, out):
        entry = entries[pl.program_id(0)]
        values = [f(entry) for f in (schedule.row_of, schedule.column_of, schedule.kind_of)]
        values += [jnp.where(f(entry), 1, 0) for f in (schedule.is_first, schedule.is_last)]
        lane = jax.lax.broadcasted_iota(jnp.int32, (8, LANES), 1)
        numbers = jnp.zeros((8, LANES), jnp.int32)
        for n, value in enumerate(values):
            numbers = jnp.where(lane == n, value, numbers)
        out[:8] = x[...]
        out[8:] = numbers

    def block(t, entries):
        return schedule.row_of(entries[t]), schedule.column_of(entries[t])

    want = np.zeros((rows.size, 16, LANES), np.int32)
    want[:, :8] = x.reshape(3, 8, 4, LANES)[rows, :, columns]
    want[:, 8:, : len(fields)] = fields.T[:, None]
    call = pl.pallas_call(
        kernel,
        grid_spec=pltpu.PrefetchScalarGridSpec(
            num_scalar_prefetch=1,
            grid=(rows.size,),
            in_specs=[pl.BlockSpec((8, LANES), block)],
            out_specs=pl.BlockSpec((None, 16, LANES), lambda t, entries: (t, 0, 0)),
        ),
        out_shape=jax.ShapeDtypeStruct(want.shape, jnp.int32),
        interpret=interpret,
    )
    entries = schedule.entry_of(*fields).astype(np.int32)
    return Primitive("entries of a schedule", call, (entries, x), want, ("entry", *_PLACE))
