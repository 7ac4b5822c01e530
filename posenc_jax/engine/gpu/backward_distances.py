"""The cotangents of arrays by distance on GPUs: the bias, and the vectors of products.

A block of threads has the tiles of a head at one offset, first query minus first key. They have
the same distances at the same places, so their cotangents are summed as they are; only the sums
are added up by distance, outside.
"""

import dataclasses
import functools
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu

from posenc_jax.engine.gpu.band_arrays import sum_bands
from posenc_jax.engine.gpu.bands import Band, Bands
from posenc_jax.engine.gpu.pipe import Warpgroup, launch, most_slots, pipe
from posenc_jax.engine.gpu.spec import (
    ROWS,
    TILE,
    Cotangents,
    GPUSpec,
    Int,
    Ref,
    bias_line,
    column_of,
    direct_operands,
    kind_of,
)
from posenc_jax.engine.gpu.tile import Tile, d_logits, rows_to_tile, zeros
from posenc_jax.engine.operands import Operands, out_struct

_MIN_BLOCKS = 256  # Of threads: fewer do not fill a GPU.


def bias_grads(spec: GPUSpec, x: Operands, bias: jax.Array, cotangents: Cotangents) -> jax.Array:
    """Returns the cotangent of `Operands.bias`."""
    d_line = sum_diagonals(DistanceSums(spec, x).run(cotangents)) / spec.unit
    d_line = d_line.sum(0, keepdims=True) if bias.shape[0] == 1 else d_line
    make_line = functools.partial(bias_line, spec, first=x.first, blocks=spec.backward)
    (d_bias,) = jax.linear_transpose(make_line, bias)(d_line)
    return d_bias


def vector_grads(spec: GPUSpec, x: Operands, number: int, cotangents: Cotangents) -> jax.Array:
    """Returns the cotangent of the vectors of a product, [N or 1, F, R]."""
    d_bands = DistanceSums(spec, x, number).run(cotangents)
    return sum_bands(spec, x, x.products[number], d_bands, cotangents.scale)


