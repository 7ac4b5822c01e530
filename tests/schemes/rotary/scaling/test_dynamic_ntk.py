"""Dynamic NTK against transformers, at the lengths where its numbers were printed."""

import functools

import jax.numpy as jnp
import numpy as np
import pytest

import posenc_jax as pe
from tests.oracle import key
from tests.support import Option, golden

_LONG = {"factor": 4.0, "original_max_position": 64, "length": 256}
OPTIONS = {
    pe.DynamicNTK: {
        "factor": Option(2.0, _LONG),
        "original_max_position": Option(32, _LONG),
        "length": Option(128, _LONG),
    }
}

GOLDEN = golden("frequency_maps")
BASE = {"factor": 2.0, "original_max_position": 2048, "length": 4096}


@pytest.mark.parametrize("length", [4096, 8192])
def test_matches_transformers(length):
    case = GOLDEN["cases"][f"dynamic_{length}"]
    got, factor = pe.rope_frequencies(16, scaling=pe.DynamicNTK(2.0, 2048, length))
    np.testing.assert_allclose(got, case["frequencies"], rtol=1e-6)
    assert factor == case["attention_factor"]


def test_cached_keys_stay_correct():
    """The frequencies do not follow the length so far: parts of a sequence equal the whole."""
    scheme = pe.RoPE(head_dim=8, scaling=pe.DynamicNTK(2.0, 8, 19))
    k = jnp.asarray(np.random.default_rng(0).normal(size=(1, 19, 3, 8)), "f4")
    positions = jnp.arange(19)[None]
    parts = [key(scheme, {}, k[:, s], positions[:, s]) for s in (slice(12), slice(12, 19))]
    np.testing.assert_array_equal(jnp.concatenate(parts, 1), key(scheme, {}, k, positions))


ntk = functools.partial(pe.DynamicNTK, **BASE)
ERRORS = [
    (ntk, {"factor": 0.5}, "factor must be at least 1 and finite, got 0.5"),
    (ntk, {"original_max_position": 0}, "original_max_position must be the trained length"),
    (ntk, {"length": 0}, "length must be at least 1, got 0"),
]


def test_needs_two_pairs():
    with pytest.raises(ValueError, match="NTK: needs more than 2 rotary dimensions, got 2"):
        pe.RoPE(head_dim=2, scaling=pe.DynamicNTK(**BASE))
