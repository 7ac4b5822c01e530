"""The cotangent of an array of all pairs on GPUs.

A block of threads has one tile of it, and sums the cotangents of the logits over the heads and the
rows of the batch that share the array, in registers, in float32 and in one order.
"""

import dataclasses
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu

from posenc_jax.engine.terms import AllPairsTerm
from posenc_jax.kernels.gpu.logit_grads import LogitGrads
from posenc_jax.kernels.gpu.pipe import COMPUTE, Warpgroup, launch, matrix
from posenc_jax.kernels.gpu.spec import (
    ROWS,
    TILE,
    Cotangents,
    GPUSpec,
    Int,
    column_of,
    kind_of,
    tiles,
)
from posenc_jax.kernels.gpu.tile import zeros
from posenc_jax.kernels.operands import Operands, out_struct


def pair_grads(spec: GPUSpec, x: Operands, cotangents: Cotangents) -> tuple[AllPairsTerm, ...]:
    """Returns the cotangents of `Operands.pairs`."""
    if not x.pairs:
        return ()
    (term,) = x.pairs
    return (dataclasses.replace(term, pairs=PairSums(spec, x).run(cotangents)),)


@dataclasses.dataclass(frozen=True)
class PairSums(LogitGrads):
    """The kernel of sums over heads and rows of the batch."""

    def run(self, cotangents: Cotangents) -> jax.Array:
        """Returns the cotangent of the array."""
        array = self.x.pairs[0].pairs
        kinds = self.x.schedules[4]
        kinds = jnp.broadcast_to(kinds, (self.spec.batch, *kinds.shape[1:]))
        # A list for each row and tile of the array, of the rows of the batch that share it.
        kinds = kinds.reshape(array.shape[0], -1, kinds[0].size)
        return launch(
            "attention_backward_pairs",
            self.compute,
            self.copy,
            grid=self.grid,
            inputs=self.inputs(cotangents, tiles(jnp.swapaxes(kinds, 1, 2))),
            out_types=out_struct(self.x.q, array.shape, array.dtype),
            scratch_types=self.scratch_types,
            interpret=self.spec.interpret,
        )

    @property
    def grid(self) -> dict[str, int]:
        """The numbers of blocks of threads."""
        spec, blocks = self.spec, self.spec.backward
        rows, heads = self.x.pairs[0].pairs.shape[:2]
        return {
            "row": rows,
            "head": heads,
            "i": spec.length // blocks.q,
            "j": spec.keys // blocks.k,
        }

    @property
    def own_types(self) -> dict[str, Any]:
        spec, dtype = self.spec, self.x.pairs[0].pairs.dtype
        return {"out": matrix(spec, COMPUTE, ROWS, spec.backward.k, dtype=dtype)}

    def _over_tiles(
        self, wg: Warpgroup, body: Callable[[Int, Int, Int, jax.Array, Any], Any], carry: Any
    ) -> Any:
        """Returns `carry = body(t, b, head, kind, carry)` of all tiles, with t their number."""
        row, head, i, j = (wg.grid[name] for name in self.grid)
        place = row, i * self.grid["j"] + j
        entries, count = wg.refs["entries"].at[place], wg.refs["counts"][place]

        def step(t, carry):
            g, n = jax.lax.div(t, count), jax.lax.rem(t, count)
            entry = entries[n]
            # One of `row` and the column is zero, and so is one of `head` and g.
            return body(t, row + column_of(entry), head + g, kind_of(entry), carry)

        # One loop: in a loop of loops, ptxas lets each product wait for the last.
        heads = self.spec.heads // self.grid["head"]
        return jax.lax.fori_loop(jnp.int32(0), heads * count, step, carry)

    def _first(self, wg: Warpgroup) -> tuple[Int, Int]:
        """Returns the first query and the first key of the tile."""
        return wg.grid["i"] * self.spec.backward.q, wg.grid["j"] * self.spec.backward.k

    def compute(self, wg: Warpgroup) -> None:
        """Computes 64 rows of the tile."""
        q0, k0 = self._first(wg)

        def add(t, b, head, kind, total):
            _, ds = self.d_logits(wg, t, b, head, q0, k0, kind)
            return total + ds

        total = self._over_tiles(wg, add, zeros((ROWS, self.spec.backward.k), TILE))
        total = total * self.x.pairs[0].factor
        rows = pl.ds(q0 + pl.multiple_of(wg.number * ROWS, ROWS), ROWS)
        index = wg.grid["row"], wg.grid["head"], rows, pl.ds(k0, self.spec.backward.k)
        staged = wg.part("out")
        staged[...] = total.astype(staged.dtype)
        plgpu.commit_smem()
        plgpu.copy_smem_to_gmem(staged, wg.out_refs.at[index])
        plgpu.wait_smem_to_gmem(0)

    def copy(self, wg: Warpgroup) -> None:
        """Copies the tokens and rules of all tiles."""
        q0, k0 = self._first(wg)

        def fill(t, b, head, kind, carry):
            self.fill(wg, t, b, head, q0, k0, kind)
            return carry

        self._over_tiles(wg, fill, jnp.int32(0))
