"""The forward kernel: flash attention with position rules, for TPU.

Grid (N, B, tiles), tiles by blocks of queries. The running maximum m, sum l and output of a
block of queries stay in VMEM over its blocks of keys, the strip of a head over the batch.
"""

import dataclasses
import functools
import math
from typing import Any

import jax
import jax.numpy as jnp
from jax.experimental import pallas as pl
from jax.experimental.pallas import tpu as pltpu

from posenc_jax.engine.mask import MASK_VALUE, in_units
from posenc_jax.engine.problem import LogSumExp
from posenc_jax.kernels.elements import evaluate
from posenc_jax.kernels.kinds import MASKED, PLAIN, kinds
from posenc_jax.kernels.operands import Operands, out_struct
from posenc_jax.kernels.tpu import schedule
from posenc_jax.kernels.tpu.bands import (
    BandInputs,
    BandStrip,
    band_inputs,
    band_logits,
    band_slices,
)
from posenc_jax.kernels.tpu.block_specs import (
    feature_spec,
    input_specs,
    matrix_spec,
    memory_refusal,
    temporary_bytes,
)
from posenc_jax.kernels.tpu.spec import TPUSpec, bias_line, heads_before_tokens, heads_first
from posenc_jax.kernels.tpu.strip import LANES, Strip, shear
from posenc_jax.kernels.tpu.tile import (
    add_pairs,
    dot,
    finish_softmax,
    kept_pairs,
    lanes,
    poison,
    poisons,
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
    x = heads_first(x)
    grid = ForwardGrid.of(spec, x)
    bands = grid.band_inputs(x)
    arrays, specs = inputs(grid, x, bands)
    out = out_struct(x.q, (spec.batch, spec.heads, spec.length, spec.value_dim), spec.dtype)
    row = out_struct(x.q, (spec.batch, spec.heads, 1, spec.length))
    out, *lse = pl.pallas_call(
        functools.partial(_kernel, grid, tuple(bands.strips)),
        grid_spec=pltpu.PrefetchScalarGridSpec(
            num_scalar_prefetch=2,
            grid=(spec.heads, spec.batch, grid.tiles),
            in_specs=[specs],
            out_specs=(
                matrix_spec(out, spec.forward.q, grid.query_block),
                *(feature_spec(row, spec.forward.q, grid.query_block),) * 2,
            ),
            scratch_shapes=[_scratch_shapes(grid, x, bands)],
        ),
        out_shape=(out, row, row),
        compiler_params=pltpu.CompilerParams(
            dimension_semantics=("parallel", "arbitrary", "arbitrary"),
            vmem_limit_bytes=spec.vmem_limit,
        ),
        interpret=spec.interpret,
        name="attention_forward",
    )(x.schedules[0].reshape(-1), x.prefix, arrays)
    return heads_before_tokens(out), LogSumExp(*(y[:, :, 0] for y in lse))


def forward_refusal(spec: TPUSpec, x: Operands) -> str | None:
    """Returns why the forward pass needs more memory than there is, or None."""
    x = heads_first(x)
    grid = ForwardGrid.of(spec, x)
    bands = grid.band_inputs(x)
    sizes = f"the forward pass of T = {spec.length}, S = {spec.keys}, H = {spec.dim}"
    scalars = x.schedules[0], x.prefix, [e.scalars for e in x.elements]
    scratch = _scratch_shapes(grid, x, bands)
    temporary = temporary_bytes(spec, x, spec.forward)
    arrays, specs = inputs(grid, x, bands)
    return memory_refusal(sizes, spec.vmem_limit, scratch, arrays, specs, scalars, temporary)


@dataclasses.dataclass(frozen=True)
class ForwardGrid:
    """The steps of the forward kernel, and the blocks of the arrays at each step.

    Index maps take the three indices of the grid, the schedule and the prefix lengths, and return
    the row of the batch, the head and the block of tokens.

    Attributes:
      spec: the static part.
      shared_schedule: whether all rows of the batch have one schedule.
    """

    spec: TPUSpec
    shared_schedule: bool

    @classmethod
    def of(cls, spec: TPUSpec, x: Operands) -> "ForwardGrid":
        """Returns the grid for operands."""
        return cls(spec, shared_schedule=x.schedules[0].shape[0] == 1)

    def band_inputs(self, x: Operands) -> BandInputs:
        """Returns the products of the operands."""
        index_maps = self.query_block, self.key_block_of_query_head
        return band_inputs(self.spec, x, self.spec.forward, 0, *index_maps)

    @functools.cached_property
    def tiles(self) -> int:
        """The number of tiles per head and row of the batch."""
        return self.spec.order(by_key=False)[0].size

    @property
    def slice(self) -> int:
        """The number of keys of one matrix product."""
        return math.gcd(self.spec.forward.k, _MAX_SLICE)

    @functools.cached_property
    def strip(self) -> Strip:
        """The strip of the bias."""
        low, high = self.spec.reach(self.spec.forward)
        return Strip.of(-high, -low, self.spec.forward.q, self.spec.forward.k)

    def entry(self, schedule_ref, b, t):
        """Returns the schedule's entry of a step."""
        row = 0 if self.shared_schedule else b
        return schedule_ref[row * self.tiles + t]

    def query_block(self, *indices):
        h, b, t, schedule_ref, _ = indices
        return b, h, schedule.row_of(self.entry(schedule_ref, b, t))

    def key_block_of_query_head(self, *indices):
        h, b, t, schedule_ref, _ = indices
        return b, h, schedule.column_of(self.entry(schedule_ref, b, t))

    def key_block(self, *indices):
        b, h, block = self.key_block_of_query_head(*indices)
        return b, jax.lax.div(h, jnp.int32(self.spec.group)), block


def inputs(
    grid: ForwardGrid, x: Operands, bands: BandInputs
) -> tuple[dict[str, Any], dict[str, Any]]:
    """Returns the arrays that the kernel reads, and their block specs."""
    arrays, specs = input_specs(
        grid.spec,
        x,
        grid.spec.forward,
        grid.query_block,
        grid.key_block,
        grid.key_block_of_query_head,
    )
    if x.bias is not None:
        arrays["line"] = bias_line(grid.spec, x.bias, x.first, grid.strip, -1)
        one_head = x.bias.shape[0] == 1

        def line(*indices):
            return (0 if one_head else grid.query_block(*indices)[1]), 0, 0

        specs["line"] = pl.BlockSpec((None, 1, grid.strip.line), line)
    arrays["products"], specs["products"] = bands.arrays, bands.specs
    return arrays, specs


def _scratch_shapes(grid: ForwardGrid, x: Operands, bands: BandInputs) -> dict[str, Any]:
    """Returns the types of scratch memory, by name."""
    spec = grid.spec
    column = pltpu.VMEM((spec.forward.q, LANES), jnp.float32)
    out = pltpu.VMEM((spec.forward.q, spec.value_dim), jnp.float32)
    return query_scratch(grid, x, bands) | {"m": column, "l": column, "out": out}


def query_scratch(grid: ForwardGrid, x: Operands, bands: BandInputs) -> dict[str, Any]:
    """Returns the types of scratch memory for a block of queries and a head, by name."""
    spec = grid.spec
    column = functools.partial(pltpu.VMEM, (spec.forward.q, LANES))
    shapes = {
        "q": pltpu.VMEM((spec.forward.q, spec.dim), x.q.dtype),
        "rows": {name: column(jnp.int32) for name in x.rows},
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
    kind, i, j = schedule.kind_of(entry), schedule.row_of(entry), schedule.column_of(entry)
    offset = i * spec.forward.q - j * spec.forward.k
    limit = prefix_ref[b] if spec.prefix else None
    step = ForwardStep(grid, bands, refs, scratch, h, offset, limit)
    if poisons():
        pl.when((b == 0) & (t == 0))(functools.partial(poison, scratch))
    if "line" in refs:
        pl.when((b == 0) & (t == 0))(step.start_head)

    @pl.when(schedule.is_first(entry))
    def _():
        start_softmax(scratch)
        step.start_queries()

    for one_kind in kinds(spec.visibility):
        tile = functools.partial(step.tile, one_kind != PLAIN, one_kind == MASKED)
        pl.when(kind == one_kind)(tile)

    @pl.when(schedule.is_last(entry))
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
        q = refs["q"][...].astype(jnp.float32) * (self.spec.scale * self.spec.unit)
        scratch["q"][...] = q.astype(refs["q"].dtype)
        for name, row in refs["rows"].items():
            scratch["rows"][name][...] = to_column(row[...])
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
        slots = self.refs["columns"]["slots"][:, start : start + size]
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
        s = dot(scratch["q"][...], refs["k"][start : start + size], (1, 1))
        if ruled and "line" in refs:
            parts = []
            for r in range(0, spec.forward.q, LANES):
                lane = self.grid.strip.lane(-self.offset, r) + start
                lane = pl.multiple_of(lane, LANES)
                parts.append(s[r : r + LANES] + scratch["strip"][:, pl.ds(lane, size)])
            s = jnp.concatenate(parts)
        s = sum(terms, s)
        q_tokens, k_tokens = {}, {}
        if ruled or masked:
            q_tokens = {name: lanes(y[...], size) for name, y in scratch["rows"].items()}
            k_tokens = {name: y[:, start : start + size] for name, y in refs["columns"].items()}
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
                term, _ = evaluate(
                    element, s.shape, scalars, q_scalars, k_scalars, q_tokens, k_tokens
                )
                s += in_units(term, spec.unit)
        if spec.softcap is not None:
            may_hide = ruled and (spec.rules_in_bias or spec.pairs or bool(refs["elements"]))
            bounded = jnp.tanh(s)
            slope = 1.0 - bounded * bounded
            s = soft_cap(spec.softcap, s, bounded, may_hide)
        return s if see is None else jnp.where(see, s, MASK_VALUE), slope
