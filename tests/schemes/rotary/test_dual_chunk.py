"""Dual chunk attention against a float64 port of its authors' code."""

import numpy as np
import pytest

import posenc_jax as pe
from tests.oracle import matches_products, turned
from tests.support import ROTARY_OPTIONS, Option

_SMALL = {"chunk": 9, "local": 3}
_VALUES = ROTARY_OPTIONS | {"chunk": 7, "local": 2}
OPTIONS = {pe.DualChunk: {name: Option(value, _SMALL) for name, value in _VALUES.items()}}


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
    return turned(q, position * w) @ turned(k, j % chunk_len * w)


@pytest.mark.parametrize("chunk, local, start", [(9, 7, 257), (12, 4, 10**6)])
def test_matches_the_authors_code(chunk, local, start):
    scheme = pe.DualChunk(head_dim=12, chunk=chunk, local=local)
    matches_products(scheme, lambda *x: dual_chunk(*x, chunk, local), start=start)


ERRORS = [
    (pe.DualChunk, {"chunk": 6, "local": 0}, "local must be >= 1, got 0"),
    (pe.DualChunk, {"chunk": 6.5, "local": 2}, "chunk must be an integer, got 6.5", TypeError),
    (pe.DualChunk, {"chunk": 6, "local": 6}, "local must be .* got local=6 and chunk=6"),
]
