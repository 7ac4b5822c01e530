"""The parts of the GPU kernels, each alone: what is moved are integers that name their place."""

import functools
import types
from collections.abc import Callable, Iterator
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.experimental.pallas import mosaic_gpu as plgpu

from posenc_jax.engine.gpu.gather import (
    PITCH,
    by_distance,
    gather,
    indices,
    store,
    warpgroup_barrier,
)
from posenc_jax.engine.gpu.pipe import COMPUTE, Warpgroup, launch, matrix, pipe, vector
from posenc_jax.engine.gpu.spec import ROWS
from posenc_jax.engine.gpu.tile import products
from posenc_jax.prove.places import wrong_integer

_AXES = "warpgroup", "row", "column"


def primitives(interpret: Any, small: bool) -> Iterator[tuple[str, str, Callable[[], str | None]]]:
    """Yields names, dtypes and checks; a check returns the first wrong place, or None."""
    for columns in (32,) if small else (128, 64, 32):
        run = functools.partial(_indices, columns, interpret)
        yield f"places of {ROWS} x {columns} registers", "int32", run
        run = functools.partial(_by_distance, columns, interpret)
        yield f"reads by distance, {ROWS} x {columns}", "float32", run
    yield "writes to rows with gaps", "float32", functools.partial(_store, interpret)
    for columns, wide in ((64, False), (32, False), (64, True)):
        swizzle = 64 if wide or columns % 64 else 128
        run = functools.partial(_copy, columns, wide, interpret)
        yield f"copies of {columns} columns, swizzle of {swizzle} bytes", "float16", run
    yield "a pipe of two slots", "float16", functools.partial(_pipe, interpret)
    yield "a product", "float16", functools.partial(_product, interpret)


def _run(
    compute: Callable[[Warpgroup], None],
    out: tuple[tuple[int, ...], Any],
    interpret: Any,
    inputs: dict[str, Any] | None = None,
    scratch: dict[str, Any] | None = None,
    copy: Callable[[Warpgroup], None] = lambda wg: None,
) -> jax.Array:
    """Returns the result of a kernel with one block of threads, of a shape and dtype."""
    return jax.jit(
        lambda inputs: launch(
            "primitive",
            compute,
            copy,
            grid={"i": 1},
            inputs=inputs,
            out_types=jax.ShapeDtypeStruct(*out),
            scratch_types=scratch or {},
            interpret=interpret,
        )
    )(inputs or {})


def _matrix(*shape: int, wide: bool = False) -> Any:
    """Returns the type of matrices in shared memory."""
    spec: Any = types.SimpleNamespace(wide=wide)
    return matrix(spec, *shape, dtype=jnp.float16)


def _labels(*shape: int) -> np.ndarray:
    """Returns integers that name their place, as float16, which has those up to 2048."""
    rows, columns = np.indices(shape)[-2:]
    return ((rows * 31 + columns * 7 + 5 * np.indices(shape)[0]) % 2048).astype(np.float16)


_READY = {"ready": plgpu.Barrier(num_arrivals=1, num_barriers=COMPUTE)}


def _indices(columns: int, interpret: Any) -> str | None:
    shape = COMPUTE, ROWS, columns

    def compute(wg):
        row, column = indices(shape[1:], interpret)
        wg.out_refs.at[wg.number][...] = row * 1000 + column

    got = _run(compute, (shape, jnp.int32), interpret)
    _, row, column = np.indices(shape)
    return wrong_integer(got, row * 1000 + column, _AXES)


def _by_distance(columns: int, interpret: Any) -> str | None:
    shape = COMPUTE, ROWS, columns
    line = np.arange(ROWS + columns, dtype=np.float32)

    def compute(wg):
        plgpu.copy_gmem_to_smem(wg.refs["line"], wg.part("line"), wg.part("ready"))
        plgpu.barrier_wait(wg.part("ready"))
        tile = by_distance(wg.part("line"), shape[1:], 0, columns, interpret)
        wg.out_refs.at[wg.number][...] = tile

    scratch = _READY | {"line": vector(COMPUTE, line.size)}
    got = _run(compute, (shape, jnp.float32), interpret, {"line": line}, scratch)
    _, row, column = np.indices(shape)
    return wrong_integer(got, columns + row - column, _AXES)


