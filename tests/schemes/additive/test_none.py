"""NoPE: attention without positions."""

import jax
import jax.numpy as jnp
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


def test_has_no_parameters_and_acts_nowhere():
    scheme, x = pe.NoPE(), jnp.ones((1, 3, 4))
    assert scheme.init(jax.random.key(0)) == {}
    assert scheme.acts == pe.Acts(0) and not scheme.acts_in_attention
    assert scheme.logit_scale(64) is None
    np.testing.assert_array_equal(pe.scheme_embedding(scheme, {}, x), x)


@pytest.mark.parametrize("length", [1, 17])
def test_causal(length):
    prefix = attend(*(a[:, :length] for a in ARRAYS))
    np.testing.assert_allclose(attend(*ARRAYS)[:, :length], prefix, atol=1e-6)


def test_invariant_to_the_order_of_past_tokens_but_not_to_their_content():
    last = attend(*ARRAYS)[:, -1]
    order = np.r_[np.random.default_rng(0).permutation(20), 20]
    np.testing.assert_allclose(attend(*(a[:, order] for a in ARRAYS))[:, -1], last, atol=1e-6)
    other = attend(*(a[:, np.r_[1, 1:21]] for a in ARRAYS))[:, -1]
    assert np.abs(other - last).max() > 1e-3


def test_bidirectional_attention_is_permutation_equivariant():
    order = np.random.default_rng(1).permutation(21)
    shuffled = attend(*(a[:, order] for a in ARRAYS), is_causal=False)
    np.testing.assert_allclose(shuffled, attend(*ARRAYS, is_causal=False)[:, order], atol=1e-6)
