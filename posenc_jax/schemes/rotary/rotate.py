"""Rotation of pairs of dimensions, in the form that each backend runs fastest.

All forms give the same numbers. On CPU they differ up to forty-fold in speed: XLA vectorises a sum
of padded halves, but neither concatenation nor `rotate_half`; for interleaved pairs it vectorises
swapped neighbours times tables that hold every number twice. On TPU, where lanes are expensive to
move, the partner of each 16-bit dimension comes from a product with a matrix of zeros and ones,
which is exact: XLA then reads a third to a half of the bytes. The backward pass is the rotation by
the negative angle; autodiff of the padded sum in bfloat16 would be four to thirteen times slower.
"""

import functools
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax.core import Tracer

from posenc_jax.checks import array_of_rank, require
from posenc_jax.schemes.rotary.layouts import check_layout, read_and_write


def apply_rotation(
    x: jax.Array, cos: jax.Array, sin: jax.Array, *, layout: str = "half", start: int = 0
) -> jax.Array:
    """Returns x with 2P of its dimensions rotated, in its own dtype.

    For tables that several layers share or another function computes; `apply_rope` computes
    them from positions. Differentiable in x and in the tables (Su et al. 2021).

    Args:
      x: [B, T, N, H] with H >= start + 2P.
      cos: float32 [B or 1, T, P], as from `cos_sin`; [B or 1, T, G, P] for G sets of tables, of
        which head n of N has the set n * G // N.
      sin: float32, as `cos`.
      layout: the dimensions of a pair; see `posenc_jax.schemes.rotary.layouts`.
      start: the first of the dimensions to rotate.

    Raises:
      ValueError: for other shapes, or G that does not divide N.
      TypeError: for x of integers.

    >>> cos, sin = pe.cos_sin(jnp.array([[1]]), np.array([1.0]))
    >>> apply_rotation(jnp.array([1.0, 0.0]).reshape(1, 1, 1, 2), cos, sin).ravel().round(4)
    Array([0.5403, 0.8415], dtype=float32)
    """
    array_of_rank("apply_rotation", "x", x, 4, "[B, T, N, H]")
    check_layout("apply_rotation", layout)
    return rotate_pairs(x, *materialize(cos, sin), layout=layout, start=start)


def materialize(cos: jax.Array, sin: jax.Array) -> tuple[jax.Array, jax.Array]:
    """Returns the tables as float32 arrays that a compiled program computes only once.

    XLA on CPU would otherwise fuse their computation into the loop over heads and compute every
    entry N times: 17 to 60 times slower, with or without an optimization barrier. Writing them
    into one array prevents the fusion. Concrete tables need no copy.
    """
    cos, sin = jnp.asarray(cos, jnp.float32), jnp.asarray(sin, jnp.float32)
    if not any(isinstance(table, Tracer) for table in (cos, sin)) or cos.shape != sin.shape:
        return cos, sin
    both = jnp.zeros_like(jnp.stack([cos, sin]))  # Sharded as they are.
    both = both.at[0].set(cos).at[1].set(sin)
    return both[0], both[1]


