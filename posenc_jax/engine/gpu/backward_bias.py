"""The cotangent of the bias by distance on GPUs.

A block of threads has the tiles of a head at one offset, first query less first key. They have
the same distances at the same places, so their cotangents are summed as they are; only the sum
is summed over its diagonals, outside.
"""

import functools

import jax
import jax.numpy as jnp
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu

from posenc_jax.engine.gpu.pipe import launch, pipe
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
from posenc_jax.engine.gpu.tile import Tile, d_logits, products, rows_to_tile, zeros
from posenc_jax.engine.operands import Operands

_BLOCKS = 256  # Of threads: fewer do not fill a GPU.


def bias_grads(spec: Spec, x: Operands, bias: jax.Array, given: Cotangents) -> jax.Array:
    """Returns the cotangent of the bias, that of the operands."""
    blocks, dtype = spec.backward, x.q.dtype
    bq, bk = blocks.q, blocks.k
    low = spec.offsets[0]
    entries, counts = x.schedules[3]
    grid = {"head": spec.heads, "part": 1, "o": len(spec.offsets)}
    if spec.heads * len(spec.offsets) < _BLOCKS:
        grid["part"] = spec.batch
    rows_per_part = spec.batch // grid["part"]

    def make_line(bias):
        return bias_line(spec, bias, x.first, blocks)

    arrays = {"x": read_by_kernels(x), "cotangents": given, "line": make_line(bias)}
    arrays |= {"entries": entries, "counts": counts}
    slots = 1 if spec.wide else 2
    scratch = {
        "keys": pipe(spec, slots, dtype, q=(bq, spec.dim), k=(bk, spec.dim), bias=(bq + bk,)),
        "values": pipe(spec, slots, dtype, d_out=(bq, spec.value_dim), v=(bk, spec.value_dim)),
        "sums": plgpu.SMEM((2, ROWS, bk), jnp.float32),
    }

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
                bias=keys["bias"].at[pl.ds(rows, ROWS + bk)],
                at=bk,
            )
            numbers = own["cotangents"].of_rows(b, head, q0 + rows)
            q, d_out = (y.at[pl.ds(rows, ROWS)] for y in (keys["q"], values["d_out"]))
            s, d_p = products(tile.shape, (q, keys["k"]), (d_out, values["v"]))
            lse, delta = (rows_to_tile(y, s.shape) for y in numbers)
            p, slope = tile.weights(s, lse)
            kept["keys"].release(t)
            kept["values"].release(t)
            return total + d_logits(p, d_p, delta, slope)

        sums = kept["sums"].at[warpgroup]
        sums[...] = over_tiles(at, own, add, zeros((ROWS, bk), TILE))
        plgpu.commit_smem()
        to = out.at[at["part"], head, at["o"], pl.ds(rows, ROWS)]
        plgpu.copy_smem_to_gmem(sums, to)
        plgpu.wait_smem_to_gmem(0)

    def copy(at, own, kept):
        head = at["head"]
        start = pl.multiple_of(at["o"] * bk, bk)
        line = spec.line_of(own["line"], head).at[pl.ds(start, bq + bk)]

        def fill(t, b, entry, carry):
            q0 = column_of(entry) * bq
            of_q = b, pl.ds(q0, bq), head
            of_k = b, pl.ds(q0 - (low + at["o"] * bk), bk), head // spec.group
            kept["keys"].fill(t, q=own["x"].q.at[of_q], k=own["x"].k.at[of_k], bias=line)
            d_out, v = own["cotangents"].d_out.at[of_q], own["x"].v.at[of_k]
            kept["values"].fill(t, d_out=d_out, v=v)
            return carry

        over_tiles(at, own, fill, jnp.int32(0))

    sums = launch(
        "attention_backward_bias",
        compute,
        copy,
        grid=grid,
        given=arrays,
        outs=spec.struct(x, (grid["part"], spec.heads, grid["o"], bq, bk), jnp.float32),
        scratch=scratch,
        interpret=spec.interpret,
    )
    d_line = sum_diagonals(sums.sum(0)) / spec.unit
    d_line = d_line.sum(0, keepdims=True) if bias.shape[0] == 1 else d_line
    (d_bias,) = jax.linear_transpose(make_line, bias)(d_line)
    return d_bias


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
