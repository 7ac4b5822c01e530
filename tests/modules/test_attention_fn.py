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
from tests.support import layer_of

Q, K, V = qkv(batch=2, length=7)
ALIBI, ROPE = pe.ALiBi(num_heads=6), pe.RoPE(head_dim=8)
PLACES = np.tile(np.arange(7), (2, 1))
CAUSAL = np.tril(np.ones((1, 1, 7, 7), bool))
NOT_READ = {
    "broadcast_dropout": False,
    "dtype": jnp.float32,
    "precision": "highest",
    "force_fp32_for_softmax": True,
}


def test_equals_scheme_attention_and_drops_where_not_deterministic():
    drop = {"dropout_rng": jax.random.key(0), "dropout_rate": 0.5, "is_causal": True}

    @jax.jit
    def run(q, k, v):
        fn = functools.partial(attention_fn, ALIBI, {})
        split = [a[:, None] for a in (q, k, v)]
        same = (
            fn(q, k, v, mask=CAUSAL),
            fn(q, k, v, is_causal=True, **NOT_READ),
            fn(q, k, v, **drop),
            fn(*split, mask=CAUSAL[None], input_positions=PLACES[:, None])[:, 0],
        )
        expected, _ = pe.scheme_attention(ALIBI, {}, q, k, v, is_causal=True)
        return expected, same, fn(q, k, v, deterministic=False, **drop)

    expected, same, dropped = run(Q, K, V)
    for out in same:
        np.testing.assert_allclose(out, expected, atol=1e-5)
    assert np.abs(dropped - expected).max() > 0.1


def test_masks_are_broadcast_as_in_flax():
    random = np.random.default_rng(0)
    masks = [random.random(s) > 0.3 for s in [(7,), (6, 7, 7), (2, 1, 1, 7), (1, 6, 1, 7)]]
    for mask in masks:
        mask[..., 0] = True

    @jax.jit
    def run(q, k, v):
        heads = [jnp.repeat(a, 2, axis=2) for a in (k, v)]
        whole = [np.broadcast_to(mask, (2, 6, 7, 7)) for mask in masks]
        expected = [nnx.dot_product_attention(q, *heads, mask=mask) for mask in whole]
        outs = [attention_fn(pe.NoPE(), {}, q, k, v, mask=mask) for mask in masks]
        return list(zip(outs, expected, strict=True))

    for out, expected in run(Q, K, V):
        np.testing.assert_allclose(out, expected, atol=1e-5)


def test_input_positions_of_stock_nnx_attention_reach_the_scheme():
    """Later versions of Flax give `input_positions`; here they are also bound to the function."""
    coordinates, scheme = np.arange(7) ** 2 / 2, pe.chain(ROPE, ALIBI)
    fn = pn.AttentionFn(scheme)
    options = {"head_dim": 8, "position": scheme, "is_causal": True, "use_bias": True}
    layer = layer_of(lambda rngs: pn.Attention(20, 6, rngs=rngs, **options))
    x = np.random.default_rng(1).normal(size=(2, 7, 20)).astype(np.float32)

    def stock(function):
        options = {"decode": False, "attention_fn": function}
        module = layer_of(lambda rngs: nnx.MultiHeadAttention(6, 20, 48, rngs=rngs, **options))
        for name in ("query", "key", "value", "out"):
            nnx.update(getattr(module, name), nnx.state(getattr(layer, name)))
        return module

    bound, direct = stock(functools.partial(fn, input_positions=coordinates)), stock(fn)
    known = "input_positions" in inspect.signature(direct).parameters

    @jax.jit
    def run(x):
        by_argument = direct(x, is_causal=True, input_positions=coordinates) if known else None
        outs = bound(x, is_causal=True), bound(x, mask=CAUSAL)
        return layer(x, coordinates=coordinates), outs, by_argument

    expected, outs, by_argument = run(x)
    for out in outs:
        np.testing.assert_allclose(out, expected, atol=1e-5)
    if known:
        np.testing.assert_allclose(by_argument, expected, atol=1e-5)
        direct.init_cache((2, 9, 20))
        with pytest.raises(ValueError, match="input_positions in a decode step"):
            nnx.eval_shape(
                lambda layer: layer(x[:, :1], decode=True, input_positions=coordinates[:1]), direct
            )


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
        ONE | {"query": K[:, None], "key": K[None]},
        r"AttentionFn: query, key and value must have the same leading axes, got \(2, 1, 7",
    ),
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
]