@dataclasses.dataclass(frozen=True)
class DistanceSums:
    """The kernel of sums over the tiles at each of `spec.offsets`.

    Attributes:
      spec: the static part.
      x: the operands.
      number: the index of the product whose band cotangents are summed, times features. None: the
        cotangents of logits are summed.
    """

    spec: GPUSpec
    x: Operands
    number: int | None = None

    def run(self, cotangents: Cotangents) -> jax.Array:
        """Returns float32 [N, offsets, Q, K], or [N, offsets, 2, 2, 64, F] with a product.

        The axes of two are warpgroups and halves of bands.
        """
        spec, x, bands = self.spec, self.x, self.bands
        entries, counts = x.schedules[3]
        inputs: dict[str, Any] = {
            "x": direct_operands(x),
            "cotangents": cotangents,
            "distances": bands.inputs,
        }
        inputs |= {"entries": entries, "counts": counts}
        if x.bias is not None:
            inputs["line"] = bias_line(spec, x.bias, x.first, spec.backward)
        shape = spec.backward.q, spec.backward.k
        if self.band is not None:
            shape = 2, 2, ROWS, bands.width(self.band)
        grid = self.grid
        sums = launch(
            "attention_backward_" + ("bias" if self.band is None else "vectors"),
            self.compute,
            self.copy,
            grid=grid,
            inputs=inputs,
            out_types=out_struct(x.q, (grid["part"], spec.heads, grid["o"], *shape)),
            scratch_types=self.scratch_types,
            interpret=spec.interpret,
        )
        return sums.sum(0)

    @property
    def grid(self) -> dict[str, int]:
        """The numbers of blocks of threads: a part has some rows of the batch."""
        spec, offsets = self.spec, len(self.spec.offsets)
        parts = spec.batch if spec.heads * offsets < _MIN_BLOCKS else 1
        return {"head": spec.heads, "part": parts, "o": offsets}

    @property
    def bands(self) -> Bands:
        """The products of vectors."""
        return Bands(self.spec, self.x, self.spec.backward, q_axis=0, keep_rows=False)

    @property
    def band(self) -> Band | None:
        """The band whose cotangents are summed."""
        return None if self.number is None else list(self.bands)[self.number]

    @property
    def scratch_types(self) -> dict[str, Any]:
        """The scratch types of the kernel, by name."""
        spec, dtype = self.spec, self.x.q.dtype
        bq, bk = spec.backward.q, spec.backward.k
        keys = {"q": (bq, spec.dim), "k": (bk, spec.dim)}
        if self.x.bias is not None:
            keys["bias"] = (bq + bk,)
        values = {"d_out": (bq, spec.value_dim), "v": (bk, spec.value_dim)}
        return most_slots(
            lambda slots, band_slots: (
                {
                    "keys": pipe(spec, slots, dtype, **keys),
                    "values": pipe(spec, slots, dtype, **values),
                }
                | self.bands.scratch_types(band_slots)
            )
        )

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

    def _first_key(self, wg: Warpgroup, q0: Int) -> Int:
        """Returns the first key of the tile whose first query is q0."""
        return q0 - (self.spec.offsets[0] + wg.grid["o"] * self.spec.backward.k)

    def compute(self, wg: Warpgroup) -> None:
        """Computes 64 rows of the tiles at an offset."""
        rows, bk = pl.multiple_of(wg.number * ROWS, ROWS), self.spec.backward.k
        out_ref = wg.out_refs.at[wg.grid["part"], wg.grid["head"], wg.grid["o"]]
        if self.band is None:

            def add(t, b, entry, total):
                return total + self._d_logits(wg, rows, (), t, b, entry)

            total = self._over_tiles(wg, add, zeros((ROWS, bk), TILE))
            out_ref.at[pl.ds(rows, ROWS)][...] = total
            return

        def over_tiles(*accs):
            def add(t, b, entry, carry):
                self._d_logits(wg, rows, accs, t, b, entry)
                return carry

            self._over_tiles(wg, add, 0)
            return [acc[...] for acc in accs]

        half = plgpu.ACC((ROWS, self.bands.width(self.band)), jnp.float32)
        for n, sums in enumerate(pl.run_scoped(over_tiles, half, half)):
            out_ref.at[wg.number, n][...] = sums

    def _d_logits(
        self, wg: Warpgroup, rows: Int, accs: tuple[Ref, ...], t: Int, b: Int, entry: jax.Array
    ) -> jax.Array:
        """Returns the cotangents of the logits of a tile, and adds band cotangents to accumulators.

        Args:
          wg: the warpgroup.
          rows: its first row in the tile.
          accs: accumulators of the halves of the band, if there is one.
          t: the number of tiles before this one.
          b: the row of the batch.
          entry: of the tile.
        """
        bk, head = self.spec.backward.k, wg.grid["head"]
        q0 = column_of(entry) * self.spec.backward.q
        keys, values = wg.scratch["keys"].wait(t), wg.scratch["values"].wait(t)
        tile = Tile(
            spec=self.spec,
            x=wg.refs["x"],
            shape=(ROWS, bk),
            q_axis=0,
            b=b,
            head=head,
            q=q0 + rows,
            k=self._first_key(wg, q0),
            kind=kind_of(entry),
            bias=keys["bias"].at[pl.ds(rows, ROWS + bk)] if self.x.bias is not None else None,
            origin=bk,
            band_logits=self.bands.logits(wg),
        )
        self.bands.prepare(wg, tile, t)
        lse_and_delta = wg.refs["cotangents"].rows(b, head, q0 + rows)
        q, d_out = (y.at[pl.ds(rows, ROWS)] for y in (keys["q"], values["d_out"]))
        lse, delta = (rows_to_tile(y, tile.shape) for y in lse_and_delta)
        p, slope, (d_p,) = tile.weights(lse, (q, keys["k"]), (d_out, values["v"]))
        wg.scratch["keys"].release(t)
        wg.scratch["values"].release(t)
        ds = d_logits(p, d_p, delta, slope)
        if self.band is not None:
            scaled = ds * wg.refs["cotangents"].scale[0]
            self.bands.add_vector_grads(wg, self.band, accs, scaled, t)
        self.bands.release(wg, tile, t)
        return ds

    def copy(self, wg: Warpgroup) -> None:
        """Copies the tokens and rules of all tiles."""
        spec, refs, head = self.spec, wg.refs, wg.grid["head"]
        bq, bk = spec.backward.q, spec.backward.k
        start, bias = pl.multiple_of(wg.grid["o"] * bk, bk), {}
        if self.x.bias is not None:
            bias["bias"] = spec.line_of(refs["line"], head).at[pl.ds(start, bq + bk)]

        def fill(t, b, entry, carry):
            q0 = column_of(entry) * bq
            k0 = self._first_key(wg, q0)
            of_q, of_k = (b, pl.ds(q0, bq), head), (b, pl.ds(k0, bk), head // spec.group)
            wg.scratch["keys"].fill(t, q=refs["x"].q.at[of_q], k=refs["x"].k.at[of_k], **bias)
            d_out, v = refs["cotangents"].d_out.at[of_q], refs["x"].v.at[of_k]
            wg.scratch["values"].fill(t, d_out=d_out, v=v)
            self.bands.fill(wg, t, kind_of(entry), b, head, start, (q0, k0))
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
    rows = jnp.pad(tiles[..., ::-1], ((0, 0), (0, 0), (0, 0), (0, q)))
    # Rows that are read one element shorter start one element later each.
    flat = rows.reshape(heads, offsets, q * (q + k))[..., : q * (q + k - 1)]
    per_tile = flat.reshape(heads, offsets, q, q + k - 1).sum(2)
    parts = jnp.pad(per_tile, ((0, 0), (0, 0), (1, 0))).reshape(heads, offsets, -1, k)
    count = parts.shape[2]
    shifted = (jnp.pad(parts[:, :, n], ((0, 0), (n, count - 1 - n), (0, 0))) for n in range(count))
    return functools.reduce(jnp.add, shifted).reshape(heads, -1)
