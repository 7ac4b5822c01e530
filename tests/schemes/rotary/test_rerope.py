"""ReRoPE, Leaky ReRoPE and STRING against float64 ports of their authors' code."""

import jax.numpy as jnp
import numpy as np
import pytest

import posenc_jax as pe
from tests.oracle import attend, qkv, softmax_attention
from tests.support import Option

_NEAR = {"window": 6}
OPTIONS = {
    pe.ReRoPE: {
        "window": Option(9, _NEAR),
        "leak": Option(0.5, _NEAR),
        "restart": Option(9, {"window": 6, "leak": 0.5}),
        "theta": Option(100.0, _NEAR),
        "layout": Option("interleaved", _NEAR),
        "rotary_dim": Option(4, _NEAR),
        "rotary_start": Option(2, _NEAR),
        "scaling": Option(pe.PI(factor=2.0), _NEAR),
    }
}


def rotated(x, angle):
    """rotate_half of one vector by float64 angles."""
    a, b = np.split(np.asarray(x, np.float64), 2)
    c, s = np.cos(angle), np.sin(angle)
    return np.concatenate([a * c - b * s, b * c + a * s])


def rerope(q, k, i, j, window, w):
    """bojone/rerope, rerope_patch.py: `attn_weights1`, `attn_weights2`, `rectified_mask`."""
    if abs(i - j) < window:
        return rotated(q, i * w) @ rotated(k, j * w)
    return rotated(q, window * w) @ k


def leaky(q, k, i, j, window, w, s):
    """bojone/rerope, leaky_rerope_patch.py; `rotary_emb2` divides positions by s."""
    if abs(i - j) < window:
        return rotated(q, i * w) @ rotated(k, j * w)
    offset = window * (s - 1)
    return rotated(q, (i + offset) / s * w) @ rotated(k, j / s * w)


def string(q, k, i, j, diag_size, w, local_window):
    """HKUNLP/STRING, string_for_llama.py, as its decode step has it."""
    if j > i - diag_size:
        return rotated(q, i * w) @ rotated(k, j * w)
    return rotated(q, (i - diag_size + local_window) * w) @ rotated(k, j * w)


CASES = {
    "rerope": (pe.ReRoPE(head_dim=12, window=7), rerope, (7,)),
    "leaky": (pe.ReRoPE(head_dim=12, window=7, leak=1 / 16), leaky, (7, 16)),
    "leaky3": (pe.ReRoPE(head_dim=12, window=10, leak=1 / 3), leaky, (10, 3)),
    "string": (pe.ReRoPE(head_dim=12, window=21, leak=1.0, restart=5), string, (21, 5)),
}


SIZES = [(6, 3, 0), (12, 12, 257), (6, 2, 10**6)]


@pytest.mark.parametrize(
    "name, heads, kv_heads, start",
    [(name, *SIZES[i % 3]) for i, name in enumerate(CASES)],
)
def test_matches_the_authors_code(name, heads, kv_heads, start):
    scheme, port, (window, *options) = CASES[name]
    q, k, v = qkv(length=27, heads=heads, kv_heads=kv_heads, dim=12)
    w = 1e4 ** (-2.0 * np.arange(6) / 12)
    positions = start + np.arange(27)

    def logit(q, k, n, i, j):
        return port(q, k, i, j, window, w, *options) / np.sqrt(12)

    expected = softmax_attention(q, k, v, logit, positions=positions)
    out = attend(scheme, {}, q, k, v, positions=jnp.asarray(positions), is_causal=True)
    np.testing.assert_allclose(out, expected, atol=1e-5)


ERRORS = [
    (pe.ReRoPE, {"leak": 2.0}, "leak must be from 0 to 1, got 2.0"),
    (pe.ReRoPE, {"restart": -1}, "restart must be >= 0, got -1"),
    (pe.ReRoPE, {"window": 4.5}, "window must be an integer, got 4.5", TypeError),
]
