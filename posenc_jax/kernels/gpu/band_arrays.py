"""The inputs and outputs of `bands.py` outside the kernels."""

import functools
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp

from posenc_jax.engine.blocks import Blocks
from posenc_jax.kernels.base import padded
from posenc_jax.kernels.gpu.gather import PITCH
from posenc_jax.kernels.gpu.spec import ROWS, GPUSpec, line
from posenc_jax.kernels.operands import Operands, Product

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

    bound = largest(d_out) * largest(x.v) + largest(delta[..., None])
    return jnp.ldexp(jnp.float32(1.0), 15 - jnp.frexp(bound)[1])[None]


def feature_grads(
    spec: GPUSpec, product: Product, d_features: jax.Array, scale: jax.Array
) -> jax.Array:
    """Returns the cotangent of features from the kernels' sums, [B, N or K, T or S, F]."""
    shape = product.features.shape
    factor = spec.unit * scale[0] * balance_of(product)
    d = jnp.swapaxes(d_features[..., : shape[2]], 2, 3) / factor
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
