"""Gathers from shared memory: each pair of a tile reads a number at its own index."""

import itertools
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
from jax.experimental import pallas as pl
from jax.experimental.mosaic import gpu as mgpu
from jax.experimental.pallas import mosaic_gpu as plgpu

from posenc_jax.kernels.gpu.spec import TILE, Ref

PITCH = 72
"""Numbers between rows of 64 in shared memory: with 8 more, rows start in different banks."""


class _Index:
    """An MLIR index, with operators."""

    def __init__(self, value: Any) -> None:
        self.value = value

    def __add__(self, other: "_Index | int") -> "_Index":
        return self._make("addi", other)

    def __sub__(self, other: "_Index | int") -> "_Index":
        return self._make("subi", other)

    def __and__(self, other: "_Index | int") -> "_Index":
        return self._make("andi", other)

    def _make(self, operation: str, other: "_Index | int") -> "_Index":
        from jaxlib.mlir import ir
        from jaxlib.mlir.dialects import arith

        other = other.value if isinstance(other, _Index) else mgpu.c(other, ir.IndexType.get())
        return _Index(getattr(arith, operation)(self.value, other))


def gather(ref: Ref, shape: tuple[int, int], index: Callable, interpret: Any) -> jax.Array:
    """Returns a float32 tile of `ref[index(row, column)]`.

    Args:
      ref: float32, bfloat16 or float16, in shared memory.
      shape: of the tile, 64 rows.
      index: returns a tuple, computed from row and column by `+`, `-` and `&`.
      interpret: whether the interpreter runs, which has no inline Mosaic code.
    """
    if interpret:
        return ref[...][index(*indices(shape, interpret))].astype(jnp.float32)
    from jaxlib.mlir import ir
    from jaxlib.mlir.dialects import arith, memref

    tile = plgpu.ShapeDtypeStruct(shape, jnp.dtype(jnp.float32), layout=TILE)

    @plgpu.inline_mgpu(arg_types=(plgpu.RefType(),), return_type=tile)
    # The first argument is Mosaic's launch context.
    def read(_, source):
        def element(*place):
            x = memref.load(source, [i.value for i in index(*map(_Index, place))])
            return x if ref.dtype == jnp.float32 else arith.extf(ir.F32Type.get(), x)

        return _from_indices(shape, element)

    return read(ref)


def indices(shape: tuple[int, int], interpret: Any) -> tuple[jax.Array, jax.Array]:
    """Returns the row and the column index of every element of a tile of 64 rows, int32.

    The compiler would hoist functions of Pallas' iota out of all loops, and keep a register for
    each element. These indices are opaque to it, so functions of them are computed where they are
    used.
    """
    if interpret:
        row, column = (jax.lax.broadcasted_iota(jnp.int32, shape, axis) for axis in (0, 1))
        return row, column
    from jaxlib.mlir import ir
    from jaxlib.mlir.dialects import arith

    tile = plgpu.ShapeDtypeStruct(shape, jnp.dtype(jnp.int32), layout=TILE)

    @plgpu.inline_mgpu(return_type=(tile, tile))
    def write(_):
        def element(axis):
            return lambda *place: arith.index_cast(ir.IntegerType.get_signless(32), place[axis])

        return tuple(_from_indices(shape, element(axis), is_signed=True) for axis in (0, 1))

    return write()


def opaque_zero(interpret: Any) -> jax.Array:
    """Hides the constant 0 from the compiler, so that addresses with it are not hoisted."""
    if interpret:
        return jnp.int32(0)

    @plgpu.inline_mgpu(return_type=plgpu.ShapeDtypeStruct((), jnp.dtype(jnp.int32), layout=TILE))
    def zero(_):
        from jaxlib.mlir import ir

        i32 = ir.IntegerType.get_signless(32)
        return mgpu.FragmentedArray.splat(_opaque(mgpu.c(0, i32)), (), is_signed=True)

    return zero()


def _opaque(x: Any) -> Any:
    """Hides the value of an int32 from the compiler."""
    from jaxlib.mlir.dialects import llvm

    return llvm.inline_asm(x.type, [x], "mov.b32 $0, $1;", "=r,r", has_side_effects=True)


def _from_indices(shape: tuple[int, int], element: Callable, is_signed: bool | None = None) -> Any:
    """Returns the tile of `element(row, column)`."""
    from jaxlib.mlir import ir
    from jaxlib.mlir.dialects import arith

    layout, i32 = mgpu.WGMMA_LAYOUT, ir.IntegerType.get_signless(32)
    zero = mgpu.c(0.0, ir.F32Type.get())
    like = mgpu.FragmentedArray.splat(zero, shape, layout=layout)
    # A thread has two rows, and two columns of every eight; only its first place is opaque.
    assert like.registers.shape == (1, shape[1] // 8, 1, 1, 2, 1, 1, 1, 1)
    first = []
    for index in next(iter(layout.thread_idxs(shape))):
        index = _opaque(arith.index_cast(i32, index))
        first.append(arith.index_castui(ir.IndexType.get(), index))
    steps = itertools.count()

    def next_element(*_):
        step = next(steps)
        # Registers in order: two columns, both again eight rows below, then the next columns.
        offsets = step // 2 % 2 * 8, step // 4 * 8 + step % 2
        constants = (mgpu.c(n, ir.IndexType.get()) for n in offsets)
        return element(*map(arith.addi, first, constants))

    return like.foreach(next_element, create_array=True, is_signed=is_signed)


def store(ref: Ref, tile: jax.Array, first: int, interpret: Any) -> None:
    """Writes a tile of 64 rows to a reference, from a column on.

    It needs a `warpgroup_barrier` before and after. Pallas itself does not write to rows that are
    further apart than they are long.
    """
    count = tile.shape[1]
    if interpret:
        ref.at[:, pl.ds(first, count)][...] = tile
        return

    @plgpu.inline_mgpu(arg_types=(plgpu.RefType(), TILE))
    def write(_, target, registers):
        part = mgpu.memref_slice(target, (slice(None), slice(first, first + count)))
        registers.store_untiled(part, optimized=False)

    write(ref, tile)


def warpgroup_barrier(interpret: Any) -> None:
    """Waits until all threads of the warpgroup have finished their reads and writes."""
    if not interpret:
        plgpu.inline_mgpu()(lambda _: mgpu.warpgroup_barrier())()


def by_distance(
    ref: Ref, shape: tuple[int, int], q_axis: int, origin: int, interpret: Any
) -> jax.Array:
    """Returns a tile of `ref[origin + query - key]`.

    Args:
      ref: float32 vector in shared memory.
      shape: of the tile.
      q_axis: the axis of the queries.
      origin: the index of the first query and the first key.
      interpret: as for `gather`.
    """

    def index(*place):
        return (place[q_axis] - place[1 - q_axis] + origin,)

    return gather(ref, shape, index, interpret)
