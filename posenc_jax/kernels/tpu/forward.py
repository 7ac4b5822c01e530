"""Kernels with tiles of the forward pass, for TPU: attention, and cotangents of arrays of pairs.

Grid (N, B, tiles), tiles by blocks of queries. The running maximum m, sum l and output of a
block of queries stay in VMEM over its blocks of keys, the strip of a head over the batch.
"""

import abc
import dataclasses
import functools
import math
from typing import Any, ClassVar, Self

import jax
import jax.numpy as jnp
from jax.experimental import pallas as pl
from jax.experimental.pallas import tpu as pltpu

from posenc_jax.engine.blocks import Blocks
from posenc_jax.engine.mask import MASK_VALUE, in_units
from posenc_jax.engine.problem import LogSumExp
from posenc_jax.engine.simplified import AllPairs
from posenc_jax.kernels.elements import evaluate
from posenc_jax.kernels.operands import (
    EMPTY,
    MASKED,
    PLAIN,
    Operands,
    TokenScalars,
    kinds,
    out_struct,
)
from posenc_jax.kernels.tpu.bands import (
    BandInputs,
    BandStrip,
    band_inputs,
    band_logits,
    band_slices,
)
from posenc_jax.kernels.tpu.block_specs import (
    Call,
    feature_spec,
    input_specs,
    matrix_spec,
    temporary_bytes,
)
from posenc_jax.kernels.tpu.spec import Entry, TPUSpec, bias_line, heads_before_tokens, heads_first
from posenc_jax.kernels.tpu.tile import (
    LANES,
    Strip,
    add_pairs,
    dot,
    finish_softmax,
    kept_pairs,
    lanes,
    shear,
    soft_cap,
    start_softmax,
    to_column,
    to_row,
    update_softmax,
    visible,
)

_MAX_SLICE = 512  # Keys of one product.


def forward(spec: TPUSpec, x: Operands) -> tuple[jax.Array, LogSumExp]:
    """Returns the output, [B, T, N, V], and the log-sum-exp, float32 [B, N, T]."""
    out, *lse = _call(spec, heads_first(x))()
    return heads_before_tokens(out), LogSumExp(*(y[:, :, 0] for y in lse))


def forward_refusal(spec: TPUSpec, x: Operands) -> str | None:
    """Returns why the forward pass needs more memory than there is, or None."""
    sizes = f"the forward pass of T = {spec.length}, S = {spec.keys}, H = {spec.dim}"
    scalars, temporary = [e.scalars for e in x.elements], temporary_bytes(spec, x, spec.forward)
    return _call(spec, heads_first(x)).refusal(sizes, scalars=scalars, temporary=temporary)


def _call(spec: TPUSpec, x: Operands) -> Call:
    """Returns the kernel's call; q, k and v are heads first."""
    grid = ForwardGrid.of(spec, x)
    bands = grid.band_inputs(x)
    arrays, specs = grid.inputs(x, bands)
    out = out_struct(x.q, (spec.batch, spec.heads, spec.length, spec.value_dim), spec.dtype)
    row = out_struct(x.q, (spec.batch, spec.heads, 1, spec.length))
    column = pltpu.VMEM((spec.forward.q, LANES), jnp.float32)
    sums = pltpu.VMEM((spec.forward.q, spec.value_dim), jnp.float32)
    return Call(
        "attention_forward",
        functools.partial(_kernel, grid, tuple(bands.strips)),
        grid=(spec.heads, spec.batch, grid.tiles),
        semantics=("parallel", "arbitrary", "arbitrary"),
        scalars=(x.schedules[0].reshape(-1), x.prefix),
        arrays=arrays,
        specs=specs,
        outs=(out, row, row),
        out_specs=(
            matrix_spec(out, spec.forward.q, grid.query_block),
            *(feature_spec(row, spec.forward.q, grid.query_block),) * 2,
        ),
        scratch=_query_scratch(grid, x, bands) | {"m": column, "l": column, "out": sums},
        vmem_limit=spec.vmem_limit,
        interpret=spec.interpret,
    )


