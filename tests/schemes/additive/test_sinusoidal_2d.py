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


def test_mae():
    got = code(pe.Sinusoidal2D(model_dim=12), pe.grid_coordinates(1, 3, 3))
    np.testing.assert_allclose(got, GOLDEN["mae"], atol=1e-6)


@pytest.mark.parametrize("normalize", [False, True])
def test_detr(normalize):
    coordinates = np.asarray(pe.grid_coordinates(1, 4, 5)) + 1
    if normalize:
        sizes = np.array([4, 5])[:, None, None] + 1e-6
        coordinates = (coordinates / sizes * 2 * np.pi).astype(np.float32)
    scheme = pe.Sinusoidal2D(model_dim=16, layout="interleaved", axes=(0, 1))
    np.testing.assert_allclose(code(scheme, coordinates), GOLDEN[f"detr_{normalize}"], atol=1e-6)


ERRORS = [
    (pe.Sinusoidal2D, {"model_dim": 10}, "model_dim must be a multiple of 4, got 10"),
    (pe.Sinusoidal2D, {"axes": (0, 0)}, r"axes must be .*, got \(0, 0\)"),
]
