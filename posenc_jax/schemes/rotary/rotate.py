"""Rotation of pairs of dimensions, in the form that each backend runs fastest.

All forms give the same numbers. On CPU they differ up to forty-fold in speed: XLA vectorises a sum
of padded halves, but neither concatenation nor `rotate_half`; for interleaved pairs it vectorises
swapped neighbours times tables that hold every number twice. On TPU, where lanes are expensive to
move, the partner of each 16-bit dimension comes from a product with a matrix of zeros and ones,
which is exact: XLA then reads a third to a half of the bytes. The backward pass is the rotation by
the negative angle; autodiff of the padded sum in bfloat16 would be four to thirteen times slower.
A rotation is therefore a primitive: linear in x and linear in its tables, with a transpose of its
own for each. That gives every mode and order of derivatives, which `jax.custom_vjp` does not.
"""

import functools
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax.core import Tracer
from jax.extend.core import Primitive
from jax.interpreters import ad, batching, mlir

from posenc_jax.checks import array_of_rank, floating, integers_from, require
from posenc_jax.engine.problem import vary_over
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
      TypeError: for x of integers, and a `start` that is not an integer.

    >>> cos, sin = pe.cos_sin(jnp.array([[1]]), np.array([1.0]))
    >>> apply_rotation(jnp.array([1.0, 0.0]).reshape(1, 1, 1, 2), cos, sin).ravel().round(4)
    Array([0.5403, 0.8415], dtype=float32)
    """
    array_of_rank("apply_rotation", "x", x, 4, "[B, T, N, H]")
    check_layout("apply_rotation", layout)
    integers_from(0, "apply_rotation", start=start)
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
    floating("apply_rotation", "x", x)
    return _rotated(x, cos, sin, layout=layout, start=start)


@functools.partial(jax.jit, static_argnames=("layout", "start"), inline=True)
def _rotated(x: jax.Array, cos: jax.Array, sin: jax.Array, *, layout: str, start: int) -> jax.Array:
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
    x, cos, sin = vary_over((x, cos, sin))
    rotation, dim = Rotation(read, write, 1), 2 * cos.shape[-1]
    if dim == x.shape[3]:
        return _rotation.bind(x, cos, sin, rotation=rotation)
    before, x, after = jax.lax.split(x, (start, dim, x.shape[3] - start - dim), axis=3)
    x = _rotation.bind(x, cos, sin, rotation=rotation)
    return jnp.concatenate([before, x, after], -1)


class Rotation(NamedTuple):
    """The static settings of a rotation.

    Attributes:
      read, write: the layouts of the input and of the output, "half" or "interleaved".
      sign: 1, or -1 to rotate by the negative angle.
    """

    read: str
    write: str
    sign: int


_rotation = Primitive("rotation")
"""Returns x [..., 2P] rotated by cos and sin [..., P], sharded as x.

Axes of the tables may have size 1; all three arrays vary over the same axes of a mesh.
"""


def _jvp(primals, tangents, *, rotation):
    (x, *tables), (dx, *d_tables) = primals, tangents
    rotate = functools.partial(_rotation.bind, rotation=rotation)
    tangent = dx if isinstance(dx, ad.Zero) else rotate(dx, *tables)
    if not all(isinstance(d, ad.Zero) for d in d_tables):  # Only then is x kept.
        tangent = ad.add_tangents(tangent, rotate(x, *map(ad.instantiate_zeros, d_tables)))
    return rotate(x, *tables), tangent


def _transpose(g, x, cos, sin, *, rotation):
    (read, write, sign), g = rotation, ad.instantiate_zeros(g)
    if ad.is_undefined_primal(x):
        back = Rotation(write, read, -sign)
        return _rotation.bind(g, cos, sin, rotation=back), None, None
    (a, b), (ga, gb) = _split(x, read), _split(g, write)
    # Padding has no cotangent and may hold NaN: it must not reach the gradient of the tables.
    # Finite numbers stay where the cotangent is 0: its own derivative may be another number.
    seen = (ga != 0) | (gb != 0)
    a, b = (jnp.where(seen | jnp.isfinite(part), part, 0.0) for part in (a, b))
    products = ga * a + gb * b, sign * (gb * a - ga * b)
    return None, *map(_sum_to, (cos, sin), products)


def _sum_to(table, x):
    """Returns x summed over the axes along which the table was broadcast, and sharded as it is."""
    if not ad.is_undefined_primal(table):
        return None
    shape, sharding = table.aval.shape, table.aval.sharding
    x = x.sum(tuple(i for i, n in enumerate(shape) if n != x.shape[i]), keepdims=True)
    same = jax.typeof(x).sharding == sharding
    return x if same else jax.lax.reshape(x, shape, out_sharding=sharding)


def _batch(arguments, axes, *, rotation):
    """Rotates with one more leading axis; of the three, only x must have its size."""
    size = next(y.shape[i] for y, i in zip(arguments, axes, strict=True) if i is not None)
    x, *tables = (
        y[None] if i is None else jnp.moveaxis(y, i, 0)
        for y, i in zip(arguments, axes, strict=True)
    )
    return _rotation.bind(jnp.broadcast_to(x, (size, *x.shape[1:])), *tables, rotation=rotation), 0


def _rotate(x, cos, sin, rotation):
    if rotation.read != rotation.write or x.dtype.itemsize > 2:
        return _by_parts(x, cos, sin, rotation)
    by_platform = {
        "tpu": functools.partial(_by_product, rotation=rotation),
        "default": functools.partial(_by_parts, rotation=rotation),
    }
    return jax.lax.platform_dependent(x, cos, sin, **by_platform)


_rotation.def_impl(_rotate)
_rotation.def_abstract_eval(lambda x, cos, sin, *, rotation: x)
mlir.register_lowering(_rotation, mlir.lower_fun(_rotate, multiple_results=False))
batching.primitive_batchers[_rotation] = _batch
ad.primitive_jvps[_rotation] = _jvp
ad.primitive_transposes[_rotation] = _transpose


def _by_product(x, cos, sin, rotation):
    """Multiplies by a matrix of partners: exact, since each sum has one nonzero term."""
    read, write, sign = rotation
    size = x.shape[-1]
    axis = np.stack([*_split(np.arange(size), read)]).astype(int)
    partners = np.zeros((size, size), np.float32)
    partners[axis[1], axis[0]], partners[axis[0], axis[1]] = -1.0, 1.0
    other = jnp.einsum("...h,hg->...g", x, jnp.asarray(partners, x.dtype))
    cos, sin = _join(cos, cos, write), _join(sign * sin, sign * sin, write)
    return (x.astype(jnp.float32) * cos + other.astype(jnp.float32) * sin).astype(x.dtype)


def _by_parts(x, cos, sin, rotation):
    """Multiplies the two dimensions of each pair, and joins the results."""
    read, write, sign = rotation
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
    return jax.lax.pad(x, np.float32(0), [(0, 0, 0)] * (x.ndim - 1) + [(low, high, between)])
