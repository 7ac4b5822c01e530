"""Proportional RoPE: as many pairs as in transformers, and those of frequency 0 do not rotate."""

import numpy as np
import pytest

import posenc_jax as pe
from tests.oracle import apply_rope, qkv

OPTIONS = {pe.Proportional: {"fraction": 0.5}}


@pytest.mark.parametrize("dim", [12, 20])
@pytest.mark.parametrize("fraction", [0.0, 0.1, 0.25, 0.3, 1.0])
def test_keeps_as_many_pairs_as_transformers(dim, fraction):
    got, _ = pe.rope_frequencies(dim, scaling=pe.Proportional(fraction=fraction))
    count = int(fraction * dim // 2)
    plain, _ = pe.rope_frequencies(dim)
    np.testing.assert_array_equal(got, [*plain[:count], *np.zeros(dim // 2 - count)])


def test_pairs_beyond_the_fraction_do_not_rotate():
    x, positions = qkv(length=3)[0], np.array([1, 257, 10**6])
    out = apply_rope(x, positions, scaling=pe.Proportional(fraction=0.5))
    plain = apply_rope(x, positions)
    moving = np.arange(8) % 4 < 2
    np.testing.assert_array_equal(out[..., moving], plain[..., moving])
    np.testing.assert_array_equal(out[..., ~moving], x[..., ~moving])
    other = apply_rope(x, positions, rotary_dim=4)
    assert np.abs(out - other).max() > 0.1  # The other thing of that name.


ERRORS = [
    (pe.Proportional, {"fraction": x}, rf"Proportional: .*in \[0, 1\], got {x}")
    for x in (-0.1, 1.5, float("nan"))
]
