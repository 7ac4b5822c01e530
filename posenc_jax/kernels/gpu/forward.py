"""The forward kernel: flash attention with position rules, for GPUs.

A block of threads has 128 queries of a head, and goes through their tiles. Its two warpgroups
take turns: while one has the tensor cores, the other computes its softmax. A turn has no wait for
keys and values: values are waited for before it, and the next keys while it multiplies.
"""

import abc
import dataclasses
from collections.abc import Callable
from typing import Any, ClassVar, NamedTuple

import jax
import jax.numpy as jnp
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu

from posenc_jax.engine.blocks import Blocks
from posenc_jax.engine.mask import LEAST_LOGIT
from posenc_jax.engine.problem import LogSumExp
from posenc_jax.kernels.gpu.bands import Bands
from posenc_jax.kernels.gpu.pipe import (
    COMPUTE,
    Warpgroup,
    launch,
    matrix,
    most_slots,
    operand,
    pipe,
    vector,
)
from posenc_jax.kernels.gpu.spec import (
    ROW,
    ROWS,
    TILE,
    GPUSpec,
    Int,
    Ref,
    bias_line,
    column_of,
    direct_operands,
    has_rules,
    kind_of,
    next_step,
)
from posenc_jax.kernels.gpu.tile import Pairs, Tile, rows_to_tile, zeros
from posenc_jax.kernels.operands import Operands, out_struct


@dataclasses.dataclass(frozen=True)
class TiledKernel(abc.ABC):
    """A kernel whose blocks of threads go through tiles.

    Attributes:
      spec: the static part.
      x: the operands.
      blocks: queries and keys per tile.
      tiles: entries and counts, of `spec.tiles`.
    """

    spec: GPUSpec
    x: Operands
    blocks: Blocks
    tiles: tuple[jax.Array, jax.Array]
    q_axis: ClassVar[int] = 0
    """The axis of the queries in tiles."""
    keep_rows: ClassVar[bool] = True
    """Whether a block of threads keeps its rows, so that their features are read once."""

    @property
    @abc.abstractmethod
    def grid(self) -> dict[str, int]:
        """The numbers of blocks of threads, by the names of indices."""

    @property
    @abc.abstractmethod
    def scratch_types(self) -> dict[str, Any]:
        """The scratch types of the kernel, by name."""

    @abc.abstractmethod
    def compute(self, wg: Warpgroup) -> None:
        """Computes 64 rows."""

    @abc.abstractmethod
    def copy(self, wg: Warpgroup) -> None:
        """Copies the tokens and rules of all tiles."""

    @property
    def copier(self) -> bool:
        """Whether a third warpgroup copies; it may take registers from the two that compute."""
        return True

    def launch(self, name: str, out_types: Any, **inputs: Any) -> Any:
        """Runs the kernel with its operands and further inputs, and returns its results."""
        x = self.x
        inputs |= {"x": direct_operands(x), "entries": self.tiles[0], "counts": self.tiles[1]}
        inputs["distances"] = self.bands.inputs
        if x.bias is not None:
            inputs["line"] = bias_line(self.spec, x.bias, x.first, self.blocks)
        return launch(
            f"attention_{name}",
            self.compute,
            self.copy if self.copier else None,
            grid=self.grid,
            inputs=inputs,
            out_types=out_types,
            scratch_types=self.scratch_types,
            moves_registers=self.spec.moves_registers,
            interpret=self.spec.interpret,
        )

    @property
    def sizes(self) -> tuple[int, int]:
        """Queries and keys per tile."""
        return self.blocks.q, self.blocks.k

    @property
    def bands(self) -> Bands:
        """The products of vectors."""
        return Bands(self.spec, self.x, self.blocks, self.q_axis, self.keep_rows)

    @property
    def pairs(self) -> Pairs:
        """The array of all pairs."""
        return Pairs(self.spec, self.x, self.blocks, self.q_axis)

    @property
    def bias_block(self) -> dict[str, tuple[int]]:
        """The shape of the bias of a tile, for `pipe`."""
        return {} if self.x.bias is None else {"bias": (sum(self.sizes),)}

    def distance(self, q: Int, k: Int) -> Int:
        """Returns where the vectors and the bias of a tile start, of its first query and key."""
        low, high = self.spec.reach(self.blocks)
        return pl.multiple_of(jnp.clip(q - k, low, high) - low, min(self.sizes))

    def rules(
        self, wg: Warpgroup, b: Int, head: Int, q: Int, k: Int, distance: Int
    ) -> dict[str, Ref]:
        """Returns the rules of a tile in global memory, for `Pipe.fill`."""
        rules = self.pairs.source(wg, b, head, q, k)
        if self.x.bias is not None:
            line = self.spec.line_of(wg.refs["line"], head)
            rules["bias"] = line.at[pl.ds(distance, sum(self.sizes))]
        return rules

    def part(
        self,
        wg: Warpgroup,
        b: Int,
        head: Int,
        q: Int,
        k: Int,
        kind: jax.Array,
        rules: dict[str, Ref],
        bias: Any,
    ) -> Tile:
        """Returns a warpgroup's part of a tile.

        Args:
          wg: the warpgroup.
          b, head: row of the batch and query head.
          q, k: the first query and the first key of the part.
          kind: of the tile.
          rules: the blocks of a pipe.
          bias: the slice of the warpgroup's part of the bias.
        """
        columns = self.sizes[1 - self.q_axis]
        return Tile(
            spec=self.spec,
            x=wg.refs["x"],
            shape=(ROWS, columns),
            q_axis=self.q_axis,
            b=b,
            head=head,
            q=q,
            k=k,
            kind=kind,
            bias=rules["bias"].at[bias] if self.x.bias is not None else None,
            origin=columns if self.q_axis == 0 else ROWS,
            band_logits=self.bands.logits(wg),
            pairs=self.pairs.reader(wg, rules),
        )


