"""NTK-by-parts against its authors' code, line by line in NumPy."""

import functools
import math

import numpy as np
import pytest

import posenc_jax as pe
from tests.support import Option

_LONGER = {"factor": 4.0, "original_max_position": 64}
OPTIONS = {
    pe.NTKByParts: {
        "factor": Option(2.0, _LONGER),
        "original_max_position": Option(128, _LONGER),
        "beta": Option((1.5, 0.25), _LONGER),
        "gamma": Option((8.0, 0.5), _LONGER),
    }
}

BASE = {"factor": 4.0, "original_max_position": 2048}


def authors(dim, theta, scale, length, beta=(1.25, 0.75), gamma=(16, 2)):
    """jquesnelle/yarn at 995db5b, scaled_rope/LlamaPartNTKScaledRotaryEmbedding.py, in float64."""

    def ramp(fast, slow):
        def dimension(turns):
            return (dim * math.log(length / (turns * 2 * math.pi))) / (2 * math.log(theta))

        low = max(math.floor(dimension(fast)), 0)
        high = min(math.ceil(dimension(slow)), dim - 1)
        if low == high:
            high += 0.001
        return np.clip((np.arange(dim // 2) - low) / (high - low), 0, 1)

    base = 1.0 / theta ** (np.arange(0, dim, 2) / dim)
    linear = 1.0 / (scale * theta ** (np.arange(0, dim, 2) / dim))
    ntk = 1.0 / (theta * scale ** (dim / (dim - 2))) ** (np.arange(0, dim, 2) / dim)
    mask = 1 - ramp(*beta)
    out = linear * (1 - mask) + ntk * mask
    mask = 1 - ramp(*gamma)
    return out * (1 - mask) + base * mask


@pytest.mark.parametrize("dim, theta", [(128, 1e4), (12, 1e4), (64, 5e5)])
@pytest.mark.parametrize("scale, length", [(2.0, 4096), (8.0, 300)])
def test_matches_the_authors_code(dim, theta, scale, length):
    scaling = pe.NTKByParts(factor=scale, original_max_position=length)
    got, factor = pe.rope_frequencies(dim, theta, scaling)
    np.testing.assert_allclose(got, authors(dim, theta, scale, length), rtol=1e-12)
    assert factor == 1.0


def test_a_ramp_may_end_beyond_the_last_pair():
    """At 8 and at 17 of 6 pairs; the latter is cut to d - 1 = 11."""
    wide = {"beta": (100.0, 0.4), "gamma": (200.0, 0.5)}
    for theta, length, turns in [(100.0, 4096, {}), (10.0, 2048, wide)]:
        scaling = pe.NTKByParts(4.0, length, **turns)
        got, _ = pe.rope_frequencies(12, theta, scaling)
        expected = authors(12, theta, 4.0, length, **turns)
        np.testing.assert_allclose(got, expected, rtol=1e-12)


@pytest.mark.parametrize("beta, gamma", [((3.0, 0.1), (16.0, 2.0)), ((1.25, 0.75), (8.0, 4.0))])
def test_matches_for_other_rotations(beta, gamma):
    scaling = pe.NTKByParts(**BASE, beta=beta, gamma=gamma)
    expected = authors(64, 1e4, 4.0, 2048, beta, gamma)
    np.testing.assert_allclose(pe.rope_frequencies(64, scaling=scaling)[0], expected, rtol=1e-12)
    plain = pe.rope_frequencies(64, scaling=pe.NTKByParts(**BASE))[0]
    assert np.abs(plain / expected - 1).max() > 0.01


by_parts = functools.partial(pe.NTKByParts, **BASE)
ERRORS = [
    (by_parts, {"factor": 0.5}, "factor must be at least 1 and finite, got 0.5"),
    (by_parts, {"original_max_position": 0}, "original_max_position must be the trained length"),
    (by_parts, {"beta": (0.5, 0.75)}, r"beta must be .*got \(0.5, 0.75\)"),
    (by_parts, {"gamma": (16.0, 0.0)}, r"gamma must be .*got \(16.0, 0.0\)"),
]
