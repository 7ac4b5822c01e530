"""Implementations are values: words, settings, refusals, and new ones."""

import dataclasses
import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import posenc_jax as pe
from posenc_jax.engine.api import choose, make_problem
from posenc_jax.engine.blocks import Blocks
from posenc_jax.engine.problem import Implementation
from posenc_jax.engine.xla import XLA
from posenc_jax.kernels.gpu.implementation import PallasGPU
from posenc_jax.kernels.tpu.implementation import PallasTPU
from tests.oracle import qkv
from tests.support import slow

Q, K, V = qkv(length=40, heads=2, kv_heads=2, dim=4)
BIAS = pe.ALiBi(num_heads=2).rules({})


@dataclasses.dataclass(frozen=True)
class Mean(Implementation):
    """A backend of one file: the mean of all values, times a setting."""

    factor: float = 1.0
    name = "mean"

    def refusal(self, problem):
        return "it has no rules; use None to choose" if problem.rules else None

    def __call__(self, problem):
        q = problem.q
        mean = self.factor * problem.v.mean(1, keepdims=True)
        return jnp.broadcast_to(mean, q.shape), jnp.zeros(q.shape[:3], jnp.float32)


def test_a_backend_of_a_users_own_is_a_value():
    out, _ = pe.scheme_attention(pe.NoPE(), {}, Q, K, V, implementation=Mean(2.0))
    np.testing.assert_allclose(out[:, 0], 2 * V.mean(1), rtol=1e-6)


def test_an_explicit_implementation_never_falls_back():
    for implementation, name in (Mean(), "mean"), ("splash", "splash"):
        with pytest.raises(NotImplementedError, match=f'implementation="{name}": it has no rules'):
            pe.attention(Q, K, V, rules=BIAS, implementation=implementation)


def test_unknown_words_and_types_are_named():
    words = "'reference', 'dense', 'xla', 'pallas', 'splash', 'jax', 'cudnn'"
    for unknown in ("flash", 3, XLA):
        for implementation in (unknown, ("xla", unknown)):
            with pytest.raises(ValueError, match=rf"one of \({words}\) or .*, got {unknown!r}"):
                pe.attention(Q, K, V, implementation=implementation)


def test_of_a_sequence_the_first_that_serves_is_used():
    twice = 2 * V.mean(1, keepdims=True) + jnp.zeros_like(Q)

    def attend(implementation, rules=()):
        return pe.attention(Q, K, V, rules=rules, implementation=implementation)

    for sequence in ((Mean(2.0), Mean()), ["splash", Mean(2.0), "xla"]):
        np.testing.assert_allclose(attend(sequence), twice, rtol=1e-6)
    for sequence in ((Mean(2.0), None), ("splash", "pallas", Mean(), "dense")):
        np.testing.assert_allclose(attend(sequence, BIAS), attend(None, BIAS), atol=1e-6)
    with pytest.raises(
        NotImplementedError,
        match=r'^attention: implementation="splash": it has no rules.*; implementation="mean": it',
    ):
        attend(("splash", Mean()), BIAS)
    with pytest.raises(ValueError, match="attention: implementation is an empty tuple"):
        attend(())


def test_kernels_leave_decode_steps_to_others():
    """Of a sequence for a layer, whose steps then take what `None` takes."""
    options = {"q_positions": np.array([39]), "k_positions": np.arange(40), "is_causal": True}
    step = functools.partial(pe.attention, Q[:, -1:], K, V, rules=BIAS, **options)
    for kernels in (PallasGPU(interpret=True), PallasTPU(interpret=True)):
        # Traced, and first: the interpreter of a kernel that takes the step may wait for ever.
        with pytest.raises(NotImplementedError, match=r'in decode steps, needs .*"dense"'):
            jax.eval_shape(functools.partial(step, implementation=kernels))
        out, expected = (step(implementation=x) for x in ((kernels, None), None))
        np.testing.assert_array_equal(out, expected)


@pytest.mark.parametrize(("sizes", "error"), [((0, 8), ValueError), ((8, 2.0), TypeError)])
def test_sizes_of_blocks_are_positive_integers(sizes, error):
    with pytest.raises(error, match=r"Blocks: [qk] must be"):
        Blocks(*sizes)


