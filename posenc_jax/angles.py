r"""Cosine and sine of position times frequency, exact at any int32 position.

float32 cannot hold the angle of a far position: at a million tokens the product
position * frequency is off by up to 0.06 radians, and every common float32 rotary
embedding with it. Here a frequency is a 64-bit binary fraction of a full turn, made on
the host from float64. The product with an integer position, modulo one turn, is then
exact integer arithmetic that wraps by itself; what remains for float32 is a polynomial
on at most an eighth of a turn. The error stays below 2e-7 and no table is kept.

Polynomials: the single precision sine and cosine kernels of the Cephes library.
"""

from fractions import Fraction

import jax
import jax.numpy as jnp
import numpy as np

# Pi to 60 digits: 64-bit fractions of a turn need about 25 of them.
_PI = Fraction(3141592653589793238462643383279502884197169399375105820974944, 10**60)


def fixed_point_turns(frequencies: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Returns float64 radians per position as the high and low words of 2^64 turns."""
    words = [
        round(Fraction(float(f)) / (2 * _PI) * 2**64) % 2**64
        for f in np.asarray(frequencies, np.float64).ravel()
    ]
    shape = np.shape(frequencies)
    high = np.array([w >> 32 for w in words], np.uint32).reshape(shape)
    low = np.array([w & 0xFFFFFFFF for w in words], np.uint32).reshape(shape)
    return high, low


def _high_word(a: jax.Array, b: jax.Array) -> jax.Array:
    """The upper 32 bits of the 64-bit product of two uint32."""
    a0, a1, b0, b1 = a & 0xFFFF, a >> 16, b & 0xFFFF, b >> 16
    middle = a1 * b0 + (a0 * b0 >> 16)
    other = a0 * b1 + (middle & 0xFFFF)
    return a1 * b1 + (middle >> 16) + (other >> 16)


def _cos_sin_of_turns(phase: jax.Array) -> tuple[jax.Array, jax.Array]:
    """Cosine and sine of `phase` / 2^32 turns."""
    quarter = (phase + np.uint32(1 << 29)) >> 30  # The nearest quarter of a turn, 0 to 4.
    rest = (phase - (quarter << 30)).astype(jnp.int32).astype(jnp.float32)
    r = rest * np.float32(2 * np.pi / 2**32)  # At most pi / 4 in magnitude.
    r2 = r * r
    sin = r + r * r2 * (-1.6666654611e-1 + r2 * (8.3321608736e-3 + r2 * -1.9515295891e-4))
    cos = 4.166664568298827e-2 + r2 * (-1.388731625493765e-3 + r2 * 2.443315711809948e-5)
    cos = 1 - 0.5 * r2 + r2 * r2 * cos
    odd = (quarter & 1) == 1
    sin, cos = jnp.where(odd, cos, sin), jnp.where(odd, sin, cos)
    sin = jnp.where((quarter & 2) == 2, -sin, sin)
    cos = jnp.where(((quarter + 1) & 2) == 2, -cos, cos)
    return cos, sin


def cos_sin(
    coordinates: jax.Array, frequencies: np.ndarray | jax.Array
) -> tuple[jax.Array, jax.Array]:
    """Returns the cosine and sine of `coordinates[..., None] * frequencies`.

    Args:
      coordinates: integers or float32 [...].
      frequencies: radians per position, [..., P]. A NumPy array (float64) is exact for
        integer coordinates at any distance. JAX arrays (learned frequencies) and float32
        coordinates are multiplied in float32, whose error grows with the angle.

    Returns:
      Two float32 arrays [..., P].

    >>> cos, sin = cos_sin(jnp.array([1_000_000]), np.array([1.0]))
    >>> bool(abs(cos[0, 0] - np.float32(np.cos(1e6))) < 2e-7)
    True
    """
    coordinates = jnp.asarray(coordinates)[..., None]
    shape = (1,) * (coordinates.ndim - frequencies.ndim) + frequencies.shape
    frequencies = frequencies.reshape(shape)
    exact = isinstance(frequencies, np.ndarray) and jnp.issubdtype(coordinates.dtype, jnp.integer)
    if not exact:
        angle = coordinates.astype(jnp.float32) * jnp.asarray(frequencies, jnp.float32)
        return jnp.cos(angle), jnp.sin(angle)
    high, low = map(jnp.asarray, fixed_point_turns(frequencies))
    p = coordinates.astype(jnp.int32).astype(jnp.uint32)
    borrow = jnp.where(coordinates < 0, low, np.uint32(0))  # p stands for p - 2^32 there.
    return _cos_sin_of_turns(p * high + _high_word(p, low) - borrow)
