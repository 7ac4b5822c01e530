"""Interpolated grids against PyTorch."""

import jax.numpy as jnp
import numpy as np
import pytest

import posenc_jax as pe
from tests.support import golden

GOLDEN = golden("grids")
GRID = np.sin(1 + np.arange(70)).reshape(2, 5, 7).astype(np.float32)


@pytest.mark.parametrize(
    "case",
    GOLDEN["cases"],
    ids=lambda c: f"{c['method']}-{c['size']}-{c['align_corners']}-{c['antialias']}",
)
def test_matches_torch(case):
    options = {name: case[name] for name in ("method", "align_corners", "antialias")}
    got = pe.resize_grid(jnp.asarray(GRID), *case["size"], **options)
    np.testing.assert_allclose(got, case["values"], atol=2e-6)


def test_keeps_the_dtype():
    assert pe.resize_grid(jnp.zeros((2, 2), jnp.bfloat16), 3, 3).dtype == jnp.bfloat16


RESIZE = {"grid": jnp.asarray(GRID), "rows": 2, "columns": 2}
ERRORS = [
    (pe.resize_grid, RESIZE | {"method": "area"}, "method must be one of .*, got 'area'"),
    (pe.resize_grid, RESIZE | {"rows": 0}, r"sizes must be positive, got \(5, 7\) to \(0, 2\)"),
    (
        pe.resize_grid,
        RESIZE | {"align_corners": True, "antialias": True},
        "resize_grid: antialias has no align_corners",
    ),
]
