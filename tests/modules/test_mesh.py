"""Layers over eight devices: the numbers of one device, the collectives of a layer by hand."""

import functools
import pathlib
import re
from collections import Counter

import chex
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import linen as nn
from flax import nnx
from jax.sharding import AxisType, NamedSharding
from jax.sharding import PartitionSpec as P

import posenc_jax as pe
import posenc_jax.linen as pl
import posenc_jax.nnx as pn
from tests.support import slow

N, K, H, D, B, T, S = 8, 4, 8, 16, 4, 34, 40
NAMES = {"num_heads": "tensor", "num_kv_heads": "tensor"}
LAYER = {"num_kv_heads": K, "head_dim": H, "is_causal": True}
HEADS, TOKENS = P("data", None, "tensor", None), P("data", None, None)
SCHEME = pe.chain(pe.RoPE(H), pe.T5(N))
X = np.random.default_rng(0).normal(size=(B, T, D)).astype(np.float32)
COLLECTIVES = "all-reduce|all-gather|reduce-scatter|all-to-all|collective-permute"


def mesh_of(kind, shape=(2, 4), axes=("data", "tensor")):
    return jax.set_mesh(jax.make_mesh(shape, axes, axis_types=(kind,) * len(axes)))


def put(x, *spec):
    return jax.device_put(x, NamedSharding(jax.sharding.get_mesh(), P(*spec)))


def collectives(f, *args):
    """The collectives of a program, and its results."""
    program = f.lower(*args).compile()
    names = re.findall(rf" ({COLLECTIVES})(?:-start)?\(", program.as_text())
    return Counter(names), program(*args)


