"""Every kind of rule with every feature: each implementation against the reference."""

import functools

import chex
import jax
import jax.numpy as jnp
import numpy as np
import pytest

import posenc_jax as pe
from posenc_jax.engine.blocks import Blocks
from posenc_jax.engine.dense import Dense
from posenc_jax.engine.xla import XLA
from tests.engine.rules import KINDS, explicit_mask
from tests.kernels.kernel_cases import assert_close
from tests.support import slow

B, T, N, K, H, V = 2, 37, 4, 2, 8, 8
# Many tiles, of other shapes forward than backward, and a ragged end.
SMALL_TILES = XLA(Blocks(16, 8), Blocks(8, 16), pairs_at_once=64, row_block=8 * B * N * T)
IMPLEMENTATIONS = {"xla": SMALL_TILES, "dense": Dense(block=5 * B * N * T)}


def _segments():
    ids = np.zeros((B, T), np.int32)
    ids[0, 11:], ids[0, 23:], ids[1, :9], ids[0, 33:] = 1, 2, -1, -1
    return ids


def _positions():
    order = np.random.default_rng(5).permutation(T).astype(np.int32)
    return {"q_positions": order, "k_positions": order}


FEATURES = {
    "plain": dict,
    "causal": lambda: {"is_causal": True},
    "window": lambda: {"is_causal": True, "window": 9},
    "two_sided_window": lambda: {"window": (7, 3)},
    "segments": lambda: {"is_causal": True, "q_segment_ids": _segments()},
    "prefix": lambda: {"is_causal": True, "prefix_length": np.array([4, 20], np.int32)},
    "softcap_sinks": lambda: {
        "is_causal": True,
        "softcap": 3.0,
        "sinks": np.linspace(-1.0, 2.0, N, dtype=np.float32),
    },
    "sinks": lambda: {
        "is_causal": True,
        "sinks": np.linspace(-2.0, 3.0, B * T * N, dtype=np.float32).reshape(B, T, N),
    },
    "mask": lambda: {"mask": np.random.default_rng(6).random((1, N, T, T)) < 0.4},
    "prefix_mask": lambda: FEATURES["prefix"]() | FEATURES["mask"](),
    "dropout": lambda: {
        "is_causal": True,
        "dropout_rate": 0.3,
        "dropout_key": jax.random.key(8),
    },
    "permuted": lambda: {"is_causal": True, **_positions()},
    "permuted_segments": lambda: {
        "is_causal": True,
        "window": 20,
        "q_segment_ids": _segments(),
        **_positions(),
    },
    "chunk": lambda: {
        "is_causal": True,
        "q_positions": np.arange(T - 6, T, dtype=np.int32),
        "k_positions": np.arange(T, dtype=np.int32),
    },
}
# Each rule, each feature, and the pairs that read the same arrays.
CASES = [("narrow", "softcap_sinks"), ("two_axes", "prefix_mask"), ("wide", "two_sided_window")]
CASES += [("t5", "dropout"), ("fox", "segments"), ("scaled", "permuted"), ("unbounded", "plain")]
CASES += [("fire", "permuted_segments"), ("shaw", "permuted_segments"), ("all_pairs", "chunk")]
CASES += [("separable", "window"), ("alibi", "two_sided_window")]
MORE_CASES = [(kind, "causal") for kind in ("none", "t5", "fire", "fox", "shaw", "separable")]
MORE_CASES += [("none", "mask"), ("two_axes", "prefix"), ("fox", "dropout")]
MORE_CASES += [("t5", f) for f in ("plain", "prefix", "permuted", "permuted_segments", "mask")]
MORE_CASES += [("t5", f) for f in ("window", "segments", "softcap_sinks", "chunk")]
MORE_CASES += [("shaw", "plain"), ("shaw", "softcap_sinks"), ("shaw", "sinks")]
MORE_CASES += [("narrow", f) for f in ("causal", "plain", "sinks", "prefix", "chunk")]
MORE_CASES += [("narrow", "permuted_segments"), ("whole", "permuted_segments")]
MORE_CASES += [("wide", f) for f in ("causal", "plain", "permuted_segments", "softcap_sinks")]
MORE_CASES += [("wide", "window"), ("wide", "segments"), ("all_pairs", "permuted_segments")]
MORE_CASES += [("unbounded", "causal"), ("unbounded", "permuted_segments")]
MORE_CASES += [("whole", f) for f in ("causal", "window", "two_sided_window", "segments")]
MORE_CASES += [("whole", f) for f in ("prefix", "softcap_sinks", "mask", "chunk", "dropout")]
MORE_CASES += [("separable", f) for f in ("plain", "mask", "prefix", "permuted_segments")]
DENSE_CASES = [("whole", "softcap_sinks"), ("shaw", "dropout")]
MORE_DENSE_CASES = [("whole", f) for f in ("causal", "segments", "permuted", "mask")]
MORE_DENSE_CASES += [("all_pairs", "permuted_segments"), ("separable", "window")]
MORE_DENSE_CASES += [("fox", "prefix"), ("t5", "chunk")]


def _case(kind, options):
    """Returns the static options, the arrays, the weights of the loss and the other options."""
    kind = KINDS[kind]
    queries = options["q_positions"].shape[0] if "q_positions" in options else T
    random = np.random.default_rng(0)

    def normal(*shape):
        return random.normal(size=shape).astype(np.float32)

    arrays = {
        "q": normal(B, queries, N, H),
        "k": normal(B, T, K, H),
        "v": normal(B, T, K, V),
        "params": kind.make(random, N, H),
        "sinks": options.get("sinks"),
    }
    if kind.axes:
        # Float coordinates, so that these have gradients too.
        arrays["at"] = 3 * normal(kind.axes, B, T)
    options = {n: x for n, x in options.items() if n != "sinks"}
    dynamic = {n: x for n, x in options.items() if isinstance(x, jax.Array | np.ndarray)}
    weights = {"out": normal(B, queries, N, V), "lse": normal(B, queries, N)}
    static = tuple((n, x) for n, x in options.items() if n not in dynamic)
    return static, arrays, weights, dynamic


