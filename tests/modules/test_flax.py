"""NNX and Linen modules: parameters, caches, dropout, scan, and Flax's own attention layers."""

import functools
import itertools

import chex
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import linen as nn
from flax import nnx, serialization

import posenc_jax as pe
import posenc_jax.linen as pl
import posenc_jax.nnx as pn
from tests.support import BATCH, KINDS, KV_HEADS, SIZES, build, layer_of, slow, slow_but

KEY = jax.random.key(0)
N, H, D, T = SIZES["num_heads"], SIZES["head_dim"], SIZES["model_dim"], 9
IN_LAYERS = [name for name in KINDS if build(pe.SCHEMES[name]).acts != pe.Acts.EMBEDDING]
IN_STOCK = [
    name
    for name in dict.fromkeys([*KINDS, "rope", "t5", "shaw"])
    if build(pe.SCHEMES[name]).acts != pe.Acts.EMBEDDING
    and not build(pe.SCHEMES[name]).traits.reads_x
    and pe.SCHEMES[name].mix is pe.Scheme.mix  # Their cache has no place for its state.
]
SIZES_OF_LAYER = {"num_kv_heads": KV_HEADS, "head_dim": H, "is_causal": True}
X = np.random.default_rng(0).normal(size=(BATCH, T, D)).astype(np.float32)


def kinds(names, quick):
    """Parametrizes a test by `name`; names but one are slow."""
    return pytest.mark.parametrize("name", slow_but(dict.fromkeys([*names, quick]), quick))


def nnx_layer(scheme=None, **options):
    options = SIZES_OF_LAYER | {"position": scheme} | options
    return pn.Attention(D, N, rngs=nnx.Rngs(0), **options)


def linen_layer(scheme=None, **options):
    return pl.Attention(num_heads=N, **SIZES_OF_LAYER | {"position": scheme} | options)


def linen_call(**options):
    return lambda: linen_layer(**options).init(KEY, X)


def from_nnx(layer):
    """The parameters of an NNX layer as Linen variables: the names are the same."""
    return {"params": nnx.to_pure_dict(nnx.state(layer, nnx.Param))}


def attention_of(layer, x, **options):
    """The output of an NNX layer, from `scheme_attention`."""
    q, k, v = (project(x) for project in (layer.query, layer.key, layer.value))
    encoding = layer.encoding
    out, _ = pe.scheme_attention(
        encoding.scheme, encoding.values(), q, k, v, x=x, is_causal=True, **options
    )
    return layer.out(out)


@kinds(IN_LAYERS, "short_conv")
def test_layers_equal_scheme_attention_and_decode(name):
    """NNX with a cache that calls are given, Linen with its collection; parameters train."""
    scheme = build(pe.SCHEMES[name])
    layer = nnx_layer(scheme)
    graph, state = nnx.split(layer)
    module, params = linen_layer(scheme), from_nnx(layer)
    # A collection of zeros is an empty cache, as in Flax's attention.
    decoder = linen_layer(scheme, decode=True)
    collection = jax.eval_shape(decoder.init, KEY, X)["cache"]

    def loss(state, x):
        y = nnx.merge(graph, state)(x)
        return (y**2).mean(), y

    @jax.jit
    def run(state, x):
        (_, y), grads = jax.value_and_grad(loss, has_aux=True)(state, x)

        def step(caches, part):
            out, cache = layer(part, cache=caches[0])
            linen_out, variables = decoder.apply(params | caches[1], part, mutable=["cache"])
            return (cache, variables), (out, linen_out)

        caches = layer.new_cache(BATCH, T), {"cache": jax.tree.map(jnp.zeros_like, collection)}
        parts = x.reshape(BATCH, 3, 3, D).swapaxes(0, 1)
        steps = jax.tree.map(
            lambda y: y.swapaxes(0, 1).reshape(x.shape), jax.lax.scan(step, caches, parts)[1]
        )
        outs = y, module.apply(params, x), *steps
        return attention_of(layer, x), outs, nnx.to_pure_dict(grads)

    written_out, outs, grads = jax.device_get(run(state, X))
    for y in outs:
        np.testing.assert_allclose(y, written_out, atol=1e-5)
    for path, leaf in jax.tree.leaves_with_path(grads):
        assert np.abs(leaf).max() > 0, path


