"""Calls of kernels, and the blocks of arrays of tokens in VMEM.

Heads come before tokens, [B, N, T, H]: XLA writes the products that make q, k and v, and
rotations of them, in that order. [B, T, N * H] would be a copy.
"""

import dataclasses
import math
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
from jax.experimental import pallas as pl
from jax.experimental.pallas import tpu as pltpu

from posenc_jax.engine.blocks import Blocks
from posenc_jax.kernels.elements import Element
from posenc_jax.kernels.operands import Operands
from posenc_jax.kernels.tpu.chip import SMEM
from posenc_jax.kernels.tpu.spec import TPUSpec
from posenc_jax.kernels.tpu.tile import LANES

_SMEM_OF_COMPILER = 2**15  # Bytes.

BlockIndex = Callable[..., tuple[Any, Any, Any]]
"""Maps grid indices to the row of the batch, the head and the block of tokens."""


@dataclasses.dataclass(frozen=True)
class Call:
    """A kernel, its arrays and its memory.

    Attributes:
      name: of the kernel.
      kernel: of references to `scalars`, and of pytrees of references to `arrays`, results and
        `scratch`.
      grid: the numbers of steps.
      semantics: of the axes of the grid.
      scalars: arrays in SMEM that index maps read, schedules first.
      arrays, specs: pytrees of the inputs and of their blocks.
      outs, out_specs: pytrees of the types of the results and of their blocks.
      scratch: pytree of the types of scratch memory.
      vmem_limit: bytes that the kernel may use.
      interpret: as for `PallasTPU`.
    """

    name: str
    kernel: Callable[..., None]
    grid: tuple[Any, ...]
    semantics: Any
    scalars: tuple[jax.Array, ...]
    arrays: Any
    specs: Any
    outs: Any
    out_specs: Any
    scratch: Any
    vmem_limit: int
    interpret: Any

    def __call__(self) -> Any:
        """Runs the kernel, and returns its results."""
        return pl.pallas_call(
            self.kernel,
            grid_spec=pltpu.PrefetchScalarGridSpec(
                num_scalar_prefetch=len(self.scalars),
                grid=self.grid,
                in_specs=[self.specs],
                out_specs=self.out_specs,
                scratch_shapes=[self.scratch],
            ),
            out_shape=self.outs,
            compiler_params=pltpu.CompilerParams(
                dimension_semantics=self.semantics, vmem_limit_bytes=self.vmem_limit
            ),
            interpret=self.interpret,
            name=self.name,
        )(*self.scalars, self.arrays)

    def refusal(
        self, description: str, outs: bool = False, scalars: Any = (), temporary: int = 0
    ) -> str | None:
        """Returns why the kernel needs more memory than there is, or None.

        Args:
          description: the pass and its sizes, for the message.
          outs: whether blocks of the results count; two of each array are in memory at a time.
          scalars: pytree of more arrays in SMEM.
          temporary: bytes of VMEM for values between instructions.
        """

        def size(shape, dtype):
            *outer, rows, columns = (1, *(n for n in shape if n is not None))
            padded = -(-rows // 8) * 8 * -(-columns // LANES) * LANES
            return math.prod(outer) * padded * jnp.dtype(dtype).itemsize

        def block(spec, x):
            return 0 if spec.block_shape is None else 2 * size(spec.block_shape, x.dtype)

        blocks = jax.tree.map(block, self.specs, self.arrays)
        if outs:
            blocks = blocks, jax.tree.map(block, self.out_specs, self.outs)
        vmem = temporary + sum(jax.tree.leaves(blocks))
        vmem += sum(size(x.shape, x.dtype) for x in jax.tree.leaves(self.scratch))
        if vmem > self.vmem_limit:
            return (
                f"{description} needs {vmem >> 20} MiB of VMEM and may use "
                f"{self.vmem_limit >> 20}; shard the sequence (posenc_jax.sharding), or use "
                'implementation="xla"'
            )
        smem = sum(x.size * x.dtype.itemsize for x in jax.tree.leaves((self.scalars, scalars)))
        if smem > SMEM - _SMEM_OF_COMPILER:
            return (
                f"{description} needs {smem >> 10} KiB of SMEM for the kinds of the tiles in every "
                f"row of the batch and may use {SMEM - _SMEM_OF_COMPILER >> 10}; use larger tiles "
                'or fewer rows per device, or implementation="xla"'
            )
        return None


def input_specs(
    spec: TPUSpec,
    x: Operands,
    blocks: Blocks,
    queries: BlockIndex,
    keys: BlockIndex,
    keys_of_query_head: BlockIndex,
) -> tuple[dict[str, Any], dict[str, Any]]:
    """Returns the operands that both passes read, and their block specs, by name.

    Args:
      spec: the static part.
      x: the operands.
      blocks: queries and keys per tile.
      queries, keys: the blocks of q, and of k and v.
      keys_of_query_head: the blocks of arrays [B, N, ..., S].
    """
    arrays: dict[str, Any] = {"q": x.q, "k": x.k, "v": x.v}
    arrays |= {"rows": x.rows, "columns": x.columns, "elements": x.elements}
    specs: dict[str, Any] = {
        "q": matrix_spec(x.q, blocks.q, queries),
        "k": matrix_spec(x.k, blocks.k, keys),
        "v": matrix_spec(x.v, blocks.k, keys),
        "rows": jax.tree.map(lambda y: row_spec(y, blocks.q, queries), x.rows),
        "columns": jax.tree.map(lambda y: row_spec(y, blocks.k, keys), x.columns),
    }
    of_queries, of_keys = (blocks.q, queries), (blocks.k, keys_of_query_head)
    specs["elements"] = element_specs(x.elements, spec.heads, of_queries, of_keys)
    arrays["pairs"] = x.pairs
    specs["pairs"] = jax.tree.map(
        lambda y: pair_spec(y, blocks, queries, keys_of_query_head), x.pairs
    )
    if x.dropped is not None:
        arrays["dropped"] = x.dropped
        specs["dropped"] = feature_spec(x.dropped, blocks.q, queries)
    return arrays, specs


def matrix_spec(x: Any, block: int, index: BlockIndex) -> pl.BlockSpec:
    """Returns the block spec of an array [B, N, T, H]."""
    return pl.BlockSpec((None, None, block, x.shape[3]), lambda *grid: (*index(*grid), 0))


def row_spec(x: Any, block: int, index: BlockIndex) -> pl.BlockSpec:
    """Returns the block spec of an array [B or 1, 1, T]."""

    def row(*grid):
        b, _, n = index(*grid)
        return (0 if x.shape[0] == 1 else b), 0, n

    return pl.BlockSpec((None, 1, block), row)


def feature_spec(x: Any, block: int, index: BlockIndex, group: int = 1) -> pl.BlockSpec:
    """Returns the block spec of an array [B, N, F, T], or [B, N / group, F, T]."""

    def columns(*grid):
        b, head, n = index(*grid)
        return b, jax.lax.div(head, jnp.int32(group)), 0, n

    return pl.BlockSpec((None, None, x.shape[2], block), columns)


def pair_spec(x: Any, blocks: Blocks, queries: BlockIndex, keys: BlockIndex) -> pl.BlockSpec:
    """Returns the block spec of an array of all pairs, [B or 1, N or 1, T, S].

    T and S need not be whole blocks; numbers beyond their ends are arbitrary. The other arrays are
    padded to blocks of both passes, so tiles may lie beyond T or S: for these, whose pairs are all
    hidden, the block is the last one, as a copy beyond an array is an error on a chip.

    Args:
      x: the array.
      blocks: queries and keys per tile.
      queries, keys: index maps, by query head.
    """

    rows, columns = pl.cdiv(x.shape[2], blocks.q), pl.cdiv(x.shape[3], blocks.k)

    def tile(*grid):
        b, head, i = queries(*grid)
        _, _, j = keys(*grid)
        i, j = jnp.minimum(i, jnp.int32(rows - 1)), jnp.minimum(j, jnp.int32(columns - 1))
        return (0 if x.shape[0] == 1 else b), (0 if x.shape[1] == 1 else head), i, j

    return pl.BlockSpec((None, None, blocks.q, blocks.k), tile)


def squeezed_spec(shape: tuple[int, ...], index: Callable) -> pl.BlockSpec:
    """Returns blocks that are whole but for the first two axes, which they lack."""
    return pl.BlockSpec((None, None, *shape[2:]), index)


def element_specs(
    elements: tuple[Element, ...],
    heads: int,
    queries: tuple[int, BlockIndex],
    keys: tuple[int, BlockIndex],
) -> tuple[Element, ...]:
    """Returns the block specs of the arrays of elements, in their places.

    Args:
      elements: the terms.
      heads: N.
      queries, keys: the block size and the index map, by query head.
    """

    def specs(element):
        return dataclasses.replace(
            element,
            scalars=tuple(pl.BlockSpec(memory_space=pltpu.SMEM) for _ in element.scalars),
            q_scalars=tuple(feature_spec(y, *queries) for y in element.q_scalars),
            k_scalars=tuple(
                feature_spec(y, *keys, group=heads // y.shape[1]) for y in element.k_scalars
            ),
        )

    return tuple(map(specs, elements))


def temporary_bytes(spec: TPUSpec, x: Operands, blocks: Blocks) -> int:
    """Returns a bound on the VMEM of the values of a tile between instructions.

    In float32 tiles, of what the compiler took: up to 1.6 for tiles with a bias or nothing, 3 with
    masks, softcap or dropout, 5.8 with other terms.
    """
    tiles = 2
    if spec.softcap is not None or spec.visibility.segments or x.dropped is not None:
        tiles = 3
    if x.elements or x.products or spec.visibility.ordered:
        tiles = 6
    return 4 * tiles * blocks.q * blocks.k
