"""Each implementation against the reference, by rule and feature, and against float64.

Masks are large finite numbers too. The first keys are padding there: their own queries are masked
as a whole by the number, and get the mean of the values where it is low. Only -inf hides a key.
"""

import dataclasses
import functools

import chex
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import AxisType

import posenc_jax as pe
from posenc_jax.engine.blocks import Blocks
from posenc_jax.engine.dense import Dense
from posenc_jax.engine.xla import XLA
from posenc_jax.kernels.gpu.implementation import PallasGPU
from posenc_jax.kernels.operands import LOG2E
from posenc_jax.kernels.tpu.implementation import PallasTPU
from posenc_jax.sharding import SequenceParallel
from tests import oracle
from tests.engine.rules import KINDS, explicit_mask
from tests.kernels.kernel_cases import arrays_of, assert_close, described
from tests.support import gpu_interpreted, gpu_lowered, slow

B, T, N, K, H, V = 2, 37, 4, 2, 8, 8
# Many tiles, of other shapes forward than backward, and a ragged end.
SMALL_TILES = XLA(Blocks(16, 8), Blocks(8, 16), pairs_at_once=64, row_block=8 * B * N * T)
HEADS, PAD = 6, 3
LEAST = float(np.finfo(np.float32).min)
KERNELS = PallasTPU(Blocks(128, 128), Blocks(128, 128), interpret=True)
IMPLEMENTATIONS = {"xla": SMALL_TILES, "dense": Dense(block=5 * B * N * T)}


def _segments():
    ids = np.zeros((B, T), np.int32)
    ids[0, 11:], ids[0, 23:], ids[1, :8], ids[0, 33:] = 1, 2, -1, -1
    return ids


def _positions():
    order = np.random.default_rng(5).permutation(T).astype(np.int32)
    return {"q_positions": order, "k_positions": order}


def _until():
    """Ends of branches, most of them 0 to 11 positions after their token; one hides its token."""
    until = np.arange(T) + np.random.default_rng(9).integers(1, 13, (B, T))
    until[:, 17] = 3
    until[:, :8] = np.arange(20, 28)  # Within a block of queries.
    return until.astype(np.int32)


