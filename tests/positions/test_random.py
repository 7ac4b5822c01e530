"""Coordinates drawn at random: their invariants, and lines of the authors' code that can run."""

import collections

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import posenc_jax as pe
from posenc_jax import contrib
from posenc_jax import positions as pos
from tests.oracle import qkv
from tests.support import parameters, slow

KEY = jax.random.key(3)
PACKED = np.array([[0] * 5 + [1] * 11 + [-1] * 3, [7] * 12 + [8] * 7], np.int32)
PLACES = np.array([[*range(5), *range(11), *range(3)], [*range(12), *range(7)]], np.int32)
DRAWS = {
    "randomized": lambda key, p, **o: pos.randomized(key, p, 50, **o),
    "random_floats": lambda key, p, **o: pos.random_floats(key, p, 50.0, **o),
    "shifted": lambda key, p, **o: pos.shifted(key, p, 40, **o),
    "continuous": contrib.continuous,
    "skip_wise": lambda key, p, **o: contrib.skip_wise(key, p, 60, **o),
}
COMPILED = [jax.jit(draw) for draw in DRAWS.values()]
ALL = pytest.mark.parametrize("draw", COMPILED, ids=DRAWS.keys())


def parts(x):
    """The segments of the packed rows."""
    for row, ids in zip(np.asarray(x), np.asarray(PACKED), strict=True):
        yield from (row[ids == i] for i in dict.fromkeys(ids.tolist()))


@ALL
def test_order_is_kept_in_every_segment(draw):
    for seed in range(20):
        out = draw(jax.random.key(seed), PLACES, segment_ids=PACKED)
        assert out.shape == PLACES.shape
        assert all((np.diff(part) > 0).all() for part in parts(out))


@ALL
def test_rows_segments_and_keys_draw_independently(draw):
    out = np.asarray(draw(KEY, PLACES, segment_ids=PACKED))
    heads = [part[:5].tolist() for part in parts(out) if len(part) >= 5]
    assert len({tuple(np.diff(h, prepend=0).round(4)) for h in heads}) > 1
    other = np.asarray(draw(jax.random.key(4), PLACES, segment_ids=PACKED))
    assert np.abs(other - out).max() > 0.01


@slow
@pytest.mark.parametrize("name", ["shifted", "continuous"])
def test_a_decode_step_continues_the_draw(name):
    whole, step = jax.jit(
        lambda key: [DRAWS[name](key, pos.count_up(2, *where)) for where in ((12,), (3, 9))]
    )(KEY)
    np.testing.assert_allclose(step, whole[:, 9:], atol=1e-6)


@slow
def test_randomized_numbers_are_distinct_and_below_the_maximum():
    draw = jax.jit(pos.randomized, static_argnums=2)
    for seed in range(10):
        out = np.asarray(draw(jax.random.key(seed), PLACES, 19, segment_ids=PACKED))
        assert out.dtype == jnp.int32 and out.min() >= 0 and out.max() < 19
        assert all(len(set(row.tolist())) == 19 for row in out)
    whole = draw(KEY, np.arange(19)[None], 19)
    np.testing.assert_array_equal(whole[0], np.arange(19))


def test_random_floats_are_the_order_statistics_of_uniform_numbers():
    """The k-th of n has mean k / (n + 1) and variance k (n + 1 - k) / ((n + 1)^2 (n + 2))."""
    positions, segments = jnp.array([[0, 0, 1, 2, 1]]), jnp.array([[0, 1, 0, 0, 1]])
    keys = jax.random.split(KEY, 4000)
    draw = jax.vmap(lambda k: pos.random_floats(k, positions, 8.0, segment_ids=segments)[0])
    out = np.asarray(jax.jit(draw)(keys))
    assert out.dtype == jnp.float32 and out.min() >= 0 and out.max() < 8
    k, n = np.array([1, 1, 2, 3, 2]), np.array([3, 2, 3, 3, 2])
    mean, variance = k / (n + 1), k * (n + 1 - k) / ((n + 1) ** 2 * (n + 2))
    # Four standard errors.
    np.testing.assert_allclose(out.mean(0) / 8, mean, atol=4 * (variance.max() / 4000) ** 0.5)
    np.testing.assert_allclose(out.var(0) / 64, variance, atol=0.006)
    between = np.corrcoef(out.T)[0, 1]  # Segments are independent.
    assert abs(between) < 4 / 4000**0.5


def test_spaced_floats_fill_the_range_of_the_paper():
    """(2 i - 1) / (2 n) for i from 1, times the range."""
    out = pos.spaced_floats(jnp.arange(10)[None], 10, 1.0)
    np.testing.assert_allclose(out[0], [(2 * i - 1) / 20 for i in range(1, 11)], rtol=1e-6)


def test_randomized_sets_are_equally_likely():
    """As a sorted choice without replacement is: each of the 10 pairs of 5 numbers."""
    segments = np.array([[0, 1, 0, 1]])  # Segments need not be contiguous.
    positions = np.array([[0, 0, 1, 1]])
    keys = jax.random.split(KEY, 4000)
    draw = jax.vmap(lambda k: pos.randomized(k, positions, 5, segment_ids=segments)[0])
    out = np.asarray(jax.jit(draw)(keys))
    for first in (0, 1):
        seen = collections.Counter(map(tuple, out[:, first::2].tolist()))
        assert len(seen) == 10 and min(seen.values()) > 330 and max(seen.values()) < 470


