"""The cotangents of what is by distance on GPUs: the bias, and vectors.

A block of threads has the tiles of a head at one offset, first query less first key. They have
the same distances at the same places, so their cotangents are summed as they are; only the sums
are added up by distance, outside.
"""

import functools
from typing import Any

import jax
import jax.numpy as jnp
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu

from posenc_jax.engine.gpu.dot_arrays import sum_bands
from posenc_jax.engine.gpu.dots import Dots
from posenc_jax.engine.gpu.pipe import launch, most_slots, pipe
from posenc_jax.engine.gpu.spec import (
    ROWS,
    TILE,
    Cotangents,
    Spec,
    bias_line,
    column_of,
    kind_of,
    read_by_kernels,
)
from posenc_jax.engine.gpu.tile import Tile, d_logits, rows_to_tile, zeros
from posenc_jax.engine.operands import Operands

_BLOCKS = 256  # Of threads: fewer do not fill a GPU.


def bias_grads(spec: Spec, x: Operands, bias: jax.Array, given: Cotangents) -> jax.Array:
    """Returns the cotangent of the bias, that of the operands."""
    sums = _sums(spec, x, given, None)
    d_line = sum_diagonals(sums) / spec.unit
    d_line = d_line.sum(0, keepdims=True) if bias.shape[0] == 1 else d_line
    make_line = functools.partial(bias_line, spec, first=x.first, blocks=spec.backward)
    (d_bias,) = jax.linear_transpose(make_line, bias)(d_line)
    return d_bias


def vector_grads(spec: Spec, x: Operands, number: int, given: Cotangents) -> jax.Array:
    """Returns the cotangent of the vectors of a product, [N or 1, F, R]."""
    return sum_bands(spec, x, x.products[number], _sums(spec, x, given, number), given.scale)


