"""TUPE against the encoder of its authors."""

import functools

import jax
import numpy as np
import pytest

import posenc_jax as pe
from tests.oracle import attend, qkv, softmax_attention, waves
from tests.support import Option, golden, initial, parameters

OPTIONS = {
    pe.TUPE: {
        "untie_cls": False,
        "num_buckets": 8,
        "max_distance": Option(16, {"num_buckets": 16}),
        "stddev": initial(0.1),
    }
}

GOLDEN = golden("tupe")
ARRAYS = qkv(length=21)


def small(**options):
    return pe.TUPE(**({"num_heads": 6, "head_dim": 8, "model_dim": 10, "max_length": 21} | options))


@functools.partial(jax.jit, static_argnums=0)
def dense(scheme, params, positions):
    """The sum of all terms, [N, T, S]."""
    rules = scheme.rules(params)
    terms = rules if isinstance(rules, tuple) else (rules,)
    return sum(rule.dense(positions, positions) for rule in terms)


@pytest.mark.parametrize("case", GOLDEN["cases"], ids=lambda c: str(c["relative"]))
def test_matches_the_authors(case):
    """waves(48, 24) holds the weights of q, then the weights of k, [out, in]."""
    options = {"num_buckets": 8, "max_distance": 10} if case["relative"] else {}
    scheme = pe.TUPE(num_heads=6, head_dim=4, model_dim=24, max_length=12, **options)
    weights = (waves(48, 24) / 4).reshape(2, 6, 4, 24).transpose(0, 3, 1, 2)
    biases = (waves(48) / 4).reshape(2, 6, 4)
    params = {
        "table": waves(13, 24),
        "norm": {"scale": 1 + waves(24) / 2, "bias": waves(24) / 2},
        "query": weights[0],
        "query_bias": biases[0],
        "key": weights[1],
        "key_bias": biases[1],
    }
    if case["relative"]:
        params["buckets"] = waves(9, 6).T
    assert jax.tree.structure(params) == jax.tree.structure(parameters(scheme))
    got = dense(scheme, params, np.arange(12))
    np.testing.assert_allclose(got, case["bias"], rtol=2e-6, atol=2e-6)


def reference(params, i, j, untied):
    """The products of the paper's equations 8 and 12 for one pair, in float64: [N]."""
    p = jax.tree.map(lambda x: np.asarray(x, np.float64), params)

    def projected(name, row):
        x = p["table"][row]
        x = (x - x.mean()) / np.sqrt(x.var() + 1e-5) * p["norm"]["scale"] + p["norm"]["bias"]
        return np.einsum("d,dnh->nh", x, p[name]) + p[f"{name}_bias"]

    rows = i + untied, j + untied
    if untied and i == 0:
        rows = 0, 0
    elif untied and j == 0:
        rows = 1, 1
    return (projected("query", rows[0]) * projected("key", rows[1])).sum(-1) / 4.0


@pytest.mark.parametrize("untied", [True, False])
def test_attention_matches_the_paper(untied):
    scheme = small(untie_cls=untied)
    params = parameters(scheme)
    bias = np.array([[reference(params, i, j, untied) for j in range(21)] for i in range(21)])
    expected = softmax_attention(*ARRAYS, lambda q, k, n, i, j: q @ k / 4.0 + bias[i, j, n])
    out = attend(scheme, params, *ARRAYS, is_causal=True, scale=0.25)
    np.testing.assert_allclose(out, expected, atol=1e-5)


def test_with_tied_cls_equals_a_chain_with_t5():
    scheme = small(untie_cls=False, num_buckets=32)
    params = parameters(scheme)
    params["buckets"] = waves(6, 32)
    plain = small(untie_cls=False)
    both = pe.chain(plain, pe.T5(num_heads=6, bidirectional=True))
    others = {n: leaf for n, leaf in params.items() if n != "buckets"}
    chained = attend(both, (others, {"table": params["buckets"]}), *ARRAYS)
    np.testing.assert_allclose(attend(scheme, params, *ARRAYS), chained, atol=1e-5)


def test_positions_outside_the_table_raise_or_make_their_row_nan_and_no_other():
    scheme = small(max_length=20)
    params = parameters(scheme)
    q, k, v = (x[:, :5] for x in ARRAYS)
    with pytest.raises(TypeError, match="tupe: coordinates must be integers, got float32"):
        pe.scheme_attention(scheme, params, q, k, v, coordinates=np.zeros((1, 5), "f4"))
    for bad in (20, -1):
        positions = np.array([[0, 1, 2, bad, 3]])
        with pytest.raises(ValueError, match=r"tupe: positions must be in \[0, 20\), .* got"):
            pe.scheme_attention(scheme, params, q, k, v, coordinates=positions)
        out = attend(scheme, params, q, k, v, coordinates=positions, is_causal=True)
        np.testing.assert_array_equal(np.isnan(out[0, :, 0, 0]), [0, 0, 0, 1, 1])


ERRORS = [(small, {"num_buckets": 3}, "t5: num_buckets must be .*, got 3")]