ASSIGNED = {"is_causal": False, "window": 3, "softcap": 0.5, "scale": 0.1}


def test_an_assigned_setting_is_that_of_a_new_layer():
    pairs = []
    for name, value in (ASSIGNED | {"implementation": "reference"}).items():
        layer = nnx_layer(pe.RoPE(H), window=5)
        setattr(layer, name, value)
        assert getattr(layer, name) == value
        pairs.append((layer, nnx_layer(pe.RoPE(H), **{"window": 5, name: value})))
    before = nnx_layer(pe.RoPE(H), window=5)
    outs, before = jax.jit(lambda x: ([(a(x), b(x)) for a, b in pairs], before(x)))(X)
    for assigned, new in outs:
        np.testing.assert_allclose(assigned, new, atol=1e-6)
    assert all(np.abs(new - before).max() > 1e-3 for _, new in outs[: len(ASSIGNED)])


def test_an_assigned_encoding_is_that_of_a_new_layer():
    layer = nnx_layer(pe.RoPE(H))
    layer.encoding = pn.PositionEncoding(pe.ALiBi(N), rngs=nnx.Rngs(0))
    copy = nnx.merge(*nnx.split(layer))
    new = nnx_layer(pe.ALiBi(N))
    np.testing.assert_allclose(*jax.jit(lambda x: (copy(x), new(x)))(X), atol=1e-6)
    assert nnx.clone(layer).new_cache(1, 4).scheme == layer.position == pe.ALiBi(N)
    layer.encoding = pn.PositionEncoding(pe.Sinusoidal(D), rngs=nnx.Rngs(0))
    with pytest.raises(ValueError, match="acts on the token embedding alone"):
        layer(X)


def test_arguments_that_look_like_settings_cannot_be_assigned():
    layer = nnx_layer(pe.RoPE(H))
    for name in ("dtype", "qk_norm", "shared_encoding", "position", "settings"):
        with pytest.raises(AttributeError, match=name):
            setattr(layer, name, None)
    with pytest.raises(AttributeError, match="no setter"):
        pn.AttentionFn(pe.RoPE(H)).position = pe.ALiBi(N)


WRONG = {
    r"position must be a Scheme or a LayerSpec, got .*RoPE.*; call it: RoPE\(head_dim=...\)\.": (
        {"position": pe.RoPE}
    ),
    "position must be a Scheme or a LayerSpec, got 'rope'": {"position": "rope"},
    "qk_norm must be a QKNorm or None, got True": {"qk_norm": True},
    r"shared_encoding must be a PositionEncoding, got RoPE.*; make one with PositionEncoding\(": {
        "shared_encoding": pe.RoPE(H)
    },
    r"head_dim is 8, and RoPE\(head_dim=4.* was made for 4": {
        "position": pe.LayerSpec(pe.chain(pe.ALiBi(N), pe.RoPE(4)))
    },
    r"num_kv_heads is 3, and ShortConv.* was made for 6": {
        "position": pe.contrib.ShortConv(num_heads=N, num_kv_heads=N, head_dim=H)
    },
    r"model_dim is 20, and FoX.* was made for 8": {"position": pe.FoX(num_heads=N, model_dim=8)},
    "softcap must be": {"softcap": -1.0},
    r"dropout_rate must be in \[0, 1\), got -0.5": {"dropout_rate": -0.5, "deterministic": True},
    "use_bias must be a bool or have one for each of .*, got 'qkv'": {"use_bias": "qkv"},
    "sinks must be True, False or 'projected', got 'learned'": {"sinks": "learned"},
    "num_heads=6 must be a multiple of num_kv_heads=4": {"num_kv_heads": 4},
    r"Attention: Sinusoidal.* acts on the token embeddin": {"position": build(pe.Sinusoidal)},
    "T5 needs is_causal=True: .* bidirectional=True": {"position": pe.T5(N), "is_causal": False},
    "StickBreaking needs is_causal=True: .* no weight": {"position": pe.StickBreaking()}
    | {"is_causal": False, "window": (4, 1)},
    "Attention: .*needs is_causal=True: .*bidir": {"is_causal": False}
    | {"position": pe.streaming(pe.chain(pe.RoPE(H), pe.T5(N)), 2)},
}


