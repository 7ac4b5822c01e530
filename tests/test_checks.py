"""Positions become int32, coordinates int32 or float32; others are refused, never rounded."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from posenc_jax.checks import coordinate_values, integer_positions

INTEGERS = [np.int8, np.uint8, np.int16, np.uint16, np.int32, np.uint32, np.int64, np.uint64]
BOTH = pytest.mark.parametrize("convert", [integer_positions, coordinate_values])


@BOTH
def test_any_integers_become_int32(convert):
    for x in [np.array([0, 100], dtype) for dtype in INTEGERS] + [[0, 100]]:
        got = convert("f", x)
        assert got.dtype == jnp.int32 and isinstance(got, jax.Array)
        np.testing.assert_array_equal(got, [0, 100])
    assert convert("f", 7) == 7 and convert("f", np.zeros((0,), np.int64)).shape == (0,)
    traced = jax.eval_shape(lambda x: convert("f", x), np.zeros(3, np.uint16))
    assert traced.dtype == jnp.int32
    with pytest.raises(TypeError, match=r"f: .* must be signed under jit, got uint32"):
        jax.eval_shape(lambda x: convert("f", x), np.zeros(3, np.uint32))
    edges = np.array([-(2**31), 2**31 - 1])
    np.testing.assert_array_equal(convert("f", edges), edges)


@BOTH
def test_positions_out_of_int32_are_refused(convert):
    for positions, low, high in (
        (np.array([0, 2**31]), 0, 2**31),
        (np.array([-(2**31) - 1, 5]), -(2**31) - 1, 5),
        ([2**40], 2**40, 2**40),
        (np.array([2**64 - 1], np.uint64), 2**64 - 1, 2**64 - 1),
        (jnp.array([1, 2**31], jnp.uint32), 1, 2**31),
    ):
        with pytest.raises(ValueError, match=f"^f: p must fit int32, got {low} to {high}"):
            convert("f", positions, "p")


def test_other_dtypes_are_refused():
    for dtype in (jnp.bfloat16, jnp.float16, bool, jnp.complex64):
        x, name = np.zeros(3, dtype), jnp.dtype(dtype).name
        with pytest.raises(TypeError, match=f"^f: positions must be integers, got {name}"):
            integer_positions("f", x)
        with pytest.raises(TypeError, match=f"^f: coordinates must be integers.*, got {name}"):
            coordinate_values("f", x)
    real = np.zeros(3, np.float32)
    with pytest.raises(TypeError, match=r"q_positions .* float32; give real numbers as coordinat"):
        integer_positions("f", real, "q_positions")
    with pytest.raises(TypeError, match=r"segment_ids must be integers, got float32\.$"):
        integer_positions("f", real, "segment_ids")


def test_coordinates_are_float32_where_that_is_exact():
    exact = 0.5 * np.arange(2**24 - 4, 2**24)
    for x in (jnp.array([0.5, 2], "f4"), np.array([0.5, 2], "f4"), [0.5, 2], exact):
        got = coordinate_values("f", x)
        assert got.dtype == jnp.float32
        np.testing.assert_array_equal(got, x)
    for inexact in (np.array([0.1]), np.array([2.0**24 + 1]), np.array([1e300])):
        with pytest.raises(TypeError, match=r"^f: coordinates are float64 and not exact in .*32"):
            coordinate_values("f", inexact)
    assert coordinate_values("f", [0.1]).dtype == jnp.float32
    with jax.enable_x64(True):
        assert coordinate_values("f", jnp.array([0.0, 0.5], jnp.float64)).dtype == jnp.float32
        with pytest.raises(TypeError, match=r"^f: coordinates must be integers or .*got float64"):
            jax.eval_shape(lambda x: coordinate_values("f", x), np.array([0.0, 0.5]))
