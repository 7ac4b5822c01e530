"""The fused backward kernel for TPU: dq, dk, dv and the cotangents of position rules.

The grid is (K, B, query heads of a key head, 1, tiles), with tiles by blocks of keys; where every
pair of blocks has a step, the last two axes are blocks of keys and blocks of queries. Logits are
transposed, [K, Q], so that p and ds enter the products as they are. dq of a head stays in VMEM; so
do dk and dv of a block of keys or, with grouped heads, of all keys. The cotangent of the bias is a
strip, summed along its diagonals once per head. All sums run in one fixed order, so results are
bitwise reproducible.
"""

import dataclasses
import functools
from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax.experimental import pallas as pl
from jax.experimental.pallas import tpu as pltpu

from posenc_jax.engine.mask import in_units
from posenc_jax.kernels.elements import Element, evaluate
from posenc_jax.kernels.operands import (
    MASKED,
    PLAIN,
    Grads,
    Operands,
    TokenScalars,
    kinds,
    out_struct,
)
from posenc_jax.kernels.tpu.bands import (
    BandInputs,
    BandSlices,
    BandStrip,
    band_cotangents,
    band_logits,
    band_slices,
    feature_cotangents,
    product_grads,
)
from posenc_jax.kernels.tpu.block_specs import (
    Call,
    feature_spec,
    matrix_spec,
    squeezed_spec,
    temporary_bytes,
)
from posenc_jax.kernels.tpu.forward import Grid, pair_grads, pairs_refusal
from posenc_jax.kernels.tpu.spec import Entry, TPUSpec, bias_line, heads_before_tokens, heads_first
from posenc_jax.kernels.tpu.tile import (
    LANES,
    add_pairs,
    dot,
    kept_pairs,
    lanes,
    shear,
    soft_cap,
    sum_diagonals,
    to_column,
    visible,
)


def backward(
    spec: TPUSpec, x: Operands, d_out: jax.Array, lse: jax.Array, delta: jax.Array
) -> Grads:
    """Returns the cotangents of the operands; see `Kernels.run_backward`."""
    x, d_out = heads_first(x), heads_before_tokens(d_out)
    grid = BackwardGrid.of(spec, x)
    bands = grid.band_inputs(x)
    grads = _call(grid, x, bands, d_out, lse, delta)()
    products = [
        product_grads(spec, product, strip, x.first, d["features"], d["vectors"])
        for product, strip, d in zip(x.products, bands.strips, grads["products"], strict=True)
    ]
    return Grads(
        *(heads_before_tokens(grads[name]) for name in "qkv"),
        _bias_grad(grid, x, grads.get("line")),
        tuple(map(_element_grads, x.elements, grads["elements"])),
        tuple(products),
        pair_grads(spec, x, d_out, lse, delta),
    )


def backward_refusal(spec: TPUSpec, x: Operands) -> str | None:
    """Returns why the backward pass needs more memory than there is, or None."""
    x = heads_first(x)
    grid = BackwardGrid.of(spec, x)
    rows = spec.batch, spec.heads, spec.length
    d_out = jnp.zeros((*rows, spec.value_dim), x.v.dtype)
    cotangents = d_out, *(jnp.zeros(rows, jnp.float32) for _ in ("lse", "delta"))
    sizes = f"the backward pass of T = {spec.length}, S = {spec.keys}, H = {spec.dim}"
    sizes += f" in groups of {spec.group} heads" if spec.group > 1 else ""
    scalars, temporary = [e.scalars for e in x.elements], temporary_bytes(spec, x, spec.backward)
    call = _call(grid, x, grid.band_inputs(x), *cotangents)
    reason = call.refusal(sizes, True, scalars, temporary)
    return reason or pairs_refusal(spec, x, *cotangents)


