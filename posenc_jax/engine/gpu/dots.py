"""Vectors of tokens, dot a vector per distance: Shaw's keys, Inkling, Transformer-XL, DeBERTa.

A warpgroup has 64 queries and 64 keys of a tile. Its own tokens, those with the features, against
the vectors of all distances between the two are one matrix product,

    band[own, x] = feature[own] . vector[x]             x = 64 + query - key

of which each own token needs 64 distances in a row, all different modulo 64. The two halves of
the band therefore are one matrix, `turned[own, x % 64]`, which goes to shared memory, and each
pair reads the number at its distance. Cotangents go back the same way: those of the logits go to
shared memory, are read by own token and distance modulo 64, and multiplied, as two halves, with
the vectors or the features.

Features, vectors and the cotangents are float16 here, whatever q is, in units of powers of two: it
has 11 binary digits, bfloat16 8.
"""

import dataclasses
import functools
from collections.abc import Callable, Iterator
from typing import Any

import jax
import jax.numpy as jnp
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu

from posenc_jax.engine.blocks import Blocks
from posenc_jax.engine.gpu.dot_arrays import COLUMNS, balance_of, line_maker, widened
from posenc_jax.engine.gpu.gather import PITCH, gather, meet, places, store, unknown_zero
from posenc_jax.engine.gpu.pipe import COMPUTE, matrix, operand, pipe, product, vector
from posenc_jax.engine.gpu.spec import ROWS, Spec, after, has_rules
from posenc_jax.engine.gpu.tile import Tile, products
from posenc_jax.engine.kernels import padded
from posenc_jax.engine.operands import Operands

_AT_ONCE = 32  # Distances of a half of a band; more take registers that there are not.


@dataclasses.dataclass(frozen=True)
class Dot:
    """The static part of a product.

    Attributes:
      number: which of the products it is.
      of_keys: whether own tokens are keys.
      q_axis: the axis of the queries in tiles.
      interpret: as for `gather`.
    """

    number: int
    of_keys: bool
    q_axis: int
    interpret: Any

    @property
    def features(self) -> str:
        """The name of the features."""
        return f"features{self.number}"

    @property
    def vectors(self) -> str:
        """The name of the vectors."""
        return f"vectors{self.number}"

    @property
    def own(self) -> int:
        """The axis of own tokens in tiles."""
        return 1 - self.q_axis if self.of_keys else self.q_axis

    def turn(self, features: Any, vectors: Any, turned: Any) -> None:
        """Writes float32 [64, 64], of own tokens and distances modulo 64.

        Args:
          features: reference [64, F].
          vectors: reference [128, F].
          turned: reference to what is written.
        """
        meet(self.interpret)
        for start in range(0, ROWS, _AT_ONCE):
            parts = (vectors.at[pl.ds(start + n, _AT_ONCE)] for n in (0, ROWS))
            shape = ROWS, _AT_ONCE
            lower, upper = products(shape, *((features, part) for part in parts))
            found = jnp.where(self._upper(*places(shape, self.interpret), start), upper, lower)
            store(turned, found, start, self.interpret)
        meet(self.interpret)

    def added(self, turned: Any) -> jax.Array:
        """Returns what is added to the logits of a tile, of a reference to `turned`."""

        def index(*at):
            return at[self.own], (at[self.q_axis] - at[1 - self.q_axis]) & (ROWS - 1)

        return gather(turned, (ROWS, ROWS), index, self.interpret)

    def halves(self, ds: Any, own: int) -> tuple[jax.Array, jax.Array]:
        """Returns the cotangents of the lower and the upper half of the band.

        Args:
          ds: reference to the cotangent of the logits.
          own: the axis of own tokens in the results.
        """

        def index(*at):
            token, x = at[own], at[1 - own]
            other = (token + x if self.of_keys else token - x) & (ROWS - 1)
            return (token, other) if self.own == 0 else (other, token)

        d_turned = gather(ds, (ROWS, ROWS), index, self.interpret)
        at = places((ROWS, ROWS), self.interpret)
        upper = self._upper(at[own], at[1 - own])
        return jnp.where(upper, 0.0, d_turned), jnp.where(upper, d_turned, 0.0)

    def _upper(self, own: jax.Array, x: jax.Array, first: int = 0) -> jax.Array:
        """Returns where `turned` has numbers of the upper half of the band."""
        return own + x < ROWS - first if self.of_keys else x + first <= own


