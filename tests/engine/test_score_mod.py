"""`score_mod` against runs of PyTorch's FlexAttention, with gradients to captured arrays."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import posenc_jax as pe
from tests.support import golden, slow

GOLDEN = golden("score_mod")
Q, K, V = (np.asarray(GOLDEN[name], np.float32) for name in "qkv")
B, T, N, H = Q.shape
WEIGHTS = np.sin(1 + np.arange(B * N * T * H)).reshape(B, N, T, H).transpose(0, 2, 1, 3)


def alibi(score, b, h, q_idx, kv_idx, slopes):
    return score - slopes[h] * jnp.abs(q_idx - kv_idx).astype(jnp.float32)


def relative_table(score, b, h, q_idx, kv_idx, table):
    return score + table[h, q_idx - kv_idx + T - 1]


def absolute_table(score, b, h, q_idx, kv_idx, queries, keys):
    return queries[q_idx] * keys[h, kv_idx] + score


def by_row(score, b, h, q_idx, kv_idx, scale):
    return score - scale[b, h] * (q_idx - kv_idx).astype(jnp.float32)


def causal(score, b, h, q_idx, kv_idx):
    return jnp.where(q_idx >= kv_idx, score, -jnp.inf)


def softcap(score, b, h, q_idx, kv_idx, cap):
    return cap * jnp.tanh(score / cap)


def times(score, b, h, q_idx, kv_idx, factor):
    return score * factor[h] - 0.1 * kv_idx.astype(jnp.float32)


MODS = [alibi, relative_table, absolute_table, by_row, causal, softcap, times]
KINDS = {
    alibi: ("LogitBias", True),
    relative_table: ("LogitBias", True),
    absolute_table: ("LogitBias", False),
    by_row: ("ContentBias", None),
    causal: ("LogitBias", True),
    softcap: ("LogitsTransform", None),
    times: ("LogitsTransform", None),
}


@functools.partial(jax.jit, static_argnums=(0, 1))
def run(function, implementation, captured):
    def loss(captured):
        rule = pe.score_mod(function, Q, *captured)
        out = pe.attention(Q, K, V, rules=rule, implementation=implementation)
        return (out * WEIGHTS).sum(), out

    return jax.grad(loss, has_aux=True)(captured)


@pytest.mark.parametrize(
    ("function", "implementation"),
    [
        *((function, "xla") for function in MODS),
        pytest.param(by_row, "dense", marks=slow),
        pytest.param(causal, "reference", marks=slow),
    ],
    ids=lambda x: getattr(x, "__name__", x),
)
def test_output_and_gradients_equal_flex_attention(function, implementation):
    case = GOLDEN["cases"][function.__name__]
    captured = tuple(np.asarray(x, np.float32) for x in case["captured"])
    grads, out = run(function, implementation, captured)
    np.testing.assert_allclose(out, case["out"], atol=2e-6)
    for got, expected in zip(grads, case["grads"], strict=True):
        np.testing.assert_allclose(got, expected, atol=2e-5)


@pytest.mark.parametrize("function", MODS, ids=lambda f: f.__name__)
def test_the_kind_of_rule_goes_by_what_the_function_does(function):
    captured = [jnp.asarray(x) for x in GOLDEN["cases"][function.__name__]["captured"]]
    rule = pe.score_mod(function, Q, *captured)
    name, relative = KINDS[function]
    assert (type(rule).__name__, getattr(rule, "relative", None)) == (name, relative)


def _scaled_within_a_branch(score, b, h, q_idx, kv_idx):
    return jnp.where(q_idx > kv_idx, 2 * score, score)


def _large_number_for_minus_infinity(score, b, h, q_idx, kv_idx):
    return jnp.where(q_idx >= kv_idx, score, -1e9)


def _replaces_the_score(score, b, h, q_idx, kv_idx):
    return (q_idx - kv_idx).astype(jnp.float32)


def _added_twice(score, b, h, q_idx, kv_idx):
    return score + score


def _subtracted(score, b, h, q_idx, kv_idx):
    return 1.0 - score


def _rounded(score, b, h, q_idx, kv_idx):
    return score.astype(jnp.int32).astype(jnp.float32)


@pytest.mark.parametrize(
    "function",
    [
        _scaled_within_a_branch,
        _large_number_for_minus_infinity,
        _replaces_the_score,
        _added_twice,
        _subtracted,
        _rounded,
    ],
    ids=lambda f: f.__name__,
)
def test_what_is_no_sum_is_applied_to_rows(function):
    rule = pe.score_mod(function, Q)
    assert isinstance(rule, pe.LogitsTransform)
    scores = np.einsum("btnh,bsnh->bnts", Q, K) * H**-0.5
    index = np.ogrid[:B, :N, :T, :T]
    exact = np.asarray(function(jnp.asarray(scores), *index), np.float64)
    weights = np.exp(exact - exact.max(-1, keepdims=True))
    weights /= weights.sum(-1, keepdims=True)
    out = pe.attention(Q, K, V, rules=rule)
    np.testing.assert_allclose(out, np.einsum("bnts,bsnv->btnv", weights, V), atol=1e-5)


def _by_parity(score, b, h, q_idx, kv_idx):
    return score + (q_idx - kv_idx + q_idx % 2).astype(jnp.float32)


def _by_sum(score, b, h, q_idx, kv_idx):
    return score + (q_idx + kv_idx).astype(jnp.float32)


def _by_one_position(score, b, h, q_idx, kv_idx):
    return score + (kv_idx - 3).astype(jnp.float32)


def _by_rounded_position(score, b, h, q_idx, kv_idx):
    return score + (q_idx.astype(jnp.bfloat16) - kv_idx.astype(jnp.bfloat16)).astype(jnp.float32)


def _by_order_within_a_call(score, b, h, q_idx, kv_idx):
    return score + jnp.where(q_idx // 4 == kv_idx // 4, 1.0, 0.0)


@pytest.mark.parametrize(
    "function",
    [_by_parity, _by_sum, _by_one_position, _by_rounded_position, _by_order_within_a_call],
    ids=lambda f: f.__name__,
)
def test_positions_that_are_read_alone_make_no_relative_rule(function):
    rule = pe.score_mod(function, Q)
    assert isinstance(rule, pe.LogitBias) and not rule.relative


def test_a_chunk_of_queries_reads_positions_not_slots():
    (slopes,) = GOLDEN["cases"]["alibi"]["captured"]
    rule = pe.score_mod(alibi, Q[:, 7:], jnp.asarray(slopes))
    places = {"q_positions": jnp.arange(7, T), "k_positions": jnp.arange(T)}
    out = pe.attention(Q[:, 7:], K, V, rules=rule, **places)
    np.testing.assert_allclose(out, np.asarray(GOLDEN["cases"]["alibi"]["out"])[:, 7:], atol=2e-6)


def test_arrays_that_are_closed_over_are_refused_where_they_would_lose_gradients():
    @jax.grad
    def loss(slopes):
        rule = pe.score_mod(lambda score, b, h, q, k: score - slopes[h], Q)
        return pe.attention(Q, K, V, rules=rule).sum()

    with pytest.raises(ValueError, match="closes over an array that is traced"):
        loss(jnp.ones(N))


def test_a_function_that_does_not_fit_is_named():
    with pytest.raises(ValueError, match=r"score_mod: q must be \[B, T, N, H\]"):
        pe.score_mod(causal, Q[0])
    with pytest.raises(ValueError, match="must return one number"):
        pe.score_mod(lambda score, *_: score * jnp.ones(3), Q)
