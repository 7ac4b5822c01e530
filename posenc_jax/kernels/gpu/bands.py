"""Vectors of tokens, dot a vector per distance: Shaw's keys, Inkling, Transformer-XL, DeBERTa.

A warpgroup has 64 queries and 64 keys of a tile. The product of the tokens with features and the
vectors of all distances between the two is a band,

    band[token, x] = feature[token] . vector[x]             x = 64 + query - key

Each token needs 64 distances in a row, all different modulo 64. The two halves of the band
therefore are one matrix, `unskewed[token, x % 64]`, which goes to shared memory, and each pair
reads the number at its distance. Cotangents go back the same way: the cotangent of the logits goes
to shared memory, is read by token and distance modulo 64, and multiplied, as two halves, with the
vectors or the features.

Features, vectors and the cotangents are float16 here, whatever the dtype of q, in units of powers
of two: float16 has 11 binary digits, bfloat16 8.
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
from posenc_jax.kernels.base import padded
from posenc_jax.kernels.gpu.gather import (
    PITCH,
    gather,
    indices,
    opaque_zero,
    store,
    warpgroup_barrier,
)
from posenc_jax.kernels.gpu.pipe import COMPUTE, Warpgroup, matrix, operand, pipe, vector
from posenc_jax.kernels.gpu.spec import ROWS, GPUSpec, Int, Ref, has_rules, line, next_step
from posenc_jax.kernels.gpu.tile import Tile, products
from posenc_jax.kernels.operands import Operands, Product, out_struct

COLUMNS = 32
"""Vectors are padded to a multiple of 32 numbers, rows of shared memory."""
_ROOM = 226_000  # Bytes of shared memory without scalars per token.


def fits(dim: int, value_dim: int, counts: list[int]) -> bool:
    """Whether shared memory has room for products with vectors of `counts` numbers."""
    width = sum(padded(n, COLUMNS) for n in counts)
    tile = 3 * ROWS  # Rows and columns, and distances.
    halves = tile * (dim + value_dim + width) + 2 * ROWS * width
    floats = 2 * ROWS * PITCH * len(counts)
    return 2 * halves + 4 * floats <= _ROOM


def d_logits_scale(x: Operands, d_out: jax.Array, delta: jax.Array) -> jax.Array:
    """Returns a power of two, float32 [1], that scales cotangents of logits to float16's range."""

    def largest(y):
        norms = jnp.linalg.norm(y.astype(jnp.float32), axis=-1)
        return jnp.max(jnp.where(jnp.isfinite(norms), norms, 0.0))

    # A cotangent is p (d_p - delta), and p is at most 1.
    bound = largest(d_out) * largest(x.v) + largest(delta[..., None])
    # The bound becomes less than 2 ** 15, where float16 ends at 65,504.
    exponent = jnp.minimum(15 - jnp.frexp(bound)[1], 126)
    return jnp.ldexp(jnp.float32(1.0), exponent)[None]


def feature_grads(
    spec: GPUSpec, product: Product, d_features: jax.Array, scale: jax.Array
) -> jax.Array:
    """Returns the cotangent of features from the kernels' sums, [B, N or K, T or S, F]."""
    shape = product.features.shape
    # The kernels summed scaled cotangents times the vectors of `Bands.inputs`.
    factor = spec.unit * scale[0] * balance_of(product)
    d = jnp.swapaxes(d_features[..., : shape[2]], 2, 3) / factor
    # Query heads that share features are neighbours.
    d = d.reshape(*shape[:2], -1, *d.shape[2:]).sum(2)
    return d.astype(product.features.dtype)


def sum_bands(
    spec: GPUSpec, x: Operands, product: Product, d_bands: jax.Array, scale: jax.Array
) -> jax.Array:
    """Returns the cotangent of the vectors of a product.

    Args:
      spec: the static part.
      x: the operands.
      product: one of their products.
      d_bands: float32 [N, offsets, 2, 2, 64, F], of `spec.offsets`, warpgroups and halves.
      scale: of cotangents of logits.
    """
    # One offset, warpgroup or half more are distances that are 64 greater.
    heads, offsets, *_, width = d_bands.shape
    parts = d_bands.reshape(heads, offsets, 4, ROWS, width)
    shifted = (
        jnp.pad(parts[:, :, n], ((0, 0), (shift, 2 - shift), (0, 0), (0, 0)))
        for n, shift in enumerate((0, 1, 1, 2))
    )
    d_line = functools.reduce(jnp.add, shifted).reshape(heads, -1, width)
    d_line = d_line[..., : product.features.shape[2]] * (balance_of(product) / scale[0])
    d_line = d_line.sum(0, keepdims=True) if product.vectors.shape[0] == 1 else d_line
    to_line = line_maker(spec, x.first, spec.backward)
    return jax.linear_transpose(to_line, product.vectors)(d_line)[0]