@pytest.mark.parametrize("message", WRONG)
def test_wrong_settings_are_refused_at_construction(message):
    for make in (nnx_layer, lambda **options: linen_call(**options)()):
        with pytest.raises((TypeError, ValueError), match=message):
            make(**WRONG[message])
    if "is_causal" in WRONG[message]:
        nnx_layer(**WRONG[message] | {"window": (4, 0)})


def test_the_head_dim_of_a_linen_layer_follows_from_its_input():
    x = np.random.default_rng(0).normal(size=(2, 5, 48)).astype(np.float32)
    layer = pl.Attention(num_heads=6, position=pe.RoPE(8), is_causal=True)

    @jax.jit
    def run(x):
        y, variables = layer.init_with_output(KEY, x)
        cache = layer.new_cache(2, 5, model_dim=48)
        assert cache.k.shape == layer.clone(head_dim=8).new_cache(2, 5).k.shape
        stated = layer.clone(head_dim=8).apply(variables, x)
        return y, stated, layer.apply(variables, x, cache=cache)[0]

    y, stated, cached = run(x)
    np.testing.assert_array_equal(stated, y)
    np.testing.assert_allclose(cached, y, atol=1e-5)
    with pytest.raises(ValueError, match="multiple of num_heads=6"):
        jax.eval_shape(layer.init, KEY, x[..., :47])
    with pytest.raises(ValueError, match="without head_dim it needs model_dim="):
        layer.new_cache(2, 5)


RNGS = nnx.Rngs(0)


@functools.cache
def layer_without_positions():
    return pn.Attention(D, N, head_dim=H, rngs=RNGS)


def call(**arguments):
    """The layer is made in the first test: files that read `ERRORS` compile nothing."""
    return layer_without_positions()(**arguments)


ZEROS = np.zeros((1, 2, D), np.float32)
ERRORS = [
    (pn.Attention, {"model_dim": D, "num_heads": N, "rngs": RNGS}, "multiple of num_heads=6"),
    (
        pn.Attention,
        {"model_dim": D, "num_heads": N, "head_dim": 0, "rngs": RNGS},
        "Attention: head_dim must be >= 1, got 0",
    ),
    (
        call,
        {"inputs_q": ZEROS, "inputs_k": ZEROS[..., 1:]},
        r"the key projection reads 20 features, got \(\d+, \d+, 19\)",
    ),
    (call, {"inputs_q": ZEROS, "inputs_k": ZEROS[0]}, r"inputs_k must be \[B, S, D\], got"),
    (lambda: nnx_layer(pe.NoPE()).init_cache((2,)), {}, r"input_shape must be \(B, S, \.\.\.\)"),
    (call, {"inputs_q": ZEROS[0]}, r"inputs_q must be \[B, T, D\], got shape \(2, 20\)"),
    (call, {"inputs_q": ZEROS, "postions": 0}, "unknown argument 'postions'; it tak", TypeError),
    (call, {"inputs_q": ZEROS, "is_causal": True}, "is_causal is an argument of the", TypeError),
    (
        functools.partial(linen_layer(pe.NoPE()).init, KEY),
        {"inputs_q": ZEROS, "postions": 0},
        "unknown argument 'postions'; it takes",
        TypeError,
    ),
    (
        pn.PositionEncoding,
        {"scheme": "rope", "rngs": RNGS},
        "scheme must be a Scheme, got 'rope'",
        TypeError,
    ),
    (pn.AttentionFn, {"position": "rope"}, "AttentionFn: position must be a Scheme or", TypeError),
    (
        pn.AttentionFn,
        {"position": pe.LayerSpec(pe.RoPE(8), window=2)},
        "AttentionFn: position must be a Scheme, got a LayerSpec",
        TypeError,
    ),
]


def test_a_layer_without_arrays_has_caches():
    layer = nnx.eval_shape(lambda: nnx_layer(build(pe.T5)))
    cache = layer.new_cache(2, 8)
    layer.init_cache((2, 8))
    assert cache.k.shape == layer.kv_cache.get_value().k.shape == (2, 8, KV_HEADS, H)


