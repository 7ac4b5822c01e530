"""Llama 3.1's scaling against transformers and the three cases of Meta's code."""

import math

import numpy as np
import pytest

import posenc_jax as pe
from tests.support import Option, golden

OPTIONS = {
    pe.Llama3: {
        "factor": 4.0,
        "original_max_position": 256,
        "low_freq_factor": Option(2.0, {"original_max_position": 256}),
        "high_freq_factor": Option(30.0, {"original_max_position": 256}),
    }
}

GOLDEN = golden("frequency_maps")


def cases(w, factor=8.0, length=8192, low=1.0, high=4.0):
    """meta-llama/llama-models, models/llama3/model.py, apply_scaling, for one frequency."""
    wavelength = 2 * math.pi / w
    if wavelength < length / high:
        return w
    if wavelength > length / low:
        return w / factor
    smooth = (length / wavelength - low) / (high - low)
    return (1 - smooth) * w / factor + smooth * w


def test_matches_transformers():
    case = GOLDEN["cases"]["llama3"]
    got, factor = pe.rope_frequencies(case["dim"], case["theta"], pe.Llama3())
    np.testing.assert_allclose(got, case["frequencies"], rtol=1e-6)
    assert factor == case["attention_factor"]


@pytest.mark.parametrize("dim", [12, 64, 128])
@pytest.mark.parametrize(
    "option",
    [
        {},
        {"factor": 32.0},  # Llama 3.2.
        {"original_max_position": 2048},
        {"low_freq_factor": 0.25},
        {"high_freq_factor": 9.0},
    ],
    ids=str,
)
def test_matches_the_three_cases_and_every_option_counts(dim, option):
    short = {"original_max_position": "length", "factor": "factor"}
    short |= {"low_freq_factor": "low", "high_freq_factor": "high"}
    got, _ = pe.rope_frequencies(dim, 5e5, pe.Llama3(**option))
    plain, _ = pe.rope_frequencies(dim, 5e5)
    expected = [cases(w, **{short[k]: v for k, v in option.items()}) for w in plain]
    np.testing.assert_allclose(got, expected, rtol=1e-12)
    if option:
        assert np.abs(got / pe.rope_frequencies(dim, 5e5, pe.Llama3())[0] - 1).max() > 0.01


ERRORS = [
    (pe.Llama3, {"factor": 0.5}, "Llama3: .*factor must be at least 1 and finite, got 0.5"),
    (
        pe.Llama3,
        {"original_max_position": 0},
        "Llama3: .*original_max_position must be the trained length",
    ),
    (pe.Llama3, {"low_freq_factor": 5.0}, "Llama3: .*at most high_freq_factor, got 5.0 and 4.0"),
    (pe.Llama3, {"low_freq_factor": 0.0}, "Llama3: .*must be positive .*got 0.0 and 4.0"),
]