def _call(
    grid: "BackwardGrid",
    x: Operands,
    bands: BandInputs,
    d_out: jax.Array,
    lse: jax.Array,
    delta: jax.Array,
) -> Call:
    """Returns the kernel's call; q, k, v and d_out are heads first."""
    spec = grid.spec
    arrays, specs = _inputs(grid, x, bands, {"d_out": d_out, "lse": lse, "delta": delta})
    outs, out_specs = _outputs(grid, x, bands)
    # A chip with two cores divides parallel axes between them: rows, where there is one key head.
    rows = "parallel" if grid.sums_per_row and spec.kv_heads == 1 else "arbitrary"
    return Call(
        "attention_backward",
        functools.partial(_kernel, grid, tuple(bands.strips)),
        grid=grid.shape,
        semantics=("parallel", rows, *("arbitrary",) * 3),
        scalars=(x.schedules[1].reshape(-1), x.prefix),
        arrays=arrays,
        specs=specs,
        outs=outs,
        out_specs=out_specs,
        scratch=_scratch_shapes(grid, x, bands),
        vmem_limit=spec.vmem_limit,
        interpret=spec.interpret,
    )


class BackwardGrid(Grid):
    """The steps of the backward kernel: key heads, rows, heads of a group, and tiles."""

    by_key = True

    @property
    def q_blocks(self) -> int:
        """The number of blocks of queries."""
        return self.spec.length // self.spec.backward.q

    @property
    def is_dense(self) -> bool:
        """Whether every pair of blocks has a step: the block of keys is an index of the grid."""
        return self.tiles == self.spec.keys // self.spec.backward.k * self.q_blocks

    @property
    def shape(self) -> tuple[int, ...]:
        """The numbers of steps: key heads, rows of the batch, heads of a group, and tiles."""
        spec, q_blocks = self.spec, self.q_blocks
        last = (self.tiles // q_blocks, q_blocks) if self.is_dense else (1, self.tiles)
        return spec.kv_heads, spec.batch, spec.group, *last

    @property
    def first_of_last_keys(self) -> int:
        """The first tile of the last block of keys, which has a tile per block of queries."""
        return self.tiles - self.q_blocks

    @property
    def sums_per_row(self) -> bool:
        """Whether sums over tokens are written for each row of the batch.

        Without grouped heads they stay in VMEM for the whole batch.
        """
        return self.spec.group > 1

    @property
    def sum_shape(self) -> tuple[int, int]:
        """The first axes of sums over tokens."""
        return (self.spec.batch if self.sums_per_row else 1), self.spec.heads

    @property
    def accumulated_keys(self) -> int:
        """The number of keys whose dk and dv stay in VMEM."""
        return self.spec.keys if self.sums_per_row else self.spec.backward.k

    def entry(self, schedule_ref, b, j, i):
        """Returns the schedule's entry of a step."""
        row = 0 if self.shared_schedule else b
        return Entry(schedule_ref[row * self.tiles + j * self.shape[4] + i])

    def head(self, *indices):
        return indices[0] * self.spec.group + indices[2]

    def query_block(self, *indices):
        _, b, _, j, i, schedule_ref, _ = indices
        return b, self.head(*indices), self.entry(schedule_ref, b, j, i).column

    def key_block(self, *indices):
        h, b, _, j, i, schedule_ref, _ = indices
        return b, h, j if self.is_dense else self.entry(schedule_ref, b, j, i).row

    def key_block_of_query_head(self, *indices):
        return indices[1], self.head(*indices), self.key_block(*indices)[2]

    # Finished blocks of dq, dk and dv are written as they come; until then, block 0 is in memory.
    def finished_query_block(self, h, b, g, j, i, *_):
        head = h * self.spec.group + g
        return b, head, jnp.maximum(j * self.shape[4] + i - self.first_of_last_keys, 0)

    def finished_key_block(self, h, b, g, *indices):
        is_last_head = g == self.spec.group - 1
        return b, h, jnp.where(is_last_head, self.key_block(h, b, g, *indices)[2], 0)

    def sum_of_head(self, h, b, g, *_):
        return (b if self.sums_per_row else 0), h * self.spec.group + g, 0, 0

    def all_queries(self, h, b, g, *_):
        return b, h * self.spec.group + g, 0, 0


def _inputs(
    grid: BackwardGrid, x: Operands, bands: BandInputs, cotangents: dict[str, jax.Array]
) -> tuple[dict[str, Any], dict[str, Any]]:
    """Returns the arrays that the kernel reads, and their block specs."""
    block, query = grid.blocks.q, grid.query_block
    rows = {name: cotangents[name][:, :, None] for name in ("lse", "delta")}
    arrays, specs = grid.inputs(x, bands)
    arrays |= rows | {"d_out": cotangents["d_out"]}
    specs |= {name: feature_spec(y, block, query) for name, y in rows.items()}
    specs["d_out"] = matrix_spec(arrays["d_out"], block, query)
    return arrays, specs


def _outputs(grid: BackwardGrid, x: Operands, bands: BandInputs) -> tuple[Any, Any]:
    """Returns the types of the results, and their block specs."""
    spec, key = grid.spec, grid.key_block_of_query_head
    bq, bk = spec.backward.q, spec.backward.k
    struct = functools.partial(out_struct, x.q)

    def sums(shape, index=grid.sum_of_head):
        return struct(shape), squeezed_spec(shape, index)

    def per_key(shape):
        return struct(shape), feature_spec(struct(shape), bk, key)

    def element(e):
        q_shape, k_shape = (
            (spec.batch, spec.heads, 1, count) for count in (spec.length, spec.keys)
        )
        return {
            "per_head": [sums((*grid.sum_shape, 8, LANES)) for _ in e.scalars],
            "q_scalars": [sums(q_shape, grid.all_queries) for _ in e.q_scalars],
            "k_scalars": [per_key(k_shape) for _ in e.k_scalars],
        }

    def product(y, strip):
        shape = spec.batch, spec.heads, *y.features.shape[2:]
        return {
            "features": per_key(shape) if y.of_keys else sums(shape, grid.all_queries),
            "vectors": sums((*grid.sum_shape, shape[2], strip.strip.line)),
        }

    outs: dict[str, Any] = {
        name: (struct(y.shape, y.dtype), matrix_spec(y, block, index))
        for name, y, block, index in (
            ("q", x.q, bq, grid.finished_query_block),
            ("k", x.k, bk, grid.finished_key_block),
            ("v", x.v, bk, grid.finished_key_block),
        )
    }
    outs["elements"] = [element(e) for e in x.elements]
    outs["products"] = list(map(product, x.products, bands.strips))
    if spec.rules_in_bias:
        outs["line"] = sums((*grid.sum_shape, 1, grid.strip.line))

    def part(n):
        return jax.tree.map(lambda pair: pair[n], outs, is_leaf=lambda y: isinstance(y, tuple))

    return part(0), part(1)


def _scratch_shapes(grid: BackwardGrid, x: Operands, bands: BandInputs) -> dict[str, Any]:
    """Returns the types of scratch memory, by name."""
    spec = grid.spec
    bk, keys = spec.backward.k, grid.accumulated_keys
    column = functools.partial(pltpu.VMEM, (bk, LANES))
    per_key = [[column(jnp.float32) for _ in e.k_scalars] for e in x.elements]
    shapes = {
        "d_q": pltpu.VMEM((spec.length, spec.dim), jnp.float32),
        "d_k": pltpu.VMEM((keys, spec.dim), jnp.float32),
        "d_v": pltpu.VMEM((keys, spec.value_dim), jnp.float32),
        "columns": jax.tree.map(lambda _: column(jnp.int32), x.columns),
        "k_scalars": per_key,
        "d_k_scalars": per_key,
        "steps": bands.columns,
    }
    if x.bias is not None:
        shapes["strip"] = pltpu.VMEM((LANES, grid.strip.width), jnp.float32)
    if spec.rules_in_bias:
        shapes["d_strip"] = pltpu.VMEM((LANES, grid.strip.width), jnp.float32)
    return shapes


def _kernel(
    grid: BackwardGrid,
    bands: tuple[BandStrip, ...],
    schedule_ref: Any,
    prefix_ref: Any,
    refs: dict[str, Any],
    out_refs: dict[str, Any],
    scratch: dict[str, Any],
) -> None:
    """Computes a step of the grid.

    Args:
      grid: the steps.
      bands: the geometry of the products.
      schedule_ref, prefix_ref: the schedule and the prefix lengths, in SMEM.
      refs, out_refs, scratch: blocks of the inputs and outputs, and memory, by name.
    """
    spec = grid.spec
    h, b, g, j, i = (pl.program_id(axis) for axis in range(5))
    entry, t = grid.entry(schedule_ref, b, j, i), j * grid.shape[4] + i
    kind, i, j = entry.kind, entry.column, entry.row
    offset = i * spec.backward.q - j * spec.backward.k
    limit = prefix_ref[b] if spec.prefix else None
    # Sums over all tokens go on through the batch, unless they are written for each row.
    head_starts, head_ends = t == 0, t == grid.tiles - 1
    sums_start, sums_end = head_starts, head_ends
    if not grid.sums_per_row:
        sums_start, sums_end = head_starts & (b == 0), head_ends & (b == spec.batch - 1)
    queries = pl.ds(pl.multiple_of(i * spec.backward.q, LANES), spec.backward.q)
    keys = pl.ds(0, spec.backward.k)
    if grid.sums_per_row:
        keys = pl.ds(pl.multiple_of(j * spec.backward.k, LANES), spec.backward.k)
    step = BackwardStep(grid, bands, refs, out_refs, scratch, h, g, offset, limit, queries, keys)
    pl.when(head_starts)(step.start_head)
    pl.when(sums_start)(step.start_sums)
    pl.when(entry.is_first)(step.start_keys)
    pl.when(entry.is_first & (g == 0))(step.start_key_grads)
    for one_kind in kinds(spec.visibility):
        tile = functools.partial(step.tile, one_kind != PLAIN, one_kind == MASKED)
        pl.when(kind == one_kind)(tile)
    pl.when(entry.is_last)(step.write_key_scalars)
    pl.when(entry.is_last & (g == spec.group - 1))(step.write_key_grads)
    in_last_keys = t >= grid.first_of_last_keys
    pl.when(in_last_keys)(functools.partial(step.write_query_grads, t))
    if spec.rules_in_bias:
        pl.when(sums_end)(step.write_bias_grad)


class _Logits(NamedTuple):
    """The logits of a tile in units of log 2, and the inputs of their cotangents.

    Attributes:
      s: [K, Q].
      slope: the derivative of the softcap, or None.
      bias_lanes: the first lane of the bias in the strip, by 128 keys.
      bands: the slices of the bands, by product.
      pulls: indices and pullbacks of the elements.
      see: `visible`, or None where all pairs are.
    """

    s: jax.Array
    slope: jax.Array | None
    bias_lanes: list[Any]
    bands: list[BandSlices]
    pulls: list[tuple[int, Callable]]
    see: jax.Array | None


@dataclasses.dataclass(frozen=True)
class BackwardStep:
    """A step of the grid: one tile of a query head.

    Attributes:
      grid: all steps.
      bands: the geometry of the products.
      refs, out_refs, scratch: references by name.
      h, g: the key head, and the query head in its group.
      offset: the first query minus the first key of the tile.
      limit: the prefix length, or None.
      queries, keys: the slices of dq, and of dk and dv, in scratch.
    """

    grid: BackwardGrid
    bands: tuple[BandStrip, ...]
    refs: dict[str, Any]
    out_refs: dict[str, Any]
    scratch: dict[str, Any]
    h: Any
    g: Any
    offset: Any
    limit: Any
    queries: Any
    keys: Any

    @property
    def spec(self) -> TPUSpec:
        return self.grid.spec

    @property
    def _may_hide(self) -> bool:
        """Whether rules may add -inf."""
        return self.spec.rules_in_bias or self.spec.pairs or bool(self.refs["elements"])

    def start_head(self) -> None:
        """Sets sums over the keys of a head to zero."""
        self.scratch["d_q"][...] = jnp.zeros((self.spec.length, self.spec.dim), jnp.float32)
        for element in self.out_refs["elements"]:
            for d in element["q_scalars"]:
                d[...] = jnp.zeros((1, self.spec.length), jnp.float32)
        self._zero_features(of_keys=False)

    def start_sums(self) -> None:
        """Sets sums over all tokens to zero, and writes the strip of the bias."""
        for element in self.out_refs["elements"]:
            for d in element["per_head"]:
                d[...] = jnp.zeros((8, LANES), jnp.float32)
        for product in self.out_refs["products"]:
            product["vectors"][...] = jnp.zeros(product["vectors"].shape, jnp.float32)
        strip = self.grid.strip
        if "line" in self.refs:
            shear(strip, self.refs["line"], self.scratch["strip"], rotate=not self.spec.interpret)
        if self.spec.rules_in_bias:
            self.scratch["d_strip"][...] = jnp.zeros((LANES, strip.width), jnp.float32)

    def start_keys(self) -> None:
        """Prepares a block of keys, and sets sums over the queries of a head to zero."""
        refs, scratch = self.refs, self.scratch
        columns = zip(*map(jax.tree.leaves, (refs["columns"], scratch["columns"])), strict=True)
        for row, column in columns:
            column[...] = to_column(row[...])
        for e, element in enumerate(refs["elements"]):
            for n, row in enumerate(element.k_scalars):
                scratch["k_scalars"][e][n][...] = to_column(row[...])
                scratch["d_k_scalars"][e][n][...] = jnp.zeros(
                    (self.spec.backward.k, LANES), jnp.float32
                )
        self._zero_features(of_keys=True)
        for product, columns in zip(refs["products"], scratch["steps"], strict=True):
            for column in columns:
                column[...] = to_column(product["steps"][...])

    def _zero_features(self, of_keys: bool) -> None:
        for band, product in zip(self.bands, self.out_refs["products"], strict=True):
            if band.of_keys == of_keys:
                product["features"][...] = jnp.zeros(product["features"].shape, jnp.float32)

    def start_key_grads(self) -> None:
        """Sets dk and dv of a block of keys to zero."""
        spec, bk = self.spec, self.spec.backward.k
        self.scratch["d_k"][self.keys] = jnp.zeros((bk, spec.dim), jnp.float32)
        self.scratch["d_v"][self.keys] = jnp.zeros((bk, spec.value_dim), jnp.float32)

    def tile(self, ruled: bool, masked: bool) -> None:
        """Adds the cotangents of a tile to all sums."""
        refs, scratch = self.refs, self.scratch
        q, d_out = refs["q"][...], refs["d_out"][...]
        logits = self._logits(q, ruled, masked)
        p = jnp.exp2(logits.s - refs["lse"][...])
        if logits.see is not None:
            # Hidden logits are not masked, and may be infinite or NaN.
            p = jnp.where(logits.see, p, 0.0)
        keep = None
        if "dropped" in refs:
            slots = lanes(scratch["columns"].slots[...], self.spec.backward.q)
            keep = kept_pairs(self.spec, refs["dropped"][...], slots)
        weights = p if keep is None else jnp.where(keep, p, 0.0)

        def add_to_d_v():
            scratch["d_v"][self.keys] += dot(weights.astype(d_out.dtype), d_out)

        if not logits.bands:
            add_to_d_v()
        d_p = dot(refs["v"][...], d_out, (1, 1))
        d_p = d_p if keep is None else jnp.where(keep, d_p, 0.0)
        ds = p * (d_p - refs["delta"][...])
        ds = ds if logits.slope is None else ds * logits.slope
        if ruled and self.spec.rules_in_bias:
            self._add_to_d_strip(ds, logits.bias_lanes)
        for e, pull in logits.pulls:
            self._add_to_scalars(e, *pull(ds))
        ds = ds.astype(q.dtype)
        # The compiler's schedule is shorter with dv here where the tile has products, and with dv
        # above where it has none.
        if logits.bands:
            add_to_d_v()
        d_bands = [band_cotangents(band, ds) for band in self.bands] if logits.bands else []
        scratch["d_k"][self.keys] += dot(ds, q)
        scratch["d_q"][self.queries] += dot(ds, refs["k"][...], (0, 0))
        for n, part in enumerate(logits.bands):
            d = self.out_refs["products"][n]
            d_features = feature_cotangents(d_bands[n], refs["products"][n], part, d["vectors"])
            tokens = slice(None) if self.bands[n].of_keys else self.queries
            d["features"][:, tokens] += d_features

    def _logits(self, q: jax.Array, ruled: bool, masked: bool) -> _Logits:
        refs, scratch = self.refs, self.scratch
        bq, bk = self.spec.backward.q, self.spec.backward.k
        added, bands = [], []
        for band, product, columns in (
            zip(self.bands, refs["products"], scratch["steps"], strict=True) if ruled else ()
        ):
            # Rotations overlap with the matrix products that come after them.
            bands.append(band_slices(band, self.offset, range(bq), range(bk)))
            added.append(band_logits(band, product, columns, bands[-1]))
        s = dot(refs["k"][...], q, (1, 1)) * (self.spec.scale * self.spec.unit)
        bias_lanes = [self.grid.strip.lane(self.offset, r) for r in range(0, bk, LANES)]
        if ruled and "line" in refs:
            parts = s.reshape(-1, LANES, bq)
            s = jnp.concatenate(
                [
                    parts[n] + scratch["strip"][:, pl.ds(lane, bq)]
                    for n, lane in enumerate(bias_lanes)
                ]
            )
        s = sum(added, s)
        q_tokens = k_tokens = TokenScalars()
        if ruled or masked:
            q_tokens = jax.tree.map(lambda y: y[...], refs["rows"])
            k_tokens = jax.tree.map(lambda y: lanes(y[...], bq), scratch["columns"])
        see = None
        if masked:
            see = visible(self.spec, s.shape, 1, self.offset, q_tokens, k_tokens, self.limit)
        for term in refs["pairs"]:
            s = add_pairs(self.spec, s, term, jnp.swapaxes(term.pairs[...], 0, 1), see)
        pulls = []
        for e, element in enumerate(refs["elements"]):
            if not (ruled or element.everywhere):
                continue
            scalars = [y[self.h * self.spec.group + self.g] for y in element.scalars]
            q_scalars = [y[...] for y in element.q_scalars]
            k_scalars = [lanes(y[...], bq) for y in scratch["k_scalars"][e]]
            arrays = scalars, q_scalars, k_scalars
            places = q_tokens.coordinates, k_tokens.coordinates
            term, pull = evaluate(element, s.shape, *arrays, *places)
            if see is not None and element.careful and self.spec.softcap is not None:
                term = jnp.where(see, term, 0.0)
            s += in_units(term, self.spec.unit)
            pulls.append((e, pull))
        slope = None
        if self.spec.softcap is not None:
            bounded = jnp.tanh(s)
            slope = 1.0 - bounded * bounded
            s = soft_cap(self.spec.softcap, s, bounded, ruled and self._may_hide)
        return _Logits(s, slope, bias_lanes, bands, pulls, see)

    def _add_to_d_strip(self, ds: jax.Array, bias_lanes: list[Any]) -> None:
        """Adds the cotangent of the logits to the strip.

        Rows that are 128 apart are added at lanes that are 128 apart.
        """
        bq, bk = self.spec.backward.q, self.spec.backward.k
        parts = ds.reshape(-1, LANES, bq)
        edges = [((0, 0), (bk - (n + 1) * LANES, n * LANES)) for n in range(len(bias_lanes))]
        parts = [jnp.pad(parts[n], edge) for n, edge in enumerate(edges)]
        span = pl.ds(bias_lanes[-1], bq + bk - LANES)
        self.scratch["d_strip"][:, span] += functools.reduce(jnp.add, parts)

    def _add_to_scalars(self, e: int, d_scalars: Any, d_q_scalars: Any, d_k_scalars: Any) -> None:
        """Adds the cotangents of element e on the tile to its sums."""
        out_refs = self.out_refs["elements"][e]
        for out_ref, d in zip(out_refs["per_head"], d_scalars, strict=True):
            # Down to a register of [8, 128]; its numbers are summed outside.
            out_ref[...] += _fold(d.reshape(-1, 8, d.shape[1]).sum(0))
        for out_ref, d in zip(out_refs["q_scalars"], d_q_scalars, strict=True):
            out_ref[:, self.queries] += jnp.sum(d, 0, keepdims=True)
        for acc, d in zip(self.scratch["d_k_scalars"][e], d_k_scalars, strict=True):
            acc[...] += _fold(d)

    def write_key_scalars(self) -> None:
        """Writes the cotangents of the scalars per key of a block."""
        for e, element in enumerate(self.out_refs["elements"]):
            for out_ref, acc in zip(
                element["k_scalars"], self.scratch["d_k_scalars"][e], strict=True
            ):
                out_ref[...] = jnp.sum(jnp.swapaxes(acc[...], 0, 1), 0, keepdims=True)

    def write_key_grads(self) -> None:
        """Writes dk and dv of a block of keys."""
        out_refs, scratch = self.out_refs, self.scratch
        d_k = scratch["d_k"][self.keys] * self.spec.scale
        out_refs["k"][...] = d_k.astype(out_refs["k"].dtype)
        out_refs["v"][...] = scratch["d_v"][self.keys].astype(out_refs["v"].dtype)

    def write_query_grads(self, t: Any) -> None:
        """Writes dq of a block of queries whose last tile is tile t."""
        # The last block of keys has a tile for each block of queries, in their order.
        start = (t - self.grid.first_of_last_keys) * self.spec.backward.q
        done = pl.ds(pl.multiple_of(start, LANES), self.spec.backward.q)
        out_ref = self.out_refs["q"]
        out_ref[...] = (self.scratch["d_q"][done] * self.spec.scale).astype(out_ref.dtype)

    def write_bias_grad(self) -> None:
        """Writes the sums of the strip's diagonals."""
        self.out_refs["line"][...] = jnp.zeros((1, self.grid.strip.line), jnp.float32)
        sum_diagonals(self.grid.strip, self.scratch["d_strip"], self.out_refs["line"])


def _bias_grad(grid: BackwardGrid, x: Operands, d_line: jax.Array | None) -> jax.Array | None:
    """Returns the cotangent of the bias; `d_line` is the line's, [B or 1, N, 1, L]."""
    if x.bias is None:
        return None
    if d_line is None:
        return jnp.zeros_like(x.bias)
    d_line = d_line.sum(0) / grid.spec.unit
    d_line = d_line.sum(0, keepdims=True) if x.bias.shape[0] == 1 else d_line
    line = functools.partial(bias_line, grid.spec, first=x.first, strip=grid.strip, sign=1)
    return jax.linear_transpose(line, x.bias)(d_line)[0]


def _element_grads(element: Element, sums: dict[str, list[jax.Array]]) -> Element:
    """Returns the cotangents of an element from the kernel's sums."""

    def over_group(d, array):
        return d.reshape(*array.shape[:2], -1, *array.shape[2:]).sum(2)

    return dataclasses.replace(
        element,
        scalars=tuple(d.sum((0, 2, 3)) for d in sums["per_head"]),
        q_scalars=tuple(sums["q_scalars"]),
        k_scalars=tuple(map(over_group, sums["k_scalars"], element.k_scalars)),
    )


def _fold(x: jax.Array) -> jax.Array:
    """Sums lanes that are 128 apart: [R, n * 128] to [R, 128]."""
    parts = [x[:, n : n + LANES] for n in range(0, x.shape[1], LANES)]
    return functools.reduce(jnp.add, parts)