def test_encodings_equal_scheme_embedding():
    classes = [c for c in pe.SCHEMES.values() if c.embed is not pe.Scheme.embed or c is pe.T5]
    positions = np.arange(3, 3 + T)
    encodings = [
        layer_of(lambda rngs, cls=cls: pn.PositionEncoding(build(cls), rngs=rngs))
        for cls in classes
    ]

    def outputs(encoding, x):
        scheme, params = encoding.scheme, encoding.values()
        variables = {"params": {"parameters": params}} if params else {}
        in_linen = pl.PositionEncoding(scheme).apply(variables, x, positions)
        expected = pe.scheme_embedding(scheme, params, x, positions=positions)
        return expected, encoding(x, positions), in_linen

    for expected, *modules in jax.jit(lambda x: [outputs(e, x) for e in encodings])(X):
        for y in modules:
            np.testing.assert_allclose(y, expected, atol=1e-6)


def test_options_of_attention_are_passed_on():
    still = np.zeros(T, np.int32)
    tables = pl.PositionEncoding(pe.RoPE(H)).apply({}, still, method="tables")
    encoding = pn.PositionEncoding(pe.RoPE(H), rngs=nnx.Rngs(0))
    chex.assert_trees_all_equal(encoding.tables(still), tables)
    cases = (
        ({}, {"prefix_length": np.array([3, 5]), "tables": tables}),
        ({"softcap": 0.3}, {"sinks": np.ones(N, np.float32)}),
    )
    layers = [nnx_layer(pe.RoPE(H), **settings) for settings, _ in cases]

    def outputs(x, layer, settings, options):
        linen = linen_layer(pe.RoPE(H), **settings)
        outs = layer(x, **options), linen.apply(from_nnx(layer), x, **options), layer(x)
        return attention_of(layer, x, **settings, **options), *outs

    @jax.jit
    def run(x):
        return [outputs(x, layer, *case) for layer, case in zip(layers, cases, strict=True)]

    for expected, in_nnx, in_linen, plain in run(X):
        np.testing.assert_allclose(in_nnx, expected, atol=1e-5)
        np.testing.assert_allclose(in_linen, expected, atol=1e-5)
        assert np.abs(plain - expected).max() > 1e-3


def test_sinks_are_projected_from_the_input():
    """As in Inkling-2."""
    settings = {"sinks": "projected", "axis_names": {"model_dim": "embed", "num_heads": "heads"}}
    with nnx.use_eager_sharding(False):
        layer = nnx_layer(pe.RoPE(H), **settings)
    assert layer.sinks.get_metadata("out_sharding") == ("embed", "heads")

    @jax.jit
    def run(x):
        sinks = jnp.matmul(x, layer.sinks[...], precision="highest")
        in_linen = linen_layer(pe.RoPE(H), **settings).apply(from_nnx(layer), x)
        return attention_of(layer, x, sinks=sinks), layer(x), in_linen

    expected, *outs = run(X)
    for out in outs:
        np.testing.assert_allclose(out, expected, atol=1e-5)
    assert np.abs(np.asarray(layer.sinks[...])).max() > 0.1


def test_layers_share_an_encoding_and_differ_in_the_rest():
    specs = [pe.LayerSpec(build(pe.T5), window=3), pe.LayerSpec(build(pe.T5), chunk_size=4)]
    shared = pn.PositionEncoding(specs[0].scheme, rngs=nnx.Rngs(5))
    layers = nnx.List([nnx_layer(spec, shared_encoding=shared) for spec in specs])
    paths = jax.tree.leaves_with_path(nnx.state(layers, nnx.Param))
    assert sum("table" in jax.tree_util.keystr(path) for path, _ in paths) == 1
    layers_alone = [nnx_layer(spec) for spec in specs]
    for layer in layers_alone:
        layer.encoding = shared

    class Pair(nn.Module):
        @nn.compact
        def __call__(self, x):
            encoding = pl.PositionEncoding(specs[0].scheme, name="shared")
            return [linen_layer(spec, shared_encoding=encoding)(x) for spec in specs]

    params = from_nnx(layers)["params"]
    variables = {f"Attention_{i}": params[i] for i in range(2)}
    variables["shared"] = variables["Attention_0"].pop("encoding")
    variables["Attention_1"].pop("encoding", None)
    shapes = jax.eval_shape(Pair().init, KEY, X)["params"]
    assert jax.tree.structure(shapes) == jax.tree.structure(variables)

    @jax.jit
    def run(x):
        return [
            [layer(x) for layer in layers],
            [layer(x) for layer in layers_alone],
            Pair().apply({"params": variables}, x),
        ]

    first, *others = run(X)
    for outs in others:
        np.testing.assert_allclose(outs, first, atol=1e-6)
    assert np.abs(first[0] - first[1]).max() > 1e-3


