"""Rules on whole rows of logits: their arguments, and equality across blocks of queries."""

import dataclasses
import functools
import re

import chex
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import AxisType

import posenc_jax as pe
from posenc_jax.engine.api import make_problem
from posenc_jax.engine.dense import _causal_bands
from posenc_jax.engine.xla import XLA
from tests.engine.rules import KINDS
from tests.support import slow

KIND = KINDS["whole"]


def _tokens(length, *, batch=2, heads=2, dim=4, seed=0):
    random = np.random.default_rng(seed)
    return list(random.normal(size=(3, batch, length, heads, dim)).astype(np.float32))


def _exponential(shared, heads, row, cols, logits, seen, q, k):
    """Weights that do not sum to one, and that need the order of keys."""
    steps = jnp.where(seen, jax.nn.softplus(logits), 0.0)
    return logits - heads[:, None] * jnp.cumsum(steps, 1)


def _rule(heads=2):
    return pe.LogitsTransform(
        _exponential,
        heads=np.linspace(0.5, 1.0, heads, dtype=np.float32),
        normalized=False,
        reads_seen_only=True,
    )


def test_queries_meet_only_ranges_of_keys_that_they_may_see():
    q, k, v = _tokens(1030, batch=1, heads=1)
    params = KIND.make(np.random.default_rng(1), 1, 4)

    @functools.partial(jax.jit, static_argnums=0)
    def run(implementation):
        options = {"rules": KIND.rules(params, q, k), "window": (300, 20)}
        return pe.attention(q, k, v, implementation=implementation, **options)

    chex.assert_trees_all_close(run("xla"), run("reference"), rtol=1e-4, atol=3e-5)


def test_queries_meet_the_first_and_the_last_key_of_their_window():
    # With equal logits the output is the mean of the values, which are the positions.
    positions = np.arange(1030)
    zeros, values = np.zeros((1, 1030, 1, 1), np.float32), positions.astype(np.float32)
    values = values[None, :, None, None]
    out = pe.attention(zeros, zeros, values, window=(300, 20), implementation="dense")
    mean = (np.maximum(positions - 300, 0) + np.minimum(positions + 20, 1029)) / 2
    np.testing.assert_allclose(np.asarray(out)[0, :, 0, 0], mean, rtol=1e-5)


def test_causal_work_is_less():
    q, k, v = _tokens(1024, batch=1, heads=1)

    def work(**options):
        problem = make_problem(q, k, v, (_rule(1),), pe.AttentionCall(**options))
        bands = _causal_bands(problem)
        return sum((end - start) * (high - low) for (start, end), (low, high) in bands)

    assert work(is_causal=True) == 0.625 * work()
    assert work(is_causal=True, window=128) < 0.4 * work()


@slow
def test_a_rule_may_take_the_place_of_the_softmax():
    q, k, v = _tokens(19)
    order = np.random.default_rng(2).permutation(19).astype(np.int32)

    def loss(q, k, v, heads, implementation):
        rule = dataclasses.replace(_rule(), heads=heads)
        options = {"q_positions": order, "is_causal": True, "implementation": implementation}
        out = pe.attention(q, k, v, rules=rule, **options)
        return jnp.sum(jnp.sin(out)), out

    run = jax.jit(jax.grad(loss, (0, 1, 2, 3), has_aux=True), static_argnums=4)
    expected, got = (run(q, k, v, _rule().heads, i) for i in ("reference", XLA(row_block=300)))
    chex.assert_trees_all_close(got, expected, atol=1e-5)
    # By hand, for one query.
    i = int(np.argmax(order))
    by_position = np.argsort(order)
    logits = np.asarray(q[0, i, 1] @ k[0, :, 1].T / 2)[by_position]
    weights = np.exp(logits - 1.0 * np.cumsum(np.logaddexp(0, logits)))
    np.testing.assert_allclose(got[1][0, i, 1], weights @ v[0, by_position, 1], atol=1e-5)


def _listing(shared, heads, row, cols, logits, seen, q, k):
    """Returns 1 for the first visible key and 2 for the last, which tells the order of keys."""
    count = jnp.cumsum(seen, 1)
    first, last = seen & (count == 1), seen & (count == count[:, -1:])
    return jnp.where(first, 1.0, jnp.where(last, 2.0, -jnp.inf)) + 0.0 * logits