@dataclasses.dataclass(frozen=True)
class Grid(abc.ABC):
    """The steps of a kernel, and the blocks of the arrays at each step.

    Index maps take the indices of the grid, the schedule and the prefix lengths, and return the row
    of the batch, the head and the block of tokens.

    Attributes:
      spec: the static part.
      shared_schedule: whether all rows of the batch have one schedule.
    """

    spec: TPUSpec
    shared_schedule: bool
    by_key: ClassVar[bool] = False
    """Whether rows of the schedule and of tiles are keys, as in the backward pass."""

    @classmethod
    def of(cls, spec: TPUSpec, x: Operands) -> Self:
        """Returns the grid for operands."""
        return cls(spec, shared_schedule=x.schedules[cls.by_key].shape[0] == 1)

    @abc.abstractmethod
    def query_block(self, *indices: Any) -> tuple[Any, Any, Any]:
        """The blocks of queries."""

    @abc.abstractmethod
    def key_block(self, *indices: Any) -> tuple[Any, Any, Any]:
        """The blocks of keys, with the head of keys."""

    @abc.abstractmethod
    def key_block_of_query_head(self, *indices: Any) -> tuple[Any, Any, Any]:
        """The blocks of keys, with the head of queries."""

    @abc.abstractmethod
    def head(self, *indices: Any) -> Any:
        """The head of queries."""

    @property
    def blocks(self) -> Blocks:
        """Queries and keys per tile."""
        return self.spec.backward if self.by_key else self.spec.forward

    @functools.cached_property
    def tiles(self) -> int:
        """The number of tiles per head and row of the batch."""
        return self.spec.order(by_key=self.by_key)[0].size

    @functools.cached_property
    def strip(self) -> Strip:
        """The strip of the bias."""
        (low, high), blocks = self.spec.reach(self.blocks), self.blocks
        if self.by_key:
            return Strip.of(low, high, blocks.k, blocks.q)
        return Strip.of(-high, -low, blocks.q, blocks.k)

    def band_inputs(self, x: Operands) -> BandInputs:
        """Returns the products of the operands."""
        index_maps = self.query_block, self.key_block_of_query_head
        return band_inputs(self.spec, x, self.blocks, int(self.by_key), *index_maps)

    def inputs(self, x: Operands, bands: BandInputs) -> tuple[dict[str, Any], dict[str, Any]]:
        """Returns the arrays that the kernel reads, and their block specs."""
        index_maps = self.query_block, self.key_block, self.key_block_of_query_head
        arrays, specs = input_specs(self.spec, x, self.blocks, *index_maps)
        if x.bias is not None:
            sign, one_head = 1 if self.by_key else -1, x.bias.shape[0] == 1
            arrays["line"] = bias_line(self.spec, x.bias, x.first, self.strip, sign)

            def line(*indices):
                return (0 if one_head else self.head(*indices)), 0, 0

            specs["line"] = pl.BlockSpec((None, 1, self.strip.line), line)
        arrays["products"], specs["products"] = bands.arrays, bands.specs
        return arrays, specs


class ForwardGrid(Grid):
    """The steps of the forward kernel: heads, rows and tiles."""

    @property
    def slice(self) -> int:
        """The number of keys of one matrix product."""
        return math.gcd(self.spec.forward.k, _MAX_SLICE)

    def entry(self, schedule_ref, b, t):
        """Returns the schedule's entry of a step."""
        row = 0 if self.shared_schedule else b
        return Entry(schedule_ref[row * self.tiles + t])

    def query_block(self, *indices):
        h, b, t, schedule_ref, _ = indices
        return b, h, self.entry(schedule_ref, b, t).row

    def key_block_of_query_head(self, *indices):
        h, b, t, schedule_ref, _ = indices
        return b, h, self.entry(schedule_ref, b, t).column

    def key_block(self, *indices):
        b, h, block = self.key_block_of_query_head(*indices)
        return b, jax.lax.div(h, jnp.int32(self.spec.group)), block

    def head(self, *indices):
        return self.query_block(*indices)[1]


