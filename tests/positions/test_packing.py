"""Positions of packed and padded batches, against loops that read as their definitions."""

import jax
import jax.numpy as jnp
import numpy as np
from hypothesis import given, settings
from hypothesis import strategies as st

from posenc_jax import positions
from posenc_jax.positions import count_up, from_padding_mask, from_segment_ids
from tests.support import slow

bilevel, digit_places = jax.jit(positions.bilevel), jax.jit(positions.digit_places)
CUTS = st.sampled_from([1, 5])  # Each is other shapes to compile.


def test_count_up_from_a_scalar_or_per_row_start():
    np.testing.assert_array_equal(count_up(2, 3), [[0, 1, 2], [0, 1, 2]])
    np.testing.assert_array_equal(count_up(1, 2, start=257), [[257, 258]])
    rows = count_up(2, 2, start=jnp.array([0, 10**6]))
    np.testing.assert_array_equal(rows, [[0, 1], [10**6, 10**6 + 1]])
    assert rows.dtype == jnp.int32
    np.testing.assert_array_equal(jax.jit(lambda s: count_up(2, 2, s))(jnp.int32(5))[1], [5, 6])


def test_positions_restart_with_each_segment():
    segments = np.array([[0, 0, 0, 1, 2, 2, -1, -1], [4, 4, 4, 4, 3, 3, 3, 1]], np.int32)
    expected = [[0, 1, 2, 0, 0, 1, 0, 1], [0, 1, 2, 3, 0, 1, 2, 0]]
    np.testing.assert_array_equal(from_segment_ids(segments), expected)
    assert from_segment_ids(segments[:, :0]).shape == (2, 0)
    assert positions.bilevel(segments[:, :0] > 0).shape == (2, 2, 0)


def test_the_start_of_a_row_is_that_of_its_first_token():
    """Padding on the left is no segment; the rows are those without it."""
    ids, digits = np.array([[-1, 0, 0, 1]]), np.array([[False, True, True, True]])
    places = positions.digit_places(digits, before=3, segment_ids=ids)
    np.testing.assert_array_equal(places, [[0, 4, 5, 1]])
    pair = positions.bilevel(np.array([[False, False, True, False]]), start=(5, 2), segment_ids=ids)
    np.testing.assert_array_equal(pair[:, 0, 1:], [[5, 6, 0], [2, 2, 0]])


def test_equal_ids_are_one_segment_wherever_they_lie():
    ids = np.array([[3, 3, 1, 3, -1, 1, 3], [0, 0, -1, 0, 1, 1, 1], [-1, 4, 4, 5, 5, 5, -1]])
    expected = np.array([[0, 1, 0, 2, 0, 1, 3], [0, 1, 0, 2, 0, 1, 2], [0, 0, 1, 0, 1, 2, 0]])
    for function in (from_segment_ids, jax.jit(from_segment_ids)):
        for rows in (slice(0, 3), slice(2, 3)):  # The last row alone needs no sort.
            got = np.where(ids[rows] < 0, 0, function(jnp.asarray(ids[rows])))
            np.testing.assert_array_equal(got, expected[rows])


def test_the_first_token_of_a_padded_row_has_position_zero():
    masks = np.array([[0, 0, 1, 1, 1], [1, 1, 1, 0, 0], [1, 0, 1, 0, 1], [0] * 5])
    # Left padding; BLOOM and OPT: cumsum - 1.
    expected = [[0, 0, 0, 1, 2], [0, 1, 2, 2, 2], [0, 0, 1, 1, 2], [0] * 5]
    got, segments = from_padding_mask(masks > 0)
    np.testing.assert_array_equal(got, expected)
    np.testing.assert_array_equal(segments, masks - 1)
    assert got.dtype == segments.dtype == jnp.int32


def test_positions_that_restart_separate_documents():
    ids = positions.segment_ids_from_positions(np.array([[0, 1, 2, 3, 0, 1, 2, 0, 0, 2, 4]]))
    np.testing.assert_array_equal(ids, [[0, 0, 0, 0, 1, 1, 1, 2, 3, 3, 3]])


