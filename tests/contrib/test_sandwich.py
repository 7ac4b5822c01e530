"""Sandwich against the reference code's numbers and formula."""

import jax.numpy as jnp
import numpy as np
import pytest

from posenc_jax import contrib
from tests.oracle import attend, qkv, softmax_attention
from tests.support import Option

OPTIONS = {contrib.Sandwich: {"dim": 8, "centred": Option(False, sinks=True)}}

ARRAYS = qkv(length=21)


def reference(heads, distance, dim=128):
    """meta-pytorch/attention-gym at 7fdb85d, attn_gym/mods/sandwich.py, in float64: [N, ...]."""
    frequencies = 1.0 / 10000 ** (2 * np.arange(dim // 2) / dim)
    total = np.cos(np.abs(distance)[..., None] * frequencies).sum(-1)
    return np.multiply.outer(heads / (8.0 * np.arange(1, heads + 1)), total)


def test_numbers_worked_out_beforehand():
    """Two heads, D' = 8, less D'/2, at distances 0 to 4, in float64."""
    positions = jnp.arange(5)
    got = contrib.Sandwich(num_heads=2, dim=8).rules({}).dense(positions, positions)[:, :, 0]
    first = np.array([0.0, -0.116186007, -0.359070563, -0.508777618, -0.43334763])
    np.testing.assert_allclose(got, [first, first / 2], atol=1e-6)


@pytest.mark.parametrize("is_causal, centred", [(True, False), (False, True)])
def test_attention_matches_the_paper(is_causal, centred):
    """Centred or not differ by rounding alone."""
    bias = reference(6, np.arange(21), 10)
    expected = softmax_attention(
        *ARRAYS,
        lambda q, k, n, i, j: q @ k / np.sqrt(8) + bias[n, abs(i - j)],
        sees=lambda i, j: j <= i or not is_causal,
    )
    scheme = contrib.Sandwich(num_heads=6, dim=10, centred=centred)
    out = attend(scheme, {}, *ARRAYS, is_causal=is_causal)
    np.testing.assert_allclose(out, expected, atol=1e-5 if centred else 3e-5)


ERRORS = [(contrib.Sandwich, {"dim": 7}, "dim must be even and positive, got 7")]