def _query_scratch(grid: ForwardGrid, x: Operands, bands: BandInputs) -> dict[str, Any]:
    """Returns the types of scratch memory for a block of queries and a head, by name."""
    spec = grid.spec
    column = functools.partial(pltpu.VMEM, (spec.forward.q, LANES))
    shapes = {
        "rows": jax.tree.map(lambda _: column(jnp.int32), x.rows),
        "q_scalars": [[column(jnp.float32) for _ in e.q_scalars] for e in x.elements],
        "steps": bands.columns,
    }
    if x.dropped is not None:
        shapes["dropped"] = column(jnp.uint32)
    if x.bias is not None:
        shapes["strip"] = pltpu.VMEM((LANES, grid.strip.width), jnp.float32)
    return shapes


def _kernel(
    grid: ForwardGrid,
    bands: tuple[BandStrip, ...],
    schedule_ref: Any,
    prefix_ref: Any,
    refs: dict[str, Any],
    out_ref: Any,
    top_ref: Any,
    total_ref: Any,
    scratch: dict[str, Any],
) -> None:
    """Computes a step of the grid.

    Args:
      grid: the steps.
      bands: the geometry of the products.
      schedule_ref, prefix_ref: the schedule and the prefix lengths, in SMEM.
      refs: blocks of the inputs, by name.
      out_ref, top_ref, total_ref: blocks of the output and the log-sum-exp.
      scratch: memory, by name.
    """
    spec = grid.spec
    h, b, t = (pl.program_id(axis) for axis in range(3))
    entry = grid.entry(schedule_ref, b, t)
    kind, i, j = entry.kind, entry.row, entry.column
    offset = i * spec.forward.q - j * spec.forward.k
    limit = prefix_ref[b] if spec.prefix else None
    step = ForwardStep(grid, bands, refs, scratch, h, offset, limit)
    # The strip of a head stays in VMEM, for all rows of the batch.
    if "line" in refs:
        pl.when((b == 0) & (t == 0))(step.start_head)

    @pl.when(entry.is_first)
    def _():
        start_softmax(scratch)
        step.start_queries()

    for one_kind in kinds(spec.visibility):
        tile = functools.partial(step.tile, one_kind != PLAIN, one_kind == MASKED)
        pl.when(kind == one_kind)(tile)

    @pl.when(entry.is_last)
    def _():
        rate = spec.dropout_rate if "dropped" in refs else None
        top_ref[...], total_ref[...] = map(to_row, finish_softmax(scratch, out_ref, rate))


