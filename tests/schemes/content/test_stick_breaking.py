"""Stick-breaking against the authors' reference and numbers from a run of it.

`authors` is shawntan/stickbreaking-attention, sb_ref.py, with the options of its
tests/test_attn.py (strict or not, and the remainder), from torch to NumPy in float64.
"""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import posenc_jax as pe
from tests import oracle
from tests.oracle import by_head, qkv

OPTIONS = {pe.StickBreaking: {"remainder": False, "attend_current": True}}


def authors(q, k, v, *, attend_current=False, remainder=True):
    """[T, H], [S, H] and [S, V] of one head; T = S."""
    q, k, v = (np.asarray(a, np.float64) for a in (q, k, v))
    length = len(q)
    mask = np.triu(np.ones((length, length)), 1 if attend_current else 0).astype(bool)
    later = np.tril(np.ones((length, length)), -1)
    logits = q @ k.T / np.sqrt(q.shape[-1])
    log_z = np.where(mask, -1e5, -np.logaddexp(0, -logits))
    log_beta = np.where(mask, 0.0, -np.logaddexp(0, logits))
    weights = np.exp(log_z + log_beta @ later)
    remaining = 1 - weights.sum(-1)
    return weights @ v + (remaining[:, None] * v if remainder else 0.0), weights, remaining


def whole(*arrays, **options):
    return by_head(lambda *head: authors(*head, **options)[0], *arrays)


VARIANTS = [{}, {"remainder": False}, {"attend_current": True}]


@pytest.mark.parametrize("n, options", list(enumerate(VARIANTS)), ids=str)
def test_matches_the_code_of_the_authors(n, options):
    arrays, scheme = qkv(batch=2, length=37), pe.StickBreaking(**options)
    more = {"is_causal": True, "implementation": ("reference", "xla")[n % 2]}
    out = oracle.attend(scheme, {}, *arrays, **more)
    np.testing.assert_allclose(out, whole(*arrays, **options), atol=2e-6)


def test_matches_a_run_of_the_authors_code():
    q = np.array([[1, 0], [0, 1], [1, 1], [0.5, -0.5]])
    k = np.array([[1, 1], [0, 1], [-1, 0], [2, 0]])
    weights = [
        [0, 0, 0, 0],
        [0.669762, 0, 0, 0],
        [0.265654, 0.669762, 0, 0],
        [0.172566, 0.242347, 0.412521, 0],
    ]
    remainder = [1, 0.330238, 0.064585, 0.172566]
    arrays = [jnp.asarray(x, jnp.float32)[None, :, None] for x in (q, k, np.eye(4))]
    out = oracle.attend(pe.StickBreaking(remainder=False), {}, *arrays, is_causal=True)
    np.testing.assert_allclose(out[0, :, 0], weights, atol=1e-6)
    out = oracle.attend(pe.StickBreaking(), {}, *arrays, is_causal=True)
    np.testing.assert_allclose(out[0, :, 0], weights + np.diag(remainder), atol=1e-6)
    for mine, theirs in zip(authors(q, k, np.eye(4))[1:], (weights, remainder), strict=True):
        np.testing.assert_allclose(mine, theirs, atol=1e-6)


def test_large_logits_stay_finite():
    large = np.where(np.arange(37) % 3 == 0, 100, 1).astype(np.float32)[:, None, None]
    q, k, v = (x * large for x in qkv(length=37))

    def total(q):
        out = oracle.attend(pe.StickBreaking(), {}, q, k, v, is_causal=True)
        return out.sum(), out

    grads, out = jax.jit(jax.grad(total, has_aux=True))(q)
    np.testing.assert_allclose(out, whole(q, k, v), rtol=1e-5, atol=2e-4)
    assert np.isfinite(grads).all()


def test_remaining_weight_within_a_window_goes_to_the_own_value():
    arrays = qkv(length=9, heads=1, kv_heads=1)
    out = oracle.attend(pe.StickBreaking(), {}, *arrays, is_causal=True, window=3)
    q, k, v = (np.asarray(x)[0, 4:7, 0] for x in arrays)  # The window of query 6.
    np.testing.assert_allclose(out[0, 6, 0], authors(q, k, v)[0][-1], atol=1e-6)
