"""LongRoPE against transformers and the magnitudes of its authors' code."""

import functools
import math

import numpy as np
import pytest

import posenc_jax as pe
from tests.support import Option, golden

_LISTS = {
    "short_factor": (1.0,) * 32,
    "long_factor": (2.0,) * 32,
    "factor": 4.0,
    "original_max_position": 64,
    "long": False,
}
OPTIONS = {
    pe.LongRoPE: {
        "short_factor": Option((1.5,) * 32, _LISTS),
        "long_factor": Option((3.0,) * 32, _LISTS | {"long": True}),
        "factor": Option(2.0, _LISTS),
        "original_max_position": Option(128, _LISTS),
        "long": Option(True, _LISTS),
        "magnitude": Option("yarn", _LISTS),
        "attention_factor": Option(1.5, _LISTS),
    }
}

GOLDEN = golden("frequency_maps")
BASE = {
    "short_factor": (1.0,) * 8,
    "long_factor": (1.0, 1.0, 1.5, 2.0, 4.0, 8.0, 16.0, 32.0),
    "factor": 32.0,
    "original_max_position": 4096,
    "long": False,
}


@pytest.mark.parametrize("long, name", [(False, "longrope_short"), (True, "longrope_long")])
def test_matches_transformers(long, name):
    case = GOLDEN["cases"][name]
    got, factor = pe.rope_frequencies(16, scaling=pe.LongRoPE(**(BASE | {"long": long})))
    np.testing.assert_allclose(got, case["frequencies"], rtol=1e-6)
    np.testing.assert_allclose(factor, case["attention_factor"], rtol=1e-12)


@pytest.mark.parametrize(
    "option, expected",
    [
        ({}, math.sqrt(1 + math.log(32) / math.log(4096))),
        ({"magnitude": "yarn"}, 0.1 * math.log(32) + 1),
        ({"attention_factor": 1.243}, 1.243),
        ({"factor": 8.0}, math.sqrt(1 + math.log(8) / math.log(4096))),
        ({"original_max_position": 2048}, math.sqrt(1 + math.log(32) / math.log(2048))),
        ({"factor": 1.0}, 1.0),
    ],
    ids=str,
)
def test_the_magnitude_is_that_of_the_authors_code(option, expected):
    _, factor = pe.rope_frequencies(16, scaling=pe.LongRoPE(**(BASE | option)))
    np.testing.assert_allclose(factor, expected, rtol=1e-12)


def test_each_list_is_for_its_own_lengths():
    short = tuple(1.0 + 0.1 * p for p in range(8))
    plain, _ = pe.rope_frequencies(16)
    for longer, factors in ((False, short), (True, BASE["long_factor"])):
        scaling = pe.LongRoPE(**(BASE | {"short_factor": short, "long": longer}))
        np.testing.assert_allclose(pe.rope_frequencies(16, scaling=scaling)[0], plain / factors)


long = functools.partial(pe.LongRoPE, **BASE)
ERRORS = [
    (long, {"original_max_position": 1}, "original_max_position must exceed 1"),
    (long, {"short_factor": ()}, r"short_factor must have a positive number per pair, got \(\)"),
    (long, {"long_factor": (1.0, 0.0)}, r"long_factor must have a positive .*got \(1.0, 0.0\)"),
    (long, {"short_factor": (1.0,)}, "short_factor has 1 numbers, and long_factor 8"),
    (long, {"magnitude": "none"}, "magnitude must be one of .* got 'none'"),
    (long, {"attention_factor": -1.0}, "attention_factor=-1.0 must be positive"),
    (long, {"attention_factor": 1.2, "magnitude": "yarn"}, "attention_factor=1.2 .*contradicts"),
    (
        pe.RoPE,
        {"head_dim": 12, "scaling": long()},
        "LongRoPE: has factors for 8 pairs, but 6 rotate",
    ),
    (pe.RoPE, {"head_dim": 16, "scaling": long(long=None)}, "LongRoPE: long=None .* long=True or"),
]
