"""KERPLE against its authors' code in NumPy, the printed kernels and the paper's formula."""

import jax
import numpy as np
import pytest

import posenc_jax as pe
from posenc_jax import contrib
from tests.oracle import attend, qkv, softmax_attention
from tests.support import parameters, run

ARRAYS = qkv(length=21)
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


def dense(cls, r1, r2, positions):
    return run(_dense, (cls(num_heads=len(r1)),), r1, r2, positions)


def _dense(scheme, r1, r2, positions):
    return scheme.rules({"r1": r1, "r2": r2}).dense(positions, positions)


@BOTH
def test_matches_the_authors_code_at_far_positions(cls):
    params = jax.tree.map(np.abs, parameters(cls(num_heads=12)))
    positions = np.array([1, 2, 257, 10**6])
    got = dense(cls, params["r1"], params["r2"], positions)
    expected = authors(cls, params, abs(positions[:, None] - positions[None]))
    np.testing.assert_allclose(got, expected, rtol=2e-6)


@pytest.mark.parametrize("cls, is_causal", [(pe.KERPLELog, True), (contrib.KERPLEPower, False)])
def test_attention_matches_the_paper(cls, is_causal):
    params = parameters(cls(num_heads=6))
    penalty = authors(cls, params, np.arange(21))
    expected = softmax_attention(
        *ARRAYS,
        lambda q, k, n, i, j: q @ k / np.sqrt(8) + penalty[n, abs(i - j)],
        sees=lambda i, j: j <= i or not is_causal,
    )
    out = attend(cls(num_heads=6), params, *ARRAYS, is_causal=is_causal)
    np.testing.assert_allclose(out, expected, atol=1e-5)


@BOTH
def test_parameters_are_projected_as_in_the_authors_code(cls):
    wild = {"r1": np.float32([-1.0, 3.0, 0.0]), "r2": np.float32([0.0, 3.0, -9.0])}
    expected = authors(cls, wild, abs(np.arange(5)[:, None] - np.arange(5)))
    got = dense(cls, wild["r1"], wild["r2"], np.arange(5))
    np.testing.assert_allclose(got, expected, rtol=2e-6)


@BOTH
def test_the_gradient_is_that_of_the_projected_value(cls):
    """Their update is outside of the graph: a parameter below the bound has a gradient."""
    at = np.arange(5)
    slopes = jax.jit(jax.grad(lambda r: _dense(cls(num_heads=1), r[:1], r[1:], at).sum()))
    below, bound = (np.asarray(slopes(np.full(2, r, "f4"))) for r in (-4.0, 0.01))
    np.testing.assert_allclose(below, bound, rtol=1e-4)
    assert np.all(np.abs(below) > 0)
