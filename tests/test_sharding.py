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
from tests.support import SIZES, build, make_batch, slow, slow_but

LENGTH = 32


@functools.partial(jax.jit, static_argnums=0)
def new(scheme):
    """Returns new parameters and tokens."""
    return scheme.init(jax.random.key(0)), make_batch(length=LENGTH)


def run(scheme, params, tokens, positions, segments, order, method, kind, **options):
    """Loss and output on eight devices; tokens dealt out in `order`."""
    rows, cols, _ = scheme.features(params, tokens.x, tokens.q, tokens.k, positions, None, None)
    q = scheme.query(params, tokens.q, positions, rows)
    k = scheme.key(params, tokens.k, positions, cols)
    options = {"is_causal": True} | options
    if method is None:
        options |= {"rules": scheme.rules(params, rows, cols), "q_positions": positions}
        options |= {"q_segment_ids": segments, "implementation": "reference"}
        return pe.attention(q, k, tokens.v, **options)
    spread = PartitionSpec(None, "sequence")

    @functools.partial(jax.shard_map, in_specs=(spread, PartitionSpec()), out_specs=spread)
    def local(mine, params):
        q, k, v, rows, cols, positions, segments = mine
        places = {"q_positions": positions, "k_positions": positions, "q_segment_ids": segments}
        places |= {"k_segment_ids": segments, "rules": scheme.rules(params, rows, cols)}
        how = {"axis_name": "sequence", "method": method}
        return sequence_parallel_attention(q, k, v, **how, **places, **options)

    def deal(x):
        x = x[:, order]
        return jax.sharding.reshard(x, spread) if kind == AxisType.Explicit else x

    mine = jax.tree.map(deal, (q, k, tokens.v, rows, cols, positions, segments))
    out = local(mine, params)
    if kind == AxisType.Explicit:
        out = jax.sharding.reshard(out, PartitionSpec())
    return out[:, np.argsort(order)]


def eight(kind):
    return jax.set_mesh(jax.make_mesh((8,), ("sequence",), axis_types=(kind,)))


@slow
@pytest.mark.parametrize(
    ("name", "method", "kind"),
    [
        ("alibi", "all_gather", AxisType.Auto),
        pytest.param("shaw", "ring", AxisType.Explicit, marks=slow),
        pytest.param("alibi", "ring", AxisType.Auto, marks=slow),
    ],
    ids=str,
)
def test_a_sharded_sequence_gives_the_same_numbers(name, method, kind):
    scheme = build(pe.SCHEMES[name])
    params, tokens = new(scheme)
    segments = np.int32([[0] * 13 + [1] * 17 + [-1] * 2] * 2)
    positions = at.from_segment_ids(segments)
    weights = np.random.default_rng(9).normal(size=tokens.q.shape).astype(np.float32)

    def loss(params, tokens, method):
        order = zigzag(LENGTH, 8)
        out = run(scheme, params, tokens, positions, segments, order, method, kind)
        return (out * weights).sum(), out

    f = jax.jit(jax.value_and_grad(loss, (0, 1), has_aux=True), static_argnums=2)
    (_, expected), expected_grads = f(params, tokens, None)
    with eight(kind):
        (_, out), grads = f(params, tokens, method)
    np.testing.assert_allclose(out, expected, atol=1e-5)
    chex.assert_trees_all_close(jax.device_get(grads), jax.device_get(expected_grads), atol=5e-5)


@slow
def test_window_sinks_and_softcap_over_a_ring():
    """As in layers, of which `test_layers_over_a_sharded_sequence[ring]` has all three."""
    scheme = pe.ALiBi(SIZES["num_heads"])
    _, tokens = new(scheme)
    positions = np.tile(np.arange(LENGTH, dtype=np.int32), (2, 1))
    sinks = np.linspace(-1, 1, SIZES["num_heads"], dtype=np.float32)
    segments, options = np.zeros_like(positions), {"window": 7, "softcap": 5.0, "sinks": sinks}

    def compiled(*how):
        args = positions, segments, *how
        return jax.jit(lambda tokens: run(scheme, {}, tokens, *args, **options))(tokens)

    expected = compiled(None, None, None)
    with eight(AxisType.Auto):
        out = compiled(np.arange(LENGTH), "ring", AxisType.Auto)
    np.testing.assert_allclose(out, expected, atol=1e-5)


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


LAYERS = {  # The scheme, the method and the kind of mesh.
    "ring": (pe.chain(pe.RoPE(8), pe.T5(4), pe.FoX(4, 16)), "ring", AxisType.Auto),
    "explicit": (pe.chain(pe.RoPE(8), pe.T5(4)), "all_gather", AxisType.Explicit),
}


@slow
@pytest.mark.parametrize("gradients", [False, pytest.param(True, marks=slow)])
@pytest.mark.parametrize("case", slow_but(LAYERS, "explicit"))
def test_layers_over_a_sharded_sequence(case, gradients):
    """One argument of a layer, on a mesh that shards the batch too."""
    scheme, method, kind = LAYERS[case]
    settings = {"window": 20, "scale": 0.3, "softcap": 9.0, "qk_norm": pe.QKNorm()}
    spec = pe.LayerSpec(scheme, sinks="projected", **settings)
    spread = SequenceParallel("sequence", method, "reference")
    options = {"position": spec, "num_kv_heads": 2, "head_dim": 8, "is_causal": True}

    @nnx.jit
    def make_layers():
        return [
            Attention(16, 4, implementation=implementation, rngs=nnx.Rngs(0), **options)
            for implementation in ("reference", spread)
        ]

    layers = make_layers()
    x = np.random.default_rng(1).normal(size=(2, LENGTH, 16)).astype(np.float32)
    segments = np.int32([[0] * 13 + [1] * 17 + [-1] * 2, [0] * LENGTH])
    placed = {"segment_ids": segments, "positions": at.from_segment_ids(segments)}

    @nnx.jit
    def run(layer, x):
        def loss(layer, x):
            y = layer(x, **placed)
            return (y**2).sum(), y

        if not gradients:
            return loss(layer, x), ()
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


def test_what_goes_by_slots_is_refused():
    x = jnp.ones((1, 4, 2, 8))
    p = at.count_up(1, 4)
    with pytest.raises(TypeError, match="unexpected keyword argument 'mask'"):
        sequence_parallel_attention(x, x, x, axis_name="a", q_positions=p, k_positions=p, mask=p)
    with pytest.raises(ValueError, match=r"method must be one of .*, got 'tree'"):
        sequence_parallel_attention(
            x, x, x, axis_name="a", q_positions=p, k_positions=p, method="tree"
        )
    with pytest.raises(ValueError, match="q_positions and k_positions must be given; a shard"):
        sequence_parallel_attention(x, x, x, axis_name="a", q_positions=p, k_positions=None)
    with pytest.raises(ValueError, match="length=9 must be a multiple of twice_the_shards=4"):
        zigzag(9, 2)