def test_shared_encodings_that_do_not_fit_are_refused():
    rngs = nnx.Rngs(0)
    shared = pn.PositionEncoding(pe.RoPE(H), rngs=rngs)
    message = "give an encoding that layers share as shared_encoding"
    linen = linen_call(position=pl.PositionEncoding(pe.RoPE(H)))
    for make in (lambda: nnx_layer(shared), lambda: pn.AttentionFn(shared, rngs=rngs), linen):
        with pytest.raises(TypeError, match=f"(?s)position must be a Scheme or .*{message}"):
            make()
    with pytest.raises(ValueError, match=r"must have the scheme of position, ALiBi.*got RoPE"):
        nnx_layer(build(pe.ALiBi), shared_encoding=shared)
    for layer in (nnx_layer(None, shared_encoding=shared), nnx_layer(pe.RoPE(H))):
        assert layer.settings == pe.LayerSpec(pe.RoPE(H))
    embedding = pn.PositionEncoding(build(pe.Sinusoidal), rngs=rngs)
    for call in (functools.partial(nnx_layer, None), functools.partial(layer, X)):
        with pytest.raises(ValueError, match=r"Attention: Sinusoidal.* acts on the token embeddin"):
            call(shared_encoding=embedding)


@kinds(IN_STOCK, "t5")
def test_inside_stock_nnx_attention(name):
    scheme, rngs = build(pe.SCHEMES[name]), nnx.Rngs(0)
    layer = nnx.MultiHeadAttention(
        N, D, N * H, decode=False, attention_fn=pn.AttentionFn(scheme, rngs=rngs), rngs=rngs
    )
    whole = jax.jit(lambda x: layer(x, is_causal=True))(X)
    layer.init_cache((BATCH, T + 3, D))
    decode = nnx.jit(lambda layer, x: layer(x, decode=True))
    for t in range(T):
        step = decode(layer, X[:, t : t + 1])
        np.testing.assert_allclose(step[:, 0], whole[:, t], atol=1e-5)


def test_inside_stock_linen_attention():
    """Keys that are rotated in the cache's order, and parameters; NNX has other schemes."""
    fn = pl.AttentionFn(pe.chain(pe.XPos(H), pe.T5(N)))
    layer = nn.MultiHeadDotProductAttention(num_heads=N, qkv_features=N * H, attention_fn=fn)
    mask = np.tril(np.ones((1, 1, T, T), bool))
    whole, variables = jax.jit(layer.init_with_output)(KEY, X, mask=mask)
    decoder = layer.clone(decode=True)
    shapes = jax.eval_shape(decoder.init, KEY, np.ones((BATCH, T + 3, D), np.float32))
    cache = jax.tree.map(lambda a: np.zeros(a.shape, a.dtype), shapes["cache"])
    decode = jax.jit(functools.partial(decoder.apply, mutable=["cache"]))
    for t in range(T):
        variables = {"params": variables["params"], "cache": cache}
        step, new = decode(variables, X[:, t : t + 1])
        cache = new["cache"]
        np.testing.assert_allclose(step[:, 0], whole[:, t], atol=1e-5)