ERRORS = [
    (
        from_segment_ids,
        {"segment_ids": np.zeros(3, np.int32)},
        r"from_segment_ids: segment_ids must be \[B, T\].*\(3,\)",
    ),
    (
        from_segment_ids,  # Of a mask, they would begin again in its padding.
        {"segment_ids": np.zeros((1, 3), bool)},
        "from_segment_ids: segment_ids must be integers, got bool",
        TypeError,
    ),
    (
        from_padding_mask,
        {"mask": np.zeros((1, 2, 3), bool)},
        r"from_padding_mask: mask must be \[B, T\].*\(1, 2, 3\)",
    ),
    (digit_places, {"digits": np.zeros(3, bool)}, r"digits must be \[B, T\], got .*\(3,\)"),
    (
        bilevel,
        {"ends": np.zeros((1, 3), bool), "segment_ids": np.zeros((1, 2), np.int32)},
        r"bilevel: segment_ids must be .*\(1, 3\), got \(1, 2\)",
    ),
    (bilevel, {"ends": np.zeros((1, 3), bool), "start": 3}, "bilevel: start must be two indices"),
    (
        count_up,
        {"batch": 2, "length": 3, "start": np.zeros(3, int)},
        r"count_up: start must be a number or \[B\] = \(2,\), got shape \(3,\)",
    ),
    (count_up, {"batch": 2, "length": 3, "start": 2**31}, "count_up: start must fit int32"),
    (
        count_up,
        {"batch": 2, "length": 3, "start": 1.5},
        "count_up: start must be integers, got",
        TypeError,
    ),
    *[  # Token ids are true where they are not 0, and the id of padding may be another.
        (
            call,
            {name: np.zeros((1, 3), np.int32)},
            f"{name} must be bool, got int32; .*pad_",
            TypeError,
        )
        for call, name in ((from_padding_mask, "mask"), (digit_places, "digits"), (bilevel, "ends"))
    ],
]


def abacus(mask):
    """mcleish7/arithmetic, Abacus.helper, for one row."""
    starts = [bool(m) and not (i and mask[i - 1]) for i, m in enumerate(mask)]
    run = np.cumsum(starts)
    reset = np.zeros(len(mask) + 1, int)
    np.add.at(reset, run, np.arange(len(mask)) * starts)
    return (np.arange(len(mask)) - reset[run] + 1) * np.asarray(mask)


@slow
@settings(deadline=None, max_examples=12)
@given(st.lists(st.booleans(), min_size=12, max_size=12), CUTS, st.integers(0, 99))
def test_digit_places_match_the_authors(mask, cut, shift):
    digits = np.array([mask])
    whole = np.asarray(digit_places(digits))
    np.testing.assert_array_equal(whole[0], abacus(mask))
    later = digit_places(digits[:, cut:], before=whole[:, cut - 1])
    np.testing.assert_array_equal(later, whole[:, cut:])
    moved = digit_places(digits, shift=shift)
    np.testing.assert_array_equal(moved, np.where(whole > 0, whole + shift, 0))
    segments = np.array([[0] * cut + [1] * (12 - cut)])
    packed = digit_places(digits, segment_ids=segments)
    np.testing.assert_array_equal(packed[0], [*abacus(mask[:cut]), *abacus(mask[cut:])])


def test_the_greatest_id_is_a_segment_like_others():
    last = 2**31 - 1
    ids = np.array([[last, -1, last, 0, -1, last]])
    np.testing.assert_array_equal(from_segment_ids(ids), [[0, 0, 1, 0, 1, 2]])


def test_digit_places_of_rows_that_differ():
    digits = np.array([[0, 1, 1, 0, 1, 1, 1, 0, 1], [1, 0, 0, 0, 0, 0, 0, 1, 1]]) == 1
    expected = [[0, 1, 2, 0, 1, 2, 3, 0, 1], [12, 0, 0, 0, 0, 0, 0, 8, 9]]
    got = digit_places(digits, shift=np.array([0, 7]), before=np.array([3, 4]))
    np.testing.assert_array_equal(got, expected)


def test_padding_that_ends_a_sentence_leaves_the_start_of_bilevel():
    """The id of padding may be that of the end of a sentence."""
    ends, ids = np.array([[True, True, False, True, False]]), np.array([[-1, -1, 0, 0, 0]])
    got = bilevel(ends, start=(4, 2), segment_ids=ids)
    np.testing.assert_array_equal(got[:, 0, 2:], [[4, 5, 0], [2, 2, 3]])


@slow
@settings(deadline=None, max_examples=12)
@given(st.lists(st.booleans(), min_size=12, max_size=12), CUTS)
def test_bilevel_matches_a_loop(mask, cut):
    """zhenyuhe00/BiPE: a separator belongs to the sentence that it ends."""
    places, sentences = [], []
    for i in range(12):
        new = i > 0 and mask[i - 1]
        places.append(0 if i == 0 or new else places[-1] + 1)
        sentences.append(sentences[-1] + new if i else 0)
    ends = np.array([mask])
    whole = np.asarray(bilevel(ends))
    np.testing.assert_array_equal(whole[:, 0], [places, sentences])
    start = (whole[0, :, cut], whole[1, :, cut])
    np.testing.assert_array_equal(bilevel(ends[:, cut:], start=start), whole[:, :, cut:])
    segments = np.array([[0] * cut + [1] * (12 - cut)])
    packed = bilevel(ends, segment_ids=segments)
    alone = bilevel(ends[:, cut:])
    np.testing.assert_array_equal(packed, np.concatenate([whole[:, :, :cut], alone], -1))
