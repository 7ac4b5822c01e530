"""The arrays of `dots.py` outside the kernels: what goes in, and what comes out."""

import functools
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp

from posenc_jax.engine.blocks import Blocks
from posenc_jax.engine.gpu.gather import PITCH
from posenc_jax.engine.gpu.spec import ROWS, Spec, line
from posenc_jax.engine.kernels import padded
from posenc_jax.engine.operands import Operands, Product

COLUMNS = 32
"""Rows in shared memory have a multiple of these numbers."""
_ROOM = 226_000  # Bytes of shared memory, less those of numbers per token.


def fits(dim: int, value_dim: int, counts: list[int]) -> bool:
    """Whether there is room in shared memory for features of so many numbers."""
    width = sum(padded(n, COLUMNS) for n in counts)
    tile = 3 * ROWS  # Rows and columns, and distances.
    numbers = tile * (dim + value_dim + width) + 2 * ROWS * width
    turned = 2 * ROWS * PITCH * len(counts)
    return 2 * numbers + 4 * turned <= _ROOM


def d_logits_scale(x: Operands, d_out: jax.Array, delta: jax.Array) -> jax.Array:
    """Returns a power of two, float32 [1], for cotangents of logits: then float16 has them."""

    def largest(y):
        norms = jnp.linalg.norm(y.astype(jnp.float32), axis=-1)
        return jnp.max(jnp.where(jnp.isfinite(norms), norms, 0.0))

    bound = largest(d_out) * largest(x.v) + largest(delta[..., None])
    return jnp.ldexp(jnp.float32(1.0), 15 - jnp.frexp(bound)[1])[None]


def feature_grads(spec: Spec, of: Product, made: jax.Array, scale: jax.Array) -> jax.Array:
    """Returns the cotangent of features from that of the arrays, [B, N or K, T or S, F]."""
    shape = of.features.shape
    d = jnp.swapaxes(made[..., : shape[2]], 2, 3) / (spec.unit * scale[0] * balance_of(of))
    d = d.reshape(*shape[:2], -1, *d.shape[2:]).sum(2)
    return d.astype(of.features.dtype)


def sum_bands(spec: Spec, x: Operands, of: Product, made: jax.Array, scale: jax.Array) -> jax.Array:
    """Returns the cotangent of the vectors of a product.

    Args:
      spec, x, of: the problem and the product.
      made: float32 [N, offsets, 2, 2, 64, F], of `spec.offsets`, warpgroups and halves.
      scale: of cotangents of logits.
    """
    # One offset, warpgroup or half more are distances that are 64 greater.
    heads, offsets, *_, width = made.shape
    parts = made.reshape(heads, offsets, 4, ROWS, width)
    moved = (
        jnp.pad(parts[:, :, n], ((0, 0), (at, 2 - at), (0, 0), (0, 0)))
        for n, at in enumerate((0, 1, 1, 2))
    )
    d_line = functools.reduce(jnp.add, moved).reshape(heads, -1, width)
    d_line = d_line[..., : of.features.shape[2]] * (balance_of(of) / scale[0])
    d_line = d_line.sum(0, keepdims=True) if of.vectors.shape[0] == 1 else d_line
    return jax.linear_transpose(line_maker(spec, x.first, spec.backward), of.vectors)(d_line)[0]


def line_maker(spec: Spec, first: int, blocks: Blocks) -> Callable[[jax.Array], jax.Array]:
    """Returns the function of vectors, [N or 1, F, R], that makes their line, [N or 1, L, F]."""
    return lambda vectors: line(spec, jnp.swapaxes(vectors, 1, 2), first, blocks)


def balance_of(of: Product) -> jax.Array:
    """Returns a power of two: by it, features are divided and vectors are multiplied.

    The largest numbers of both then are about the same, so that float16 has them.
    """

    def exponent(y):
        y = jnp.abs(y.astype(jnp.float32))
        return jnp.frexp(jnp.max(jnp.where(jnp.isfinite(y), y, 0.0)))[1]

    return jnp.ldexp(jnp.float32(1.0), (exponent(of.features) - exponent(of.vectors)) // 2)


def widened(y: jax.Array, dtype: Any) -> jax.Array:
    """Returns vectors with zeros up to whole rows of shared memory."""
    return jnp.pad(y.astype(dtype), [(0, 0)] * (y.ndim - 1) + [(0, -y.shape[-1] % COLUMNS)])