@slow
def test_nnx_dropout_follows_the_modes_and_draws_from_rngs():
    layer, same = nnx_layer(pe.NoPE(), dropout_rate=0.5), nnx_layer(pe.NoPE())(X)
    with pytest.raises(ValueError, match=r"Attention: dropout_rate=0.5 needs `deterministic`"):
        layer(X)
    layer.train()
    draws = [layer(X), layer(X), layer(X, rngs=nnx.Rngs(dropout=3)), layer(X, rngs=KEY)]
    np.testing.assert_array_equal(draws[2], layer(X, rngs=nnx.Rngs(dropout=3).dropout))
    np.testing.assert_array_equal(draws[3], layer(X, rngs=KEY))
    np.testing.assert_array_equal(layer(X, deterministic=True), same)
    layer.eval()
    np.testing.assert_array_equal(layer(X), same)
    draws += [layer(X, deterministic=False), same]
    assert all(np.abs(a - b).max() > 1e-3 for a, b in itertools.combinations(draws, 2))


def test_linen_dropout_follows_deterministic():
    variables = from_nnx(nnx_layer(pe.NoPE()))
    module = linen_layer(pe.NoPE(), dropout_rate=0.5)
    with pytest.raises(ValueError, match=r"Attention: dropout_rate=0.5 needs `deterministic`"):
        module.apply(variables, X)
    rngs = {"dropout": KEY}

    @jax.jit
    def run(x):
        plain = linen_layer(pe.NoPE()).apply(variables, x)
        still = module.apply(variables, x, deterministic=True)
        dropped = module.apply(variables, x, deterministic=False, rngs=rngs)
        of_module = module.clone(deterministic=False).apply(variables, x, rngs=rngs)
        return plain, still, dropped, of_module

    plain, still, dropped, of_module = run(X)
    np.testing.assert_allclose(still, plain, atol=1e-6)
    np.testing.assert_allclose(of_module, dropped, atol=1e-6)
    assert np.abs(dropped - plain).max() > 1e-3


def test_dtype_precision_products_and_promotion_are_those_of_the_projections():
    layer = nnx_layer(pe.RoPE(H), dtype=jnp.bfloat16)
    assert jax.eval_shape(lambda x: layer(x), X).dtype == jnp.bfloat16
    assert jax.eval_shape(lambda: layer.new_cache(1, 4)).k.dtype == jnp.bfloat16

    def halved(*inputs, dtype=None):
        inputs = inputs[0] if len(inputs) == 1 else inputs  # Linen gives them one by one.
        return tuple(None if a is None else a.astype(jnp.float16) for a in inputs)

    calls = []

    def product(*arrays, **settings):
        calls.append(arrays)
        return jax.lax.dot_general(*arrays, **settings)

    def plain(lhs, rhs, dimension_numbers, precision=None, preferred_element_type=None):
        return jax.lax.dot_general(lhs, rhs, dimension_numbers, precision)

    jax.eval_shape(linen_layer(pe.NoPE(), dot_general=plain).init, KEY, X)  # As in nn.DenseGeneral.
    options = {"precision": "highest", "dot_general": product, "promote_dtype": halved}
    layer = nnx_layer(pe.NoPE(), **options)
    module = linen_layer(pe.NoPE(), **options)
    for call in (layer, lambda x: module.apply(from_nnx(layer), x)):
        program = jax.make_jaxpr(call)(X)
        products = [e for e in program.eqns if e.primitive.name == "dot_general"]
        settings = [e.params for e in products if e.outvars[0].aval.dtype == jnp.float16]
        assert len(settings) == len(calls) == 4  # The two of attention are float32.
        calls.clear()
        assert {p for params in settings for p in params["precision"]} == {
            jax.lax.Precision.HIGHEST
        }


def test_a_scheme_that_adds_heads_is_refused_by_layers():
    scheme = pe.contrib.RoPEPlusPlus(H, heads="added")
    fn = pn.AttentionFn(scheme)
    stock = nnx.MultiHeadAttention(N, D, N * H, decode=False, attention_fn=fn, rngs=nnx.Rngs(0))
    for name, call in (
        ("Attention", nnx_layer(scheme)),
        ("Attention", functools.partial(linen_layer(scheme).init, KEY)),
        ("AttentionFn", stock),
    ):
        with pytest.raises(ValueError, match=rf"^{name}: RoPEPlusPlus.* returns {2 * N} heads"):
            jax.eval_shape(lambda x, call=call: call(x), X)


