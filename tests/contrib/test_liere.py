"""LieRE against the lines of the authors' code, in float64."""

import numpy as np
import pytest
from scipy.linalg import expm

from posenc_jax import contrib
from tests.oracle import attend, qkv, slice_of, softmax_attention
from tests.support import parameters, slow_but

OPTIONS = {contrib.LieRE: {"size": 4, "groups": 2}}

GRID = np.indices((3, 7)).reshape(2, 1, -1).astype("f4") / np.float32([2, 6])[:, None, None]


def authors(x, coordinates, upper, size):
    """StanfordMIMI/LieRE at b27b41b, LierePositionEncoder and apply_transforms.

    `coordinates` are [2, T].
    """
    upper, x = np.asarray(upper, np.float64), np.asarray(x, np.float64)
    groups, blocks = upper.shape[1:3]
    raw = np.zeros((2, groups, blocks, size, size))
    raw[..., *np.triu_indices(size, 1)] = upper
    triangle = raw - 0.5
    bases = triangle - np.swapaxes(triangle, -1, -2)
    out = x.copy()
    for t, g, b in np.ndindex(x.shape[1], groups, blocks):
        generator = np.tensordot(coordinates[:, t].astype(float), bases[:, g, b], 1)
        heads, part = slice_of(g, x.shape[2] // groups), slice_of(b, size)
        out[:, t, heads, part] = x[:, t, heads, part] @ expm(generator).T
    return out


@pytest.mark.parametrize("size, groups", slow_but([(8, 1), (3, 2)], (3, 2)))
def test_attention_on_an_image_matches_the_authors(size, groups):
    scheme = contrib.LieRE(head_dim=8, size=size, groups=groups)
    params = parameters(scheme)
    q, k, v = qkv(length=21, kv_heads=6)
    coordinates = np.asarray(GRID)[:, 0]
    mapped = (authors(x, coordinates, params["upper"], size) for x in (q, k))
    expected = softmax_attention(*mapped, v, lambda a, b, n, i, j: a @ b / np.sqrt(8))
    out = attend(scheme, params, q, k, v, coordinates=GRID, is_causal=True)
    np.testing.assert_allclose(out, expected, atol=1e-5)


ERRORS = [
    (contrib.LieRE, {"size": 1}, r"size must be in \[2, head_dim=8\], got 1"),
    (contrib.LieRE, {"size": 9}, r"size must be in \[2, head_dim=8\], got 9"),
]