def line_maker(spec: GPUSpec, first: int, blocks: Blocks) -> Callable[[jax.Array], jax.Array]:
    """Returns the function from vectors, [N or 1, F, R], to their line, [N or 1, L, F]."""
    return lambda vectors: line(spec, jnp.swapaxes(vectors, 1, 2), first, blocks)


def balance_of(product: Product) -> jax.Array:
    """Returns the power of two that divides features and multiplies vectors.

    The largest numbers of both are then about equal, and in the range of float16.
    """

    def exponent(y):
        y = jnp.abs(y.astype(jnp.float32))
        return jnp.frexp(jnp.max(jnp.where(jnp.isfinite(y), y, 0.0)))[1]

    return jnp.ldexp(
        jnp.float32(1.0), (exponent(product.features) - exponent(product.vectors)) // 2
    )


def widened(y: jax.Array, dtype: Any) -> jax.Array:
    """Pads vectors with zeros to whole rows of shared memory."""
    return jnp.pad(y.astype(dtype), [(0, 0)] * (y.ndim - 1) + [(0, -y.shape[-1] % COLUMNS)])


_CHUNK = 32  # Distances of a half of a band at once: there are no registers for more.


@dataclasses.dataclass(frozen=True)
class Band:
    """The bands of a product.

    Attributes:
      number: the index of the product.
      of_keys: whether keys have the features.
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
    def axis(self) -> int:
        """The axis of the tokens with features in tiles."""
        return 1 - self.q_axis if self.of_keys else self.q_axis

    def write_unskewed(self, features: Ref, vectors: Ref, unskewed: Ref) -> None:
        """Writes float32 [64, 64], by token and distance modulo 64.

        Args:
          features: [64, F].
          vectors: [128, F].
          unskewed: the destination.
        """
        # All threads must have read the band before this one; after the loop, all have written.
        warpgroup_barrier(self.interpret)
        for start in range(0, ROWS, _CHUNK):
            parts = (vectors.at[pl.ds(start + n, _CHUNK)] for n in (0, ROWS))
            shape = ROWS, _CHUNK
            lower, upper = products(shape, *((features, part) for part in parts))
            is_upper = self._is_upper(*indices(shape, self.interpret), start)
            store(unskewed, jnp.where(is_upper, upper, lower), start, self.interpret)
        warpgroup_barrier(self.interpret)

    def logits(self, unskewed: Ref) -> jax.Array:
        """Returns the logits that the product adds to a tile."""

        def index(*place):
            # The last bits are the distance modulo 64, of negative ones too.
            distance = place[self.q_axis] - place[1 - self.q_axis]
            return place[self.axis], distance & (ROWS - 1)

        return gather(unskewed, (ROWS, ROWS), index, self.interpret)

    def half_cotangents(self, ds: Ref, axis: int) -> tuple[jax.Array, jax.Array]:
        """Returns the cotangents of the lower and the upper half of the band.

        Args:
          ds: the cotangent of the logits.
          axis: the axis of the tokens with features in the results.
        """

        def index(*place):
            # x = 64 + query - key, solved for the other token modulo 64.
            token, x = place[axis], place[1 - axis]
            other = (token + x if self.of_keys else token - x) & (ROWS - 1)
            return (token, other) if self.axis == 0 else (other, token)

        d_unskewed = gather(ds, (ROWS, ROWS), index, self.interpret)
        place = indices((ROWS, ROWS), self.interpret)
        upper = self._is_upper(place[axis], place[1 - axis])
        return jnp.where(upper, 0.0, d_unskewed), jnp.where(upper, d_unskewed, 0.0)

    def _is_upper(self, token: jax.Array, x: jax.Array, first: int = 0) -> jax.Array:
        """Returns whether elements of `unskewed` are of the upper half of the band."""
        # With keys 0 .. 63, query t has x = 1 + t .. 64 + t, the upper half from 64 on: after the
        # remainder, 0 .. t. With queries 0 .. 63, key t has 0 .. 63 - t there.
        return token + x < ROWS - first if self.of_keys else x + first <= token


@dataclasses.dataclass(frozen=True)
class Bands:
    """The products of a kernel.

    Attributes:
      spec: the static part.
      x: the operands.
      blocks: queries and keys per tile.
      q_axis: the axis of the queries in tiles.
      keep_rows: whether a block of threads keeps its rows, so that their features are read once.
    """

    spec: GPUSpec
    x: Operands
    blocks: Blocks
    q_axis: int
    keep_rows: bool = True

    def __iter__(self) -> Iterator[Band]:
        for n, product in enumerate(self.x.products):
            yield Band(n, product.of_keys, self.q_axis, self.spec.interpret)

    @property
    def dtype(self) -> Any:
        """The dtype of features, vectors and their cotangents."""
        return jnp.float32 if self.x.q.dtype == jnp.float32 else jnp.float16

    @property
    def of_rows(self) -> list[Band]:
        """The bands whose tokens with features are rows."""
        return [band for band in self if band.axis == 0]

    @property
    def inputs(self) -> dict[str, jax.Array]:
        """Features [B, N or K, T or S, F] and vectors [N or 1, L, F], by name."""
        arrays = {}
        for band, product in zip(self, self.x.products, strict=True):
            balance = balance_of(product)
            vectors = line_maker(self.spec, self.x.first, self.blocks)(product.vectors)
            features = jnp.swapaxes(product.features, 2, 3).astype(jnp.float32)
            arrays[band.features] = widened(features / balance, self.dtype)
            arrays[band.vectors] = widened(vectors * (self.spec.unit * balance), self.dtype)
        return arrays

    def scratch_types(self, slots: int) -> dict[str, Any]:
        """Returns scratch types by name, with `slots` slots of the blocks that change by tile."""
        if not self.x.products:
            return {}
        spec, dtype, sizes = self.spec, self.dtype, (self.blocks.q, self.blocks.k)
        resident, piped = {}, {}
        for band in self:
            width = self.width(band)
            piped[band.vectors] = sum(sizes), width
            if self._is_resident(band):
                resident[band.features] = matrix(spec, COMPUTE, ROWS, width, dtype=dtype)
            else:
                piped[band.features] = sizes[band.of_keys], width
        unskewed = vector(COMPUTE, len(self.x.products), ROWS, PITCH)
        if spec.interpret:
            resident["halves"] = operand(ROWS, dtype)
        return resident | {"distances": pipe(spec, slots, dtype, **piped), "unskewed": unskewed}

    @property
    def accumulators(self) -> list[Any]:
        """The types of the accumulators of cotangents of the features of rows."""
        return [plgpu.ACC((ROWS, self.width(band)), jnp.float32) for band in self.of_rows]

    @property
    def out_types(self) -> list[Any]:
        """The types of the cotangents of the features of rows, float32 [B, N or K, T or S, F]."""
        spec = self.spec
        shape = spec.batch, spec.kv_heads, spec.keys
        if self.q_axis == 0:
            shape = spec.batch, spec.heads, spec.length
        return [out_struct(self.x.q, (*shape, self.width(band))) for band in self.of_rows]

    def width(self, band: Band) -> int:
        """Returns the padded number of elements of a vector."""
        return padded(self.x.products[band.number].features.shape[2], COLUMNS)

    @property
    def resident(self) -> list[Band]:
        """The bands whose features a block of threads reads once, for its rows."""
        return [band for band in self if self._is_resident(band)]

    def _is_resident(self, band: Band) -> bool:
        return self.keep_rows and band.axis == 0

    def copy_rows(self, wg: Warpgroup, b: Int, head: Int, start: Int) -> None:
        """Copies the features of a warpgroup's rows, from `start` on, with barrier "ready"."""
        for band in self.resident:
            features = self._features(wg, band, b, head, start, ROWS)
            plgpu.copy_gmem_to_smem(features, wg.part(band.features), wg.part("ready"))

    def fill(
        self,
        wg: Warpgroup,
        step: Int,
        kind: jax.Array,
        b: Int,
        head: Int,
        line: Int,
        first: tuple[Int, Int],
    ) -> Int:
        """Copies the features and vectors of a tile, and returns the next step.

        Args:
          wg: the copying warpgroup.
          step: the number of tiles with rules before this one.
          kind: of the tile.
          b, head: row of the batch and query head.
          line: the start of its vectors.
          first: its first query and its first key.
        """
        if not self.x.products:
            return step
        sizes, sources = (self.blocks.q, self.blocks.k), {}
        for band in self:
            vectors = self.spec.line_of(wg.refs["distances"][band.vectors], head)
            sources[band.vectors] = vectors.at[pl.ds(line, sum(sizes))]
            if not self._is_resident(band):
                start, count = first[band.of_keys], sizes[band.of_keys]
                sources[band.features] = self._features(wg, band, b, head, start, count)
        ruled = has_rules(self.spec, kind)
        pl.when(ruled)(lambda: wg.scratch["distances"].fill(step, **sources))
        return next_step(step, ruled)

    def _features(
        self, wg: Warpgroup, band: Band, b: Int, head: Int, start: Int, count: int
    ) -> Ref:
        y = wg.refs["distances"][band.features]
        return y.at[b, head // (self.spec.heads // y.shape[1]), pl.ds(start, count)]

    def prepare(self, wg: Warpgroup, tile: Tile, step: Int) -> None:
        """Writes the unskewed bands of a tile, if it has rules."""
        if not self.x.products:
            return

        @pl.when(tile.ruled)
        def _():
            wg.scratch["distances"].wait(step)
            for band in self:
                unskewed = wg.scratch["unskewed"].at[wg.number, band.number]
                band.write_unskewed(*self._operands(wg, step, band), unskewed)

    def release(self, wg: Warpgroup, tile: Tile, step: Int) -> Int:
        """Releases the features and vectors of a tile, and returns the next step."""
        if self.x.products:
            pl.when(tile.ruled)(lambda: wg.scratch["distances"].release(step))
        return next_step(step, tile.ruled)

    def logits(self, wg: Warpgroup) -> tuple[Callable[[], jax.Array], ...]:
        """Returns functions that read the logits of each product, after `prepare`."""
        return tuple(
            functools.partial(band.logits, wg.scratch["unskewed"].at[wg.number, band.number])
            for band in self
        )

    def add_feature_grads(
        self, wg: Warpgroup, accs: tuple[Ref, ...], ds: jax.Array, tile: Tile, step: Int
    ) -> None:
        """Adds the cotangents of the features of rows to accumulators, if the tile has rules.

        Args:
          wg, tile, step: as for `prepare`.
          accs: accumulators [64, F] of the products `of_rows`.
          ds: cotangent of the logits.
        """
        if not accs:
            return

        @pl.when(tile.ruled)
        def _():
            ds_ref = self._write_cotangent(wg, ds)
            for band, acc in zip(self.of_rows, accs, strict=True):
                _, vectors = self._operands(wg, step, band)
                # The lower half meets vectors 0 .. 63, the upper half 64 .. 127.
                for n, half in enumerate(band.half_cotangents(ds_ref, 0)):
                    part = vectors.at[pl.ds(n * ROWS, ROWS)]
                    wg.product(acc, half.astype(self.dtype), part, "halves")
            plgpu.wgmma_wait(0)

    def add_vector_grads(
        self, wg: Warpgroup, band: Band, accs: tuple[Ref, ...], ds: jax.Array, step: Int
    ) -> None:
        """Adds the cotangents of a product's vectors to an accumulator [64, F] per half."""
        ds_ref = self._write_cotangent(wg, ds)
        features, _ = self._operands(wg, step, band)
        for acc, half in zip(accs, band.half_cotangents(ds_ref, 1), strict=True):
            wg.product(acc, half.astype(self.dtype), features, "halves")
        plgpu.wgmma_wait(0)

    def _write_cotangent(self, wg: Warpgroup, ds: jax.Array) -> Ref:
        """Writes the cotangent of the logits over the first unskewed band."""
        # The logits in it have been read, by all threads after the first barrier.
        ds_ref = wg.scratch["unskewed"].at[wg.number, 0]
        warpgroup_barrier(self.spec.interpret)
        store(ds_ref, ds, 0, self.spec.interpret)
        warpgroup_barrier(self.spec.interpret)
        return ds_ref

    def _operands(self, wg: Warpgroup, step: Int, band: Band) -> tuple[Ref, Ref]:
        """Returns references to a warpgroup's features, [64, F], and vectors, [128, F]."""
        blocks = wg.scratch["distances"].blocks(step)
        before = pl.multiple_of(wg.number * ROWS, ROWS)
        if self._is_resident(band):
            zero = opaque_zero(self.spec.interpret)
            features = wg.scratch[band.features].at[wg.number + zero]
        else:
            # Both warpgroups have all columns; rows are divided between them.
            features = blocks[band.features]
            features = features.at[pl.ds(before, ROWS)] if band.axis == 0 else features
        # The second warpgroup has greater distances where rows are queries, else lesser ones.
        first = before if self.q_axis == 0 else pl.multiple_of(ROWS - before, ROWS)
        return features, blocks[band.vectors].at[pl.ds(first, 2 * ROWS)]
