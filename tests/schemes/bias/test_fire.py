"""FIRE against the lines of the reference code, printed numbers and the paper's formula."""

import jax
import numpy as np
import pytest

import posenc_jax as pe
from tests.oracle import attend, qkv, softmax_attention
from tests.support import initial, parameters

OPTIONS = {
    pe.FIRE: {"width": 5, "init_c": initial(0.5), "init_length": 8.0, "eps": 0.1},
}

ARRAYS = qkv(length=21)


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
    return jax.jit(lambda params, q, k: scheme.rules(params).dense(q, k))(params, q, k)


def test_matches_the_reference_at_far_positions():
    scheme = pe.FIRE(num_heads=12)
    params = parameters(scheme)
    positions = [0, 1, 257, 511, 512, 513, 5000, 10**6]
    got = dense(scheme, params, np.array(positions), np.array(positions))
    for a, i in enumerate(positions):
        for b, j in enumerate(positions):
            np.testing.assert_allclose(got[:, a, b], reference(params, i, j), atol=2e-6)


@pytest.mark.parametrize("is_causal, init_length", [(True, 8.0), (False, 512.0)])
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
