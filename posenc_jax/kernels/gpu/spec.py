"""The static part of a problem for GPUs, and the list of tiles of each kernel.

Two warpgroups compute, 64 rows of a tile each. A third copies, or the second one does (`pipe`).
"""

import dataclasses
from typing import Any

import jax
import jax.numpy as jnp
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu

from posenc_jax.engine.blocks import Blocks
from posenc_jax.engine.mask import MASK_VALUE
from posenc_jax.engine.problem import pad_axis
from posenc_jax.kernels.operands import EMPTY, PLAIN, Hiding, Operands, Spec, kinds, tile_kinds

ROWS = 64
"""Rows of a warpgroup."""

TILE = plgpu.Layout.WGMMA
ROW, COLUMN = TILE.reduce(1), TILE.reduce(0)
"""Layouts of a tile, and of a number per row and per column of it."""

_KIND = 2  # Bits of an entry.

Int = int | jax.Array
"""An integer, traced or not."""

Ref = Any
"""A reference to memory or barriers, or to a part of them: the type of Pallas is private."""


@dataclasses.dataclass(frozen=True)
class GPUSpec(Spec):
    """The static part of a problem; `backward` are the tiles of dq and of the bias.

    Attributes:
      moves_registers: whether a warpgroup can hand its registers to others, by `setmaxnreg`.
    """

    moves_registers: bool

    def line_of(self, line: Ref, head: Int) -> Ref:
        """Returns the line of a head, of a reference to `line`."""
        return line.at[head if line.shape[0] > 1 else 0]

    @property
    def by_key(self) -> Blocks:
        """Queries and keys per tile of dk and dv."""
        return Blocks(self.backward.k, 2 * ROWS)

    @property
    def wide(self) -> bool:
        """Whether heads have more than 128 numbers, for which tiles are smaller."""
        return max(self.dim, self.value_dim) > 128

    @property
    def offsets(self) -> range:
        """First query minus first key of the tiles of the bias."""
        low, high = self.reach(self.backward)
        return range(low, high + 1, self.backward.k)

    def schedules(self, q: Any, k: Any, hiding: Hiding) -> tuple[Any, ...]:
        """Returns `tiles` by queries, for the output and for dq, by keys, and by distance.

        The last entry is the kinds of tiles, if there are arrays of all pairs.
        """
        kinds_of_passes = [
            tile_kinds(self.visibility, q, k, hiding, blocks)
            for blocks in (self.forward, self.backward, self.by_key)
        ]
        forward, backward, by_key = kinds_of_passes
        lists = [tiles(x) for x in (forward, backward, jnp.swapaxes(by_key, 1, 2))]
        of_pairs = backward if self.pairs else None
        if not (self.rules_in_bias or self.products):
            return *lists, None, of_pairs
        # By distance, tiles with rules alone: the offset and the block of queries give the block
        # of keys.
        q_blocks, k_blocks = backward.shape[1:]
        i = jnp.arange(q_blocks, dtype=jnp.int32)
        offset = jnp.asarray(self.offsets, jnp.int32)[:, None]
        j = (i[None] * self.backward.q - offset) // self.backward.k
        inside = (j >= 0) & (j < k_blocks)
        kind = backward[:, i[None], jnp.clip(j, 0, k_blocks - 1)]
        by_distance = tiles(jnp.where(inside[None] & (kind != PLAIN), kind, EMPTY))
        return *lists, by_distance, of_pairs

    def pair_array(self, x: jax.Array) -> jax.Array:
        """Returns an array of all pairs in whole tiles: copies need rows of 16 bytes."""
        return pad_axis(pad_axis(x, 2, self.length), 3, self.keys)


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class Cotangents:
    """Inputs of the backward kernels that are not operands: arrays, or references to them.

    Attributes:
      d_out: [B, T, N, V].
      lse: float32 [B, N, T], in units of log 2.
      delta: float32 [B, N, T].
      scale: float32 [1], of cotangents of logits in products of vectors, or None.
    """

    d_out: Any
    lse: Any
    delta: Any
    scale: Any

    def rows(self, b: Int, head: Int, start: Int) -> list[jax.Array]:
        """Returns lse and delta of a warpgroup's rows, [64], of references."""
        return [load(y.at[b, head, pl.ds(start, ROWS)], ROW) for y in (self.lse, self.delta)]


def load(ref: Ref, layout: Any) -> jax.Array:
    """Returns an array in registers, read from global or shared memory."""
    read: Any = plgpu.load  # Before jax 0.11 it has another argument.
    return read(ref, layout=layout, optimized=False)


def tiles(kinds: jax.Array) -> tuple[jax.Array, jax.Array]:
    """Returns the tiles of every row that are not empty, and their number.

    Args:
      kinds: int32 [B or 1, rows, columns].

    Returns:
      int32 [B or 1, rows, columns], columns and kinds in order, then arbitrary entries; and
      int32 [B or 1, rows].
    """
    column = jax.lax.broadcasted_iota(jnp.int32, kinds.shape, 2)
    live = kinds != EMPTY
    # Live ones first and, as the sort is stable, in order: sums have one order in every run.
    order = jnp.argsort(~live, axis=2, stable=True)
    entries = jnp.take_along_axis((column << _KIND) + kinds, order, 2)
    return entries, live.sum(2, dtype=jnp.int32)


def column_of(entry: jax.Array) -> jax.Array:
    """Returns the column of an entry of `tiles`."""
    return entry >> _KIND


def kind_of(entry: jax.Array) -> jax.Array:
    """Returns the kind of an entry of `tiles`."""
    return entry & ((1 << _KIND) - 1)


def has_rules(spec: GPUSpec, kind: jax.Array) -> bool | jax.Array:
    """Returns whether a tile has rules; True if every tile does."""
    return kind != PLAIN if PLAIN in kinds(spec.visibility) else True


def next_step(step: Int, ruled: bool | jax.Array) -> Int:
    """Returns the number of tiles with rules after this one; `step` is that before it."""
    return step + (1 if isinstance(ruled, bool) else ruled.astype(jnp.int32))


def line(
    spec: GPUSpec, values: jax.Array, first: int, blocks: Blocks, fill: float = 0.0
) -> jax.Array:
    """Returns scalars or vectors by distance, [N or 1, L, ...], from the least of a tile on.

    Args:
      spec: the static part.
      values: [N or 1, R, ...], from distance `first` on.
      first: the least distance.
      blocks: queries and keys per tile.
      fill: the value at other distances.
    """
    # Pairs of a tile are up to blocks.k - 1 below the distance of its first pair, and up to
    # blocks.q - 1 above.
    low, high = spec.reach(blocks)
    before = first - (low - blocks.k)
    after = high - low + blocks.q + blocks.k - before - values.shape[1]
    pad = (0, 0, 0), (before, after, 0), *[(0, 0, 0)] * (values.ndim - 2)
    return jax.lax.pad(values, jnp.float32(fill), pad)


def bias_line(spec: GPUSpec, bias: jax.Array, first: int, blocks: Blocks) -> jax.Array:
    """Returns the `line` of the bias, [N or 1, L]."""
    fill = MASK_VALUE if spec.visibility.mask_in_bias else 0.0
    return line(spec, bias, first, blocks, fill)


def direct_operands(x: Operands) -> Operands:
    """Returns the operands that kernels read as they are."""
    return dataclasses.replace(x, bias=None, schedules=(), products=(), dropped=None)
