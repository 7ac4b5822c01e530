"""The forward kernel: flash attention with position rules, for GPUs.

A block of threads has 128 queries of a head, and goes through their tiles. Its two warpgroups
take turns: while one has the tensor cores, the other computes its softmax. A turn has no wait for
copies: values are waited for before it, and the next keys while it multiplies.
"""

import dataclasses
from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu

from posenc_jax.engine.mask import LEAST_LOGIT
from posenc_jax.engine.problem import LogSumExp
from posenc_jax.kernels.gpu.by_query import ByQuery
from posenc_jax.kernels.gpu.pipe import Warpgroup, launch, matrix, most_slots, operand, vector
from posenc_jax.kernels.gpu.spec import ROW, ROWS, TILE, GPUSpec, Int
from posenc_jax.kernels.gpu.tile import rows_to_tile, zeros
from posenc_jax.kernels.operands import Operands, out_struct


def forward(spec: GPUSpec, x: Operands) -> tuple[jax.Array, LogSumExp]:
    """Returns the output, [B, T, N, V], and the log-sum-exp, float32 [B, N, T]."""
    kernel = Forward(spec, x, spec.forward, x.schedules[0])
    shape = spec.batch, spec.length, spec.heads, spec.value_dim
    row = out_struct(x.q, (spec.batch, spec.heads, spec.length))
    results = launch(
        "attention_forward",
        kernel.compute,
        kernel.copy,
        grid=kernel.grid,
        inputs=kernel.inputs,
        out_types={
            "out": out_struct(x.q, shape, x.q.dtype),
            **dict.fromkeys(LogSumExp._fields, row),
        },
        scratch_types=kernel.scratch_types,
        interpret=spec.interpret,
    )
    return results["out"], LogSumExp(results["top"], results["total"])


class _Softmax(NamedTuple):
    """The running softmax of a warpgroup.

    Attributes:
      out: float32 [64, V], weighted sums of values, in parts of V.
      top: float32 [64], the greatest logits.
      weight: float32 [64], sums of weights.
    """

    out: list[jax.Array]
    top: jax.Array
    weight: jax.Array


