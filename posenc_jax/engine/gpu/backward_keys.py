"""dk and dv on GPUs. Tiles are transposed, so that weights enter the products as they are."""

from typing import Any

import jax
import jax.numpy as jnp
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu

from posenc_jax.engine.gpu.dots import Dots
from posenc_jax.engine.gpu.pipe import (
    launch,
    matrix,
    most_slots,
    operand,
    pipe,
    product,
    vector,
    write_rows,
)
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
    zeros,
)
from posenc_jax.engine.operands import Operands


def key_grads(
    spec: Spec, x: Operands, given: Cotangents
) -> tuple[jax.Array, jax.Array, list[list[jax.Array]], list[jax.Array]]:
    """Returns dk, dv, for each term its cotangents' sums over queries, and those of features.

    The sums are float32 [B, N, S].
    """
    of_keys = any(of.of_keys for of in x.products)
    apart = spec.wide or of_keys  # All sums take more registers than there are.
    made = {}
    for wanted in ("k", "v") if apart else ("kv",):
        made |= _grads(spec, x, given, wanted)
    features = _grads(spec, x, given, "f")["features"] if of_keys else []
    return made["k"], made["v"], made["sums"], features


def _grads(spec: Spec, x: Operands, given: Cotangents, wanted: str) -> dict[str, Any]:
    """Returns dk with the sums ("k"), dv ("v") or both, or the cotangents of features ("f")."""
    blocks, dtype = spec.by_key, x.q.dtype
    bq, bk = blocks.q, blocks.k
    low, high = spec.reach(blocks)
    entries, counts = x.schedules[2]
    elements = x.elements if "k" in wanted else ()
    dots = Dots(spec, x, blocks, q_axis=1)
    arrays = {"x": read_by_kernels(x), "cotangents": given, "entries": entries, "counts": counts}
    arrays["dots"] = dots.given
    queries = {"q": (bq, spec.dim), "lse": (bq,)}
    if x.bias is not None:
        arrays["line"] = bias_line(spec, x.bias, x.first, blocks)
        queries["bias"] = (bq + bk,)
    rows = {
        "k": matrix(spec, 2, ROWS, spec.dim, dtype=dtype),
        "v": matrix(spec, 2, ROWS, spec.value_dim, dtype=dtype),
        "ready": plgpu.Barrier(num_arrivals=2 + len(dots.staying), num_barriers=2),
        "sums": vector(2, ROWS),
    }
    if spec.interpret:
        rows["operand"] = operand(bq, dtype)

    def pipes(slots, of_dots):
        return {
            "queries": pipe(spec, slots, dtype, **queries),
            "d_outs": pipe(spec, slots, dtype, d_out=(bq, spec.value_dim), delta=(bq,)),
        } | dots.scratch(of_dots)

    scratch = most_slots(lambda *slots: rows | pipes(*slots))

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
        dots.copy_rows(own, kept, b, at["head"] * spec.group, k0, warpgroup)
        plgpu.barrier_wait(ready)
        part = pl.ds(pl.multiple_of((1 - warpgroup) * ROWS, ROWS), ROWS + bq)

        def over_tiles(*totals):
            d_k, d_v = (dict(zip(wanted, totals, strict=False)).get(n) for n in "kv")
            d_features = totals if wanted == "f" else ()

            def of_head(g, ruled):
                head = at["head"] * spec.group + g

                def step(n, carry):
                    (ruled, sums), t = carry, g * count + n
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
                        added=dots.added(kept, warpgroup),
                    )
                    dots.turn(tile, kept, warpgroup, ruled)
                    pairs = [(k, queries["q"]), (v, d_outs["d_out"])]
                    lse = columns_to_tile(queries["lse"], tile.shape)
                    p, slope, d_p = tile.weights(lse, *pairs[: 1 if wanted == "v" else 2])
                    if d_v is not None:
                        rounded = p.astype(dtype)
                        product(d_v, rounded, d_outs["d_out"], kept.get("operand"), warpgroup)
                    if wanted != "v":
                        delta = columns_to_tile(d_outs["delta"], tile.shape)
                        ds = d_logits(p, d_p[0], delta, slope)
                        if d_k is not None:
                            sums = tile.pull(ds, sums)
                            rounded = ds.astype(dtype)
                            product(d_k, rounded, queries["q"], kept.get("operand"), warpgroup)
                    plgpu.wgmma_wait(0)
                    kept["queries"].release(t)
                    kept["d_outs"].release(t)
                    if d_features:
                        ds = ds * own["cotangents"].scale[0]
                        dots.pull(d_features, ds, tile, kept, warpgroup, ruled)
                    return dots.release(tile, kept, ruled), sums

                start = [[zeros((ROWS,), ROW)] * number_count(e, 1) for e in elements]
                ruled, sums = jax.lax.fori_loop(jnp.int32(0), count, step, (ruled, start))
                write_rows(sums, out.get("sums", []), kept["sums"].at[warpgroup], b, head, k0)
                return ruled

            jax.lax.fori_loop(jnp.int32(0), jnp.int32(spec.group), of_head, jnp.int32(0))
            return [total[...] for total in totals]

        dims = {"k": spec.dim, "v": spec.value_dim}
        if wanted == "f":
            totals = dots.totals
        else:
            totals = [plgpu.ACC((ROWS, dims[n]), jnp.float32) for n in wanted]
        made = pl.run_scoped(over_tiles, *totals)
        if wanted == "f":
            for total, to in zip(made, out["features"], strict=True):
                to.at[b, at["head"], pl.ds(k0, ROWS)][...] = total
            return
        for n, total in zip(wanted, made, strict=True):
            to = {"k": k, "v": v}[n]
            to[...] = (total * spec.scale if n == "k" else total).astype(dtype)
            plgpu.commit_smem()
            plgpu.copy_smem_to_gmem(to, out[n].at[of_head])
        plgpu.wait_smem_to_gmem(0)

    def copy(at, own, kept):
        b, (count, entry), first = at["b"], tiles_of(at, own), at["j"] * bk

        def of_head(g, ruled):
            head = at["head"] * spec.group + g

            def fill(n, ruled):
                q0, t = column_of(entry(n)) * bq, g * count + n
                tokens, bias = pl.ds(q0, bq), {}
                start = pl.multiple_of(jnp.clip(q0 - first, low, high) - low, bq)
                if x.bias is not None:
                    bias["bias"] = spec.line_of(own["line"], head).at[pl.ds(start, bq + bk)]
                lse, delta = (y.at[b, head, tokens] for y in own["cotangents"].numbers)
                kept["queries"].fill(t, q=own["x"].q.at[b, tokens, head], lse=lse, **bias)
                d_out = own["cotangents"].d_out.at[b, tokens, head]
                kept["d_outs"].fill(t, d_out=d_out, delta=delta)
                where = b, head, start, (q0, first)
                return dots.fill(own, kept, ruled, kind_of(entry(n)), *where)

            return jax.lax.fori_loop(jnp.int32(0), count, fill, ruled)

        jax.lax.fori_loop(jnp.int32(0), jnp.int32(spec.group), of_head, jnp.int32(0))

    per_key = spec.struct(x, (spec.batch, spec.heads, spec.keys), jnp.float32)
    if wanted == "f":
        outs = {"features": dots.grads}
    else:
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
