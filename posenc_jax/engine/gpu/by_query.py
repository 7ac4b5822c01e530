"""What the kernels by blocks of queries share: a block goes through tiles of keys and values."""

import dataclasses
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
from jax.experimental import pallas as pl

from posenc_jax.engine.blocks import Blocks
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
        if x.bias is not None:
            out["line"] = bias_line(self.spec, x.bias, x.first, self.blocks)
        return out

    @property
    def pipes(self) -> dict[str, Any]:
        """What is allocated for keys, for values and for the bias."""
        spec, blocks, dtype = self.spec, self.blocks, self.x.q.dtype
        pipes = {
            "keys": pipe(spec, 2, dtype, k=(blocks.k, spec.dim)),
            "values": pipe(spec, 2, dtype, v=(blocks.k, spec.value_dim)),
        }
        if self.x.bias is not None:
            pipes["bias"] = pipe(spec, 2, dtype, bias=(blocks.q + blocks.k,))
        return pipes

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

        @pl.loop(jnp.int32(0), count)
        def _(n):
            k0 = column_of(entry(n)) * bk
            of_head = at["b"], pl.ds(k0, bk), at["head"] // self.spec.group
            kept["keys"].fill(n, k=own["x"].k.at[of_head])
            if self.x.bias is not None:
                start = pl.multiple_of(jnp.clip(first - k0, low, high) - low, bk)
                line = self.spec.line_of(own["line"], at["head"])
                kept["bias"].fill(n, bias=line.at[pl.ds(start, bq + bk)])
            kept["values"].fill(n, v=own["x"].v.at[of_head])