def _striped(b, h, q_idx, kv_idx):
    return (q_idx // 8 - kv_idx // 8) % 3 != 1


def _of_rows(b, h, q_idx, kv_idx, groups):
    """Groups see others by head and row, and within them every other token."""
    group, other = groups[q_idx], groups[kv_idx]
    return ((group + h) % 4 == other) | ((group == other) & ((q_idx + kv_idx + b) % 2 == 0))


FEATURES = {
    "plain": dict,
    "causal": lambda: {"is_causal": True},
    "window": lambda: {"is_causal": True, "window": 9},
    "two_sided_window": lambda: {
        "window": (7, 3),
        "sinks": np.linspace(-2.0, 3.0, B * T * N, dtype=np.float32).reshape(B, T, N),
    },
    "segments": lambda: {"is_causal": True, "q_segment_ids": _segments()},
    "window_with_sinks": lambda: {
        "is_causal": True,
        "window": pe.SlidingWindow(9, num_sink_tokens=3),
        "q_segment_ids": _segments(),
        "prefix_length": np.array([0, 5], np.int32),
    },
    "images": lambda: {
        "is_causal": True,
        "window": pe.SlidingWindow((12, 20), by="coordinates"),
        **dict.fromkeys(("q_positions", "k_positions"), np.arange(T) // 5),
        "q_coordinates": np.arange(T, dtype=np.int32),
    },
    "softcap_sinks_dropout": lambda: {
        "is_causal": True,
        "softcap": 3.0,
        "dropout_rate": 0.3,
        "dropout_key": jax.random.key(8),
        "sinks": np.linspace(-1.0, 2.0, N, dtype=np.float32),
    },
    "prefix_mask": lambda: {
        "is_causal": True,
        "prefix_length": np.array([4, 20], np.int32),
        "mask": np.random.default_rng(6).random((1, N, T, T)) < 0.4,
    },
    "block_mask": lambda: {"is_causal": True, "mask": pe.block_mask(_striped, T, T, block_size=8)},
    "block_mask_of_rows": lambda: {
        "mask": pe.block_mask(
            _of_rows, T, T, np.arange(T) // 9, batch=B, num_heads=N, block_size=5
        ),
        "q_segment_ids": _segments(),
    },
    "permuted_segments": lambda: {
        "is_causal": True,
        "window": 20,
        "q_segment_ids": _segments(),
        **_positions(),
    },
    "until": lambda: {"is_causal": True, "k_visible_until": _until()},
    "permuted_until": lambda: {
        "window": 20,
        "q_segment_ids": _segments(),
        "k_visible_until": _until()[0],
        **_positions(),
    },
    "chunk": lambda: {
        "is_causal": True,
        "q_positions": np.arange(T - 6, T, dtype=np.int32),
        "k_positions": np.arange(T, dtype=np.int32),
    },
}
# Each kind of rule and feature; rules in one call share its program.
CASES = [
    (("narrow",), "softcap_sinks_dropout", "xla"),
    (("alibi",), "two_sided_window", "xla"),
    (("t5",), "causal", "xla"),
    (("none",), "prefix_mask", "xla"),
    (("none",), "until", "xla"),
    (("alibi",), "window_with_sinks", "xla"),
    (("none",), "images", "xla"),
    (("shaw",), "permuted_segments", "xla"),  # Alone: the horizon is the largest of all rules.
    (("none",), "segments", "xla"),
]
MORE_CASES = [
    (("wide", "alibi"), "two_sided_window", "xla"),
    (("fox", "separable", "all_pairs"), "chunk", "xla"),
    (("whole", "shaw"), "softcap_sinks_dropout", "dense"),
]
# Each rule alone, with a third of the features.
MORE_CASES += [
    ((kind,), feature, "dense" if kind == "whole" else "xla")
    for n, kind in enumerate(KINDS)
    for feature in list(FEATURES)[n % 3 :: 3]
    if ((kind,), feature, "xla") not in CASES
    and (kind, feature) != ("two_axes", "chunk")  # Its coordinates are of all tokens.
]


def _case(kinds, options):
    """Returns the static options, the arrays, the weights of the loss and the other options."""
    queries = options["q_positions"].shape[-1] if "q_positions" in options else T
    random = np.random.default_rng(0)

    def normal(*shape):
        return random.normal(size=shape).astype(np.float32)

    arrays = {
        "q": normal(B, queries, N, H),
        "k": normal(B, T, K, H),
        "v": normal(B, T, K, V),
        "params": [KINDS[kind].make(random, N, H) for kind in kinds],
        "sinks": options.get("sinks"),
    }
    if axes := max(KINDS[kind].axes for kind in kinds):
        # Float coordinates, so that these have gradients too.
        arrays["at"] = 3 * normal(axes, B, T)
    options = {n: x for n, x in options.items() if n != "sinks"}
    types = jax.Array | np.ndarray | pe.BlockMask
    dynamic = {n: x for n, x in options.items() if isinstance(x, types)}
    weights = {"out": normal(B, queries, N, V), "lse": normal(B, queries, N)}
    static = tuple((n, x) for n, x in options.items() if n not in dynamic)
    return static, arrays, weights, dynamic


@functools.partial(jax.jit, static_argnums=(0, 1, 2))
def _outcome(implementation, kinds, static, arrays, weights, dynamic):
    """The output, the log-sum-exp, and the gradients of both to all that can have one."""

    def loss(arrays):
        q, k, v = (arrays[n] for n in "qkv")
        places = {}
        if "at" in arrays:
            places = {"q_coordinates": arrays["at"], "k_coordinates": arrays["at"] + 0.25}
        params = zip(kinds, arrays["params"], strict=True)
        rules = tuple(r for kind, x in params for r in KINDS[kind].rules(x, q, k))
        options = {"rules": rules, "sinks": arrays["sinks"], "implementation": implementation}
        options |= places | dict(static) | dynamic
        out, lse = pe.attention(q, k, v, return_lse=True, **options)
        seen = ~jnp.isneginf(lse)
        lse = jnp.where(seen, lse, 0.0)
        total = jnp.sum(out * weights["out"]) + jnp.sum(lse * weights["lse"])
        return total, (out, lse, seen)

    return jax.grad(loss, has_aux=True)(arrays)


@pytest.mark.parametrize(
    ("kinds", "feature", "implementation"),
    [*CASES, *(pytest.param(*case, marks=slow) for case in MORE_CASES)],
    ids=lambda x: x if isinstance(x, str) else "+".join(x),
)
def test_equals_the_reference(kinds, feature, implementation):
    options = explicit_mask(FEATURES[feature](), B, N, T)
    if kinds == ("none",):  # Nothing reads coordinates: all features share one program.
        options.pop("q_coordinates", None)
    static, *arrays = _case(kinds, options)
    expected = _outcome("reference", kinds, static, *arrays)
    static, *arrays = _case(kinds, FEATURES[feature]())
    got = _outcome(IMPLEMENTATIONS[implementation], kinds, static, *arrays)
    chex.assert_tree_all_finite(got[0])
    # Of the greatest entry: gradients of parameters sum over all pairs, and some entries cancel.
    # One of "unbounded" is 2.0518 beside 588.5 in float64, where the reference is 4e-4 away from
    # it and the tiles are 2e-4.
    assert_close(got, expected, 1e-5)
    # Neither is the test blind: every gradient is there.
    for leaf in jax.tree.leaves(got[0]):
        assert np.any(np.asarray(leaf) != 0)


def test_the_reference_reads_what_is_seen_from_the_options():
    """All features in one program; gradients reach hidden pairs by the mask alone."""
    cases = {}
    for name in (f for f in FEATURES if "sinks" not in f and f != "block_mask_of_rows"):
        static, arrays, _, dynamic = _case(("none",), FEATURES[name]())
        cases[name] = [arrays[n] for n in "qkv"], dict(static) | dynamic

    @jax.jit
    def outcomes():
        return {
            name: pe.attention(*qkv, **options, return_lse=True, implementation="reference")
            for name, (qkv, options) in cases.items()
        }

    for name, got in outcomes().items():
        mask = explicit_mask(FEATURES[name](), B, N, T)["mask"]
        for row, seen in enumerate(mask):
            arrays = [x[row : row + 1] for x in cases[name][0]]
            zeros = np.zeros(arrays[0].shape), np.zeros(arrays[0].shape[:3])
            expected = oracle.attention(arrays, np.zeros(seen.shape, "f4"), seen, *zeros)
            for x, y in zip(got, expected, strict=False):
                np.testing.assert_allclose(x[row : row + 1], y, atol=1e-5, err_msg=name)


def _later_or_padding(number, head, q, k):
    return jnp.where((k > q) | (k < PAD), number, 0.0)


def _near(number, head, q, k):
    return jnp.where(q - k < PAD, number, 0.0)


def _hidden(rule, length):
    """Returns the pairs [T, T] that a rule masks by the number."""
    i, j = np.arange(length)[:, None], np.arange(length)[None]
    return i - j < PAD if rule is _near else (j > i) | (j < PAD)


def _rule(rule, number, length):
    if rule is None:
        bias = np.where(_hidden(rule, length), np.float32(number), np.float32(0))
        return pe.DenseBias(jnp.asarray(bias)[None, None])
    return pe.LogitBias(rule, shared=jnp.float32(number), relative=rule is _near)


@functools.partial(jax.jit, static_argnums=0)
def _results(implementation, arrays, rule, sinks, *cotangents):
    def attend(arrays, rule, sinks):
        options = {"implementation": implementation, "return_lse": True}
        return pe.attention(*arrays, rules=rule, sinks=sinks, **options)

    results, pull = jax.vjp(attend, arrays, rule, sinks)
    return results, pull(cotangents)


def _compare(got, want, implementation, hidden):
    """Compares with float64."""
    (out, lse), (grads, d_rule, d_sinks) = jax.device_get(got)
    assert_close((out, *grads, d_sinks), (want[0], *want[2:5], want[6]))
    least = LEAST / LOG2E if isinstance(implementation, PallasTPU) else LEAST
    np.testing.assert_allclose(lse, np.maximum(want[1], least), rtol=1e-6, atol=1e-5)
    of_rule, d_logits = np.squeeze(*jax.tree.leaves(d_rule)), want[5].sum(0)
    if of_rule.ndim:
        assert_close(of_rule, d_logits)
    else:  # Single entries cancel.
        limit = 3e-5 * np.abs(d_logits).sum()
        np.testing.assert_allclose(of_rule, d_logits[hidden].sum(), atol=limit)


@pytest.mark.parametrize(
    ("implementation", "rule", "length"),
    [
        ("reference", None, 63),
        (Dense(block=2**12), None, 63),
        (KERNELS, _near, 63),
        pytest.param(SMALL_TILES, _near, 63, marks=slow),
        pytest.param(SMALL_TILES, _later_or_padding, 63, marks=slow),
        pytest.param(KERNELS, None, 130, marks=slow),
        pytest.param(KERNELS, _later_or_padding, 63, marks=slow),
        pytest.param(XLA(), None, 700, marks=slow),
    ],
    ids=lambda x: getattr(x, "__name__", str(x)),
)
def test_rows_masked_by_a_number(implementation, rule, length):
    """Output, log-sum-exp and all gradients; sinks of the number are logits too."""
    _compare_numbers(implementation, rule, length)


def _compare_numbers(implementation, rule, length):
    arrays, random = oracle.qkv(length=length), np.random.default_rng(length)
    d_out, d_lse = (random.normal(size=(1, length, HEADS, *x)).astype("f4") for x in ((8,), ()))
    hidden, seen = _hidden(rule, length), np.ones((length, length), bool)
    for number in (-50.0, -1e9, -1e30, 0.7 * LEAST, LEAST):
        added = np.where(hidden, np.float32(number), np.float32(0))
        masked = _rule(rule, number, length)
        for sinks in ([-np.inf] * HEADS, [number, 0.0, -np.inf, -3.0, -1e9, number]):
            sinks = np.array(sinks, "f4")
            want = oracle.attention(arrays, added, seen, d_out, d_lse, sinks=sinks)
            got = _results(implementation, arrays, masked, sinks, d_out, d_lse)
            _compare(got, want, implementation, hidden)


@pytest.mark.parametrize("inner", [SMALL_TILES, pytest.param("dense", marks=slow)], ids=str)
def test_rows_masked_by_a_number_over_a_ring(inner):
    """Devices have different numbers of keys in a row, and all tops are -1e9."""
    with jax.set_mesh(jax.make_mesh((8,), ("sequence",), axis_types=(AxisType.Auto,))):
        _compare_numbers(SequenceParallel("sequence", "ring", inner), _later_or_padding, 64)


OPTIMISED = {"xla_backend_optimization_level": 3, "xla_llvm_disable_expensive_passes": False}
"""What users run; tests compile without LLVM's optimiser."""


@slow
def test_products_of_a_scaled_mask_are_rounded_in_both_passes():
    """XLA fused them with the sum after them in one pass: exp(64) times the gradient."""
    q, k, v, g = np.random.default_rng(0).normal(size=(4, 1, 300, 2, 3)).astype(np.float32)

    def loss(q, k, v, number):
        rule = pe.LogitBias(_on_some_rows, shared=number, scaled=True)
        return (pe.attention(q, k, v, rules=rule, scale=0.9, implementation="xla") * g).sum()

    slopes = jax.jit(jax.grad(loss, (0, 1, 2)), compiler_options=OPTIMISED)
    rule = np.asarray(_on_some_rows(np.float32(-1e9), None, *np.ogrid[:300, :300]))
    added = np.float32(0.9) * rule[None]
    seen, d_lse = np.ones((300, 300), bool), np.zeros((1, 300, 2))
    _, _, *want, _, _ = oracle.attention((q, k, v), added, seen, g, d_lse, scale=0.9)
    for got, exact in zip(slopes(q, k, v, jnp.float32(-1e9)), want, strict=True):
        np.testing.assert_allclose(got, exact, atol=2e-5)


def _on_some_rows(number, head, i, j):
    return jnp.where((j % 5 == 2) | (i % 3 == 1), number, 0.0)


LARGE_TILES = XLA(Blocks(16, 8), Blocks(8, 16))
# Larger blocks in the backward pass: more tiles than the bias has.
UNEVEN_KERNELS = PallasTPU(Blocks(128, 128), Blocks(256, 384), interpret=True)
OF_GPU = PallasGPU(interpret=True)
# The first axes of the bias are those of two rows and all heads, or one.
EXACT_CASES = [
    (Dense(block=2**12), 63, 3, "B", np.float32, 4.0),
    (LARGE_TILES, 63, 3, "N", np.float32, None),
    (UNEVEN_KERNELS, 200, 3, "B", np.float32, 4.0),
]
EXACT_CASES += [
    pytest.param(*case, marks=[gpu_interpreted, slow] if case[0] == OF_GPU else slow)
    for case in [
        ("reference", 63, 3, "N", np.float32, 4.0),
        (LARGE_TILES, 63, 3, "B", np.float32, 4.0),
        (UNEVEN_KERNELS, 200, 3, "N", jnp.bfloat16, None),
        (UNEVEN_KERNELS, 63, 3, "BN", np.float32, None),
        (OF_GPU, 63, 1, "", jnp.bfloat16, None),
        (OF_GPU, 200, 3, "B", jnp.bfloat16, None),
        (OF_GPU, 200, 3, "N", np.float32, None),
    ]
]


@pytest.mark.parametrize(
    ("implementation", "length", "kv_heads", "axes", "dtype", "softcap"), EXACT_CASES, ids=str
)
def test_output_and_gradients_equal_float64(implementation, length, kv_heads, axes, dtype, softcap):
    """Beside a rule by distance, with a window, sinks, segments, and padding in each row.

    -inf hides keys as `mask` does: NaN and inf in a key that it hides from all queries, and NaN for
    later keys, reach no output and no gradient. A query without keys has zeros and a log-sum-exp of
    -inf. Sinks of padding are not read, and -inf is none.
    """
    random, heads = np.random.default_rng(1), 2 * kv_heads
    lead = 2 if "B" in axes else 1, heads if "N" in axes else 1
    shapes = [(2, length, n, 24) for n in (heads, kv_heads, kv_heads, heads)]
    shapes += [(2, length, heads)] * 2
    q, k, v, d_out, d_lse, sinks = (random.normal(size=x).astype("f4") for x in shapes)
    at, ends = np.arange(length), np.array([[length - 5], [40]])
    ids = np.where(at < ends, at // 25, -1).astype(np.int32)
    later = np.triu(np.ones((length, length), bool), 1)
    hidden = random.random((length, length)) < 0.3
    hidden[7], hidden[:, [5, 30]] = True, True
    bias = random.normal(size=(*lead, length, length))
    bias = jnp.asarray(np.where(later, np.nan, np.where(hidden, -np.inf, bias)), dtype)
    numbers = {"scale": 0.3, "softcap": softcap}
    options = numbers | {"q_segment_ids": ids, "is_causal": True, "window": 20}
    alibi = pe.ALiBi(num_heads=heads).rules({})

    @jax.jit
    def run(*arrays):
        def attend(q, k, v, sinks, bias, slopes):
            rules = pe.DenseBias(bias), dataclasses.replace(alibi, heads=slopes)
            how = {"rules": rules, "sinks": sinks, "implementation": implementation}
            out, lse = pe.attention(q, k, v, return_lse=True, **how, **options)
            return (out, jnp.where(jnp.isneginf(lse), 0.0, lse)), lse

        (out, _), pull, lse = jax.vjp(attend, *arrays, has_aux=True)
        return out, lse, *pull((d_out, d_lse))

    real = ids >= 0
    d_out = np.where(real[..., None, None], d_out, 0.0)
    sinks[:, 7] = sinks[..., 1] = -np.inf
    sinks = np.where(real[..., None], sinks, 0.0)
    distances, rows = np.abs(at[:, None] - at).astype("f4"), []
    exact = np.where(later | hidden, 0.0, np.asarray(bias, "f4"))
    exact = exact - np.asarray(alibi.heads)[:, None, None] * distances
    for row in range(2):
        sees = (ids[row, :, None] == ids[row]) & real[row] & ~later & ~hidden & (distances < 20)
        *arrays, g, of_lse = (x[row : row + 1] for x in (q, k, v, d_out, d_lse))
        added, of_row = exact[min(row, lead[0] - 1)], numbers | {"sinks": sinks[row]}
        rows.append(oracle.attention(arrays, added, sees, g, of_lse, **of_row))
    *expected, d_logits, d_sinks = zip(*rows, strict=True)
    expected = [np.concatenate(x) for x in expected]
    expected.append(np.where(real[..., None], d_sinks, 0.0))
    shared = tuple(axis for axis in (0, 1) if lead[axis] == 1)
    of_bias = np.stack(d_logits).sum(shared, keepdims=True)
    for x in (k, v):
        x[:, 5], x[:, 30] = np.nan, np.inf
    sinks[~real] = np.nan
    *got, d_bias, d_slopes = run(q, k, v, sinks.astype("f4"), bias, alibi.heads)
    assert_close(got, expected, 3e-6)
    assert d_bias.dtype == dtype
    assert_close(d_bias, of_bias, 3e-6 if dtype == np.float32 else 2.0**-8)
    assert_close(d_slopes, -np.einsum("bnts,ts->n", d_logits, distances), 1e-5)


def test_it_belongs_to_slots_when_a_rule_sorts_the_keys():
    """Stick-breaking needs keys in the order of their positions."""
    random, (q, k, v) = np.random.default_rng(0), oracle.qkv(length=9)
    bias, order = random.normal(size=(1, 6, 9, 9)).astype("f4"), random.permutation(9)

    @jax.jit
    def attend(bias, q, k, v, positions):
        rules = pe.DenseBias(bias), pe.StickBreaking().rules({})
        return pe.attention(q, k, v, rules=rules, q_positions=positions, is_causal=True)

    straight = attend(bias, q, k, v, np.arange(9))
    moved = attend(bias[:, :, order][..., order], *(x[:, order] for x in (q, k, v)), order)
    np.testing.assert_allclose(moved, straight[:, order], atol=1e-5)


@pytest.mark.parametrize(
    "pairs, error, message",
    [
        (np.zeros((9, 9), "f4"), ValueError, r"\[B or 1, N or 1, T, S\] with B, N, T, S = \(3, 6"),
        (np.zeros((3, 3, 9, 9), "f4"), ValueError, r"got \(3, 3, 9, 9\)"),
        (np.zeros((1, 1, 9, 1), "f4"), ValueError, r"got \(1, 1, 9, 1\)"),
        (np.zeros((1, 1, 9, 9), bool), TypeError, "a boolean array is a mask"),
    ],
)
def test_other_arrays_are_refused(pairs, error, message):
    with pytest.raises(error, match=message):
        pe.attention(*oracle.qkv(batch=3, length=9), rules=pe.DenseBias(jnp.asarray(pairs)))


@pytest.mark.parametrize("kernels", [PallasTPU, pytest.param(PallasGPU, marks=gpu_lowered)])
def test_only_the_bias_and_its_cotangent_have_all_pairs(kernels):
    """Of both passes; on TPU also for lengths that are no multiple of a tile."""
    length = 3000 if kernels is PallasTPU else 3072
    q = jax.ShapeDtypeStruct((2, length, 2, 32), jnp.bfloat16)
    bias = jax.ShapeDtypeStruct((1, 2, length, length), jnp.bfloat16)

    def loss(bias, q):
        implementation = kernels(cross_compile=True)
        out = pe.attention(q, q, q, rules=pe.DenseBias(bias), implementation=implementation)
        return jnp.sum(out.astype(jnp.float32))

    with described("TPU v5 lite"):
        jaxpr = jax.make_jaxpr(jax.grad(loss, (0, 1)))(bias, q).jaxpr
    assert {x.shape for x in arrays_of(jaxpr) if x.size >= length**2 // 2} == {bias.shape}
