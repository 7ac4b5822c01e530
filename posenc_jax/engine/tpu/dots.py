"""Vectors of tokens, dot a vector per distance: Shaw's keys, Inkling, Transformer-XL, DeBERTa.

128 tokens against the vectors of all distances of a tile are one matrix product,

    band[r, x] = feature[r] . vector[lane + x]         row r, lane x

and a rotation of row r by r lanes turns it into rows of the tile, as in strip.py. Own tokens,
those with the features, are rows there; where they are lanes of the tile, the result is
transposed. The cotangent of a tile goes back the same way. Mosaic has no rotation to the left
that grows with the row, so a product with the reversed identity first reverses the rows (and
transposes them where own tokens are lanes), and the rotation to the right is the one needed.

Rotations move 32-bit numbers, so with bfloat16 two bands are moved as one, in 16 bits each. Of
cotangents these are a bfloat16, as in all products of the backward pass. Added logits are rounded
to integers, in units of a step of each own token: the product of the norms of its feature and of
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
from posenc_jax.engine.operands import Operands, Product
from posenc_jax.engine.tpu.layout import At, number_spec
from posenc_jax.engine.tpu.spec import Spec
from posenc_jax.engine.tpu.strip import LANES, Strip, line_of
from posenc_jax.engine.tpu.tile import dot, lanes


class Place(NamedTuple):
    """Where the tiles of a pass read a product: own tokens are rows, the others lanes.

    Attributes:
      strip: the geometry; the vectors are its line.
      of_keys: whether own tokens are keys.
      own: the axis of own tokens in the tiles.
      interpret: avoid what the interpreter takes seconds to compile.
    """

    strip: Strip
    of_keys: bool
    own: int
    interpret: bool


class Part(NamedTuple):
    """A part of a tile: own tokens, the lane of the vectors of each 128, how many others."""

    own: range
    starts: list[Any]
    others: int


class Placed(NamedTuple):
    """The products of a pass: for each its place, arrays, their blocks, and memory for steps."""

    places: list[Place]
    arrays: list[dict[str, jax.Array]]
    specs: list[dict[str, pl.BlockSpec]]
    columns: list[list[Any]]


def place_products(
    spec: Spec, x: Operands, blocks: Blocks, q_axis: int, queries: At, keys: At
) -> Placed:
    """Returns the products of a pass.

    Args:
      spec, x: what the kernels are given.
      blocks: of the pass.
      q_axis: the axis of the tiles that has the queries: 0 in the forward pass.
      queries, keys: the block of the grid's indices, by query head.
    """
    placed = Placed([], [], [], [])
    low, high = spec.reach(blocks)
    for product in x.products:
        if product.of_keys:
            strip, own = Strip.of(low, high, blocks.k, blocks.q), 1 - q_axis
        else:
            strip, own = Strip.of(-high, -low, blocks.q, blocks.k), q_axis
        at = Place(strip, product.of_keys, own, bool(spec.interpret))
        arrays = _arrays(spec, product, at, x.first, x.q.dtype)
        if q_axis == 0:
            del arrays["backwards"]
        size, block = (blocks.k, keys) if product.of_keys else (blocks.q, queries)
        placed.places.append(at)
        placed.arrays.append(arrays)
        placed.specs.append(_specs(arrays, spec.heads, size, block))
        column = pltpu.VMEM((size, LANES), jnp.float32)
        placed.columns.append([column] if "steps" in arrays and own == 0 else [])
    return placed


def part_of(at: Place, offset: Any, queries: range, keys: range) -> Part:
    """Returns a part of the tile whose first query less first key is `offset`."""
    own, others = (keys, queries) if at.of_keys else (queries, keys)
    offset = offset if at.of_keys else -offset
    starts = [at.strip.lane(offset, n) + others.start for n in own[::LANES]]
    return Part(own, [pl.multiple_of(start, LANES) for start in starts], len(others))


def _arrays(
    spec: Spec, product: Product, at: Place, first: int, dtype: Any
) -> dict[str, jax.Array]:
    """Returns what the kernels read.

    "features" are [B, N or K, F, T or S] and "vectors" [N or 1, F, L]; "backwards" are the
    features with 128 tokens at a time reversed. For bfloat16 "features" are in units of "steps",
    float32 [B, N or K, 1, T or S], and both may be in parts, on the axis of F.
    """
    features = product.features.astype(jnp.float32)
    vectors = _line(product, at, first)(spec.unit * product.vectors)
    backwards = features.reshape(*features.shape[:-1], -1, LANES)[..., ::-1]
    made = {"backwards": backwards.reshape(features.shape).astype(dtype)}
    if dtype != jnp.bfloat16:
        return made | {"features": features, "vectors": vectors}
    norms = jnp.linalg.norm(features, axis=2, keepdims=True)
    step = norms * (jnp.linalg.norm(vectors, axis=1).max() * 1.02 / 2**15)
    # A power of two, so that features keep their digits.
    bits = jax.lax.bitcast_convert_type(step, jnp.int32) & 0x7F800000
    step = jnp.where(step < 2.0**-100, 1.0, 2 * jax.lax.bitcast_convert_type(bits, jnp.float32))
    features, vectors = _halves(features / step), _halves(vectors)
    most = max(LANES // product.features.shape[2], 1)
    made["features"] = _stacked([features[0], features[0], features[1]][:most], 2)
    made["vectors"] = _stacked([vectors[0], vectors[1], vectors[0]][:most], 1)
    return made | {"steps": step / 2**16}


def _halves(x: jax.Array) -> tuple[jax.Array, jax.Array]:
    """Returns two arrays with the digits of a bfloat16, whose sum is x to 16 digits."""
    high = jax.lax.reduce_precision(x, exponent_bits=8, mantissa_bits=7)
    return high, x - high


def _stacked(parts: list[jax.Array], axis: int) -> jax.Array:
    return jnp.concatenate([x.astype(jnp.bfloat16) for x in parts], axis)


def _line(product: Product, at: Place, first: int) -> Callable:
    sign = 1 if product.of_keys else -1
    return functools.partial(line_of, first=first, strip=at.strip, sign=sign)


def _specs(arrays: Any, heads: int, size: int, at: At) -> dict[str, pl.BlockSpec]:
    """Returns the blocks of these arrays; `at` is that of own tokens, by query head."""
    vectors = arrays["vectors"]
    one = vectors.shape[0] == 1

    def line(*ids):
        return (0 if one else at(*ids)[1]), 0, 0

    made = {
        name: number_spec(x, size, at, group=heads // x.shape[1])
        for name, x in arrays.items()
        if name != "vectors"
    }
    return made | {"vectors": pl.BlockSpec((None, *vectors.shape[1:]), line)}


def added(at: Place, arrays: Any, columns: list[Any], part: Part) -> jax.Array:
    """Returns what a product adds to a part of a tile, float32.

    Args:
      at: the place.
      arrays: references to `Placed`.
      columns: with steps, if own tokens are rows of the tile, these as 128 equal lanes.
      part: of `part_of`.
    """
    width = part.others + LANES
    spans = [slice(n, n + LANES) for n in part.own[::LANES]]
    made = [
        dot(arrays["features"][:, span], arrays["vectors"][:, pl.ds(start, width)], (0, 0))
        for span, start in zip(spans, part.starts, strict=True)
    ]

    def tile(x):
        x = _rotated(x, part.others + 1, at.interpret)[:, : part.others]
        return x if at.own == 0 else jnp.swapaxes(x, 0, 1)

    if "steps" not in arrays:
        return jnp.concatenate([tile(x) for x in made], at.own)
    whole = [jax.lax.shift_left(jnp.round(x).astype(jnp.int32), jnp.int32(16)) for x in made]
    made = []
    for span, x in zip(spans, _moved(tile, whole), strict=True):
        step = lanes(columns[0][span], part.others) if at.own == 0 else arrays["steps"][:, span]
        made.append(x.astype(jnp.float32) * step)
    return jnp.concatenate(made, at.own)


def products_back(at: Place, ds: jax.Array) -> list[jax.Array]:
    """Returns the cotangents of the bands of 128 own tokens each, these in reversed order.

    Args:
      at: the place.
      ds: cotangent of the tile, in the dtype of the features.
    """
    a, b = (jax.lax.broadcasted_iota(jnp.int32, (LANES, LANES), axis) for axis in (0, 1))
    reverse = (a + b == LANES - 1).astype(ds.dtype)
    made = []
    for n in range(0, ds.shape[at.own], LANES):
        if at.own == 0:
            made.append(dot(reverse, ds[n : n + LANES]))
        else:
            made.append(dot(reverse, ds[:, n : n + LANES], (1, 1)))

    def band(x):
        return _rotated(jnp.pad(x, ((0, 0), (0, LANES))), 0, at.interpret)

    if ds.dtype != jnp.bfloat16:
        return [band(x) for x in made]
    bits = [jax.lax.bitcast_convert_type(x, jnp.int32) for x in made]
    found = [jax.lax.bitcast_convert_type(x, jnp.float32) for x in _moved(band, bits)]
    return [x.astype(ds.dtype) for x in found]


def features_back(bands: list[jax.Array], arrays: Any, part: Part, d_vectors: Any) -> jax.Array:
    """Returns the cotangent of features, float32 [F, own tokens], with 128 at a time reversed.

    Args:
      bands: of `products_back`.
      arrays, part: as in `added`, for a whole tile.
      d_vectors: reference, float32 [F, L], to which the cotangent of the vectors is added.
    """
    count, width = d_vectors.shape[0], part.others + LANES
    d_features = [
        dot(arrays["vectors"][:count, pl.ds(start, width)], band, (1, 1))
        for start, band in zip(part.starts, bands, strict=True)
    ]
    # Own tokens that are 128 apart read lanes that are 128 apart: one sum for all.
    d_lines, end = [], len(part.own) - LANES
    for n, band in zip(part.own[::LANES], bands, strict=True):
        line = dot(arrays["backwards"][:, n : n + LANES], band)
        d_lines.append(jnp.pad(line, ((0, 0), (end - n, n))))
    d_vectors[:, pl.ds(part.starts[-1], width + end)] += functools.reduce(jnp.add, d_lines)
    return jnp.concatenate(d_features, 1)


def product_grads(
    spec: Spec, product: Product, at: Place, first: int, d_features: jax.Array, d_vectors: jax.Array
) -> Product:
    """Returns the cotangents of a product.

    Args:
      spec, product, at, first: as before.
      d_features: float32 [B, N, F, T or S], with 128 tokens at a time reversed.
      d_vectors: float32 [rows, N, F, L].
    """
    shape = product.features.shape
    d_features = d_features.reshape(*shape[:2], -1, *shape[2:]).sum(2) / spec.unit
    d_features = d_features.reshape(*shape[:3], -1, LANES)[..., ::-1].reshape(shape)
    d_vectors = d_vectors.sum(0)
    d_vectors = d_vectors.sum(0, keepdims=True) if product.vectors.shape[0] == 1 else d_vectors
    (d_vectors,) = jax.linear_transpose(_line(product, at, first), product.vectors)(d_vectors)
    return Product(d_features.astype(product.features.dtype), d_vectors, product.of_keys)


def _moved(function: Callable, parts: list[jax.Array]) -> list[jax.Array]:
    """Maps a function that moves int32 over arrays whose lower 16 bits are zero, two at a time."""
    made = []
    for n in range(0, len(parts), 2):
        pair = parts[n : n + 2]
        both = function(pair[0] | jax.lax.shift_right_logical(pair[-1], jnp.int32(16)))
        made += [both & -65536, jax.lax.shift_left(both, jnp.int32(16))][: len(pair)]
    return made


def _rotated(x: jax.Array, shift: int, interpret: bool) -> jax.Array:
    """Rotates row r of [128, W] by `shift + r` lanes."""
    if not interpret:
        return pltpu.roll(x, jnp.int32(shift), 1, stride=1, stride_axis=0)
    row, lane = (jax.lax.broadcasted_iota(jnp.int32, x.shape, axis) for axis in (0, 1))
    return jnp.take_along_axis(x, (lane - row - shift) % x.shape[1], 1)
