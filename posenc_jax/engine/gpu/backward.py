"""The backward pass for GPUs: dq, dk and dv, and the cotangents of position rules.

Three kernels, each of which sums over tiles in one fixed order and adds to nothing in memory, so
that results are bitwise reproducible: dq over the keys of a block of queries, dk and dv over the
queries of a block of keys, the bias over the tiles at one distance from the diagonal. Each
computes the weights of its tiles again, the last one those of tiles with rules alone.
"""

import dataclasses
from typing import Any

import jax
import jax.numpy as jnp
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu

from posenc_jax.engine.elements import Element
from posenc_jax.engine.gpu.backward_distances import bias_grads, vector_grads
from posenc_jax.engine.gpu.backward_keys import key_grads
from posenc_jax.engine.gpu.by_query import ByQuery
from posenc_jax.engine.gpu.dot_arrays import d_logits_scale, feature_grads
from posenc_jax.engine.gpu.pipe import (
    launch,
    matrix,
    most_slots,
    operand,
    product,
    vector,
    write_rows,
)
from posenc_jax.engine.gpu.spec import ROW, ROWS, Cotangents, Spec
from posenc_jax.engine.gpu.tile import (
    d_logits,
    number_count,
    rows_to_tile,
    zeros,
)
from posenc_jax.engine.operands import LOG2E, Grads, Operands, Product


def backward(spec: Spec, x: Operands, d_out: jax.Array, lse: jax.Array, delta: jax.Array) -> Grads:
    """Returns the cotangents of the operands.

    Args:
      spec: the static part.
      x: the operands.
      d_out: cotangent of the output, [B, T, N, V], in the dtype of v.
      lse: float32 [B, N, T], finite.
      delta: float32 [B, N, T], sum of d_out * out over V, less the cotangent of lse.
    """
    scale: Any = d_logits_scale(x, d_out, delta) if x.products else None
    given = Cotangents(d_out, lse * LOG2E, delta, scale)
    d_q, sums_of_q, of_queries = _query_grads(spec, x, given)
    d_k, d_v, sums_of_k, of_keys = key_grads(spec, x, given)
    d_bias = None
    if x.bias is not None:
        d_bias = (
            bias_grads(spec, x, x.bias, given) if spec.rules_in_bias else jnp.zeros_like(x.bias)
        )
    elements = map(_element, x.elements, sums_of_q, sums_of_k)
    features = [iter(of_queries), iter(of_keys)]
    products = tuple(
        Product(
            feature_grads(spec, of, next(features[of.of_keys]), scale),
            vector_grads(spec, x, n, given),
            of.of_keys,
        )
        for n, of in enumerate(x.products)
    )
    return Grads(d_q, d_k, d_v, d_bias, tuple(elements), products)


def _element(element: Element, of_q: list[jax.Array], of_k: list[jax.Array]) -> Element:
    """Returns the cotangents of a term, from sums over keys, [B, N, T], and over queries."""
    count = len(element.scalars)

    def by_key_head(d, like):
        return d.reshape(d.shape[0], like.shape[1], -1, 1, d.shape[2]).sum(2)

    return dataclasses.replace(
        element,
        scalars=tuple(d.sum((0, 2)) for d in of_q[:count]),
        q_scalars=tuple(d[:, :, None] for d in of_q[count:]),
        k_scalars=tuple(map(by_key_head, of_k, element.k_scalars)),
    )


def _query_grads(
    spec: Spec, x: Operands, given: Cotangents
) -> tuple[jax.Array, list[list[jax.Array]], list[jax.Array]]:
    """Returns dq, for each term sums of its cotangents over keys, [B, N, T], and of features."""
    dtype = x.q.dtype
    of = ByQuery(spec, x, spec.backward, x.schedules[1])
    rows = {
        "q": matrix(spec, 2, ROWS, spec.dim, dtype=dtype),
        "d_out": matrix(spec, 2, ROWS, spec.value_dim, dtype=dtype),
        "ready": plgpu.Barrier(num_arrivals=2 + len(of.dots.staying), num_barriers=2),
        "sums": vector(2, ROWS),
    }
    if spec.interpret:
        rows["operand"] = operand(spec.backward.k, dtype)
    scratch = most_slots(lambda *slots: rows | of.pipes(*slots))

    def compute(at, own, out, kept, warpgroup):
        q0, count = of.queries(at, own, warpgroup)
        of_head = at["b"], pl.ds(q0, ROWS), at["head"]
        q, d_out, ready = (kept[name].at[warpgroup] for name in ("q", "d_out", "ready"))
        plgpu.copy_gmem_to_smem(own["x"].q.at[of_head], q, ready)
        plgpu.copy_gmem_to_smem(own["cotangents"].d_out.at[of_head], d_out, ready)
        of.dots.copy_rows(own, kept, at["b"], at["head"], q0, warpgroup)
        lse, delta = own["cotangents"].of_rows(at["b"], at["head"], q0)
        plgpu.barrier_wait(ready)

        def over_tiles(d_q, *d_features):
            def step(n, carry):
                ruled, sums = carry
                tile = of.tile(at, own, kept, warpgroup, n)
                of.dots.turn(tile, kept, warpgroup, ruled)
                keys, values = kept["keys"].wait(n), kept["values"].wait(n)
                of_rows = rows_to_tile(lse, tile.shape), rows_to_tile(delta, tile.shape)
                pairs = (q, keys["k"]), (d_out, values["v"])
                p, slope, (d_p,) = tile.weights(of_rows[0], *pairs)
                kept["values"].release(n)
                ds = d_logits(p, d_p, of_rows[1], slope)
                sums = tile.pull(ds, sums)
                product(d_q, ds.astype(dtype), keys["k"], kept.get("operand"), warpgroup)
                plgpu.wgmma_wait(0)
                kept["keys"].release(n)
                of.release_bias(kept, n)
                if d_features:
                    ds = ds * own["cotangents"].scale[0]
                of.dots.pull(d_features, ds, tile, kept, warpgroup, ruled)
                return of.dots.release(tile, kept, ruled), sums

            start = [[zeros((ROWS,), ROW)] * number_count(e, 0) for e in x.elements]
            _, sums = jax.lax.fori_loop(jnp.int32(0), count, step, (jnp.int32(0), start))
            return sums, d_q[...], [d[...] for d in d_features]

        total = plgpu.ACC((ROWS, spec.dim), jnp.float32)
        sums, d_q, d_features = pl.run_scoped(over_tiles, total, *of.dots.totals)
        for d, to in zip(d_features, out["features"], strict=True):
            to.at[at["b"], at["head"], pl.ds(q0, ROWS)][...] = d
        q[...] = (d_q * spec.scale).astype(dtype)
        plgpu.commit_smem()
        plgpu.copy_smem_to_gmem(q, out["q"].at[of_head])
        plgpu.wait_smem_to_gmem(0)
        write_rows(sums, out["sums"], kept["sums"].at[warpgroup], at["b"], at["head"], q0)

    per_query = spec.struct(x, (spec.batch, spec.heads, spec.length), jnp.float32)
    outs = {
        "q": spec.struct(x, x.q.shape, dtype),
        "sums": [[per_query] * number_count(e, 0) for e in x.elements],
        "features": of.dots.grads,
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
    return made["q"], made["sums"], made["features"]
