"""Whole rows of logits: rules on them, bands of queries, and one query with keys at any place.

Expected numbers of one query are float64 loops over the keys.
"""

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
from posenc_jax.engine.api import AttentionCall, make_problem
from posenc_jax.engine.dense import Dense, _causal_bands
from tests.engine.rules import KINDS
from tests.support import parameters, slow, slow_but

KIND = KINDS["whole"]


def _tokens(length, *, batch=2, heads=2, dim=4, seed=0):
    random = np.random.default_rng(seed)
    return list(random.normal(size=(3, batch, length, heads, dim)).astype(np.float32))


def _exponential(shared, heads, row, cols, logits, seen, q, k):
    """Weights that do not sum to one, and that need the order of keys."""
    steps = jnp.where(seen, jax.nn.softplus(logits), 0.0)
    return logits - heads[:, None] * jnp.cumsum(steps, 1)


def _rule(heads=2):
    slopes = np.linspace(0.5, 1.0, heads, dtype=np.float32)
    return pe.LogitsTransform(_exponential, slopes, normalized=False, reads_seen_only=True)


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

    def work(reads_seen_only=True, **options):
        rule = dataclasses.replace(_rule(1), reads_seen_only=reads_seen_only)
        problem = make_problem(q, k, v, (rule,), pe.AttentionCall(**options))
        bands = _causal_bands(problem)
        return sum((end - start) * (high - low) for (start, end), (low, high) in bands)

    assert work(is_causal=True) == 0.625 * work()
    assert work(is_causal=True, window=128) < 0.4 * work()
    # A rule may read the number of keys.
    assert work(reads_seen_only=False, is_causal=True) == work()


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

    @functools.partial(jax.jit, static_argnums=1)
    def derivatives(q, implementation):
        slope = jax.grad(functools.partial(loss, implementation=implementation))
        return jax.jvp(slope, (q,), (q,))[1], jax.grad(lambda x: jnp.vdot(slope(x), q))(q)

    expected = derivatives(q, "reference")
    chex.assert_trees_all_close(derivatives(q, "xla"), expected, rtol=1e-4, atol=2e-5)


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
    expected = run(*arrays, "reference")
    chex.assert_trees_all_close(run(*arrays, "dense"), expected, rtol=1e-5, atol=1e-5)

    forward = jax.jit(lambda *arrays: loss(*arrays, "dense")[1])
    program = forward.lower(*arrays).compile()
    np.testing.assert_allclose(program(*arrays), expected[0][1], rtol=0, atol=1e-5)
    assert not re.search(r"\[3,3,63,\d+\]|\[3,3,\d+,63\]", program.as_text())

    def merges(platform):
        text = forward.trace(*arrays).lower(lowering_platforms=(platform,)).as_text()
        return "tensor<3x63x30xf32>" in text

    assert merges("cpu") and not merges("tpu")
    with jax.set_mesh(jax.make_mesh((1,), ("x",), axis_types=(AxisType.Auto,))):
        assert not merges("cpu")


HEADS, DIM, KEYS = 6, 4, 290
TILES = Dense(tile=64)


