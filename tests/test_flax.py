"""NNX and Linen modules: parameters, cache, layers under scan, and inside stock attention."""

import functools

import chex
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import linen as nn
from flax import nnx
from support import BATCH, KINDS, KV_HEADS, SIZES, build

import posenc_jax as pe
import posenc_jax.linen as pl
import posenc_jax.nnx as pn

N, H, D, T = SIZES["num_heads"], SIZES["head_dim"], SIZES["model_dim"], 9
IN_STOCK = [
    name
    for name in dict.fromkeys([*KINDS, "none", "rope", "t5", "shaw"])
    if build(pe.SCHEMES[name]).acts_in_attention and not build(pe.SCHEMES[name]).traits.reads_x
]


@pytest.fixture(params=KINDS)
def kind(request):
    """A scheme of every kind."""
    return build(pe.SCHEMES[request.param])


@pytest.fixture
def x():
    return jax.random.normal(jax.random.key(0), (BATCH, T, D))


def nnx_layer(scheme, **options):
    options = {"num_kv_heads": KV_HEADS, "head_dim": H, "is_causal": True} | options
    return pn.Attention(D, N, position=scheme, rngs=nnx.Rngs(0), **options)


def linen_layer(scheme, **options):
    options = {"num_kv_heads": KV_HEADS, "head_dim": H, "is_causal": True} | options
    return pl.Attention(num_heads=N, position=scheme, **options)


def from_nnx(layer):
    """The parameters of an NNX layer as Linen variables."""
    params = {
        name: {"kernel": getattr(layer, name).kernel[...]}
        for name in ("query", "key", "value", "out")
    }
    if jax.tree.leaves(layer.position.values()):
        params["encoding"] = {"scheme": layer.position.values()}
    return {"params": params}


def test_nnx_and_linen_are_the_functions(scheme, x):
    layer = nnx_layer(scheme)

    @jax.jit
    def run(x):
        q, k, v = (project(x) for project in (layer.query, layer.key, layer.value))
        inside = scheme if scheme.acts_in_attention else pe.NoPE()
        out, _ = pe.scheme_attention(inside, layer.position.values(), q, k, v, x=x, is_causal=True)
        return layer.out(out), layer(x), linen_layer(scheme).apply(from_nnx(layer), x)

    written_out, *modules = run(x)
    for y in modules:
        np.testing.assert_allclose(y, written_out, atol=1e-6)


def test_embedding_modules_are_the_function(scheme, params, x):
    positions = jnp.arange(3, 3 + T)
    wanted = pe.scheme_embedding(scheme, params, x, positions=positions)
    encoding = pn.PositionEncoding(scheme, rngs=nnx.Rngs(0))
    for leaf, value in zip(
        jax.tree.leaves(encoding.params, is_leaf=lambda v: isinstance(v, nnx.Variable)),
        jax.tree.leaves(params),
        strict=True,
    ):
        leaf[...] = value
    chex.assert_trees_all_equal(encoding(x, positions), wanted)
    variables = {"params": {"scheme": params}} if params else {}
    chex.assert_trees_all_equal(pl.PositionEncoding(scheme).apply(variables, x, positions), wanted)


def test_what_acts_on_the_embedding_alone_adds_no_parameters_to_a_layer(x):
    layer = nnx_layer(build(pe.LearnedAbsolute))
    assert not jax.tree.leaves(layer.position.values())
    _, variables = linen_layer(build(pe.LearnedAbsolute)).init_with_output(jax.random.key(0), x)
    assert "encoding" not in variables["params"]


