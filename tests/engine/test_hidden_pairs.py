"""Rules that are NaN or infinite at pairs which are hidden: these pairs have no gradient.

Expected are the numbers of the same rules with a distance that is clipped to those that are seen,
and for one of them float64.
"""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import posenc_jax as pe
from posenc_jax.engine.blocks import Blocks
from posenc_jax.kernels.tpu.implementation import PallasTPU
from tests import oracle
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
    return past(shared, slope, jnp.maximum(q, k), k)


def near(shared, slope, q, k):
    """Infinite from 6 tokens on, and one before the query."""
    n = (q - k).astype(jnp.float32)
    return slope * (jnp.sqrt(6 - n) + 1 / jnp.sqrt(n + 1))


def near_clipped(shared, slope, q, k):
    return near(shared, slope, k + jnp.clip(q - k, 0, 5), k)


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
    return vector(shared, head, jnp.maximum(n, 0))


def vector_near(shared, head, n):
    return shared * jnp.sqrt(5.5 - n.astype(jnp.float32))


def vector_near_clipped(shared, head, n):
    return vector_near(shared, head, jnp.clip(n, 0, 5))


def row_of(shared, heads, q_feature, k_features, logits, seen, q, k):
    return logits - heads[:, None] * jnp.log1p(q - k)[None]


def mod(score, b, h, q, k, slopes):
    return score - slopes[h] * jnp.log1p(q - k)


def mod_of_b(score, b, h, q, k, slopes):
    """Infinite at the token after the query, by a division alone."""
    return score + slopes[h] / ((1 + b) * (1 + q - k)).astype(jnp.float32)


def mod_of_b_clipped(score, b, h, q, k, slopes):
    return mod_of_b(score, b, h, jnp.maximum(q, k), k, slopes)


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
    "score_mod": (score_mod(mod), CLIPPED),
    "score_mod, b": (score_mod(mod_of_b, adds=True), score_mod(mod_of_b_clipped, adds=True)),
    "score_mod, score": (score_mod(mod_of_score), score_mod(mod_of_score_clipped)),
}
HOW = {
    "whole": {"is_causal": True},
    "positions": {"is_causal": True, "q_positions": POSITIONS},
    "padded": {"is_causal": True, "q_segment_ids": PADDED},
    "packed": {"is_causal": True, "q_segment_ids": PACKED},
    "mask": {"mask": CAUSAL},
    "mask, positions": {"mask": CAUSAL, "q_positions": POSITIONS},
}
MORE = [
    (name, how, ("dense", "xla", "reference")[(n + m) % 3])
    for n, name in enumerate(BOTH)
    for m, how in enumerate([*HOW][n % 3 :: 3])
]
BOTH["until"] = BOTH["tail"] = bias(near, relative=True), NEAR
BOTH["tail, dot"] = dot(vector_near), dot(vector_near_clipped)
BOTH["odd"] = bias(odd, relative=True), CLIPPED
HOW |= {
    "until": {"is_causal": True, "k_visible_until": np.arange(T) + 6},
    # Tokens of the last segment end with it.
    "until, packed": HOW["packed"]
    | {"k_visible_until": np.where(np.arange(T) < 34, np.arange(T) % 17 + 6, 99)},
    # Documents of 6 tokens, before padding that is longer.
    "tail": {"is_causal": True}
    | {"q_segment_ids": np.repeat([[0, 1, -1], [2, 3, -1]], (6, 6, T - 12), axis=1)},
    "block mask": {"is_causal": True, "mask": None},
    "step": {"is_causal": True, "q_positions": POSITIONS[-2:-1], "k_positions": POSITIONS},
    "softcap": {"is_causal": True, "softcap": 3.0},
}
CASES = [
    *(("window", "mask", "reference"), ("transform", "whole", "dense")),
    *(("score_mod, b", "whole", "dense"), ("score_mod, score", "whole", "dense")),
    *(("until", "until, packed", "xla"), ("tail", "tail", "xla"), ("odd", "block mask", "xla")),
    *(("relative", "mask", "dense"), ("dot, bounds", "positions", "xla")),
    ("of pairs", "whole", PallasTPU(Blocks(128, 128), Blocks(128, 128), interpret=True)),
]
MORE += [("until", "until", "dense"), ("tail, dot", "tail", "xla"), ("relative", "mask", "xla")]
MORE += [("odd", "block mask", "reference"), ("of pairs", "softcap", "xla")]
MORE += [("relative", "step", "dense")]


def _loss(make, static, word, arrays):
    slopes, sums, q, options = arrays
    rules, static = make(slopes, sums), dict(static)
    if "mask" in static:
        static["mask"] = pe.block_mask(even, T, T, block_size=8)
    if make in BOTH["window"]:
        static["window"] = (5, 0)
    first = T - options.get("q_positions", POSITIONS).shape[-1]
    out = pe.attention(q[:, first:], K, V, rules=rules, implementation=word, **static, **options)
    return (out * WEIGHTS[:, first:]).sum()


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
        how.setdefault("k_positions", how["q_positions"])
    if how.get("mask", 0) is None:  # The block mask.
        how["mask"] = even(0, 0, *np.ogrid[:T, :T])
    return explicit_mask(how, B, N, T)


@pytest.mark.parametrize(
    "name, how, word", [*CASES, *(pytest.param(*x, marks=slow) for x in MORE if x not in CASES)]
)
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


def test_the_gradient_is_that_of_float64():
    distances = np.log1p(np.maximum(POSITIONS[:, None] - POSITIONS, 0))
    added, d_lse = np.float32(-SLOPES[:, None, None] * distances), np.zeros((1, T, N))
    expected = np.zeros(N)
    for row in np.split(np.stack([Q, K, V, WEIGHTS]), B, 1):
        *_, d_logits, _ = oracle.attention(row[:3], added, CAUSAL[0, 0], row[3], d_lse)
        expected -= np.einsum("nts,ts->n", d_logits, distances)
    make, clipped = BOTH["of pairs"]
    for got in (
        gradients(make, HOW["positions"], "dense"),
        gradients(clipped, by_one_mask(HOW["positions"]), "reference"),
    ):
        np.testing.assert_allclose(got[0], expected, rtol=1e-4)


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
