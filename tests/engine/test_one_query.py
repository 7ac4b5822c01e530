"""Rules of one query, with keys at consecutive positions and at any.

Expected numbers are float64 loops over the keys.
"""

import functools
import re

import chex
import jax
import jax.numpy as jnp
import numpy as np
import pytest

import posenc_jax as pe
from posenc_jax.engine.api import AttentionCall
from posenc_jax.engine.dense import Dense
from tests.support import parameters, slow_but

HEADS, DIM, KEYS = 6, 4, 290
TILES = Dense(tile=64)


def _places():
    """Positions and segments of keys, and the position of the query, by name."""
    slots = np.arange(KEYS, dtype=np.int32)
    shuffled = np.random.default_rng(0).permutation(slots)
    zeros = np.zeros(KEYS, np.int32)
    return {
        "in order": (slots, zeros, 289),
        "at a million": (slots + 10**6, zeros, 10**6 + 289),
        "negative": (slots - 400, zeros, -111),
        "later keys": (slots, zeros, 140),
        "a cache with empty slots": (np.where(slots < 170, slots, 0), -1 * (slots >= 170), 169),
        "left padding": (np.maximum(slots - 70, 0), -1 * (slots < 70), 219),
        "packed": (slots % 130, slots // 130, 29),
        "a ring": ((slots + 90) % 290 + 500, zeros, 789),
        "shuffled": (shuffled, zeros, 289),
        "all alike": (zeros, zeros, 0),
        "apart": (np.r_[1, 257, 10**6 + slots[:-2]], zeros, 10**6 + 287),
        "the last integers": (slots + (2**31 - KEYS), zeros, 2**31 - 1),
    }


def _transformer_xl():
    scheme = pe.TransformerXL(num_heads=HEADS, head_dim=DIM, model_dim=6)
    params = parameters(scheme, 0.7)
    project, v = (np.asarray(params[name], np.float64) for name in ("project", "v"))

    def added(q, k, distance):
        angles = distance * 10000.0 ** (-np.arange(0, 6, 2) / 6)
        encoding = np.concatenate([np.sin(angles), np.cos(angles)])
        return np.einsum("nh,ndh,d->n", q + v, project, encoding)

    return scheme, params, added


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


@pytest.mark.parametrize("make", slow_but([_transformer_xl, _deberta], _deberta))
def test_one_query_at_any_positions(make):
    scheme, params, added = make()
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
