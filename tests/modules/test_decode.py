"""`decode=True`: caches inside of NNX and Linen layers, as Flax's own attention has them."""

import dataclasses
import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import linen as nn
from flax import nnx

import posenc_jax as pe
import posenc_jax.linen as pl
import posenc_jax.nnx as pn
from tests.support import BATCH, KV_HEADS, SIZES, build, layer_of, slow

N, H, D, T = SIZES["num_heads"], SIZES["head_dim"], SIZES["model_dim"], 9
LAYER = {"num_kv_heads": KV_HEADS, "head_dim": H, "is_causal": True}
X = np.random.default_rng(0).normal(size=(BATCH, T, D)).astype(np.float32)


@slow
def test_steps_with_coordinates_equal_the_whole():
    """test_flax.py has the steps of every kind of scheme."""
    coordinates = 3 * jnp.arange(T)
    scheme = pe.chain(pe.RoPE(H), build(pe.FoX))
    layer = layer_of(lambda rngs: pn.Attention(D, N, position=scheme, rngs=rngs, **LAYER))
    expected = jax.jit(lambda x: layer(x, coordinates=coordinates))(X)
    layer.init_cache((BATCH, T, D), coordinates=coordinates)
    traces = []

    @nnx.jit
    def step(layer, x, coordinates):
        traces.append(x.shape)
        return layer(x, coordinates=coordinates, decode=True)

    for part in (slice(0, 3), slice(3, 6), slice(6, T)):
        y = step(layer, X[:, part], coordinates[part])
        np.testing.assert_allclose(y, expected[:, part], atol=1e-5)
    assert len(traces) == 1
    module = pl.Attention(num_heads=N, position=pe.RoPE(H), decode=True, **LAYER)
    shapes = jax.eval_shape(lambda: module.init(jax.random.key(0), X, coordinates=coordinates))
    assert shapes["cache"]["kv_cache"].coordinates.shape == (BATCH, T)


def linen_steps(module, variables):
    """The outputs of single tokens, whose calls change the collection of the cache."""
    step, outs = jax.jit(lambda v, x: module.apply(v, x, mutable=["cache"])), []
    for t in range(T):
        y, updated = step(variables, X[:, t : t + 1])
        variables |= updated
        outs.append(y)
    return np.concatenate(outs, 1)


@slow
def test_the_first_call_of_linen_makes_a_cache_that_a_ring_may_replace():
    """As in Flax: the length of the input of `init` is the capacity, and `init` uses no cache."""
    module = pl.Attention(num_heads=N, position=pe.T5(N), window=3, decode=True, **LAYER)
    y, variables = jax.jit(module.init_with_output)(jax.random.key(0), X)
    cache = variables["cache"]["kv_cache"]
    assert cache.k.shape == (BATCH, T, KV_HEADS, H) and not cache.length.any()
    variables["cache"] = {"kv_cache": module.new_cache(BATCH, 3, ring=True)}
    np.testing.assert_allclose(linen_steps(module, variables), y, atol=1e-5)


def test_a_cache_has_the_slots_that_the_window_needs():
    def new_cache(position, **options):
        layer = pn.Attention(D, N, position=position, rngs=nnx.Rngs(0), **LAYER)
        cache = jax.eval_shape(lambda: layer.new_cache(1, 40, **options))
        return cache.capacity, cache.ring

    rope = pe.RoPE(H)
    window = pe.LayerSpec(rope, window=8)
    assert new_cache(window) == (40, False)
    assert new_cache(window, tokens_per_call=5) == (7 + 5, True)
    assert new_cache(window, tokens_per_call=5, max_rewind=6) == (7 + 6, True)
    itself = pe.LayerSpec(window.scheme, window=1)
    assert new_cache(itself, tokens_per_call=2, max_rewind=2) == (1 + 2, True)
    assert new_cache(window, tokens_per_call=33) == (40, False)
    sinks = pe.LayerSpec(pe.streaming(rope, 2), window=8)
    assert new_cache(sinks, tokens_per_call=5) == (2 + 7 + 5, True)
    for first, capacity in ((1, 2 + 7 + 5), (3, 3 + 7 + 5)):
        assert new_cache(sinks, tokens_per_call=5, num_sink_tokens=first) == (capacity, True)
    assert new_cache(rope, tokens_per_call=5, num_sink_tokens=3) == (40, False)
    with pytest.raises(ValueError, match="new_cache: num_sink_tokens must be >= 0, got -1"):
        new_cache(rope, tokens_per_call=5, num_sink_tokens=-1)
    chunks = pe.LayerSpec(rope, window=8, chunk_size=16)
    for layer in (rope, pe.LayerSpec(rope, window=(-1, 0)), chunks):
        assert new_cache(layer, tokens_per_call=5) == (40, False)
    for options, message in (({}, "must be >= 1, got 0"), ({"ring": True}, "give one of")):
        with pytest.raises(ValueError, match=message):
            new_cache(window, tokens_per_call=5 if options else 0, **options)


