"""Transformer-XL against the authors' code.

`authors` is kimiyoung/transformer-xl, pytorch/mem_transformer.py, the scores of
RelPartialLearnableMultiHeadAttn, from torch to NumPy in float64, for one sequence.
"""

import numpy as np
import pytest

import posenc_jax as pe
from tests import oracle
from tests.oracle import qkv, softmax_attention, weighted
from tests.support import initial, parameters

OPTIONS = {pe.TransformerXL: {"clamp": 4, "stddev": initial(0.1)}}


def rel_shift(x):
    """Shifts row i of [i, j, n] by reshaping the padded array, as the authors do."""
    padded = np.concatenate([np.zeros((x.shape[0], 1, x.shape[2])), x], 1)
    return padded.reshape(x.shape[1] + 1, x.shape[0], x.shape[2])[1:].reshape(x.shape)


def authors(q, k, params, clamp=-1):
    """Scores [T, S, N] of [T, N, H] and [S, N, H]; scores of later keys are undefined."""
    q, k, u, v = (np.asarray(a, np.float64) for a in (q, k, params["u"], params["v"]))
    project = np.asarray(params["project"], np.float64)
    klen, d_model = k.shape[0], project.shape[1]
    pos_seq = np.arange(klen - 1, -1, -1.0)
    if clamp > 0:
        pos_seq = np.minimum(pos_seq, clamp)
    angles = np.outer(pos_seq, 1 / (10000 ** (np.arange(0.0, d_model, 2.0) / d_model)))
    r = np.concatenate([np.sin(angles), np.cos(angles)], -1)
    r_head_k = np.einsum("jd,ndh->jnh", r, project)
    ac = np.einsum("inh,jnh->ijn", q + u, k)
    bd = rel_shift(np.einsum("inh,jnh->ijn", q + v, r_head_k))
    return (ac + bd) / q.shape[-1] ** 0.5


def paper(q, k, v, params, clamp, **options):
    """The equation, at any positions."""
    u, w, project = (np.asarray(params[name], np.float64) for name in ("u", "v", "project"))
    frequencies = 10000.0 ** (-np.arange(0, project.shape[1], 2) / project.shape[1])

    def logit(q, k, n, i, j):
        angles = np.clip(i - j, -clamp, clamp) * frequencies
        r = np.concatenate([np.sin(angles), np.cos(angles)])
        return ((q + u[n]) @ k + (q + w[n]) @ (r @ project[n])) / len(q) ** 0.5

    return softmax_attention(q, k, v, logit, **options)


def make(**options):
    scheme = pe.TransformerXL(num_heads=6, head_dim=8, model_dim=20, stddev=0.4, **options)
    return scheme, parameters(scheme)


@pytest.mark.parametrize("clamp, implementation", [(None, "xla"), (9, "reference")])
def test_matches_the_code_of_the_authors(clamp, implementation):
    q, k, v = qkv(length=63, kv_heads=6)
    scheme, params = make(clamp=clamp)
    scores = authors(q[0], k[0], params, -1 if clamp is None else clamp)
    expected = weighted(np.where(np.tri(63) > 0, np.moveaxis(scores, 2, 0), -np.inf), v)
    out = oracle.attend(scheme, params, q, k, v, is_causal=True, implementation=implementation)
    np.testing.assert_allclose(out, expected, atol=1e-5)


@pytest.mark.parametrize("implementation, clamp", [("xla", None), ("reference", 4)])
def test_attention_matches_the_paper_at_far_positions(implementation, clamp):
    arrays, positions = qkv(length=21), np.r_[1, 257, 10**6 + np.arange(19)]
    scheme, params = make(clamp=clamp)
    places = {"positions": positions, "sees": lambda i, j: True}
    expected = paper(*arrays, params, clamp or 1e9, **places)
    options = {"positions": positions, "implementation": implementation}
    out = oracle.attend(scheme, params, *arrays, **options)
    np.testing.assert_allclose(out, expected, atol=1e-5)


ERRORS = [
    (pe.TransformerXL, {"model_dim": 7}, "model_dim must be even, got 7"),
    (pe.TransformerXL, {"clamp": -1}, "clamp must be >= 0, got -1"),
]
