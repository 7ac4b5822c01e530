"""`implementation="jax"` and "cudnn": exact where they do not refuse."""

import dataclasses

import chex
import jax
import jax.numpy as jnp
import numpy as np
import pytest

import posenc_jax as pe
from posenc_jax.engine import jax_nn
from posenc_jax.engine.api import choose, make_problem
from posenc_jax.engine.rule import as_tuple
from tests.engine.rules import explicit_mask
from tests.oracle import qkv
from tests.support import parameters, run, slow

Q, K, V = qkv(batch=2, length=12, heads=4, kv_heads=2)


def _blind():
    """Query 3 of row 1 sees nothing, and nobody sees key 5."""
    mask = np.random.default_rng(4).random((2, 1, 12, 12)) < 0.5
    mask[1, 0, 3] = mask[:, 0, :, 5] = False
    return mask


FIRE = pe.FIRE(num_heads=4).rules(parameters(pe.FIRE(num_heads=4)))
T5 = pe.T5(num_heads=4, num_buckets=8, max_distance=10, bidirectional=True)
TABLE = np.random.default_rng(5).normal(size=(4, 8)).astype(np.float32)


def _two_rules(table):
    return pe.ALiBi(num_heads=4, scaled=True).rules({}), *as_tuple(T5.rules({"table": table}))


def _slopes(implementation, has_rules, scale, arrays, options):
    def loss(q, k, v, table):
        rules = _two_rules(table) if has_rules is True else OF_ALL_HEADS if has_rules else ()
        how = options | {"scale": scale, "implementation": implementation}
        out = pe.attention(q, k, v, rules=rules, **how)
        return jnp.sum(out.astype(jnp.float32) ** 2), out

    return jax.grad(loss, (0, 1, 2, 3), has_aux=True)(*arrays)


@pytest.mark.parametrize(
    ("options", "masked", "has_rules"),
    [
        pytest.param({"window": (3, 1)}, False, False, marks=slow),
        pytest.param({"window": (3, 1)}, False, True, marks=slow),
        pytest.param({"is_causal": True, "window": 4}, True, False, marks=slow),
        ({"is_causal": True, "window": 4}, True, True),
        ({"window": (2**31 - 1, 1)}, False, False),  # JAX adds it to slots.
        pytest.param({"window": (2**31 - 1, 1)}, False, True, marks=slow),
    ],
)
def test_equals_the_reference(options, masked, has_rules):
    """Expected are the numbers of one mask, which is data: all options share a program."""
    options = options | ({"mask": _blind()} if masked else {})
    k, v = K.copy(), V.copy()
    if masked:
        k[:, 5] = v[:, 5] = np.nan
    arrays = Q, k, v, TABLE
    got = jax.jit(lambda arrays: _slopes("jax", has_rules, 0.2, arrays, options))(arrays)
    one_mask = explicit_mask(options, 2, 4, 12)
    expected = run(_slopes, ("reference", has_rules, 0.2), arrays, one_mask)
    chex.assert_trees_all_close(got, expected, atol=1e-5)


@pytest.fixture
def on_gpu(monkeypatch):
    """A GPU of compute capability 8.0, and what `jax.nn` computes on it."""
    asked = []
    attend = jax.nn.dot_product_attention

    def fake(*args, implementation, bias=None, **options):
        asked.append(implementation)
        dtype, window, mask = args[0].dtype, options.get("local_window_size"), options.get("mask")
        assert bias is None or (bias.dtype, bias.shape[:2]) == (dtype, (1, args[0].shape[2]))
        assert bias is None or mask is None
        assert window is None or options["is_causal"]
        *args, bias = jax.tree.map(lambda x: x.astype(jnp.float32), (*args, bias))
        if mask is not None:  # It adds a number to hidden logits.
            bias = jnp.where(options.pop("mask"), 0.0, float(jax_nn._HIDDEN[dtype.name]))
        return attend(*args, bias, **options, implementation="xla").astype(dtype)

    monkeypatch.setattr(jax.nn, "dot_product_attention", fake)
    monkeypatch.setattr(jax_nn, "_compute_capability", lambda platform: 8.0)
    return asked


def _problem(q, k, v, **options):
    return make_problem(q, k, v, as_tuple(options.pop("rules", ())), pe.AttentionCall(**options))


def _slope(slope, head, q, k):
    return -slope * jnp.abs(q - k).astype(jnp.float32)


OF_ALL_HEADS = pe.LogitBias(_slope, shared=jnp.float32(0.1), relative=True)


