"""Coordinates of several axes go only to rules that read them."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import posenc_jax as pe
from posenc_jax.engine.blocks import Blocks
from posenc_jax.engine.rule import as_tuple
from posenc_jax.engine.xla import XLA
from tests.oracle import qkv
from tests.support import slow

SHAW = pe.Shaw(num_heads=6, head_dim=8)
DAPE = pe.contrib.DAPE(num_heads=6)
COPE = pe.CoPE(head_dim=8)
Q, K, V = qkv(batch=2, length=7, kv_heads=6)


def zeros(scheme):
    shapes = jax.eval_shape(scheme.init, jax.random.key(0))
    return jax.tree.map(lambda leaf: np.zeros(leaf.shape, leaf.dtype), shapes)


def distance(shared, head, row, col, q, k):
    return (q - k).astype(jnp.float32)


def first_axis(shared, head, row, col, q, k):
    return (q - k)[0].astype(jnp.float32)


def longest(q, k):
    return jnp.clip(jnp.abs(q - k).max(), 0, 32).astype(jnp.int32)


RULES = {
    "bias": pe.ALiBi(num_heads=6).rules({}),
    "content": pe.ContentBias(distance, q_features=Q),
    "dot": SHAW.rules(zeros(SHAW), Q)[0],
    "row": DAPE.rules(zeros(DAPE)),
    "value": SHAW.rules(zeros(SHAW), Q)[1],
}


@pytest.mark.parametrize("name", RULES)
def test_rules_of_one_axis_are_refused_three(name):
    coordinates = np.zeros((3, 2, 7), np.int32)
    with pytest.raises(ValueError, match=r"attention: .* for coordinates of 3 axes"):
        pe.attention(Q, K, V, q_coordinates=coordinates, rules=RULES[name])


@slow
@pytest.mark.parametrize(
    "rules",
    [
        (
            pe.ContentBias(first_axis, q_features=Q),
            pe.ValueBias(longest, SHAW.rules(zeros(SHAW), Q)[1].table + 1.0),
            COPE.rules(zeros(COPE), Q),
            *as_tuple(pe.on_axis(pe.ALiBi(num_heads=6), 1, 3).rules({})),
        ),
        pe.on_axis(DAPE, 1, 3).rules(zeros(DAPE)),
    ],
    ids=["content, value, row that reads none, bias", "row"],
)
def test_rules_that_read_them_are_not(rules):
    coordinates = np.random.default_rng(0).integers(0, 9, (3, 2, 7), np.int32)
    tiles, expected = (
        pe.attention(Q, K, V, q_coordinates=coordinates, rules=rules, implementation=implementation)
        for implementation in (XLA(Blocks(4, 4)), "reference")
    )
    np.testing.assert_allclose(tiles, expected, atol=1e-5)


def waves(shared, head, q, k):
    return jax.lax.sin(q - k)  # Of floating point only.


@slow
def test_rules_are_checked_with_the_dtype_of_coordinates():
    coordinates = np.linspace(0.0, 3.0, 7, dtype=np.float32)
    rule = pe.LogitBias(waves)
    places = {"q_coordinates": coordinates, "k_coordinates": coordinates}
    tiles, expected = (
        pe.attention(Q, K, V, rules=rule, implementation=implementation, **places)
        for implementation in (XLA(Blocks(4, 4)), "reference")
    )
    np.testing.assert_allclose(tiles, expected, atol=1e-5)
    np.testing.assert_allclose(
        rule.dense(coordinates, coordinates)[0],
        np.sin(coordinates[:, None] - coordinates[None]),
        atol=1e-6,
    )


def test_axes_of_queries_and_keys_are_as_many():
    q, k = np.zeros((2, 2, 7), np.int32), np.zeros((3, 2, 7), np.int32)
    with pytest.raises(ValueError, match=r"as many axes, got \(2,\) and \(3,\) axes"):
        pe.attention(Q, K, V, q_coordinates=q, k_coordinates=k, rules=RULES["content"])
