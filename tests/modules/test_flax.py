"""NNX and Linen modules: parameters, caches, dropout, scan, and Flax's own attention layers."""

import dataclasses
import functools

import chex
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import linen as nn
from flax import nnx

import posenc_jax as pe
import posenc_jax.linen as pl
import posenc_jax.nnx as pn
from tests.support import BATCH, KINDS, KV_HEADS, SIZES, build, slow

KEY = jax.random.key(0)
N, H, D, T = SIZES["num_heads"], SIZES["head_dim"], SIZES["model_dim"], 9
IN_LAYERS = [name for name in KINDS if build(pe.SCHEMES[name]).acts != pe.Acts.EMBEDDING]
IN_STOCK = [
    name
    for name in dict.fromkeys([*KINDS, "none", "rope", "t5", "shaw"])
    if build(pe.SCHEMES[name]).acts != pe.Acts.EMBEDDING
    and not build(pe.SCHEMES[name]).traits.reads_x
    and pe.SCHEMES[name].mix is pe.Scheme.mix  # Their cache has no place for its state.
]


def kinds(names, some=None):
    """Parametrizes a test by `name`; names that are not in `some` are slow."""
    some = names if some is None else some.split()
    names = dict.fromkeys([*names, *some])
    params = [pytest.param(name, marks=() if name in some else slow) for name in names]
    return pytest.mark.parametrize("name", params)


@pytest.fixture
def x():
    return np.random.default_rng(0).normal(size=(BATCH, T, D)).astype(np.float32)


def options_of(scheme, options):
    sizes = {"num_kv_heads": KV_HEADS, "head_dim": H}
    return sizes | {"is_causal": True, "position": scheme} | options


def nnx_layer(scheme=None, **options):
    return pn.Attention(D, N, rngs=nnx.Rngs(0), **options_of(scheme, options))


def linen_layer(scheme=None, **options):
    return pl.Attention(num_heads=N, **options_of(scheme, options))


def from_nnx(layer):
    """The parameters of an NNX layer as Linen variables: the names are the same."""
    return {"params": nnx.to_pure_dict(nnx.state(layer, nnx.Param))}


@kinds(IN_LAYERS)
def test_layers_equal_scheme_attention(name, x):
    scheme = build(pe.SCHEMES[name])
    layer = nnx_layer(scheme)

    @jax.jit
    def run(x):
        q, k, v = (project(x) for project in (layer.query, layer.key, layer.value))
        out, _ = pe.scheme_attention(scheme, layer.encoding.values(), q, k, v, x=x, is_causal=True)
        return layer.out(out), layer(x), linen_layer(scheme).apply(from_nnx(layer), x)

    written_out, *modules = run(x)
    for y in modules:
        np.testing.assert_allclose(y, written_out, atol=1e-6)


ASSIGNED = {
    "is_causal": False,
    "window": 3,
    "softcap": 0.5,
    "scale": 0.1,
    "implementation": "reference",
}


@pytest.mark.parametrize("name", ASSIGNED)
def test_an_assigned_setting_is_that_of_a_new_layer(name, x):
    layer = nnx_layer(pe.RoPE(H), window=5)
    before = layer(x)
    setattr(layer, name, ASSIGNED[name])
    assert getattr(layer, name) == ASSIGNED[name]
    new = nnx_layer(pe.RoPE(H), **{"window": 5, name: ASSIGNED[name]})
    np.testing.assert_allclose(layer(x), new(x), atol=1e-6)
    assert name == "implementation" or np.abs(layer(x) - before).max() > 1e-3


def test_an_assigned_encoding_is_that_of_a_new_layer(x):
    layer = nnx_layer(pe.RoPE(H))
    for module, name in (
        (layer, "position"),
        (layer, "settings"),
        (pn.AttentionFn(pe.RoPE(H)), "position"),
    ):
        with pytest.raises(AttributeError, match="no setter"):
            setattr(module, name, pe.ALiBi(N))
    layer.encoding = pn.PositionEncoding(pe.ALiBi(N), rngs=nnx.Rngs(0))
    copy = nnx.merge(*nnx.split(layer))
    np.testing.assert_allclose(copy(x), nnx_layer(pe.ALiBi(N))(x), atol=1e-6)
    assert nnx.clone(layer).new_cache(1, 4).scheme == layer.position == pe.ALiBi(N)
    layer.encoding = pn.PositionEncoding(pe.Sinusoidal(D), rngs=nnx.Rngs(0))
    with pytest.raises(ValueError, match="acts on the token embedding alone"):
        layer(x)


