"""An array of all pairs as a rule, against `jax.nn` and a float64 softmax."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from oracle import qkv, softmax_attention
from support import one_of_all

import posenc_jax as pe
from posenc_jax.engine.blocks import Blocks
from posenc_jax.engine.dense import Dense
from posenc_jax.engine.tpu.implementation import PallasTPU
from posenc_jax.engine.xla import XLA

B, T, N = 3, 63, 6
Q, K, V = qkv(batch=B, length=T)
RANDOM = np.random.default_rng(0)
TILES = XLA(Blocks(16, 8), Blocks(8, 16))
CASES = [((1, N), TILES), ((B, 1), Dense(block=2**12))]
MORE_CASES = [((1, 1), TILES), ((B, N), TILES), ((B, 1), TILES), ((1, N), "reference")]
CASES += [pytest.param(*case, marks=one_of_all) for case in MORE_CASES]
WEIGHTS = RANDOM.normal(size=(B, T, N, 8)).astype("f4")


def array(*lead):
    return RANDOM.normal(size=(*lead, T, T)).astype("f4")


def gradients_of(attend):
    def loss(bias, q, k, v):
        return (attend(bias, q, k, v) * WEIGHTS).sum()

    run = jax.jit(jax.value_and_grad(loss, (0, 1, 2, 3)))
    return lambda bias: jax.device_get(run(bias, Q, K, V))


def jax_nn(bias, q, k, v):
    return jax.nn.dot_product_attention(q, k, v, bias=bias, is_causal=True)


GRADIENTS_OF_JAX_NN = gradients_of(jax_nn)  # For biases [B, N, T, S].


@pytest.mark.parametrize(
    ("shape", "implementation"),
    CASES,
    ids=str,
)
def test_output_and_gradients_equal_jax_nn(shape, implementation):
    bias = array(*shape)

    def own(bias, q, k, v):
        rule = pe.DenseBias(bias)
        return pe.attention(q, k, v, rules=rule, is_causal=True, implementation=implementation)

    value, grads = gradients_of(own)(bias)
    expected_value, (d_bias, *expected) = GRADIENTS_OF_JAX_NN(np.broadcast_to(bias, (B, N, T, T)))
    shared = tuple(axis for axis in (0, 1) if bias.shape[axis] == 1)
    expected = d_bias.sum(shared, keepdims=True), *expected
    np.testing.assert_allclose(value, expected_value, rtol=2e-5)
    for got, array_expected in zip(grads, expected, strict=True):
        np.testing.assert_allclose(got, array_expected, atol=2e-5)


def test_attention_matches_a_float64_softmax_with_another_rule():
    """With a softcap, segments, and an array of bfloat16 that is multiplied by the scale."""
    bias = jnp.asarray(array(1, N), jnp.bfloat16)
    exact, slopes = np.asarray(bias[0], np.float64), np.asarray(pe.alibi_slopes(N), np.float64)
    segments = np.repeat([0, 1], [20, 43])[None].repeat(B, 0).astype(np.int32)

    def logit(q, k, n, i, j):
        x = (q @ k + exact[n, i, j]) / np.sqrt(8) - slopes[n] * (i - j)
        return 5.0 * np.tanh(x / 5.0)

    expected = softmax_attention(
        Q, K, V, logit, sees=lambda i, j: j <= i and segments[0, i] == segments[0, j]
    )
    rules = pe.ALiBi(num_heads=N).rules({}), pe.DenseBias(bias, scaled=True)
    options = {"rules": rules, "is_causal": True, "softcap": 5.0}
    for side in "qk":
        options[f"{side}_segment_ids"] = segments
        options[f"{side}_positions"] = np.arange(T, dtype=np.int32)[None]
    outs = jax.jit(
        lambda: [
            pe.attention(Q, K, V, implementation=implementation, **options)
            for implementation in (TILES, "dense", "reference")
        ]
    )()
    for out in outs:
        np.testing.assert_allclose(out, expected, atol=2e-6)


@pytest.mark.parametrize(
    ("implementation", "softcap"),
    [(TILES, 5.0), ("dense", 5.0)]
    + [pytest.param(*case, marks=one_of_all) for case in ((TILES, None), ("reference", 5.0))],
    ids=str,
)
def test_minus_infinity_hides_keys(implementation, softcap):
    """As `mask` does, also for a query without keys; hidden NaN leave gradients finite."""
    later = np.triu(np.ones((T, T), bool), 1)
    hidden = RANDOM.random((B, 1, T, T)) < 0.5
    hidden[1, 0, 7] = True
    bias = np.where(later, np.nan, np.where(hidden, -np.inf, 0.0)).astype("f4")
    options = {"is_causal": True, "softcap": softcap}

    def own(bias, q, k, v):
        rule = pe.DenseBias(bias)
        return pe.attention(q, k, v, rules=rule, implementation=implementation, **options)

    value, grads = gradients_of(own)(bias)
    masked = pe.attention(Q, K, V, mask=~hidden, implementation="reference", **options)
    np.testing.assert_allclose(value, (masked * WEIGHTS).sum(), rtol=1e-5)
    assert np.all(np.asarray(own(bias, Q, K, V))[1, 7] == 0.0)
    assert all(np.isfinite(grad).all() for grad in grads)
    assert np.all(np.asarray(grads[0])[hidden | later] == 0.0)


def test_it_belongs_to_slots_when_a_rule_sorts_the_keys():
    """Stick-breaking needs keys in the order of their positions."""
    order = RANDOM.permutation(T)
    bias, rule = array(1, N), pe.StickBreaking().rules({})
    positions = np.arange(T, dtype=np.int32)[None]

    def attend(bias, q, k, v, positions):
        rules = pe.DenseBias(bias), rule
        return pe.attention(
            q, k, v, rules=rules, q_positions=positions, k_positions=positions, is_causal=True
        )

    straight = attend(bias, Q, K, V, positions)
    shuffled = [x[:, order] for x in (Q, K, V, positions.repeat(B, 0))]
    moved = attend(bias[:, :, order][..., order], *shuffled)
    np.testing.assert_allclose(moved, straight[:, order], atol=1e-5)


@pytest.mark.parametrize(
    "pairs, error, message",
    [
        (np.zeros((T, T), "f4"), ValueError, r"\[B or 1, N or 1, T, S\] with B, N, T, S = \(3, 6"),
        (np.zeros((B, 3, T, T), "f4"), ValueError, r"got \(3, 3, 63, 63\)"),
        (np.zeros((1, 1, T, 1), "f4"), ValueError, r"got \(1, 1, 63, 1\)"),
        (np.zeros((1, 1, T, T), bool), TypeError, "a boolean array is a mask"),
    ],
)
def test_other_arrays_are_refused(pairs, error, message):
    with pytest.raises(error, match=message):
        pe.attention(Q, K, V, rules=pe.DenseBias(jnp.asarray(pairs)))


def test_kernels_refuse_it():
    with pytest.raises(NotImplementedError, match="an array of all pairs needs"):
        rule, kernels = pe.DenseBias(jnp.asarray(array(1, 1))), PallasTPU(interpret=True)
        pe.attention(Q, K, V, rules=rule, is_causal=True, implementation=kernels)