@dataclasses.dataclass(frozen=True)
class Forward(ByQuery):
    """The forward kernel."""

    @property
    def scratch_types(self) -> dict[str, Any]:
        """The scratch types of the kernel, by name."""
        spec, dtype = self.spec, self.x.q.dtype
        types = {
            "q": matrix(spec, 2, ROWS, spec.dim, dtype=dtype),
            **dict.fromkeys(LogSumExp._fields, vector(2, ROWS)),
            "ready": plgpu.Barrier(num_arrivals=1 + len(self.bands.resident), num_barriers=2),
            "turn": plgpu.Barrier(num_arrivals=2),
        }
        if spec.dim != spec.value_dim:
            types["out"] = matrix(spec, 2, ROWS, spec.value_dim, dtype=dtype)
        if spec.interpret:
            types["p"] = operand(spec.forward.k, dtype)
        return most_slots(lambda *slots: types | self.pipes(*slots))

    @property
    def parts(self) -> list[Any]:
        """Slices of V: registers have room for the new sums of a slice and the old ones of all."""
        size = min(self.spec.value_dim, 128)
        return [
            pl.Slice(start, min(size, self.spec.value_dim - start))
            for start in range(0, self.spec.value_dim, size)
        ]

    def compute(self, wg: Warpgroup) -> None:
        """Computes 64 queries."""
        q0, count = self.queries(wg)
        b, head = wg.grid["b"], wg.grid["head"]
        of_head = b, pl.ds(q0, ROWS), head
        plgpu.copy_gmem_to_smem(wg.refs["x"].q.at[of_head], wg.part("q"), wg.part("ready"))
        self.bands.copy_rows(wg, b, head, q0)
        plgpu.barrier_wait(wg.part("ready"))
        pl.when(wg.number == 1)(lambda: _next_turn(wg))
        lowest = plgpu.layout_cast(jnp.full((ROWS,), LEAST_LOGIT, jnp.float32), ROW)
        empty = [zeros((ROWS, part.size), TILE) for part in self.parts]
        start = jnp.int32(0), _Softmax(empty, lowest, zeros((ROWS,), ROW))
        _wait_for_keys(wg, jnp.int32(0), count)
        _, softmax = jax.lax.fori_loop(
            jnp.int32(0), count, lambda n, carry: self._add_tile(wg, n, count, *carry), start
        )
        pl.when(wg.number == 0)(lambda: _next_turn(wg))
        share = 1.0 / jnp.where(softmax.weight == 0.0, 1.0, softmax.weight)
        out = wg.part("out" if "out" in wg.scratch else "q")
        for part, total in zip(self.parts, softmax.out, strict=True):
            total = total * rows_to_tile(share, total.shape)
            out.at[:, part][...] = total.astype(self.x.q.dtype)
        lse = {"top": softmax.top, "total": softmax.weight}
        for name, rows in lse.items():
            wg.part(name)[...] = rows
        plgpu.commit_smem()
        plgpu.copy_smem_to_gmem(out, wg.out_refs["out"].at[of_head])
        for name in lse:
            plgpu.copy_smem_to_gmem(wg.part(name), wg.out_refs[name].at[b, head, pl.ds(q0, ROWS)])
        plgpu.wait_smem_to_gmem(0)

    def _add_tile(
        self, wg: Warpgroup, n: Int, count: Int, ruled: Int, softmax: _Softmax
    ) -> tuple[Int, _Softmax]:
        """Adds tile n of `count` to the softmax; `ruled` is the number of tiles with rules before.

        Its keys were waited for.
        """
        tile = self.tile(wg, n)
        self.bands.prepare(wg, tile, ruled)
        ruled = self.bands.release(wg, tile, ruled)
        keys = wg.scratch["keys"].blocks(n)

        def scores(acc):
            plgpu.wgmma(acc, wg.part("q"), keys["k"].transpose((1, 0)))
            _next_turn(wg)
            return acc[...]

        s = pl.run_scoped(scores, plgpu.ACC(tile.shape, jnp.float32))
        wg.scratch["keys"].release(n)
        s, _ = tile.logits(s)
        top = jnp.maximum(softmax.top, s.max(axis=1))
        decay = jnp.exp2(softmax.top - top)
        p = jnp.exp2(s - rows_to_tile(top, s.shape))
        out = [total * rows_to_tile(decay, total.shape) for total in softmax.out]
        weight = softmax.weight * decay + p.sum(axis=1)
        p = p.astype(self.x.q.dtype)
        plgpu.barrier_arrive(wg.scratch["turn"])
        values = wg.scratch["values"].wait(n)
        plgpu.barrier_wait(wg.scratch["turn"])
        for i, part in enumerate(self.parts):

            def add(acc, i=i, part=part):
                wg.product(acc, p, values["v"].at[:, part], "p")
                if i == len(self.parts) - 1:
                    _wait_for_keys(wg, n + 1, count)
                plgpu.wgmma_wait(0)

            out[i] = self._added(out[i], add)
        wg.scratch["values"].release(n)
        self.release_bias(wg, n)
        return ruled, _Softmax(out, top, weight)

    def _added(self, total: jax.Array, add: Callable[[Any], None]) -> jax.Array:
        """Returns a float32 array to whose accumulator `add` has added products."""
        if not self.spec.interpret:
            return pl.run_state(add)(plgpu.ACC.init(total))

        # Pallas' interpreter has accumulators of zeros only.
        def products(acc):
            add(acc)
            return acc[...]

        return total + pl.run_scoped(products, plgpu.ACC((ROWS, total.shape[1]), jnp.float32))


def _wait_for_keys(wg: Warpgroup, n: Int, count: Int) -> None:
    """Waits for the keys of tile n, if there are as many tiles."""

    @pl.when(n < count)
    def _():
        wg.scratch["keys"].wait(n)


def _next_turn(wg: Warpgroup) -> None:
    """Hands the tensor cores to the other warpgroup, and waits for them."""
    plgpu.barrier_arrive(wg.scratch["turn"])
    plgpu.barrier_wait(wg.scratch["turn"])
