"""Self-Extend against a float64 port of its authors' code."""

import jax.numpy as jnp
import numpy as np
import pytest

import posenc_jax as pe
from tests.oracle import attend, qkv, softmax_attention
from tests.support import Option

_NEAR = {"window": 6}
OPTIONS = {
    pe.SelfExtend: {
        "window": Option(9, _NEAR),
        "group": Option(3, _NEAR),
        "theta": Option(100.0, _NEAR),
        "layout": Option("interleaved", _NEAR),
        "rotary_dim": Option(4, _NEAR),
        "rotary_start": Option(2, _NEAR),
        "scaling": Option(pe.PI(factor=2.0), _NEAR),
    }
}


def rotated(x, angle):
    a, b = np.split(np.asarray(x, np.float64), 2)
    c, s = np.cos(angle), np.sin(angle)
    return np.concatenate([a * c - b * s, b * c + a * s])


def self_extend(q, k, i, j, w, group_size_1, group_size_2):
    """datamllab/LongLM, self_extend_patch/Llama.py, self_extend_forward.

    `neighbor_attention_mask` is true for the last `group_size_2` keys of a query.
    """
    if j > i - group_size_2:
        return rotated(q, i * w) @ rotated(k, j * w)
    group_query = i // group_size_1 + group_size_2 - group_size_2 / group_size_1
    return rotated(q, group_query * w) @ rotated(k, j // group_size_1 * w)


@pytest.mark.parametrize(
    "window, group, heads, kv_heads, start",
    [(8, 4, 6, 3, 0), (10, 3, 12, 12, 257), (10, 3, 6, 2, 10**6)],
)
def test_matches_the_authors_code(window, group, heads, kv_heads, start):
    q, k, v = qkv(length=27, heads=heads, kv_heads=kv_heads, dim=12)
    w = 1e4 ** (-2.0 * np.arange(6) / 12)
    positions = start + np.arange(27)

    def logit(q, k, n, i, j):
        return self_extend(q, k, i, j, w, group, window) / np.sqrt(12)

    expected = softmax_attention(q, k, v, logit, positions=positions)
    scheme = pe.SelfExtend(head_dim=12, window=window, group=group)
    out = attend(scheme, {}, q, k, v, positions=jnp.asarray(positions), is_causal=True)
    np.testing.assert_allclose(out, expected, atol=1e-5)
