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

from posenc_jax.kernels.gpu.band_arrays import sum_bands
from posenc_jax.kernels.gpu.bands import Band
from posenc_jax.kernels.gpu.logit_grads import LogitGrads
from posenc_jax.kernels.gpu.pipe import Warpgroup, launch
from posenc_jax.kernels.gpu.spec import (
    ROWS,
    TILE,
    Cotangents,
    GPUSpec,
    Int,
    bias_line,
    column_of,
    kind_of,
)
from posenc_jax.kernels.gpu.tile import zeros
from posenc_jax.kernels.operands import Operands, out_struct

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
        sums = launch(
            "attention_backward_" + ("bias" if self.band is None else "vectors"),
            self.compute,
            self.copy,
            grid=grid,
            inputs=self.inputs(cotangents, self.x.schedules[3]),
            out_types=out_struct(self.x.q, (grid["part"], spec.heads, grid["o"], *shape)),
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
        q0 = column_of(entry) * self.spec.backward.q
        k0 = q0 - (self.spec.offsets[0] + wg.grid["o"] * self.spec.backward.k)
        return wg.grid["head"], q0, k0, kind_of(entry)

    def compute(self, wg: Warpgroup) -> None:
        """Computes 64 rows of the tiles at an offset."""
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
        """Copies the tokens and rules of all tiles."""

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
    rows = jnp.pad(tiles[..., ::-1], ((0, 0), (0, 0), (0, 0), (0, q)))
    # Rows that are read one element shorter start one element later each.
    flat = rows.reshape(heads, offsets, q * (q + k))[..., : q * (q + k - 1)]
    per_tile = flat.reshape(heads, offsets, q, q + k - 1).sum(2)
    parts = jnp.pad(per_tile, ((0, 0), (0, 0), (1, 0))).reshape(heads, offsets, -1, k)
    count = parts.shape[2]
    shifted = (jnp.pad(parts[:, :, n], ((0, 0), (n, count - 1 - n), (0, 0))) for n in range(count))
    return functools.reduce(jnp.add, shifted).reshape(heads, -1)
