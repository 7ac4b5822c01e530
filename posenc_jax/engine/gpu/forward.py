"""The forward kernel: flash attention with position rules, for GPUs.

A block of threads has 128 queries of a head, and goes through their tiles. Its two warpgroups
take turns: while one has the tensor cores, the other computes its softmax.
"""

import jax
import jax.numpy as jnp
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu

from posenc_jax.engine.gpu.by_query import ByQuery
from posenc_jax.engine.gpu.pipe import launch, matrix, most_slots, operand, product, vector
from posenc_jax.engine.gpu.spec import ROW, ROWS, TILE, Spec
from posenc_jax.engine.gpu.tile import rows_to_tile, zeros
from posenc_jax.engine.mask import MASK_VALUE
from posenc_jax.engine.operands import LOG2E, Operands


def forward(spec: Spec, x: Operands) -> tuple[jax.Array, jax.Array]:
    """Returns the output, [B, T, N, V], and the log-sum-exp, float32 [B, N, T]."""
    dtype = x.q.dtype
    of = ByQuery(spec, x, spec.forward, x.schedules[0])
    rows = {
        "q": matrix(spec, 2, ROWS, spec.dim, dtype=dtype),
        "lse": vector(2, ROWS),
        "ready": plgpu.Barrier(num_arrivals=1 + len(of.dots.staying), num_barriers=2),
        "turn": plgpu.Barrier(num_arrivals=2),
    }
    if spec.dim != spec.value_dim:
        rows["out"] = matrix(spec, 2, ROWS, spec.value_dim, dtype=dtype)
    if spec.interpret:
        rows["p"] = operand(spec.forward.k, dtype)
    scratch = most_slots(lambda *slots: rows | of.pipes(*slots))

    # Of wide values, there is room for a new part beside the totals, not for the whole.
    size = min(spec.value_dim, 128)
    parts = [
        pl.Slice(start, min(size, spec.value_dim - start))
        for start in range(0, spec.value_dim, size)
    ]

    def compute(at, own, out, kept, warpgroup):
        q0, count = of.queries(at, own, warpgroup)
        of_head = at["b"], pl.ds(q0, ROWS), at["head"]
        q, ready = kept["q"].at[warpgroup], kept["ready"].at[warpgroup]
        plgpu.copy_gmem_to_smem(own["x"].q.at[of_head], q, ready)
        of.dots.copy_rows(own, kept, at["b"], at["head"], q0, warpgroup)
        plgpu.barrier_wait(ready)

        def next_turn():
            plgpu.barrier_arrive(kept["turn"])
            plgpu.barrier_wait(kept["turn"])

        pl.when(warpgroup == 1)(next_turn)

        def step(n, carry):
            ruled, totals, top, weight = carry
            tile = of.tile(at, own, kept, warpgroup, n)
            of.dots.turn(tile, kept, warpgroup, ruled)
            ruled = of.dots.release(tile, kept, ruled)
            keys = kept["keys"].wait(n)

            def scores(acc):
                plgpu.wgmma(acc, q, keys["k"].transpose((1, 0)))
                next_turn()
                return acc[...]

            s = pl.run_scoped(scores, plgpu.ACC(tile.shape, jnp.float32))
            kept["keys"].release(n)
            s, _ = tile.logits(s)
            new_top = jnp.maximum(top, s.max(axis=1))
            decay = jnp.exp2(top - new_top)
            p = jnp.exp2(s - rows_to_tile(new_top, s.shape))
            weight = weight * decay + p.sum(axis=1)
            p = p.astype(dtype)
            plgpu.barrier_arrive(kept["turn"])
            values = kept["values"].wait(n)
            plgpu.barrier_wait(kept["turn"])

            new_totals = []
            for part, total in zip(parts, totals, strict=True):

                def weighted(acc, part=part):
                    product(acc, p, values["v"].at[:, part], kept.get("p"), warpgroup)
                    return acc[...]

                added = pl.run_scoped(weighted, plgpu.ACC(total.shape, jnp.float32))
                new_totals.append(total * rows_to_tile(decay, total.shape) + added)
            kept["values"].release(n)
            of.release_bias(kept, n)
            return ruled, new_totals, new_top, weight

        lowest = plgpu.layout_cast(jnp.full((ROWS,), MASK_VALUE, jnp.float32), ROW)
        empty = [zeros((ROWS, part.size), TILE) for part in parts]
        start = jnp.int32(0), empty, lowest, zeros((ROWS,), ROW)
        _, totals, top, weight = jax.lax.fori_loop(jnp.int32(0), count, step, start)
        pl.when(warpgroup == 0)(next_turn)
        blind = top <= MASK_VALUE / 2  # Then all pairs that were summed are hidden.
        weight = jnp.where(blind, 1.0, weight)
        share = jnp.where(blind, 0.0, 1.0 / weight)
        made, lse = kept.get("out", kept["q"]).at[warpgroup], kept["lse"].at[warpgroup]
        for part, total in zip(parts, totals, strict=True):
            made.at[:, part][...] = (total * rows_to_tile(share, total.shape)).astype(dtype)
        lse[...] = jnp.where(blind, -jnp.inf, top * (1 / LOG2E) + jnp.log(weight))
        plgpu.commit_smem()
        plgpu.copy_smem_to_gmem(made, out["out"].at[of_head])
        plgpu.copy_smem_to_gmem(lse, out["lse"].at[at["b"], at["head"], pl.ds(q0, ROWS)])
        plgpu.wait_smem_to_gmem(0)

    outs = {
        "out": spec.struct(x, (spec.batch, spec.length, spec.heads, spec.value_dim), dtype),
        "lse": spec.struct(x, (spec.batch, spec.heads, spec.length), jnp.float32),
    }
    made = launch(
        "attention_forward",
        compute,
        of.copy,
        grid=of.grid,
        given=of.given,
        outs=outs,
        scratch=scratch,
        interpret=spec.interpret,
    )
    return made["out"], made["lse"]