WRONG = {
    r"position must be a Scheme or a LayerSpec, got .*RoPE.*; call it: RoPE\(head_dim=...\)\.": (
        {"position": pe.RoPE}
    ),
    "position must be a Scheme or a LayerSpec, got 'rope'": {"position": "rope"},
    "qk_norm must be a QKNorm or None, got True": {"qk_norm": True},
    r"num_heads is 6, and T5\(num_heads=8.* was made for 8": {"position": pe.T5(8)},
    r"head_dim is 8, and RoPE\(head_dim=16.* was made for 16": {"position": pe.RoPE(16)},
    r"head_dim is 8, and RoPE\(head_dim=4.* was made for 4": {
        "position": pe.LayerSpec(pe.chain(pe.ALiBi(N), pe.RoPE(4)))
    },
    r"num_kv_heads is 3, and ShortConv.* was made for 6": {
        "position": pe.contrib.ShortConv(num_heads=N, num_kv_heads=N, head_dim=H)
    },
    r"model_dim is 20, and FoX.* was made for 8": {"position": pe.FoX(num_heads=N, model_dim=8)},
    "softcap must be": {"softcap": -1.0},
}


@pytest.mark.parametrize("message", WRONG)
def test_wrong_settings_are_refused_at_construction(message, x):
    options = WRONG[message]
    with pytest.raises((TypeError, ValueError), match=message):
        nnx_layer(**options)
    with pytest.raises((TypeError, ValueError), match=message):
        linen_layer(**options).init(KEY, x)


def test_a_cache_for_other_sizes_than_those_of_its_scheme():
    scheme = pe.FoX(num_heads=6, model_dim=8)
    with pytest.raises(ValueError, match=r"^new_cache: num_heads is 3, and FoX\(num_heads=6"):
        pe.new_cache(scheme, 1, 4, num_heads=3, head_dim=8, model_dim=8)


@pytest.mark.parametrize(
    "cls",
    [cls for cls in pe.SCHEMES.values() if cls.embed is not pe.Scheme.embed or cls is pe.T5],
    ids=lambda cls: cls.name,
)
def test_encodings_equal_scheme_embedding(cls, x):
    scheme, positions = build(cls), jnp.arange(3, 3 + T)
    encoding = pn.PositionEncoding(scheme, rngs=nnx.Rngs(0))
    module, params = pl.PositionEncoding(scheme), encoding.values()
    variables = {"params": {"parameters": params}} if params else {}

    @jax.jit
    def run(x):
        expected = pe.scheme_embedding(scheme, params, x, positions=positions)
        return expected, encoding(x, positions), module.apply(variables, x, positions)

    expected, *modules = run(x)
    for y in modules:
        np.testing.assert_array_equal(y, expected)


def test_a_scheme_that_acts_on_the_embedding_alone_is_refused(x):
    scheme = build(pe.Sinusoidal)
    encoding = pn.PositionEncoding(scheme, rngs=nnx.Rngs(0))
    for call in (
        lambda: nnx_layer(scheme),
        lambda: linen_layer(scheme).init(KEY, x),
        lambda: nnx_layer(None, shared_encoding=encoding),
        lambda: nnx_layer(pe.NoPE())(x, shared_encoding=encoding),
    ):
        with pytest.raises(ValueError, match=r"Attention: Sinusoidal.* acts on the token embeddin"):
            call()