def _places():
    """Positions and segments of keys, and the position of the query, by name."""
    slots = np.arange(KEYS, dtype=np.int32)
    shuffled = np.random.default_rng(0).permutation(slots)
    zeros = np.zeros(KEYS, np.int32)
    return {
        "later keys, at a million": (slots + 10**6, zeros, 10**6 + 140),
        "a cache with empty slots": (np.where(slots < 170, slots, 0), -1 * (slots >= 170), 169),
        "packed": (slots % 130, slots // 130, 29),
        "shuffled": (shuffled - 400, zeros, -111),
        "all alike": (zeros, zeros, 0),
        "apart": (np.r_[1, 257, 10**6 + slots[:-2]], zeros, 10**6 + 287),
        "the last integers": (slots + (2**31 - KEYS), zeros, 2**31 - 1),
    }


def _deberta():
    scheme = pe.DeBERTa(num_heads=HEADS, head_dim=DIM, model_dim=6, span=20, max_distance=None)
    params = parameters(scheme, 0.7)
    arrays = {name: np.asarray(x, np.float64) for name, x in params.items()}
    keys, queries = (
        np.einsum("rd,dnh->rnh", arrays["table"], arrays[name]) for name in ("keys", "queries")
    )

    def added(q, k, distance):
        row = np.clip(distance + 20, 0, 39)
        return (q * keys[row] + k * (queries[row] + arrays["bias"])).sum(-1)

    return scheme, params, added


def test_one_query_at_any_positions():
    scheme, params, added = _deberta()
    random = np.random.default_rng(1)
    q = random.normal(size=(1, 1, HEADS, DIM)).astype(np.float32)
    k, v = random.normal(size=(2, 1, KEYS, HEADS, DIM)).astype(np.float32)

    @functools.partial(jax.jit, static_argnums=0)
    def run(implementation, q, k, params, places):
        def loss(q, k, params):
            rows, cols, _ = scheme.features(params, None, q, k, None, None, None)
            rules = scheme.rules(params, rows, cols)
            out = pe.attention(q, k, v, rules=rules, **places, implementation=implementation)
            return jnp.sum(jnp.sin(out)), out

        if implementation == TILES:  # Derivatives read all keys.
            return loss(q, k, params)[1], None
        grads, out = jax.grad(loss, (0, 1, 2), has_aux=True)(q, k, params)
        return out, grads

    for name, (positions, segments, position) in _places().items():
        segment = segments[np.argmax(positions == position)]
        places = {
            "q_positions": np.full((1, 1), position, np.int32),
            "k_positions": positions[None].astype(np.int32),
            "q_segment_ids": np.full((1, 1), segment, np.int32),
            "k_segment_ids": segments[None].astype(np.int32),
        }
        out, grads = run("dense", q, k, params, places)
        distances = np.int64(position) - positions.astype(np.int64)
        q64, k64, v64 = (x[0].astype(np.float64) for x in (q, k, v))
        pairs = zip(k64, distances, strict=True)
        logits = [(q64[0] * x).sum(-1) + added(q64[0], x, d) for x, d in pairs]
        logits = np.where(segments == segment, np.transpose(logits) / DIM**0.5, -np.inf)
        weights = np.exp(logits - logits.max(1, keepdims=True))
        weights /= weights.sum(1, keepdims=True)
        expected = np.einsum("ns,snv->nv", weights, v64)
        np.testing.assert_allclose(out[0, 0], expected, atol=2e-6, err_msg=name)
        out, _ = run(TILES, q, k, params, places)
        np.testing.assert_allclose(out[0, 0], expected, atol=2e-6, err_msg=name)
        _, expected_grads = run("reference", q, k, params, places)
        chex.assert_trees_all_close(grads, expected_grads, atol=2e-5)


def _cache(seen, poisoned, dtype=np.float32):
    """q, k, v and a call where rows see the keys `seen`; values are NaN at keys of `poisoned`."""
    random = np.random.default_rng(2)
    q, k, v = (random.normal(size=(2, n, h, 8)) for n, h in ((1, 6), (256, 3), (256, 3)))
    v[poisoned] = np.nan
    ids = np.where(seen, 0, -1).astype(np.int32)
    call = AttentionCall(
        q_segment_ids=np.zeros((2, 1), np.int32), k_segment_ids=ids, finite_values=True
    )
    return *(jnp.asarray(x, dtype) for x in (q, k, v)), call


def test_tiles_without_a_key_that_is_seen_are_not_read():
    """A value that is read is multiplied by a weight of zero, and 0 * NaN is NaN."""
    slots, traces = np.arange(256), []

    @jax.jit
    def run(q, k, v, ids):
        traces.append(q)
        call = AttentionCall(
            q_segment_ids=jnp.zeros((2, 1), jnp.int32), k_segment_ids=ids, finite_values=True
        )
        return call.replace(implementation=Dense(tile=32))(q, k, v)

    for low, high in [(0, 1), (0, 33), (70, 129), (9, 9), (1, 130), (3, 256), (201, 256)]:
        # The second row sees more keys.
        seen = np.stack([slots == min(low, 200), (slots >= low) & (slots < high)]) & (low < high)
        read = np.repeat(seen.reshape(2, 8, 32).any(2), 32, 1)
        q, k, v, call = _cache(seen, ~read)
        clean = call.replace(finite_values=False, implementation="reference")
        out = run(q, k, v, call.k_segment_ids)
        np.testing.assert_allclose(out, clean(q, k, v), atol=1e-6)
    assert len(traces) == 1


@pytest.mark.parametrize(
    "dtype, atol", slow_but([(np.float32, 1e-6), (jnp.bfloat16, 8e-3)], (jnp.bfloat16, 8e-3))
)
def test_tiles_under_vmap_and_derivatives(dtype, atol):
    seen = np.arange(256) < np.array([[40], [130]])
    q, k, v, call = _cache(seen, np.zeros((2, 256), bool), dtype)

    def attend(implementation):
        def one(q, k, v, ids):
            options = dict(q_segment_ids=jnp.zeros((1, 1), jnp.int32), k_segment_ids=ids[None])
            of_row = AttentionCall(**options, finite_values=True, implementation=implementation)
            return of_row(q[None], k[None], v[None])[0]

        return jax.vmap(one)

    def run(implementation):
        f = attend(implementation)

        def loss(*qkv):
            return jnp.sum(f(*qkv, call.k_segment_ids).astype(jnp.float32) ** 2)

        out = f(q, k, v, call.k_segment_ids)
        if dtype == jnp.bfloat16:  # Derivatives are of float32 in any case.
            return out
        return out, jax.grad(loss, (0, 1, 2))(q, k, v)

    program = jax.jit(run, static_argnums=0)
    chex.assert_trees_all_close(program(Dense(tile=32)), program("reference"), atol=atol)
    # One length for all rows: the number of a tile and the last one are not batched.
    loops = re.findall(r"stablehlo.while.* : (.*)", program.lower(Dense(tile=32)).as_text())
    assert [x.split(", ").count("tensor<i32>") for x in loops] == [2, 2, 3]