@dataclasses.dataclass(frozen=True)
class ForwardStep:
    """A step of the grid: one tile of a query head.

    Attributes:
      grid: all steps.
      bands: the geometry of the products.
      refs, scratch: references by name.
      h: the query head.
      offset: the first query minus the first key of the tile.
      limit: the prefix length, or None.
    """

    grid: ForwardGrid
    bands: tuple[BandStrip, ...]
    refs: dict[str, Any]
    scratch: dict[str, Any]
    h: Any
    offset: Any
    limit: Any

    @property
    def spec(self) -> TPUSpec:
        return self.grid.spec

    def start_head(self) -> None:
        """Writes the strip of the bias."""
        strip, rotate = self.grid.strip, not self.spec.interpret
        shear(strip, self.refs["line"], self.scratch["strip"], rotate=rotate)

    def start_queries(self) -> None:
        """Prepares a block of queries."""
        refs, scratch = self.refs, self.scratch
        rows = zip(*map(jax.tree.leaves, (refs["rows"], scratch["rows"])), strict=True)
        for row, column in rows:
            column[...] = to_column(row[...])
        if "dropped" in refs:
            scratch["dropped"][...] = to_column(refs["dropped"][...])
        for element, columns in zip(refs["elements"], scratch["q_scalars"], strict=True):
            for row, column in zip(element.q_scalars, columns, strict=True):
                column[...] = to_column(row[...])
        for product, columns in zip(refs["products"], scratch["steps"], strict=True):
            for column in columns:
                column[...] = to_column(product["steps"][...])

    def tile(self, ruled: bool, masked: bool) -> None:
        """Adds a tile, a slice of keys at a time."""
        size = self.grid.slice
        starts = range(0, self.spec.forward.k, size)
        # All rotations first: they overlap with the matrix products that come after them.
        added = [self._products(start) if ruled else [] for start in starts]
        for start, terms in zip(starts, added, strict=True):
            self.add(start, *self._logits(start, terms, ruled, masked))

    def add(self, start: int, s: jax.Array, slope: jax.Array | None) -> None:
        """Adds a slice of keys to the softmax.

        Args:
          start: the first key of the slice in its tile.
          s: logits in units of log 2.
          slope: the derivative of the softcap, or None.
        """
        p, decay = update_softmax(self.scratch, s)
        p = self.without_dropped(start, p)  # The sum of weights counts all pairs.
        v = self.refs["v"][start : start + self.grid.slice]
        out = self.scratch["out"][...] * lanes(decay, self.spec.value_dim)
        self.scratch["out"][...] = out + dot(p.astype(v.dtype), v)

    def without_dropped(self, start: int, x: jax.Array) -> jax.Array:
        """Returns numbers of the pairs of a slice, with zeros for pairs that dropout drops."""
        if "dropped" not in self.refs:
            return x
        size = self.grid.slice
        slots = self.refs["columns"].slots[:, start : start + size]
        hashed = lanes(self.scratch["dropped"][...], size)
        return jnp.where(kept_pairs(self.spec, hashed, slots), x, 0.0)

    def _products(self, start: int) -> list[jax.Array]:
        """Returns the logits that products add to the slice of keys from `start` on."""
        queries, keys = range(self.spec.forward.q), range(start, start + self.grid.slice)
        steps = zip(self.bands, self.refs["products"], self.scratch["steps"], strict=True)
        return [
            band_logits(band, product, columns, band_slices(band, self.offset, queries, keys))
            for band, product, columns in steps
        ]

    def _logits(
        self, start: int, terms: list[jax.Array], ruled: bool, masked: bool
    ) -> tuple[jax.Array, jax.Array | None]:
        """Returns the logits of a slice of keys in units of log 2, and the softcap's slope."""
        refs, scratch, spec = self.refs, self.scratch, self.spec
        size = self.grid.slice
        # Scaled in float32: q * scale in bfloat16 would be off by 2^-9, and its logits with it.
        s = dot(refs["q"][...], refs["k"][start : start + size], (1, 1)) * (spec.scale * spec.unit)
        if ruled and "line" in refs:
            parts = []
            for r in range(0, spec.forward.q, LANES):
                lane = self.grid.strip.lane(-self.offset, r) + start
                lane = pl.multiple_of(lane, LANES)
                parts.append(s[r : r + LANES] + scratch["strip"][:, pl.ds(lane, size)])
            s = jnp.concatenate(parts)
        s = sum(terms, s)
        q_tokens = k_tokens = TokenScalars()
        if ruled or masked:
            q_tokens = jax.tree.map(lambda y: lanes(y[...], size), scratch["rows"])
            k_tokens = jax.tree.map(lambda y: y[:, start : start + size], refs["columns"])
        see, slope = None, None
        if masked:
            offset = self.offset - start
            see = visible(spec, s.shape, 0, offset, q_tokens, k_tokens, self.limit)
        for term in refs["pairs"]:
            s = add_pairs(spec, s, term, term.pairs[:, start : start + size], see)
        for element, columns in zip(refs["elements"], scratch["q_scalars"], strict=True):
            if ruled or element.everywhere:
                scalars = [y[self.h] for y in element.scalars]
                q_scalars = [lanes(y[...], size) for y in columns]
                k_scalars = [y[:, start : start + size] for y in element.k_scalars]
                arrays = scalars, q_scalars, k_scalars
                places = q_tokens.coordinates, k_tokens.coordinates
                term, _ = evaluate(element, s.shape, *arrays, *places)
                if see is not None and element.careful and spec.softcap is not None:
                    term = jnp.where(see, term, 0.0)  # Its slope is multiplied by zero.
                s += in_units(term, spec.unit)
        if spec.softcap is not None:
            may_hide = ruled and (spec.rules_in_bias or spec.pairs or bool(refs["elements"]))
            bounded = jnp.tanh(s)
            slope = 1.0 - bounded * bounded
            s = soft_cap(spec.softcap, s, bounded, may_hide)
        return s if see is None else jnp.where(see, s, MASK_VALUE), slope


