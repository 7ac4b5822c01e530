"""Numbers that each pair of a tile reads for itself from shared memory."""

import itertools
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
from jax.experimental import pallas as pl
from jax.experimental.mosaic import gpu as mgpu
from jax.experimental.pallas import mosaic_gpu as plgpu

from posenc_jax.engine.gpu.spec import TILE

PITCH = 72
"""Numbers between rows of 64 in shared memory: with 8 more, rows start in different banks."""


class _Index:
    """An index that the compiler knows, with operators."""

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


def gather(ref: Any, shape: tuple[int, int], index: Callable, interpret: Any) -> jax.Array:
    """Returns a tile of `ref[index(row, column)]`.

    Args:
      ref: float32, in shared memory.
      shape: of the tile, 64 rows.
      index: returns a tuple, made from row and column by `+`, `-` and `&`.
      interpret: whether this is the interpreter, which cannot run what Mosaic inlines.
    """
    if interpret:
        return ref[...][index(*places(shape, interpret))]
    from jaxlib.mlir.dialects import memref

    made = plgpu.ShapeDtypeStruct(shape, jnp.float32, layout=TILE)

    @plgpu.inline_mgpu(arg_types=(plgpu.RefType(),), return_type=made)
    def read(_, source):
        def number(*at):
            return memref.load(source, [i.value for i in index(*map(_Index, at))])

        return _each(shape, number)

    return read(ref)


def places(shape: tuple[int, int], interpret: Any) -> tuple[jax.Array, jax.Array]:
    """Returns the row and the column of the numbers of a tile of 64 rows, int32.

    What is made of them is computed where it is used. The compiler would compute what it makes
    of Pallas' own before all loops, and keep it for each number.
    """
    if interpret:
        row, column = (jax.lax.broadcasted_iota(jnp.int32, shape, axis) for axis in (0, 1))
        return row, column
    from jaxlib.mlir import ir
    from jaxlib.mlir.dialects import arith

    made = plgpu.ShapeDtypeStruct(shape, jnp.int32, layout=TILE)

    @plgpu.inline_mgpu(return_type=(made, made))
    def write(_):
        def number(axis):
            return lambda *at: arith.index_cast(ir.IntegerType.get_signless(32), at[axis])

        return _each(shape, number(0), is_signed=True), _each(shape, number(1), is_signed=True)

    return write()


def unknown_zero(interpret: Any) -> Any:
    """Returns 0, which the compiler does not know, so that it keeps nothing that is made of it."""
    if interpret:
        return jnp.int32(0)

    @plgpu.inline_mgpu(return_type=plgpu.ShapeDtypeStruct((), jnp.int32, layout=TILE))
    def zero(_):
        from jaxlib.mlir import ir

        i32 = ir.IntegerType.get_signless(32)
        return mgpu.FragmentedArray.splat(_hidden(mgpu.c(0, i32)), (), is_signed=True)

    return zero()


def _hidden(x: Any) -> Any:
    """Returns an int32 number of which the compiler knows nothing."""
    from jaxlib.mlir.dialects import llvm

    return llvm.inline_asm(x.type, [x], "mov.b32 $0, $1;", "=r,r", has_side_effects=True)


def _each(shape: tuple[int, int], number: Callable, is_signed: bool | None = None) -> Any:
    """Returns the array of `number(row, column)`."""
    from jaxlib.mlir import ir
    from jaxlib.mlir.dialects import arith

    layout, i32 = mgpu.WGMMA_LAYOUT, ir.IntegerType.get_signless(32)
    zero = mgpu.c(0.0, ir.F32Type.get())
    like = mgpu.FragmentedArray.splat(zero, shape, layout=layout)
    # A thread has two rows and two columns of every eight; only its first number is not known.
    assert like.registers.shape == (1, shape[1] // 8, 1, 1, 2, 1, 1, 1, 1)
    first = []
    for at in next(iter(layout.thread_idxs(shape))):
        at = _hidden(arith.index_cast(i32, at))
        first.append(arith.index_castui(ir.IndexType.get(), at))
    steps = itertools.count()

    def of_place(*_):
        step = next(steps)
        offsets = step // 2 % 2 * 8, step // 4 * 8 + step % 2
        constants = (mgpu.c(n, ir.IndexType.get()) for n in offsets)
        return number(*map(arith.addi, first, constants))

    return like.foreach(of_place, create_array=True, is_signed=is_signed)


def store(ref: Any, tile: jax.Array, first: int, interpret: Any) -> None:
    """Writes a tile of 64 rows to a reference, from a column on; `meet` before and after.

    Pallas itself does not write to rows that are further apart than they are long.
    """
    count = tile.shape[1]
    if interpret:
        ref.at[:, pl.ds(first, count)][...] = tile
        return

    @plgpu.inline_mgpu(arg_types=(plgpu.RefType(), TILE))
    def write(_, to, numbers):
        part = mgpu.memref_slice(to, (slice(None), slice(first, first + count)))
        numbers.store_untiled(part, optimized=False)

    write(ref, tile)


def meet(interpret: Any) -> None:
    """Waits for all threads of the warpgroup: what they wrote is there, what they read was read."""
    if not interpret:
        plgpu.inline_mgpu()(lambda _: mgpu.warpgroup_barrier())()


def by_distance(
    ref: Any, shape: tuple[int, int], q_axis: int, at: int, interpret: Any
) -> jax.Array:
    """Returns a tile of `ref[at + query - key]`.

    Args:
      ref: float32 vector in shared memory.
      shape: of the tile.
      q_axis: the axis of the queries.
      at: the index of the first query and the first key.
      interpret: as for `gather`.
    """

    def index(*place):
        return (place[q_axis] - place[1 - q_axis] + at,)

    return gather(ref, shape, index, interpret)
