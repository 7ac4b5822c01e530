"""The forward kernel: flash attention with position rules, for TPU.

Grid (N, B, tiles), tiles by blocks of queries. The running maximum m, sum l and output of a
block of queries stay in VMEM over its blocks of keys, the strip of a head over the batch.
"""

import functools
import math
from typing import Any

import jax
import jax.numpy as jnp
from jax.experimental import pallas as pl
from jax.experimental.pallas import tpu as pltpu

from posenc_jax.engine.elements import evaluate
from posenc_jax.engine.kinds import MASKED, PLAIN, kinds
from posenc_jax.engine.mask import MASK_VALUE
from posenc_jax.engine.operands import LOG2E, Operands
from posenc_jax.engine.tpu.dots import added, part_of, place_products
from posenc_jax.engine.tpu.layout import (
    check_memory,
    element_specs,
    matrix_spec,
    number_spec,
    row_spec,
)
from posenc_jax.engine.tpu.schedule import (
    column_of,
    is_first,
    is_last,
    kind_of,
    row_of,
)
from posenc_jax.engine.tpu.spec import Spec, bias_line, heads_before_tokens, heads_first
from posenc_jax.engine.tpu.strip import LANES, Strip, shear
from posenc_jax.engine.tpu.tile import dot, kept_pairs, lanes, to_column, to_row, visible

_SLICE = 512  # Keys of one product, at most.


