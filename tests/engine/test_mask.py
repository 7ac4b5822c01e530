"""Which query sees which key, against a rule for one query and one key."""

import sys

import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from posenc_jax.engine.mask import visible, window_sides


def sees(i, j, *, causal, window, prefix, until, a, b):
    """The words of the documentation, in their order."""
    seen = j <= i or not causal
    if isinstance(window, int):  # W tokens with the query's own among them.
        seen = seen and abs(i - j) < window
    elif window is not None:  # Inclusive on both sides; negative for no limit.
        left_side, right_side = window
        seen = (
            seen
            and (left_side < 0 or i - j <= left_side)
            and (right_side < 0 or j - i <= right_side)
        )
    seen = seen or (prefix is not None and j < prefix)
    return seen and i < until and a == b and a >= 0


windows = st.one_of(st.none(), st.integers(1, 6), st.tuples(st.integers(-1, 5), st.integers(-1, 5)))


@settings(deadline=None, max_examples=40)
@given(st.booleans(), windows, st.one_of(st.none(), st.integers(0, 6)), st.integers(0, 2**16))
def test_matches_the_rule(causal, window, prefix, seed):
    random = np.random.default_rng(seed)
    i, j = random.integers(-3, 9, (2, 5)), random.integers(-3, 9, (2, 7))
    a, b = random.integers(-2, 2, (2, 5)), random.integers(-2, 2, (2, 7))
    until = random.integers(-3, 12, (2, 7))
    got = visible(
        *(jnp.asarray(x, jnp.int32) for x in (i, j, a, b)),
        is_causal=causal,
        window=window,
        prefix_length=None if prefix is None else jnp.array([prefix, prefix], jnp.int32),
        k_visible_until=jnp.asarray(until, jnp.int32),
    )
    for r, t, s in np.ndindex(2, 5, 7):
        options = {"causal": causal, "window": window, "prefix": prefix, "until": until[r, s]}
        expected = sees(i[r, t], j[r, s], **options, a=a[r, t], b=b[r, s])
        assert got[r, t, s] == expected


def test_segments_of_queries_or_keys_alone_hide_only_padding():
    positions = jnp.arange(3, dtype=jnp.int32)[None]
    ids = jnp.array([[0, -1, 5]], jnp.int32)
    np.testing.assert_array_equal(
        visible(positions, positions, ids)[0], [[1, 1, 1], [0, 0, 0], [1, 1, 1]]
    )
    np.testing.assert_array_equal(visible(positions, positions, None, ids)[0], [[1, 0, 1]] * 3)


def test_each_row_has_its_own_prefix():
    positions = jnp.tile(jnp.arange(3, dtype=jnp.int32), (2, 1))
    got = visible(positions, positions, is_causal=True, prefix_length=jnp.array([0, 2], jnp.int32))
    np.testing.assert_array_equal(got[0], np.tri(3))
    np.testing.assert_array_equal(got[1], [[1, 1, 0], [1, 1, 0], [1, 1, 1]])


def test_sides_of_a_window():
    assert window_sides(None) is None
    assert window_sides(4) == window_sides(np.int64(4)) == (3, 3)
    assert window_sides((2, 0)) == (2, 0)
    assert window_sides((-1, 3)) == (-1, 3)
    positions = jnp.arange(3, dtype=jnp.int32)[None]
    assert visible(positions, positions, window=sys.maxsize).all()


@pytest.mark.parametrize("window", [2.5, (3,), (1, 2, 3), (1.0, 2), "4"], ids=str)
def test_a_malformed_window_is_refused(window):
    with pytest.raises(TypeError, match="window must be an integer, a pair or a SlidingWindow"):
        window_sides(window)