@slow
def test_views_of_a_model_decode():
    """`nnx.view` makes the caches of all layers; the model itself has none."""
    model = nnx.Sequential(pn.Attention(D, N, position=pe.T5(N), rngs=nnx.Rngs(0), **LAYER))
    expected = jax.jit(lambda x: model(x))(X)
    decoder = nnx.view(model, decode=True, batch_size=BATCH, max_length=T)
    step = nnx.jit(lambda model, x: model(x))
    for part in (slice(0, 4), *(slice(t, t + 1) for t in range(4, T))):
        np.testing.assert_allclose(step(decoder, X[:, part]), expected[:, part], atol=1e-5)
    assert model.layers[0].kv_cache is None


@slow
def test_stacked_layers_decode_under_scan():
    """NNX layers stacked by vmap, Linen layers by nn.scan, each with a cache of its own."""

    @nnx.jit
    @nnx.split_rngs(splits=2)
    @nnx.vmap(in_axes=(0,), out_axes=0)
    def make(rngs):
        layer = pn.Attention(D, N, position=pe.T5(N), rngs=rngs, **LAYER)
        layer.init_cache((BATCH, T, D))
        return layer

    layers = make(nnx.Rngs(0))

    @nnx.jit(static_argnames="decode")
    def run(layers, x, decode):
        @nnx.scan(in_axes=(nnx.Carry, 0), out_axes=nnx.Carry)
        def over(x, layer):
            return x + layer(x, decode=decode)

        return over(x, layers)

    expected = run(layers, X, decode=False)
    for t in range(T):
        y = run(layers, X[:, t : t + 1], decode=True)
        np.testing.assert_allclose(y[:, 0], expected[:, t], atol=1e-5)

    class Block(nn.Module):
        @nn.compact
        def __call__(self, x):
            layer = pl.Attention(num_heads=N, position=pe.T5(N), decode=True, **LAYER)
            return x + layer(x), None

    class Deep(nn.Module):
        @nn.compact
        def __call__(self, x):
            options = {"variable_axes": {"params": 0, "cache": 0}, "split_rngs": {"params": True}}
            return nn.scan(Block, length=2, **options)()(x)[0]

    expected, variables = jax.jit(Deep().init_with_output)(jax.random.key(0), X)
    np.testing.assert_allclose(linen_steps(Deep(), variables), expected, atol=1e-5)


@pytest.mark.parametrize(
    "spec", [pe.LayerSpec(pe.RoPE(H), chunk_size=4), pe.LayerSpec(build(pe.FoX), window=4)]
)
def test_later_calls_are_of_the_segment_of_the_last_token(spec):
    """Ids may begin at 1, and a prompt may hold several segments."""
    layer = layer_of(lambda rngs: pn.Attention(D, N, position=spec, rngs=rngs, **LAYER))
    ids = jnp.array([[1] * T, [-1, 4, 4, 4, 7, 7, 7, 7, 7]])
    positions = pe.positions.from_segment_ids(ids)

    @jax.jit
    def run(x):
        cache = layer.new_cache(2, 12, **{"tokens_per_call": 6} if spec.window else {})
        first = {"positions": positions[:, :6], "segment_ids": ids[:, :6]}
        _, cache = layer(x[:, :6], cache=cache, **first)
        y, _ = layer(x[:, 6:], positions=positions[:, 6:], cache=cache)
        return y, layer(x, positions=positions, segment_ids=ids)[:, 6:]

    np.testing.assert_allclose(*run(X[:2]), atol=1e-5)


def test_decoding_without_a_cache_is_refused():
    module = pl.Attention(num_heads=N, position=pe.RoPE(H), decode=True, **LAYER)
    params = {"params": jax.eval_shape(module.init, jax.random.key(0), X)["params"]}
    apply = functools.partial(module.apply, mutable=["cache"])
    with pytest.raises(ValueError, match="needs the collection 'cache' that init returns"):
        jax.eval_shape(apply, params, X[:, :5])
    layer = layer_of(lambda rngs: pn.Attention(D, N, decode=True, rngs=rngs, **LAYER))
    with pytest.raises(ValueError, match="decode=True needs a cache; call init_cache first"):
        nnx.eval_shape(lambda layer: layer(X), layer)
    layer.init_cache((BATCH, T, D))
    with pytest.raises(ValueError, match="decode=True has its own cache; give no cache="):
        nnx.eval_shape(lambda layer: layer(X, cache=layer.new_cache(BATCH, T)), layer)
    full = jnp.full((BATCH,), T, jnp.int32)
    with pytest.raises(ValueError, match="9 of 9 slots of row 0 are used and 1 more tokens do not"):
        layer.kv_cache.set_value(dataclasses.replace(layer.new_cache(BATCH, T), length=full))
        layer(X[:, :1])


@slow
def test_a_step_outside_of_jit_is_a_few_programs(caplog):
    """Each operation would be one to compile: 54 in this step."""
    x = jnp.asarray(np.random.default_rng(0).normal(size=(3, 7, 20)), jnp.float32)
    layer = pn.Attention(20, 2, position=pe.RoPE(10), is_causal=True, rngs=nnx.Rngs(0))
    _, cache = layer(x[:, :6], cache=layer.new_cache(3, 11))
    with jax.log_compiles():
        layer(x[:, 6:], cache=cache)
    programs = [r.getMessage() for r in caplog.records if r.getMessage().startswith("Compiling")]
    assert 5 < len(programs) <= 18, programs
