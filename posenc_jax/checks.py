"""Checks of arguments at the public boundary."""

import difflib
import math
from collections.abc import Iterable

import jax
import jax.numpy as jnp
import numpy as np
from jax.core import Tracer


def require(condition: bool | np.bool_, message: str) -> None:
    """Raises `ValueError(message)` unless `condition` holds."""
    if not condition:
        raise ValueError(message)


def did_you_mean(name: str, known: Iterable[str]) -> str:
    """Returns the end of a message about a name that is not known: "; did you mean 'rope'?"."""
    lower = {x.lower(): x for x in known}
    near = difflib.get_close_matches(name.lower(), lower, 1)
    return f"; did you mean {lower[near[0]]!r}?" if near else ""


def refuse_unknown(caller: str, options: Iterable[str], known: Iterable[str]) -> None:
    """Raises `TypeError` for the name of an option that is not known."""
    known = sorted(known)
    for name in sorted(set(options) - set(known)):
        raise TypeError(
            f"{caller}: unknown argument {name!r}; it takes {', '.join(known)}"
            f"{did_you_mean(name, known) or '.'}"
        )


def array_of_rank(caller: str, name: str, x, rank: int, axes: str) -> None:
    """Raises `ValueError` unless `x` has `rank` axes, called `axes` in the message."""
    if jnp.ndim(x) != rank:
        raise ValueError(f"{caller}: {name} must be {axes}, got shape {jnp.shape(x)}.")


def floating(caller: str, name: str, x) -> None:
    """Raises `TypeError` unless `x` is an array of floats."""
    if not hasattr(x, "dtype"):
        raise TypeError(f"{caller}: {name} must be an array, got {type(x).__name__}.")
    if not jnp.issubdtype(x.dtype, jnp.floating):
        raise TypeError(f"{caller}: {name} must be floating, got {x.dtype}.")


def bool_rows(caller: str, name: str, x) -> jax.Array:
    """Returns bool [B, T].

    Raises:
      TypeError: for other dtypes: token ids, too, are true where they are not 0.
      ValueError: for another number of axes.
    """
    array_of_rank(caller, name, x, 2, "[B, T]")
    x = jnp.asarray(x)
    if x.dtype != jnp.bool_:
        raise TypeError(
            f"{caller}: {name} must be bool, got {x.dtype}; of 0 and 1 take `== 1`, and of tokens "
            "a comparison such as `tokens != pad_id`."
        )
    return x


def integers(caller: str, **sizes) -> None:
    """Raises `TypeError` unless all named sizes are integers."""
    for name, size in sizes.items():
        if isinstance(size, bool) or not isinstance(size, int | np.integer):
            raise TypeError(f"{caller}: {name} must be an integer, got {size!r}.")


def integers_from(least: int, caller: str, **sizes) -> None:
    """Raises unless all named sizes are integers of at least `least`.

    Raises:
      TypeError: for a size that is not an integer.
      ValueError: for a size below `least`.
    """
    integers(caller, **sizes)
    for name, size in sizes.items():
        require(size >= least, f"{caller}: {name} must be >= {least}, got {size}.")


def positive_integers(caller: str, **sizes) -> None:
    """Raises unless all named sizes are integers of at least one; see `integers_from`."""
    integers_from(1, caller, **sizes)


def positive_fields(scheme, *names: str) -> None:
    """Raises, as `positive_integers`, unless the named fields of a scheme are positive integers."""
    positive_integers(scheme.name, **{name: getattr(scheme, name) for name in names})


def finite(caller: str, **numbers: float) -> None:
    """Raises `ValueError` unless all named numbers are finite, and `TypeError` for truth values."""
    for name, number in numbers.items():
        if isinstance(number, bool):
            raise TypeError(f"{caller}: {name} must be a number, got {number}.")
        require(math.isfinite(number), f"{caller}: {name} must be finite, got {number}.")


def positive(caller: str, **numbers: float) -> None:
    """Raises `ValueError` unless all named numbers are positive and finite."""
    for name, number in numbers.items():
        require(number > 0, f"{caller}: {name} must be positive, got {number}.")
    finite(caller, **numbers)


def not_negative(caller: str, **numbers: float) -> None:
    """Raises `ValueError` unless all named numbers are zero or positive, and finite."""
    for name, number in numbers.items():
        require(number >= 0, f"{caller}: {name} must not be negative, got {number}.")
    finite(caller, **numbers)


def one_of(caller: str, choices: tuple[str, ...], **words: str) -> None:
    """Raises `ValueError` unless every named word is one of `choices`."""
    for name, word in words.items():
        require(word in choices, f"{caller}: {name} must be one of {choices}, got {word!r}.")


def divides(caller: str, **sizes: int) -> None:
    """Raises `ValueError` unless the second of two named sizes divides the first."""
    (a, x), (b, y) = sizes.items()
    if y < 1 or x % y:
        raise ValueError(f"{caller}: {a}={x} must be a multiple of {b}={y}.")


def query_heads(caller: str, q: jax.Array, num_heads: int, head_dim: int) -> None:
    """Raises `ValueError` unless q [B, T, N, H] has these heads."""
    require(
        q.shape[2:] == (num_heads, head_dim),
        f"{caller}: q must be [B, T, {num_heads}, {head_dim}], got {q.shape}.",
    )


def in_table(caller: str, positions, rows: int) -> None:
    """Raises `ValueError` if concrete positions lie outside a table of `rows` rows."""
    if isinstance(positions, Tracer) or not positions.size:
        return
    known = np.asarray(positions)  # np.min of a jax.Array would trace under jit.
    low, high = known.min(), known.max()
    require(
        0 <= low and high < rows,
        f"{caller}: positions must be in [0, {rows}), the rows of the table, got {low} to {high}.",
    )


