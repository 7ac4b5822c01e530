"""The parts of the GPU kernels, each alone: they move integers that name their place."""

import types
from collections.abc import Callable, Iterator
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.experimental.pallas import mosaic_gpu as plgpu

from posenc_jax.kernels.checks.places import Primitive
from posenc_jax.kernels.gpu.gather import (
    PITCH,
    by_distance,
    gather,
    indices,
    store,
    warpgroup_barrier,
)
from posenc_jax.kernels.gpu.pipe import COMPUTE, Warpgroup, launch, matrix, pipe, vector
from posenc_jax.kernels.gpu.spec import ROW, ROWS, load
from posenc_jax.kernels.gpu.tile import products, rows_to_tile

_AXES = "warpgroup", "row", "column"


def primitives(interpret: Any, small: bool) -> Iterator[Primitive]:
    """Yields the parts; with `interpret` in the interpreter, with `small` fewer of them."""
    for columns in (32,) if small else (128, 64, 32):
        yield _indices(columns, interpret)
        yield _by_distance(columns, interpret)
    yield _store(interpret)
    for columns, wide in ((64, False), (32, False), (64, True)):
        yield _copy(columns, wide, interpret)
    yield _pipe(interpret)
    yield _product(interpret)


def _one_block(
    compute: Callable[[Warpgroup], None],
    out: Any,
    interpret: Any,
    scratch: dict[str, Any],
    copy: Callable[[Warpgroup], None] = lambda wg: None,
) -> Callable:
    """Returns a function of the input "x" that runs one block of threads.

    Args:
      compute, copy, interpret: as for `launch`.
      out: an array like the result.
      scratch: the scratch types.
    """

    def run(*x):
        return launch(
            "primitive",
            compute,
            copy,
            grid={"i": 1},
            inputs=dict(zip(("x", "y"), x, strict=False)),
            out_types=jax.ShapeDtypeStruct(out.shape, out.dtype),
            scratch_types=scratch,
            interpret=interpret,
        )

    return run


def _matrix(*shape: int, wide: bool = False) -> Any:
    """Returns the type of matrices in shared memory."""
    spec: Any = types.SimpleNamespace(wide=wide)
    return matrix(spec, *shape, dtype=jnp.float16)


def _labels(*shape: int) -> np.ndarray:
    """Returns integers that name their place, as float16, which has those up to 2048."""
    rows, columns = np.indices(shape)[-2:]
    return ((rows * 31 + columns * 7 + 5 * np.indices(shape)[0]) % 2048).astype(np.float16)


_READY = {"ready": plgpu.Barrier(num_arrivals=1, num_barriers=COMPUTE)}


def _indices(columns: int, interpret: Any) -> Primitive:
    shape = COMPUTE, ROWS, columns
    _, row, column = np.indices(shape, np.int32)

    def compute(wg):
        row, column = indices(shape[1:], interpret)
        wg.out_refs.at[wg.number][...] = row * 1000 + column

    want = row * 1000 + column
    run = _one_block(compute, want, interpret, {})
    return Primitive(f"places of {ROWS} x {columns} registers", run, (), want, _AXES)


def _by_distance(columns: int, interpret: Any) -> Primitive:
    line = np.arange(ROWS + columns, dtype=np.float32)
    _, row, column = np.indices((COMPUTE, ROWS, columns))

    def compute(wg):
        plgpu.copy_gmem_to_smem(wg.refs["x"], wg.part("line"), wg.part("ready"))
        plgpu.barrier_wait(wg.part("ready"))
        tile = by_distance(wg.part("line"), (ROWS, columns), 0, columns, interpret)
        wg.out_refs.at[wg.number][...] = tile

    want = (columns + row - column).astype(np.float32)
    run = _one_block(compute, want, interpret, _READY | {"line": vector(COMPUTE, line.size)})
    return Primitive(f"reads by distance, {ROWS} x {columns}", run, (line,), want, _AXES)