def test_files_of_one_kind_of_layer_are_read_by_the_other():
    """NNX has no empty members of parameters, and numbers as names."""
    scheme = pe.chain(pe.RoPE(H), pe.T5(N))
    layer, module = nnx_layer(scheme), linen_layer(scheme)
    variables = module.init(KEY, X)
    state = nnx.to_pure_dict(nnx.state(layer, nnx.Param))
    new = serialization.from_bytes(variables, serialization.to_bytes({"params": state}))
    np.testing.assert_allclose(*jax.jit(lambda x: (module.apply(new, x), layer(x)))(X), atol=1e-6)


def test_layers_that_do_not_tell_left_from_right_warn():
    """Once, when they are made; a causal layer, a window to the left and a chain do not."""
    for layer in (nnx_layer, linen_layer):
        with pytest.warns(UserWarning, match=r"cannot tell left from right.*symmetry=\"split\""):
            layer(pe.ALiBi(N), is_causal=False)
        layer(pe.ALiBi(N), is_causal=True)
    nnx_layer(pe.LayerSpec(pe.ALiBi(N), window=(3, 0)), is_causal=False)
    for scheme in (pe.NoPE(), pe.ALiBi(N, symmetry="split"), pe.chain(pe.RoPE(H), pe.ALiBi(N))):
        nnx_layer(scheme, is_causal=False)


def test_tables_of_both_libraries():
    layer = nnx_layer(pe.RoPE(H))
    assert "query" in nnx.tabulate(layer, X)
    assert jax.eval_shape(layer, X).shape == X.shape  # A failure would leave its methods changed.
    assert "query" in linen_layer(pe.RoPE(H)).tabulate(KEY, X)


def test_a_cache_of_chunks_counts_segments_not_chunks():
    layer = nnx_layer(pe.LayerSpec(pe.RoPE(H), chunk_size=4), implementation="reference")
    table = pn.PositionEncoding(pe.LearnedAbsolute(32, D), rngs=nnx.Rngs(1))

    @jax.jit
    def run(x):
        _, cache = layer(x[:, :3], cache=layer.new_cache(BATCH, 20))
        _, cache = layer(x[:, 3:7], cache=cache)  # Four drafts, of which three are kept.
        kept = cache.keep(jnp.tile(jnp.arange(3), (BATCH, 1)), 4)
        out, _ = layer(x[:, 6:8], cache=kept)
        ids = jnp.zeros((BATCH, 2), jnp.int32)
        return kept, out, layer(x[:, :8])[:, 6:8], table(x[:, 6:8], segment_ids=ids, cache=kept)

    kept, out, expected, encoded = run(X)
    np.testing.assert_array_equal(kept.positions[:, :6], np.tile(np.arange(6), (BATCH, 1)))
    np.testing.assert_allclose(out, expected, atol=1e-5)
    np.testing.assert_allclose(
        encoded - X[:, 6:8], np.tile(table.values()["table"][6:8], (BATCH, 1, 1)), atol=1e-6
    )


def test_encodings_and_caches_of_a_call_are_checked():
    chunks = nnx_layer(pe.LayerSpec(pe.RoPE(H), chunk_size=4, window=3))
    streaming = pn.PositionEncoding(pe.streaming(pe.RoPE(H), 2), rngs=nnx.Rngs(0))
    with pytest.raises(ValueError, match="chunk_size needs a scheme that attends within its"):
        chunks(X, shared_encoding=streaming)
    layer = nnx_layer(pe.RoPE(H))
    with pytest.raises(TypeError, match="Attention: shared_encoding must be a PositionEncoding"):
        layer(X, shared_encoding=pe.RoPE(H))
    with pytest.raises(TypeError, match=r"cache must be the KVCache of one layer.*got list"):
        layer(X, cache=[layer.new_cache(BATCH, T)])


def test_segment_ids_of_a_layer_with_chunks_are_checked():
    layer = nnx_layer(pe.LayerSpec(pe.NoPE(), chunk_size=4))
    for ids, message in (
        (np.full((BATCH, T), 0.5, np.float32), "segment_ids"),
        (np.full((BATCH, T), 2**32), "segment_ids"),
        (np.full((BATCH, T), 2**28, np.int32), r"below 2\*\*27"),
    ):
        with pytest.raises((TypeError, ValueError), match=message):
            layer(X, segment_ids=ids)