@pytest.mark.parametrize("cls", [pe.LearnedAbsolute, pe.Sinusoidal])
def test_an_embedding_decodes_after_the_tokens_of_a_cache(cls, x):
    """A model with an additive encoding decodes as the whole, row by row, without positions."""
    scheme = build(cls)
    encoding, layer = pn.PositionEncoding(scheme, rngs=nnx.Rngs(1)), nnx_layer(pe.NoPE())
    module = pl.PositionEncoding(scheme)
    params = encoding.values()
    variables = {"params": {"parameters": params}} if params else {}
    lengths = np.array([5, 3])
    positions, segments = pe.positions.from_padding_mask(jnp.arange(5)[None] < lengths[:, None])

    @jax.jit
    def model(x, **options):
        return layer(encoding(x, options.get("positions")), **options)

    @jax.jit
    def step(x, cache):
        embedded = encoding(x, cache=cache)
        return embedded, module.apply(variables, x, cache=cache), *layer(embedded, cache=cache)

    _, cache = model(
        x[:, :5], cache=layer.new_cache(BATCH, T), positions=positions, segment_ids=segments
    )
    alone = [
        model(np.concatenate([x[row, :n], x[row, 5:8]])[None]) for row, n in enumerate(lengths)
    ]
    for t in range(3):
        embedded, of_linen, y, cache = step(x[:, 5 + t : 6 + t], cache)
        np.testing.assert_array_equal(embedded, of_linen)
        for row, n in enumerate(lengths):
            np.testing.assert_allclose(y[row, 0], alone[row][0, n + t], atol=1e-5)


def test_tables_of_an_encoding_serve_all_layers(x):
    """Rotary tables: computed once, given to every layer, in NNX and Linen."""
    rope = pe.RoPE(head_dim=H)
    encoding = pn.PositionEncoding(rope, rngs=nnx.Rngs(0))
    positions = 3 * jnp.arange(T)
    layer = nnx_layer(rope)
    module, variables = linen_layer(rope), from_nnx(layer)

    @jax.jit
    def run(x):
        tables = encoding.tables(positions)
        of_linen = pl.PositionEncoding(rope).apply({}, positions, method="tables")
        outs = (
            layer(x, positions=positions),
            layer(x, positions=positions, tables=tables),
            module.apply(variables, x, positions=positions, tables=of_linen),
            layer(x, positions=positions, tables=jax.tree.map(jnp.zeros_like, tables)),
        )
        return tables, of_linen, outs

    tables, of_linen, (expected, *outs, of_zeros) = run(x)
    chex.assert_trees_all_equal(of_linen, tables)
    for out in outs:
        np.testing.assert_allclose(out, expected, atol=1e-6)
    assert np.abs(of_zeros - expected).max() > 1e-3  # The layer reads the tables.


@pytest.mark.parametrize(
    "settings, options",
    [({}, {"prefix_length": jnp.array([3, 5])}), ({"softcap": 0.3}, {"sinks": jnp.ones(N)})],
    ids=["prefix", "softcap and sinks"],
)
def test_options_of_attention_are_passed_on(settings, options, x):
    layer = nnx_layer(pe.RoPE(H), **settings)

    @jax.jit
    def run(x):
        q, k, v = (project(x) for project in (layer.query, layer.key, layer.value))
        of_both = settings | options
        out, _ = pe.scheme_attention(pe.RoPE(H), {}, q, k, v, is_causal=True, **of_both)
        in_linen = linen_layer(pe.RoPE(H), **settings).apply(from_nnx(layer), x, **options)
        return layer.out(out), layer(x, **options), in_linen, layer(x)

    expected, in_nnx, in_linen, plain = run(x)
    np.testing.assert_allclose(in_nnx, expected, atol=1e-5)
    np.testing.assert_allclose(in_linen, expected, atol=1e-5)
    assert np.abs(plain - expected).max() > 1e-3


