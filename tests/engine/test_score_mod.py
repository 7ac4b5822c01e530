"""`score_mod` against runs of PyTorch's FlexAttention, with gradients to captured arrays."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import posenc_jax as pe
from tests.support import golden, slow, slow_but

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


# What is known of each function, and the rule that it becomes.
MODS = {
    alibi: ({"relative": True}, pe.LogitBias),
    relative_table: ({"relative": True}, pe.LogitBias),
    absolute_table: ({"adds": True}, pe.LogitBias),
    by_row: ({"adds": True}, pe.ContentBias),
    causal: ({"relative": True}, pe.LogitBias),
    softcap: ({}, pe.LogitsTransform),
    times: ({}, pe.LogitsTransform),
}
QUICK = relative_table, causal, softcap, times


@functools.partial(jax.jit, static_argnums=(0, 1, 3))
def run(function, implementation, captured, known=True):
    def loss(captured):
        options, kind = MODS[function]
        rule = pe.score_mod(function, Q, *captured, **(options if known else {}))
        assert isinstance(rule, kind if known else pe.LogitsTransform)
        out = pe.attention(Q, K, V, rules=rule, implementation=implementation)
        return (out * WEIGHTS).sum(), out

    return jax.grad(loss, has_aux=True)(captured)


@pytest.mark.parametrize(
    ("function", "implementation", "known"),
    [
        *(pytest.param(f, "xla", True, marks=() if f in QUICK else slow) for f in MODS),
        pytest.param(by_row, "xla", False, marks=slow),
    ],
    ids=lambda x: getattr(x, "__name__", x),
)
def test_output_and_gradients_equal_flex_attention(function, implementation, known):
    case = GOLDEN["cases"][function.__name__]
    captured = tuple(np.asarray(x, np.float32) for x in case["captured"])
    grads, out = run(function, implementation, captured, known)
    np.testing.assert_allclose(out, case["out"], atol=2e-6)
    for got, expected in zip(grads, case["grads"], strict=True):
        np.testing.assert_allclose(got, expected, atol=2e-5)


FUNCTIONS = [
    lambda score, b, h, i, j: jnp.where(i > j, 2 * score, score),
    lambda score, b, h, i, j: jnp.where(i >= j, score, -1e9),  # In place of -inf.
    lambda score, b, h, i, j: (i - j).astype(jnp.float32),
    lambda score, b, h, i, j: score.astype(jnp.int32).astype(jnp.float32),
]


def test_what_is_no_sum_is_applied_to_rows():
    @jax.jit
    def outputs(scores):
        index = np.ogrid[:B, :N, :T, :T]
        return [
            (f(scores, *index), pe.attention(Q, K, V, rules=pe.score_mod(f, Q))) for f in FUNCTIONS
        ]

    scores = np.einsum("btnh,bsnh->bnts", Q, K) * H**-0.5
    for exact, out in outputs(scores.astype(np.float32)):
        weights = jax.nn.softmax(exact)
        np.testing.assert_allclose(out, np.einsum("bnts,bsnv->btnv", weights, V), atol=1e-5)


def test_a_chunk_of_queries_reads_positions_not_slots():
    (slopes,) = GOLDEN["cases"]["alibi"]["captured"]
    rule = pe.score_mod(alibi, Q[:, 7:], jnp.asarray(slopes), relative=True)
    places = {"q_positions": jnp.arange(7, T), "k_positions": jnp.arange(T)}
    out = pe.attention(Q[:, 7:], K, V, rules=rule, **places)
    np.testing.assert_allclose(out, np.asarray(GOLDEN["cases"]["alibi"]["out"])[:, 7:], atol=2e-6)


@slow
def test_gradients_of_what_a_function_closes_over():
    def loss(slopes, options):
        rule = pe.score_mod(lambda *x: alibi(*x, slopes), Q, **options)
        return (pe.attention(Q, K, V, rules=rule) * WEIGHTS).sum()

    case = GOLDEN["cases"]["alibi"]
    claims = ({}, {"adds": True}, {"relative": True})
    grads = jax.jit(lambda slopes: [jax.grad(loss)(slopes, options) for options in claims])
    for grad in grads(*np.float32(case["captured"])):
        np.testing.assert_allclose(grad, case["grads"][0], atol=2e-5)


def of_key(score, b, h, q_idx, kv_idx, numbers):
    return score + numbers[kv_idx]


def of_query(score, b, h, q_idx, kv_idx, numbers):
    return score + numbers[h] * q_idx.astype(jnp.float32)


def documents(score, b, h, q_idx, kv_idx, numbers):
    return jnp.where((q_idx >= 6) == (kv_idx >= 6), score, -jnp.inf)


@pytest.mark.parametrize("function", slow_but([of_key, of_query, documents], of_query, documents))
def test_a_false_claim_to_be_relative_raises_or_gives_nan(function):
    numbers = np.cos(np.arange(T, dtype=np.float32))
    with pytest.raises(ValueError, match=f"score_mod: {function.__name__} is not relative"):
        pe.score_mod(function, Q, numbers, relative=True)

    @jax.jit
    def attend(numbers):
        rule = pe.score_mod(function, Q, numbers, relative=True)
        return pe.attention(Q, K, V, rules=rule, is_causal=True)

    assert np.isnan(attend(numbers)).all()


def test_a_function_that_does_not_fit_is_named():
    with pytest.raises(ValueError, match=r"score_mod: q must be \[B, T, N, H\]"):
        pe.score_mod(causal, Q[0])
    for function, kind in (
        (lambda score, *_: score * jnp.ones(3), "float32"),
        (lambda score, *_: jax.lax.complex(score, score), "complex64"),
        (lambda score, b, h, i, j: j <= i, "bool"),  # A mask_mod.
    ):
        with pytest.raises(ValueError, match=rf"must return one score, got \['{kind}"):
            pe.score_mod(function, Q)
    with pytest.raises(TypeError, match=r"alibi\(\) missing .* 'slopes'"):
        pe.score_mod(alibi, Q)
    with pytest.raises(ValueError, match="a function that reads b is not relative"):
        pe.score_mod(by_row, Q, jnp.ones((B, N)), relative=True)


@pytest.mark.needs("jax>=0.11")  # On CPUs exp of a NaN that jaxlib 0.10 folds is a number.
def test_a_false_claim_is_nan():
    q = jnp.ones((1, 5, 2, 4))
    functions = [
        *FUNCTIONS,
        lambda score, b, h, i, j: jnp.clip(score, -2.0, 2.0) + 1.0,
        lambda score, b, h, i, j: jnp.where(score > 1.5, 2 * score, score),
        lambda score, b, h, i, j: jnp.abs(score),
        lambda score, b, h, i, j: 0.5 * score * score,
        lambda score, b, h, i, j: 1.0 - score,
        lambda score, b, h, i, j: 20 * jnp.tanh(score / 20),
    ]
    rules = [pe.score_mod(f, q, adds=True) for f in functions]
    for out in jax.jit(lambda: [pe.attention(q, q, q, rules=rule) for rule in rules])():
        assert np.isnan(out[:, 1:-1]).all()


def test_softcap_needs_to_know_what_a_function_does():
    rule = pe.score_mod(causal, Q)
    moved = rule.on(lambda i: i)
    for each in (rule, moved, moved.on(lambda i: i)):
        with pytest.raises(ValueError, match="softcap needs a score_mod that says adds=True"):
            pe.attention(Q, K, V, rules=each, softcap=3.0)
