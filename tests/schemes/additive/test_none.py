"""NoPE: attention without positions."""

import numpy as np
import pytest

import posenc_jax as pe
from tests import oracle
from tests.oracle import qkv, softmax_attention

ARRAYS = qkv(length=21)


def attend(*arrays, is_causal=True):
    return oracle.attend(pe.NoPE(), {}, *arrays, is_causal=is_causal)


@pytest.mark.parametrize("is_causal", [True, False])
def test_matches_softmax_attention_without_a_bias(is_causal):
    expected = softmax_attention(
        *ARRAYS,
        lambda q, k, n, i, j: q @ k / np.sqrt(8),
        sees=lambda i, j: j <= i or not is_causal,
    )
    np.testing.assert_allclose(attend(*ARRAYS, is_causal=is_causal), expected, atol=1e-5)
