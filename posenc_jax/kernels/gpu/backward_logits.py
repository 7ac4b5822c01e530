"""Kernels that sum cotangents of logits on GPUs: over heads and rows, and over tiles at a distance.

The cotangent of an array of all pairs: a block of threads has one tile of it, and sums the
cotangents of the logits over the heads and the rows of the batch that share the array, in
registers, in float32 and in one order.

The cotangents of arrays by distance, the bias and the vectors of products: a block of threads has
the tiles of a head at one offset, first query minus first key. They have the same distances at the
same places, so their cotangents are summed as they are; only the sums are added up by distance,
outside.
"""

import dataclasses
import functools
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu

from posenc_jax.engine.simplified import AllPairs
from posenc_jax.kernels.gpu.bands import Band, sum_bands
from posenc_jax.kernels.gpu.forward import TiledKernel
from posenc_jax.kernels.gpu.pipe import COMPUTE, Warpgroup, matrix, most_slots, pipe
from posenc_jax.kernels.gpu.spec import (
    ROWS,
    TILE,
    Cotangents,
    GPUSpec,
    Int,
    bias_line,
    column_of,
    kind_of,
    tiles,
)
from posenc_jax.kernels.gpu.tile import Tile, d_logits, rows_to_tile, zeros
from posenc_jax.kernels.operands import Operands, out_struct