def test_cudnn_rounds_a_bias_little(on_gpu):
    """Entries of ten are rounded by up to 0.02; the table's gradient would be 58 times as wrong."""
    q, k, v = (x.astype(jnp.bfloat16) for x in qkv(batch=2, length=64, heads=4, kv_heads=4, dim=32))

    def loss(table, implementation, dtype):
        arrays, rules = (x.astype(dtype) for x in (q, k, v)), _two_rules(table)
        out = pe.attention(*arrays, rules=rules, is_causal=True, implementation=implementation)
        return jnp.sum(out.astype(jnp.float32) ** 2), out

    run = jax.jit(jax.grad(loss, has_aux=True), static_argnums=(1, 2))
    table = jnp.asarray(4.0 * TABLE)
    expected = run(table, "reference", jnp.float32)

    def errors(implementation):
        got = run(table, implementation, jnp.bfloat16)
        return [
            float(np.max(np.abs(np.float32(x) - y)) / np.max(np.abs(y)))
            for x, y in zip(got, expected, strict=True)
        ]

    of_cudnn = errors("cudnn")
    assert on_gpu == ["cudnn"]
    assert np.all(np.less(of_cudnn, 3.0 * np.array(errors("xla")))), of_cudnn


def _positions(of_queries):
    return {"q_positions": of_queries, "k_positions": np.arange(12)}


# Padding on the left and two documents; three documents.
PACKED = {"q_segment_ids": np.repeat([[-1, 0, 1], [0, 1, 2]], [3, 4, 5], axis=1).astype(np.int32)}
HIDING = {
    "packed": PACKED,
    "packed, causal, window": PACKED | {"is_causal": True, "window": 3},
    "mask of heads": {"mask": np.random.default_rng(6).random((2, 4, 12, 12)) < 0.6},
    "blind": {"mask": _blind(), "is_causal": True, "window": 4},
    "window of both sides": {"window": (3, 1)},
    "prefix": {"is_causal": True, "prefix_length": np.array([0, 7], np.int32)},
    "until": {"k_visible_until": np.arange(2, 26).reshape(2, 12).astype(np.int32)},
    "causal window": {"is_causal": True, "window": 4},  # cuDNN has it.
    "nothing": {},
    "later queries": {"is_causal": True, **_positions(np.arange(5, 17))},
    "far queries": {"window": (4, 1), **_positions(np.arange(0, 24, 2))},
}


# With rules the array of a row alone and that of several rows have other axes.
QUICK = {("window of both sides", False), ("prefix", False), ("until", True)}
QUICK |= {("causal window", False), ("nothing", "of all heads")}
CASES = [(name, False) for name in HIDING] + [("nothing", "of all heads")]
CASES += [(name, True) for name in HIDING if "queries" not in name]


@pytest.mark.parametrize(
    ("name", "has_rules"),
    [pytest.param(*case, marks=() if case in QUICK else slow) for case in CASES],
)
def test_cudnn_equals_the_reference(on_gpu, name, has_rules):
    """Outputs and gradients within the rounding of float16; expected are those of one mask.

    Padding is NaN, and zero where it is expected.
    """
    padding = np.equal(HIDING[name].get("q_segment_ids", np.zeros((2, 12))), -1)[..., None, None]
    bad, good = (
        (*(np.where(padding, x, y).astype(np.float16) for y in (Q, K, V)), TABLE)
        for x in (np.nan, 0.0)
    )
    got = jax.jit(lambda arrays: _slopes("cudnn", has_rules, None, arrays, HIDING[name]))(bad)
    assert on_gpu == ["cudnn"]
    one_mask = explicit_mask(HIDING[name], 2, 4, 12)
    expected = run(_slopes, ("reference", has_rules, None), good, one_mask)
    for x, y in zip(jax.tree.leaves(got), jax.tree.leaves(expected), strict=True):
        # Within three digits of the greatest number, as of float16.
        np.testing.assert_allclose(x, y, rtol=0, atol=3e-3 * float(np.abs(y).max() + 1e-3))


