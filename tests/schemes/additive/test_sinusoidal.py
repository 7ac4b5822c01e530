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


@pytest.mark.parametrize("dim, theta", [(2, 1e4), (12, 1e4), (64, 1e6)])
def test_matches_the_paper(dim, theta):
    got = encode(jnp.asarray(AT), dim, theta=theta)
    np.testing.assert_allclose(got, [paper(p, dim, theta) for p in AT], rtol=0, atol=3e-7)


@pytest.mark.parametrize("case", GOLDEN["cases"], ids=lambda case: str(case["dim"]))
def test_t2t_matches_the_code_of_tensor2tensor(case):
    positions = case["start"] + jnp.arange(4)
    got = encode(positions, case["dim"], layout="t2t")
    np.testing.assert_allclose(got, case["values"], rtol=0, atol=3e-5)  # Their float32 angles.


@pytest.mark.parametrize("dim", [2, 5, 12])
def test_t2t_matches_its_formula(dim):
    pairs = dim // 2  # log_timescale_increment of get_timing_signal_1d, in float64.
    waves = AT[:, None] * np.exp(-np.arange(pairs) * np.log(10000) / max(pairs - 1, 1))
    expected = np.concatenate([np.sin(waves), np.cos(waves), np.zeros((len(AT), dim % 2))], 1)
    got = encode(jnp.asarray(AT), dim, layout="t2t")
    np.testing.assert_allclose(got, expected, rtol=0, atol=3e-7)


def test_concat_matches_transformer_xl():
    inv_freq = 1 / 10000 ** (np.arange(0.0, 12, 2.0) / 12)  # PositionalEmbedding, float64.
    wave = np.outer(AT, inv_freq)
    expected = np.concatenate([np.sin(wave), np.cos(wave)], -1)
    got = encode(jnp.asarray(AT), 12, layout="concat")
    np.testing.assert_allclose(got, expected, rtol=0, atol=3e-7)


def test_pairs_are_counted_and_not_dimensions():
    """Position 2, four dimensions; a widely copied example has [0.909, 0.9998, 0.0002, 1.0]."""
    ours = np.asarray(encode(np.array(2), 4), np.float64)
    np.testing.assert_allclose(ours, [0.9093, -0.4161, 0.0200, 0.9998], atol=5e-5)
    np.testing.assert_allclose(ours @ ours, 4 / 2, atol=1e-6)


def test_fractional_positions():
    got = encode(jnp.array([[0.5, 2.25]], jnp.float32), 4)
    np.testing.assert_allclose(got[0], [paper(0.5, 4), paper(2.25, 4)], atol=1e-6)


ERRORS = [
    (encode, {"positions": np.zeros(3, bool), "dim": 4}, "positions must be integers", TypeError),
    (pe.Sinusoidal, {"model_dim": 5}, "model_dim must be even for layout 'interleaved', got 5"),
    (pe.Sinusoidal, {"model_dim": 1, "layout": "t2t"}, "model_dim must be at least 2, got 1"),
]