class LogitGrads(TiledKernel):
    """A kernel that computes the cotangents of the logits of tiles."""

    keep_rows = False

    @property
    def scratch_types(self) -> dict[str, Any]:
        spec, dtype = self.spec, self.x.q.dtype
        bq, bk = self.sizes
        keys = {"q": (bq, spec.dim), "k": (bk, spec.dim), **self.bias_block}
        values = {"d_out": (bq, spec.value_dim), "v": (bk, spec.value_dim)}
        return most_slots(
            lambda slots, band_slots: (
                {
                    "keys": pipe(spec, slots, dtype, self.pairs.type, **keys),
                    "values": pipe(spec, slots, dtype, **values),
                }
                | self.bands.scratch_types(band_slots)
                | self.own_types
            )
        )

    @property
    def own_types(self) -> dict[str, Any]:
        """Further scratch types, by name."""
        return {}

    def d_logits(
        self, wg: Warpgroup, t: Int, b: Int, head: Int, q0: Int, k0: Int, kind: jax.Array
    ) -> tuple[Tile, jax.Array]:
        """Returns a warpgroup's part of a tile, and the cotangents of its logits.

        The bands of the tile are to be released.

        Args:
          wg: the warpgroup.
          t: the number of tiles before this one.
          b, head: row of the batch and query head.
          q0, k0: the first query and the first key.
          kind: of the tile.
        """
        rows = pl.multiple_of(wg.number * ROWS, ROWS)
        keys, values = wg.scratch["keys"].wait(t), wg.scratch["values"].wait(t)
        bias = pl.ds(rows, ROWS + self.blocks.k)
        tile = self.part(wg, b, head, q0 + rows, k0, kind, keys, bias)
        # All tiles of lists by distance have rules, so that t numbers the steps of bands too.
        self.bands.prepare(wg, tile, t)
        lse_and_delta = wg.refs["cotangents"].rows(b, head, q0 + rows)
        q, d_out = (y.at[pl.ds(rows, ROWS)] for y in (keys["q"], values["d_out"]))
        lse, delta = (rows_to_tile(y, tile.shape) for y in lse_and_delta)
        p, slope, (d_p,) = tile.weights(lse, (q, keys["k"]), (d_out, values["v"]))
        wg.scratch["keys"].release(t)
        wg.scratch["values"].release(t)
        return tile, d_logits(p, d_p, delta, slope)

    def fill(
        self, wg: Warpgroup, t: Int, b: Int, head: Int, q0: Int, k0: Int, kind: jax.Array
    ) -> None:
        """Copies the tokens and rules of a tile; arguments of `d_logits`."""
        (bq, bk), refs = self.sizes, wg.refs
        start = self.distance(q0, k0)
        rules = self.rules(wg, b, head, q0, k0, start)
        of_q, of_k = (b, pl.ds(q0, bq), head), (b, pl.ds(k0, bk), head // self.spec.group)
        wg.scratch["keys"].fill(t, q=refs["x"].q.at[of_q], k=refs["x"].k.at[of_k], **rules)
        d_out, v = refs["cotangents"].d_out.at[of_q], refs["x"].v.at[of_k]
        wg.scratch["values"].fill(t, d_out=d_out, v=v)
        self.bands.fill(wg, t, kind, b, head, start, (q0, k0))


def pair_grads(spec: GPUSpec, x: Operands, cotangents: Cotangents) -> tuple[AllPairs, ...]:
    """Returns the cotangents of `Operands.pairs`."""
    if not x.pairs:
        return ()
    (term,) = x.pairs
    kinds = x.schedules[4]
    kinds = jnp.broadcast_to(kinds, (spec.batch, *kinds.shape[1:]))
    # A list for each row and tile of the array, of the rows of the batch that share it.
    kinds = kinds.reshape(term.pairs.shape[0], -1, kinds[0].size)
    kernel = PairSums(spec, x, spec.backward, tiles(jnp.swapaxes(kinds, 1, 2)))
    out = out_struct(x.q, term.pairs.shape, term.pairs.dtype)
    pairs = kernel.launch("backward_pairs", out, cotangents=cotangents)
    return (dataclasses.replace(term, pairs=pairs),)


class PairSums(LogitGrads):
    """The kernel of sums over heads and rows of the batch."""

    @property
    def grid(self) -> dict[str, int]:
        spec, blocks = self.spec, self.spec.backward
        rows, heads = self.x.pairs[0].pairs.shape[:2]
        return {
            "row": rows,
            "head": heads,
            "i": spec.length // blocks.q,
            "j": spec.keys // blocks.k,
        }

    @property
    def own_types(self) -> dict[str, Any]:
        spec, dtype = self.spec, self.x.pairs[0].pairs.dtype
        return {"out": matrix(spec, COMPUTE, ROWS, spec.backward.k, dtype=dtype)}

    def _over_tiles(
        self, wg: Warpgroup, body: Callable[[Int, Int, Int, jax.Array, Any], Any], carry: Any
    ) -> Any:
        """Returns `carry = body(t, b, head, kind, carry)` of all tiles, with t their number."""
        row, head, i, j = (wg.grid[name] for name in self.grid)
        place = row, i * self.grid["j"] + j
        entries, count = wg.refs["entries"].at[place], wg.refs["counts"][place]

        def step(t, carry):
            g, n = jax.lax.div(t, count), jax.lax.rem(t, count)
            entry = entries[n]
            # One of `row` and the column is zero, and so is one of `head` and g.
            return body(t, row + column_of(entry), head + g, kind_of(entry), carry)

        # One loop: in a loop of loops, ptxas lets each product wait for the last.
        heads = self.spec.heads // self.grid["head"]
        return jax.lax.fori_loop(jnp.int32(0), heads * count, step, carry)

    def _first(self, wg: Warpgroup) -> tuple[Int, Int]:
        """Returns the first query and the first key of the tile."""
        return wg.grid["i"] * self.spec.backward.q, wg.grid["j"] * self.spec.backward.k

    def compute(self, wg: Warpgroup) -> None:
        q0, k0 = self._first(wg)

        def add(t, b, head, kind, total):
            _, ds = self.d_logits(wg, t, b, head, q0, k0, kind)
            return total + ds

        total = self._over_tiles(wg, add, zeros((ROWS, self.spec.backward.k), TILE))
        total = total * self.x.pairs[0].factor
        rows = pl.ds(q0 + pl.multiple_of(wg.number * ROWS, ROWS), ROWS)
        index = wg.grid["row"], wg.grid["head"], rows, pl.ds(k0, self.spec.backward.k)
        staged = wg.part("out")
        staged[...] = total.astype(staged.dtype)
        plgpu.commit_smem()
        plgpu.copy_smem_to_gmem(staged, wg.out_refs.at[index])
        plgpu.wait_smem_to_gmem(0)

    def copy(self, wg: Warpgroup) -> None:
        q0, k0 = self._first(wg)

        def fill(t, b, head, kind, carry):
            self.fill(wg, t, b, head, q0, k0, kind)
            return carry

        self._over_tiles(wg, fill, jnp.int32(0))


_MIN_BLOCKS = 256  # Of threads: fewer do not fill a GPU.


def bias_grads(spec: GPUSpec, x: Operands, bias: jax.Array, cotangents: Cotangents) -> jax.Array:
    """Returns the cotangent of `Operands.bias`."""
    d_line = (
        sum_diagonals(DistanceSums(spec, x, spec.backward, x.schedules[3]).run(cotangents))
        / spec.unit
    )
    d_line = d_line.sum(0, keepdims=True) if bias.shape[0] == 1 else d_line
    make_line = functools.partial(bias_line, spec, first=x.first, blocks=spec.backward)
    (d_bias,) = jax.linear_transpose(make_line, bias)(d_line)
    return d_bias


def vector_grads(spec: GPUSpec, x: Operands, number: int, cotangents: Cotangents) -> jax.Array:
    """Returns the cotangent of the vectors of a product, [N or 1, F, R]."""
    kernel = DistanceSums(spec, x, spec.backward, x.schedules[3], number)
    d_bands = kernel.run(cotangents)
    return sum_bands(spec, x, x.products[number], d_bands, cotangents.scale)


@dataclasses.dataclass(frozen=True)
class DistanceSums(LogitGrads):
    """The kernel of sums over the tiles at each of `spec.offsets`.

    Attributes:
      number: the index of the product whose band cotangents are summed, times features. None: the
        cotangents of logits are summed.
    """

    number: int | None = None

    def run(self, cotangents: Cotangents) -> jax.Array:
        """Returns float32 [N, offsets, Q, K], or [N, offsets, 2, 2, 64, F] with a product.

        The axes of two are warpgroups and halves of bands.
        """
        spec, grid = self.spec, self.grid
        shape = spec.backward.q, spec.backward.k
        if self.band is not None:
            shape = 2, 2, ROWS, self.bands.width(self.band)
        name = "backward_" + ("bias" if self.band is None else "vectors")
        out = out_struct(self.x.q, (grid["part"], spec.heads, grid["o"], *shape))
        sums = self.launch(name, out, cotangents=cotangents)
        return sums.sum(0)

    @property
    def grid(self) -> dict[str, int]:
        """The numbers of blocks of threads: a part has some rows of the batch."""
        spec, offsets = self.spec, len(self.spec.offsets)
        parts = spec.batch if spec.heads * offsets < _MIN_BLOCKS else 1
        return {"head": spec.heads, "part": parts, "o": offsets}

    @property
    def band(self) -> Band | None:
        """The band whose cotangents are summed."""
        return None if self.number is None else list(self.bands)[self.number]

    def _over_tiles(
        self, wg: Warpgroup, body: Callable[[Int, Int, jax.Array, Any], Any], carry: Any
    ) -> Any:
        """Returns `carry = body(t, b, entry, carry)` of all tiles, with t their number."""
        entries, counts = wg.refs["entries"], wg.refs["counts"]
        offset, rows = wg.grid["o"], self.spec.batch // self.grid["part"]

        def of_row(b, carry):
            row = b if entries.shape[0] > 1 else 0

            def step(n, carry):
                t, carry = carry
                return t + 1, body(t, b, entries[row, offset, n], carry)

            return jax.lax.fori_loop(jnp.int32(0), counts[row, offset], step, carry)

        first = wg.grid["part"] * rows
        start = jnp.int32(0), carry
        return jax.lax.fori_loop(first, first + rows, of_row, start)[1]

    def _place(self, wg: Warpgroup, entry: jax.Array) -> tuple[Int, Int, Int, jax.Array]:
        """Returns the head, the first query, the first key and the kind of a tile."""
        # The first key follows from the block of queries and the offset.
        q0 = column_of(entry) * self.spec.backward.q
        k0 = q0 - (self.spec.offsets[0] + wg.grid["o"] * self.spec.backward.k)
        return wg.grid["head"], q0, k0, kind_of(entry)

    def compute(self, wg: Warpgroup) -> None:
        rows, bk = pl.multiple_of(wg.number * ROWS, ROWS), self.spec.backward.k
        out_ref = wg.out_refs.at[wg.grid["part"], wg.grid["head"], wg.grid["o"]]
        band = self.band
        if band is None:

            def add(t, b, entry, total):
                tile, ds = self.d_logits(wg, t, b, *self._place(wg, entry))
                self.bands.release(wg, tile, t)
                return total + ds

            total = self._over_tiles(wg, add, zeros((ROWS, bk), TILE))
            out_ref.at[pl.ds(rows, ROWS)][...] = total
            return

        def over_tiles(*accs):
            def add(t, b, entry, carry):
                tile, ds = self.d_logits(wg, t, b, *self._place(wg, entry))
                scaled = ds * wg.refs["cotangents"].scale[0]
                self.bands.add_vector_grads(wg, band, accs, scaled, t)
                self.bands.release(wg, tile, t)
                return carry

            self._over_tiles(wg, add, 0)
            return [acc[...] for acc in accs]

        half = plgpu.ACC((ROWS, self.bands.width(band)), jnp.float32)
        for n, sums in enumerate(pl.run_scoped(over_tiles, half, half)):
            out_ref.at[wg.number, n][...] = sums

    def copy(self, wg: Warpgroup) -> None:

        def fill(t, b, entry, carry):
            self.fill(wg, t, b, *self._place(wg, entry))
            return carry

        self._over_tiles(wg, fill, jnp.int32(0))


def sum_diagonals(tiles: jax.Array) -> jax.Array:
    """Returns sums per distance, the transpose of reading tiles from a line.

    Args:
      tiles: [N, offsets, Q, K]; distances grow by K from one to the next.

    Returns:
      [N, L]; the first is of K below the distance of the first pair of the first tile.
    """
    heads, offsets, q, k = tiles.shape
    # Reversed, the distances of a row ascend; each row starts one further than the row above.
    rows = jnp.pad(tiles[..., ::-1], ((0, 0), (0, 0), (0, 0), (0, q)))
    # Rows that are read one element shorter start one element later each.
    flat = rows.reshape(heads, offsets, q * (q + k))[..., : q * (q + k - 1)]
    per_tile = flat.reshape(heads, offsets, q, q + k - 1).sum(2)
    parts = jnp.pad(per_tile, ((0, 0), (0, 0), (1, 0))).reshape(heads, offsets, -1, k)
    count = parts.shape[2]
    shifted = (jnp.pad(parts[:, :, n], ((0, 0), (n, count - 1 - n), (0, 0))) for n in range(count))
    return functools.reduce(jnp.add, shifted).reshape(heads, -1)
