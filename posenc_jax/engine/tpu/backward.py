"""The fused backward kernel: dq, dk, dv and the cotangent of the bias by distance, for TPU.

Grid (K, B, query heads of a key head, blocks of keys, blocks of queries). Logits are
transposed, [K, Q], so that p and ds enter the products as they are. dq of a head stays in
VMEM; dk and dv of a block of keys do too, or with grouped heads those of all keys. The
cotangent of the bias is a strip, summed along its diagonals once per head. All sums run in one
fixed order: results are bitwise reproducible.
"""

import dataclasses
import functools
from typing import Any

import jax
import jax.numpy as jnp
from jax.experimental import pallas as pl
from jax.experimental.pallas import tpu as pltpu

from posenc_jax.engine.tpu.elements import Element, evaluate
from posenc_jax.engine.tpu.operands import (
    LOG2E,
    MASKED,
    PLAIN,
    Operands,
    Spec,
    block_of,
    kind_of,
    line_of,
)
from posenc_jax.engine.tpu.strip import LANES, Strip, shear, sum_diagonals
from posenc_jax.engine.tpu.tile import (
    dot,
    lanes,
    matrix_spec,
    number_spec,
    row_spec,
    to_column,
    visible,
)


def backward(
    spec: Spec, x: Operands, d_out: jax.Array, lse: jax.Array, delta: jax.Array
) -> tuple[jax.Array, jax.Array, jax.Array, jax.Array | None, tuple[Element, ...]]:
    """Returns the cotangents of q, k, v, in their layouts, of the bias, and of the elements.

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
        return b, h * group + g, block_of(entry(schedule, b, j, i))

    def key(h, b, g, j, i, schedule, prefix):
        return b, h, j

    def key_of_head(h, b, g, j, i, schedule, prefix):
        return b, h * group + g, j

    def of_head(h, b, g):
        return (b if group > 1 else 0), h * group + g

    ins = {
        "q": (x.q, matrix_spec(x.q, bq, spec.dim, query)),
        "k": (x.k, matrix_spec(x.k, bk, spec.dim, key)),
        "v": (x.v, matrix_spec(x.v, bk, spec.value_dim, key)),
        "d_out": (d_out, matrix_spec(d_out, bq, spec.value_dim, query)),
        "lse": (lse, number_spec(lse, bq, query)),
        "delta": (delta, number_spec(delta, bq, query)),
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

    def like(array, block, dim, at):
        shape = jax.ShapeDtypeStruct(array.shape, array.dtype)
        return shape, matrix_spec(shape, block, dim, at)

    outs = {
        "q": like(x.q, bq, spec.dim, last_keys),
        "k": like(x.k, bk, spec.dim, last_group),
        "v": like(x.v, bk, spec.value_dim, last_group),
    }
    for e, element in enumerate(x.elements):
        for n, array in enumerate(element.numbers):
            ins[f"number{e}_{n}"] = array, pl.BlockSpec(memory_space=pltpu.SMEM)
            rows = spec.batch if group > 1 else 1
            outs[f"number{e}_{n}"] = (
                jax.ShapeDtypeStruct((rows, spec.heads, 8, LANES), jnp.float32),
                pl.BlockSpec((None, None, 8, LANES), lambda h, b, g, *_: (*of_head(h, b, g), 0, 0)),
            )
        for n, array in enumerate(element.q_numbers):
            ins[f"q{e}_{n}"] = array, number_spec(array, bq, query)
            outs[f"q{e}_{n}"] = (
                jax.ShapeDtypeStruct((spec.batch, spec.heads, 1, spec.length), jnp.float32),
                pl.BlockSpec(
                    (None, None, 1, spec.length), lambda h, b, g, *_: (b, h * group + g, 0, 0)
                ),
            )
        for n, array in enumerate(element.k_numbers):
            heads = spec.heads // array.shape[1]
            ins[f"k{e}_{n}"] = array, number_spec(array, bk, key_of_head, heads)
            shape = jax.ShapeDtypeStruct((spec.batch, spec.heads, 1, spec.keys), jnp.float32)
            outs[f"k{e}_{n}"] = shape, number_spec(shape, bk, key_of_head)
            scratch[f"k{e}_{n}"] = pltpu.VMEM((bk, LANES), jnp.float32)
            scratch[f"d_k{e}_{n}"] = pltpu.VMEM((bk, LANES), jnp.float32)
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
        outs["line"] = (
            jax.ShapeDtypeStruct((rows, spec.heads, 1, strip.line), jnp.float32),
            pl.BlockSpec(
                (None, None, 1, strip.line), lambda h, b, g, *_: (*of_head(h, b, g), 0, 0)
            ),
        )

    def kernel(schedule, prefix, *refs):
        own = dict(zip(ins, refs, strict=False))
        out = dict(zip(outs, refs[len(ins) :], strict=False))
        mine = dict(zip(scratch, refs[len(ins) + len(outs) :], strict=True))
        h, b, g, j, i = (pl.program_id(axis) for axis in range(5))
        kind = kind_of(entry(schedule, b, j, i))
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
            for e, element in enumerate(x.elements):
                for n in range(len(element.q_numbers)):
                    out[f"q{e}_{n}"][...] = jnp.zeros_like(out[f"q{e}_{n}"])

        @pl.when(start_strip)
        def _():
            for e, element in enumerate(x.elements):
                for n in range(len(element.numbers)):
                    out[f"number{e}_{n}"][...] = jnp.zeros((8, LANES), jnp.float32)

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
            for e, element in enumerate(x.elements):
                for n in range(len(element.k_numbers)):
                    mine[f"k{e}_{n}"][...] = to_column(own[f"k{e}_{n}"][...])
                    mine[f"d_k{e}_{n}"][...] = jnp.zeros_like(mine[f"d_k{e}_{n}"])

        @pl.when((i == 0) & (g == 0))
        def _():
            mine["dk"][own_keys] = jnp.zeros((bk, spec.dim), jnp.float32)
            mine["dv"][own_keys] = jnp.zeros((bk, spec.value_dim), jnp.float32)

        def tile(ruled, masked):
            q, do = own["q"][...], own["d_out"][...]
            s = dot(mine["scaled"][...], q, (1, 1))
            biased = x.bias is not None and ruled
            at: Any = [strip.lane(offset, r) for r in range(0, bk, LANES)] if biased else []
            if biased:
                parts = [
                    s[n * LANES : (n + 1) * LANES] + mine["strip"][:, pl.ds(lane, bq)]
                    for n, lane in enumerate(at)
                ]
                s = jnp.concatenate(parts)
            queries, keys, pulls = {}, {}, []
            if ruled or masked:
                queries = {n: own[f"q_{n}"][...] for n in x.rows}
                keys = {n: lanes(mine[f"k_{n}"][...], bq) for n in x.rows}
                for e, element in enumerate(x.elements):
                    places = None
                    if element.places:
                        places = queries["coordinates"], keys["coordinates"]
                    counts = element.numbers, element.q_numbers, element.k_numbers
                    of_heads, of_queries, of_keys = map(len, counts)
                    added, pull = evaluate(
                        element,
                        s.shape,
                        [own[f"number{e}_{n}"][h * group + g] for n in range(of_heads)],
                        [own[f"q{e}_{n}"][...] for n in range(of_queries)],
                        [lanes(mine[f"k{e}_{n}"][...], bq) for n in range(of_keys)],
                        places,
                    )
                    s += spec.unit * added
                    pulls.append(pull)
            slope = None
            if spec.softcap is not None:
                s = jnp.tanh(s)
                slope = 1.0 - s * s
                s = spec.softcap * LOG2E * s
            p = jnp.exp2(s - own["lse"][...] * LOG2E)
            if masked:
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
            for e, pull in enumerate(pulls):
                d_numbers, d_queries, d_keys = pull(ds)
                for n, tile_of in enumerate(d_numbers):
                    out[f"number{e}_{n}"][...] += _fold(tile_of)
                for n, tile_of in enumerate(d_queries):
                    at_q = pl.ds(pl.multiple_of(i * bq, LANES), bq)
                    out[f"q{e}_{n}"][:, at_q] += jnp.sum(tile_of, 0, keepdims=True)
                for n, tile_of in enumerate(d_keys):
                    mine[f"d_k{e}_{n}"][...] += _fold_lanes(tile_of)
            ds = ds.astype(q.dtype)
            mine["dk"][own_keys] += dot(ds, q)
            mine["dq"][pl.ds(pl.multiple_of(i * bq, LANES), bq)] += dot(ds, own["k"][...], (0, 0))

        for one in spec.kinds:
            pl.when(kind == one)(functools.partial(tile, one != PLAIN, one == MASKED))

        @pl.when((i == steps - 1) & (g == group - 1))
        def _():
            out["k"][...] = (mine["dk"][own_keys] * spec.scale).astype(x.k.dtype)
            out["v"][...] = mine["dv"][own_keys].astype(x.v.dtype)

        if any(element.k_numbers for element in x.elements):

            @pl.when(i == steps - 1)
            def _():
                for e, element in enumerate(x.elements):
                    for n in range(len(element.k_numbers)):
                        by_lane = jnp.swapaxes(mine[f"d_k{e}_{n}"][...], 0, 1)
                        out[f"k{e}_{n}"][...] = jnp.sum(by_lane, 0, keepdims=True)

        @pl.when(j == blocks - 1)
        def _():
            dq = mine["dq"][pl.ds(pl.multiple_of(i * bq, LANES), bq)]
            out["q"][...] = (dq * spec.scale).astype(x.q.dtype)

        if x.bias is not None:

            @pl.when(end_strip)
            def _():
                out["line"][...] = jnp.zeros_like(out["line"])
                sum_diagonals(strip, mine["d_strip"], out["line"])

    made = pl.pallas_call(
        kernel,
        grid_spec=pltpu.PrefetchScalarGridSpec(
            num_scalar_prefetch=2,
            grid=(spec.kv_heads, spec.batch, group, blocks, steps),
            in_specs=[blocks_of for _, blocks_of in ins.values()],
            out_specs=[blocks_of for _, blocks_of in outs.values()],
            scratch_shapes=list(scratch.values()),
        ),
        out_shape=[shape for shape, _ in outs.values()],
        compiler_params=pltpu.CompilerParams(
            dimension_semantics=("parallel", *("arbitrary",) * 4),
            vmem_limit_bytes=spec.vmem_limit,
        ),
        interpret=spec.interpret,
        name="attention_backward",
    )(x.schedules[1].reshape(-1), x.prefix, *(array for array, _ in ins.values()))
    grads = dict(zip(outs, made, strict=True))
    elements = tuple(_element_grads(e, element, grads) for e, element in enumerate(x.elements))
    d_bias = None
    if x.bias is not None:
        d_line = grads["line"].sum(0) / spec.unit
        d_line = d_line.sum(0, keepdims=True) if x.bias.shape[0] == 1 else d_line
        (d_bias,) = jax.linear_transpose(make_line, x.bias)(d_line)
    return grads["q"], grads["k"], grads["v"], d_bias, elements


def _element_grads(e: int, element: Element, grads: dict[str, jax.Array]) -> Element:
    """Returns the cotangents of an element, of what the kernel wrote."""
    k_numbers = []
    for n, array in enumerate(element.k_numbers):
        of_heads = grads[f"k{e}_{n}"]
        by_group = of_heads.reshape(*array.shape[:2], -1, *array.shape[2:])
        k_numbers.append(by_group.sum(2))
    return dataclasses.replace(
        element,
        numbers=tuple(grads[f"number{e}_{n}"].sum((0, 2, 3)) for n in range(len(element.numbers))),
        q_numbers=tuple(grads[f"q{e}_{n}"] for n in range(len(element.q_numbers))),
        k_numbers=tuple(k_numbers),
    )


def _fold(x: jax.Array) -> jax.Array:
    """Sums a tile to [8, 128]."""
    rows = x.reshape(-1, 8, x.shape[1]).sum(0)
    return _fold_lanes(rows)


def _fold_lanes(x: jax.Array) -> jax.Array:
    """Sums a tile to [rows, 128]."""
    parts = [x[:, n : n + LANES] for n in range(0, x.shape[1], LANES)]
    return sum(parts[1:], parts[0])
