"""Kernels that sum cotangents of logits as they are, or times features."""

import dataclasses
from typing import Any

import jax
import jax.numpy as jnp
from jax.experimental import pallas as pl

from posenc_jax.kernels.gpu.bands import Bands
from posenc_jax.kernels.gpu.pairs import Pairs
from posenc_jax.kernels.gpu.pipe import Warpgroup, most_slots, pipe
from posenc_jax.kernels.gpu.spec import (
    ROWS,
    Cotangents,
    GPUSpec,
    Int,
    bias_line,
    direct_operands,
)
from posenc_jax.kernels.gpu.tile import Tile, d_logits, rows_to_tile
from posenc_jax.kernels.operands import Operands


@dataclasses.dataclass(frozen=True)
class LogitGrads:
    """A kernel that computes the cotangents of the logits of tiles of `spec.backward`.

    Attributes:
      spec: the static part.
      x: the operands.
    """

    spec: GPUSpec
    x: Operands

    def inputs(self, cotangents: Cotangents, tiles: tuple[jax.Array, jax.Array]) -> dict[str, Any]:
        """Returns the arrays that the kernel reads; `tiles` are of `spec.tiles`."""
        x = self.x
        inputs: dict[str, Any] = {
            "x": direct_operands(x),
            "cotangents": cotangents,
            "distances": self.bands.inputs,
        }
        inputs |= {"entries": tiles[0], "counts": tiles[1]}
        if x.bias is not None:
            inputs["line"] = bias_line(self.spec, x.bias, x.first, self.spec.backward)
        return inputs

    @property
    def bands(self) -> Bands:
        """The products of vectors."""
        return Bands(self.spec, self.x, self.spec.backward, q_axis=0, keep_rows=False)

    @property
    def pairs(self) -> Pairs:
        """The array of all pairs."""
        return Pairs(self.spec, self.x, self.spec.backward, q_axis=0)

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
        bk, rows = self.spec.backward.k, pl.multiple_of(wg.number * ROWS, ROWS)
        keys, values = wg.scratch["keys"].wait(t), wg.scratch["values"].wait(t)
        tile = Tile(
            spec=self.spec,
            x=wg.refs["x"],
            shape=(ROWS, bk),
            q_axis=0,
            b=b,
            head=head,
            q=q0 + rows,
            k=k0,
            kind=kind,
            bias=keys["bias"].at[pl.ds(rows, ROWS + bk)] if self.x.bias is not None else None,
            origin=bk,
            band_logits=self.bands.logits(wg),
            pairs=self.pairs.reader(wg, keys),
        )
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
        spec, refs = self.spec, wg.refs
        bq, bk = spec.backward.q, spec.backward.k
        low, high = spec.reach(spec.backward)
        start = pl.multiple_of(jnp.clip(q0 - k0, low, high) - low, bk)
        rules = self.pairs.source(wg, b, head, q0, k0)
        if self.x.bias is not None:
            rules["bias"] = spec.line_of(refs["line"], head).at[pl.ds(start, bq + bk)]
        of_q, of_k = (b, pl.ds(q0, bq), head), (b, pl.ds(k0, bk), head // spec.group)
        wg.scratch["keys"].fill(t, q=refs["x"].q.at[of_q], k=refs["x"].k.at[of_k], **rules)
        d_out, v = refs["cotangents"].d_out.at[of_q], refs["x"].v.at[of_k]
        wg.scratch["values"].fill(t, d_out=d_out, v=v)
        self.bands.fill(wg, t, kind, b, head, start, (q0, k0))