def activations(caller: str, x: jax.Array | None, model_dim: int, quantity: str) -> jax.Array:
    """Returns x [B, T, D] as float32; a scheme computes `quantity` from it.

    Raises:
      ValueError: for a missing x, or another width than D.
    """
    if x is None:
        raise ValueError(
            f"{caller}: {quantity} are computed from x [B, T, {model_dim}], got None; pass x to "
            "scheme_attention."
        )
    require(x.shape[-1] == model_dim, f"{caller}: x must be [B, T, {model_dim}], got {x.shape}.")
    return x.astype(jnp.float32)


def integer_positions(caller: str, positions, name: str = "positions") -> jax.Array:
    """Returns integers of any dtype as int32.

    Raises:
      TypeError: for floats (bfloat16 cannot represent 257), booleans, and traced uint32 and uint64,
        whose values are not known.
      ValueError: for concrete values outside int32.
    """
    if not isinstance(positions, jax.Array):
        positions = np.asarray(positions)
    wide = positions.dtype.kind in "iu" and not np.can_cast(positions.dtype, np.int32)
    if wide and positions.size and not isinstance(positions, Tracer):
        low, high = int(positions.min()), int(positions.max())
        if low < -(2**31) or high >= 2**31:
            raise ValueError(f"{caller}: {name} must fit int32, got {low} to {high}.")
    if wide and positions.dtype.kind == "u" and isinstance(positions, Tracer):
        raise TypeError(
            f"{caller}: {name} must be signed under jit, got {positions.dtype}, whose values may "
            "exceed int32; give .astype(jnp.int32) of values that do not."
        )
    if not jnp.issubdtype(positions.dtype, jnp.integer):
        real = jnp.issubdtype(positions.dtype, jnp.floating) and name.endswith("positions")
        raise TypeError(
            f"{caller}: {name} must be integers, got {positions.dtype}"
            + ("; give real numbers as coordinates." if real else ".")
        )
    return jnp.asarray(positions, jnp.int32)


def segments(caller: str, segment_ids, shape: tuple[int, ...]) -> jax.Array:
    """Returns segment ids [B, T] as int32; None stands for one segment.

    Raises:
      ValueError: for a shape other than [B, T].
      TypeError: for ids that are not integers.
    """
    if segment_ids is None:
        return jnp.zeros(shape, jnp.int32)
    got = jnp.shape(segment_ids)
    require(got == shape, f"{caller}: segment_ids must be [B, T] = {shape}, got {got}.")
    return integer_positions(caller, segment_ids, "segment_ids")


def token_integers(caller: str, name: str, x, shape: tuple[int, ...]) -> jax.Array:
    """Returns integers [T], [1, T] or [B, T] as int32 [1 or B, T].

    Args:
      caller, name: of the argument, for messages.
      x: the integers.
      shape: (B, T).

    Raises:
      TypeError: unless they are integers.
      ValueError: for other shapes, and values outside int32.
    """
    if isinstance(x, jax.Array) and x.dtype == jnp.int32 and x.shape == shape:
        return x  # As it was returned before.
    return _rows(caller, name, integer_positions(caller, x, name), shape)


def token_coordinates(caller: str, name: str, x, shape: tuple[int, ...]) -> jax.Array:
    """Returns coordinates [T], [1, T] or [B, T] as [1 or B, T]; [A, 1 or B, T] as [A, B, T].

    They are int32 or float32; see `coordinate_values` and `token_integers`.
    """
    x = coordinate_values(caller, x, name)
    if x.ndim != 3:
        return _rows(caller, name, x, shape, f", or [A, B, {shape[1]}] for A axes,")
    batch, length = shape
    require(
        x.shape[1:] in (shape, (1, length)),
        f"{caller}: {name} must be [A, B, {length}] or [A, 1, {length}] with B = {batch}, "
        f"got {x.shape}.",
    )
    return jnp.broadcast_to(x, (len(x), *shape))


def _rows(caller: str, name: str, x: jax.Array, shape: tuple[int, ...], others="") -> jax.Array:
    batch, length = shape
    rows = x[None] if x.ndim == 1 else x
    require(
        rows.shape in (shape, (1, length)),
        f"{caller}: {name} must be [{length}] or [B, {length}]{others} with B = {batch}, "
        f"got {x.shape}.",
    )
    return rows


def coordinate_values(caller: str, coordinates, name: str = "coordinates") -> jax.Array:
    """Returns coordinates as int32 or float32.

    Concrete float64 values that float32 represents exactly are converted, as are Python's
    floats.

    Raises:
      TypeError: for bfloat16, float16, other float64, booleans and complex numbers.
    """
    rounds = not hasattr(coordinates, "dtype")  # Python's floats have no other type.
    if rounds:
        coordinates = np.asarray(coordinates)
    dtype = coordinates.dtype
    if dtype == np.float64 and not isinstance(coordinates, Tracer):
        exact = np.asarray(coordinates)
        with np.errstate(over="ignore"):
            single = exact.astype(np.float32)
        if not rounds and not np.array_equal(single, exact, equal_nan=True):
            raise TypeError(
                f"{caller}: {name} are float64 and not exact in float32; round them with "
                ".astype(np.float32)."
            )
        return jnp.asarray(single)
    if dtype == jnp.float32:
        return jnp.asarray(coordinates)
    if jnp.issubdtype(dtype, jnp.floating):
        raise TypeError(f"{caller}: {name} must be integers or float32, got {dtype}.")
    return integer_positions(caller, coordinates, name)
