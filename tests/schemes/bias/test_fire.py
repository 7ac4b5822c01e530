"""FIRE against the lines of the reference code, printed numbers and the paper's formula."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import posenc_jax as pe
from tests.oracle import attend, qkv, softmax_attention
from tests.support import initial, parameters

OPTIONS = {
    pe.FIRE: {"width": 5, "init_c": initial(0.5), "init_length": 8.0, "eps": 0.1},
}

ARRAYS = qkv(length=21)
INITIAL = {"c": np.float32(0.1), "multiplier": np.float32(1.0)}


def reference(params, i, j, init_length=512.0, eps=1e-6):
    """chuanyang-Zheng/DAPE at bde344a, DAPE.py, FIRE.forward, for one pair in float64: [N].

    Positions count from 0, so that `rel_distance_max` of a row is the query's position.
    """
    p = {name: np.asarray(leaf, np.float64) for name, leaf in params.items()}
    threshold = abs(p["multiplier"] * init_length)
    normalizer = max(i, threshold)
    distance = np.log(abs(p["c"] * abs(i - j)) + 1)
    normalizer = np.log(abs(p["c"] * normalizer) + 1) + eps
    hidden = np.maximum(p["inner"] * (distance / normalizer) + p["inner_bias"], 0)
    return p["outer"] @ hidden


def dense(scheme, params, q, k):
    return scheme.rules(params).dense(jnp.asarray(q), jnp.asarray(k))


@pytest.mark.parametrize("heads", [6, 12])
def test_matches_the_reference_at_far_positions(heads):
    scheme = pe.FIRE(num_heads=heads)
    params = parameters(scheme)
    positions = [0, 1, 257, 511, 512, 513, 5000, 10**6]
    got = dense(scheme, params, positions, positions)
    for a, i in enumerate(positions):
        for b, j in enumerate(positions):
            np.testing.assert_allclose(got[:, a, b], reference(params, i, j), atol=2e-6)


@pytest.mark.parametrize("is_causal", [True, False])
@pytest.mark.parametrize("init_length", [512.0, 8.0])
def test_attention_matches_the_paper(is_causal, init_length):
    scheme = pe.FIRE(num_heads=6, init_length=init_length)
    params = parameters(scheme)
    params |= {"outer": 8 * params["outer"]}
    bias = np.array([[reference(params, i, j, init_length) for j in range(21)] for i in range(21)])
    expected = softmax_attention(
        *ARRAYS,
        lambda q, k, n, i, j: q @ k / np.sqrt(8) + bias[i, j, n],
        sees=lambda i, j: j <= i or not is_causal,
    )
    out = attend(scheme, params, *ARRAYS, is_causal=is_causal)
    np.testing.assert_allclose(out, expected, atol=1e-5)


@pytest.mark.parametrize("name, value", [("c", -0.1), ("multiplier", -1.0)])
def test_invariant_to_the_signs_of_c_and_multiplier(name, value):
    scheme = pe.FIRE(num_heads=2)
    params = parameters(scheme) | INITIAL
    positions = np.arange(0, 1000, 100)
    other = params | {name: jnp.float32(value)}
    np.testing.assert_array_equal(
        dense(scheme, params, positions, positions), dense(scheme, other, positions, positions)
    )


def test_initialised_as_torch_linear():
    params = pe.FIRE(num_heads=200, width=400, init_c=0.2).init(jax.random.key(0))
    bounds = {"inner": 1.0, "inner_bias": 1.0, "outer": 400**-0.5}
    for name, bound in bounds.items():
        leaf = np.asarray(params[name])
        assert 0.98 * bound < np.abs(leaf).max() <= bound and abs(leaf.mean()) < 0.1 * bound
    assert params["c"] == np.float32(0.2) and params["multiplier"] == 1.0
