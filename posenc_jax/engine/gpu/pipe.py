"""What a warpgroup that copies and two that compute have between them.

A pipe has slots in shared memory. The warpgroup that copies waits until a slot is free, fills it
and goes on; those that compute wait until it is full, and free it.
"""

import dataclasses
import math
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu

from posenc_jax.engine.gpu.gather import unknown_zero
from posenc_jax.engine.gpu.spec import ROWS, Spec
from posenc_jax.engine.kernels import padded

COMPUTE = 2
"""Warpgroups that compute; the one after them copies."""
_ROOM = 227 * 1024 - 2048  # Bytes of shared memory, less those of barriers.
_ALIGNED = 1024  # Bytes: each array starts at a multiple.


@dataclasses.dataclass(frozen=True)
class Pipe:
    """Copies of a step.

    Attributes:
      slots: references [slots, ...], by name.
      full, free: barriers [slots].
      interpret: as for `unknown_zero`.
    """

    slots: dict[str, Any]
    full: Any
    free: Any
    interpret: Any

    @property
    def _count(self) -> int:
        return next(iter(self.slots.values())).shape[0]

    def _slot(self, step: Any) -> Any:
        return jax.lax.rem(step, jnp.int32(self._count))

    def fill(self, step: Any, **sources: Any) -> None:
        """Copies from global memory, for step 0, 1, ..."""
        slot = self._slot(step)

        @pl.when(step >= self._count)
        def _():
            plgpu.barrier_wait(self.free.at[slot])

        for name, to in self.slots.items():
            plgpu.copy_gmem_to_smem(sources[name], to.at[slot], self.full.at[slot])

    def wait(self, step: Any) -> dict[str, Any]:
        """Returns the blocks of a step, when they are there."""
        plgpu.barrier_wait(self.full.at[self._slot(step)])
        return self.blocks(step)

    def blocks(self, step: Any) -> dict[str, Any]:
        """Returns the blocks of a step that was waited for."""
        slot = self._slot(step) if self._count > 1 else unknown_zero(self.interpret)
        return {name: x.at[slot] for name, x in self.slots.items()}

    def release(self, step: Any) -> None:
        """Gives the slot of a step back."""
        if any(len(x.shape) == 2 for x in self.slots.values()):
            # Vectors are read by threads, not by the tensor cores: copies must come after that.
            plgpu.commit_smem()
        plgpu.barrier_arrive(self.free.at[self._slot(step)])


def pipe(spec: Spec, slots: int, dtype: Any, **blocks: tuple[int, ...]) -> dict[str, Any]:
    """Returns what a kernel allocates for a `Pipe`.

    Args:
      spec: the static part.
      slots: how many blocks there are of each.
      dtype: of matrices; vectors are float32.
      **blocks: shapes of matrices and vectors by name.
    """
    types = {
        name: vector(slots, *shape) if len(shape) == 1 else matrix(spec, slots, *shape, dtype=dtype)
        for name, shape in blocks.items()
    }
    return {
        "slots": types,
        "full": plgpu.Barrier(num_arrivals=len(blocks), num_barriers=slots),
        "free": plgpu.Barrier(num_arrivals=COMPUTE, num_barriers=slots),
    }


def most_slots(make: Callable[[int, int], dict[str, Any]]) -> dict[str, Any]:
    """Returns what a kernel allocates, with as many slots as there is room for.

    Args:
      make: `make(slots, of_dots)` allocates so many slots for tokens, and for vectors per distance.
    """

    def size(made):
        leaves = (x for x in jax.tree.leaves(made) if hasattr(x, "dtype"))
        sizes = (math.prod(x.shape) * jnp.dtype(x.dtype).itemsize for x in leaves)
        return sum(padded(n, _ALIGNED) for n in sizes)

    most = [make(*slots) for slots in ((2, 2), (2, 1), (1, 1))]
    return next((made for made in most if size(made) <= _ROOM), most[-1])


