"""The backward pass for GPUs: dq, dk and dv, and the cotangents of position rules.

Three kernels, each of which sums over tiles in one fixed order and adds to nothing in memory, so
that results are bitwise reproducible: dq over the keys of a block of queries, dk and dv over the
queries of a block of keys, the bias over the tiles at one distance from the diagonal. Each
computes the weights of its tiles again, the last one those of tiles with rules alone.
"""

import dataclasses

import jax
import jax.numpy as jnp
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu

from posenc_jax.engine.elements import Element
from posenc_jax.engine.gpu.backward_bias import bias_grads
from posenc_jax.engine.gpu.backward_keys import key_grads
from posenc_jax.engine.gpu.by_query import ByQuery
from posenc_jax.engine.gpu.pipe import launch, matrix, operand, product, vector, write_rows
from posenc_jax.engine.gpu.spec import ROW, ROWS, Cotangents, Spec
from posenc_jax.engine.gpu.tile import (
    d_logits,
    number_count,
    products,
    rows_to_tile,
    zeros,
)
from posenc_jax.engine.operands import LOG2E, Grads, Operands


def backward(spec: Spec, x: Operands, d_out: jax.Array, lse: jax.Array, delta: jax.Array) -> Grads:
    """Returns the cotangents of the operands.

    Args:
      spec: the static part.
      x: the operands.
      d_out: cotangent of the output, [B, T, N, V], in the dtype of v.
      lse: float32 [B, N, T], finite.
      delta: float32 [B, N, T], sum of d_out * out over V, less the cotangent of lse.
    """
    given = Cotangents(d_out, lse * LOG2E, delta)
    d_q, sums_of_q = _query_grads(spec, x, given)
    d_k, d_v, sums_of_k = key_grads(spec, x, given)
    d_bias = None
    if x.bias is not None:
        d_bias = (
            bias_grads(spec, x, x.bias, given) if spec.rules_in_bias else jnp.zeros_like(x.bias)
        )
    elements = map(_element, x.elements, sums_of_q, sums_of_k)
    return Grads(d_q, d_k, d_v, d_bias, tuple(elements), ())


def _element(element: Element, of_q: list[jax.Array], of_k: list[jax.Array]) -> Element:
    """Returns the cotangents of a term, from sums over keys, [B, N, T], and over queries."""
    count = len(element.numbers)

    def by_key_head(d, like):
        return d.reshape(d.shape[0], like.shape[1], -1, 1, d.shape[2]).sum(2)

    return dataclasses.replace(
        element,
        numbers=tuple(d.sum((0, 2)) for d in of_q[:count]),
        q_numbers=tuple(d[:, :, None] for d in of_q[count:]),
        k_numbers=tuple(map(by_key_head, of_k, element.k_numbers)),
    )


def _query_grads(
    spec: Spec, x: Operands, given: Cotangents
) -> tuple[jax.Array, list[list[jax.Array]]]:
    """Returns dq, and for each term its cotangents' sums over keys, float32 [B, N, T]."""
    dtype = x.q.dtype
    of = ByQuery(spec, x, spec.backward, x.schedules[1])
    scratch = of.pipes | {
        "q": matrix(spec, 2, ROWS, spec.dim, dtype=dtype),
        "d_out": matrix(spec, 2, ROWS, spec.value_dim, dtype=dtype),
        "ready": plgpu.Barrier(num_arrivals=2, num_barriers=2),
        "sums": vector(2, ROWS),
    }
    if spec.interpret:
        scratch["ds"] = operand(spec.backward.k, dtype)

    def compute(at, own, out, kept, warpgroup):
        q0, count = of.queries(at, own, warpgroup)
        of_head = at["b"], pl.ds(q0, ROWS), at["head"]
        q, d_out, ready = (kept[name].at[warpgroup] for name in ("q", "d_out", "ready"))
        plgpu.copy_gmem_to_smem(own["x"].q.at[of_head], q, ready)
        plgpu.copy_gmem_to_smem(own["cotangents"].d_out.at[of_head], d_out, ready)
        lse, delta = own["cotangents"].of_rows(at["b"], at["head"], q0)
        plgpu.barrier_wait(ready)

        def over_tiles(d_q):
            def step(n, sums):
                keys, values = kept["keys"].wait(n), kept["values"].wait(n)
                tile = of.tile(at, own, kept, warpgroup, n)
                s, d_p = products(tile.shape, (q, keys["k"]), (d_out, values["v"]))
                kept["values"].release(n)
                p, slope = tile.weights(s, rows_to_tile(lse, s.shape))
                ds = d_logits(p, d_p, rows_to_tile(delta, s.shape), slope)
                sums = tile.pull(ds, sums)
                product(d_q, ds.astype(dtype), keys["k"], kept.get("ds"), warpgroup)
                plgpu.wgmma_wait(0)
                kept["keys"].release(n)
                of.release_bias(kept, n)
                return sums

            start = [[zeros((ROWS,), ROW)] * number_count(e, 0) for e in x.elements]
            return jax.lax.fori_loop(jnp.int32(0), count, step, start), d_q[...]

        sums, d_q = pl.run_scoped(over_tiles, plgpu.ACC((ROWS, spec.dim), jnp.float32))
        q[...] = (d_q * spec.scale).astype(dtype)
        plgpu.commit_smem()
        plgpu.copy_smem_to_gmem(q, out["q"].at[of_head])
        plgpu.wait_smem_to_gmem(0)
        write_rows(sums, out["sums"], kept["sums"].at[warpgroup], at["b"], at["head"], q0)

    per_query = spec.struct(x, (spec.batch, spec.heads, spec.length), jnp.float32)
    outs = {
        "q": spec.struct(x, x.q.shape, dtype),
        "sums": [[per_query] * number_count(e, 0) for e in x.elements],
    }
    made = launch(
        "attention_backward_q",
        compute,
        of.copy,
        grid=of.grid,
        given=of.given | {"cotangents": given},
        outs=outs,
        scratch=scratch,
        interpret=spec.interpret,
    )
    return made["q"], made["sums"]
