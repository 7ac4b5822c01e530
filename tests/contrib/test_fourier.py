"""Learnable Fourier features against the module of the reference code."""

import math

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from posenc_jax import contrib
from tests.oracle import embed, waves
from tests.support import golden, initial, parameters, slow

OPTIONS = {
    contrib.LearnableFourier: {"axes": 3, "num_features": 6, "width": 5, "gamma": initial(1.0)}
}

GOLDEN = golden("fourier")


def code(scheme, params, coordinates):
    x = np.zeros((*np.shape(coordinates)[-2:], scheme.model_dim), np.float32)
    return embed(scheme, params, x, coordinates)[0]


def test_matches_the_reference_code():
    scheme = contrib.LearnableFourier(model_dim=8, num_features=12, width=5)
    params = {
        "waves": waves(6, 2),
        "in": waves(5, 12).T,
        "in_bias": waves(5),
        "out": waves(8, 5).T,
        "out_bias": waves(8),
    }
    shapes = jax.tree.map(jnp.shape, parameters(scheme))
    assert shapes == jax.tree.map(jnp.shape, params)
    coordinates = np.array(GOLDEN["at"], np.float32).T[:, None]
    got = code(scheme, params, coordinates)
    np.testing.assert_allclose(got, GOLDEN["values"], atol=2e-5)  # Angles of 300 in float32.


@slow
@pytest.mark.parametrize("axes", [1, 3])
def test_far_positions_are_exact(axes):
    scheme = contrib.LearnableFourier(model_dim=6, axes=axes, num_features=8, width=4)
    params = parameters(scheme)
    coordinates = np.array([[1, 257, 10**6]]) * np.arange(1, axes + 1)[:, None]
    p = jax.tree.map(lambda x: np.asarray(x, np.float64), params)
    angle = np.einsum("at,fa->tf", coordinates, p["waves"])
    f = np.concatenate([np.cos(angle), np.sin(angle)], -1) / np.sqrt(8)
    hidden = f @ p["in"] + p["in_bias"]
    cdf = 0.5 * (1 + np.vectorize(math.erf)(hidden / np.sqrt(2)))
    expected = (hidden * cdf) @ p["out"] + p["out_bias"]
    got = code(scheme, params, coordinates[:, None] if axes > 1 else coordinates)
    np.testing.assert_allclose(got, expected, atol=2e-6)


ERRORS = [(contrib.LearnableFourier, {"num_features": 7}, "num_features must be even, got 7")]
