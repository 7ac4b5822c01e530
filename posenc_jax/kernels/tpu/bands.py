"""Vectors of tokens, dot a vector per distance: Shaw's keys, Inkling, Transformer-XL, DeBERTa.

The product of 128 tokens and the vectors of all distances of a tile is a band,

    band[r, x] = feature[r] . vector[lane + x]         row r, lane x

and a rotation of row r by r lanes turns it into rows of the tile, as in tile.py. The tokens with
features are rows of the band; where they are lanes of the tile, the result is transposed. The
cotangent of a tile goes back the same way. Mosaic has no rotation to the left that grows with the
row, so a product with the reversed identity first reverses the rows (and transposes them where
tokens with features are lanes), and the rotation to the right is the one needed.

Rotations move 32-bit numbers, so with bfloat16 two bands are moved as one, in 16 bits each. Band
cotangents are rounded to bfloat16, as in all products of the backward pass. Added logits are
rounded to integers, in units of a step per token: the product of the norms of its feature and of
the longest vector is below 2**15 steps. Features and vectors of up to 64 numbers are given as sums
of two bfloat16 numbers, at no cost: the matrix unit has 128 rows.
"""

import functools
from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax.experimental import pallas as pl
from jax.experimental.pallas import tpu as pltpu

from posenc_jax.engine.blocks import Blocks
from posenc_jax.kernels.operands import Operands, Product
from posenc_jax.kernels.tpu.block_specs import BlockIndex, feature_spec
from posenc_jax.kernels.tpu.spec import TPUSpec
from posenc_jax.kernels.tpu.tile import LANES, Strip, dot, lanes, line_of, rotate_rows


class BandStrip(NamedTuple):
    """The geometry of a product's bands: tokens with features are rows, the others lanes.

    Attributes:
      strip: the offsets; the vectors are its line.
      of_keys: whether keys have the features.
      axis: the axis of the tokens with features in the tiles.
      interpret: avoid operations that take seconds to compile for the interpreter.
    """

    strip: Strip
    of_keys: bool
    axis: int
    interpret: bool


class BandSlices(NamedTuple):
    """The bands of a part of a tile.

    Attributes:
      tokens: the tokens with features.
      starts: the first lane of the vectors, by 128 tokens.
      others: the number of tokens without.
    """

    tokens: range
    starts: list[Any]
    others: int


class BandInputs(NamedTuple):
    """The products of a pass, by product: geometry, arrays, block specs, and scratch for steps."""

    strips: list[BandStrip]
    arrays: list[dict[str, jax.Array]]
    specs: list[dict[str, pl.BlockSpec]]
    columns: list[list[Any]]


def band_inputs(
    spec: TPUSpec, x: Operands, blocks: Blocks, q_axis: int, queries: BlockIndex, keys: BlockIndex
) -> BandInputs:
    """Returns the products of a pass.

    Args:
      spec: the static part.
      x: the operands.
      blocks: queries and keys per tile.
      q_axis: the axis of the queries in tiles, 0 in the forward pass.
      queries, keys: index maps, by query head.
    """
    inputs = BandInputs([], [], [], [])
    low, high = spec.reach(blocks)
    for product in x.products:
        if product.of_keys:
            strip, axis = Strip.of(low, high, blocks.k, blocks.q), 1 - q_axis
        else:
            strip, axis = Strip.of(-high, -low, blocks.q, blocks.k), q_axis
        band = BandStrip(strip, product.of_keys, axis, bool(spec.interpret))
        arrays = _arrays(spec, product, band, x.first, x.q.dtype)
        if q_axis == 0:
            del arrays["backwards"]
        size, index = (blocks.k, keys) if product.of_keys else (blocks.q, queries)
        inputs.strips.append(band)
        inputs.arrays.append(arrays)
        inputs.specs.append(_specs(arrays, spec.heads, size, index))
        column = pltpu.VMEM((size, LANES), jnp.float32)
        inputs.columns.append([column] if "steps" in arrays and axis == 0 else [])
    return inputs


def band_slices(band: BandStrip, offset: Any, queries: range, keys: range) -> BandSlices:
    """Returns the bands of a part of the tile whose first query minus first key is `offset`."""
    tokens, others = (keys, queries) if band.of_keys else (queries, keys)
    offset = offset if band.of_keys else -offset
    starts = [band.strip.lane(offset, n) + others.start for n in tokens[::LANES]]
    return BandSlices(tokens, [pl.multiple_of(start, LANES) for start in starts], len(others))


