"""The tiles of an array of all pairs in shared memory."""

import dataclasses
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu

from posenc_jax.engine.blocks import Blocks
from posenc_jax.kernels.gpu.gather import gather
from posenc_jax.kernels.gpu.pipe import PAIRS, Warpgroup, matrix
from posenc_jax.kernels.gpu.spec import ROWS, TILE, GPUSpec, Int, Ref, load
from posenc_jax.kernels.operands import Operands


@dataclasses.dataclass(frozen=True)
class Pairs:
    """The array of all pairs of a kernel, if there is one.

    Attributes:
      spec: the static part.
      x: the operands.
      blocks: queries and keys per tile.
      q_axis: the axis of the queries in tiles.
    """

    spec: GPUSpec
    x: Operands
    blocks: Blocks
    q_axis: int

    @property
    def type(self) -> Callable[[int], Any] | None:
        """Returns the type of some slots in shared memory, for `pipe`."""
        if not self.x.pairs:
            return None
        shape, dtype = (self.blocks.q, self.blocks.k), self.x.pairs[0].pairs.dtype
        if self.q_axis == 0:
            return lambda slots: matrix(self.spec, slots, *shape, dtype=dtype)
        return lambda slots: plgpu.SMEM((slots, *shape), dtype)  # For `gather`.

    def source(self, wg: Warpgroup, b: Int, head: Int, q: Int, k: Int) -> dict[str, Ref]:
        """Returns the tile in global memory with the first query q and the first key k, by name."""
        if not self.x.pairs:
            return {}
        y = wg.refs["x"].pairs[0].pairs
        index = b if y.shape[0] > 1 else 0, head if y.shape[1] > 1 else 0
        return {PAIRS: y.at[(*index, pl.ds(q, self.blocks.q), pl.ds(k, self.blocks.k))]}

    def reader(self, wg: Warpgroup, slots: dict[str, Ref]) -> Callable[[], jax.Array] | None:
        """Returns a function that reads a warpgroup's part of the tile, float32."""
        if not self.x.pairs:
            return None
        rows = pl.ds(pl.multiple_of(wg.number * ROWS, ROWS), ROWS)
        if self.q_axis == 0:
            return lambda: load(slots[PAIRS].at[rows], TILE).astype(jnp.float32)

        def read():
            shape = ROWS, self.blocks.q
            part = slots[PAIRS].at[:, rows]
            return gather(part, shape, lambda row, column: (column, row), self.spec.interpret)

        return read