class Refilled(TiledKernel):
    """A kernel in which the second warpgroup that computes may copy, as far ahead as pipes go."""

    @property
    def copier(self) -> bool:
        return self.spec.moves_registers

    @abc.abstractmethod
    def count(self, wg: Warpgroup) -> Int:
        """Returns the number of tiles."""

    @abc.abstractmethod
    def entry(self, wg: Warpgroup, t: Int) -> jax.Array:
        """Returns the entry of tile t."""

    @abc.abstractmethod
    def fill(self, wg: Warpgroup, t: Int, ruled: Int | None) -> None:
        """Copies tile t; `ruled` is the number of tiles with rules before it, if bands need it."""

    def start(self, wg: Warpgroup) -> Int | None:
        """Copies the first tiles, unless a third warpgroup does, and returns the next `ruled`."""
        ruled = jnp.int32(0) if self.x.products and not self.copier else None
        for t in range(0 if self.copier else self.ahead):
            ruled = self._fill_if(wg, jnp.int32(t), ruled)
        return ruled

    def refill(self, wg: Warpgroup, t: Int, ruled: Int | None) -> Int | None:
        """Copies over tile t, which this warpgroup released, and returns the next `ruled`."""
        return ruled if self.copier else self._fill_if(wg, t + self.ahead, ruled)

    @property
    def ahead(self) -> int:
        """The least number of slots of pipes."""
        pipes = (x["slots"] for x in self.scratch_types.values() if isinstance(x, dict))
        return min(next(iter(slots.values())).shape[0] for slots in pipes)

    def _fill_if(self, wg: Warpgroup, t: Int, ruled: Int | None) -> Int | None:
        count = self.count(wg)
        pl.when((wg.number == COMPUTE - 1) & (t < count))(lambda: self.fill(wg, t, ruled))
        if ruled is None:
            return None
        # Beyond the last tile the number is not used, but the entry is read and must exist.
        kind = kind_of(self.entry(wg, jnp.maximum(jnp.minimum(t, count - 1), 0)))
        return next_step(ruled, has_rules(self.spec, kind))