def _arrays(
    spec: TPUSpec, product: Product, band: BandStrip, first: int, dtype: Any
) -> dict[str, jax.Array]:
    """Returns the arrays that the kernels read.

    "features" are [B, N or K, F, T or S] and "vectors" [N or 1, F, L]; "backwards" are the
    features with 128 tokens at a time reversed. For bfloat16 "features" are in units of "steps",
    float32 [B, N or K, 1, T or S], and both may be in parts, on the axis of F.
    """
    features = product.features.astype(jnp.float32)
    vectors = _line(product, band, first)(spec.unit * product.vectors)
    backwards = features.reshape(*features.shape[:-1], -1, LANES)[..., ::-1]
    arrays = {"backwards": backwards.reshape(features.shape).astype(dtype)}
    if dtype != jnp.bfloat16:
        return arrays | {"features": features, "vectors": vectors}
    norms = jnp.linalg.norm(features, axis=2, keepdims=True)
    # By Cauchy and Schwarz no product is beyond 2 ** 15 steps, with room for the rounding of parts.
    step = norms * (jnp.linalg.norm(vectors, axis=1).max() * 1.02 / 2**15)
    # A power of two, so that features keep their digits.
    bits = jax.lax.bitcast_convert_type(step, jnp.int32) & 0x7F800000
    step = jnp.where(step < 2.0**-100, 1.0, 2 * jax.lax.bitcast_convert_type(bits, jnp.float32))
    features, vectors = _two_parts(features / step), _two_parts(vectors)
    # High times high, then each high part times the other low part, as far as there are rows.
    most = max(LANES // product.features.shape[2], 1)
    arrays["features"] = _stacked([features[0], features[0], features[1]][:most], 2)
    arrays["vectors"] = _stacked([vectors[0], vectors[1], vectors[0]][:most], 1)
    # The integers come in the upper 16 bits of an int32.
    return arrays | {"steps": step / 2**16}


def _two_parts(x: jax.Array) -> tuple[jax.Array, jax.Array]:
    """Returns two arrays with the digits of a bfloat16, whose sum is x to 16 digits."""
    high = jax.lax.reduce_precision(x, exponent_bits=8, mantissa_bits=7)
    return high, x - high


def _stacked(parts: list[jax.Array], axis: int) -> jax.Array:
    return jnp.concatenate([x.astype(jnp.bfloat16) for x in parts], axis)


def _line(product: Product, band: BandStrip, first: int) -> Callable:
    sign = 1 if product.of_keys else -1
    return functools.partial(line_of, first=first, strip=band.strip, sign=sign)


def _specs(arrays: Any, heads: int, size: int, index: BlockIndex) -> dict[str, pl.BlockSpec]:
    """Returns the block specs of `_arrays`; `index` maps to a block of tokens with features."""
    vectors = arrays["vectors"]
    one_head = vectors.shape[0] == 1

    def line(*grid):
        return (0 if one_head else index(*grid)[1]), 0, 0

    specs = {
        name: feature_spec(x, size, index, group=heads // x.shape[1])
        for name, x in arrays.items()
        if name != "vectors"
    }
    return specs | {"vectors": pl.BlockSpec((None, *vectors.shape[1:]), line)}


def band_logits(band: BandStrip, refs: Any, columns: list[Any], part: BandSlices) -> jax.Array:
    """Returns the logits that a product adds to a part of a tile, float32.

    Args:
      band: the geometry.
      refs: references to the arrays of `BandInputs`.
      columns: the steps as 128 equal lanes, where tokens with features are rows of the tile.
      part: the bands.
    """
    width = part.others + LANES
    spans = [slice(n, n + LANES) for n in part.tokens[::LANES]]
    bands = [
        dot(refs["features"][:, span], refs["vectors"][:, pl.ds(start, width)], (0, 0))
        for span, start in zip(spans, part.starts, strict=True)
    ]

    def tile(x):
        x = _rotated(x, part.others + 1, band.interpret)[:, : part.others]
        return x if band.axis == 0 else jnp.swapaxes(x, 0, 1)

    if "steps" not in refs:
        return jnp.concatenate([tile(x) for x in bands], band.axis)
    whole = [jax.lax.shift_left(jnp.round(x).astype(jnp.int32), jnp.int32(16)) for x in bands]
    tiles = []
    for span, x in zip(spans, map_pairs(tile, whole), strict=True):
        step = lanes(columns[0][span], part.others) if band.axis == 0 else refs["steps"][:, span]
        tiles.append(x.astype(jnp.float32) * step)
    return jnp.concatenate(tiles, band.axis)


def band_cotangents(band: BandStrip, ds: jax.Array) -> list[jax.Array]:
    """Returns the cotangents of the bands, by 128 tokens with features, in reversed order.

    Args:
      band: the geometry.
      ds: cotangent of the tile, in the dtype of the features.
    """
    a, b = (jax.lax.broadcasted_iota(jnp.int32, (LANES, LANES), axis) for axis in (0, 1))
    reverse = (a + b == LANES - 1).astype(ds.dtype)
    rows = []
    for n in range(0, ds.shape[band.axis], LANES):
        if band.axis == 0:
            rows.append(dot(reverse, ds[n : n + LANES]))
        else:
            rows.append(dot(reverse, ds[:, n : n + LANES], (1, 1)))

    def rotate(x):
        return _rotated(jnp.pad(x, ((0, 0), (0, LANES))), 0, band.interpret)

    if ds.dtype != jnp.bfloat16:
        return [rotate(x) for x in rows]
    bits = [jax.lax.bitcast_convert_type(x, jnp.int32) for x in rows]
    bands = [jax.lax.bitcast_convert_type(x, jnp.float32) for x in map_pairs(rotate, bits)]
    return [x.astype(ds.dtype) for x in bands]


def feature_cotangents(
    d_bands: list[jax.Array], refs: Any, part: BandSlices, d_vectors: Any
) -> jax.Array:
    """Returns the cotangent of features, float32 [F, tokens], with 128 at a time reversed.

    Args:
      d_bands: cotangents of the bands.
      refs, part: as in `band_logits`, for a whole tile.
      d_vectors: reference, float32 [F, L], to which the cotangent of the vectors is added.
    """
    count, width = d_vectors.shape[0], part.others + LANES
    d_features = [
        dot(refs["vectors"][:count, pl.ds(start, width)], d_band, (1, 1))
        for start, d_band in zip(part.starts, d_bands, strict=True)
    ]
    # Tokens that are 128 apart read lanes that are 128 apart: one sum for all.
    d_lines, end = [], len(part.tokens) - LANES
    for n, d_band in zip(part.tokens[::LANES], d_bands, strict=True):
        line = dot(refs["backwards"][:, n : n + LANES], d_band)
        d_lines.append(jnp.pad(line, ((0, 0), (end - n, n))))
    d_vectors[:, pl.ds(part.starts[-1], width + end)] += functools.reduce(jnp.add, d_lines)
    return jnp.concatenate(d_features, 1)


def product_grads(
    spec: TPUSpec,
    product: Product,
    band: BandStrip,
    first: int,
    d_features: jax.Array,
    d_vectors: jax.Array,
) -> Product:
    """Returns the cotangents of a product.

    Args:
      spec: the static part.
      product: the product.
      band: its geometry.
      first: the distance of the first vector.
      d_features: float32 [B, N, F, T or S], with 128 tokens at a time reversed.
      d_vectors: float32 [rows, N, F, L].
    """
    shape = product.features.shape
    d_features = d_features.reshape(*shape[:2], -1, *shape[2:]).sum(2) / spec.unit
    d_features = d_features.reshape(*shape[:3], -1, LANES)[..., ::-1].reshape(shape)
    d_vectors = d_vectors.sum(0)
    d_vectors = d_vectors.sum(0, keepdims=True) if product.vectors.shape[0] == 1 else d_vectors
    (d_vectors,) = jax.linear_transpose(_line(product, band, first), product.vectors)(d_vectors)
    return Product(d_features.astype(product.features.dtype), d_vectors, product.of_keys)


def map_pairs(function: Callable, parts: list[jax.Array]) -> list[jax.Array]:
    """Maps a function that moves int32 over arrays whose lower 16 bits are zero, two at a time."""
    results = []
    for n in range(0, len(parts), 2):
        pair = parts[n : n + 2]
        both = function(pair[0] | jax.lax.shift_right_logical(pair[-1], jnp.int32(16)))
        results += [both & -65536, jax.lax.shift_left(both, jnp.int32(16))][: len(pair)]
    return results


def _rotated(x: jax.Array, shift: int, interpret: bool) -> jax.Array:
    """Rotates row r of [128, W] by `shift + r` lanes."""
    if not interpret:
        return rotate_rows(x, shift)
    row, lane = (jax.lax.broadcasted_iota(jnp.int32, x.shape, axis) for axis in (0, 1))
    return jnp.take_along_axis(x, (lane - row - shift) % x.shape[1], 1)
