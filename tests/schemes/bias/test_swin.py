"""Swin against the class of its authors."""

import jax.numpy as jnp
import numpy as np
import pytest

import posenc_jax as pe
from tests.oracle import attend, waves
from tests.support import golden, initial, parameters

OPTIONS = {pe.Swin: {"window": (5, 6), "stddev": initial(0.1)}}

GOLDEN = golden("swin")


@pytest.mark.parametrize("flat", [True, False])
def test_attention_matches_the_authors_at_far_positions_too(flat):
    scheme = pe.Swin(num_heads=6, window=tuple(GOLDEN["window"]))
    q, k, v, expected = (jnp.asarray(GOLDEN[n], jnp.float32)[None] for n in ("q", "k", "v", "out"))
    far = pe.grid_coordinates(1, *scheme.window) + np.int32([10**6, 2 * 10**6])[:, None, None]
    out = attend(scheme, {"table": waves(15, 6).T}, q, k, v, coordinates=None if flat else far)
    np.testing.assert_allclose(out, expected, atol=1e-5)


def test_offset_larger_than_the_window_makes_its_row_nan_and_no_other():
    scheme = pe.Swin(num_heads=2, window=(2, 3))
    params = parameters(scheme)
    row, column = np.array([[0, 1, 2], [0, 2, 0]], np.int32)
    coordinates = jnp.asarray(np.stack([row, column])[:, None])
    bias = scheme.rules(params).dense(coordinates, coordinates)[0, 0]
    np.testing.assert_array_equal(np.isnan(bias), np.abs(row[:, None] - row[None]) > 1)
    q = k = v = jnp.ones((1, 3, 2, 4))
    out = attend(scheme, params, q, k, v, coordinates=coordinates, is_causal=True)
    np.testing.assert_array_equal(np.isnan(out[0, :, 0, 0]), [False, False, True])
    segments = jnp.array([[0, 0, 1]])  # Masked keys have no effect.
    out = attend(scheme, params, q, k, v, coordinates=coordinates, segment_ids=segments)
    assert np.isfinite(out).all()


ERRORS = [
    (pe.Swin, {"window": (0, 2)}, r"window must be .*, got \(0, 2\)"),
    (pe.Swin, {"window": 7}, "window must be .*, got 7"),
]


def test_coordinates_are_integers_of_two_axes():
    bias = pe.Swin(num_heads=1).rules({"table": np.zeros((1, 169), "f4")})
    with pytest.raises(TypeError, match="swin: coordinates must be integers, got float32"):
        bias.dense(np.zeros(2, "f4"), np.zeros(2, "f4"))
    with pytest.raises(ValueError, match="swin: coordinates must have 2 axes, got 3"):
        bias.dense(*[np.zeros((3, 1, 2), np.int32)] * 2)
