"""A scheme as the `attention_fn` of Flax's layers: positions, dropout, and refusals."""

import functools
import inspect

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import linen as nn
from flax import nnx

import posenc_jax as pe
import posenc_jax.linen as pl
import posenc_jax.nnx as pn
from posenc_jax.modules.attention_fn import attention_fn
from tests.oracle import qkv

Q, K, V = qkv(batch=2, length=7)
ALIBI, ROPE = pe.ALiBi(num_heads=6), pe.RoPE(head_dim=8)
SHAW = pe.Shaw(num_heads=6, head_dim=8)
NOT_READ = {
    "broadcast_dropout": False,
    "dtype": jnp.float32,
    "precision": "highest",
    "force_fp32_for_softmax": True,
}


def ours(scheme=ALIBI):
    return pe.scheme_attention(scheme, scheme.init(jax.random.key(0)), Q, K, V, is_causal=True)[0]


def causal_mask(length=7):
    return jnp.tril(jnp.ones((1, 1, length, length), bool))


def test_equals_scheme_attention():
    for options in ({"mask": causal_mask()}, {"is_causal": True}):
        out = attention_fn(ALIBI, {}, Q, K, V, **options)
        np.testing.assert_allclose(out, ours(), atol=1e-5)
    split = attention_fn(ALIBI, {}, *(a[:, None] for a in (Q, K, V)), mask=causal_mask()[None])
    np.testing.assert_allclose(split[:, 0], ours(), atol=1e-5)


@pytest.mark.parametrize("shape", [(7,), (7, 7), (6, 7, 7), (2, 1, 1, 7), (1, 6, 1, 7)], ids=str)
def test_masks_are_broadcast_as_in_flax(shape):
    mask = np.random.default_rng(0).random(shape) > 0.3
    mask[..., 0] = True
    whole = np.broadcast_to(mask, (2, 6, 7, 7))
    out = attention_fn(pe.NoPE(), {}, Q, K, V, mask=jnp.asarray(mask))
    heads = (np.repeat(a, 2, axis=2) for a in (K, V))
    expected = nnx.dot_product_attention(Q, *heads, mask=jnp.asarray(whole))
    np.testing.assert_allclose(out, expected, atol=1e-5)


@pytest.mark.parametrize("scheme", [ROPE, ALIBI, SHAW], ids=lambda s: s.name)
def test_a_decoded_query_is_the_last_token_of_its_mask(scheme):
    params = scheme.init(jax.random.key(0))
    mask = jnp.broadcast_to(jnp.arange(7) <= 4, (2, 1, 1, 7))  # Slots 5 and 6 are empty.
    stock = jax.jit(functools.partial(attention_fn, scheme))
    out = stock(params, Q[:, 4:5], K, V, mask=mask)
    np.testing.assert_allclose(out, ours(scheme)[:, 4:5], atol=1e-5)


def test_dropout_follows_deterministic():
    options = {"dropout_rng": jax.random.key(0), "dropout_rate": 0.5, "is_causal": True}
    still = attention_fn(ALIBI, {}, Q, K, V, **options)
    np.testing.assert_allclose(still, ours(), atol=1e-5)
    dropped = attention_fn(ALIBI, {}, Q, K, V, deterministic=False, **options)
    assert np.abs(dropped - still).max() > 0.1


@pytest.mark.parametrize("scheme", [ROPE, ALIBI, SHAW], ids=lambda s: s.name)
@pytest.mark.parametrize("coordinates", [2 * np.arange(7), np.arange(14).reshape(2, 7) / 2])
def test_input_positions_are_the_coordinates(scheme, coordinates):
    params = scheme.init(jax.random.key(0))
    for options in ({"is_causal": True}, {"mask": causal_mask()}):
        out = attention_fn(scheme, params, Q, K, V, input_positions=coordinates, **options)
        expected, _ = pe.scheme_attention(
            scheme, params, Q, K, V, coordinates=coordinates, is_causal=True
        )
        np.testing.assert_allclose(out, expected, atol=1e-5)
    assert np.abs(out - ours(scheme)).max() > 1e-3
    split = [a[:, None] for a in (Q, K, V)]
    rows = np.broadcast_to(coordinates, (2, 7))[:, None]
    out = attention_fn(scheme, params, *split, input_positions=rows, is_causal=True)
    np.testing.assert_allclose(out[:, 0], expected, atol=1e-5)


def test_input_positions_of_stock_nnx_attention_reach_the_scheme():
    """Later versions of Flax give `input_positions`; here they are also bound to the function."""
    coordinates = 2 * jnp.arange(7)
    fn = pn.AttentionFn(ROPE)
    layer = pn.Attention(
        20, 6, head_dim=8, position=ROPE, is_causal=True, use_bias=True, rngs=nnx.Rngs(0)
    )
    x = jax.random.normal(jax.random.key(1), (2, 7, 20))
    expected = layer(x, positions=coordinates)

    def stock(function):
        rngs = nnx.Rngs(0)
        module = nnx.MultiHeadAttention(6, 20, 48, decode=False, attention_fn=function, rngs=rngs)
        for name in ("query", "key", "value", "out"):
            nnx.update(getattr(module, name), nnx.state(getattr(layer, name)))
        return module

    bound = stock(functools.partial(fn, input_positions=coordinates))
    np.testing.assert_allclose(bound(x, is_causal=True), expected, atol=1e-5)
    direct = stock(fn)
    if "input_positions" in inspect.signature(direct).parameters:
        out = direct(x, is_causal=True, input_positions=coordinates)
        np.testing.assert_allclose(out, expected, atol=1e-5)
        direct.init_cache((2, 9, 20))
        with pytest.raises(ValueError, match="input_positions in a decode step"):
            direct(x[:, :1], decode=True, input_positions=coordinates[:1])


