"""Six temperatures against numbers of released models, and chained with other schemes.

Numbers: the formulas of huggingface/transformers 5.23.0 (llama4, ministral3, beam, inkling)
and bojone/rerope in float64, at positions on both sides of every step.
"""

import jax.numpy as jnp
import numpy as np
import pytest

import posenc_jax as pe
from posenc_jax.schemes.logit_scale.temperature import query_temperature
from tests.oracle import matches_products, query, turned
from tests.support import Option

OPTIONS = {
    pe.QueryTemperature: {
        "form": "log_n_clipped",
        "length": 8,
        "strength": Option(0.5, {"form": "beam"}),
    }
}

GOLDEN = {
    ("llama4", 8192): {
        0: 1.0,
        8190: 1.0,
        8191: 1.0693147180559945,
        16383: 1.109861228866811,
        65535: 1.219722457733622,
        1048575: 1.4859812404361672,
        2**31 - 1: 1 + 0.1 * np.log1p(2**31 // 8192),
    },
    ("ministral3", 16384): {
        0: 1.0,
        16383: 1.0,
        16384: 1.0693147180559945,
        65535: 1.138629436111989,
    },
    ("beam", 2048): {
        0: 1.0000488173994806,
        2047: 1.0717734625362931,
        131071: 1.5180683844287584,
    },
    ("inkling", 128000): {0: 1.0, 127999: 1.0, 1048575: 1.2103158068297153},
    ("log_n_clipped", 4096): {0: 1.0, 4095: 1.0, 16383: 7 / 6},
    ("log_n", 4096): {0: 0.0, 1: 1 / 12, 63: 0.5, 4095: 1.0, 16383: 7 / 6},
}


@pytest.mark.parametrize("form, length", GOLDEN)
def test_matches_released_models(form, length):
    positions, expected = zip(*GOLDEN[form, length].items(), strict=True)
    scheme = pe.QueryTemperature(form=form, length=length)
    q = np.ones((1, len(positions), 6, 4), "f4")
    out = query(scheme, {}, q, np.array([positions]))
    np.testing.assert_allclose(out[0, :, 5, 3], expected, rtol=2e-6)


def test_steps_are_exact_at_any_position():
    """float32 counts to 2^24: further on a quotient is a step ahead."""
    length = 2**23
    for form, step in (("llama4", 3 * length - 1), ("ministral3", 3 * length)):
        got = query_temperature(jnp.array([step - 1, step]), form, length, strength=1.0)
        np.testing.assert_allclose(got, 1 + np.log([3.0, 4.0]), rtol=1e-6)


def test_attention_with_rope_is_that_of_the_formula():
    heat = pe.QueryTemperature(form="log_n_clipped", length=16)

    def product(q, k, i, j, w):
        return max(np.log(i + 1) / np.log(16), 1) * turned(q, i * w) @ turned(k, j * w)

    matches_products(pe.chain(heat, pe.RoPE(head_dim=12)), product)


def test_a_negative_position_is_nan_in_its_own_row():
    out = query_temperature(jnp.array([-2, 3]), "log_n", 4)
    assert np.isnan(out[0]) and out[1] == 1


ERRORS = [
    (pe.QueryTemperature, {"length": 1}, "length must be >= 2, got 1"),
    (pe.QueryTemperature, {"form": "beam", "length": 0}, "length must be >= 1, got 0"),
    (pe.QueryTemperature, {"length": 2.5}, "length must be an integer, got 2.5", TypeError),
    (
        pe.QueryTemperature,
        {"form": "beam", "strength": float("nan")},
        "strength .* finite, got nan",
    ),
    (query_temperature, {"positions": 0, "form": "log-n", "length": 4}, "form must be one of"),
    (pe.QueryTemperature, {"strength": 0.2}, "'log_n' has no strength, got strength=0.2"),
]
