"""ALiBi against its authors' slopes and the paper's formula."""

import jax
import numpy as np
import pytest

import posenc_jax as pe
from tests.oracle import attend, qkv, softmax_attention
from tests.support import golden, parameters

OPTIONS = {
    pe.ALiBi: {"symmetry": "learned", "num_biased_heads": 3, "past_offset": 0.5, "scaled": True}
}

GOLDEN = golden("alibi")
SLOPES = {int(n): s for n, s in GOLDEN["slopes"].items()}  # Printed by the authors' get_slopes.
ARRAYS = qkv(length=21)


@pytest.mark.parametrize("heads", SLOPES)
def test_slopes_are_those_of_the_authors_code(heads):
    np.testing.assert_allclose(pe.alibi_slopes(heads), SLOPES[heads], rtol=1e-6)
    np.testing.assert_array_equal(pe.ALiBi(num_heads=heads).rules({}).heads, pe.alibi_slopes(heads))


def test_attention_matches_the_paper():
    expected = softmax_attention(
        *ARRAYS,
        lambda q, k, n, i, j: q @ k / np.sqrt(8) - SLOPES[6][n] * abs(i - j),
        sees=lambda i, j: True,
    )
    np.testing.assert_allclose(attend(pe.ALiBi(num_heads=6), {}, *ARRAYS), expected, atol=1e-5)


def test_the_penalty_at_far_positions():
    positions = np.array([1, 257, 10**6])
    dense = pe.ALiBi(num_heads=12).rules({}).dense(positions, positions)
    expected = -np.array(SLOPES[12])[:, None, None] * abs(positions[:, None] - positions[None])
    np.testing.assert_allclose(dense, expected, rtol=1e-6)


def issue_five(heads, length, symmetry, past=None, future=None):
    """The forms for encoders of issue 5 of the authors' repository, in float64: [N, T, T]."""
    positions = np.arange(length)
    away = np.abs(positions[None, :] - positions[:, None])
    if symmetry == "split":
        hidden = np.full((length, length), -np.inf)
        above, below = np.triu(hidden, 1), np.tril(hidden, -1)
        half = -np.array(SLOPES[heads // 2])[:, None, None] * away
        return np.concatenate([half + above, half + below])
    past, future = (-1 / (1 + np.exp(-np.float64(x))) for x in (past, future))
    return np.triu(future[:, None, None] * away) + np.tril(past[:, None, None] * away)


def test_split_matches_the_authors():
    scheme = pe.ALiBi(num_heads=12, symmetry="split")
    got = np.array(scheme.rules({}).dense(np.arange(21), np.arange(21)))
    expected = issue_five(12, 21, "split")
    np.testing.assert_array_equal(got < -1e19, np.isinf(expected))
    np.testing.assert_allclose(np.where(got < -1e19, -np.inf, got), expected, rtol=2e-6)
    far = scheme.rules({}).dense(*[np.array([0, 2**31 - 1], np.int32)] * 2)
    assert np.isfinite(far).all()


def test_learned_slopes_match_the_authors():
    scheme = pe.ALiBi(num_heads=6, symmetry="learned")
    params, positions = parameters(scheme), np.array([0, 1, 20, 257, 10**6])
    got = jax.jit(lambda at: scheme.rules(params).dense(at, at))(positions)
    short = issue_five(6, 21, "learned", **params)[:, positions[:3]][:, :, positions[:3]]
    np.testing.assert_allclose(got[:, :3, :3], short, rtol=2e-6)
    past, future = (1 / (1 + np.exp(-np.float64(params[n]))) for n in ("past", "future"))
    np.testing.assert_allclose(got[:, 4, 3], -past * (10**6 - 257), rtol=2e-6)
    np.testing.assert_allclose(got[:, 3, 4], -future * (10**6 - 257), rtol=2e-6)


def test_split_hides_past_keys_nearer_than_the_offset():
    """Of float coordinates: their distance minus the offset is negative."""
    rule = pe.ALiBi(num_heads=4, symmetry="split", past_offset=0.5).rules({})
    bias = rule.dense(np.float32([0.3]), np.float32([0.0]))[:, 0, 0]
    assert (bias < -1e18).sum() == 2 and np.abs(bias[bias > -1e18]).max() < 1


def test_split_in_causal_attention_leaves_half_of_the_heads_their_own_token():
    out = attend(pe.ALiBi(num_heads=6, symmetry="split"), {}, *ARRAYS, is_causal=True)
    np.testing.assert_array_equal(out[:, :, 3:], np.repeat(ARRAYS[2], 2, axis=2)[:, :, 3:])


def test_past_offset_matches_ruoss_et_al():
    """google-deepmind/randomized_positional_encodings, compute_alibi_encodings_biases."""
    lower = sum(np.tri(21, k=-i) for i in range(1, 21))
    alibi = 0.5 * np.tri(21, k=-1) - lower - lower.T
    scheme = pe.ALiBi(num_heads=12, past_offset=0.5)
    got = scheme.rules({}).dense(np.arange(21), np.arange(21))
    np.testing.assert_allclose(got, alibi * np.array(SLOPES[12])[:, None, None], rtol=2e-6)


def test_num_biased_heads_leaves_the_other_heads_without_a_bias():
    """lucidrains/x-transformers: slopes of that many heads, then zeros."""
    got = pe.ALiBi(num_heads=12, num_biased_heads=6).rules({}).heads
    np.testing.assert_allclose(got, [*SLOPES[6], *[0.0] * 6], rtol=1e-6)


def test_scaled_matches_falcon():
    """huggingface/transformers, models/falcon: attention_logits = (q k + alibi) / sqrt(H)."""
    expected = softmax_attention(
        *ARRAYS, lambda q, k, n, i, j: (q @ k + SLOPES[6][n] * j) / np.sqrt(8)
    )
    out = attend(pe.ALiBi(num_heads=6, scaled=True), {}, *ARRAYS, is_causal=True)
    np.testing.assert_allclose(out, expected, atol=1e-5)


ERRORS = [
    (pe.ALiBi, {"num_heads": 5, "symmetry": "split"}, "needs an even num_heads, got 5"),
    (pe.ALiBi, {"symmetry": "split", "past_offset": 1.0}, "needs a past_offset below 1, got 1.0"),
    (pe.ALiBi, {"num_biased_heads": 7}, "num_biased_heads must be 1 to 6, .*, got 7 .*'symmetric'"),
    (pe.ALiBi, {"num_biased_heads": 2, "symmetry": "learned"}, "heads must be .*, got 2 .*'learn"),
]
