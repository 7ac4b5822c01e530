"""Dual chunk attention against a float64 port of its authors' code."""

import jax.numpy as jnp
import numpy as np
import pytest

import posenc_jax as pe
from tests.oracle import attend, qkv, softmax_attention
from tests.support import Option

_SMALL = {"chunk": 9, "local": 3}
OPTIONS = {
    pe.DualChunk: {
        "chunk": Option(7, _SMALL),
        "local": Option(2, _SMALL),
        "theta": Option(100.0, _SMALL),
        "layout": Option("interleaved", _SMALL),
        "rotary_dim": Option(4, _SMALL),
        "rotary_start": Option(2, _SMALL),
        "scaling": Option(pe.PI(factor=2.0), _SMALL),
    }
}


def rotated(x, angle):
    a, b = np.split(np.asarray(x, np.float64), 2)
    c, s = np.cos(angle), np.sin(angle)
    return np.concatenate([a * c - b * s, b * c + a * s])


def dual_chunk(q, k, i, j, w, chunk_size, local_window):
    """HKUNLP/ChunkLlama, chunkllama_attn_replace.py, with the tables that it looks up."""
    chunk_len = chunk_size - local_window
    q_t = np.arange(chunk_len)
    qc_t = np.minimum(q_t + chunk_len, chunk_size)
    begin = i - i % chunk_len  # Of the query's chunk.
    if j >= begin:
        position = q_t[i % chunk_len]
    elif j >= begin - chunk_len:
        position = qc_t[i % chunk_len]
    else:
        position = qc_t[chunk_len - 1]
    return rotated(q, position * w) @ rotated(k, j % chunk_len * w)


@pytest.mark.parametrize(
    "chunk, local, heads, kv_heads, start",
    [(12, 4, 6, 3, 0), (9, 7, 12, 12, 257), (12, 4, 6, 2, 10**6)],
)
def test_matches_the_authors_code(chunk, local, heads, kv_heads, start):
    q, k, v = qkv(length=27, heads=heads, kv_heads=kv_heads, dim=12)
    w = 1e4 ** (-2.0 * np.arange(6) / 12)
    positions = start + np.arange(27)

    def logit(q, k, n, i, j):
        return dual_chunk(q, k, i, j, w, chunk, local) / np.sqrt(12)

    expected = softmax_attention(q, k, v, logit, positions=positions)
    scheme = pe.DualChunk(head_dim=12, chunk=chunk, local=local)
    out = attend(scheme, {}, q, k, v, positions=jnp.asarray(positions), is_causal=True)
    np.testing.assert_allclose(out, expected, atol=1e-5)


ERRORS = [
    (pe.DualChunk, {"chunk": 6, "local": 0}, "local must be >= 1, got 0"),
    (pe.DualChunk, {"chunk": 6.5, "local": 2}, "chunk must be an integer, got 6.5", TypeError),
    (pe.DualChunk, {"chunk": 6, "local": 6}, "local must be .* got local=6 and chunk=6"),
    (pe.DualChunk, {"chunk": 6, "local": 9}, "local must be .* got local=9 and chunk=6"),
]
