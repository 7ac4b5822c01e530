"""NoPE: attention without positions."""

import numpy as np
import pytest

import posenc_jax as pe
from tests.oracle import attend, qkv, softmax_attention


@pytest.mark.parametrize("is_causal", [True, False])
def test_matches_softmax_attention_without_a_bias(is_causal):
    arrays = qkv(length=21)
    expected = softmax_attention(
        *arrays,
        lambda q, k, n, i, j: q @ k / np.sqrt(8),
        sees=lambda i, j: j <= i or not is_causal,
    )
    out = attend(pe.NoPE(), {}, *arrays, is_causal=is_causal)
    np.testing.assert_allclose(out, expected, atol=1e-5)