def test_sinks_are_projected_from_the_input(x):
    """As in Inkling-2; in steps too."""
    settings = {"sinks": "projected", "axis_names": {"model_dim": "embed", "num_heads": "heads"}}
    with nnx.use_eager_sharding(False):
        layer = nnx_layer(pe.RoPE(H), **settings)
    assert layer.sinks.get_metadata("out_sharding") == ("embed", "heads")

    @jax.jit
    def run(x):
        q, k, v = (project(x) for project in (layer.query, layer.key, layer.value))
        sinks = jnp.matmul(x, layer.sinks[...], precision="highest")
        out, _ = pe.scheme_attention(pe.RoPE(H), {}, q, k, v, is_causal=True, sinks=sinks)
        in_linen = linen_layer(pe.RoPE(H), **settings).apply(from_nnx(layer), x)
        first, cache = layer(x[:, :4], cache=layer.new_cache(BATCH, T))
        steps = jnp.concatenate([first, layer(x[:, 4:], cache=cache)[0]], 1)
        return layer.out(out), layer(x), in_linen, steps

    expected, *outs = run(x)
    for out in outs:
        np.testing.assert_allclose(out, expected, atol=1e-5)
    assert np.abs(np.asarray(layer.sinks[...])).max() > 0.1
    with pytest.raises(ValueError, match="sinks must be True, False or 'projected', got 'learned'"):
        nnx_layer(pe.RoPE(H), sinks="learned")


@kinds(IN_LAYERS, "xpos vo_rope fox short_conv tupe")
def test_decoding_in_nnx_and_linen(name, x):
    """NNX with a cache that calls are given, Linen with its collection."""
    scheme = build(pe.SCHEMES[name])
    layer = nnx_layer(scheme)
    module, params = linen_layer(scheme, decode=True), from_nnx(layer)
    # A collection of zeros is an empty cache, as in Flax's attention.
    shapes = jax.eval_shape(module.init, KEY, x)["cache"]
    collection = jax.tree.map(lambda a: np.zeros(a.shape, a.dtype), shapes)

    @jax.jit
    def step(x, cache, collection):
        y, cache = layer(x, cache=cache)
        z, updated = module.apply({**params, "cache": collection}, x, mutable=["cache"])
        return y, z, cache, updated["cache"]

    cache, expected = layer.new_cache(BATCH, T), jax.jit(lambda x: layer(x))(x)
    for start in range(0, T, 3):
        part = slice(start, start + 3)
        y, z, cache, collection = step(x[:, part], cache, collection)
        np.testing.assert_allclose(y, expected[:, part], atol=1e-5)
        np.testing.assert_allclose(z, expected[:, part], atol=1e-5)


@kinds(IN_LAYERS, "fox short_conv tupe")
def test_nnx_parameters_train(name, x):
    layer = nnx_layer(build(pe.SCHEMES[name]))

    @nnx.jit
    def loss_and_grads(layer):
        return nnx.value_and_grad(lambda layer: (layer(x) ** 2).mean())(layer)

    _, grads = loss_and_grads(layer)
    for path, leaf in jax.tree.leaves_with_path(nnx.to_pure_dict(grads)):
        assert np.abs(leaf).max() > 0, path


def test_one_encoding_shared_by_layers_is_one_set_of_parameters(x):
    shared = pn.PositionEncoding(build(pe.T5), rngs=nnx.Rngs(0))
    layers = nnx.List([nnx_layer(None, shared_encoding=shared) for _ in range(2)])
    params = nnx.state(layers, nnx.Param)
    tables = [
        leaf
        for path, leaf in jax.tree.leaves_with_path(params)
        if "table" in jax.tree_util.keystr(path)
    ]
    assert len(tables) == 1


