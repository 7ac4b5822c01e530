"""Checks at the public boundary: plain errors that say what was wanted and what came."""

import jax
import jax.numpy as jnp
import numpy as np
from jax.core import Tracer


def require(condition: bool, message: str) -> None:
    """Raises `ValueError(message)` unless `condition` holds."""
    if not condition:
        raise ValueError(message)


def array_of_rank(where: str, name: str, x, rank: int, axes: str) -> None:
    """Raises `ValueError` unless `x` has `rank` axes, called `axes` in the message."""
    if jnp.ndim(x) != rank:
        raise ValueError(f"{where}: {name} must be {axes}, got shape {jnp.shape(x)}.")


def divides(where: str, **sizes: int) -> None:
    """Raises `ValueError` unless the second of two named sizes divides the first."""
    (a, x), (b, y) = sizes.items()
    if y < 1 or x % y:
        raise ValueError(f"{where}: {a}={x} must be a multiple of {b}={y}.")


def in_table(where: str, positions, rows: int) -> None:
    """Raises `ValueError` for positions without a row, where they are known."""
    if isinstance(positions, Tracer) or not positions.size:
        return
    known = np.asarray(positions)  # np.min of a jax.Array would trace under jit.
    low, high = known.min(), known.max()
    require(
        0 <= low and high < rows,
        f"{where}: positions must be in [0, {rows}), the rows of the table, got {low} to {high}.",
    )


def integer_positions(where: str, positions, name: str = "positions") -> jax.Array:
    """Returns positions as int32, whatever integer dtype they had.

    Raises:
      TypeError: for floats, which cannot count tokens (bfloat16 skips 257), and booleans.
      ValueError: for concrete values that int32 cannot hold.
    """
    if not isinstance(positions, jax.Array):
        positions = np.asarray(positions)
    wide = positions.dtype.kind in "iu" and not np.can_cast(positions.dtype, np.int32)
    if wide and positions.size and not isinstance(positions, Tracer):
        low, high = int(positions.min()), int(positions.max())
        if low < -(2**31) or high >= 2**31:
            raise ValueError(f"{where}: {name} must fit int32, got {low} to {high}.")
    if not jnp.issubdtype(positions.dtype, jnp.integer):
        raise TypeError(f"{where}: {name} must be integers, got {positions.dtype}.")
    return jnp.asarray(positions, jnp.int32)


def coordinate_values(where: str, coordinates, name: str = "coordinates") -> jax.Array:
    """Returns coordinates as int32, or float32 where they were given as float32.

    Raises:
      TypeError: for bfloat16, float16 and float64, booleans and complex numbers.
    """
    if not hasattr(coordinates, "dtype"):
        coordinates = np.asarray(coordinates)
        if coordinates.dtype == np.float64:  # Python's floats have no other type.
            coordinates = coordinates.astype(np.float32)
    dtype = coordinates.dtype
    if dtype == jnp.float32:
        return jnp.asarray(coordinates)
    if jnp.issubdtype(dtype, jnp.floating):
        raise TypeError(f"{where}: {name} must be integers or float32, got {dtype}.")
    return integer_positions(where, coordinates, name)
