"""FoPE against the lines of the authors' code, in float64."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from posenc_jax import contrib
from tests.oracle import attend, qkv, query, softmax_attention
from tests.support import parameters, slow, slow_but

OPTIONS = {
    contrib.FoPE: {
        "groups": 2,
        "gain": 0.6,
        "theta": 100.0,
        "rotate_clipped": False,
        "learned": True,
        "seed": 1,
    }
}


def authors(x, positions, series, trained_length, theta=1e4):
    """TsinghuaC3I/Fourier-Position-Embedding at bd94b20, FourierEmbedding, for every head."""
    x = np.asarray(x, np.float64)
    heads, dim = x.shape[2:]
    inv_freq = 1.0 / theta ** (np.arange(0, dim, 2) / dim)
    inv_freq[inv_freq < 2 * np.pi / trained_length] = 0.0
    freqs = np.asarray(positions, np.float64)[:, None] * inv_freq[inv_freq != 0.0]
    out = np.zeros(x.shape)
    for h in range(heads):
        tables = []
        for name, wave in (("cos", np.cos(freqs)), ("sin", np.sin(freqs))):
            coef = np.asarray(series[name], np.float64)
            table = np.einsum("tD,Dd->td", wave, coef[h * len(coef) // heads])
            pad = np.ones((len(table), dim // 2 - table.shape[1]))
            tables.append(np.concatenate([table, pad] * 2, 1))
        a, b = np.split(x[:, :, h], 2, -1)
        out[:, :, h] = x[:, :, h] * tables[0] + np.concatenate([-b, a], -1) * tables[1]
    return out


@pytest.mark.parametrize(
    "groups, dim, trained_length", slow_but([(3, 8, 64), (1, 32, 512)], (1, 32, 512))
)
def test_attention_matches_the_authors(groups, dim, trained_length):
    scheme = contrib.FoPE(head_dim=dim, trained_length=trained_length, groups=groups, gain=2.0)
    q, k, v = qkv(length=21, dim=dim)
    series = scheme.coefficients({})
    q_, k_ = (authors(x, np.arange(21), series, trained_length) for x in (q, k))
    expected = softmax_attention(q_, k_, v, lambda q, k, n, i, j: q @ k / np.sqrt(dim))
    out = attend(scheme, {}, q, k, v, is_causal=True)
    np.testing.assert_allclose(out, expected, atol=1e-5)


def test_queries_at_far_positions_with_learned_coefficients():
    scheme = contrib.FoPE(head_dim=32, trained_length=4096, groups=12, learned=True, theta=5e5)
    params = parameters(scheme)
    (q, _, _) = qkv(length=4, heads=12, dim=32)
    positions = np.array([1, 257, 10**6, 2**31 - 1])
    got = query(scheme, params, q, jnp.asarray(positions)[None])
    np.testing.assert_allclose(got, authors(q, positions, params, 4096, theta=5e5), atol=1e-5)


@slow
def test_pairs_without_position_as_shipped_and_as_written():
    """H = 4 has one pair with position; the other gets cosine and sine 1, or stays."""
    x = jnp.array([0.0, 1.0, 0.0, 2.0]).reshape(1, 1, 1, 4)
    for rotate_clipped, expected in ((True, [-1.0, 3.0]), (False, [1.0, 2.0])):
        scheme = contrib.FoPE(head_dim=4, trained_length=64, rotate_clipped=rotate_clipped)
        np.testing.assert_allclose(query(scheme, {}, x, jnp.array([[5]]))[0, 0, 0, 1::2], expected)


@slow
def test_coefficients_are_ones_and_noise():
    """Of 16 dimensions, 4 pairs complete a period in 512 tokens, and all in a million."""
    every_second = np.eye(8)[:, ::2]
    for length, expected in ((512, np.eye(4)), (10**6, every_second)):
        scheme = contrib.FoPE(head_dim=16, trained_length=length, gain=0.0)
        for series in scheme.coefficients({}).values():
            np.testing.assert_array_equal(series[0], expected)
    for groups, spread in ((1, 64 + 32), (8, (64 + 8) * 32)):
        noisy = contrib.FoPE(head_dim=128, trained_length=10**6, gain=0.5, groups=groups)
        series = noisy.coefficients({})
        noise = series["cos"] - noisy.replace(gain=0.0).coefficients({})["cos"]
        np.testing.assert_allclose(np.std(noise), 0.5 * np.sqrt(2 / spread), rtol=0.05)
        assert np.abs(series["cos"] - series["sin"]).max() > 1e-3


def test_learned_coefficients_start_as_the_fixed_ones():
    fixed, learned = (contrib.FoPE(head_dim=8, trained_length=64, learned=x) for x in (False, True))
    assert fixed.init(jax.random.key(0)) == {}
    params = learned.init(jax.random.key(0))
    jax.tree.map(np.testing.assert_array_equal, params, fixed.coefficients({}))


ERRORS = [
    (contrib.FoPE, {"head_dim": 2}, "head_dim must be >= 4, got 2"),
    (contrib.FoPE, {"trained_length": 5}, "completes a period within trained_length=5"),
    (contrib.FoPE, {"learned": True, "seed": 2}, "coefficients are drawn by `init`, got seed=2"),
]
