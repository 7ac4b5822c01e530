"""What the kernels by blocks of queries share: a block goes through tiles of keys and values."""

import dataclasses
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
from jax.experimental import pallas as pl

from posenc_jax.engine.blocks import Blocks
from posenc_jax.engine.gpu.dots import Dots
from posenc_jax.engine.gpu.pipe import pipe
from posenc_jax.engine.gpu.spec import ROWS, Spec, bias_line, column_of, kind_of, read_by_kernels
from posenc_jax.engine.gpu.tile import Tile
from posenc_jax.engine.operands import Operands


@dataclasses.dataclass(frozen=True)
class ByQuery:
    """The tiles of a block of queries, for `launch`.

    Attributes:
      spec, x: the problem.
      blocks: queries and keys per tile.
      tiles: `spec.tiles` by queries.
    """

    spec: Spec
    x: Operands
    blocks: Blocks
    tiles: tuple[jax.Array, jax.Array]

    @property
    def grid(self) -> dict[str, int]:
        """The blocks of threads."""
        spec = self.spec
        return {"b": spec.batch, "head": spec.heads, "i": spec.length // self.blocks.q}

    @property
    def given(self) -> dict[str, Any]:
        """Arrays that the kernel reads."""
        x = self.x
        out = {"x": read_by_kernels(x), "entries": self.tiles[0], "counts": self.tiles[1]}
        out["dots"] = self.dots.given
        if x.bias is not None:
            out["line"] = bias_line(self.spec, x.bias, x.first, self.blocks)
        return out

    @property
    def dots(self) -> Dots:
        """The vectors per distance."""
        return Dots(self.spec, self.x, self.blocks, q_axis=0)

    def pipes(self, slots: int, of_dots: int) -> dict[str, Any]:
        """Returns what is allocated for keys, for values and for rules."""
        spec, blocks, dtype = self.spec, self.blocks, self.x.q.dtype
        pipes = {
            "keys": pipe(spec, slots, dtype, k=(blocks.k, spec.dim)),
            "values": pipe(spec, slots, dtype, v=(blocks.k, spec.value_dim)),
        }
        if self.x.bias is not None:
            # In the forward pass, the first warpgroup waits for the next tile's bias before the
            # second one may finish this tile and give its bias back: one slot is not enough.
            pipes["bias"] = pipe(spec, 2, dtype, bias=(blocks.q + blocks.k,))
        return pipes | self.dots.scratch(of_dots)

    def _tiles(self, at: Any, own: Any) -> tuple[Any, Any, Callable]:
        """Returns the first query of a block, the number of its tiles, and their entries.

        The last queries, which see most keys, come first.
        """
        i = self.grid["i"] - 1 - at["i"]
        row = at["b"] if self.tiles[0].shape[0] > 1 else 0
        return i * self.blocks.q, own["counts"][row, i], lambda n: own["entries"][row, i, n]

    def queries(self, at: Any, own: Any, warpgroup: Any) -> tuple[Any, Any]:
        """Returns the first query of a warpgroup, and the number of tiles."""
        first, count, _ = self._tiles(at, own)
        return first + warpgroup * ROWS, count

    def tile(self, at: Any, own: Any, kept: Any, warpgroup: Any, n: Any) -> Tile:
        """Returns a warpgroup's part of tile n, when its bias is there."""
        first, _, entry = self._tiles(at, own)
        bk, rows = self.blocks.k, pl.multiple_of(warpgroup * ROWS, ROWS)
        bias = kept["bias"].wait(n)["bias"].at[pl.ds(rows, ROWS + bk)] if "bias" in kept else None
        return Tile(
            spec=self.spec,
            x=own["x"],
            shape=(ROWS, bk),
            q_axis=0,
            b=at["b"],
            head=at["head"],
            q=first + rows,
            k=column_of(entry(n)) * bk,
            kind=kind_of(entry(n)),
            bias=bias,
            at=bk,
            added=self.dots.added(kept, warpgroup),
        )

    def release_bias(self, kept: Any, n: Any) -> None:
        """Gives the bias of tile n back."""
        if "bias" in kept:
            kept["bias"].release(n)

    def copy(self, at: Any, own: Any, kept: Any) -> None:
        """What the warpgroup that copies does."""
        first, count, entry = self._tiles(at, own)
        bq, bk = self.blocks.q, self.blocks.k
        low, high = self.spec.reach(self.blocks)

        def fill(n, ruled):
            k0 = column_of(entry(n)) * bk
            of_head = at["b"], pl.ds(k0, bk), at["head"] // self.spec.group
            kept["keys"].fill(n, k=own["x"].k.at[of_head])
            start = pl.multiple_of(jnp.clip(first - k0, low, high) - low, bk)
            if self.x.bias is not None:
                line = self.spec.line_of(own["line"], at["head"])
                kept["bias"].fill(n, bias=line.at[pl.ds(start, bq + bk)])
            where = at["b"], at["head"], start, (first, k0)
            ruled = self.dots.fill(own, kept, ruled, kind_of(entry(n)), *where)
            kept["values"].fill(n, v=own["x"].v.at[of_head])
            return ruled

        jax.lax.fori_loop(jnp.int32(0), count, fill, jnp.int32(0))
