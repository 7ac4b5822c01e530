"""Llama 3.1's scaling against transformers and the three cases of Meta's code."""

import numpy as np

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


def test_matches_transformers():
    case = GOLDEN["cases"]["llama3"]
    got, factor = pe.rope_frequencies(case["dim"], case["theta"], pe.Llama3())
    np.testing.assert_allclose(got, case["frequencies"], rtol=1e-6)
    assert factor == case["attention_factor"]


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