def matrix(spec: Spec, *shape: int, dtype: Any) -> Any:
    """Returns the type of matrices in shared memory, operands of products."""
    swizzle = 64 if spec.wide or shape[-1] % 64 else 128
    columns = swizzle // jnp.dtype(dtype).itemsize
    transforms = plgpu.TilingTransform((8, columns)), plgpu.SwizzleTransform(swizzle)
    return plgpu.SMEM(shape, dtype, transforms=transforms)


def vector(*shape: int) -> Any:
    """Returns the type of float32 vectors in shared memory."""
    return plgpu.SMEM(shape, jnp.float32)


def product(acc: Any, a: jax.Array, b: Any, scratch: Any, warpgroup: Any) -> None:
    """Adds a @ b to an accumulator, where a is in registers.

    Pallas' interpreter reads operands from shared memory alone; there, `scratch` is an `operand`.
    """
    if scratch is None:
        plgpu.wgmma(acc, a, b)
    else:
        scratch.at[warpgroup][...] = a
        plgpu.wgmma(acc, scratch.at[warpgroup], b)


def operand(columns: int, dtype: Any) -> Any:
    """Returns the type of `scratch` of `product`."""
    return plgpu.SMEM((COMPUTE, ROWS, columns), dtype)


def write_rows(numbers: Any, outs: Any, staged: Any, b: Any, head: Any, start: Any) -> None:
    """Writes numbers per row, pytrees of [64], to arrays [B, N, T]."""
    for y, out in zip(jax.tree.leaves(numbers), jax.tree.leaves(outs), strict=True):
        staged[...] = y
        plgpu.commit_smem()
        plgpu.copy_smem_to_gmem(staged, out.at[b, head, pl.ds(start, ROWS)])
        plgpu.wait_smem_to_gmem(0)


def launch(
    name: str,
    compute: Callable[..., None],
    copy: Callable[..., None],
    *,
    grid: dict[str, int],
    given: Any,
    outs: Any,
    scratch: dict[str, Any],
    interpret: Any,
) -> Any:
    """Runs a kernel.

    Args:
      name: of the kernel.
      compute: `compute(at, own, out, kept, warpgroup)`: what warpgroups 0 and 1 do; `at` is the
        place in the grid.
      copy: `copy(at, own, kept)`: what the third one does.
      grid: the number of blocks of threads by name; those of the last are neighbours.
      given: pytree of arrays.
      outs: pytree of the types of the results.
      scratch: what is allocated; of a `pipe`, a `Pipe` is kept.
      interpret: parameters of the interpreter, or False.
    """
    leaves, tree = jax.tree.flatten(given)
    types, out_tree = jax.tree.flatten(outs)

    def kernel(*refs: Any, **kept: Any) -> None:
        own = jax.tree.unflatten(tree, refs[: len(leaves)])
        out = jax.tree.unflatten(out_tree, refs[len(leaves) :])
        kept = {
            n: Pipe(**x, interpret=interpret) if isinstance(x, dict) else x for n, x in kept.items()
        }
        at = {n: jax.lax.axis_index(n) for n in grid}
        warpgroup = jax.lax.axis_index("warpgroup")

        @pl.when(warpgroup < COMPUTE)
        def _():
            plgpu.set_max_registers(232, action="increase")
            compute(at, own, out, kept, warpgroup)

        @pl.when(warpgroup == COMPUTE)
        def _():
            plgpu.set_max_registers(40, action="decrease")
            copy(at, own, kept)

    kernel.__name__ = name
    made = plgpu.kernel(
        kernel,
        out_type=types,
        scratch_types=scratch,
        grid=tuple(grid.values()),
        grid_names=tuple(grid),
        num_threads=COMPUTE + 1,
        thread_name="warpgroup",
        compiler_params=plgpu.CompilerParams(approx_math=True),
        interpret=_interpreter(interpret),
    )(*leaves)
    return jax.tree.unflatten(out_tree, made)


def _interpreter(interpret: Any) -> Any:
    if interpret is True:
        pallas: Any = plgpu  # Before jax 0.11.2 it has no interpreter.
        return pallas.InterpretGPUParams()
    return interpret or None
