"""T5's buckets against the authors' code, its attention against the paper's formula."""

import jax.numpy as jnp
import numpy as np
import pytest

import posenc_jax as pe
from posenc_jax.schemes.bias.t5 import t5_boundaries
from tests.oracle import attend, qkv, softmax_attention
from tests.support import golden, initial, parameters

OPTIONS = {
    pe.T5: {"num_buckets": 8, "max_distance": 32, "bidirectional": True, "stddev": initial(0.1)}
}

GOLDEN = golden("t5")
ARRAYS = qkv(length=37)


def authors_buckets(case):
    """The bucket of every distance from -600 to 600, from run lengths."""
    starts, buckets = np.array(case["runs"]).T
    lengths = np.diff([*starts, GOLDEN["last"] + 1])
    return np.repeat(buckets, lengths)


def sizes(case):
    return {name: case[name] for name in ("num_buckets", "max_distance", "bidirectional")}


@pytest.mark.parametrize("case", GOLDEN["cases"], ids=lambda case: str([*sizes(case).values()]))
def test_buckets_are_those_of_the_authors_code(case):
    distance = jnp.arange(GOLDEN["first"], GOLDEN["last"] + 1)
    np.testing.assert_array_equal(pe.t5_bucket(distance, **sizes(case)), authors_buckets(case))


@pytest.mark.parametrize("bidirectional", [False, True])
def test_attention_matches_the_paper(bidirectional):
    scheme = pe.T5(num_heads=6, bidirectional=bidirectional, num_buckets=32, stddev=1.0)
    params = parameters(scheme)
    table = np.asarray(params["table"], np.float64)
    case = next(c for c in GOLDEN["cases"] if sizes(c) == sizes(vars(scheme)))
    bucket = authors_buckets(case)
    expected = softmax_attention(  # T5 does not divide by sqrt(d).
        *ARRAYS,
        lambda q, k, n, i, j: q @ k + table[n, bucket[i - j + 600]],
        sees=lambda i, j: j <= i or bidirectional,
    )
    out = attend(scheme, params, *ARRAYS, is_causal=not bidirectional, scale=1.0)
    np.testing.assert_allclose(out, expected, atol=2e-5)


def test_the_bucket_of_the_least_distance():
    """Its negative does not fit int32."""
    least, last = np.array([-(2**31)]), np.array([1 - 2**31])
    for options in ({}, {"bidirectional": True}):
        got, expected = (pe.t5_bucket(x, **options) for x in (least, last))
        np.testing.assert_array_equal(got, expected)


def test_boundaries_of_a_long_context_are_found_at_once():
    assert t5_boundaries(32, 2**30)[-2:] == (112863207, 348117718)


ERRORS = [
    (pe.t5_bucket, {"distance": np.zeros(3, bool)}, "distance must be integers", TypeError),
    (pe.T5, {"num_buckets": 1}, "num_buckets must be at least 2 and a multiple of 1, got 1"),
    (pe.T5, {"num_buckets": 5, "bidirectional": True}, "at least 4 and a multiple of 2, got 5"),
    (pe.T5, {"max_distance": 16}, "max_distance must exceed the 16 exact buckets, got 16"),
    (pe.T5, {"max_distance": 100.5}, r"max_distance must be an integer, got 100\.5", TypeError),
]
