"""The forward kernel: flash attention with a position rule, for TPU.

Grid (N, B, blocks of queries, blocks of keys). The running maximum m, sum l and output of a
block of queries stay in VMEM over its blocks of keys, the strip of a head over the batch.
"""

import functools

import jax
import jax.numpy as jnp
from jax.experimental import pallas as pl
from jax.experimental.pallas import tpu as pltpu

from posenc_jax.engine.tpu.elements import evaluate
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
from posenc_jax.engine.tpu.strip import LANES, Strip, shear
from posenc_jax.engine.tpu.tile import (
    dot,
    lanes,
    matrix_spec,
    number_spec,
    row_spec,
    to_column,
    to_row,
    visible,
)
from posenc_jax.mask import MASK_VALUE

_SLICE = 512  # Keys of one product.


def forward(spec: Spec, x: Operands) -> tuple[jax.Array, jax.Array]:
    """Returns the output, in the layout of v, and the log-sum-exp, float32 [B, N, 1, T]."""
    bq, bk = spec.forward.q, spec.forward.k
    inner = min(bk, _SLICE)
    blocks, steps = spec.length // bq, spec.keys // bk
    shared_schedule = x.schedules[0].shape[0] == 1
    low, high = spec.reach(spec.forward)
    strip = Strip.of(-high, -low, bq, bk)

    def entry(schedule, b, i, j):
        return schedule[((0 if shared_schedule else b) * blocks + i) * steps + j]

    def query(h, b, i, j, schedule, prefix):
        return b, h, i

    def key_of_head(h, b, i, j, schedule, prefix):
        return b, h, block_of(entry(schedule, b, i, j))

    def key(*ids):
        b, h, block = key_of_head(*ids)
        return b, jax.lax.div(h, spec.group), block

    ins = {
        "q": (x.q, matrix_spec(x.q, bq, spec.dim, query)),
        "k": (x.k, matrix_spec(x.k, bk, spec.dim, key)),
        "v": (x.v, matrix_spec(x.v, bk, spec.value_dim, key)),
    }
    scratch = {
        "scaled": pltpu.VMEM((bq, spec.dim), x.q.dtype),
        "m": pltpu.VMEM((bq, LANES), jnp.float32),
        "l": pltpu.VMEM((bq, LANES), jnp.float32),
        "acc": pltpu.VMEM((bq, spec.value_dim), jnp.float32),
    }
    for name in x.rows:
        ins[f"q_{name}"] = x.rows[name], row_spec(x.rows[name], bq, query)
        ins[f"k_{name}"] = x.columns[name], row_spec(x.columns[name], bk, key)
        scratch[f"q_{name}"] = pltpu.VMEM((bq, LANES), jnp.int32)
    for e, element in enumerate(x.elements):
        for n, array in enumerate(element.numbers):
            ins[f"number{e}_{n}"] = array, pl.BlockSpec(memory_space=pltpu.SMEM)
        for n, array in enumerate(element.q_numbers):
            ins[f"q{e}_{n}"] = array, number_spec(array, bq, query)
            scratch[f"q{e}_{n}"] = pltpu.VMEM((bq, LANES), jnp.float32)
        for n, array in enumerate(element.k_numbers):
            group = spec.heads // array.shape[1]
            ins[f"k{e}_{n}"] = array, number_spec(array, bk, key_of_head, group)
    if x.bias is not None:
        line = line_of(spec, x.bias, x.first, strip, -1)
        one = line.shape[0] == 1
        of_head = pl.BlockSpec((None, 1, strip.line), lambda h, *_: (0 if one else h, 0, 0))
        ins["line"] = line, of_head
        scratch["strip"] = pltpu.VMEM((LANES, strip.width), jnp.float32)

    def kernel(schedule, prefix, *refs):
        own = dict(zip(ins, refs, strict=False))
        out_ref, lse_ref, *kept = refs[len(ins) :]
        mine = dict(zip(scratch, kept, strict=True))
        m_ref, l_ref, acc_ref = mine["m"], mine["l"], mine["acc"]
        h, b, i, j = (pl.program_id(axis) for axis in range(4))
        kind = kind_of(entry(schedule, b, i, j))
        offset = i * bq - j * bk
        limit = prefix[b] if spec.prefix else None

        if x.bias is not None:

            @pl.when((b == 0) & (i == 0) & (j == 0))
            def _():
                shear(strip, own["line"], mine["strip"], rotate=not spec.interpret)

        @pl.when(j == 0)
        def _():
            m_ref[...] = jnp.full_like(m_ref, MASK_VALUE)
            l_ref[...] = jnp.zeros_like(l_ref)
            acc_ref[...] = jnp.zeros_like(acc_ref)
            q = own["q"][...].astype(jnp.float32) * (spec.scale * spec.unit)
            mine["scaled"][...] = q.astype(x.q.dtype)
            for name in x.rows:
                mine[f"q_{name}"][...] = to_column(own[f"q_{name}"][...])
            for e, element in enumerate(x.elements):
                for n in range(len(element.q_numbers)):
                    mine[f"q{e}_{n}"][...] = to_column(own[f"q{e}_{n}"][...])

        def tile(ruled, masked):
            for c in range(0, bk, inner):
                s = dot(mine["scaled"][...], own["k"][c : c + inner], (1, 1))
                if x.bias is not None and ruled:
                    parts = []
                    for r in range(0, bq, LANES):
                        at = pl.multiple_of(strip.lane(-offset, r) + c, LANES)
                        parts.append(s[r : r + LANES] + mine["strip"][:, pl.ds(at, inner)])
                    s = jnp.concatenate(parts)
                queries, keys = {}, {}
                if ruled or masked:
                    queries = {n: lanes(mine[f"q_{n}"][...], inner) for n in x.rows}
                    keys = {n: own[f"k_{n}"][:, c : c + inner] for n in x.rows}
                    for e, element in enumerate(x.elements):
                        places = None
                        if element.places:
                            places = queries["coordinates"], keys["coordinates"]
                        of_queries, of_keys = map(len, (element.q_numbers, element.k_numbers))
                        added, _ = evaluate(
                            element,
                            s.shape,
                            [own[f"number{e}_{n}"][h] for n in range(len(element.numbers))],
                            [lanes(mine[f"q{e}_{n}"][...], inner) for n in range(of_queries)],
                            [own[f"k{e}_{n}"][:, c : c + inner] for n in range(of_keys)],
                            places,
                        )
                        s += spec.unit * added
                if spec.softcap is not None:
                    s = spec.softcap * LOG2E * jnp.tanh(s)
                v = own["v"][c : c + inner]
                if masked:
                    see = visible(spec, s.shape, 0, offset - c, queries, keys, limit)
                    s = s if see is None else jnp.where(see, s, MASK_VALUE)
                m = m_ref[...]
                m_new = jnp.maximum(m, jnp.max(s, 1, keepdims=True))
                p = jnp.exp2(s - lanes(m_new, inner))
                decay = jnp.exp2(m - m_new)
                l_ref[...] = l_ref[...] * decay + jnp.sum(p, 1, keepdims=True)
                m_ref[...] = m_new
                out = dot(p.astype(v.dtype), v)
                acc_ref[...] = acc_ref[...] * lanes(decay, spec.value_dim) + out

        for one in spec.kinds:
            pl.when(kind == one)(functools.partial(tile, one != PLAIN, one == MASKED))

        @pl.when(j == steps - 1)
        def _():
            m, l = m_ref[...], l_ref[...]
            blind = m <= MASK_VALUE / 2
            l = jnp.where(blind, 1.0, l)
            share = lanes(jnp.where(blind, 0.0, 1.0 / l), spec.value_dim)
            out_ref[...] = (acc_ref[...] * share).astype(out_ref.dtype)
            lse_ref[...] = to_row(jnp.where(blind, -jnp.inf, (m + jnp.log2(l)) / LOG2E))

    if x.v.ndim == 3:
        shape = spec.batch, spec.length, spec.heads * spec.value_dim
    else:
        shape = spec.batch, spec.heads, spec.length, spec.value_dim
    out = jax.ShapeDtypeStruct(shape, spec.dtype)
    lse = jax.ShapeDtypeStruct((spec.batch, spec.heads, 1, spec.length), jnp.float32)
    return pl.pallas_call(
        kernel,
        grid_spec=pltpu.PrefetchScalarGridSpec(
            num_scalar_prefetch=2,
            grid=(spec.heads, spec.batch, blocks, steps),
            in_specs=[blocks_of for _, blocks_of in ins.values()],
            out_specs=[
                matrix_spec(out, bq, spec.value_dim, query),
                pl.BlockSpec((None, None, 1, bq), lambda h, b, i, j, *_: (b, h, 0, i)),
            ],
            scratch_shapes=list(scratch.values()),
        ),
        out_shape=[out, lse],
        compiler_params=pltpu.CompilerParams(
            dimension_semantics=("parallel", "arbitrary", "arbitrary", "arbitrary"),
            vmem_limit_bytes=spec.vmem_limit,
        ),
        interpret=spec.interpret,
        name="attention_forward",
    )(x.schedules[0].reshape(-1), x.prefix, *(array for array, _ in ins.values()))
