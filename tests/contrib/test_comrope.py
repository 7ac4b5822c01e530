"""ComRoPE against the lines of the authors' code, in float64."""

import numpy as np
import pytest
from scipy.linalg import expm

import posenc_jax as pe
from posenc_jax import contrib
from tests.oracle import attend, qkv, slice_of, softmax_attention
from tests.support import initial, parameters, slow

OPTIONS = {
    contrib.ComRoPE: {"size": 2, "axes": "by_block", "groups": 2, "init_std": initial(0.1)},
}

GRID = pe.grid_coordinates(1, 3, 7)


def authors(x, coordinates, params, axes):
    """Longin-Yu/ComRoPE at 7aeef08, get_exponent_matrix and get_rotation_matrix, with R @ x.

    `coordinates` are [2, T].
    """
    freqs = np.asarray(params["matrix"], np.float64)
    skew = freqs - np.swapaxes(freqs, -1, -2)
    groups, blocks, size, _ = skew.shape
    if axes == "scaled":
        factors = np.asarray(params["multiplier"], np.float64)
    else:
        factors = np.zeros((2, blocks))
        for i in range(2):
            factors[i, i::2] = 1.0
    x = np.asarray(x, np.float64)
    out = np.zeros(x.shape)
    for t, g, b in np.ndindex(x.shape[1], groups, blocks):
        scaled = sum(factors[a, b] * float(coordinates[a][t]) for a in range(2))
        heads, part = slice_of(g, x.shape[2] // groups), slice_of(b, size)
        out[:, t, heads, part] = x[:, t, heads, part] @ expm(scaled * skew[g, b]).T
    return out


@pytest.mark.parametrize(
    "axes, size, groups, grid",
    [
        pytest.param("scaled", 4, 3, GRID, marks=slow),
        ("scaled", 3, 1, (GRID + 0.5) / 9),
        ("by_block", 2, 2, GRID),
    ],
    ids=["grid", "fractions", "by_block"],
)
def test_attention_on_a_grid_matches_the_authors(axes, size, groups, grid):
    dim = 4 * size
    scheme = contrib.ComRoPE(head_dim=dim, size=size, axes=axes, groups=groups, init_std=0.3)
    params = parameters(scheme)
    q, k, v = qkv(length=21, dim=dim, kv_heads=6)
    coordinates = np.asarray(grid)[:, 0]
    mapped = (authors(x, coordinates, params, axes) for x in (q, k))
    expected = softmax_attention(*mapped, v, lambda a, b, n, i, j: a @ b / np.sqrt(dim))
    out = attend(scheme, params, q, k, v, coordinates=grid, is_causal=True)
    np.testing.assert_allclose(out, expected, atol=1e-5)


ERRORS = [
    (contrib.ComRoPE, {"size": 3}, "size=3 must be at least 2 and divide head_dim=8"),
    (contrib.ComRoPE, {"axes": "by_block", "size": 8}, "need blocks of size=8 in head_dim=8"),
]