@pytest.mark.parametrize("implementation", ["reference", "xla"])
def test_keys_of_a_segment_come_in_the_order_of_their_positions(implementation):
    q, k, _ = _tokens(6, batch=1, heads=1)
    positions = np.int32([2, 0, 1, 1, 2, 0])
    segments = np.int32([1, 0, 1, 0, 0, 1])
    places = {"q_positions": positions, "q_segment_ids": segments}
    values = np.eye(6, dtype=np.float32)[None, :, None]
    rule = pe.LogitsTransform(_listing, normalized=False)
    out = pe.attention(q, k, values, rules=rule, implementation=implementation, **places)
    zeroth, first = np.zeros((2, 6))
    zeroth[[1, 4]] = first[[5, 0]] = np.exp([1.0, 2.0])  # Slots 1, 3, 4, and 5, 2, 0.
    expected = np.where(segments[:, None], first, zeroth)
    np.testing.assert_allclose(out[0, :, 0], expected, rtol=1e-6)


@slow
def test_derivatives_of_any_order_and_mode():
    q, k, v = _tokens(9)

    def loss(q, implementation):
        out = pe.attention(q, k, v, rules=_rule(), is_causal=True, implementation=implementation)
        return jnp.sum(jnp.sin(out))

    direction = np.ones_like(q)

    @functools.partial(jax.jit, static_argnums=1)
    def derivatives(q, implementation):
        def f(q):
            return loss(q, implementation)

        return (
            jax.jvp(jax.grad(f), (q,), (direction,))[1],
            jax.grad(lambda q: jnp.vdot(jax.grad(f)(q), direction))(q),
        )

    for got, expected in zip(derivatives(q, "xla"), derivatives(q, "reference"), strict=True):
        np.testing.assert_allclose(got, expected, atol=2e-5)


@pytest.mark.parametrize(
    ("options", "error", "message"),
    [
        ({"rules": (_rule(), _rule())}, ValueError, "more than one rule transforms whole rows"),
        ({"rules": _rule(), "return_lse": True}, NotImplementedError, "no log-sum-exp"),
        ({"rules": _rule(), "sinks": jnp.ones(2)}, NotImplementedError, "none for sinks"),
        ({"rules": _rule(), "implementation": "jax"}, NotImplementedError, "it has no rules"),
    ],
)
def test_errors_say_what_does_not_fit(options, error, message):
    with pytest.raises(error, match=f"attention: .*{message}"):
        pe.attention(*_tokens(7), **options)


def test_one_query_reads_the_keys_of_all_heads_together():
    """On CPU without a mesh, where a product for each head copies all keys and values."""
    shapes = (3, 1, 6, 10), (3, 63, 3, 10), (3, 63, 3, 5)
    numbers = np.random.default_rng(0)
    arrays = [numbers.normal(size=shape).astype(np.float32) for shape in shapes]
    segments = (np.arange(63)[None] < [[63], [20], [1]]).astype(np.int32) - 1
    arrays[2][segments < 0] = np.nan  # Values that no query sees.
    options = {
        "q_positions": np.int32([[62], [19], [0]]),
        "k_positions": np.arange(63, dtype=np.int32),
        "q_segment_ids": np.zeros((3, 1), np.int32),
        "k_segment_ids": segments,
    }

    def loss(q, k, v, implementation):
        rules = pe.ALiBi(num_heads=6).rules({})
        out = pe.attention(q, k, v, rules=rules, **options, implementation=implementation)
        return jnp.sum(jnp.sin(out)), out

    run = jax.jit(jax.value_and_grad(loss, (0, 1, 2), has_aux=True), static_argnums=3)
    expected, expected_grads = run(*arrays, "reference")
    out, grads = run(*arrays, "dense")
    chex.assert_trees_all_close((out, grads), (expected, expected_grads), rtol=0, atol=1e-5)

    forward = jax.jit(lambda *arrays: loss(*arrays, "dense")[1])
    program = forward.lower(*arrays).compile()
    np.testing.assert_allclose(program(*arrays), expected[1], rtol=0, atol=1e-5)
    assert not re.search(r"\[3,3,63,\d+\]|\[3,3,\d+,63\]", program.as_text())

    def merges(platform):
        text = forward.trace(*arrays).lower(lowering_platforms=(platform,)).as_text()
        return "tensor<3x63x30xf32>" in text

    assert merges("cpu") and not merges("tpu")
    with jax.set_mesh(jax.make_mesh((1,), ("x",), axis_types=(AxisType.Auto,))):
        assert not merges("cpu")
