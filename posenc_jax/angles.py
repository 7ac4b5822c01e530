r"""Cosine and sine of position times frequency, exact at any int32 position.

float32 cannot represent the angle of a far position: at a million tokens the product
position * frequency is off by up to 0.06 radians, as in all common float32 rotary embeddings.
Here a frequency is a 64-bit binary fraction of a full turn, computed on the host from float64. Its
product with an integer position, modulo one turn, is exact integer arithmetic with wrap-around;
float32 evaluates only a polynomial on at most an eighth of a turn. The error is below 2e-7, without
a precomputed table.

A learned frequency is a float32 array: its binary fraction is the mantissa times the digits of
1 / (2 pi), shifted by the exponent.

Polynomials: the single precision sine and cosine kernels of the Cephes library.
"""

import functools
from fractions import Fraction

import jax
import jax.numpy as jnp
import numpy as np

from posenc_jax.checks import coordinate_values

# Eager calls would otherwise compile two dozen operations one by one, for every shape.
_as_one = functools.partial(jax.jit, inline=True)

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
    """Returns the upper 32 bits of the 64-bit product of two uint32."""
    a0, a1, b0, b1 = a & 0xFFFF, a >> 16, b & 0xFFFF, b >> 16
    middle = a1 * b0 + (a0 * b0 >> 16)
    other = a0 * b1 + (middle & 0xFFFF)
    return a1 * b1 + (middle >> 16) + (other >> 16)


def _cos_sin_of_turns(phase: jax.Array) -> tuple[jax.Array, jax.Array]:
    """Returns cosine and sine of `phase` / 2^32 turns."""
    quarter = (phase + np.uint32(1 << 29)) >> 30  # The nearest quarter of a turn, 0 to 4.
    remainder = (phase - (quarter << 30)).astype(jnp.int32).astype(jnp.float32)
    r = remainder * np.float32(2 * np.pi / 2**32)  # At most pi / 4 in magnitude.
    r2 = r * r
    sin = r + r * r2 * (-1.6666654611e-1 + r2 * (8.3321608736e-3 + r2 * -1.9515295891e-4))
    cos = 4.166664568298827e-2 + r2 * (-1.388731625493765e-3 + r2 * 2.443315711809948e-5)
    cos = 1 - 0.5 * r2 + r2 * r2 * cos
    odd = (quarter & 1) == 1
    sin, cos = jnp.where(odd, cos, sin), jnp.where(odd, sin, cos)
    sin = jnp.where((quarter & 2) == 2, -sin, sin)
    cos = jnp.where(((quarter + 1) & 2) == 2, -cos, cos)
    return cos, sin


def _phase(coordinates: jax.Array, high: jax.Array, low: jax.Array) -> jax.Array:
    """Returns integers times 2^-64 turns, in units of 2^-32 turns, modulo one turn."""
    p = coordinates.astype(jnp.uint32)
    borrow = jnp.where(coordinates < 0, low, np.uint32(0))  # p stands for p - 2^32 there.
    return p * high + _high_word(p, low) - borrow


@_as_one
def _counted(coordinates: jax.Array, high: jax.Array, low: jax.Array):
    """Returns cosine and sine of integers times 2^-64 turns."""
    return _cos_sin_of_turns(_phase(coordinates, high, low))


def _fixed_point_turns_of_float32(frequencies: jax.Array) -> tuple[jax.Array, jax.Array]:
    """Returns float32 radians per position, without sign, as `fixed_point_turns` does."""
    digits = int(2**160 / (2 * _PI))
    bits = jax.lax.bitcast_convert_type(frequencies, jnp.uint32)
    exponent = (bits >> 23) & 0xFF
    mantissa = (bits & 0x7FFFFF) | jnp.where(exponent > 0, np.uint32(1 << 23), np.uint32(0))
    words, carry = [], jnp.zeros_like(mantissa)
    for i in range(5):  # mantissa * digits, 32 bits at a time.
        digit = jnp.full_like(mantissa, (digits >> 32 * i) & 0xFFFFFFFF)
        word = mantissa * digit + carry
        carry = _high_word(mantissa, digit) + (word < carry).astype(jnp.uint32)
        words.append(word)
    words += [carry] + [jnp.zeros_like(carry)] * 4
    # The value is mantissa * 2^(exponent - 150); 64 of the 160 digits are needed.
    shift = np.uint32(246) - jnp.minimum(exponent, 246)
    a, b, c = (
        sum(jnp.where(shift >> 5 == k, words[k + j], np.uint32(0)) for k in range(8))
        for j in range(3)
    )
    down, up = shift & 31, 31 - (shift & 31)
    return (b >> down) | (c << 1 << up), (a >> down) | (b << 1 << up)


@jax.custom_jvp
def _learned(coordinates: jax.Array, frequencies: jax.Array) -> tuple[jax.Array, jax.Array]:
    """Returns cosine and sine of integers times float32 radians, below 2^96."""
    phase = _phase(coordinates, *_fixed_point_turns_of_float32(frequencies))
    cos, sin = _cos_sin_of_turns(phase)
    finite = jnp.abs(frequencies) < 2.0**96
    cos, sin = (jnp.where(finite, a, jnp.nan) for a in (cos, sin))
    return cos, jnp.where(frequencies < 0, -sin, sin)


@_learned.defjvp
def _learned_jvp(primals, tangents):
    coordinates, frequencies = primals
    cos, sin = _learned(coordinates, frequencies)
    tangent = coordinates.astype(jnp.float32) * tangents[1]
    return (cos, sin), (-sin * tangent, cos * tangent)


_learned_as_one = _as_one(_learned)


def cos_sin(
    coordinates: jax.Array, frequencies: np.ndarray | jax.Array
) -> tuple[jax.Array, jax.Array]:
    """Returns the cosine and sine of `coordinates[..., None] * frequencies`.

    Args:
      coordinates: integers within int32, or float32, [...].
      frequencies: radians per position, [..., P]. Integer coordinates are exact at any
        distance: for a NumPy array of float64, and for a JAX array (learned frequencies) of
        float32 values. With float32 coordinates the product is float32, whose
        error grows with the angle.

    Returns:
      Two float32 arrays [..., P].

    Raises:
      TypeError: for coordinates of another dtype, and frequencies that are no array.
      ValueError: for concrete integers outside int32.

    >>> cos, sin = cos_sin(jnp.array([1_000_000]), np.array([1.0]))
    >>> bool(abs(cos[0, 0] - np.float32(np.cos(1e6))) < 2e-7)
    True
    """
    if not isinstance(frequencies, np.ndarray | jax.Array) or not frequencies.ndim:
        raise TypeError(f"cos_sin: frequencies must be an array [..., P], got {frequencies!r:.60}.")
    coordinates = coordinate_values("cos_sin", coordinates)[..., None]
    shape = (1,) * (coordinates.ndim - frequencies.ndim) + frequencies.shape
    frequencies = frequencies.reshape(shape)
    if not jnp.issubdtype(coordinates.dtype, jnp.integer):
        angle = coordinates * jnp.asarray(frequencies, jnp.float32)
        return jnp.cos(angle), jnp.sin(angle)
    if not isinstance(frequencies, np.ndarray):
        return _learned_as_one(coordinates, frequencies.astype(jnp.float32))
    return _counted(coordinates, *map(jnp.asarray, fixed_point_turns(frequencies)))
