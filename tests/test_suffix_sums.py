"""Sums of each entry and all later ones, against NumPy in float64."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from posenc_jax.ops.suffix_sums import suffix_sums


@pytest.mark.parametrize("length", [0, 1, 31, 32, 33, 257])
def test_sums_and_their_gradient(length):
    random = np.random.default_rng(length)
    x, weights = random.random((2, 3, length)).astype(np.float32)
    expected = np.cumsum(x[:, ::-1], 1, dtype=np.float64)[:, ::-1]
    got, pull = jax.vjp(suffix_sums, jnp.asarray(x))
    np.testing.assert_allclose(got, expected, rtol=2e-6)
    (gradient,) = pull(jnp.asarray(weights))
    np.testing.assert_allclose(gradient, np.cumsum(weights, 1, dtype=np.float64), rtol=2e-6)
