"""CoPE against the authors' code and numbers from a run of it.

`authors` is facebookresearch/RAM, projects/cope/src/cope/context_position.py, forward of
ContextPosSelfAttn with its default gates, from torch to NumPy in float64.
"""

import jax.numpy as jnp
import numpy as np
import pytest

import posenc_jax as pe
from tests import oracle
from tests.oracle import by_head, qkv

OPTIONS = {pe.CoPE: {"num_positions": 4, "scaled": False}}


def authors(query, key, val, pos_emb, *, nodiv=False, is_causal=True):
    """[T, H], [S, H] and [S, V] of one head, pos_emb [H, P]: the output, positions, weights."""
    query, key, val, pos_emb = (np.asarray(a, np.float64) for a in (query, key, val, pos_emb))
    attn_mask = np.tri(len(query)) if is_causal else np.ones((len(query), len(key)))
    root = np.sqrt(query.shape[-1])
    logits = query @ key.T
    gates = 1 / (1 + np.exp(-logits / root)) * attn_mask
    positions = np.flip(np.cumsum(np.flip(gates, -1), -1), -1)
    positions = np.minimum(positions, pos_emb.shape[-1] - 1)
    fixed = query @ pos_emb
    ceil, floor = np.ceil(positions).astype(int), np.floor(positions).astype(int)
    at_ceil, at_floor = (np.take_along_axis(fixed, i, -1) for i in (ceil, floor))
    weight = positions - floor
    pos_logits = at_ceil * weight + at_floor * (1 - weight)
    logits = logits / root + pos_logits if nodiv else (logits + pos_logits) / root
    logits = np.where(attn_mask > 0, logits, -np.inf)
    attn = np.exp(logits - logits.max(-1, keepdims=True))
    attn /= attn.sum(-1, keepdims=True)
    return attn @ val, positions, attn


def attend(scheme, table, *arrays, **options):
    options = {"is_causal": True} | options
    return oracle.attend(scheme, {"table": jnp.asarray(table, jnp.float32)}, *arrays, **options)


@pytest.mark.parametrize(
    "options, is_causal, implementation",
    [
        ({}, False, "reference"),
        ({"num_positions": 7}, True, "xla"),
        ({"num_positions": 1}, True, "reference"),
        ({"scaled": False}, True, "xla"),
    ],
    ids=str,
)
def test_matches_the_code_of_the_authors(options, is_causal, implementation):
    arrays, scheme = qkv(batch=2, length=37), pe.CoPE(head_dim=8, **options)
    table = np.random.default_rng(3).normal(size=(scheme.num_positions, 8)) / 2
    mask = {} if is_causal else {"mask": np.ones((1, 1, 37, 37), bool)}
    calls = {"is_causal": is_causal, "implementation": implementation} | mask
    out = attend(scheme, table, *arrays, **calls)
    settings = {"pos_emb": table.T, "nodiv": not scheme.scaled, "is_causal": is_causal}
    expected = by_head(lambda *head: authors(*head, **settings)[0], *arrays)
    np.testing.assert_allclose(out, expected, rtol=0, atol=1e-5)


def test_matches_a_run_of_the_authors_code():
    q = np.array([[1, 0], [0, 1], [1, 1], [0.5, -0.5]])
    k = np.array([[1, 1], [0, 1], [-1, 0], [2, 0]])
    pos_emb = np.array([[0, 1, 2], [0, 0.5, -1]])
    weights = [
        [1, 0, 0, 0],
        [0.439458, 0.560542, 0, 0],
        [0.576845, 0.377993, 0.045163, 0],
        [0.390794, 0.176388, 0.122494, 0.310324],
    ]
    counted = [0.669762, 1.339523, 1.80443, 1.994804]
    arrays = [jnp.asarray(x, jnp.float32)[None, :, None] for x in (q, k, np.eye(4))]
    out = attend(pe.CoPE(head_dim=2, num_positions=3), pos_emb.T, *arrays)
    np.testing.assert_allclose(out[0, :, 0], weights, atol=1e-6)
    _, mine, attn = authors(q, k, np.eye(4), pos_emb)
    np.testing.assert_allclose(mine[:, 0], counted, atol=1e-6)
    np.testing.assert_allclose(attn, weights, atol=1e-6)