@dataclasses.dataclass(frozen=True)
class Dots:
    """The products of a kernel.

    Attributes:
      spec, x: the problem.
      blocks: queries and keys per tile.
      q_axis: the axis of the queries in tiles.
      stay: whether a block of threads keeps its rows, so that features of theirs stay.
    """

    spec: Spec
    x: Operands
    blocks: Blocks
    q_axis: int
    stay: bool = True

    def __iter__(self) -> Iterator[Dot]:
        for n, of in enumerate(self.x.products):
            yield Dot(n, of.of_keys, self.q_axis, self.spec.interpret)

    @property
    def dtype(self) -> Any:
        """The dtype of features, vectors and their cotangents."""
        return jnp.float32 if self.x.q.dtype == jnp.float32 else jnp.float16

    @property
    def of_rows(self) -> list[Dot]:
        """Those whose own tokens are rows."""
        return [dot for dot in self if dot.own == 0]

    @property
    def given(self) -> dict[str, jax.Array]:
        """What the kernel reads: features [B, N or K, T or S, F], vectors [N or 1, L, F]."""
        made = {}
        for dot, of in zip(self, self.x.products, strict=True):
            balance = balance_of(of)
            vectors = line_maker(self.spec, self.x.first, self.blocks)(of.vectors)
            features = jnp.swapaxes(of.features, 2, 3).astype(jnp.float32)
            made[dot.features] = widened(features / balance, self.dtype)
            made[dot.vectors] = widened(vectors * (self.spec.unit * balance), self.dtype)
        return made

    def scratch(self, slots: int) -> dict[str, Any]:
        """Returns what is allocated; `slots` of what comes with tiles."""
        if not self.x.products:
            return {}
        spec, dtype, sizes = self.spec, self.dtype, (self.blocks.q, self.blocks.k)
        rows, moving = {}, {}
        for dot in self:
            width = self.width(dot)
            moving[dot.vectors] = sum(sizes), width
            if self._stays(dot):
                rows[dot.features] = matrix(spec, COMPUTE, ROWS, width, dtype=dtype)
            else:
                moving[dot.features] = sizes[dot.of_keys], width
        turned = vector(COMPUTE, len(self.x.products), ROWS, PITCH)
        if spec.interpret:
            rows["halves"] = operand(ROWS, dtype)
        return rows | {"dots": pipe(spec, slots, dtype, **moving), "turned": turned}

    @property
    def totals(self) -> list[Any]:
        """The accumulators of cotangents of `of_rows`."""
        return [plgpu.ACC((ROWS, self.width(dot)), jnp.float32) for dot in self.of_rows]

    @property
    def grads(self) -> list[Any]:
        """The types of the cotangents of `of_rows`, float32 [B, N or K, T or S, F]."""
        tokens = self.spec.length if self.q_axis == 0 else self.spec.keys
        heads = self.spec.heads if self.q_axis == 0 else self.spec.kv_heads
        return [
            self.spec.struct(self.x, (self.spec.batch, heads, tokens, self.width(dot)), jnp.float32)
            for dot in self.of_rows
        ]

    def width(self, dot: Dot) -> int:
        """Returns how many numbers a vector of a product has here."""
        return padded(self.x.products[dot.number].features.shape[2], COLUMNS)

    @property
    def staying(self) -> list[Dot]:
        """Those of which a block of threads reads the features once, its rows."""
        return [dot for dot in self if self._stays(dot)]

    def _stays(self, dot: Dot) -> bool:
        return self.stay and dot.own == 0

    def copy_rows(self, own: Any, kept: Any, b: Any, head: Any, start: Any, warpgroup: Any) -> None:
        """Copies the features of a warpgroup's rows, from `start` on, with barrier "ready"."""
        ready = kept["ready"].at[warpgroup]
        for dot in self.staying:
            features = self._features(own, dot, b, head, start, ROWS)
            plgpu.copy_gmem_to_smem(features, kept[dot.features].at[warpgroup], ready)

    def fill(
        self,
        own: Any,
        kept: Any,
        step: Any,
        kind: Any,
        b: Any,
        head: Any,
        line: Any,
        first: tuple[Any, Any],
    ) -> Any:
        """Copies what comes with a tile, and returns the next step.

        Args:
          own, kept: of the kernel.
          step: how many tiles before this one have rules.
          kind: of the tile.
          b, head: row of the batch and query head.
          line: where its vectors start.
          first: its first query and its first key.
        """
        if not self.x.products:
            return step
        sizes, sources = (self.blocks.q, self.blocks.k), {}
        for dot in self:
            vectors = self.spec.line_of(own["dots"][dot.vectors], head)
            sources[dot.vectors] = vectors.at[pl.ds(line, sum(sizes))]
            if not self._stays(dot):
                start, count = first[dot.of_keys], sizes[dot.of_keys]
                sources[dot.features] = self._features(own, dot, b, head, start, count)
        ruled = has_rules(self.spec, kind)
        pl.when(ruled)(lambda: kept["dots"].fill(step, **sources))
        return after(step, ruled)

    def _features(self, own: Any, dot: Dot, b: Any, head: Any, start: Any, count: int) -> Any:
        y = own["dots"][dot.features]
        return y.at[b, head // (self.spec.heads // y.shape[1]), pl.ds(start, count)]

    def turn(self, tile: Tile, kept: Any, warpgroup: Any, step: Any) -> None:
        """Writes `turned` of every product, if the tile has rules."""
        if not self.x.products:
            return

        @pl.when(tile.ruled)
        def _():
            kept["dots"].wait(step)
            for dot in self:
                turned = kept["turned"].at[warpgroup, dot.number]
                dot.turn(*self._part(kept, warpgroup, step, dot), turned)

    def release(self, tile: Tile, kept: Any, step: Any) -> Any:
        """Gives back what came with the tile, and returns the next step."""
        if self.x.products:
            pl.when(tile.ruled)(lambda: kept["dots"].release(step))
        return after(step, tile.ruled)

    def added(self, kept: Any, warpgroup: Any) -> tuple[Callable[[], jax.Array], ...]:
        """Returns functions that return what each product adds to a tile, after `turn`."""
        return tuple(
            functools.partial(dot.added, kept["turned"].at[warpgroup, dot.number]) for dot in self
        )

    def pull(
        self, totals: Any, ds: jax.Array, tile: Tile, kept: Any, warpgroup: Any, step: Any
    ) -> None:
        """Adds to totals [64, F] the cotangents of the rows' features, if the tile has rules.

        Args:
          totals: accumulators of the products `of_rows`.
          ds: cotangent of the logits.
          tile, kept, warpgroup, step: as for `turn`.
        """
        if not totals:
            return

        @pl.when(tile.ruled)
        def _():
            written = self._write(ds, kept, warpgroup)
            for dot, total in zip(self.of_rows, totals, strict=True):
                _, vectors = self._part(kept, warpgroup, step, dot)
                for n, half in enumerate(dot.halves(written, 0)):
                    part = vectors.at[pl.ds(n * ROWS, ROWS)]
                    self._product(total, half, part, kept, warpgroup)
            plgpu.wgmma_wait(0)

    def pull_vectors(
        self, dot: Dot, totals: Any, ds: jax.Array, kept: Any, warpgroup: Any, step: Any
    ) -> None:
        """Adds to totals [64, F], of both halves, the cotangents of the vectors of a product."""
        written = self._write(ds, kept, warpgroup)
        features, _ = self._part(kept, warpgroup, step, dot)
        for total, half in zip(totals, dot.halves(written, 1), strict=True):
            self._product(total, half, features, kept, warpgroup)
        plgpu.wgmma_wait(0)

    def _write(self, ds: jax.Array, kept: Any, warpgroup: Any) -> Any:
        """Writes the cotangent of the logits where `turned` was, and returns a reference."""
        written = kept["turned"].at[warpgroup, 0]
        meet(self.spec.interpret)
        store(written, ds, 0, self.spec.interpret)
        meet(self.spec.interpret)
        return written

    def _product(self, total: Any, half: jax.Array, by: Any, kept: Any, warpgroup: Any) -> None:
        product(total, half.astype(self.dtype), by, kept.get("halves"), warpgroup)

    def _part(self, kept: Any, warpgroup: Any, step: Any, dot: Dot) -> tuple[Any, Any]:
        """Returns references to a warpgroup's features, [64, F], and vectors, [128, F]."""
        blocks = kept["dots"].blocks(step)
        before = pl.multiple_of(warpgroup * ROWS, ROWS)
        if self._stays(dot):
            zero = unknown_zero(self.spec.interpret)
            features = kept[dot.features].at[warpgroup + zero]
        else:
            features = blocks[dot.features]
            features = features.at[pl.ds(before, ROWS)] if dot.own == 0 else features
        # The second warpgroup has greater distances where rows are queries, else lesser ones.
        first = before if self.q_axis == 0 else pl.multiple_of(ROWS - before, ROWS)
        return features, blocks[dot.vectors].at[pl.ds(first, 2 * ROWS)]
