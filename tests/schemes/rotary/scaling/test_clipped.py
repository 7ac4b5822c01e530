"""Clipped frequencies against the lines of the authors' code."""

import numpy as np
import pytest

import posenc_jax as pe

OPTIONS = {pe.ClippedFrequencies: {"pairs": 10, "hard": True}}


def authors(frequencies, clip, hard):
    """hrlics/CoPE at ed52ba5, modeling_cope.py, lines 107 to 125."""
    out = np.array(frequencies)
    start = len(out) - clip
    mask = 0.5 * (1.0 + np.cos(np.linspace(0.0, np.pi, clip)))
    out[start:] = 0.0 if hard else out[start:] * mask
    return out


@pytest.mark.parametrize("dim, theta, pairs", [(128, 5e5, 20), (12, 1e4, 6), (20, 1e4, 3)])
@pytest.mark.parametrize("hard", [False, True])
def test_matches_the_authors_code(dim, theta, pairs, hard):
    plain, _ = pe.rope_frequencies(dim, theta)
    got, factor = pe.rope_frequencies(dim, theta, pe.ClippedFrequencies(pairs=pairs, hard=hard))
    np.testing.assert_allclose(got, authors(plain, pairs, hard), rtol=1e-12)
    assert factor == 1.0


CLIPPED = pe.ClippedFrequencies
ERRORS = [
    (CLIPPED, {"pairs": 1}, "ClippedFrequencies: pairs .* at least 2 with hard=False, got 1"),
    (CLIPPED, {"pairs": 0, "hard": True}, "pairs .* at least 1 with hard=True, got 0"),
    (pe.RoPE, {"head_dim": 32, "scaling": CLIPPED()}, "ClippedFrequencies: pairs=20, but only 16"),
]
