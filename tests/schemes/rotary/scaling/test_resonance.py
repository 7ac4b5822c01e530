"""Resonance: whole wavelengths, and repeating angles."""

import jax.numpy as jnp
import numpy as np

import posenc_jax as pe


def test_wavelengths_worked_out_by_hand():
    """2 pi times 1, 10, 100, 1000; and wavelengths of 12 dimensions, each rounded."""
    got, factor = pe.rope_frequencies(8, scaling=pe.Resonance())
    np.testing.assert_allclose(2 * np.pi / got, [6, 63, 628, 6283], rtol=1e-15)
    assert factor == 1.0
    got, _ = pe.rope_frequencies(12, scaling=pe.Resonance())
    expected = [round(2 * np.pi * 1e4 ** (2 * p / 12)) for p in range(6)]
    np.testing.assert_allclose(2 * np.pi / got, expected, rtol=1e-14)


def test_angles_repeat_at_multiples_of_the_wavelength():
    """The authors tile cos and sin over whole wavelengths; so does exact arithmetic."""
    w, _ = pe.rope_frequencies(8, scaling=pe.Resonance())
    near, turns = jnp.array([[1, 2, 5]]), jnp.array([[1], [257]])
    for p, wavelength in enumerate([6, 63, 628, 6283]):
        far = pe.cos_sin(near + turns * wavelength, w[p : p + 1])
        for a, b in zip(far, pe.cos_sin(near, w[p : p + 1]), strict=True):
            np.testing.assert_allclose(a, np.repeat(b, 2, 0), atol=3e-7)


def test_follows_the_previous_map_and_keeps_zero_frequencies():
    yarn = pe.YaRN(factor=4.0, original_max_position=2048)
    stretched, g = pe.rope_frequencies(16, scaling=yarn)
    got, factor = pe.rope_frequencies(16, scaling=(yarn, pe.Resonance()))
    np.testing.assert_allclose(2 * np.pi / got, np.round(2 * np.pi / stretched), rtol=1e-14)
    assert factor == g
    still, _ = pe.rope_frequencies(16, scaling=(pe.Proportional(fraction=0.5), pe.Resonance()))
    np.testing.assert_array_equal(still[4:], 0.0)
    assert np.all(still[:4] > 0)


ERRORS = [
    (lambda: pe.Resonance()(np.array([20.0]), 2, 1e4), {}, r": wavelengths must round to 1 .*\[20"),
]