@jax.numpy_rank_promotion("allow")
def by_hand(w, x, cache=None, *, heads=None, tokens=None):
    """RoPE, T5's bias and attention of grouped heads, in terms of jax.numpy.

    Args:
      w: the parameters of `SCHEME`'s layer.
      x: [B, T, D].
      cache: (k, v, length), for all rows.
      heads, tokens: shardings on explicit axes.
    """
    einsum = jnp.einsum

    def project(name):
        return einsum("btd,dnh->btnh", x, w[name]["kernel"], out_sharding=heads)

    q, k, v = map(project, ("query", "key", "value"))
    start = 0 if cache is None else cache[2]
    positions = start + jnp.arange(x.shape[1])
    angles = positions[:, None].astype(jnp.float32) * 1e4 ** (-np.arange(0, H, 2, np.float32) / H)
    cos, sin = jnp.cos(angles)[:, None], jnp.sin(angles)[:, None]

    def rotate(y):
        a, b = jnp.split(y, 2, -1)
        return jnp.concatenate([a * cos - b * sin, b * cos + a * sin], -1)

    q, k = rotate(q), rotate(k)
    if cache is not None:
        update = functools.partial(jax.lax.dynamic_update_slice, start_indices=(0, start, 0, 0))
        k, v = update(cache[0], k), update(cache[1], v)
        cache = k, v, start + x.shape[1]
    keys = jnp.arange(k.shape[1])
    buckets = pe.t5_bucket(positions[:, None] - keys[None])
    table = w["encoding"]["parameters"][1]["table"]
    spec = None if heads is None else P("tensor", None, None)
    bias = table.at[:, buckets].get(out_sharding=spec).reshape(K, N // K, *buckets.shape)
    logits = einsum("btkgh,bskh->bkgts", q.reshape(B, -1, K, N // K, H), k) + bias
    logits = jnp.where(keys[None] <= positions[:, None], logits, -jnp.inf)
    out = einsum("bkgts,bskh->btkgh", jax.nn.softmax(logits), v).reshape(B, -1, N, H)
    y = einsum("btnh,nhd->btd", out, w["out"]["kernel"], out_sharding=tokens)
    return y if cache is None else (y, cache)


def nnx_layer(scheme, **options):
    """Returns a layer, made by one compiled program."""
    options = LAYER | {"position": scheme} | options
    return nnx.jit(lambda: pn.Attention(D, N, rngs=nnx.Rngs(0), **options))()


def gradients(f):
    """A step of training: the loss with the output, and the gradients of weights and inputs."""

    def loss(w, x):
        y = f(w, x)
        return (y**2).sum(), y

    return jax.jit(jax.value_and_grad(loss, (0, 1), has_aux=True))


@functools.cache
def on_one_device():
    layer = nnx_layer(SCHEME, scale=1.0)
    w = nnx.to_pure_dict(nnx.state(layer, nnx.Param))
    (loss, y), grads = gradients(by_hand)(w, X)
    return w, (loss, grads), y


DOCS = (pathlib.Path(__file__).parents[2] / "docs" / "flax.md").read_text()


def documented(row):
    """The numbers of a row of the table of collectives."""
    cells = re.search(rf"^\| {row} \|(.*)\|$", DOCS, re.M).group(1).split("|")
    return Counter(
        {n: int(c) for n, c in zip(COLLECTIVES.split("|"), cells, strict=True) if int(c)}
    )


@slow
@pytest.mark.parametrize(
    "kind", [pytest.param(AxisType.Auto, marks=slow), AxisType.Explicit], ids=str
)
def test_training_prefill_and_decode_have_the_collectives_of_a_layer_by_hand(kind):
    _, (loss, grads), expected = on_one_device()
    explicit = kind == AxisType.Explicit
    shardings = {"qkv_sharding": HEADS, "out_sharding": TOKENS} if explicit else {}
    with mesh_of(kind):
        implementation = "reference" if explicit else None  # Tiles take long to compile.
        options = {"scale": 1.0, "axis_names": NAMES, "implementation": implementation}
        layer = nnx_layer(SCHEME, **options)
        graph, state = nnx.split(layer)

        def run(state, x, cache=None):
            return nnx.merge(graph, state)(x, cache=cache, **shardings)

        counts, ((value, _), (grads_of_state, d_x)) = collectives(
            gradients(run), state, put(X, "data")
        )
        assert counts == documented("training step")
        grads_of_state = jax.device_get((value, nnx.to_pure_dict(grads_of_state), d_x))
        chex.assert_trees_all_close(
            grads_of_state, jax.device_get((loss, *grads)), rtol=1e-4, atol=1e-4
        )
        cache = layer.new_cache(B, S, qkv_sharding=HEADS if explicit else None)
        if not explicit:
            cache = jax.tree.map(lambda a: put(a, *(HEADS if a.ndim == 4 else ("data",))), cache)
        step = jax.jit(run, donate_argnums=2)
        for phase, part in (("prefill", slice(0, 33)), ("decode step", slice(33, 34))):
            counts, (y, cache) = collectives(step, state, put(X[:, part], "data"), cache)
            assert counts == documented(phase), phase
            np.testing.assert_allclose(y, expected[:, part], atol=2e-5)


@slow
def test_a_layer_by_hand_has_the_documented_collectives():
    w, _, _ = on_one_device()
    with mesh_of(AxisType.Explicit):
        layer_by_hand = functools.partial(by_hand, heads=HEADS, tokens=TOKENS)
        first = ("out", "encoding")  # The heads are the first axis, elsewhere the second.
        w = {
            name: jax.tree.map(
                lambda a, n=name: put(a, *(None,) * (n not in first), "tensor"), part
            )
            for name, part in w.items()
        }
        x = put(X, "data")
        assert collectives(gradients(layer_by_hand), w, x)[0] == documented("training step")
        cache = *(put(jnp.zeros((B, S, K, H)), *HEADS) for _ in "kv"), jnp.int32(0)
        step = jax.jit(layer_by_hand, donate_argnums=2)
        for phase, length in (("prefill", 33), ("decode step", 1)):
            counts, (_, cache) = collectives(step, w, put(X[:, :length], "data"), cache)
            assert counts == documented(phase), phase


@slow
def test_state_and_features_of_a_scheme_are_sharded_by_heads():
    """FoX has a sum per head in the cache, and an array per key and head."""
    plain = nnx_layer(pe.FoX(N, D))
    expected = jax.jit(lambda x: plain(x))(X[:, :2])
    with mesh_of(AxisType.Explicit):
        layer = nnx_layer(pe.FoX(N, D), axis_names=NAMES)
        cache = layer.new_cache(B, S, qkv_sharding=HEADS)
        step = jax.jit(
            lambda x, cache: layer(x, cache=cache, qkv_sharding=HEADS, out_sharding=TOKENS),
            donate_argnums=1,
        )
        for t in (0, 1):
            counts, (y, cache) = collectives(step, put(X[:, t : t + 1], "data"), cache)
            assert counts == documented("decode step")
            np.testing.assert_allclose(y[:, 0], expected[:, t], atol=2e-5)


@slow
def test_linen_layers_take_logical_names():
    w, _, expected = on_one_device()
    names = {"num_heads": "heads", "num_kv_heads": "kv_heads", "model_dim": "embed"}
    rules = [("heads", "tensor"), ("kv_heads", "tensor"), ("embed", None)]
    module = pl.Attention(N, position=SCHEME, scale=1.0, axis_names=names, **LAYER)
    with mesh_of(AxisType.Auto):
        with nn.logical_axis_rules(rules):
            shapes = jax.eval_shape(module.init, jax.random.key(0), X)
        specs = nn.logical_to_mesh(nn.get_partition_spec(shapes), rules)["params"]
        structure = jax.tree.structure(nn.meta.unbox(shapes["params"]))
        w = jax.tree.unflatten(structure, jax.tree.leaves(w))
        w = jax.tree.map(lambda a, spec: put(a, *spec), w, specs)
        run = jax.jit(lambda w, x: module.apply({"params": w}, x))
        counts, y = collectives(run, w, put(X, "data"))
    assert counts == documented("prefill")
    np.testing.assert_allclose(y, expected, atol=2e-5)


@slow
def test_a_linen_cache_on_explicit_axes():
    """The collection "cache" is sharded as `init` is told to shard k and v."""
    params, _, expected = on_one_device()
    options = LAYER | {"position": SCHEME, "scale": 1.0, "implementation": "reference"}
    module = pl.Attention(N, decode=True, **options)
    shardings = {"qkv_sharding": HEADS, "out_sharding": TOKENS}
    with mesh_of(AxisType.Explicit):
        x = put(X, "data")
        make = jax.jit(lambda x: module.init(jax.random.key(0), x, **shardings)["cache"])
        cache = make(x)
        assert jax.typeof(cache["kv_cache"].k).sharding.spec == HEADS
        step = jax.jit(
            lambda c, x: module.apply(
                {"params": params, "cache": c}, x, mutable=["cache"], **shardings
            )
        )
        for part in (slice(0, 33), slice(33, 34)):
            y, updated = step(cache, put(X[:, part], "data"))
            cache = updated["cache"]
            np.testing.assert_allclose(y, expected[:, part], atol=2e-5)


@slow
def test_more_devices_than_key_heads():
    """Key heads that do not divide the axis are not sharded: they have another name."""
    names, batch_only = {"num_heads": "tensor"}, P("data", None, None, None)
    plain = nnx_layer(pe.T5(N), num_kv_heads=2)
    expected = jax.jit(lambda x: plain(x))(X)
    with mesh_of(AxisType.Explicit):
        layer = nnx_layer(pe.T5(N), num_kv_heads=2, axis_names=names)
        shardings = {"qkv_sharding": HEADS, "kv_sharding": batch_only, "out_sharding": TOKENS}
        cache = layer.new_cache(B, S, qkv_sharding=batch_only)
        y, _ = jax.jit(lambda x, c: layer(x, cache=c, **shardings))(put(X, "data"), cache)
        np.testing.assert_allclose(y, expected, atol=2e-5)


@slow
def test_rows_on_devices_of_shard_map_need_no_collective():
    _, _, expected = on_one_device()
    layer = nnx_layer(SCHEME, scale=1.0, implementation="reference")
    graph, state = nnx.split(layer)

    def decode(state, x):
        layer = nnx.merge(graph, state)
        y, cache = layer(x[:, :-1], cache=layer.new_cache(x.shape[0], S))
        return jnp.concatenate([y, layer(x[:, -1:], cache=cache)[0]], 1)

    with mesh_of(AxisType.Auto, (4,), ("data",)):
        rows = P("data")
        mapped = jax.jit(jax.shard_map(decode, in_specs=(P(), rows), out_specs=rows))
        counts, y = collectives(mapped, state, put(X, "data"))
        assert not counts
        np.testing.assert_allclose(y, expected, atol=2e-5)
