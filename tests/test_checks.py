"""Errors at the public boundary name the function, the argument, its value and valid values."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from posenc_jax.checks import (
    coordinate_values,
    integer_positions,
)

INTEGERS = [np.int8, np.uint8, np.int16, np.uint16, np.int32, np.uint32, np.int64, np.uint64]


@pytest.mark.parametrize("dtype", INTEGERS)
@pytest.mark.parametrize("convert", [integer_positions, coordinate_values])
def test_any_integers_become_int32(dtype, convert):
    got = convert("f", np.array([[0, 100]], dtype))
    assert got.dtype == jnp.int32 and isinstance(got, jax.Array)
    np.testing.assert_array_equal(got, [[0, 100]])


@pytest.mark.parametrize("convert", [integer_positions, coordinate_values])
def test_lists_numbers_and_tracers(convert):
    np.testing.assert_array_equal(convert("f", [1, 2]), [1, 2])
    assert convert("f", 7) == 7
    traced = jax.jit(lambda p: convert("f", p))(jnp.array([3], jnp.uint32))
    assert traced.dtype == jnp.int32 and traced[0] == 3
    assert convert("f", np.zeros((0,), np.int64)).shape == (0,)


@pytest.mark.parametrize("convert", [integer_positions, coordinate_values])
@pytest.mark.parametrize(
    "positions, low, high",
    [
        (np.array([0, 2**31]), 0, 2**31),
        (np.array([-(2**31) - 1, 5]), -(2**31) - 1, 5),
        ([2**40], 2**40, 2**40),
        (np.array([2**64 - 1], np.uint64), 2**64 - 1, 2**64 - 1),
        (jnp.array([1, 2**31], jnp.uint32), 1, 2**31),
    ],
    ids=["above", "below", "list", "uint64", "uint32 of jax"],
)
def test_positions_out_of_int32_are_refused(convert, positions, low, high):
    with pytest.raises(ValueError, match=f"^f: p must fit int32, got {low} to {high}"):
        convert("f", positions, "p")
    edges = np.array([-(2**31), 2**31 - 1])
    np.testing.assert_array_equal(convert("f", edges), edges)


@pytest.mark.parametrize("dtype", [jnp.float32, jnp.bfloat16, jnp.float16, bool, jnp.complex64])
def test_positions_that_are_not_integers_are_refused(dtype):
    name = jnp.dtype(dtype).name
    with pytest.raises(TypeError, match=f"^f: positions must be integers, got {name}"):
        integer_positions("f", jnp.zeros(3, dtype))


@pytest.mark.parametrize("dtype", [jnp.bfloat16, jnp.float16, bool, jnp.complex64])
def test_coordinates_that_round_are_refused(dtype):
    name = jnp.dtype(dtype).name
    with pytest.raises(TypeError, match=f"^f: coordinates must be integers.*, got {name}"):
        coordinate_values("f", np.zeros(3, dtype))


@pytest.mark.parametrize(
    "coordinates", [jnp.array([0.5, 2], "f4"), np.array([0.5, 2], "f4"), [0.5, 2]]
)
def test_coordinates_may_be_float32(coordinates):
    got = coordinate_values("f", coordinates)
    assert got.dtype == jnp.float32
    np.testing.assert_array_equal(got, [0.5, 2.0])


def test_float64_coordinates_that_float32_represents_are_converted():
    got = coordinate_values("f", 0.5 * np.arange(2**24 - 4, 2**24))
    assert got.dtype == jnp.float32
    np.testing.assert_array_equal(got, 0.5 * np.arange(2**24 - 4, 2**24))
    for inexact in (np.array([0.1]), np.array([2.0**24 + 1]), np.array([1e300])):
        with pytest.raises(TypeError, match=r"^f: coordinates are float64 and not exact in .*32"):
            coordinate_values("f", inexact)
    assert coordinate_values("f", [0.1]).dtype == jnp.float32
    with jax.enable_x64(True):
        assert coordinate_values("f", jnp.array([0.0, 0.5], jnp.float64)).dtype == jnp.float32
        with pytest.raises(TypeError, match=r"^f: coordinates must be integers or .*got float64"):
            jax.jit(lambda x: coordinate_values("f", x))(jnp.array([0.0, 0.5], jnp.float64))


def test_real_positions_belong_to_the_coordinates():
    with pytest.raises(TypeError, match=r"q_positions .* float32; give real numbers as coordinat"):
        integer_positions("f", jnp.zeros(3), "q_positions")
    with pytest.raises(TypeError, match=r"segment_ids must be integers, got float32\.$"):
        integer_positions("f", jnp.zeros(3), "segment_ids")
