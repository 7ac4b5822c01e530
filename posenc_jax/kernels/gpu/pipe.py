"""Pipes from the warpgroup that copies to the two that compute, and the launch of kernels.

A pipe has slots in shared memory. The copying warpgroup waits until a slot is free, fills it and
goes on; the computing ones wait until it is full, and release it.

A third warpgroup copies, or the second of the two that compute. Three warpgroups have 168 registers
per thread, and where `setmaxnreg` is heeded the one that copies hands its own to the others. Two
have 255.
"""

import dataclasses
import math
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu

from posenc_jax.engine.problem import vary_over
from posenc_jax.kernels.base import padded
from posenc_jax.kernels.gpu.gather import opaque_zero
from posenc_jax.kernels.gpu.spec import ROWS, GPUSpec, Int, Ref

COMPUTE = 2
"""The number of warpgroups that compute; a third one copies, or the second of them."""
PAIRS = "pairs"
"""The name of a tile of an array of all pairs, in `Pipe.slots`."""
_ROOM = 227 * 1024 - 2048  # Bytes of shared memory without barriers.
_ALIGNED = 1024  # Bytes: each array starts at a multiple.


@dataclasses.dataclass(frozen=True)
class Pipe:
    """Blocks that one warpgroup copies and two read, step by step.

    Attributes:
      slots: references [slots, ...], by name.
      full, free: barriers [slots].
      interpret: as for `opaque_zero`.
    """

    slots: dict[str, Ref]
    full: Ref
    free: Ref
    interpret: Any

    @property
    def _count(self) -> int:
        return next(iter(self.slots.values())).shape[0]

    def _slot(self, step: Int) -> jax.Array:
        return jax.lax.rem(step, jnp.int32(self._count))

    def fill(self, step: Int, **sources: Ref) -> None:
        """Copies from global memory, for step 0, 1, ..."""
        slot = self._slot(step)

        # In the first round all slots are free.
        @pl.when(step >= self._count)
        def _():
            plgpu.barrier_wait(self.free.at[slot])

        # Each copy arrives at the barrier when its bytes are there.
        for name, ref in self.slots.items():
            plgpu.copy_gmem_to_smem(sources[name], ref.at[slot], self.full.at[slot])

    def wait(self, step: Int) -> dict[str, Ref]:
        """Waits for the blocks of a step, and returns them."""
        plgpu.barrier_wait(self.full.at[self._slot(step)])
        return self.blocks(step)

    def blocks(self, step: Int) -> dict[str, Ref]:
        """Returns the blocks of a step that was waited for."""
        # Addresses of a constant slot would be computed before the loop, and keep registers.
        slot = self._slot(step) if self._count > 1 else opaque_zero(self.interpret)
        return {name: x.at[slot] for name, x in self.slots.items()}

    def release(self, step: Int) -> None:
        """Releases the slot of a step."""
        if any(len(x.shape) == 2 or name == PAIRS for name, x in self.slots.items()):
            # Threads read these, not the tensor cores: the next copy must wait for their reads.
            plgpu.commit_smem()
        plgpu.barrier_arrive(self.free.at[self._slot(step)])


def pipe(
    spec: GPUSpec, slots: int, dtype: Any, pairs: Any = None, **blocks: tuple[int, ...]
) -> dict[str, Any]:
    """Returns the scratch types of a `Pipe`.

    Args:
      spec: the static part.
      slots: the number of slots of each block.
      dtype: of matrices; vectors are float32.
      pairs: returns the type of `slots` tiles of an array of all pairs, or None.
      **blocks: shapes of matrices and vectors by name.
    """
    types = {
        name: vector(slots, *shape) if len(shape) == 1 else matrix(spec, slots, *shape, dtype=dtype)
        for name, shape in blocks.items()
    }
    if pairs is not None:
        types[PAIRS] = pairs(slots)
    # A slot is full after one arrival per copy, and free after one per warpgroup that reads it.
    return {
        "slots": types,
        "full": plgpu.Barrier(num_arrivals=len(types), num_barriers=slots),
        "free": plgpu.Barrier(num_arrivals=COMPUTE, num_barriers=slots),
    }


def most_slots(make: Callable[[int, int], dict[str, Any]]) -> dict[str, Any]:
    """Returns the scratch types with the most slots for which there is room.

    Args:
      make: `make(slots, band_slots)` returns scratch types, for slots of tokens and of bands.
    """

    def size(types):
        leaves = (x for x in jax.tree.leaves(types) if hasattr(x, "dtype"))
        sizes = (math.prod(x.shape) * jnp.dtype(x.dtype).itemsize for x in leaves)
        return sum(padded(n, _ALIGNED) for n in sizes)

    # Bands lose their second slot first; where there is room for none, the compiler says so.
    options = [make(*slots) for slots in ((2, 2), (2, 1), (1, 1))]
    return next((types for types in options if size(types) <= _ROOM), options[-1])


def matrix(spec: GPUSpec, *shape: int, dtype: Any) -> Any:
    """Returns the type of matrices in shared memory, operands of products."""
    swizzle = 64 if spec.wide or shape[-1] % 64 else 128
    columns = swizzle // jnp.dtype(dtype).itemsize
    library: Any = plgpu  # Its transforms are abstract to type checkers.
    transforms = library.TilingTransform((8, columns)), library.SwizzleTransform(swizzle)
    return plgpu.SMEM(shape, dtype, transforms=transforms)


