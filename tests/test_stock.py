"""A scheme inside Flax's own layers: where queries are, and what is refused."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from oracle import qkv

import posenc_jax as pe
from posenc_jax.flax_attention_fn import stock_attention

Q, K, V = qkv(batch=2, length=7)
ALIBI, ROPE = pe.ALiBi(num_heads=6), pe.RoPE(head_dim=8)
SHAW = pe.Shaw(num_heads=6, head_dim=8)


def ours(scheme=ALIBI):
    return pe.scheme_attention(scheme, scheme.init(jax.random.key(0)), Q, K, V, is_causal=True)[0]


def causal_mask(length=7):
    return jnp.tril(jnp.ones((1, 1, length, length), bool))


def test_is_ours_with_a_mask():
    for options in ({"mask": causal_mask()}, {"is_causal": True}):
        out = stock_attention(ALIBI, {}, Q, K, V, **options)
        np.testing.assert_allclose(out, ours(), atol=1e-5)
    split = stock_attention(ALIBI, {}, *(a[:, None] for a in (Q, K, V)), mask=causal_mask()[None])
    np.testing.assert_allclose(split[:, 0], ours(), atol=1e-5)


@pytest.mark.parametrize("scheme", [ROPE, ALIBI, SHAW], ids=lambda s: s.name)
def test_finds_the_query_in_the_mask_of_a_cache(scheme):
    params = scheme.init(jax.random.key(0))
    mask = jnp.broadcast_to(jnp.arange(7) <= 4, (2, 1, 1, 7))  # Slots 5 and 6 are empty.
    stock = jax.jit(functools.partial(stock_attention, scheme))
    out = stock(params, Q[:, 4:5], K, V, mask=mask)
    np.testing.assert_allclose(out, ours(scheme)[:, 4:5], atol=1e-5)


def test_drops_only_in_training():
    options = {"dropout_rng": jax.random.key(0), "dropout_rate": 0.5, "is_causal": True}
    still = stock_attention(ALIBI, {}, Q, K, V, **options)
    np.testing.assert_allclose(still, ours(), atol=1e-5)
    dropped = stock_attention(ALIBI, {}, Q, K, V, deterministic=False, **options)
    assert np.abs(dropped - still).max() > 0.1


def test_refuses_what_it_cannot_know():
    with pytest.raises(ValueError, match="stock_attention: 1 queries and 7 keys without a mask"):
        stock_attention(ALIBI, {}, Q[:, :1], K, V)
    waves = pe.Sinusoidal(model_dim=4)
    with pytest.raises(ValueError, match=r"stock_attention: Sinusoidal.* acts on the token embedd"):
        stock_attention(waves, {}, Q, K, V)