def _store(interpret: Any) -> Primitive:
    """Writes a tile to rows with gaps, and reads it skewed."""
    _, row, column = np.indices((COMPUTE, ROWS, ROWS))

    def compute(wg):
        row, column = indices((ROWS, ROWS), interpret)
        staged = wg.part("staged")
        store(staged, (row * 1000 + column).astype(jnp.float32), 0, interpret)
        warpgroup_barrier(interpret)

        def index(row, column):
            return row, (row - column) & (ROWS - 1)

        wg.out_refs.at[wg.number][...] = gather(staged, (ROWS, ROWS), index, interpret)

    want = (row * 1000 + (row - column) % ROWS).astype(np.float32)
    run = _one_block(compute, want, interpret, {"staged": vector(COMPUTE, ROWS, PITCH)})
    return Primitive("writes to rows with gaps", run, (), want, _AXES)


def _copy(columns: int, wide: bool, interpret: Any) -> Primitive:
    x = _labels(COMPUTE, ROWS, columns)

    def compute(wg):
        plgpu.copy_gmem_to_smem(wg.refs["x"].at[wg.number], wg.part("x"), wg.part("ready"))
        plgpu.barrier_wait(wg.part("ready"))
        wg.part("copy")[...] = wg.part("x")[...]
        plgpu.commit_smem()
        plgpu.copy_smem_to_gmem(wg.part("copy"), wg.out_refs.at[wg.number])
        plgpu.wait_smem_to_gmem(0)

    scratch = _READY | {name: _matrix(*x.shape, wide=wide) for name in ("x", "copy")}
    run = _one_block(compute, x, interpret, scratch)
    swizzle = 64 if wide or columns % 64 else 128
    name = f"copies of {columns} columns, swizzle of {swizzle} bytes"
    return Primitive(name, run, (x,), x, _AXES)


def _pipe(interpret: Any) -> Primitive:
    """Matrices with vectors, which come with bias and scalars: threads read them."""
    x = _labels(5, ROWS, ROWS)
    y = np.arange(5 * ROWS, dtype=np.float32).reshape(5, ROWS)
    spec: Any = types.SimpleNamespace(wide=False)

    def compute(wg):
        for n in range(len(x)):
            step = jnp.int32(n)
            blocks = wg.scratch["pipe"].wait(step)
            tile = blocks["x"][...].astype(jnp.float32)
            tile += rows_to_tile(load(blocks["y"], ROW), tile.shape)
            wg.scratch["pipe"].release(step)
            wg.out_refs.at[wg.number, n][...] = tile

    def copy(wg):
        for n in range(len(x)):
            of_step = {name: wg.refs[name].at[n] for name in ("x", "y")}
            wg.scratch["pipe"].fill(jnp.int32(n), **of_step)

    want = np.stack([x + y[:, :, None]] * COMPUTE).astype(np.float32)
    scratch = {"pipe": pipe(spec, 2, jnp.float16, x=(ROWS, ROWS), y=(ROWS,))}
    run = _one_block(compute, want, interpret, scratch, copy)
    axes = "warpgroup", "step", "row", "column"
    return Primitive("a pipe of two slots", run, (x, y), want, axes)


def _product(interpret: Any) -> Primitive:
    """Rows of one matrix are picked by another, which is one-hot."""
    x = _labels(COMPUTE, ROWS, ROWS)
    order = np.arange(ROWS) * 5 % ROWS
    pick = np.broadcast_to(np.eye(ROWS, dtype=np.float16)[order], x.shape).copy()

    def compute(wg):
        for name in ("x", "y"):
            ready = wg.part("ready")
            plgpu.copy_gmem_to_smem(wg.refs[name].at[wg.number], wg.part(name), ready)
            plgpu.barrier_wait(ready)
        (out,) = products((ROWS, ROWS), (wg.part("x"), wg.part("y")))
        wg.out_refs.at[wg.number][...] = out

    want = np.swapaxes(x, 1, 2)[:, order].astype(np.float32)
    scratch = _READY | {name: _matrix(*x.shape) for name in ("x", "y")}
    run = _one_block(compute, want, interpret, scratch)
    return Primitive("a product", run, (pick, x), want, _AXES)