class ByQuery(Refilled):
    """A kernel whose blocks of threads have queries, and go through tiles of keys and values."""

    @property
    def grid(self) -> dict[str, int]:
        spec = self.spec
        return {"b": spec.batch, "head": spec.heads, "i": spec.length // self.blocks.q}

    def pipes(self, slots: int, band_slots: int) -> dict[str, Any]:
        """Returns scratch types for keys, for values and for rules."""
        spec, blocks, dtype = self.spec, self.blocks, self.x.q.dtype
        pipes = {
            "keys": pipe(spec, slots, dtype, k=(blocks.k, spec.dim)),
            "values": pipe(spec, slots, dtype, v=(blocks.k, spec.value_dim)),
        }
        if self.bias_block or self.x.pairs:
            # In the forward pass, the first warpgroup waits for the next tile's bias before the
            # second one may finish this tile and release its bias: one slot is not enough.
            pipes["bias"] = pipe(spec, 2, dtype, self.pairs.type, **self.bias_block)
        return pipes | self.bands.scratch_types(band_slots)

    def _tiles(self, wg: Warpgroup) -> tuple[Int, Int, Callable[[Int], jax.Array]]:
        """Returns the first query of a block, the number of its tiles, and their entries.

        The last queries, which see most keys, come first.
        """
        i = self.grid["i"] - 1 - wg.grid["i"]
        # Where masks do not depend on the row of the batch, there is one list for all.
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
        rows = pl.multiple_of(wg.number * ROWS, ROWS)
        rules = wg.scratch["bias"].wait(n) if "bias" in wg.scratch else {}
        return self.part(
            wg,
            wg.grid["b"],
            wg.grid["head"],
            first + rows,
            column_of(entry(n)) * self.blocks.k,
            kind_of(entry(n)),
            rules,
            pl.ds(rows, ROWS + self.blocks.k),
        )

    def release_bias(self, wg: Warpgroup, n: Int) -> None:
        """Releases the bias of tile n."""
        if "bias" in wg.scratch:
            wg.scratch["bias"].release(n)

    def count(self, wg: Warpgroup) -> Int:
        return self._tiles(wg)[1]

    def entry(self, wg: Warpgroup, t: Int) -> jax.Array:
        return self._tiles(wg)[2](t)

    def fill(self, wg: Warpgroup, t: Int, ruled: Int | None) -> None:
        first, _, entry = self._tiles(wg)
        self._filler(wg, first, entry)(t, ruled)

    def copy(self, wg: Warpgroup) -> None:
        first, count, entry = self._tiles(wg)
        fill = self._filler(wg, first, entry)
        jax.lax.fori_loop(jnp.int32(0), count, fill, jnp.int32(0))

    def _filler(
        self, wg: Warpgroup, first: Int, entry: Callable[[Int], jax.Array]
    ) -> Callable[[Int, Any], Any]:
        """Returns a function that copies tile n, and counts tiles with rules."""
        bk, b, head = self.blocks.k, wg.grid["b"], wg.grid["head"]

        def fill(n, ruled):
            k0 = column_of(entry(n)) * bk
            of_head = b, pl.ds(k0, bk), head // self.spec.group
            wg.scratch["keys"].fill(n, k=wg.refs["x"].k.at[of_head])
            start = self.distance(first, k0)
            if rules := self.rules(wg, b, head, first, k0, start):
                wg.scratch["bias"].fill(n, **rules)
            ruled = self.bands.fill(wg, ruled, kind_of(entry(n)), b, head, start, (first, k0))
            wg.scratch["values"].fill(n, v=wg.refs["x"].v.at[of_head])
            return ruled

        return fill


def forward(spec: GPUSpec, x: Operands) -> tuple[jax.Array, LogSumExp]:
    """Returns the output, [B, T, N, V], and the log-sum-exp, float32 [B, N, T]."""
    kernel = Forward(spec, x, spec.forward, x.schedules[0])
    shape = spec.batch, spec.length, spec.heads, spec.value_dim
    row = out_struct(x.q, (spec.batch, spec.heads, spec.length))
    out_types = {
        "out": out_struct(x.q, shape, x.q.dtype),
        **dict.fromkeys(LogSumExp._fields, row),
    }
    results = kernel.launch("forward", out_types)
    return results["out"], LogSumExp(results["top"], results["total"])


class _Softmax(NamedTuple):
    """The running softmax of a warpgroup.

    Attributes:
      out: float32 [64, V], weighted sums of values, in parts of V.
      top: float32 [64], the greatest logits.
      weight: float32 [64], sums of weights.
    """

    out: list[jax.Array]
    top: jax.Array
    weight: jax.Array


class Forward(ByQuery):
    """The forward kernel."""

    @property
    def copier(self) -> bool:
        spec = self.spec
        is_large = spec.wide or spec.softcap is not None or spec.mask_mod is not None
        is_large |= bool(self.x.elements) and not spec.by_slot
        # A tile waits for the next one's keys, which come when it ends where there is one slot.
        return spec.moves_registers or not is_large or self.ahead == 1

    @property
    def scratch_types(self) -> dict[str, Any]:
        spec, dtype = self.spec, self.x.q.dtype
        types = {
            "q": matrix(spec, 2, ROWS, spec.dim, dtype=dtype),
            **dict.fromkeys(LogSumExp._fields, vector(2, ROWS)),
            # `ready` waits for the queries and for features of rows, `turn` for both warpgroups.
            "ready": plgpu.Barrier(num_arrivals=1 + len(self.bands.resident), num_barriers=2),
            "turn": plgpu.Barrier(num_arrivals=2),
        }
        if spec.dim != spec.value_dim:
            types["out"] = matrix(spec, 2, ROWS, spec.value_dim, dtype=dtype)
        if spec.interpret:
            types["p"] = operand(spec.forward.k, dtype)
        return most_slots(lambda *slots: types | self.pipes(*slots))

    @property
    def parts(self) -> list[Any]:
        """Slices of V: registers have room for the new sums of a slice and the old ones of all."""
        size = min(self.spec.value_dim, 128)
        return [
            pl.Slice(start, min(size, self.spec.value_dim - start))
            for start in range(0, self.spec.value_dim, size)
        ]

    def compute(self, wg: Warpgroup) -> None:
        q0, count = self.queries(wg)
        b, head = wg.grid["b"], wg.grid["head"]
        of_head = b, pl.ds(q0, ROWS), head
        plgpu.copy_gmem_to_smem(wg.refs["x"].q.at[of_head], wg.part("q"), wg.part("ready"))
        self.bands.copy_rows(wg, b, head, q0)
        plgpu.barrier_wait(wg.part("ready"))
        # Before its turn: the first warpgroup waits for these copies.
        filled = self.start(wg)
        # The second warpgroup starts when the first has issued its products of queries and keys,
        # and stays half a tile behind. The last turn below is for its last arrival.
        pl.when(wg.number == 1)(lambda: _next_turn(wg))
        lowest = plgpu.layout_cast(jnp.full((ROWS,), LEAST_LOGIT, jnp.float32), ROW)
        empty = [zeros((ROWS, part.size), TILE) for part in self.parts]
        start = (jnp.int32(0), _Softmax(empty, lowest, zeros((ROWS,), ROW))), filled
        _wait_for_keys(wg, jnp.int32(0), count)

        def step(n, carry):
            carry, filled = carry
            carry = self._add_tile(wg, n, count, *carry)
            return carry, self.refill(wg, n, filled)

        (_, softmax), _ = jax.lax.fori_loop(jnp.int32(0), count, step, start)
        pl.when(wg.number == 0)(lambda: _next_turn(wg))
        # A query that sees no key has no weight, and the output 0.
        share = 1.0 / jnp.where(softmax.weight == 0.0, 1.0, softmax.weight)
        # The queries are not read any more, so that their memory takes an output of their size.
        out = wg.part("out" if "out" in wg.scratch else "q")
        for part, total in zip(self.parts, softmax.out, strict=True):
            total = total * rows_to_tile(share, total.shape)
            out.at[:, part][...] = total.astype(self.x.q.dtype)
        lse = {"top": softmax.top, "total": softmax.weight}
        for name, rows in lse.items():
            wg.part(name)[...] = rows
        plgpu.commit_smem()
        plgpu.copy_smem_to_gmem(out, wg.out_refs["out"].at[of_head])
        for name in lse:
            plgpu.copy_smem_to_gmem(wg.part(name), wg.out_refs[name].at[b, head, pl.ds(q0, ROWS)])
        plgpu.wait_smem_to_gmem(0)

    def _add_tile(
        self, wg: Warpgroup, n: Int, count: Int, ruled: Int, softmax: _Softmax
    ) -> tuple[Int, _Softmax]:
        """Adds tile n of `count` to the softmax; `ruled` is the number of tiles with rules before.

        Its keys were waited for.
        """
        tile = self.tile(wg, n)
        self.bands.prepare(wg, tile, ruled)
        ruled = self.bands.release(wg, tile, ruled)
        keys = wg.scratch["keys"].blocks(n)

        def scores(acc):
            # Products are issued here, and waited for where the accumulator is read.
            plgpu.wgmma(acc, wg.part("q"), keys["k"].transpose((1, 0)))
            _next_turn(wg)
            return acc[...]

        s = pl.run_scoped(scores, plgpu.ACC(tile.shape, jnp.float32))
        wg.scratch["keys"].release(n)
        s, _ = tile.logits(s)
        top = jnp.maximum(softmax.top, s.max(axis=1))
        # `top` starts at the least finite number: -inf minus -inf would be NaN.
        decay = jnp.exp2(softmax.top - top)
        p = jnp.exp2(s - rows_to_tile(top, s.shape))
        out = [total * rows_to_tile(decay, total.shape) for total in softmax.out]
        weight = softmax.weight * decay + p.sum(axis=1)
        p = p.astype(self.x.q.dtype)
        # The other warpgroup may issue its products now. This one waits for its values, and then
        # for its turn, which has no wait for copies.
        plgpu.barrier_arrive(wg.scratch["turn"])
        values = wg.scratch["values"].wait(n)
        plgpu.barrier_wait(wg.scratch["turn"])
        for i, part in enumerate(self.parts):

            def add(acc, i=i, part=part):
                wg.product(acc, p, values["v"].at[:, part], "p")
                # While the tensor cores are busy.
                if i == len(self.parts) - 1:
                    _wait_for_keys(wg, n + 1, count)
                plgpu.wgmma_wait(0)

            out[i] = self._added(out[i], add)
        wg.scratch["values"].release(n)
        self.release_bias(wg, n)
        return ruled, _Softmax(out, top, weight)

    def _added(self, total: jax.Array, add: Callable[[Any], None]) -> jax.Array:
        """Returns a float32 array to whose accumulator `add` has added products."""
        if not self.spec.interpret:
            return pl.run_state(add)(plgpu.ACC.init(total))

        # Pallas' interpreter has accumulators of zeros only.
        def products(acc):
            add(acc)
            return acc[...]

        return total + pl.run_scoped(products, plgpu.ACC((ROWS, total.shape[1]), jnp.float32))


def _wait_for_keys(wg: Warpgroup, n: Int, count: Int) -> None:
    """Waits for the keys of tile n, if n is less than `count`."""

    @pl.when(n < count)
    def _():
        wg.scratch["keys"].wait(n)


def _next_turn(wg: Warpgroup) -> None:
    """Hands the tensor cores to the other warpgroup, and waits for them."""
    plgpu.barrier_arrive(wg.scratch["turn"])
    plgpu.barrier_wait(wg.scratch["turn"])
