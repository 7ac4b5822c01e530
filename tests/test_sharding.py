"""A sequence over eight devices: outputs and all gradients equal one device's."""

import functools

import chex
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx
from jax.sharding import AxisType, PartitionSpec

import posenc_jax as pe
from posenc_jax import positions as at
from posenc_jax.nnx import Attention
from posenc_jax.sharding import (
    SequenceParallel,
    carried_in,
    sequence_parallel_attention,
    zigzag,
)
from tests.oracle import attend
from tests.support import SIZES, build, layer_of, make_batch, slow

LENGTH = 32


@functools.partial(jax.jit, static_argnums=0)
def new(scheme):
    """Returns new parameters and tokens."""
    return scheme.init(jax.random.key(0)), make_batch(length=LENGTH)


def eight(kind):
    return jax.set_mesh(jax.make_mesh((8,), ("sequence",), axis_types=(kind,)))


@pytest.mark.parametrize("method", ["ring", pytest.param("all_gather", marks=slow)])
def test_a_tree_over_a_sharded_sequence(method):
    """Its tokens are dealt out: `visible_until` travels with the keys."""
    scheme = pe.T5(SIZES["num_heads"])
    params, tokens = new(scheme)
    parents = np.maximum(np.arange(LENGTH) - 1 - np.arange(LENGTH) % 5, -1)
    tree = jax.device_get(jax.jit(at.from_tree)(np.tile(parents, (2, 1))))
    order = zigzag(LENGTH, 8)

    def loss(tokens, implementation):
        options = tree._asdict() | {"implementation": implementation, "is_causal": True}
        dealt = tokens.map(lambda x: x[:, order])
        options |= {name: options[name][:, order] for name in tree._fields}
        out, _ = pe.scheme_attention(scheme, params, dealt.q, dealt.k, dealt.v, **options)
        return (out**2).sum(), out

    f = jax.jit(jax.value_and_grad(loss, has_aux=True), static_argnums=1)
    (_, expected), expected_grads = f(tokens, "reference")
    with eight(AxisType.Auto):
        (_, out), grads = f(tokens, SequenceParallel("sequence", method))
    np.testing.assert_allclose(out, expected, atol=1e-5)
    chex.assert_trees_all_close(jax.device_get(grads), jax.device_get(expected_grads), atol=5e-5)


@slow
def test_running_sums_start_where_the_shard_before_ended():
    scheme = build(pe.FoX)
    params, tokens = new(scheme)
    expected = attend(scheme, params, tokens.q, tokens.k, tokens.v, x=tokens.x, is_causal=True)
    spread = PartitionSpec(None, "sequence")

    @jax.jit
    @functools.partial(jax.shard_map, in_specs=(spread, spread), out_specs=spread)
    def local(tokens, positions):
        arguments = params, tokens.x, tokens.q, tokens.k, positions, None
        _, _, total = scheme.features(*arguments, None)
        rows, cols, _ = scheme.features(*arguments, carried_in(total, "sequence"))
        options = {"q_positions": positions, "k_positions": positions, "is_causal": True}
        options |= {"axis_name": "sequence", "rules": scheme.rules(params, rows, cols)}
        return sequence_parallel_attention(tokens.q, tokens.k, tokens.v, **options)

    with eight(AxisType.Auto):
        np.testing.assert_allclose(local(tokens, at.count_up(2, LENGTH)), expected, atol=1e-5)


