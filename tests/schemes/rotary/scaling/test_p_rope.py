"""Proportional RoPE against transformers, and that pairs of frequency zero do not rotate."""

import jax.numpy as jnp
import numpy as np
import pytest

import posenc_jax as pe
from tests.oracle import apply_rope
from tests.support import golden

OPTIONS = {pe.Proportional: {"fraction": 0.5}}

GOLDEN = golden("frequency_maps")


def test_matches_transformers():
    case = GOLDEN["cases"]["proportional"]
    got, factor = pe.rope_frequencies(case["dim"], case["theta"], pe.Proportional())
    np.testing.assert_allclose(got, case["frequencies"], rtol=1e-6)
    assert factor == case["attention_factor"]


@pytest.mark.parametrize("dim", [12, 20, 64])
@pytest.mark.parametrize("fraction", [0.0, 0.1, 0.25, 0.3, 0.5, 0.75, 1.0])
def test_keeps_as_many_pairs_as_transformers(dim, fraction):
    got, _ = pe.rope_frequencies(dim, scaling=pe.Proportional(fraction=fraction))
    count = int(fraction * dim // 2)
    plain, _ = pe.rope_frequencies(dim)
    np.testing.assert_array_equal(got, [*plain[:count], *np.zeros(dim // 2 - count)])


@pytest.mark.parametrize("layout", ["half", "interleaved"])
def test_pairs_beyond_the_fraction_do_not_rotate(layout):
    x = jnp.asarray(np.random.default_rng(0).normal(size=(1, 3, 6, 16)), "f4")
    positions = jnp.array([1, 257, 10**6])
    out = apply_rope(x, positions, scaling=pe.Proportional(fraction=0.5), layout=layout)
    plain = apply_rope(x, positions, layout=layout)
    pair = np.arange(16) // 2 if layout == "interleaved" else np.arange(16) % 8
    np.testing.assert_array_equal(out[..., pair < 4], plain[..., pair < 4])
    np.testing.assert_array_equal(out[..., pair >= 4], x[..., pair >= 4])
    other = apply_rope(x, positions, rotary_dim=8, layout=layout)
    assert np.abs(out - other).max() > 0.1  # The other thing of that name.


ERRORS = [
    (pe.Proportional, {"fraction": -0.1}, r"Proportional: .*in \[0, 1\], got -0.1"),
    (pe.Proportional, {"fraction": 1.5}, r"Proportional: .*in \[0, 1\], got 1.5"),
    (pe.Proportional, {"fraction": float("nan")}, r"Proportional: .*in \[0, 1\], got nan"),
]
