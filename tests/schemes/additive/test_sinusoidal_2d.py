"""Sinusoidal encodings of image patches against MAE's function and DETR's class."""

import numpy as np
import pytest

import posenc_jax as pe
from tests.oracle import embed
from tests.support import golden

OPTIONS = {pe.Sinusoidal2D: {"theta": 100.0, "layout": "interleaved", "axes": (0, 1)}}

GOLDEN = golden("sinusoidal_2d")


def code(scheme, coordinates):
    x = np.zeros((*coordinates.shape[-2:], scheme.model_dim), "f4")
    return np.asarray(embed(scheme, {}, x, coordinates)[0])


def on_grid(rows, columns):
    return np.indices((rows, columns)).reshape(2, 1, -1)


def test_mae():
    got = code(pe.Sinusoidal2D(model_dim=12), on_grid(3, 3))
    np.testing.assert_allclose(got, GOLDEN["mae"], atol=1e-6)


def test_the_half_that_mae_names_after_rows_holds_columns():
    coordinates = np.array([[[5, 5, 9]], [[1, 2, 1]]])
    got = code(pe.Sinusoidal2D(model_dim=12), coordinates)
    assert np.abs(got[0, :6] - got[1, :6]).max() > 0.1  # Another column.
    np.testing.assert_array_equal(got[0, :6], got[2, :6])  # Another row.


@pytest.mark.parametrize("normalize", [False, True])
def test_detr(normalize):
    coordinates = (on_grid(4, 5) + 1).astype(np.float64)
    if normalize:
        coordinates = coordinates / (np.array([4, 5])[:, None, None] + 1e-6) * 2 * np.pi
    coordinates = coordinates.astype(np.float32) if normalize else coordinates.astype(np.int32)
    scheme = pe.Sinusoidal2D(model_dim=16, layout="interleaved", axes=(0, 1))
    np.testing.assert_allclose(code(scheme, coordinates), GOLDEN[f"detr_{normalize}"], atol=1e-6)


ERRORS = [
    (pe.Sinusoidal2D, {"model_dim": 10}, "model_dim must be a multiple of 4, got 10"),
    (pe.Sinusoidal2D, {"axes": (0, 0)}, r"axes must be .*, got \(0, 0\)"),
]
