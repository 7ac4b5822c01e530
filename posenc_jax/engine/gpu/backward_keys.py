"""dk and dv on GPUs. Tiles are transposed, so that weights enter the products as they are."""

from typing import Any

import jax
import jax.numpy as jnp
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu

from posenc_jax.engine.gpu.pipe import launch, matrix, operand, pipe, product, vector, write_rows
from posenc_jax.engine.gpu.spec import (
    ROW,
    ROWS,
    Cotangents,
    Spec,
    bias_line,
    column_of,
    kind_of,
    read_by_kernels,
)
from posenc_jax.engine.gpu.tile import (
    Tile,
    columns_to_tile,
    d_logits,
    number_count,
    products,
    zeros,
)
from posenc_jax.engine.operands import Operands


def key_grads(
    spec: Spec, x: Operands, given: Cotangents
) -> tuple[jax.Array, jax.Array, list[list[jax.Array]]]:
    """Returns dk, dv, and for each term its cotangents' sums over queries, float32 [B, N, S]."""
    if spec.wide:  # The sums of both take more registers than there are.
        made = _grads(spec, x, given, "k") | _grads(spec, x, given, "v")
    else:
        made = _grads(spec, x, given, "kv")
    return made["k"], made["v"], made["sums"]


def _grads(spec: Spec, x: Operands, given: Cotangents, wanted: str) -> dict[str, Any]:
    """Returns dk with the sums, or dv, or all."""
    blocks, dtype = spec.by_key, x.q.dtype
    bq, bk = blocks.q, blocks.k
    low, high = spec.reach(blocks)
    entries, counts = x.schedules[2]
    elements = x.elements if "k" in wanted else ()
    arrays = {"x": read_by_kernels(x), "cotangents": given, "entries": entries, "counts": counts}
    queries = {"q": (bq, spec.dim), "lse": (bq,)}
    if x.bias is not None:
        arrays["line"] = bias_line(spec, x.bias, x.first, blocks)
        queries["bias"] = (bq + bk,)
    scratch = {
        "k": matrix(spec, 2, ROWS, spec.dim, dtype=dtype),
        "v": matrix(spec, 2, ROWS, spec.value_dim, dtype=dtype),
        "ready": plgpu.Barrier(num_arrivals=2, num_barriers=2),
        "queries": pipe(spec, 2, dtype, **queries),
        "d_outs": pipe(spec, 2, dtype, d_out=(bq, spec.value_dim), delta=(bq,)),
        "sums": vector(2, ROWS),
    }
    if spec.interpret:
        scratch["weights"] = operand(bq, dtype)

    def tiles_of(at, own):
        j, row = at["j"], at["b"] if entries.shape[0] > 1 else 0
        return own["counts"][row, j], lambda n: own["entries"][row, j, n]

    def compute(at, own, out, kept, warpgroup):
        b, (count, entry) = at["b"], tiles_of(at, own)
        k0 = at["j"] * bk + warpgroup * ROWS
        of_head = b, pl.ds(k0, ROWS), at["head"]
        k, v, ready = (kept[name].at[warpgroup] for name in ("k", "v", "ready"))
        plgpu.copy_gmem_to_smem(own["x"].k.at[of_head], k, ready)
        plgpu.copy_gmem_to_smem(own["x"].v.at[of_head], v, ready)
        plgpu.barrier_wait(ready)
        part = pl.ds(pl.multiple_of((1 - warpgroup) * ROWS, ROWS), ROWS + bq)

        def over_tiles(d_k=None, d_v=None):
            @pl.loop(jnp.int32(0), jnp.int32(spec.group))
            def _(g):
                head = at["head"] * spec.group + g

                def step(n, sums):
                    t = g * count + n
                    queries, d_outs = kept["queries"].wait(t), kept["d_outs"].wait(t)
                    tile = Tile(
                        spec=spec,
                        x=own["x"],
                        shape=(ROWS, bq),
                        q_axis=1,
                        b=b,
                        head=head,
                        q=column_of(entry(n)) * bq,
                        k=k0,
                        kind=kind_of(entry(n)),
                        bias=queries["bias"].at[part] if x.bias is not None else None,
                        at=ROWS,
                    )
                    pairs = [(k, queries["q"]), (v, d_outs["d_out"])]
                    s, *d_p = products(tile.shape, *pairs[: 1 if d_k is None else 2])
                    p, slope = tile.weights(s, columns_to_tile(queries["lse"], s.shape))
                    if d_v is not None:
                        rounded = p.astype(dtype)
                        product(d_v, rounded, d_outs["d_out"], kept.get("weights"), warpgroup)
                    if d_k is not None:
                        ds = d_logits(p, d_p[0], columns_to_tile(d_outs["delta"], s.shape), slope)
                        sums = tile.pull(ds, sums)
                        ds = ds.astype(dtype)
                        product(d_k, ds, queries["q"], kept.get("weights"), warpgroup)
                    plgpu.wgmma_wait(0)
                    kept["queries"].release(t)
                    kept["d_outs"].release(t)
                    return sums

                start = [[zeros((ROWS,), ROW)] * number_count(e, 1) for e in elements]
                sums = jax.lax.fori_loop(jnp.int32(0), count, step, start)
                write_rows(sums, out.get("sums", []), kept["sums"].at[warpgroup], b, head, k0)

            scaled = [] if d_k is None else [d_k[...] * spec.scale]
            return scaled if d_v is None else [*scaled, d_v[...]]

        dims = {"k": spec.dim, "v": spec.value_dim}
        totals = {f"d_{n}": plgpu.ACC((ROWS, dims[n]), jnp.float32) for n in wanted}
        for n, total in zip(wanted, pl.run_scoped(over_tiles, **totals), strict=True):
            to = {"k": k, "v": v}[n]
            to[...] = total.astype(dtype)
            plgpu.commit_smem()
            plgpu.copy_smem_to_gmem(to, out[n].at[of_head])
        plgpu.wait_smem_to_gmem(0)

    def copy(at, own, kept):
        b, (count, entry), first = at["b"], tiles_of(at, own), at["j"] * bk

        @pl.loop(jnp.int32(0), jnp.int32(spec.group))
        def _(g):
            head = at["head"] * spec.group + g

            @pl.loop(jnp.int32(0), count)
            def _(n):
                q0, t = column_of(entry(n)) * bq, g * count + n
                tokens, bias = pl.ds(q0, bq), {}
                if x.bias is not None:
                    start = pl.multiple_of(jnp.clip(q0 - first, low, high) - low, bq)
                    bias["bias"] = spec.line_of(own["line"], head).at[pl.ds(start, bq + bk)]
                lse, delta = (y.at[b, head, tokens] for y in own["cotangents"].numbers)
                kept["queries"].fill(t, q=own["x"].q.at[b, tokens, head], lse=lse, **bias)
                d_out = own["cotangents"].d_out.at[b, tokens, head]
                kept["d_outs"].fill(t, d_out=d_out, delta=delta)

    per_key = spec.struct(x, (spec.batch, spec.heads, spec.keys), jnp.float32)
    outs = {n: spec.struct(x, getattr(x, n).shape, dtype) for n in wanted}
    if "k" in wanted:
        outs["sums"] = [[per_key] * number_count(e, 1) for e in elements]
    return launch(
        "attention_backward_" + wanted,
        compute,
        copy,
        grid={"b": spec.batch, "head": spec.kv_heads, "j": spec.keys // bk},
        given=arrays,
        outs=outs,
        scratch=scratch,
        interpret=spec.interpret,
    )