def test_parameters_need_rngs():
    with pytest.raises(ValueError, match=r"AttentionFn: T5\(.* has parameters, so it needs rngs"):
        pn.AttentionFn(pe.T5(num_heads=6))
    rngs = nnx.Rngs(0)
    first, second = (pn.AttentionFn(pe.T5(num_heads=6), rngs=rngs) for _ in range(2))
    tables = [f.encoding.values()["table"] for f in (first, second)]
    assert np.abs(tables[0] - tables[1]).max() > 1e-3


def test_schemes_that_flax_layers_cannot_have_are_refused_when_they_are_given():
    for scheme, message in (
        (pe.chain(pe.RoPE(4), pe.FoX(6, 24)), r"Chain\(.*FoX.* reads the input of the layer"),
        (pe.Sinusoidal(24), r"Sinusoidal\(.* acts on the token embedding alone"),
    ):
        for make in (functools.partial(pn.AttentionFn, rngs=nnx.Rngs(0)), pl.AttentionFn):
            with pytest.raises(ValueError, match=f"AttentionFn: {message}"):
                make(scheme)


def test_the_scale_of_a_layer_is_kept_unless_it_is_given():
    """A bias of zeros changes nothing, in NNX with a scale and in Linen without."""
    scheme = pe.T5(6, stddev=0.0, bidirectional=True)
    x, rngs = np.random.default_rng(0).normal(size=(2, 7, 24)).astype(np.float32), nnx.Rngs(1)
    plain = nnx.MultiHeadAttention(6, 24, decode=False, rngs=rngs)
    fn = pn.AttentionFn(scheme, scale=4 * 4**-0.5, rngs=rngs)
    layer = nnx.MultiHeadAttention(6, 24, decode=False, attention_fn=fn, rngs=rngs)
    for part in ("query", "key", "value", "out"):
        nnx.update(getattr(layer, part), nnx.state(getattr(plain, part)))
    layer.query.kernel[...] /= 4
    module = nn.MultiHeadDotProductAttention(6, attention_fn=pl.AttentionFn(scheme))
    stock = nn.MultiHeadDotProductAttention(6)

    @jax.jit
    def run(x):
        out, variables = module.init_with_output(jax.random.key(0), x)
        projections = {n: variables["params"][n] for n in ("query", "key", "value", "out")}
        return (layer(x), plain(x)), (out, stock.apply({"params": projections}, x))

    for out, expected in run(x):
        np.testing.assert_allclose(out, expected, atol=1e-5)


def test_a_scheme_for_causal_attention_is_refused_without_causality_or_mask():
    fn = pn.AttentionFn(pe.StickBreaking())
    with pytest.raises(ValueError, match="AttentionFn: StickBreaking needs is_causal=True: keys"):
        fn(Q, K, V)
    padding = np.ones((len(Q), 1, 1, 7), bool)
    for layer in (fn, pl.AttentionFn(pe.StickBreaking()).bind({})):
        for mask in (padding, padding[0, 0, 0]):
            with pytest.raises(ValueError, match="StickBreaking needs is_causal=True"):
                layer(Q, K, V, mask=mask)
    for options in ({"mask": CAUSAL & padding}, {"is_causal": True}):
        assert jax.eval_shape(lambda options=options: fn(Q, K, V, **options)).shape == Q.shape