def rotate_pairs(
    x: jax.Array, cos: jax.Array, sin: jax.Array, *, layout: str, start: int
) -> jax.Array:
    """Returns x rotated as by `apply_rotation`, for tables from `materialize`."""
    if not jnp.issubdtype(x.dtype, jnp.floating):
        raise TypeError(f"apply_rotation: x must be floating, got {x.dtype}.")
    require(
        cos.shape == sin.shape
        and (cos.ndim == 3 or (cos.ndim == 4 and x.shape[2] % cos.shape[2] == 0))
        and cos.shape[0] in (1, x.shape[0])
        and cos.shape[1] == x.shape[1]
        and 0 <= start <= x.shape[3] - 2 * cos.shape[-1],
        "apply_rotation: cos and sin must be [B or 1, T, P] or [B or 1, T, G, P] with start + 2P "
        f"<= H and G that divides N for x {x.shape} and start {start}, got {cos.shape} and "
        f"{sin.shape}.",
    )
    read, write, negative = read_and_write(layout)
    sin = -sin if negative else sin
    if cos.ndim == 3:
        cos, sin = cos[:, :, None], sin[:, :, None]
    elif cos.shape[2] > 1:
        cos, sin = (jnp.repeat(t, x.shape[2] // t.shape[2], 2) for t in (cos, sin))
    return _rotate(x, cos, sin, Rotation(read, write, start, 1))


class Rotation(NamedTuple):
    """The static settings of a rotation.

    Attributes:
      read, write: the layouts of the input and of the output, "half" or "interleaved".
      start: the first of the dimensions to rotate.
      sign: 1, or -1 to rotate by the negative angle.
    """

    read: str
    write: str
    start: int
    sign: int

    @property
    def inverse(self) -> "Rotation":
        """The rotation by the negative angle, from the output to the input."""
        return Rotation(self.write, self.read, self.start, -self.sign)


@functools.partial(jax.custom_vjp, nondiff_argnums=(3,))
def _rotate(x, cos, sin, rotation):
    start, end = rotation.start, rotation.start + 2 * cos.shape[-1]
    rotated = _rotate_all(x[..., start:end], cos, sin, rotation)
    if rotated.shape == x.shape:
        return rotated
    return jnp.concatenate([x[..., :start], rotated, x[..., end:]], -1)


def _forward(x, cos, sin, rotation):
    learned = cos.perturbed or sin.perturbed
    residuals = (x.value if learned else None, cos.value, sin.value)
    return _rotate(x.value, cos.value, sin.value, rotation), residuals


def _backward(rotation, residuals, g):
    x, cos, sin = residuals
    dx = _rotate(g, cos, sin, rotation.inverse)
    if x is None:
        return dx, jnp.zeros_like(cos), jnp.zeros_like(sin)
    start, end = rotation.start, rotation.start + 2 * cos.shape[-1]
    a, b = _split(x[..., start:end], rotation.read)
    ga, gb = _split(g[..., start:end], rotation.write)
    # Padding has no cotangent and may hold NaN: it must not reach the gradient of the tables.
    a, b = (jnp.where((ga == 0) & (gb == 0), 0.0, part) for part in (a, b))
    return dx, _sum_like(cos, ga * a + gb * b), _sum_like(sin, rotation.sign * (gb * a - ga * b))


_rotate.defvjp(_forward, _backward, symbolic_zeros=True)


def _sum_like(table, x):
    """Returns x summed over the axes along which the table was broadcast."""
    axes = tuple(i for i, n in enumerate(table.shape) if n != x.shape[i])
    return x.sum(axes, keepdims=True)


def _rotate_all(x, cos, sin, rotation):
    if rotation.read != rotation.write or x.dtype.itemsize > 2:
        return _by_parts(x, cos, sin, rotation)
    by_platform = {
        "tpu": functools.partial(_by_product, rotation=rotation),
        "default": functools.partial(_by_parts, rotation=rotation),
    }
    return jax.lax.platform_dependent(x, cos, sin, **by_platform)


def _by_product(x, cos, sin, rotation):
    """Multiplies by a matrix of partners: exact, since each sum has one nonzero term."""
    read, write, _, sign = rotation
    size = x.shape[-1]
    axis = np.stack([*_split(np.arange(size), read)]).astype(int)
    partners = np.zeros((size, size), np.float32)
    partners[axis[1], axis[0]], partners[axis[0], axis[1]] = -1.0, 1.0
    other = jnp.einsum("btnh,hg->btng", x, jnp.asarray(partners, x.dtype))
    cos, sin = _join(cos, cos, write), _join(sign * sin, sign * sin, write)
    return (x.astype(jnp.float32) * cos + other.astype(jnp.float32) * sin).astype(x.dtype)


def _by_parts(x, cos, sin, rotation):
    """Multiplies the two dimensions of each pair, and joins the results."""
    read, write, _, sign = rotation
    a, b = _split(x, read)
    enough = 32 if x.dtype == jnp.float32 else 4  # Rows of x for each row of the tables.
    if read == write == "interleaved" and x.size >= enough * 2 * cos.size:
        # Tables as wide as x, and swapped neighbours: on CPU as fast as halves.
        cos, sin = materialize(_join(cos, cos, write), _join(-sin, sin, write))
        return (x.astype(jnp.float32) * cos + _join(b, a, write) * (sign * sin)).astype(x.dtype)
    sin = sign * sin
    return _join(a * cos - b * sin, b * cos + a * sin, write, x.dtype).astype(x.dtype)


def _split(x, layout):
    x = x.astype(np.float32)
    if layout == "interleaved":
        return x[..., 0::2], x[..., 1::2]
    half = x.shape[-1] // 2
    return x[..., :half], x[..., half:]


def _join(a, b, layout, dtype=jnp.float32):
    interleaved, half = layout == "interleaved", a.shape[-1]
    # For 16 bits the padded sum is five times as slow interleaved, twice in wide halves.
    if dtype != jnp.float32 and (interleaved or half >= 64):
        return jnp.stack([a, b], -1 if interleaved else -2).reshape(*a.shape[:-1], 2 * half)
    if interleaved:
        return _pad(a, 0, 1, 1) + _pad(b, 1, 0, 1)
    return _pad(a, 0, half, 0) + _pad(b, half, 0, 0)


def _pad(x, low, high, between):
    return jax.lax.pad(x, np.float32(0), [(0, 0, 0)] * 3 + [(low, high, between)])