def test_randomized_is_ordered_by_positions_not_by_slots():
    order = np.random.default_rng(0).permutation(19)
    positions = np.tile(order.astype(np.int32), (2, 1))
    out = np.asarray(COMPILED[0](KEY, positions, segment_ids=np.zeros_like(positions)))
    assert (np.diff(out[0, np.argsort(order)]) > 0).all()


def noisy_alibi(slopes, length, drawn, future=None):
    """google-deepmind/randomized_positional_encodings, compute_noisy_alibi_encodings_biases.

    `drawn` are its sorted positions, `future` the left side with randomize_both_sides.
    """
    right = -np.float64(drawn)
    before = np.flip(right) if future is None else np.sort(-np.float64(future))
    row = np.concatenate([[np.nan], before + 0.5, [0.0], right])
    bias = np.zeros((length, length))
    for i in range(length):  # relative_shift: keys from i back to i on.
        bias[i] = row[length - i : 2 * length - i]
    return bias * np.array(slopes)[:, None, None]


@slow
def test_randomized_distances_match_the_authors():
    keys = jax.random.split(KEY)
    drawn, future = jax.jit(lambda keys: [pos.randomized_distances(k, 62, 2048) for k in keys])(
        keys
    )
    assert (np.diff(drawn) > 0).all() and drawn[0] >= 1 and drawn[-1] < 2048
    alibi = pe.ALiBi(num_heads=6, past_offset=0.5).rules({})

    @jax.jit
    def biases(drawn, future, at):
        one, both = pe.on_distances(alibi, drawn), pe.on_distances(alibi, future, drawn)
        out = [pe.attention(*qkv(), rules=one, implementation=i) for i in ("reference", "xla")]
        return [bias.dense(at, at) for bias in (one, both)], out

    for first in (0, 100):
        (one, both), out = biases(drawn, future, np.arange(first, first + 63))
        np.testing.assert_allclose(one, noisy_alibi(pe.alibi_slopes(6), 63, drawn), rtol=2e-6)
        expected = noisy_alibi(pe.alibi_slopes(6), 63, drawn, future)
        np.testing.assert_allclose(both, expected, rtol=2e-6)
        np.testing.assert_allclose(*out, atol=1e-5)


def test_distances_beyond_the_draw_are_nan_and_others_exact():
    t5 = pe.T5(num_heads=2)
    bias, at = t5.rules(parameters(t5)), np.arange(9)
    got, plain = jax.jit(
        lambda at: [b.dense(at, at) for b in (pe.on_distances(bias, np.arange(1, 6)), bias)]
    )(at)
    far = np.abs(np.subtract.outer(np.arange(9), np.arange(9))) > 5
    np.testing.assert_array_equal(np.isnan(got), np.broadcast_to(far, got.shape))
    np.testing.assert_array_equal(np.where(far, 0, got), np.where(far, 0, plain))


def test_shifts_cover_their_range_and_keep_distances():
    keys = jax.random.split(KEY, 300)
    draw = jax.vmap(lambda k: pos.shifted(k, PLACES, 7, segment_ids=PACKED))
    out = np.asarray(jax.jit(draw)(keys)) - np.asarray(PLACES)[None]
    assert set(out[:, 0, 0].tolist()) == set(range(7))
    for moved in out[:20]:
        assert all(len(set(part.tolist())) == 1 for part in parts(moved))


DRAW = {"key": KEY, "positions": PLACES}
ERRORS = [
    (pos.randomized, DRAW | {"max_length": 18}, "randomized: max_length must be .* 19 .*, got 18"),
    (
        pos.randomized,
        {"key": KEY, "positions": PLACES[0], "max_length": 30},
        r"positions must be \[B, T\], got .*\(19,\)",
    ),
    (
        pos.randomized_distances,
        {"key": KEY, "count": 5, "max_length": 5},
        "count must be 1 to 4 .*, got 5",
    ),
    (pos.shifted, DRAW | {"max_shift": 0}, "shifted: max_shift must be >= 1, got 0"),
    (
        pos.shifted,
        DRAW | {"max_shift": 3, "segment_ids": PLACES[:1]},
        r"segment_ids must be .*\(1, 19\)",
    ),
    (contrib.skip_wise, DRAW | {"max_length": 18}, "skip_wise: max_length .* 19 .*, got 18"),
    (contrib.continuous, DRAW | {"local_shift": -1.0}, "must not be negative, got 5.0 and -1"),
    (pos.random_floats, DRAW | {"high": 0.0}, "high must be positive, got 0.0"),
    (pos.spaced_floats, {"positions": PLACES, "length": 0, "high": 1.0}, "length must be pos"),
    (pos.spaced_floats, {"positions": PLACES, "length": 4, "high": -1.0}, "high must be positive"),
    (contrib.continuous, DRAW | {"max_scaling": 0.5}, "max_scaling must be .*, got 0.5"),
]
