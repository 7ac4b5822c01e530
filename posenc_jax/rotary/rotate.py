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


def rotate(x: jax.Array, cos: jax.Array, sin: jax.Array, *, interleaved: bool = False) -> jax.Array:
    """Returns x with its first 2P dimensions turned, in its own dtype.

    For tables that several layers share, or that come from elsewhere; `apply_rope` makes
    its own. Differentiable in x and in the tables (Su et al. 2021).

    Args:
      x: [B, T, N, H] with H >= 2P.
      cos: float32 [B or 1, T, P], as from `cos_sin`.
      sin: float32 [B or 1, T, P].
      interleaved: whether pair p is (2p, 2p + 1) instead of (p, p + P).

    Raises:
      ValueError: for shapes that do not fit.

    >>> cos, sin = pe.cos_sin(jnp.array([[1]]), np.array([1.0]))
    >>> rotate(jnp.array([1.0, 0.0]).reshape(1, 1, 1, 2), cos, sin).ravel()
    Array([0.5403023, 0.841471 ], dtype=float32)
    """
    array_of_rank("rotate", "x", x, 4, "[B, T, N, H]")
    require(
        cos.shape == sin.shape
        and cos.ndim == 3
        and cos.shape[0] in (1, x.shape[0])
        and cos.shape[1] == x.shape[1]
        and 2 * cos.shape[2] <= x.shape[3],
        f"rotate: cos and sin must be [B or 1, T, P] with 2P <= H for x {x.shape}, "
        f"got {cos.shape} and {sin.shape}.",
    )
    cos, sin = _once(cos, sin)
    return _rotate(x, cos[:, :, None], sin[:, :, None], interleaved)


def _once(cos: jax.Array, sin: jax.Array) -> jax.Array:
    """Has the tables written to memory.

    XLA on CPU would otherwise fuse what computes them into the loop over heads, and
    compute every entry N times: 17 to 60 times slower, optimization barrier or not.
    """
    both = jnp.zeros((2, *cos.shape), cos.dtype)
    return both.at[0].set(cos).at[1].set(sin)


@functools.partial(jax.custom_vjp, nondiff_argnums=(3,))
def _rotate(x, cos, sin, interleaved):
    dim = 2 * cos.shape[-1]
    turn = _interleaved if interleaved else _half
    if dim == x.shape[-1]:
        return turn(x, cos, sin).astype(x.dtype)
    turned = turn(x[..., :dim], cos, sin).astype(x.dtype)
    return jnp.concatenate([turned, x[..., dim:]], -1)


def _forward(x, cos, sin, interleaved):
    learned = cos.perturbed or sin.perturbed
    kept = (x.value if learned else None, cos.value, sin.value)
    return _rotate(x.value, cos.value, sin.value, interleaved), kept


def _backward(interleaved, kept, g):
    x, cos, sin = kept
    dx = _rotate(g, cos, -sin, interleaved)
    if x is None:
        return dx, jnp.zeros_like(cos), jnp.zeros_like(sin)
    dim = 2 * cos.shape[-1]
    a, b = _split(x[..., :dim], interleaved)
    ga, gb = _split(g[..., :dim], interleaved)
    return dx, _sum_like(cos, ga * a + gb * b), _sum_like(sin, gb * a - ga * b)


_rotate.defvjp(_forward, _backward, symbolic_zeros=True)


def _sum_like(table, x):
    """Sums x over the axes along which the table was broadcast."""
    axes = tuple(i for i, n in enumerate(table.shape) if n != x.shape[i])
    return x.sum(axes, keepdims=True)


def _split(x, interleaved):
    x = x.astype(jnp.float32)
    if interleaved:
        return x[..., 0::2], x[..., 1::2]
    half = x.shape[-1] // 2
    return x[..., :half], x[..., half:]


def _half(x, cos, sin):
    a, b = _split(x, False)
    first, second = a * cos - b * sin, b * cos + a * sin
    half = a.shape[-1]
    if x.dtype != jnp.float32 and half >= 64:  # Here the padded sum is twice as slow.
        return jnp.stack([first, second], -2).reshape(x.shape)
    return _pad(first, 0, half, 0) + _pad(second, half, 0, 0)


def _interleaved(x, cos, sin):
    a, b = _split(x, True)
    first, second = a * cos - b * sin, b * cos + a * sin
    if x.dtype != jnp.float32:  # Here the padded sum is five times as slow.
        return jnp.stack([first, second], -1).reshape(x.shape)
    return _pad(first, 0, 1, 1) + _pad(second, 1, 0, 1)


def _pad(x, low, high, between):
    return jax.lax.pad(x, np.float32(0), [(0, 0, 0)] * 3 + [(low, high, between)])