@slow
@pytest.mark.parametrize(
    "scheme, method, kind",
    [
        (pe.chain(pe.RoPE(8), pe.T5(4), pe.FoX(4, 16)), "ring", AxisType.Auto),
        (pe.Shaw(4, 8), "ring", AxisType.Explicit),
        (pe.chain(pe.RoPE(8), pe.T5(4)), "all_gather", AxisType.Explicit),
    ],
    ids=["ring", "explicit ring", "explicit"],
)
def test_layers_over_a_sharded_sequence(scheme, method, kind):
    """One argument of a layer, on a mesh that shards the batch too."""
    settings = {"window": 20, "scale": 0.3, "softcap": 9.0, "qk_norm": pe.QKNorm()}
    spec = pe.LayerSpec(scheme, sinks="projected", **settings)
    spread = SequenceParallel("sequence", method, "reference")
    options = {"position": spec, "num_kv_heads": 2, "head_dim": 8, "is_causal": True}

    layers = [
        layer_of(
            lambda rngs, word=word: Attention(16, 4, implementation=word, rngs=rngs, **options)
        )
        for word in ("reference", spread)
    ]
    x = np.random.default_rng(1).normal(size=(2, LENGTH, 16)).astype(np.float32)
    segments = np.int32([[0] * 13 + [1] * 17 + [-1] * 2, [0] * LENGTH])
    placed = {"segment_ids": segments, "positions": at.from_segment_ids(segments)}

    @nnx.jit
    def run(layer, x):
        def loss(layer, x):
            y = layer(x, **placed)
            return (y**2).sum(), y

        return nnx.value_and_grad(loss, argnums=(0, 1), has_aux=True)(layer, x)

    (_, expected), expected_grads = run(layers[0], x)
    mesh = jax.make_mesh((2, 4), ("data", "sequence"), axis_types=(kind,) * 2)
    with jax.set_mesh(mesh):
        sharded = jax.device_put(x, jax.NamedSharding(mesh, PartitionSpec("data", "sequence")))
        (_, out), grads = run(layers[1], sharded)
        assert out.sharding.spec[:2] == ("data", "sequence")
        with pytest.raises(ValueError, match="the 4 devices of axis 'sequence' must divide"):
            jax.eval_shape(layers[1], x[:, :1])
    np.testing.assert_allclose(out, expected, atol=1e-5)
    pure = (jax.device_get(jax.tree.leaves(g)) for g in (grads, expected_grads))
    chex.assert_trees_all_close(*pure, atol=2e-4)


def test_what_a_sharded_sequence_has_no_slots_for():
    x = np.ones((1, 8, 4, 8), np.float32)
    ring = SequenceParallel("sequence")

    def refuse(implementation, **options):  # It is known from shapes.
        jax.eval_shape(lambda x: pe.attention(x, x, x, **options, implementation=implementation), x)

    with eight(AxisType.Auto):
        with pytest.raises(NotImplementedError, match="mask goes by slots"):
            refuse(ring, mask=np.ones((1, 1, 8, 8), bool))
        with pytest.raises(NotImplementedError, match="dropout goes by slots"):
            refuse(ring, dropout_rate=0.1, dropout_key=jax.random.key(0))
        rules = build(pe.StickBreaking).rules({})
        with pytest.raises(NotImplementedError, match="whole rows of logits need all keys"):
            refuse(SequenceParallel("sequence", "ring"), rules=rules, is_causal=True)
        y = np.random.default_rng(0).normal(size=x.shape).astype(np.float32)
        out, expected = jax.jit(
            lambda: [
                pe.attention(y, y, y, rules=rules, is_causal=True, implementation=implementation)
                for implementation in (ring, "reference")
            ]
        )()  # By default these keys are gathered.
        np.testing.assert_allclose(out, expected, atol=1e-6)
        # Results of shards are merged by a log-sum-exp, which this one rounds.
        with pytest.raises(NotImplementedError, match="no exact log-sum-exp"):
            refuse(SequenceParallel("sequence", "ring", "jax"))
    with pytest.raises(ValueError, match=r"'sequence' must be an axis of the mesh"):
        refuse(ring)
    with pytest.raises(ValueError, match=r"method must be one of .*, got 'tree'"):
        SequenceParallel("sequence", "tree")


@pytest.mark.parametrize("method", ["ring", "all_gather"])
def test_sinks_are_checked_as_attention_checks_them(method):
    q, p = jnp.ones((1, 4, 2, 8)), at.count_up(1, 4)
    options = {"axis_name": "a", "q_positions": p, "k_positions": p, "method": method}
    with pytest.raises(ValueError, match=r"sinks must be \[N\] = \(2,\) or .*, got \(1,\)"):
        sequence_parallel_attention(q, q, q, sinks=jnp.ones(1), **options)
    stick = build(pe.StickBreaking)
    with pytest.raises(NotImplementedError, match="none for sinks to take a share of"):
        sequence_parallel_attention(q, q, q, sinks=jnp.ones(2), rules=stick.rules({}), **options)


def test_wrong_calls_are_refused():
    x, p = jnp.ones((1, 4, 2, 8)), at.count_up(1, 4)
    options = {"axis_name": "a", "q_positions": p, "k_positions": p}
    with pytest.raises(ValueError, match=r"method must be one of .*, got 'tree'"):
        sequence_parallel_attention(x, x, x, method="tree", **options)
    with pytest.raises(ValueError, match="q_positions and k_positions must be given; a shard"):
        sequence_parallel_attention(x, x, x, **options | {"k_positions": None})
    with pytest.raises(ValueError, match="length=9 must be a multiple of twice_the_shards=4"):
        zigzag(9, 2)