def vector(*shape: int) -> Any:
    """Returns the type of float32 vectors in shared memory."""
    return plgpu.SMEM(shape, jnp.float32)


def operand(columns: int, dtype: Any) -> Any:
    """Returns the type of the staging memory of `product`."""
    return plgpu.SMEM((COMPUTE, ROWS, columns), dtype)


@dataclasses.dataclass(frozen=True)
class Warpgroup:
    """The place of a warpgroup, and its references.

    Attributes:
      number: 0 or 1, or 2 for a warpgroup that only copies.
      grid: the indices of its block of threads, by name.
      refs, out_refs: references to inputs and outputs in global memory.
      scratch: references to shared memory and barriers, and pipes, by name.
    """

    number: jax.Array
    grid: dict[str, jax.Array]
    refs: dict[str, Any]
    out_refs: Any
    scratch: dict[str, Any]

    def part(self, name: str) -> Ref:
        """Returns the part of scratch memory or of barriers that belongs to the warpgroup."""
        return self.scratch[name].at[self.number]

    def product(self, acc: Ref, a: jax.Array, b: Ref, staging: str = "operand") -> None:
        """Adds a @ b to an accumulator, where a is in registers.

        Pallas' interpreter reads operands from shared memory alone: there, `staging` names an
        `operand`.
        """
        if staging not in self.scratch:
            plgpu.wgmma(acc, a, b)
        else:
            self.part(staging)[...] = a
            plgpu.wgmma(acc, self.part(staging), b)

    def write_rows(
        self, rows: Any, out_refs: Any, staging: str, b: Int, head: Int, start: Int
    ) -> None:
        """Writes scalars per row, a pytree of [64], to arrays [B, N, T]."""
        # One vector stages all, since each copy ends before the next scalars are written.
        staged = self.part(staging)
        for y, out_ref in zip(jax.tree.leaves(rows), jax.tree.leaves(out_refs), strict=True):
            staged[...] = y
            plgpu.commit_smem()
            plgpu.copy_smem_to_gmem(staged, out_ref.at[b, head, pl.ds(start, ROWS)])
            plgpu.wait_smem_to_gmem(0)


def launch(
    name: str,
    compute: Callable[[Warpgroup], None],
    copy: Callable[[Warpgroup], None] | None,
    *,
    grid: dict[str, int],
    inputs: dict[str, Any],
    out_types: Any,
    scratch_types: dict[str, Any],
    moves_registers: bool,
    interpret: Any,
) -> Any:
    """Runs a kernel, and returns its results.

    Args:
      name: of the kernel.
      compute: the code of warpgroups 0 and 1.
      copy: the code of warpgroup 2, or None: there are two.
      grid: the number of blocks of threads by name; neighbours differ in the last index.
      inputs: pytrees of arrays, by name.
      out_types: pytree of the types of the results.
      scratch_types: by name; scratch of type `pipe` is a `Pipe` inside.
      moves_registers: as in `GPUSpec`.
      interpret: parameters of the interpreter, or False.
    """
    leaves, tree = jax.tree.flatten(inputs)
    types, out_tree = jax.tree.flatten(out_types)

    def kernel(*refs: Ref, **scratch: Any) -> None:
        indices = {n: jax.lax.axis_index(n) for n in grid}
        warpgroup = Warpgroup(
            jax.lax.axis_index("warpgroup"),
            indices,
            jax.tree.unflatten(tree, refs[: len(leaves)]),
            jax.tree.unflatten(out_tree, refs[len(leaves) :]),
            {
                n: Pipe(**x, interpret=interpret) if isinstance(x, dict) else x
                for n, x in scratch.items()
            },
        )

        # Both warpgroups run the same code; the second of them copies too, see `Refilled`.
        if copy is None:
            compute(warpgroup)
            return

        # Per thread 232, 232 and 40 of the 3 x 168 registers with which the block started.
        @pl.when(warpgroup.number < COMPUTE)
        def _():
            if moves_registers:
                plgpu.set_max_registers(232, action="increase")
            compute(warpgroup)

        @pl.when(warpgroup.number == COMPUTE)
        def _():
            if moves_registers:
                plgpu.set_max_registers(40, action="decrease")
            copy(warpgroup)

    kernel.__name__ = name
    results = plgpu.kernel(
        kernel,
        out_type=types,
        scratch_types=scratch_types,
        grid=tuple(grid.values()),
        grid_names=tuple(grid),
        num_threads=COMPUTE + (copy is not None),
        thread_name="warpgroup",
        # The hardware's approximations of exp2 and tanh.
        compiler_params=plgpu.CompilerParams(approx_math=True),
        interpret=_interpreter(interpret),
    )(*leaves)
    # By themselves, the results would not vary over the mesh axes of `shard_map`.
    axes = frozenset().union(*(jax.typeof(x).mat.varying for x in leaves))
    return jax.tree.unflatten(out_tree, vary_over(results, axes))


def _interpreter(interpret: Any) -> Any:
    if interpret is True:
        pallas: Any = plgpu  # Before jax 0.11.2 it has no interpreter.
        return pallas.InterpretGPUParams()
    return interpret or None