# The cotangents of arrays of all pairs. A tile of the cotangent is the sum of the cotangents of the
# logits over the heads and the rows of the batch that share it. These are the last axes of the
# grid, (N or 1, B or 1, blocks of queries, blocks of keys, heads, rows): the sum stays in VMEM, in
# float32 and in one order, until the tile is written. Weights are computed again, on tiles of the
# forward pass. XLA drops the kernel where no such cotangent is needed.


def pair_grads(
    spec: TPUSpec, x: Operands, d_out: jax.Array, lse: jax.Array, delta: jax.Array
) -> tuple[AllPairs, ...]:
    """Returns the cotangents of the arrays of all pairs.

    Args:
      spec: the static part.
      x: the operands, heads first.
      d_out: [B, N, T, V].
      lse, delta: as for `Kernels.run_backward`.
    """

    return tuple(
        dataclasses.replace(term, pairs=_pair_call(spec, x, term, d_out, lse, delta)())
        for term in x.pairs
    )


def pairs_refusal(
    spec: TPUSpec, x: Operands, d_out: jax.Array, lse: jax.Array, delta: jax.Array
) -> str | None:
    """Returns why the kernels need more memory than there is, or None."""
    sizes = f"the cotangent of a bias of {spec.length} x {spec.keys} pairs, H = {spec.dim}"
    scalars, temporary = [e.scalars for e in x.elements], temporary_bytes(spec, x, spec.forward)
    calls = (_pair_call(spec, x, term, d_out, lse, delta) for term in x.pairs)
    reasons = (call.refusal(sizes, True, scalars, temporary) for call in calls)
    return next((reason for reason in reasons if reason is not None), None)


def _pair_call(
    spec: TPUSpec,
    x: Operands,
    term: AllPairs,
    d_out: jax.Array,
    lse: jax.Array,
    delta: jax.Array,
) -> Call:
    """Returns the call of the kernel for one of the arrays."""
    rows, heads, length, keys = term.pairs.shape
    tiles = pl.cdiv(length, spec.forward.q), pl.cdiv(keys, spec.forward.k)
    grid = _PairGrid(spec, x.schedules[2].shape[0] == 1, heads, rows, tiles)
    bands = grid.band_inputs(x)
    arrays, specs = grid.inputs(x, bands)
    arrays["d_out"] = d_out
    specs["d_out"] = matrix_spec(d_out, spec.forward.q, grid.query_block)
    scratch = _query_scratch(grid, x, bands)
    scratch["acc"] = pltpu.VMEM((spec.forward.q, spec.forward.k), jnp.float32)
    for name, y in (("lse", lse), ("delta", delta)):
        arrays[name] = y[:, :, None]
        specs[name] = feature_spec(arrays[name], spec.forward.q, grid.query_block)
        scratch[name] = pltpu.VMEM((spec.forward.q, LANES), jnp.float32)
    return Call(
        "attention_backward_pairs",
        functools.partial(_pair_kernel, grid, tuple(bands.strips), term.factor),
        grid=grid.shape,
        semantics=("parallel", *("arbitrary",) * 5),
        scalars=(x.schedules[2].reshape(-1), x.prefix),
        arrays=arrays,
        specs=specs,
        outs=out_struct(x.q, term.pairs.shape, term.pairs.dtype),
        out_specs=grid.out_spec,
        scratch=scratch,
        vmem_limit=spec.vmem_limit,
        interpret=spec.interpret,
    )


