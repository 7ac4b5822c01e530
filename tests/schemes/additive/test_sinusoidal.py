"""Sinusoidal positions against the paper, tensor2tensor's code, and their own properties."""

import jax.numpy as jnp
import numpy as np
import pytest

import posenc_jax as pe
from posenc_jax import sinusoidal_encoding as encode
from tests.support import golden

OPTIONS = {pe.Sinusoidal: {"theta": 100.0, "layout": "concat"}}

GOLDEN = golden("sinusoidal")
AT = np.array([0, 1, 2, 62, 257, 10**6, -3])


def paper(position, dim, theta=10000.0):
    """Section 3.5 of the paper, one number at a time, in float64."""
    out = np.zeros(dim)
    for i in range(dim // 2):
        out[2 * i] = np.sin(position / theta ** (2 * i / dim))
        out[2 * i + 1] = np.cos(position / theta ** (2 * i / dim))
    return out


@pytest.mark.parametrize(
    "dim, theta, positions", [(2, 1e4, AT), (64, 1e6, AT), (4, 1e4, np.float32([0.5, 2.25]))]
)
def test_matches_the_paper(dim, theta, positions):
    got = encode(jnp.asarray(positions), dim, theta=theta)
    expected = [paper(p, dim, theta) for p in positions]
    np.testing.assert_allclose(got, expected, rtol=0, atol=3e-7)


@pytest.mark.parametrize("case", GOLDEN["cases"], ids=lambda case: str(case["dim"]))
def test_t2t_matches_the_code_of_tensor2tensor(case):
    positions = case["start"] + jnp.arange(4)
    got = encode(positions, case["dim"], layout="t2t")
    np.testing.assert_allclose(got, case["values"], rtol=0, atol=3e-5)  # Their float32 angles.


@pytest.mark.parametrize("layout, dim, last", [("t2t", 2, 1), ("t2t", 5, 1), ("concat", 12, 6)])
def test_sines_then_cosines_match_their_formula(layout, dim, last):
    """tensor2tensor's log_timescale_increment, and PositionalEmbedding of Transformer-XL."""
    waves = AT[:, None] * 1e4 ** (-np.arange(dim // 2) / last)
    expected = np.concatenate([np.sin(waves), np.cos(waves), np.zeros((len(AT), dim % 2))], 1)
    got = encode(jnp.asarray(AT), dim, layout=layout)
    np.testing.assert_allclose(got, expected, rtol=0, atol=3e-7)


ERRORS = [
    (encode, {"positions": np.zeros(3, bool), "dim": 4}, "positions must be integers", TypeError),
    (pe.Sinusoidal, {"model_dim": 5}, "model_dim must be even for layout 'interleaved', got 5"),
    (pe.Sinusoidal, {"model_dim": 1, "layout": "t2t"}, "model_dim must be at least 2, got 1"),
]
