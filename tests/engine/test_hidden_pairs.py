"""Rules that are NaN or infinite at pairs which are hidden: these pairs have no gradient.

Expected are the numbers of the same rules with a distance that is clipped to those that are seen,
and for one of them a float64 loop.
"""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import posenc_jax as pe
from posenc_jax.engine.blocks import Blocks
from posenc_jax.kernels.tpu.implementation import PallasTPU
from tests.engine.rules import explicit_mask
from tests.support import parameters, run, slow

B, T, N, H = 2, 40, 2, 8
RANDOM = np.random.default_rng(0)
Q, K, V, WEIGHTS = RANDOM.normal(size=(4, B, T, N, H)).astype(np.float32)
SLOPES = np.array([0.5, 1.5], np.float32)
SUMS = np.cumsum(RANDOM.uniform(0.1, 1.0, (B, T, N)), 1).astype(np.float32)
POSITIONS = 2 * np.arange(T)
PADDED = np.where(np.arange(T) < [[3], [0]], -1, 0)
PACKED = np.broadcast_to(np.arange(T) // 17, (B, T))
CAUSAL = np.tri(T, dtype=bool)[None, None]


def past(shared, slope, q, k):
    return -slope * jnp.log1p(q - k)


def past_clipped(shared, slope, q, k):
    return -slope * jnp.log1p(jnp.maximum(q - k, 0))


def near(shared, slope, q, k):
    """Infinite from 6 tokens on, and one before the query."""
    n = (q - k).astype(jnp.float32)
    return slope * (jnp.sqrt(6 - n) + 1 / jnp.sqrt(n + 1))


def near_clipped(shared, slope, q, k):
    n = jnp.clip((q - k).astype(jnp.float32), 0, 5)
    return slope * (jnp.sqrt(6 - n) + 1 / jnp.sqrt(n + 1))


def odd(shared, slope, q, k):
    """Infinite at odd distances; at others as `past`."""
    return -slope / (1 - (q - k) % 2).astype(jnp.float32) * jnp.log1p(q - k)


def even(b, h, q_idx, kv_idx):
    return (q_idx - kv_idx) % 2 == 0


def of_sums(shared, slope, row, col, q, k):
    return -slope * jnp.log(row - col + 0.5)


def of_sums_clipped(shared, slope, row, col, q, k):
    return -slope * jnp.log(jnp.where(k <= q, row - col, 0.0) + 0.5)


def vector(shared, head, n):
    return shared * jnp.sqrt(n.astype(jnp.float32))


def vector_clipped(shared, head, n):
    return shared * jnp.sqrt(jnp.maximum(n, 0).astype(jnp.float32))


def vector_near(shared, head, n):
    return shared * jnp.sqrt(5.5 - n.astype(jnp.float32))


def vector_near_clipped(shared, head, n):
    return shared * jnp.sqrt(5.5 - jnp.clip(n, 0, 5).astype(jnp.float32))


def row_of(shared, heads, q_feature, k_features, logits, seen, q, k):
    return logits - heads[:, None] * jnp.log1p(q - k)[None]


def mod(score, b, h, q, k, slopes):
    return score - slopes[h] * jnp.log1p(q - k)


def mod_of_b(score, b, h, q, k, slopes):
    """Infinite at the token after the query, by a division alone."""
    return score + slopes[h] / ((1 + b) * (1 + q - k)).astype(jnp.float32)


def mod_of_b_clipped(score, b, h, q, k, slopes):
    return score + slopes[h] / ((1 + b) * (1 + jnp.maximum(q - k, 0))).astype(jnp.float32)


def mod_of_score(score, b, h, q, k, slopes):
    """Infinite at zero, the score of hidden keys."""
    return score + slopes[h] * jnp.log(jnp.abs(score))


def mod_of_score_clipped(score, b, h, q, k, slopes):
    return score + slopes[h] * jnp.log(jnp.where(score == 0, 1.0, jnp.abs(score)))


def bias(function, **options):
    return lambda slopes, sums: pe.LogitBias(function, heads=slopes, **options)


def content(function):
    return lambda slopes, sums: pe.ContentBias(function, slopes, None, sums, sums)


def dot(function, **options):
    return lambda slopes, sums: pe.DotBias(
        function, shared=slopes, q_features=jnp.asarray(Q)[..., :2] * sums[..., None], **options
    )


def transform(function):
    return lambda slopes, sums: pe.LogitsTransform(function, heads=slopes)


def score_mod(function, **claim):
    return lambda slopes, sums: pe.score_mod(function, jnp.asarray(Q), slopes, **claim)


# Rules that are alike where keys are seen share the program of their clipped one.
CLIPPED, NEAR = bias(past_clipped), bias(near_clipped)
DOT = dot(vector_clipped, bounds=(-50, 50))
BOTH = {
    "relative": (bias(past, relative=True), CLIPPED),
    "of pairs": (bias(past), CLIPPED),
    "window": (bias(near, relative=True), NEAR),
    "content": (content(of_sums), content(of_sums_clipped)),
    "dot": (dot(vector), DOT),
    "dot, bounds": (dot(vector, bounds=(-50, 50)), DOT),
    "transform": (transform(row_of), CLIPPED),
    "score_mod, relative": (score_mod(mod, relative=True), CLIPPED),
    "score_mod, adds": (score_mod(mod, adds=True), CLIPPED),
    "score_mod, b": (score_mod(mod_of_b, adds=True), score_mod(mod_of_b_clipped, adds=True)),
    "score_mod": (score_mod(mod), CLIPPED),
}
HOW = {
    "whole": {"is_causal": True},
    "positions": {"is_causal": True, "q_positions": POSITIONS},
    "padded": {"is_causal": True, "q_segment_ids": PADDED},
    "packed": {"is_causal": True, "q_segment_ids": PACKED},
    "mask": {"mask": CAUSAL},
    "mask, positions": {"mask": CAUSAL, "q_positions": POSITIONS},
    "softcap": {"is_causal": True, "softcap": 3.0},
}
WORDS = "dense", "xla", "reference"
# Rules of kinds that others or the cases below have.
LIKE_OTHERS = "relative", "of pairs", "content", "dot", "dot, bounds", "score_mod, relative"
LIKE_OTHERS += "score_mod, adds", "score_mod"
CASES = [
    pytest.param(
        name,
        list(HOW)[(2 * n + m) % 6],
        WORDS[(n + m) % 3],
        marks=slow if m or name in LIKE_OTHERS else (),
    )
    for n, name in enumerate(BOTH)
    for m in range(2)
]
# `near` by `visible_until`; tokens of the last segment end with it.
BOTH["until"] = bias(near, relative=True), NEAR
HOW |= {
    "until": {"is_causal": True, "k_visible_until": np.arange(T) + 6},
    "until, packed": HOW["packed"]
    | {"k_visible_until": np.where(np.arange(T) < 34, np.arange(T) % 17 + 6, 99)},
}
CASES += [pytest.param("until", "until", "dense", marks=slow), ("until", "until, packed", "xla")]
# `near` in documents of 6 tokens, before padding that is longer.
BOTH["tail"], BOTH["tail, dot"] = BOTH["until"], (dot(vector_near), dot(vector_near_clipped))
HOW["tail"] = {"is_causal": True}
HOW["tail"]["q_segment_ids"] = np.repeat([[0, 1, -1], [2, 3, -1]], (6, 6, T - 12), axis=1)
CASES += [("tail", "tail", "xla"), pytest.param("tail, dot", "tail", "xla", marks=slow)]
# `near` at every other distance: `odd` divides by zero at the others.
BOTH["odd"] = bias(odd, relative=True), CLIPPED
HOW["block mask"] = {"is_causal": True, "mask": None}
CASES += [("odd", "block mask", "xla")]
CASES += [pytest.param("odd", "block mask", "reference", marks=slow)]
CASES += [("relative", "mask", "dense"), ("dot, bounds", "positions", "xla")]
CASES += [pytest.param("relative", "mask", "xla", marks=slow)]
CASES += [pytest.param("of pairs", "softcap", "xla", marks=slow)]


def _loss(make, static, word, arrays):
    slopes, sums, q, options = arrays
    rules, static = make(slopes, sums), dict(static)
    if "mask" in static:
        static["mask"] = pe.block_mask(even, T, T, block_size=8)
    if make in BOTH["window"]:
        static["window"] = (5, 0)
    out = pe.attention(q, K, V, rules=rules, implementation=word, **static, **options)
    return (out * WEIGHTS).sum()


def _gradient(make, static, word, slopes, sums, q, options):
    def loss(slopes, sums, q):
        return _loss(make, static, word, (slopes, sums, q, options))

    return jax.grad(loss, (0, 1, 2))(slopes, sums, q)


def gradients(make, how, word):
    options = {n: x for n, x in how.items() if isinstance(x, np.ndarray)}
    static = tuple((n, x) for n, x in how.items() if n not in options)
    return run(_gradient, (make, static, word), SLOPES, SUMS, Q, options)


def by_one_mask(how):
    """The same pairs as a mask, which is data: the clipped rules have one program for them all."""
    how = dict(how)
    if "q_positions" in how:
        how["k_positions"] = how["q_positions"]
    if how.get("mask", 0) is None:  # The block mask.
        how["mask"] = even(0, 0, *np.ogrid[:T, :T])
    return explicit_mask(how, B, N, T)


@pytest.mark.parametrize("name, how, word", CASES)
def test_hidden_pairs_have_no_gradient(name, how, word):
    make, clipped = BOTH[name]
    got = gradients(make, HOW[how], word)
    expected = gradients(clipped, by_one_mask(HOW[how]), "reference")
    for a, b in zip(got, expected, strict=True):
        np.testing.assert_allclose(a, b, rtol=1e-4, atol=2e-4)
    assert np.abs(got[0]).min() > 1e-4


@pytest.mark.parametrize(
    "how",
    [
        {"k_visible_until": np.zeros(T, np.int32)},
        pytest.param({"mask": ~CAUSAL}, marks=slow),
        pytest.param({"q_segment_ids": np.full((B, T), -1)}, marks=slow),
    ],
    ids=["until", "mask", "padding"],
)
def test_calls_without_pairs_have_no_gradient(how):
    got = gradients(BOTH["relative"][0], {"is_causal": True} | how, "xla")
    assert not any(np.any(x) for x in got)


@pytest.mark.parametrize("window", [None, pytest.param((3, 2), marks=slow)])
def test_prefixes_of_positions_below_zero(window):
    """Shifted, positions and the prefix say the same."""

    def out(shift, word):
        options = {"is_causal": window is None, "window": window}
        options |= {
            "q_positions": np.arange(T) + shift,
            "prefix_length": np.array([35, 20]) + shift,
        }
        rules = pe.KERPLELog(num_heads=N).rules({"r1": 3 * SLOPES, "r2": SLOPES})
        return jax.jit(
            lambda q: pe.attention(q, K, V, rules=rules, implementation=word, **options)
        )(Q)

    np.testing.assert_allclose(out(-15, "xla"), out(0, "reference"), atol=1e-5)


def test_the_gradient_is_that_of_a_loop():
    def loss(slopes):
        total = 0.0
        for b, n in np.ndindex(B, N):
            for i in range(T):
                distance = np.log1p(2 * np.arange(i, -1, -1.0))
                x = K[b, : i + 1, n].astype(np.float64) @ Q[b, i, n] / H**0.5 - slopes[n] * distance
                p = np.exp(x - x.max())
                total += (p / p.sum()) @ V[b, : i + 1, n] @ WEIGHTS[b, i, n]
        return total

    step = 1e-5 * np.eye(2)
    expected = [(loss(SLOPES + s) - loss(SLOPES - s)) / 2e-5 for s in step]
    make, clipped = BOTH["of pairs"]
    for got in (
        gradients(make, HOW["positions"], "dense"),
        gradients(clipped, by_one_mask(HOW["positions"]), "reference"),
    ):
        np.testing.assert_allclose(got[0], expected, rtol=1e-4)


@slow
def test_forward_mode():
    """Tangents too, in "dense" and "reference"."""
    make, clipped = BOTH["of pairs"]

    @jax.jit
    def tangents(slopes):
        def loss(slopes, word):
            arrays = slopes, SUMS, Q, {"q_segment_ids": PADDED}
            return _loss(make, (("is_causal", True),), word, arrays)

        losses = (functools.partial(loss, word=word) for word in ("dense", "reference"))
        return [jax.jvp(f, (slopes,), (jnp.ones(2),))[1] for f in losses]

    expected = gradients(clipped, by_one_mask(HOW["padded"]), "reference")[0].sum()
    np.testing.assert_allclose(tangents(SLOPES), [expected] * 2, rtol=1e-4)


@pytest.mark.parametrize("word", ["dense", pytest.param("reference", marks=slow)])
def test_scores_of_hidden_keys_are_no_zeros(word):
    functions = mod_of_score, mod_of_score_clipped
    got, expected = (gradients(score_mod(function), HOW["whole"], word) for function in functions)
    for a, b in zip(got, expected, strict=True):
        np.testing.assert_allclose(a, b, rtol=1e-4, atol=1e-4)


@slow
def test_steps_of_a_cache():
    q, positions = Q[:, -1:], {"q_positions": POSITIONS[-2:-1], "k_positions": POSITIONS}

    def loss(make, slopes):
        out = pe.attention(q, K, V, rules=make(slopes, SUMS), is_causal=True, **positions)
        return (out * WEIGHTS[:, -1:]).sum()

    make, clipped = BOTH["relative"]
    slopes = (jax.jit(jax.grad(functools.partial(loss, m))) for m in (make, clipped))
    got, expected = (slope(SLOPES) for slope in slopes)
    np.testing.assert_allclose(got, expected, rtol=1e-4)


def test_elements_of_kernels():
    tiles = Blocks(128, 128)
    kernels = PallasTPU(tiles, tiles, interpret=True)
    make, clipped = BOTH["of pairs"]
    got = gradients(make, HOW["whole"], kernels)
    expected = gradients(clipped, by_one_mask(HOW["whole"]), "reference")
    for a, b in zip(got, expected, strict=True):
        np.testing.assert_allclose(a, b, rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize(
    "scheme",
    [
        pe.T5(6),
        pe.ALiBi(6),
        pe.DeBERTa(num_heads=6, head_dim=4, model_dim=6, span=20),
        pe.Inkling(num_heads=6, model_dim=6, extent=20),
        pe.Shaw(num_heads=6, head_dim=4),
    ],
    ids=lambda scheme: type(scheme).__name__,
)
def test_rules_of_finite_operations_are_evaluated_by_tables(scheme):
    """Rules that may be infinite are evaluated for each pair, many times as slowly."""

    def check(params, x, q):
        rows, cols, _ = scheme.features(params, x, q, q, None, None, None)
        rules = scheme.rules(params, rows, cols)
        token = jax.ShapeDtypeStruct((), jnp.int32)
        rules = rules if isinstance(rules, tuple) else (rules,)
        assert rules and not any(rule.careful(token) for rule in rules if rule.adds_logits)

    jax.eval_shape(check, parameters(scheme), np.ones((1, 5, 6), "f4"), np.ones((1, 5, 6, 4), "f4"))
