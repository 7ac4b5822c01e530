"""The cotangents of arrays of all pairs, for TPU.

A tile of the cotangent is the sum of the cotangents of the logits over the heads and the rows of
the batch that share it. These are the last axes of the grid, (N or 1, B or 1, blocks of queries,
blocks of keys, heads, rows): the sum stays in VMEM, in float32 and in one order, until the tile is
written. Weights are computed again, on tiles of the forward pass. XLA drops the kernel where no
such cotangent is needed.
"""

import dataclasses
import functools
from typing import Any

import jax
import jax.numpy as jnp
from jax.experimental import pallas as pl
from jax.experimental.pallas import tpu as pltpu

from posenc_jax.engine.terms import AllPairsTerm
from posenc_jax.kernels.kinds import EMPTY, MASKED, PLAIN, kinds
from posenc_jax.kernels.operands import Operands, out_struct
from posenc_jax.kernels.tpu.bands import BandInputs, BandStrip
from posenc_jax.kernels.tpu.block_specs import (
    feature_spec,
    matrix_spec,
    memory_refusal,
    temporary_bytes,
)
from posenc_jax.kernels.tpu.forward import ForwardGrid, ForwardStep, inputs, query_scratch
from posenc_jax.kernels.tpu.spec import TPUSpec
from posenc_jax.kernels.tpu.strip import LANES
from posenc_jax.kernels.tpu.tile import dot, lanes, poison, poisons, to_column


def pair_grads(
    spec: TPUSpec, x: Operands, d_out: jax.Array, lse: jax.Array, delta: jax.Array
) -> tuple[AllPairsTerm, ...]:
    """Returns the cotangents of the arrays of all pairs.

    Args:
      spec: the static part.
      x: the operands, heads first.
      d_out: [B, N, T, V].
      lse, delta: as for `Kernels.run_backward`.
    """

    def grad(term):
        call = _Call.of(spec, x, term, d_out, lse, delta)
        out = out_struct(x.q, term.pairs.shape, term.pairs.dtype)
        d_pairs = pl.pallas_call(
            functools.partial(_kernel, call.grid, tuple(call.bands.strips), term.factor),
            grid_spec=pltpu.PrefetchScalarGridSpec(
                num_scalar_prefetch=2,
                grid=call.grid.shape,
                in_specs=[call.specs],
                out_specs=call.grid.out_spec,
                scratch_shapes=[call.scratch],
            ),
            out_shape=out,
            compiler_params=pltpu.CompilerParams(
                dimension_semantics=("parallel", *("arbitrary",) * 5),
                vmem_limit_bytes=spec.vmem_limit,
            ),
            interpret=spec.interpret,
            name="attention_backward_pairs",
        )(x.schedules[2].reshape(-1), x.prefix, call.arrays)
        return dataclasses.replace(term, pairs=d_pairs)

    return tuple(map(grad, x.pairs))


def pairs_refusal(
    spec: TPUSpec, x: Operands, d_out: jax.Array, lse: jax.Array, delta: jax.Array
) -> str | None:
    """Returns why the kernels need more memory than there is, or None."""
    for term in x.pairs:
        call = _Call.of(spec, x, term, d_out, lse, delta)
        arrays, specs = (call.arrays, term.pairs), (call.specs, call.grid.out_spec)
        sizes = f"the cotangent of a bias of {spec.length} x {spec.keys} pairs, H = {spec.dim}"
        scalars = x.schedules[2], x.prefix, [e.scalars for e in x.elements]
        temporary = temporary_bytes(spec, x, spec.forward)
        memory = call.scratch, arrays, specs, scalars, temporary
        if (reason := memory_refusal(sizes, spec.vmem_limit, *memory)) is not None:
            return reason
    return None


@dataclasses.dataclass(frozen=True)
class _Grid(ForwardGrid):
    """The steps of a kernel, and the blocks of the arrays at each step.

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


@dataclasses.dataclass(frozen=True)
class _Call:
    """A kernel's grid, its inputs and their blocks, and its scratch memory."""

    grid: _Grid
    bands: BandInputs
    arrays: dict[str, Any]
    specs: dict[str, Any]
    scratch: dict[str, Any]

    @classmethod
    def of(
        cls,
        spec: TPUSpec,
        x: Operands,
        term: AllPairsTerm,
        d_out: jax.Array,
        lse: jax.Array,
        delta: jax.Array,
    ) -> "_Call":
        """Returns the call for one of the arrays."""
        rows, heads, length, keys = term.pairs.shape
        tiles = pl.cdiv(length, spec.forward.q), pl.cdiv(keys, spec.forward.k)
        grid = _Grid(spec, x.schedules[2].shape[0] == 1, heads, rows, tiles)
        bands = grid.band_inputs(x)
        arrays, specs = inputs(grid, x, bands)
        arrays["d_out"] = d_out
        specs["d_out"] = matrix_spec(d_out, spec.forward.q, grid.query_block)
        scratch = query_scratch(grid, x, bands)
        scratch["acc"] = pltpu.VMEM((spec.forward.q, spec.forward.k), jnp.float32)
        for name, y in (("lse", lse), ("delta", delta)):
            arrays[name] = y[:, :, None]
            specs[name] = feature_spec(arrays[name], spec.forward.q, grid.query_block)
            scratch[name] = pltpu.VMEM((spec.forward.q, LANES), jnp.float32)
        return cls(grid, bands, arrays, specs, scratch)


def _kernel(
    grid: _Grid,
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
    step = _Step(grid, bands, refs, scratch, h, offset, limit)
    if poisons():
        starts = (row == 0) & (i == 0) & (j == 0) & (g == 0) & (r == 0)
        pl.when(starts)(functools.partial(poison, scratch))

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


class _Step(ForwardStep):
    """A step of the grid: one tile of a query head."""

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
