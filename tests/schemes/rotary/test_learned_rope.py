"""Learned frequencies against the lines of Mistral-Large-4 and of GRAPE, in float64."""

import jax.numpy as jnp
import numpy as np
import pytest

import posenc_jax as pe
from tests.oracle import qkv, query, turned
from tests.support import ROTARY_OPTIONS

OPTIONS = {pe.LearnedRoPE: {**ROTARY_OPTIONS, "groups": 2, "alpha_scale": 4.0}}

YARN = pe.YaRN(factor=4.0, original_max_position=64)


def alpha(groups, pairs, seed=0):
    return 0.5 * np.random.default_rng(seed).normal(size=(groups, pairs))


def mistral(x, positions, inv_freq, alpha, attention_scaling=1.0):
    """transformers 5.23.0, mistral_large4: the rotary embedding and its interleaved use."""
    angles = np.asarray(positions, np.float64)[:, None] * (inv_freq * np.exp(alpha))[None]
    cos, sin = (attention_scaling * f(angles)[:, None] for f in (np.cos, np.sin))
    out, x = np.zeros(x.shape), np.asarray(x, np.float64)
    out[..., 0::2] = x[..., 0::2] * cos - x[..., 1::2] * sin
    out[..., 1::2] = x[..., 1::2] * cos + x[..., 0::2] * sin
    return out


def grape(x, positions, log_freq, log_freq_scale):
    """model-architectures/GRAPE at f5b539f, MSGRAPECommuting, one spectrum per head."""
    freq = np.exp(log_freq / log_freq_scale)
    angles = np.asarray(positions, np.float64)[:, None, None] * freq[None]
    return turned(x, -angles[None])


@pytest.mark.parametrize("scaling", [pe.FrequencyMap(), YARN])
def test_matches_mistral_large_4(scaling):
    scheme = pe.LearnedRoPE(head_dim=8, layout="interleaved", scaling=scaling)
    params = {"alpha": jnp.asarray(alpha(1, 4), jnp.float32)}
    positions = np.array([0, 1, 257, 2047])
    base, factor = pe.rope_frequencies(8, scaling=scaling)
    np.testing.assert_allclose(
        scheme.frequencies(params)[0], base * np.exp(alpha(1, 4))[0], rtol=1e-6
    )
    exact = np.asarray(scheme.frequencies(params), np.float64)[0]
    for x in qkv(length=4)[:2]:
        got = query(scheme, params, x, jnp.asarray(positions)[None])
        np.testing.assert_allclose(got, mistral(x, positions, exact, 0.0, factor), atol=2e-6)
        near = mistral(x, positions, base, alpha(1, 4)[0], factor)
        np.testing.assert_allclose(got[:, :2], near[:, :2], atol=2e-6)


def test_matches_grape_with_frequencies_per_head():
    heads, positions = 12, np.array([0, 1, 63])
    scheme = pe.LearnedRoPE(head_dim=8, groups=heads, layout="half_negative", alpha_scale=16.0)
    shift = 16 * alpha(heads, 4)
    log_freq = 16 * np.log(pe.rope_frequencies(8)[0])[None] + shift
    (x, _, _) = qkv(length=3, heads=heads)
    got = query(scheme, {"alpha": shift.astype("f4")}, x, positions[None])
    np.testing.assert_allclose(got, grape(x, positions, log_freq, 16.0), atol=2e-5)
