"""Frequencies of high-frequency RoPE against the lines of FoPE's code."""

import numpy as np
import pytest

import posenc_jax as pe

OPTIONS = {pe.HighFrequenciesOnly: {"original_max_position": 64}}


def fope(dim, theta, max_sequence_length):
    """TsinghuaC3I/Fourier-Position-Embedding at bd94b20, get_inv_freq with the floor at zero."""
    inv_freq = 1.0 / theta ** (np.arange(0, dim, 2) / dim)
    inv_freq[inv_freq < 2 * np.pi / max_sequence_length] = 0.0
    return inv_freq


@pytest.mark.parametrize("dim, theta", [(128, 1e4), (12, 5e5), (64, 50.0)])
@pytest.mark.parametrize("length", [1, 63, 10**6])
def test_matches_the_reference(dim, theta, length):
    scaling = pe.HighFrequenciesOnly(original_max_position=length)
    got, factor = pe.rope_frequencies(dim, theta, scaling)
    np.testing.assert_allclose(got, fope(dim, theta, length), rtol=2e-14)
    assert factor == 1.0


def test_a_pair_of_exactly_one_period_rotates():
    scaling = pe.HighFrequenciesOnly(original_max_position=100)
    turns = np.array([1.0001, 1.0, 0.9999])
    got, _ = scaling(2 * np.pi * turns / 100, head_dim=6, theta=1e4)
    np.testing.assert_array_equal(got != 0, [True, True, False])


def test_composes_with_other_maps():
    both = (pe.PI(factor=4.0), pe.HighFrequenciesOnly(original_max_position=512))
    got, _ = pe.rope_frequencies(8, scaling=both)
    np.testing.assert_allclose(got, [0.25, 0.025, 0.0, 0.0])
