"""RoPE-Mixed against rope-vit's code, with frequencies of its own initialisation."""

import jax
import numpy as np
import pytest

import posenc_jax as pe
from tests.oracle import key, query
from tests.support import initial, parameters, slow_but

OPTIONS = {
    pe.RoPEMixed: {"groups": 2, "theta": initial(100.0), "layout": "half"},
}

# rope-vit, init_random_2d_freqs(8, 1, theta=10, rotate=False), run: columns (x), then rows (y).
FREQS_X = [1.0, 0.316227764, 0.0, 0.0]
FREQS_Y = [0.0, 0.0, 1.0, 0.316227764]


def rope_vit(x, place, frequencies):
    """compute_mixed_cis and apply_rotary_emb for one patch and head; place is row, column."""
    angles = place[0] * frequencies[0] + place[1] * frequencies[1]
    z = (x[0::2] + 1j * x[1::2]) * np.exp(1j * angles)
    return np.stack([z.real, z.imag], -1).ravel()


@pytest.mark.parametrize("heads, count", slow_but([(12, 12), (3, 6)], (3, 6)))
def test_matches_rope_vit(heads, count):
    scheme = pe.RoPEMixed(head_dim=12, groups=heads)
    params = parameters(scheme)
    f = params["frequencies"].astype(float)
    x = np.random.default_rng(0).normal(size=(2, 21, count, 12)).astype(np.float32)
    grid = pe.grid_coordinates(2, 3, 7)
    out = query(scheme, params, x, grid)
    np.testing.assert_array_equal(out, key(scheme, params, x, grid))
    for b, t, n in np.ndindex(2, 21, count):
        place = np.asarray(grid[:, b, t], float)
        expected = rope_vit(x[b, t, n].astype(float), place, f[:, n * heads // count])
        np.testing.assert_allclose(out[b, t, n], expected, rtol=0, atol=3e-6)


def test_initialises_as_rope_vit_with_one_angle_per_head():
    rows, columns = pe.RoPEMixed(8, groups=4).init(jax.random.key(0))["frequencies"]
    angles = np.arctan2(rows[:, 0], columns[:, 0])[:, None]
    assert np.ptp(angles) > 0.5
    back = np.cos(angles) * columns + np.sin(angles) * rows
    across = np.cos(angles) * rows - np.sin(angles) * columns
    np.testing.assert_allclose(back, np.tile(FREQS_X, (4, 1)), atol=1e-6)
    np.testing.assert_allclose(across, np.tile(FREQS_Y, (4, 1)), atol=1e-6)


ERRORS = [(pe.RoPEMixed, {"head_dim": 6}, "head_dim must be a multiple of 4, got 6")]
