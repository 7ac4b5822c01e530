"""Positions of packed and padded batches, against loops that read as their definitions."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from posenc_jax.positions import count_up, from_padding_mask, from_segment_ids


def test_count_up_from_one_start_or_one_for_each_row():
    np.testing.assert_array_equal(count_up(2, 3), [[0, 1, 2], [0, 1, 2]])
    np.testing.assert_array_equal(count_up(1, 2, start=257), [[257, 258]])
    rows = count_up(2, 2, start=jnp.array([0, 10**6]))
    np.testing.assert_array_equal(rows, [[0, 1], [10**6, 10**6 + 1]])
    assert rows.dtype == jnp.int32
    np.testing.assert_array_equal(jax.jit(lambda s: count_up(2, 2, s))(jnp.int32(5))[1], [5, 6])


@settings(deadline=None, max_examples=15)
@given(st.lists(st.integers(1, 4), min_size=1, max_size=5), st.integers(0, 3))
def test_segments_restart_at_zero(lengths, padding):
    lengths, ids = [*lengths, padding], [*range(len(lengths)), -1]
    total = 16  # One shape for all.
    lengths[-1] += total - sum(lengths) if sum(lengths) <= total else 0
    segments = np.repeat(ids, lengths)[:total][None]
    segments = np.pad(segments, ((0, 0), (0, total - segments.shape[1])), constant_values=-1)
    wanted, before = [], None
    for segment in segments[0]:
        wanted.append(wanted[-1] + 1 if segment == before else 0)
        before = segment
    got = from_segment_ids(jnp.asarray(segments, jnp.int32))
    np.testing.assert_array_equal(got[0], wanted)
    assert got.dtype == jnp.int32


def test_equal_numbers_that_stand_apart_are_two_segments():
    np.testing.assert_array_equal(from_segment_ids(jnp.array([[3, 3, 1, 3]])), [[0, 1, 0, 0]])


@pytest.mark.parametrize(
    "mask, positions",
    [
        ([0, 0, 1, 1, 1], [0, 0, 0, 1, 2]),  # Left padding; BLOOM and OPT: cumsum - 1.
        ([1, 1, 1, 0, 0], [0, 1, 2, 2, 2]),
        ([1, 0, 1, 0, 1], [0, 0, 1, 1, 2]),
        ([0, 0, 0, 0, 0], [0, 0, 0, 0, 0]),
    ],
)
def test_the_first_token_of_a_padded_row_is_at_zero(mask, positions):
    for dtype in (bool, np.int32):
        got, segments = from_padding_mask(jnp.asarray([mask], dtype))
        np.testing.assert_array_equal(got[0], positions)
        np.testing.assert_array_equal(segments[0], np.array(mask) - 1)
        assert got.dtype == segments.dtype == jnp.int32


def test_errors_name_the_argument_and_the_shape():
    with pytest.raises(ValueError, match=r"from_segment_ids: segment_ids must be \[B, T\].*\(3,\)"):
        from_segment_ids(jnp.zeros(3, jnp.int32))
    with pytest.raises(ValueError, match=r"from_padding_mask: mask must be \[B, T\].*\(1, 2, 3\)"):
        from_padding_mask(jnp.zeros((1, 2, 3), bool))


@pytest.mark.parametrize("start", [1.5, jnp.bfloat16(257), True], ids=str)
def test_a_start_that_does_not_count_is_refused(start):
    with pytest.raises(TypeError, match="count_up: start must be integers, got"):
        count_up(2, 3, start)
    with pytest.raises(ValueError, match="count_up: start must fit int32"):
        count_up(2, 3, 2**31)