def test_layers_share_an_encoding_and_differ_in_the_rest(x):
    specs = [pe.LayerSpec(build(pe.T5), window=3), pe.LayerSpec(build(pe.T5), chunk_size=4)]
    shared = pn.PositionEncoding(specs[0].scheme, rngs=nnx.Rngs(5))
    outs = []
    for spec in specs:
        layer = nnx_layer(spec, shared_encoding=shared)
        alone = nnx_layer(spec)
        alone.encoding = shared
        np.testing.assert_array_equal(layer(x), alone(x))
        outs.append(layer(x))
    assert np.abs(outs[0] - outs[1]).max() > 1e-3

    class Pair(nn.Module):
        @nn.compact
        def __call__(self, x):
            encoding = pl.PositionEncoding(specs[0].scheme, name="shared")
            return [linen_layer(spec, shared_encoding=encoding)(x) for spec in specs]

    variables = Pair().init(jax.random.key(0), x)["params"]
    assert [path for path in variables if "encoding" in variables[path]] == []
    assert variables["shared"]["parameters"]["table"].shape == (N, 32)
    outs = Pair().apply({"params": variables}, x)
    for i, (spec, out) in enumerate(zip(specs, outs, strict=True)):
        params = variables[f"Attention_{i}"] | {"encoding": variables["shared"]}
        np.testing.assert_array_equal(linen_layer(spec).apply({"params": params}, x), out)


def test_shared_encodings_that_do_not_fit_are_refused(x):
    rngs = nnx.Rngs(0)
    shared = pn.PositionEncoding(pe.RoPE(H), rngs=rngs)
    message = "give an encoding that layers share as shared_encoding"
    for make in (nnx_layer, lambda position: pn.AttentionFn(position, rngs=rngs)):
        with pytest.raises(TypeError, match=f"(?s)position must be a Scheme or .*{message}"):
            make(shared)
    with pytest.raises(ValueError, match=r"must have the scheme of position, ALiBi.*got RoPE"):
        nnx_layer(build(pe.ALiBi), shared_encoding=shared)
    with pytest.raises(TypeError, match=message):
        linen_layer(pl.PositionEncoding(pe.RoPE(H))).init(jax.random.key(0), x)
    for out in (nnx_layer(None, shared_encoding=shared), nnx_layer(pe.RoPE(H))):
        assert out.settings == pe.LayerSpec(pe.RoPE(H))


@kinds(IN_LAYERS, "fox none short_conv")
def test_layers_under_nnx_scan_with_remat(name, x):
    kind = build(pe.SCHEMES[name])
    shared = pn.PositionEncoding(kind, rngs=nnx.Rngs(3))

    @nnx.split_rngs(splits=3)
    @nnx.vmap(in_axes=(0,), out_axes=0)
    def make(rngs):
        return pn.Attention(
            D, N, position=kind, num_kv_heads=KV_HEADS, head_dim=H, is_causal=True, rngs=rngs
        )

    layers = make(nnx.Rngs(0))

    def run(layers, x, shared):
        @nnx.remat
        def block(x, layer):
            return x + layer(x, shared_encoding=shared)

        return nnx.scan(block, in_axes=(nnx.Carry, 0), out_axes=nnx.Carry)(x, layers)

    @nnx.jit
    def one_layer(layers, x, i, shared):
        layer = jax.tree.map(lambda a: a[i], layers)
        return x + layer(x, shared_encoding=shared)

    for encoding in (None, shared):
        y = nnx.jit(run)(layers, x, encoding)
        expected = x
        for i in range(3):
            expected = one_layer(layers, expected, i, encoding)
        np.testing.assert_allclose(y, expected, atol=1e-5)


@kinds(IN_LAYERS, "fox none short_conv")
def test_layers_under_linen_scan_with_remat(name, x):
    kind = build(pe.SCHEMES[name])

    class Block(nn.Module):
        @nn.compact
        def __call__(self, x, _):
            return x + linen_layer(kind)(x), None

    deep = nn.scan(
        nn.remat(Block), variable_axes={"params": 0}, split_rngs={"params": True}, length=3
    )()
    variables = jax.jit(deep.init)(jax.random.key(0), x, None)
    y, _ = jax.jit(deep.apply)(variables, x, None)
    expected, block = x, jax.jit(Block().apply)
    for i in range(3):
        params = jax.tree.map(lambda a, i=i: a[i], variables)
        expected, _ = block(params, expected, None)
    np.testing.assert_allclose(y, expected, atol=1e-5)


def stock(cls, scheme, **options):
    """An `AttentionFn`, with the scale of the scheme where it is not that of Flax's layers."""
    own = scheme.logit_scale(H)
    return cls(scheme, scale=None if own in (None, H**-0.5) else own, **options)