def forward(spec: Spec, x: Operands) -> tuple[jax.Array, jax.Array]:
    """Returns the output, [B, T, N, V], and the log-sum-exp, float32 [B, N, T]."""
    x = heads_first(x)
    bq, bk = spec.forward.q, spec.forward.k
    inner = math.gcd(bk, _SLICE)
    tiles = spec.order(by_key=False)[0].size
    low, high = spec.reach(spec.forward)
    strip = Strip.of(-high, -low, bq, bk)

    def entry(schedule, b, t):
        row = b if x.schedules[0].shape[0] > 1 else 0
        return schedule[row * tiles + t]

    def query(h, b, t, schedule, prefix):
        return b, h, row_of(entry(schedule, b, t))

    def key_of_head(h, b, t, schedule, prefix):
        return b, h, column_of(entry(schedule, b, t))

    def key(*ids):
        b, h, block = key_of_head(*ids)
        return b, jax.lax.div(h, jnp.int32(spec.group)), block

    arrays: dict[str, Any] = {"q": x.q, "k": x.k, "v": x.v, "rows": x.rows, "columns": x.columns}
    specs = {
        "q": matrix_spec(x.q, bq, query),
        "k": matrix_spec(x.k, bk, key),
        "v": matrix_spec(x.v, bk, key),
        "rows": jax.tree.map(lambda y: row_spec(y, bq, query), x.rows),
        "columns": jax.tree.map(lambda y: row_spec(y, bk, key), x.columns),
    }
    arrays["elements"] = x.elements
    specs["elements"] = element_specs(x.elements, spec.heads, (bq, query), (bk, key_of_head))
    column = functools.partial(pltpu.VMEM, (bq, LANES))
    scratch = {
        "q": pltpu.VMEM((bq, spec.dim), x.q.dtype),
        "m": column(jnp.float32),
        "l": column(jnp.float32),
        "out": pltpu.VMEM((bq, spec.value_dim), jnp.float32),
        "rows": {name: column(jnp.int32) for name in x.rows},
        "numbers": [[column(jnp.float32) for _ in e.q_numbers] for e in x.elements],
    }
    if x.dropped is not None:
        arrays["dropped"], specs["dropped"] = x.dropped, number_spec(x.dropped, bq, query)
        scratch["dropped"] = column(jnp.uint32)
    if x.bias is not None:
        arrays["line"] = bias_line(spec, x.bias, x.first, strip, -1)
        one = x.bias.shape[0] == 1
        specs["line"] = pl.BlockSpec((None, 1, strip.line), lambda h, *_: (0 if one else h, 0, 0))
        scratch["strip"] = pltpu.VMEM((LANES, strip.width), jnp.float32)
    products = place_products(spec, x, spec.forward, 0, query, key_of_head)
    arrays["products"], specs["products"] = products.arrays, products.specs
    scratch["steps"] = products.columns

    what = f"the forward pass of T = {spec.length}, S = {spec.keys}, H = {spec.dim}"
    check_memory(what, spec.vmem_limit, scratch, arrays, specs)

    may_hide = spec.rules_in_bias or bool(x.elements)  # Rules hide keys by -inf.

    def kernel(schedule, prefix, own, out_ref, lse_ref, kept):
        h, b, t = (pl.program_id(axis) for axis in range(3))
        step = entry(schedule, b, t)
        kind, i, j = kind_of(step), row_of(step), column_of(step)
        offset = i * bq - j * bk
        limit = prefix[b] if spec.prefix else None

        if x.bias is not None:

            @pl.when((b == 0) & (t == 0))
            def _():
                shear(strip, own["line"], kept["strip"], rotate=not spec.interpret)

        @pl.when(is_first(step))
        def _():
            kept["m"][...] = jnp.full((bq, LANES), MASK_VALUE, jnp.float32)
            kept["l"][...] = jnp.zeros((bq, LANES), jnp.float32)
            kept["out"][...] = jnp.zeros((bq, spec.value_dim), jnp.float32)
            q = own["q"][...].astype(jnp.float32) * (spec.scale * spec.unit)
            kept["q"][...] = q.astype(x.q.dtype)
            for name, row in own["rows"].items():
                kept["rows"][name][...] = to_column(row[...])
            if x.dropped is not None:
                kept["dropped"][...] = to_column(own["dropped"][...])
            for element, columns in zip(own["elements"], kept["numbers"], strict=True):
                for row, to in zip(element.q_numbers, columns, strict=True):
                    to[...] = to_column(row[...])
            for y, columns in zip(own["products"], kept["steps"], strict=True):
                for to in columns:
                    to[...] = to_column(y["steps"][...])

        def added_of(c):
            keys, made = range(c, c + inner), []
            for at, y, steps_of_q in zip(
                products.places, own["products"], kept["steps"], strict=True
            ):
                made.append(added(at, y, steps_of_q, part_of(at, offset, range(bq), keys)))
            return made

        def tile(ruled, masked):
            # All rotations first: they overlap with the matrix products that come after them.
            slices = range(0, bk, inner)
            terms = [added_of(c) if ruled else [] for c in slices]
            for c, terms_of_slice in zip(slices, terms, strict=True):
                s = dot(kept["q"][...], own["k"][c : c + inner], (1, 1))
                if ruled and x.bias is not None:
                    parts = []
                    for r in range(0, bq, LANES):
                        lane = pl.multiple_of(strip.lane(-offset, r) + c, LANES)
                        parts.append(s[r : r + LANES] + kept["strip"][:, pl.ds(lane, inner)])
                    s = jnp.concatenate(parts)
                s = sum(terms_of_slice, s)
                q, k = {}, {}
                if ruled or masked:
                    q = {name: lanes(y[...], inner) for name, y in kept["rows"].items()}
                    k = {name: y[:, c : c + inner] for name, y in own["columns"].items()}
                for element, columns in zip(own["elements"], kept["numbers"], strict=True):
                    if ruled or element.everywhere:
                        numbers = [y[h] for y in element.numbers]
                        of_q = [lanes(y[...], inner) for y in columns]
                        of_k = [y[:, c : c + inner] for y in element.k_numbers]
                        s += spec.unit * evaluate(element, s.shape, numbers, of_q, of_k, q, k)[0]
                if spec.softcap is not None:
                    capped = spec.softcap * LOG2E * jnp.tanh(s)
                    s = jnp.where(s == -jnp.inf, s, capped) if ruled and may_hide else capped
                if masked:
                    see = visible(spec, s.shape, 0, offset - c, q, k, limit)
                    s = jnp.where(see, s, MASK_VALUE)
                m = kept["m"][...]
                m_new = jnp.maximum(m, jnp.max(s, 1, keepdims=True))
                p, decay = jnp.exp2(s - lanes(m_new, inner)), jnp.exp2(m - m_new)
                kept["m"][...] = m_new
                kept["l"][...] = kept["l"][...] * decay + jnp.sum(p, 1, keepdims=True)
                if x.dropped is not None:  # The sum of weights counts all pairs.
                    slots = own["columns"]["slots"][:, c : c + inner]
                    hashed = lanes(kept["dropped"][...], inner)
                    p = jnp.where(kept_pairs(spec, hashed, slots), p, 0.0)
                v = own["v"][c : c + inner]
                out = kept["out"][...] * lanes(decay, spec.value_dim)
                kept["out"][...] = out + dot(p.astype(v.dtype), v)

        for one_kind in kinds(spec.visibility):
            body = functools.partial(tile, one_kind != PLAIN, one_kind == MASKED)
            pl.when(kind == one_kind)(body)

        @pl.when(is_last(step))
        def _():
            m, total = kept["m"][...], kept["l"][...]
            blind = m <= MASK_VALUE / 2
            total = jnp.where(blind, 1.0, total)
            share = jnp.where(blind, 0.0, 1.0 / total)
            share = share if x.dropped is None else share / (1.0 - spec.dropout_rate)
            out_ref[...] = (kept["out"][...] * lanes(share, spec.value_dim)).astype(spec.dtype)
            lse_ref[...] = to_row(jnp.where(blind, -jnp.inf, (m + jnp.log2(total)) / LOG2E))

    shape = spec.batch, spec.heads, spec.length, spec.value_dim
    of_head = spec.batch, spec.heads, 1, spec.length
    varying = jax.typeof(x.q).mat  # Inside `shard_map`.
    out = jax.ShapeDtypeStruct(shape, spec.dtype, manual_axis_type=varying)
    lse = jax.ShapeDtypeStruct(of_head, jnp.float32, manual_axis_type=varying)
    out, lse = pl.pallas_call(
        kernel,
        grid_spec=pltpu.PrefetchScalarGridSpec(
            num_scalar_prefetch=2,
            grid=(spec.heads, spec.batch, tiles),
            in_specs=[specs],
            out_specs=(
                matrix_spec(out, bq, query),
                number_spec(lse, bq, query),
            ),
            scratch_shapes=[scratch],
        ),
        out_shape=(out, lse),
        compiler_params=pltpu.CompilerParams(
            dimension_semantics=("parallel", "arbitrary", "arbitrary"),
            vmem_limit_bytes=spec.vmem_limit,
        ),
        interpret=spec.interpret,
        name="attention_forward",
    )(x.schedules[0].reshape(-1), x.prefix, arrays)
    return heads_before_tokens(out), lse[:, :, 0]
