"""Kernels whose blocks of threads have queries, and go through tiles of keys and values."""

import dataclasses
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
from jax.experimental import pallas as pl

from posenc_jax.engine.blocks import Blocks
from posenc_jax.kernels.gpu.bands import Bands
from posenc_jax.kernels.gpu.pairs import Pairs
from posenc_jax.kernels.gpu.pipe import Warpgroup, pipe
from posenc_jax.kernels.gpu.spec import (
    ROWS,
    GPUSpec,
    Int,
    bias_line,
    column_of,
    direct_operands,
    kind_of,
)
from posenc_jax.kernels.gpu.tile import Tile
from posenc_jax.kernels.operands import Operands


@dataclasses.dataclass(frozen=True)
class ByQuery:
    """The tiles of a block of queries, for `launch`.

    Attributes:
      spec: the static part.
      x: the operands.
      blocks: queries and keys per tile.
      tiles: `spec.tiles` by queries.
    """

    spec: GPUSpec
    x: Operands
    blocks: Blocks
    tiles: tuple[jax.Array, jax.Array]

    @property
    def grid(self) -> dict[str, int]:
        """The numbers of blocks of threads."""
        spec = self.spec
        return {"b": spec.batch, "head": spec.heads, "i": spec.length // self.blocks.q}

    @property
    def inputs(self) -> dict[str, Any]:
        """The arrays that the kernel reads."""
        x = self.x
        inputs = {"x": direct_operands(x), "entries": self.tiles[0], "counts": self.tiles[1]}
        inputs["distances"] = self.bands.inputs
        if x.bias is not None:
            inputs["line"] = bias_line(self.spec, x.bias, x.first, self.blocks)
        return inputs

    @property
    def bands(self) -> Bands:
        """The products of vectors."""
        return Bands(self.spec, self.x, self.blocks, q_axis=0)

    @property
    def pairs(self) -> Pairs:
        """The array of all pairs."""
        return Pairs(self.spec, self.x, self.blocks, q_axis=0)

    def pipes(self, slots: int, band_slots: int) -> dict[str, Any]:
        """Returns scratch types for keys, for values and for rules."""
        spec, blocks, dtype = self.spec, self.blocks, self.x.q.dtype
        pipes = {
            "keys": pipe(spec, slots, dtype, k=(blocks.k, spec.dim)),
            "values": pipe(spec, slots, dtype, v=(blocks.k, spec.value_dim)),
        }
        bias = {} if self.x.bias is None else {"bias": (blocks.q + blocks.k,)}
        if bias or self.x.pairs:
            # In the forward pass, the first warpgroup waits for the next tile's bias before the
            # second one may finish this tile and release its bias: one slot is not enough.
            pipes["bias"] = pipe(spec, 2, dtype, self.pairs.type, **bias)
        return pipes | self.bands.scratch_types(band_slots)

    def _tiles(self, wg: Warpgroup) -> tuple[Int, Int, Callable[[Int], jax.Array]]:
        """Returns the first query of a block, the number of its tiles, and their entries.

        The last queries, which see most keys, come first.
        """
        i = self.grid["i"] - 1 - wg.grid["i"]
        row = wg.grid["b"] if self.tiles[0].shape[0] > 1 else 0
        entries = wg.refs["entries"]
        return i * self.blocks.q, wg.refs["counts"][row, i], lambda n: entries[row, i, n]

    def queries(self, wg: Warpgroup) -> tuple[Int, Int]:
        """Returns the first query of a warpgroup, and the number of tiles."""
        first, count, _ = self._tiles(wg)
        return first + wg.number * ROWS, count

    def tile(self, wg: Warpgroup, n: Int) -> Tile:
        """Waits for the bias of tile n, and returns a warpgroup's part of the tile."""
        first, _, entry = self._tiles(wg)
        bk, rows = self.blocks.k, pl.multiple_of(wg.number * ROWS, ROWS)
        rules = wg.scratch["bias"].wait(n) if "bias" in wg.scratch else {}
        return Tile(
            spec=self.spec,
            x=wg.refs["x"],
            shape=(ROWS, bk),
            q_axis=0,
            b=wg.grid["b"],
            head=wg.grid["head"],
            q=first + rows,
            k=column_of(entry(n)) * bk,
            kind=kind_of(entry(n)),
            bias=rules["bias"].at[pl.ds(rows, ROWS + bk)] if "bias" in rules else None,
            origin=bk,
            band_logits=self.bands.logits(wg),
            pairs=self.pairs.reader(wg, rules),
        )

    def release_bias(self, wg: Warpgroup, n: Int) -> None:
        """Releases the bias of tile n."""
        if "bias" in wg.scratch:
            wg.scratch["bias"].release(n)

    def copy(self, wg: Warpgroup) -> None:
        """Copies the keys, values and rules of all tiles."""
        first, count, entry = self._tiles(wg)
        bq, bk = self.blocks.q, self.blocks.k
        low, high = self.spec.reach(self.blocks)
        b, head = wg.grid["b"], wg.grid["head"]

        def fill(n, ruled):
            k0 = column_of(entry(n)) * bk
            of_head = b, pl.ds(k0, bk), head // self.spec.group
            wg.scratch["keys"].fill(n, k=wg.refs["x"].k.at[of_head])
            start = pl.multiple_of(jnp.clip(first - k0, low, high) - low, bk)
            rules = self.pairs.source(wg, b, head, first, k0)
            if self.x.bias is not None:
                line = self.spec.line_of(wg.refs["line"], head)
                rules["bias"] = line.at[pl.ds(start, bq + bk)]
            if rules:
                wg.scratch["bias"].fill(n, **rules)
            ruled = self.bands.fill(wg, ruled, kind_of(entry(n)), b, head, start, (first, k0))
            wg.scratch["values"].fill(n, v=wg.refs["x"].v.at[of_head])
            return ruled

        jax.lax.fori_loop(jnp.int32(0), count, fill, jnp.int32(0))