@kinds(IN_STOCK, "t5 vo_rope")
def test_inside_stock_nnx_attention(name, x):
    scheme, rngs = build(pe.SCHEMES[name]), nnx.Rngs(0)
    layer = nnx.MultiHeadAttention(
        N, D, N * H, decode=False, attention_fn=stock(pn.AttentionFn, scheme, rngs=rngs), rngs=rngs
    )
    whole = jax.jit(lambda x: layer(x, is_causal=True))(x)
    if name == "none":
        plain = nnx.MultiHeadAttention(N, D, N * H, decode=False, rngs=nnx.Rngs(0))
        for part in ("query", "key", "value", "out"):
            nnx.update(getattr(plain, part), nnx.state(getattr(layer, part)))
        mask = np.tril(np.ones((1, 1, T, T), bool))
        expected = jax.jit(lambda x: plain(x, mask=mask))(x)
        np.testing.assert_allclose(whole, expected, atol=1e-5)
    layer.init_cache((BATCH, T + 3, D))
    decode = nnx.jit(lambda layer, x: layer(x, decode=True))
    for t in range(T):
        step = decode(layer, x[:, t : t + 1])
        np.testing.assert_allclose(step[:, 0], whole[:, t], atol=1e-5)


@kinds(IN_STOCK, "t5 xpos")
def test_inside_stock_linen_attention(name, x):
    scheme = build(pe.SCHEMES[name])
    layer = nn.MultiHeadDotProductAttention(
        num_heads=N, qkv_features=N * H, attention_fn=stock(pl.AttentionFn, scheme)
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


RNGS = nnx.Rngs(0)
NOPE = pn.Attention(D, N, head_dim=H, rngs=RNGS)
ZEROS = np.zeros((1, 2, D), np.float32)


def linen_call(**options):
    return linen_layer(pe.NoPE()).init(KEY, ZEROS, **options)


ERRORS = [
    (pn.Attention, {"model_dim": D, "num_heads": N, "rngs": RNGS}, "multiple of num_heads=6"),
    (nnx_layer, {"num_kv_heads": 4}, "num_heads=6 must be a multiple of num_kv_heads=4"),
    (NOPE, {"inputs_q": ZEROS[..., 1:]}, r"inputs_q must be \[B, T, 20\], got \(1, 2, 19\)"),
    (NOPE, {"inputs_q": ZEROS[0]}, r"inputs_q must be \[B, T, 20\], got shape \(2, 20\)"),
    (
        NOPE,
        {"inputs_q": ZEROS, "shared_encoding": pe.RoPE(H)},
        r"shared_encoding must be a PositionEncoding, got RoPE\(",
        TypeError,
    ),
    (NOPE, {"inputs_q": ZEROS, "postions": 0}, "unknown argument 'postions'; it tak", TypeError),
    (linen_call, {"postions": 0}, "unknown argument 'postions'; it takes", TypeError),
    (
        pn.PositionEncoding,
        {"scheme": "rope", "rngs": RNGS},
        "scheme must be a Scheme, got 'rope'",
        TypeError,
    ),
    (
        lambda: pl.PositionEncoding("rope").init(KEY, ZEROS),
        {},
        "scheme must be a Scheme, got 'rope'",
        TypeError,
    ),
    (pn.AttentionFn, {"position": "rope"}, "AttentionFn: position must be a Scheme or", TypeError),
]


def test_dropout_is_set_by_train_and_eval(x):
    layer = nnx_layer(pe.NoPE(), dropout_rate=0.5)
    same = nnx_layer(pe.NoPE())
    for module in (layer, nnx.Sequential(layer)):
        module.eval()
        np.testing.assert_array_equal(layer(x), same(x))
        module.train()
        first, second = layer(x), layer(x)
        assert np.abs(first - second).max() > 1e-3
        assert np.abs(first - same(x)).max() > 1e-3
    np.testing.assert_array_equal(layer(x, deterministic=True), same(x))
    layer.eval()
    assert np.abs(layer(x, deterministic=False) - same(x)).max() > 1e-3


def test_dropout_draws_from_the_rngs_of_a_call(x):
    layer = nnx_layer(pe.NoPE(), dropout_rate=0.5, deterministic=False)
    key = jax.random.key(1)
    np.testing.assert_array_equal(layer(x, rngs=key), layer(x, rngs=key))
    a, b = (layer(x, rngs=nnx.Rngs(dropout=3)) for _ in range(2))
    np.testing.assert_array_equal(a, b)
    np.testing.assert_array_equal(a, layer(x, rngs=nnx.Rngs(dropout=3).dropout))
    assert np.abs(a - layer(x, rngs=key)).max() > 1e-3


def test_dropout_needs_to_know_whether_to_drop(x):
    message = r"Attention: dropout_rate=0.5 needs `deterministic`"
    with pytest.raises(ValueError, match=message):
        nnx_layer(pe.NoPE(), dropout_rate=0.5)(x)
    module, variables = linen_layer(pe.NoPE(), dropout_rate=0.5), from_nnx(nnx_layer(pe.NoPE()))
    with pytest.raises(ValueError, match=message):
        module.apply(variables, x)
    with pytest.raises(ValueError, match=r'Attention: dropout needs rngs={"dropout": key}'):
        module.apply(variables, x, deterministic=False)


def test_linen_dropout_follows_deterministic(x):
    variables = from_nnx(nnx_layer(pe.NoPE()))
    expected = linen_layer(pe.NoPE()).apply(variables, x)
    module = linen_layer(pe.NoPE(), dropout_rate=0.5)
    rngs = {"dropout": jax.random.key(0)}
    np.testing.assert_array_equal(module.apply(variables, x, deterministic=True), expected)
    dropped = module.apply(variables, x, deterministic=False, rngs=rngs)
    assert np.abs(dropped - expected).max() > 1e-3
    set_in_module = module.clone(deterministic=False).apply(variables, x, rngs=rngs)
    np.testing.assert_array_equal(set_in_module, dropped)


def test_dropout_under_nnx_transforms(x):
    """Layers stacked by vmap draw apart, and train under jit and grad."""

    @nnx.split_rngs(splits=3)
    @nnx.vmap(in_axes=(0,), out_axes=0)
    def make(rngs):
        return pn.Attention(D, N, head_dim=H, dropout_rate=0.5, deterministic=False, rngs=rngs)

    layers = make(nnx.Rngs(0))

    @nnx.jit
    def step(layers, x):
        @nnx.scan(in_axes=(nnx.Carry, 0), out_axes=nnx.Carry)
        def run(x, layer):
            return x + layer(x)

        return nnx.value_and_grad(lambda layers: (run(x, layers) ** 2).mean())(layers)

    first, grads = step(layers, x)
    second, _ = step(layers, x)
    assert first != second
    assert all(np.isfinite(g).all() for g in jax.tree.leaves(nnx.to_pure_dict(grads)))


def test_parameters_are_float32_under_x64():
    with jax.enable_x64(True):
        scheme = Wide()
        encoding = pn.PositionEncoding(scheme, rngs=nnx.Rngs(0))
        assert encoding.values()["table"].dtype == jnp.float32
        variables = pl.PositionEncoding(scheme).init(jax.random.key(0), jnp.zeros((1, 2, 3)))
        assert variables["params"]["parameters"]["table"].dtype == jnp.float32


@dataclasses.dataclass(frozen=True)
class Wide(pe.Scheme):
    """Draws parameters in the default dtype."""

    def init(self, key):
        return {"table": jax.random.normal(key, (3,))}

    def embed(self, params, x, coordinates):
        return x


def test_compute_dtype(x):
    layer = nnx_layer(pe.RoPE(H), dtype=jnp.bfloat16)
    assert jax.eval_shape(lambda x: layer(x), x).dtype == jnp.bfloat16
    assert jax.eval_shape(lambda: layer.new_cache(1, 4)).k.dtype == jnp.bfloat16


def test_precision_and_promotion_are_those_of_the_projections(x):
    def halved(*inputs, dtype=None):
        inputs = inputs[0] if len(inputs) == 1 else inputs  # Linen gives them one by one.
        return tuple(None if a is None else a.astype(jnp.float16) for a in inputs)

    options = {"precision": "highest", "promote_dtype": halved}
    layer = nnx_layer(pe.NoPE(), **options)
    module = linen_layer(pe.NoPE(), **options)
    for call in (layer, lambda x: module.apply(from_nnx(layer), x)):
        program = jax.make_jaxpr(call)(x)
        products = [e for e in program.eqns if e.primitive.name == "dot_general"]
        settings = [e.params for e in products if e.outvars[0].aval.dtype == jnp.float16]
        assert len(settings) == 4  # The two of attention are float32.
        assert {p for params in settings for p in params["precision"]} == {
            jax.lax.Precision.HIGHEST
        }


@pytest.mark.parametrize(
    "scheme, reason",
    [
        (pe.T5(N), "T5 needs is_causal=True: .* bidirectional=True"),
        (pe.CoPE(H, num_positions=4), "CoPE needs is_causal=True: .* all alike"),
        (pe.StickBreaking(), "StickBreaking needs is_causal=True: .* no weight"),
        (pe.chain(pe.RoPE(H), pe.T5(N)), "needs is_causal=True"),
        (pe.streaming(pe.T5(N), 2), "needs is_causal=True"),
    ],
    ids=str,
)
def test_schemes_for_causal_attention_are_refused_at_construction(scheme, reason):
    sizes = {"head_dim": H, "position": scheme}
    for make in (
        lambda **more: pn.Attention(D, N, rngs=nnx.Rngs(0), **sizes, **more),
        lambda **more: pl.Attention(N, **sizes, **more),
    ):
        with pytest.raises(ValueError, match=f"Attention: .*{reason}"):
            make()
        with pytest.raises(ValueError, match=f"Attention: .*{reason}"):
            make(window=(4, 1))
        make(is_causal=True)
        make(window=(4, 0))


def test_another_encoding_does_not_change_the_scale_of_a_layer(x):
    layer = nnx_layer(pe.RoPE(H))
    rope, t5 = (pn.PositionEncoding(s, rngs=nnx.Rngs(0)) for s in (pe.RoPE(H), pe.T5(N)))
    message = (
        r"Attention: the logit scale of the layer is 0.35.*T5.* in place of RoPE.*, is 1; give"
    )
    with pytest.raises(ValueError, match=message):
        layer(x, shared_encoding=t5)
    layer.encoding = t5
    with pytest.raises(ValueError, match=message):
        layer(x)
    layer.scale = 1.0
    expected = nnx_layer(pe.T5(N), shared_encoding=t5)
    nnx.update(expected, nnx.state(layer))
    np.testing.assert_array_equal(layer(x), expected(x))
    with pytest.raises(ValueError, match=r"layer is 1, and that of RoPE.* is 0.35"):
        expected(x, shared_encoding=rope)


@pytest.mark.parametrize("name", ["dtype", "qk_norm", "shared_encoding", "position", "settings"])
def test_arguments_that_look_like_settings_cannot_be_assigned(name):
    layer = pn.Attention(16, 4, position=pe.RoPE(head_dim=4), rngs=nnx.Rngs(0))
    with pytest.raises(AttributeError, match=name):
        setattr(layer, name, None)


def test_segment_ids_of_a_layer_with_chunks_are_checked(x):
    spec = pe.LayerSpec(pe.NoPE(), chunk_size=4)
    layer = pn.Attention(x.shape[-1], 4, position=spec, is_causal=True, rngs=nnx.Rngs(0))
    shape = x.shape[:2]
    with pytest.raises(TypeError, match="segment_ids"):
        layer(x, segment_ids=np.full(shape, 0.5, np.float32))
    with pytest.raises(ValueError, match="segment_ids"):
        layer(x, segment_ids=np.full(shape, 2**32))
    with pytest.raises(ValueError, match=r"below 2\*\*27"):
        layer(x, segment_ids=np.full(shape, 2**28, np.int32))
