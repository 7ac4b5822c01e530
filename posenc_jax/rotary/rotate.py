"""Turning pairs of dimensions, in the form that each backend runs fastest.

All forms give the same numbers. On CPU the difference between them is up to forty-fold:
XLA vectorises a sum of padded halves, and neither concatenation nor `rotate_half`. The
backward pass is the rotation by the negative angle; autodiff of the padded sum in
bfloat16 would be four to thirteen times slower.
"""

import functools

import jax
import jax.numpy as jnp
import numpy as np

from posenc_jax.checks import array_of_rank, require
from posenc_jax.rotary.layouts import check_layout, read_and_write


def rotate(
    x: jax.Array, cos: jax.Array, sin: jax.Array, *, layout: str = "half", start: int = 0
) -> jax.Array:
    """Returns x with 2P of its dimensions turned, in its own dtype.

    For tables that several layers share, or that come from elsewhere; `apply_rope` makes
    its own. Differentiable in x and in the tables (Su et al. 2021).

    Args:
      x: [B, T, N, H] with H >= start + 2P.
      cos: float32 [B or 1, T, P], as from `cos_sin`; [B or 1, T, G, P] for G sets of tables, of
        which head n of N has the set n * G // N.
      sin: float32, as `cos`.
      layout: what makes a pair; see `posenc_jax.rotary.layouts`.
      start: the first of the dimensions that turn.

    Raises:
      ValueError: for shapes that do not fit.

    >>> cos, sin = pe.cos_sin(jnp.array([[1]]), np.array([1.0]))
    >>> rotate(jnp.array([1.0, 0.0]).reshape(1, 1, 1, 2), cos, sin).ravel().round(4)
    Array([0.5403, 0.8415], dtype=float32)
    """
    array_of_rank("rotate", "x", x, 4, "[B, T, N, H]")
    check_layout("rotate", layout)
    require(
        cos.shape == sin.shape
        and cos.shape[:1] in ((1,), x.shape[:1])
        and cos.shape[1] == x.shape[1]
        and (cos.ndim == 3 or (cos.ndim == 4 and x.shape[2] % cos.shape[2] == 0))
        and 0 <= start <= x.shape[3] - 2 * cos.shape[-1],
        f"rotate: cos and sin must be [B or 1, T, P] or [B or 1, T, G, P] with start + 2P <= H "
        f"and G that divides N for x {x.shape} and start {start}, got {cos.shape} and {sin.shape}.",
    )
    read, write, negative = read_and_write(layout)
    sin = -sin if negative else sin
    if cos.ndim == 3:
        cos, sin = cos[:, :, None], sin[:, :, None]
    elif cos.shape[2] > 1:
        cos, sin = (jnp.repeat(t, x.shape[2] // t.shape[2], 2) for t in (cos, sin))
    if isinstance(cos, jax.core.Tracer) or isinstance(sin, jax.core.Tracer):
        cos, sin = _once(cos, sin)
    return _rotate(x, cos, sin, (read, write, start))


def _once(cos: jax.Array, sin: jax.Array) -> jax.Array:
    """Has the tables written to memory, once for all that a program turns by them.

    XLA on CPU would otherwise fuse what computes them into the loop over heads, and
    compute every entry N times: 17 to 60 times slower, optimization barrier or not.
    Tables that are arrays already, not traced, need none of it.
    """
    both = jnp.zeros_like(jnp.stack([cos, sin]))  # Sharded as they are.
    return both.at[0].set(cos).at[1].set(sin)


@functools.partial(jax.custom_vjp, nondiff_argnums=(3,))
def _rotate(x, cos, sin, how):
    read, write, start = how
    end = start + 2 * cos.shape[-1]
    turned = _turn(x[..., start:end], cos, sin, read, write)
    if turned.shape == x.shape:
        return turned
    return jnp.concatenate([x[..., :start], turned, x[..., end:]], -1)


def _forward(x, cos, sin, how):
    learned = cos.perturbed or sin.perturbed
    kept = (x.value if learned else None, cos.value, sin.value)
    return _rotate(x.value, cos.value, sin.value, how), kept


def _backward(how, kept, g):
    x, cos, sin = kept
    read, write, start = how
    dx = _rotate(g, cos, -sin, (write, read, start))
    if x is None:
        return dx, jnp.zeros_like(cos), jnp.zeros_like(sin)
    end = start + 2 * cos.shape[-1]
    a, b = _split(x[..., start:end], read)
    ga, gb = _split(g[..., start:end], write)
    return dx, _sum_like(cos, ga * a + gb * b), _sum_like(sin, gb * a - ga * b)


_rotate.defvjp(_forward, _backward, symbolic_zeros=True)


def _sum_like(table, x):
    """Sums x over the axes along which the table was broadcast."""
    axes = tuple(i for i, n in enumerate(table.shape) if n != x.shape[i])
    return x.sum(axes, keepdims=True)


def _turn(x, cos, sin, read, write):
    pairs = cos.shape[-1]
    runs, rest = divmod(pairs, 32)
    if x.dtype != jnp.float32 and read == write == "interleaved" and runs > 1 and not rest:
        # In 16 bits XLA on CPU turns runs of 32 pairs, and longer ones at two thirds of the speed.
        cos, sin = (t.reshape(*t.shape[:-1], runs, 32) for t in (cos, sin))
        return _turn(x.reshape(*x.shape[:-1], runs, 64), cos, sin, read, write).reshape(x.shape)
    a, b = _split(x, read)
    return _join(a * cos - b * sin, b * cos + a * sin, write, x.dtype)


def _split(x, layout):
    x = x.astype(jnp.float32)
    if layout == "interleaved":
        return x[..., 0::2], x[..., 1::2]
    half = x.shape[-1] // 2
    return x[..., :half], x[..., half:]


def _join(a, b, layout, dtype):
    interleaved, half = layout == "interleaved", a.shape[-1]
    # In 16 bits the padded sum is five times as slow interleaved, twice in wide halves.
    if dtype != jnp.float32 and (interleaved or half >= 64):
        x = jnp.stack([a, b], -1 if interleaved else -2)
        return x.reshape(*a.shape[:-1], 2 * half).astype(dtype)
    if interleaved:
        return (_pad(a, 0, 1, 1) + _pad(b, 1, 0, 1)).astype(dtype)
    return (_pad(a, 0, half, 0) + _pad(b, half, 0, 0)).astype(dtype)


def _pad(x, low, high, between):
    return jax.lax.pad(x, np.float32(0), [(0, 0, 0)] * 3 + [(low, high, between)])
