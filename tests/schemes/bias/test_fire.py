"""FIRE against the lines of the reference code, printed numbers and the paper's formula."""

import jax
import numpy as np

import posenc_jax as pe
from tests.support import initial, parameters

OPTIONS = {
    pe.FIRE: {"width": 5, "init_c": initial(0.5), "init_length": 8.0, "eps": 0.1},
}


def reference(params, i, j, init_length, eps=1e-6):
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


def test_matches_the_reference_at_far_positions():
    scheme = pe.FIRE(num_heads=12, init_length=300.0)
    params, positions = parameters(scheme), [0, 1, 40, 257, 511, 5000, 10**6]
    assert 1 < abs(params["multiplier"]) * 300.0 < 5000
    got = jax.jit(lambda x: scheme.rules(params).dense(x, x))(np.array(positions))
    expected = [[reference(params, i, j, 300.0) for j in positions] for i in positions]
    np.testing.assert_allclose(np.moveaxis(got, 0, 2), expected, atol=2e-6)