@pytest.mark.parametrize(
    ("word", "options", "message"),
    [
        ("jax", {"rules": FIRE}, "rules but biases by distance"),
        (
            "jax",
            {"rules": T5.rules({"table": TABLE}), "contiguous": True}
            | dict.fromkeys(("q_coordinates", "k_coordinates"), np.zeros((2, 2, 12), np.int32)),
            "rules but biases by distance",
        ),
        ("jax", {"rules": OF_ALL_HEADS, "q_positions": 2 * np.arange(12)}, "positions"),
        ("jax", {"sinks": jnp.zeros(4)}, "sinks"),
        ("jax", {"v": V}, "several dtypes"),
        ("jax", {"softcap": 2.0}, "softcap"),
        ("jax", {"return_lse": True}, "log-sum-exp"),
        ("jax", {"q_segment_ids": np.zeros((2, 12), np.int32)}, "segments"),
        ("jax", {"is_causal": True, **_positions(np.arange(12))}, "posi"),
        ("cudnn", {"softcap": 2.0}, "no softcap"),
        ("cudnn", {"rules": FIRE}, "biases by distance"),
        ("cudnn", {"rules": OF_ALL_HEADS, "q_positions": 2 * np.arange(12)}, "of its own"),
    ],
)
def test_refuses_what_it_cannot_do(on_gpu, word, options, message):
    arrays = {n: jnp.asarray(x, jnp.bfloat16) for n, x in (("q", Q), ("k", K), ("v", V))}
    with pytest.raises(NotImplementedError, match=message):
        pe.attention(**arrays | options, implementation=word)


def test_cudnn_needs_a_gpu_of_its_dtypes_and_head_dims(on_gpu, monkeypatch):
    def message(q, **options):
        problem = _problem(q, q, q, **options)
        return jax_nn.CuDNN().refusal(dataclasses.replace(problem, needs_lse=False))

    half = jnp.zeros((1, 64, 2, 136), jnp.bfloat16)
    assert message(half[..., :128]) is None
    assert "at most 128" in message(half)
    assert "multiple of 8" in message(half[..., :36])
    assert "bfloat16" in message(half[..., :128].astype(jnp.float32))
    monkeypatch.setattr(jax_nn, "_compute_capability", lambda platform: 9.0)
    assert message(half) is None
    assert "even" in message(half[:, 1:], rules=T5.rules({"table": TABLE[:2]}))
    assert "even" in message(half[:, 1:], mask=np.ones((1, 1, 63, 63), bool))
    long, ids = jnp.zeros((1, 2**14 + 2, 1, 8), jnp.bfloat16), np.zeros((1, 2**14 + 2), np.int32)
    assert message(long) is None
    assert "more than 268,435,456 numbers" in message(long, q_segment_ids=ids)
    monkeypatch.setattr(jax_nn, "_compute_capability", lambda platform: 7.5)
    assert "8.0 or later" in message(half)
    monkeypatch.undo()
    assert "NVIDIA GPU" in message(half)


def test_cudnn_with_rules_needs_all_heads(on_gpu):
    """Of q with a part of the heads, JAX's partitioning would pair a bias with all of them."""
    rules = pe.T5(num_heads=4).rules({"table": jnp.zeros((4, 32))})

    def reason(spec, kind, rules=rules, **options):
        mesh = jax.make_mesh((2, 2), ("data", "heads"), axis_types=(kind, kind))
        with jax.set_mesh(mesh):
            q = jnp.zeros((2, 64, 4, 64), jnp.bfloat16)
            q = jax.device_put(q, jax.NamedSharding(mesh, jax.P(*spec)))
            problem = _problem(q, q, q, rules=rules, **options)
            return jax_nn.CuDNN().refusal(dataclasses.replace(problem, needs_lse=False))

    explicit, auto = jax.sharding.AxisType.Explicit, jax.sharding.AxisType.Auto
    assert reason(("data",), explicit) is None
    assert "heads" in reason((None, None, "heads"), explicit)
    assert "automatic axes" in reason(("data",), auto)
    assert "jax.shard_map" in reason(("data",), explicit, (), mask=np.ones((2, 1, 64, 64), bool))


def test_none_chooses_cudnn_on_gpus_where_it_serves(on_gpu):
    def chosen(q, needs_lse=False, **options):
        problem = dataclasses.replace(_problem(q, q, q, **options), needs_lse=needs_lse)
        return choose(dataclasses.replace(problem, platform="gpu")).name

    half = jnp.zeros((1, 64, 4, 64), jnp.bfloat16)
    assert chosen(half, is_causal=True) == "cudnn"
    assert chosen(half, needs_lse=True) == "xla"
    assert chosen(half.astype(jnp.float32)) == "xla"
    assert chosen(half, rules=pe.ALiBi(num_heads=4).rules({})) == "xla"
    assert chosen(half, mask=np.ones((1, 1, 64, 64), bool)) == "xla"
    assert chosen(half, q_segment_ids=np.zeros((1, 64), np.int32)) == "xla"
    assert chosen(half[:, :1]) == "dense"