def _sums(spec: Spec, x: Operands, given: Cotangents, number: int | None) -> jax.Array:
    """Returns sums over the tiles at each of `spec.offsets`, float32 [N, offsets, ...].

    Those of the cotangents of logits, [..., Q, K]; given the number of a product, those of its
    bands times features, [..., 2, 2, 64, F], of both warpgroups and both halves.
    """
    blocks, dtype = spec.backward, x.q.dtype
    bq, bk = blocks.q, blocks.k
    low = spec.offsets[0]
    entries, counts = x.schedules[3]
    grid = {"head": spec.heads, "part": 1, "o": len(spec.offsets)}
    if spec.heads * len(spec.offsets) < _BLOCKS:
        grid["part"] = spec.batch
    rows_per_part = spec.batch // grid["part"]

    dots = Dots(spec, x, blocks, q_axis=0, stay=False)
    wanted = None if number is None else list(dots)[number]
    arrays: dict[str, Any] = {"x": read_by_kernels(x), "cotangents": given, "dots": dots.given}
    arrays |= {"entries": entries, "counts": counts}
    by_distance = {}
    if x.bias is not None:
        arrays["line"] = bias_line(spec, x.bias, x.first, blocks)
        by_distance["bias"] = (bq + bk,)

    def pipes(slots, of_dots):
        keys = {"q": (bq, spec.dim), "k": (bk, spec.dim)} | by_distance
        values = {"d_out": (bq, spec.value_dim), "v": (bk, spec.value_dim)}
        return {
            "keys": pipe(spec, slots, dtype, **keys),
            "values": pipe(spec, slots, dtype, **values),
        } | dots.scratch(of_dots)

    scratch = most_slots(pipes)

    def over_tiles(at, own, body, carry):
        """Returns `carry = body(t, b, entry, carry)` of all tiles, t counting them."""

        def of_row(b, carry):
            row = b if entries.shape[0] > 1 else 0

            def step(n, carry):
                t, carry = carry
                return t + 1, body(t, b, own["entries"][row, at["o"], n], carry)

            return jax.lax.fori_loop(jnp.int32(0), own["counts"][row, at["o"]], step, carry)

        first = at["part"] * rows_per_part
        start = jnp.int32(0), carry
        return jax.lax.fori_loop(first, first + rows_per_part, of_row, start)[1]

    def compute(at, own, out, kept, warpgroup):
        rows, head = pl.multiple_of(warpgroup * ROWS, ROWS), at["head"]

        def over_all(*accumulators):
            def add(t, b, entry, total):
                q0 = column_of(entry) * bq
                keys, values = kept["keys"].wait(t), kept["values"].wait(t)
                tile = Tile(
                    spec=spec,
                    x=own["x"],
                    shape=(ROWS, bk),
                    q_axis=0,
                    b=b,
                    head=head,
                    q=q0 + rows,
                    k=q0 - (low + at["o"] * bk),
                    kind=kind_of(entry),
                    bias=keys["bias"].at[pl.ds(rows, ROWS + bk)] if by_distance else None,
                    at=bk,
                    added=dots.added(kept, warpgroup),
                )
                dots.turn(tile, kept, warpgroup, t)
                numbers = own["cotangents"].of_rows(b, head, q0 + rows)
                q, d_out = (y.at[pl.ds(rows, ROWS)] for y in (keys["q"], values["d_out"]))
                lse, delta = (rows_to_tile(y, tile.shape) for y in numbers)
                pairs = (q, keys["k"]), (d_out, values["v"])
                p, slope, (d_p,) = tile.weights(lse, *pairs)
                kept["keys"].release(t)
                kept["values"].release(t)
                ds = d_logits(p, d_p, delta, slope)
                if wanted is not None:
                    scaled = ds * own["cotangents"].scale[0]
                    dots.pull_vectors(wanted, accumulators, scaled, kept, warpgroup, t)
                dots.release(tile, kept, t)
                return total + ds if wanted is None else total

            total = over_tiles(at, own, add, zeros((ROWS, bk), TILE) if wanted is None else 0)
            return total if wanted is None else [y[...] for y in accumulators]

        to = out.at[at["part"], head, at["o"]]
        if wanted is None:
            to.at[pl.ds(rows, ROWS)][...] = over_all()
            return
        half = plgpu.ACC((ROWS, dots.width(wanted)), jnp.float32)
        for n, sums in enumerate(pl.run_scoped(over_all, half, half)):
            to.at[warpgroup, n][...] = sums

    def copy(at, own, kept):
        head, start, bias = at["head"], pl.multiple_of(at["o"] * bk, bk), {}
        if by_distance:
            bias["bias"] = spec.line_of(own["line"], head).at[pl.ds(start, bq + bk)]

        def fill(t, b, entry, carry):
            q0 = column_of(entry) * bq
            k0 = q0 - (low + at["o"] * bk)
            of_q, of_k = (b, pl.ds(q0, bq), head), (b, pl.ds(k0, bk), head // spec.group)
            kept["keys"].fill(t, q=own["x"].q.at[of_q], k=own["x"].k.at[of_k], **bias)
            d_out, v = own["cotangents"].d_out.at[of_q], own["x"].v.at[of_k]
            kept["values"].fill(t, d_out=d_out, v=v)
            dots.fill(own, kept, t, kind_of(entry), b, head, start, (q0, k0))
            return carry

        over_tiles(at, own, fill, jnp.int32(0))

    each = (bq, bk) if wanted is None else (2, 2, ROWS, dots.width(wanted))
    sums = launch(
        "attention_backward_" + ("bias" if wanted is None else "vectors"),
        compute,
        copy,
        grid=grid,
        given=arrays,
        outs=spec.struct(x, (grid["part"], spec.heads, grid["o"], *each), jnp.float32),
        scratch=scratch,
        interpret=spec.interpret,
    )
    return sums.sum(0)


def sum_diagonals(tiles: jax.Array) -> jax.Array:
    """Returns sums per distance, the transpose of reading tiles from a line.

    Args:
      tiles: [N, offsets, Q, K]; the next one has distances that are K greater.

    Returns:
      [N, L], from K less than the distance of the first pair of the first tile on.
    """
    heads, offsets, q, k = tiles.shape
    rows = jnp.pad(tiles[..., ::-1], ((0, 0), (0, 0), (0, 0), (0, q)))
    # Read in rows that are one number shorter, every row moves on by one from the last.
    flat = rows.reshape(heads, offsets, q * (q + k))[..., : q * (q + k - 1)]
    per_tile = flat.reshape(heads, offsets, q, q + k - 1).sum(2)
    parts = jnp.pad(per_tile, ((0, 0), (0, 0), (1, 0))).reshape(heads, offsets, -1, k)
    count = parts.shape[2]
    moved = (jnp.pad(parts[:, :, n], ((0, 0), (n, count - 1 - n), (0, 0))) for n in range(count))
    return functools.reduce(jnp.add, moved).reshape(heads, -1)
