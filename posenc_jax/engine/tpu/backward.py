"""The fused backward kernel: dq, dk, dv and the cotangent of the bias by distance, for TPU.

Grid (K, B, query heads of a key head, blocks of keys, blocks of queries). Logits are
transposed, [K, Q], so that p and ds enter the products as they are. dq of a head stays in
VMEM; dk and dv of a block of keys do too, or with grouped heads those of all keys. The
cotangent of the bias is a strip, summed along its diagonals once per head. All sums run in one
fixed order: results are bitwise reproducible.
"""

import functools
from typing import Any

import jax
import jax.numpy as jnp
from jax.experimental import pallas as pl
from jax.experimental.pallas import tpu as pltpu

from posenc_jax.engine.tpu.operands import INTERIOR, LOG2E, NEAR, Operands, Spec, line_of
from posenc_jax.engine.tpu.strip import LANES, Strip, shear, sum_diagonals
from posenc_jax.engine.tpu.tile import dot, lanes, matrix_spec, row_spec, to_column, visible


def backward(
    spec: Spec, x: Operands, d_out: jax.Array, lse: jax.Array, delta: jax.Array
) -> tuple[jax.Array, jax.Array, jax.Array, jax.Array | None]:
    """Returns the cotangents of q, k, v, in their layouts, and of the bias.

    Args:
      spec: the static part.
      x: the operands.
      d_out: cotangent of the output, in its layout and the dtype of v.
      lse: float32 [B, N, 1, T], finite.
      delta: float32 [B, N, 1, T], sum of d_out * out over V, less the cotangent of lse.
    """
    bq, bk, group = spec.backward.q, spec.backward.k, spec.group
    blocks, steps = spec.keys // bk, spec.length // bq
    shared_schedule = x.schedules[1].shape[0] == 1
    low, high = spec.reach(spec.backward)
    strip = Strip.of(low, high, bk, bq)
    kept_keys = bk if group == 1 else spec.keys  # Keys whose cotangents stay in VMEM.

    def entry(schedule, b, j, i):
        return schedule[((0 if shared_schedule else b) * blocks + j) * steps + i]

    def query(h, b, g, j, i, schedule, prefix):
        return b, h * group + g, jax.lax.div(entry(schedule, b, j, i), 4)

    def key(h, b, g, j, i, schedule, prefix):
        return b, h, j

    def of_head(h, b, g):
        return (b if group > 1 else 0), h * group + g

    def number_spec():
        def index(*ids):
            b, n, block = query(*ids)
            return b, n, 0, block

        return pl.BlockSpec((None, None, 1, bq), index)

    ins = {
        "q": (x.q, matrix_spec(x.q, bq, spec.dim, query)),
        "k": (x.k, matrix_spec(x.k, bk, spec.dim, key)),
        "v": (x.v, matrix_spec(x.v, bk, spec.value_dim, key)),
        "d_out": (d_out, matrix_spec(d_out, bq, spec.value_dim, query)),
        "lse": (lse, number_spec()),
        "delta": (delta, number_spec()),
    }
    scratch = {
        "scaled": pltpu.VMEM((bk, spec.dim), x.k.dtype),
        "dq": pltpu.VMEM((spec.length, spec.dim), jnp.float32),
        "dk": pltpu.VMEM((kept_keys, spec.dim), jnp.float32),
        "dv": pltpu.VMEM((kept_keys, spec.value_dim), jnp.float32),
    }
    for name in x.rows:
        ins[f"q_{name}"] = x.rows[name], row_spec(x.rows[name], bq, query)
        ins[f"k_{name}"] = x.columns[name], row_spec(x.columns[name], bk, key)
        scratch[f"k_{name}"] = pltpu.VMEM((bk, LANES), jnp.int32)

    def last_keys(h, b, g, j, i, schedule, prefix):
        return b, h * group + g, jnp.where(j == blocks - 1, i, 0)

    def last_group(h, b, g, j, i, schedule, prefix):
        return b, h, jnp.where(g == group - 1, j, 0)

    outs = [
        (jax.ShapeDtypeStruct(x.q.shape, x.q.dtype), matrix_spec(x.q, bq, spec.dim, last_keys)),
        (jax.ShapeDtypeStruct(x.k.shape, x.k.dtype), matrix_spec(x.k, bk, spec.dim, last_group)),
        (
            jax.ShapeDtypeStruct(x.v.shape, x.v.dtype),
            matrix_spec(x.v, bk, spec.value_dim, last_group),
        ),
    ]
    if x.bias is not None:

        def make_line(bias):
            return line_of(spec, bias, x.first, strip, 1)

        line = make_line(x.bias)
        one = line.shape[0] == 1
        ins["line"] = (
            line,
            pl.BlockSpec(
                (None, 1, strip.line), lambda h, b, g, *_: (0 if one else h * group + g, 0, 0)
            ),
        )
        scratch["strip"] = pltpu.VMEM((LANES, strip.width), jnp.float32)
        scratch["d_strip"] = pltpu.VMEM((LANES, strip.width), jnp.float32)
        rows = spec.batch if group > 1 else 1
        outs.append(
            (
                jax.ShapeDtypeStruct((rows, spec.heads, 1, strip.line), jnp.float32),
                pl.BlockSpec((None, None, 1, strip.line), lambda h, b, g, *_: (*of_head(h, b, g), 0, 0)),
            )
        )

    def kernel(schedule, prefix, *refs):
        own = dict(zip(ins, refs, strict=False))
        dq_ref, dk_ref, dv_ref, *d_line_ref = refs[len(ins) : len(ins) + len(outs)]
        mine = dict(zip(scratch, refs[len(ins) + len(outs) :], strict=True))
        _, b, g, j, i = (pl.program_id(axis) for axis in range(5))
        kind = jax.lax.rem(entry(schedule, b, j, i), 4)
        offset = i * bq - j * bk
        limit = prefix[b] if spec.prefix else None
        start = (j == 0) & (i == 0)
        end = (j == blocks - 1) & (i == steps - 1)
        # With one query head per key head, strips serve the whole batch.
        start_strip, end_strip = start, end
        if group == 1:
            start_strip, end_strip = start & (b == 0), end & (b == spec.batch - 1)
        own_keys = pl.ds(pl.multiple_of(0 if group == 1 else j * bk, LANES), bk)

        @pl.when(start)
        def _():
            mine["dq"][...] = jnp.zeros_like(mine["dq"])

        if x.bias is not None:

            @pl.when(start_strip)
            def _():
                shear(strip, own["line"], mine["strip"], rotate=not spec.interpret)
                mine["d_strip"][...] = jnp.zeros_like(mine["d_strip"])

        @pl.when(i == 0)
        def _():
            k = own["k"][...].astype(jnp.float32) * (spec.scale * spec.unit)
            mine["scaled"][...] = k.astype(x.k.dtype)
            for name in x.rows:
                mine[f"k_{name}"][...] = to_column(own[f"k_{name}"][...])

        @pl.when((i == 0) & (g == 0))
        def _():
            mine["dk"][own_keys] = jnp.zeros((bk, spec.dim), jnp.float32)
            mine["dv"][own_keys] = jnp.zeros((bk, spec.value_dim), jnp.float32)

        def tile(near):
            q, do = own["q"][...], own["d_out"][...]
            s = dot(mine["scaled"][...], q, (1, 1))
            biased = x.bias is not None and (near or spec.visibility.bias_everywhere)
            at: Any = [strip.lane(offset, r) for r in range(0, bk, LANES)] if biased else []
            if biased:
                parts = [
                    s[n * LANES : (n + 1) * LANES] + mine["strip"][:, pl.ds(lane, bq)]
                    for n, lane in enumerate(at)
                ]
                s = jnp.concatenate(parts)
            slope = None
            if spec.softcap is not None:
                s = jnp.tanh(s)
                slope = 1.0 - s * s
                s = spec.softcap * LOG2E * s
            p = jnp.exp2(s - own["lse"][...] * LOG2E)
            if near:
                queries = {n: own[f"q_{n}"][...] for n in x.rows}
                keys = {n: lanes(mine[f"k_{n}"][...], bq) for n in x.rows}
                see = visible(spec, s.shape, 1, offset, queries, keys, limit)
                p = p if see is None else jnp.where(see, p, 0.0)
            mine["dv"][own_keys] += dot(p.astype(do.dtype), do)
            ds = p * (dot(own["v"][...], do, (1, 1)) - own["delta"][...])
            ds = ds if slope is None else ds * slope
            if biased:
                # Rows that are 128 apart are added at lanes that are 128 apart.
                shifted = [
                    jnp.pad(
                        ds[n * LANES : (n + 1) * LANES],
                        ((0, 0), (bk - (n + 1) * LANES, n * LANES)),
                    )
                    for n in range(len(at))
                ]
                mine["d_strip"][:, pl.ds(at[-1], bq + bk - LANES)] += sum(shifted[1:], shifted[0])
            ds = ds.astype(q.dtype)
            mine["dk"][own_keys] += dot(ds, q)
            mine["dq"][pl.ds(pl.multiple_of(i * bq, LANES), bq)] += dot(ds, own["k"][...], (0, 0))

        pl.when(kind == INTERIOR)(functools.partial(tile, False))
        pl.when(kind == NEAR)(functools.partial(tile, True))

        @pl.when((i == steps - 1) & (g == group - 1))
        def _():
            dk_ref[...] = (mine["dk"][own_keys] * spec.scale).astype(dk_ref.dtype)
            dv_ref[...] = mine["dv"][own_keys].astype(dv_ref.dtype)

        @pl.when(j == blocks - 1)
        def _():
            dq = mine["dq"][pl.ds(pl.multiple_of(i * bq, LANES), bq)]
            dq_ref[...] = (dq * spec.scale).astype(dq_ref.dtype)

        if x.bias is not None:

            @pl.when(end_strip)
            def _():
                d_line_ref[0][...] = jnp.zeros_like(d_line_ref[0])
                sum_diagonals(strip, mine["d_strip"], d_line_ref[0])

    made = pl.pallas_call(
        kernel,
        grid_spec=pltpu.PrefetchScalarGridSpec(
            num_scalar_prefetch=2,
            grid=(spec.kv_heads, spec.batch, group, blocks, steps),
            in_specs=[blocks_of for _, blocks_of in ins.values()],
            out_specs=[blocks_of for _, blocks_of in outs],
            scratch_shapes=list(scratch.values()),
        ),
        out_shape=[shape for shape, _ in outs],
        compiler_params=pltpu.CompilerParams(
            dimension_semantics=("parallel", *("arbitrary",) * 4),
            vmem_limit_bytes=spec.vmem_limit,
        ),
        interpret=spec.interpret,
        name="attention_backward",
    )(x.schedules[1].reshape(-1), x.prefix, *(array for array, _ in ins.values()))
    dq, dk, dv, *d_line = made
    if not d_line:
        return dq, dk, dv, None
    d_line = d_line[0].sum(0) / spec.unit
    d_line = d_line.sum(0, keepdims=True) if x.bias.shape[0] == 1 else d_line
    (d_bias,) = jax.linear_transpose(make_line, x.bias)(d_line)
    return dq, dk, dv, d_bias