@dataclasses.dataclass(frozen=True)
class _PairGrid(ForwardGrid):
    """The steps of the kernel for an array of all pairs.

    The array has no padding but within its last blocks, and the other arrays may have more blocks:
    they are padded to blocks of both passes.

    Attributes:
      num_heads, rows: the first axes of the array, N or 1 and B or 1.
      pair_tiles: the numbers of its blocks of queries and of keys.
    """

    num_heads: int
    rows: int
    pair_tiles: tuple[int, int]

    @property
    def shape(self) -> tuple[int, ...]:
        """The numbers of steps."""
        spec = self.spec
        return (
            self.num_heads,
            self.rows,
            *self.pair_tiles,
            spec.heads // self.num_heads,
            spec.batch // self.rows,
        )

    @property
    def out_spec(self) -> pl.BlockSpec:
        """The blocks of the cotangent."""
        blocks = self.spec.forward
        return pl.BlockSpec(
            (None, None, blocks.q, blocks.k), lambda head, row, i, j, *_: (row, head, i, j)
        )

    def kind(self, kinds_ref: Any, b: Any, i: Any, j: Any) -> Any:
        """Returns the kind of a tile."""
        spec, blocks = self.spec, self.spec.forward
        rows, columns = spec.length // blocks.q, spec.keys // blocks.k
        return kinds_ref[((0 if self.shared_schedule else b) * rows + i) * columns + j]

    # One of `head` and `g`, and one of `row` and `r`, is zero.
    def query_block(self, *indices):
        head, row, i, _, g, r, *_ = indices
        return row + r, head + g, i

    def key_block_of_query_head(self, *indices):
        head, row, _, j, g, r, *_ = indices
        return row + r, head + g, j


def _pair_kernel(
    grid: _PairGrid,
    bands: tuple[BandStrip, ...],
    factor: float,
    kinds_ref: Any,
    prefix_ref: Any,
    refs: dict[str, Any],
    out_ref: Any,
    scratch: dict[str, Any],
) -> None:
    """Computes a step of the grid.

    Args:
      grid: the steps.
      bands: the geometry of the products.
      factor: of the array.
      kinds_ref, prefix_ref: the kinds of tiles and the prefix lengths, in SMEM.
      refs: blocks of the inputs, by name.
      out_ref: the block of the cotangent.
      scratch: memory, by name.
    """
    spec = grid.spec
    indices = [pl.program_id(axis) for axis in range(6)]
    head, row, i, j, g, r = indices
    b, h = row + r, head + g
    kind = grid.kind(kinds_ref, b, i, j)
    offset = i * spec.forward.q - j * spec.forward.k
    limit = prefix_ref[b] if spec.prefix else None
    step = _PairStep(grid, bands, refs, scratch, h, offset, limit)

    @pl.when((g == 0) & (r == 0))
    def _():
        scratch["acc"][...] = jnp.zeros(scratch["acc"].shape, jnp.float32)

    if "line" in refs:
        is_new = r == 0
        if grid.num_heads > 1:  # Else heads alternate.
            is_new &= (row == 0) & (i == 0) & (j == 0)
        pl.when(is_new)(step.start_head)
    pl.when(kind != EMPTY)(step.start_queries)
    for one_kind in kinds(spec.visibility):
        tile = functools.partial(step.tile, one_kind != PLAIN, one_kind == MASKED)
        pl.when(kind == one_kind)(tile)

    @pl.when((g == pl.num_programs(4) - 1) & (r == pl.num_programs(5) - 1))
    def _():
        out_ref[...] = (scratch["acc"][...] * factor).astype(out_ref.dtype)


class _PairStep(ForwardStep):
    """A step of the pairs' grid: one tile of a query head."""

    def start_queries(self) -> None:
        super().start_queries()
        for name in ("lse", "delta"):
            self.scratch[name][...] = to_column(self.refs[name][...])

    def add(self, start: int, s: jax.Array, slope: jax.Array | None) -> None:
        """Adds the cotangents of the logits of a slice of keys."""
        size = self.grid.slice
        keys = slice(start, start + size)
        lse, delta = (lanes(self.scratch[name][...], size) for name in ("lse", "delta"))
        d_p = self.without_dropped(
            start, dot(self.refs["d_out"][...], self.refs["v"][keys], (1, 1))
        )
        ds = jnp.exp2(s - lse) * (d_p - delta)
        self.scratch["acc"][:, keys] += ds if slope is None else ds * slope