@functools.partial(jax.jit, static_argnums=(0, 1, 2))
def _outcome(implementation, kind, static, arrays, weights, dynamic):
    """The output, the log-sum-exp, and the gradients of both to all that can have one."""

    def loss(arrays):
        q, k, v = (arrays[n] for n in "qkv")
        places = {}
        if "at" in arrays:
            places = {"q_coordinates": arrays["at"], "k_coordinates": arrays["at"] + 0.25}
        out, lse = pe.attention(
            q,
            k,
            v,
            rules=KINDS[kind].rules(arrays["params"], q, k),
            **places,
            **dict(static),
            **dynamic,
            sinks=arrays["sinks"],
            return_lse=True,
            implementation=implementation,
        )
        seen = ~jnp.isneginf(lse)
        lse = jnp.where(seen, lse, 0.0)
        total = jnp.sum(out * weights["out"]) + jnp.sum(lse * weights["lse"])
        return total, (out, lse, seen)

    return jax.grad(loss, has_aux=True)(arrays)


@functools.cache
def _reference(kind, feature):
    static, *arrays = _case(kind, explicit_mask(FEATURES[feature](), B, N, T))
    return _outcome("reference", kind, static, *arrays)


@pytest.mark.parametrize(
    ("kind", "feature", "implementation"),
    [
        *((*case, "dense") for case in DENSE_CASES),
        *((*case, "xla") for case in CASES),
        *(pytest.param(*case, "xla", marks=slow) for case in MORE_CASES),
        *(pytest.param(*case, "dense", marks=slow) for case in MORE_DENSE_CASES),
    ],
)
def test_equals_the_reference(kind, feature, implementation):
    expected = _reference(kind, feature)
    static, *arrays = _case(kind, FEATURES[feature]())
    got = _outcome(IMPLEMENTATIONS[implementation], kind, static, *arrays)
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

    def outcomes(change):
        cases = {}
        for name in (f for f in FEATURES if "sinks" not in f):
            static, arrays, _, dynamic = _case("none", change(FEATURES[name]()))
            cases[name] = [arrays[n] for n in "qkv"], dict(static) | dynamic
        return {
            name: pe.attention(*qkv, **options, return_lse=True, implementation="reference")
            for name, (qkv, options) in cases.items()
        }

    got, expected = jax.jit(
        lambda: (outcomes(dict), outcomes(lambda options: explicit_mask(options, B, N, T)))
    )()
    chex.assert_trees_all_close(got, expected, atol=1e-6)


@pytest.mark.parametrize("implementation", ("reference", *IMPLEMENTATIONS.values()), ids=repr)
@pytest.mark.parametrize(
    ("window", "per_query"), [pytest.param(None, False, marks=slow), (3, True)]
)
def test_equals_what_is_written_in_the_paper(implementation, window, per_query):
    """Float64 loops over heads, queries and keys: GQA, a bias, softcap, sinks, segments.

    With w the share of a sink, the derivative of log-sum-exp and output by it is w and - w out.
    """
    rng = np.random.default_rng(0)
    length = 9
    q, k, v = (rng.normal(size=(1, length, n, 4)) for n in (4, 2, 2))
    slopes, cap, scale = 2.0 ** -np.arange(2, 10, 2.0), 4.0, 0.3
    segments = np.array([[0, 0, 0, 1, 1, 1, 1, -1, 1]])
    given = rng.normal(size=(1, length, 4) if per_query else 4).astype(np.float32)
    sinks = np.broadcast_to(given, (1, length, 4)).astype(np.float64)
    if per_query:  # Of padding they are not read.
        given[:, 7], sinks[:, 7] = np.nan, 0.0
    out, lse = np.zeros((1, length, 4, 4)), np.full((1, length, 4), -np.inf)
    for n in range(4):
        for i in range(length):
            sees = [
                j
                for j in range(i + 1)
                if segments[0, i] == segments[0, j] >= 0 and (window is None or i - j < window)
            ]
            logits = [
                cap * np.tanh((scale * q[0, i, n] @ k[0, j, n // 2] - slopes[n] * (i - j)) / cap)
                for j in sees
            ]
            total = np.exp(sinks[0, i, n]) + sum(np.exp(x) for x in logits)
            lse[0, i, n] = np.log(total)
            for j, x in zip(sees, logits, strict=True):
                out[0, i, n] += np.exp(x) / total * v[0, j, n // 2]

    def attend(sinks):
        return pe.attention(
            *(jnp.asarray(x, jnp.float32) for x in (q, k, v)),
            rules=pe.ALiBi(num_heads=4).rules({}),
            is_causal=True,
            window=window,
            scale=scale,
            softcap=cap,
            sinks=sinks,
            q_segment_ids=jnp.asarray(segments),
            return_lse=True,
            implementation=implementation,
        )

    (got, got_lse), pull = jax.vjp(attend, given)
    np.testing.assert_allclose(got, out, atol=2e-6)
    np.testing.assert_allclose(got_lse, lse, atol=2e-6)
    d_out, d_lse = (rng.normal(size=x.shape).astype(np.float32) for x in (out, lse))
    slope = np.exp(sinks - lse) * (d_lse - (d_out * out).sum(-1))
    slope[:, 7] = 0.0 if per_query else slope[:, 7]
    slope = slope if per_query else slope.sum((0, 1))
    np.testing.assert_allclose(pull((d_out, d_lse))[0], slope, atol=4e-6)