@pytest.mark.parametrize("name", sorted(NOT_READ))
def test_options_without_effect_are_accepted(name):
    out = attention_fn(ALIBI, {}, Q, K, V, is_causal=True, **{name: NOT_READ[name]})
    np.testing.assert_allclose(out, ours(), atol=1e-5)


def test_every_argument_of_flax_functions_is_known():
    """Linen's layer drops arguments that are missing from the signature, so all must be there."""
    not_given_by_layers = {"bias", "promote_dtype", "einsum_dot_general"}
    for stock, ours in (
        (nnx.dot_product_attention, attention_fn),
        (nn.dot_product_attention, pl.AttentionFn(ALIBI)),
    ):
        names = {*inspect.signature(stock).parameters} - not_given_by_layers
        assert names <= {*inspect.signature(ours).parameters}


ONE = {"scheme": ALIBI, "params": {}, "query": Q[:, :1], "key": K, "value": V}
MASK = np.ones((1, 1, 1, 7), bool)
NO = NotImplementedError
ERRORS = [
    (attention_fn, ONE | {"module": 0}, "AttentionFn: sow_weights=True", NO),
    (attention_fn, ONE | {"qk_attn_weights_einsum": 0}, "products of attention cannot", NO),
    (attention_fn, ONE | {"attn_weights_value_einsum": 0}, "products of attention cannot", NO),
    (attention_fn, ONE, "AttentionFn: 1 queries and 7 keys without a mask"),
    (
        attention_fn,
        ONE | {"query": Q[:, :3], "mask": np.ones((1, 1, 3, 7), bool)},
        "AttentionFn: 3 queries and 7 keys: .* cross attention",
    ),
    (
        attention_fn,
        ONE | {"mask": MASK, "input_positions": np.zeros((2, 1))},
        "AttentionFn: input_positions in a decode step",
    ),
    (
        attention_fn,
        ONE | {"scheme": pe.Sinusoidal(model_dim=4)},
        "AttentionFn: Sinusoidal.* acts on the token embedding",
    ),
]


def test_parameters_need_rngs():
    with pytest.raises(ValueError, match=r"AttentionFn: T5\(.* has parameters, so it needs rngs"):
        pn.AttentionFn(pe.T5(num_heads=6), scale=1.0)
    rngs = nnx.Rngs(0)
    first, second = (pn.AttentionFn(pe.T5(num_heads=6), scale=1.0, rngs=rngs) for _ in range(2))
    tables = [f.encoding.values()["table"] for f in (first, second)]
    assert np.abs(tables[0] - tables[1]).max() > 1e-3


SCALED = {
    "t5": (pe.T5(6, stddev=0.0, bidirectional=True), "is 1;"),
    "tupe": (pe.TUPE(6, 4, 24, max_length=9), r"is 1/sqrt\(2H\);"),
    "chain": (pe.chain(pe.RoPE(4), pe.T5(6)), "of Chain is 1;"),
}


@pytest.mark.parametrize("name", SCALED)
def test_the_scale_of_a_layer_is_kept_unless_it_is_given(name):
    """A bias of zeros changes nothing; another scale is named, in NNX and in Linen."""
    scheme, message = SCALED[name]
    for make in (functools.partial(pn.AttentionFn, rngs=nnx.Rngs(0)), pl.AttentionFn):
        with pytest.raises(ValueError, match=rf"AttentionFn: .* layer is 1/sqrt\(H\).* {message}"):
            make(scheme)
    if name != "t5":
        return
    x, rngs = np.random.default_rng(0).normal(size=(2, 7, 24)).astype(np.float32), nnx.Rngs(1)
    plain = nnx.MultiHeadAttention(6, 24, decode=False, rngs=rngs)
    for factor in (1.0, 4.0):
        fn = pn.AttentionFn(scheme, scale=factor * 4**-0.5, rngs=rngs)
        layer = nnx.MultiHeadAttention(6, 24, decode=False, attention_fn=fn, rngs=rngs)
        for part in ("query", "key", "value", "out"):
            nnx.update(getattr(layer, part), nnx.state(getattr(plain, part)))
        layer.query.kernel[...] /= factor
        np.testing.assert_allclose(layer(x), plain(x), atol=1e-5)
    module = nn.MultiHeadDotProductAttention(6, attention_fn=pl.AttentionFn(scheme, scale=0.5))
    got, variables = module.init_with_output(jax.random.key(0), x)
    projections = {n: variables["params"][n] for n in ("query", "key", "value", "out")}
    expected = nn.MultiHeadDotProductAttention(6).apply({"params": projections}, x)
    np.testing.assert_allclose(got, expected, atol=1e-5)


def test_a_scheme_for_causal_attention_is_refused_without_causality_or_mask():
    fn = pn.AttentionFn(pe.StickBreaking())
    with pytest.raises(ValueError, match="AttentionFn: StickBreaking needs is_causal=True: keys"):
        fn(Q, K, V)
    assert fn(Q, K, V, is_causal=True).shape == Q.shape