def test_cache_in_nnx_and_linen(kind, x):
    layer = nnx_layer(kind)
    module, variables = linen_layer(kind), from_nnx(layer)
    caches = [layer.new_cache(BATCH, T), module.new_cache(BATCH, T, model_dim=D)]
    calls = [
        jax.jit(lambda x, c: layer(x, cache=c)),
        jax.jit(lambda x, c: module.apply(variables, x, cache=c)),
    ]
    wanted, start = layer(x), 0
    for size in [5, 1, 1, 1, 1]:
        part = slice(start, start + size)
        for i in range(2):
            y, caches[i] = calls[i](x[:, part], caches[i])
            np.testing.assert_allclose(y, wanted[:, part], atol=1e-5)
        start += size


def test_nnx_parameters_train(kind, x):
    layer = nnx_layer(kind)

    @nnx.jit
    def loss_and_grads(layer):
        return nnx.value_and_grad(lambda layer: (layer(x) ** 2).mean())(layer)

    _, grads = loss_and_grads(layer)
    for path, leaf in jax.tree.leaves_with_path(nnx.to_pure_dict(grads)):
        assert np.abs(leaf).max() > 0, path


def test_one_encoding_shared_by_layers_is_one_set_of_parameters(x):
    shared = pn.PositionEncoding(build(pe.T5), rngs=nnx.Rngs(0))
    layers = nnx.List([nnx_layer(shared), nnx_layer(shared)])
    params = nnx.state(layers, nnx.Param)
    tables = [
        leaf
        for path, leaf in jax.tree.leaves_with_path(params)
        if "table" in jax.tree_util.keystr(path)
    ]
    assert len(tables) == 1


def test_layers_under_nnx_scan_with_remat(kind, x):
    shared = pn.PositionEncoding(kind, rngs=nnx.Rngs(3))

    @nnx.split_rngs(splits=3)
    @nnx.vmap(in_axes=(0,), out_axes=0)
    def make(rngs):
        return pn.Attention(D, N, position=kind, head_dim=H, is_causal=True, rngs=rngs)

    layers = make(nnx.Rngs(0))

    def run(layers, x, position):
        @nnx.remat
        def one(x, layer):
            return x + layer(x, position=position)

        return nnx.scan(one, in_axes=(nnx.Carry, 0), out_axes=nnx.Carry)(x, layers)

    @nnx.jit
    def one_layer(layers, x, i, position):
        layer = jax.tree.map(lambda a: a[i], layers)
        return x + layer(x, position=position)

    for position in (None, shared):
        y = nnx.jit(run)(layers, x, position)
        wanted = x
        for i in range(3):
            wanted = one_layer(layers, wanted, i, position)
        np.testing.assert_allclose(y, wanted, atol=1e-5)


def test_layers_under_linen_scan_with_remat(kind, x):
    class Block(nn.Module):
        @nn.compact
        def __call__(self, x, _):
            return x + linen_layer(kind)(x), None

    deep = nn.scan(
        nn.remat(Block), variable_axes={"params": 0}, split_rngs={"params": True}, length=3
    )()
    variables = jax.jit(deep.init)(jax.random.key(0), x, None)
    y, _ = jax.jit(deep.apply)(variables, x, None)
    wanted, block = x, jax.jit(Block().apply)
    for i in range(3):
        one = jax.tree.map(lambda a, i=i: a[i], variables)
        wanted, _ = block(one, wanted, None)
    np.testing.assert_allclose(y, wanted, atol=1e-5)


@pytest.mark.parametrize("name", IN_STOCK)
def test_inside_stock_nnx_attention(name, x):
    scheme, rngs = build(pe.SCHEMES[name]), nnx.Rngs(0)
    layer = nnx.MultiHeadAttention(
        N, D, N * H, decode=False, attention_fn=pn.AttentionFn(scheme, rngs=rngs), rngs=rngs
    )
    whole = jax.jit(lambda x: layer(x, is_causal=True))(x)
    plain = nnx.MultiHeadAttention(N, D, N * H, decode=False, rngs=nnx.Rngs(0))
    if name == "none":
        nnx.update(plain, nnx.state(layer, nnx.Param).filter(lambda p, _: p[0] != "attention_fn"))
        mask = jnp.tril(jnp.ones((1, 1, T, T), bool))
        np.testing.assert_allclose(whole, plain(x, mask=mask), atol=1e-5)
    layer.init_cache((BATCH, T + 3, D))
    decode = nnx.jit(lambda layer, x: layer(x, decode=True))
    for t in range(T):
        step = decode(layer, x[:, t : t + 1])
        np.testing.assert_allclose(step[:, 0], whole[:, t], atol=1e-5)


