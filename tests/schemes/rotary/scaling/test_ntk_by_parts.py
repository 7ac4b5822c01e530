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


WIDE = {"beta": (100.0, 0.4), "gamma": (200.0, 0.5)}


@pytest.mark.parametrize(
    "dim, theta, scale, length, turns",
    [
        (128, 1e4, 2.0, 4096, {}),
        (12, 1e4, 8.0, 300, {}),
        (64, 1e4, 4.0, 2048, {"beta": (3.0, 0.1)}),
        (64, 5e5, 4.0, 2048, {"gamma": (8.0, 4.0)}),
        (12, 100.0, 4.0, 4096, {}),  # A ramp may end beyond the last pair: at 8 of 6,
        (12, 10.0, 4.0, 2048, WIDE),  # and at 17, which is cut to d - 1 = 11.
    ],
    ids=str,
)
def test_matches_the_authors_code(dim, theta, scale, length, turns):
    scaling = pe.NTKByParts(factor=scale, original_max_position=length, **turns)
    got, factor = pe.rope_frequencies(dim, theta, scaling)
    np.testing.assert_allclose(got, authors(dim, theta, scale, length, **turns), rtol=1e-12)
    assert factor == 1.0


by_parts = functools.partial(pe.NTKByParts, factor=4.0, original_max_position=2048)
ERRORS = [
    (by_parts, {"beta": (0.5, 0.75)}, r"beta must be .*got \(0.5, 0.75\)"),
    (by_parts, {"gamma": (16.0, 0.0)}, r"gamma must be .*got \(16.0, 0.0\)"),
]