@pytest.mark.parametrize(
    ("length", "keys", "name"), [(1, 4096, "dense"), (8, 8, "dense"), (64, 64, "xla")]
)
def test_the_choice_goes_by_size(length, keys, name):
    q, k = jnp.ones((1, length, 2, 4)), jnp.ones((1, keys, 2, 4))
    places = {"q_positions": jnp.arange(length), "k_positions": jnp.arange(keys)}
    problem = make_problem(q, k, k, (), pe.AttentionCall(is_causal=True, **places))
    assert choose(problem).name == name


@pytest.mark.parametrize(
    ("rule", "error", "message"),
    [
        (
            lambda shared, head, q: q,
            TypeError,
            r"LogitBias.rule must be rule\(shared, head, q, k\) -> scalar, got <lambda>: too many",
        ),
        (
            lambda shared, head, q, k: head * jnp.ones(3),
            ValueError,
            r"LogitBias.rule <lambda> must return one number, got shape \(3,\)",
        ),
        (lambda shared, head, q, k: None, ValueError, "must return one number, got no array"),
        (
            lambda shared, head, q, k: k <= q,
            ValueError,
            r"must return one number, got dtype bool; a rule hides keys by jnp\.where\(seen,",
        ),
        (jnp.zeros((1, 2, 40, 40)), TypeError, r"got an array of shape \(1, 2, 40, 40\); to add a"),
    ],
)
def test_a_rule_that_does_not_fit_is_named(rule, error, message):
    rule = pe.LogitBias(rule, heads=jnp.ones(2)) if callable(rule) else rule
    with pytest.raises(error, match=message):
        pe.attention(Q, K, V, rules=rule)


def test_one_rule_at_most_adds_to_the_values():
    shaw = pe.Shaw(num_heads=2, head_dim=4)
    rules = shaw.rules(shaw.init(jax.random.key(0)), Q)
    with pytest.raises(ValueError, match="attention: more than one rule adds to the values"):
        pe.attention(Q, K, V, rules=(*rules, rules[1]))


def test_dropout_drops_its_rate_of_the_weights():
    # Equal logits and values of one: an output is the kept share of its weights over 1 - rate.
    ones = np.ones((4, 64, 4, 1), np.float32)

    @jax.jit
    def attend(q, v):
        options = {"dropout_rate": 0.1, "dropout_key": jax.random.key(0)}
        return pe.attention(q, q, v, **options, implementation="reference")

    kept_shares = 0.9 * np.asarray(attend(0 * ones, ones))
    assert abs(kept_shares.mean() - 0.9) < 0.005  # Four deviations of 65,536 draws.
    assert kept_shares.min() < 0.85 and kept_shares.max() > 0.95


@pytest.mark.parametrize(
    "implementation", ["reference", *(pytest.param(x, marks=slow) for x in ("dense", "xla"))]
)
def test_gradients_of_half_precision_parameters_are_sums_in_float32(implementation):
    """Of a table whose entries 512 tokens share; the last of 8 bits is 0.4 %."""
    places = dict.fromkeys(("q_positions", "k_positions"), np.arange(512))
    draws = np.random.RandomState(0).standard_normal((3, 1, 512, 1, 8))
    q, v, weights = draws.astype(np.float32)
    scheme = pe.T5(num_heads=1)
    params = scheme.init(jax.random.key(0))

    @jax.jit
    def gradient(params):
        def loss(params):
            options = {"is_causal": True, "implementation": implementation}
            out = pe.attention(q, q, v, rules=scheme.rules(params), **places, **options)
            return jnp.sum(out * weights)

        return jax.tree.leaves(jax.grad(loss)(params))[0]

    half = jax.tree.map(lambda x: x.astype(jnp.bfloat16), params)
    expected = gradient(jax.tree.map(lambda x: x.astype(jnp.float32), half))
    error = jnp.abs(gradient(half).astype(jnp.float32) - expected).max()
    assert error < 0.004 * jnp.abs(expected).max()


def test_a_window_without_ends_is_none():
    q, k, v = qkv(batch=1, length=3, heads=3)
    for window, expected in (((-1, -1), None), ((-1, 0), (-1, 0)), ((0, -2), (0, -2))):
        assert make_problem(q, k, v, (), pe.AttentionCall(window=window)).window == expected