@pytest.mark.parametrize("name", IN_STOCK)
def test_inside_stock_linen_attention(name, x):
    scheme = build(pe.SCHEMES[name])
    layer = nn.MultiHeadDotProductAttention(
        num_heads=N, qkv_features=N * H, attention_fn=pl.AttentionFn(scheme)
    )
    mask = jnp.tril(jnp.ones((1, 1, T, T), bool))
    whole, variables = jax.jit(layer.init_with_output)(jax.random.key(0), x, mask=mask)
    decoder = layer.clone(decode=True)
    shapes = jax.eval_shape(decoder.init, jax.random.key(0), jnp.ones((BATCH, T + 3, D)))
    cache = jax.tree.map(lambda a: jnp.zeros(a.shape, a.dtype), shapes["cache"])
    decode = jax.jit(functools.partial(decoder.apply, mutable=["cache"]))
    for t in range(T):
        variables = {"params": variables["params"], "cache": cache}
        step, new = decode(variables, x[:, t : t + 1])
        cache = new["cache"]
        np.testing.assert_allclose(step[:, 0], whole[:, t], atol=1e-5)


def test_stock_attention_refuses_what_it_cannot_do(x):
    q = jnp.ones((1, 1, N, H))
    with pytest.raises(ValueError, match="acts on the token embedding alone"):
        pn.AttentionFn(build(pe.Sinusoidal))(q, q, q)
    with pytest.raises(ValueError, match=r"stock_attention: FoX.* reads x"):
        pn.AttentionFn(build(pe.FoX))(q, q, q)
    with pytest.raises(ValueError, match="1 queries and 5 keys without a mask"):
        pn.AttentionFn(pe.RoPE(H))(q, jnp.ones((1, 5, N, H)), jnp.ones((1, 5, N, H)))


def test_errors_name_what_was_wanted_and_given(x):
    with pytest.raises(ValueError, match="model_dim=20 must be a multiple of num_heads=6"):
        pn.Attention(D, N, rngs=nnx.Rngs(0))
    with pytest.raises(ValueError, match="num_heads=6 must be a multiple of num_kv_heads=4"):
        pn.Attention(D, N, num_kv_heads=4, head_dim=H, rngs=nnx.Rngs(0))
    with pytest.raises(ValueError, match=r"x must be \[B, T, 20\], got \(2, 9, 19\)"):
        nnx_layer(pe.NoPE())(x[..., :-1])
    with pytest.raises(ValueError, match=r"x must be \[B, T, D\], got shape \(9, 20\)"):
        nnx_layer(pe.NoPE())(x[0])
    with pytest.raises(TypeError, match="scheme must be a Scheme, got 'rope'"):
        pn.PositionEncoding("rope", rngs=nnx.Rngs(0))


def test_dropout_is_an_explicit_key(x):
    layer = nnx_layer(pe.NoPE(), dropout_rate=0.5)
    key = jax.random.key(1)
    a, b = layer(x, dropout_key=key), layer(x, dropout_key=key)
    np.testing.assert_array_equal(a, b)
    assert np.abs(a - layer(x)).max() > 1e-3
    assert np.abs(a - layer(x, dropout_key=jax.random.key(2))).max() > 1e-3


def test_compute_dtype(x):
    layer = nnx_layer(pe.RoPE(H), dtype=jnp.bfloat16)
    assert layer(x).dtype == jnp.bfloat16
    assert layer.new_cache(1, 4).k.dtype == jnp.bfloat16
