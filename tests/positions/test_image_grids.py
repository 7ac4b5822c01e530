"""Interpolated grids against PyTorch."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import posenc_jax as pe
from tests.support import golden, slow

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
    (pe.resize_grid, RESIZE | {"rows": 0}, "resize_grid: rows must be >= 1, got 0"),
    (
        pe.resize_grid,
        RESIZE | {"align_corners": True, "antialias": True},
        "resize_grid: antialias has no align_corners",
    ),
]


SETTINGS = {"shift": 0.3, "jitter": 1.5, "rescale": 2.0}


def drawn(monkeypatch, settings):
    """The numbers in [-1, 1] of a call, in order, which it draws from 1 / 4, 1 / 2 and so on."""
    numbers = [np.array([0.25, -0.5]), np.array([-0.75, 1.0]), np.array([0.5])]
    left = iter(numbers)
    monkeypatch.setattr(
        jax.random, "uniform", lambda key, shape, **_: jnp.float32(next(left)).reshape(shape)
    )
    grid = pe.grid_coordinates(1, 3, 5, prefix=1, centred=True)
    return numbers, grid, pe.augmented_coordinates(jax.random.key(0), grid, prefix=1, **settings)


@slow
def test_augmented_coordinates_are_the_formula(monkeypatch):
    (shift, jitter, rescale), grid, out = drawn(monkeypatch, SETTINGS)
    expected = np.asarray(grid, float)[:, 0, 1:].T / (2 * np.pi) + 0.3 * shift
    expected = expected * np.exp(np.log(1.5) * jitter) * np.exp(np.log(2.0) * rescale)
    np.testing.assert_allclose(out[:, 0, 1:].T / (2 * np.pi), expected, atol=1e-6)
    np.testing.assert_array_equal(out[:, :, 0], 0.0)


@slow
def test_augmented_coordinates_are_the_same_without_settings_and_within_bounds():
    grid = pe.grid_coordinates(2, 3, 5, centred=True)
    np.testing.assert_array_equal(pe.augmented_coordinates(jax.random.key(0), grid), grid)
    out = pe.augmented_coordinates(jax.random.key(1), grid, rescale=2.0)
    factors = (out / grid)[jnp.abs(grid) > 0]
    assert 0.5 <= factors.min() and factors.max() <= 2.0 and np.ptp(factors) < 1e-5
    with pytest.raises(ValueError, match=r"factors 1 or more, got shift=0\.0, jitter=0\.5"):
        pe.augmented_coordinates(jax.random.key(0), grid, jitter=0.5)
    with pytest.raises(ValueError, match="prefix must be 0 to T = "):
        pe.augmented_coordinates(jax.random.key(0), grid, prefix=-1)


@pytest.mark.needs("torch", "transformers>=5.24")
def test_augmented_coordinates_equal_transformers(monkeypatch):
    import torch
    from transformers.models.dinov3_vit import modeling_dinov3_vit as theirs

    numbers, _, out = drawn(monkeypatch, SETTINGS)
    left = iter(numbers)

    def uniform(x, low, high):
        return x.copy_(torch.tensor(next(left))).mul_(high)

    monkeypatch.setattr(torch.Tensor, "uniform_", uniform)
    coordinates = theirs.get_patches_center_coordinates(3, 5, torch.float64, "cpu")
    expected = 2 * np.pi * theirs.augment_patches_center_coordinates(coordinates, **SETTINGS)
    np.testing.assert_allclose(out[:, 0, 1:].T, expected, atol=1e-5)