def _store(interpret: Any) -> str | None:
    shape = COMPUTE, ROWS, ROWS

    def compute(wg):
        row, column = indices(shape[1:], interpret)
        staged = wg.part("staged")
        store(staged, (row * 1000 + column).astype(jnp.float32), 0, interpret)
        warpgroup_barrier(interpret)

        def index(row, column):
            return row, (row - column) & (ROWS - 1)

        wg.out_refs.at[wg.number][...] = gather(staged, shape[1:], index, interpret)

    scratch = {"staged": vector(COMPUTE, ROWS, PITCH)}
    got = _run(compute, (shape, jnp.float32), interpret, scratch=scratch)
    _, row, column = np.indices(shape)
    return wrong_integer(got, row * 1000 + (row - column) % ROWS, _AXES)


def _copy(columns: int, wide: bool, interpret: Any) -> str | None:
    x = _labels(COMPUTE, ROWS, columns)

    def compute(wg):
        plgpu.copy_gmem_to_smem(wg.refs["x"].at[wg.number], wg.part("x"), wg.part("ready"))
        plgpu.barrier_wait(wg.part("ready"))
        wg.part("copy")[...] = wg.part("x")[...]
        plgpu.commit_smem()
        plgpu.copy_smem_to_gmem(wg.part("copy"), wg.out_refs.at[wg.number])
        plgpu.wait_smem_to_gmem(0)

    types = {name: _matrix(*x.shape, wide=wide) for name in ("x", "copy")}
    got = _run(compute, (x.shape, x.dtype), interpret, {"x": x}, _READY | types)
    return wrong_integer(got, x, _AXES)


def _pipe(interpret: Any) -> str | None:
    x = _labels(5, ROWS, ROWS)

    def compute(wg):
        for n in range(len(x)):
            step = jnp.int32(n)
            block = wg.scratch["pipe"].wait(step)["x"][...]
            wg.scratch["pipe"].release(step)
            wg.out_refs.at[wg.number, n][...] = block.astype(jnp.float32)

    def copy(wg):
        for n in range(len(x)):
            wg.scratch["pipe"].fill(jnp.int32(n), x=wg.refs["x"].at[n])

    spec: Any = types.SimpleNamespace(wide=False)
    scratch = {"pipe": pipe(spec, 2, jnp.float16, x=(ROWS, ROWS))}
    out = (COMPUTE, *x.shape), jnp.float32
    got = _run(compute, out, interpret, {"x": x}, scratch, copy)
    return wrong_integer(got, np.stack([x] * COMPUTE), ("warpgroup", "step", "row", "column"))


def _product(interpret: Any) -> str | None:
    """Rows of one matrix are picked by another, which is one-hot."""
    x = _labels(COMPUTE, ROWS, ROWS)
    order = np.arange(ROWS) * 5 % ROWS
    pick = np.broadcast_to(np.eye(ROWS, dtype=np.float16)[order], x.shape).copy()

    def compute(wg):
        for name in ("pick", "x"):
            ready = wg.part("ready")
            plgpu.copy_gmem_to_smem(wg.refs[name].at[wg.number], wg.part(name), ready)
            plgpu.barrier_wait(ready)
        (out,) = products((ROWS, ROWS), (wg.part("pick"), wg.part("x")))
        wg.out_refs.at[wg.number][...] = out

    scratch = _READY | {name: _matrix(*x.shape) for name in ("pick", "x")}
    inputs = {"pick": pick, "x": x}
    got = _run(compute, (x.shape, jnp.float32), interpret, inputs, scratch)
    return wrong_integer(got, np.swapaxes(x, 1, 2)[:, order], _AXES)
