"""KERPLE against its authors' code in NumPy, the printed kernels and the paper's formula."""

import jax
import numpy as np
import pytest

import posenc_jax as pe
from posenc_jax import contrib
from tests.support import parameters, run

BOTH = pytest.mark.parametrize("cls", [pe.KERPLELog, contrib.KERPLEPower])


def authors(cls, params, distance):
    """chijames/KERPLE at 25be3d7, megatron/mpu/layers.py, forward, in float64: [N, ...]."""
    shape = (-1,) + (1,) * np.ndim(distance)
    r1, r2 = (np.asarray(params[name], np.float64).reshape(shape) for name in ("r1", "r2"))
    if cls is pe.KERPLELog:  # There r1 is bias_p and r2 is bias_a.
        r1, r2 = r1.clip(min=0.01), r2.clip(min=0.01)
        return -r1 * np.log(1 + r2 * distance)
    r2, r1 = r2.clip(min=0.01, max=2), r1.clip(min=0.01)  # There bias_p and bias_a.
    return -(np.float64(distance) ** r2) * r1


def dense(scheme, params, positions):
    return scheme.rules(params).dense(positions, positions)


@BOTH
def test_matches_the_authors_code_for_parameters_that_it_clips(cls):
    scheme = cls(num_heads=12)
    params, positions = parameters(scheme, 2.0), np.array([0, 1, 2, 257, 10**6])
    for leaf in params.values():
        assert leaf.min() < 0.0 and leaf.max() > 2.0
    got = run(dense, (scheme,), params, positions)
    expected = authors(cls, params, abs(positions[:, None] - positions[None]))
    np.testing.assert_allclose(got, expected, rtol=2e-6)


@BOTH
def test_the_gradient_is_that_of_the_projected_value(cls):
    """Their update is outside of the graph: a parameter below the bound has a gradient."""
    at = np.arange(5)
    slopes = jax.jit(
        jax.grad(lambda r: dense(cls(num_heads=1), {"r1": r[:1], "r2": r[1:]}, at).sum())
    )
    below, bound = (np.asarray(slopes(np.full(2, r, "f4"))) for r in (-4.0, 0.01))
    np.testing.assert_allclose(below, bound, rtol=1e-4)
    assert np.all(np.abs(below) > 0)
