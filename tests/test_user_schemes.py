"""Schemes and rules written by a user, of ten to twenty lines, that use rarer hooks."""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from oracle import softmax_attention
from support import BATCH, LENGTH, SIZES, close, decode, empty_cache, make_batch, output

import posenc_jax as pe
from posenc_jax import testing


def gate_difference(shared, head, row, col, q, k):
    return row - col


@dataclasses.dataclass(frozen=True)
class KeyFoX(pe.Scheme):
    """FoX with gates from the keys, one for each key head, which no layer has to provide."""

    num_heads: int
    head_dim: int

    def init(self, key):
        return {"w": jax.random.normal(key, (self.head_dim,))}

    def features(self, params, x, q, k, coordinates, segment_ids, state):
        k = k if segment_ids is None else jnp.where(real(segment_ids, 4), k, 0.0)
        gates = jax.nn.log_sigmoid(jnp.einsum("btkh,h->btk", k, params["w"]))
        gates = jnp.repeat(gates, self.num_heads // k.shape[2], axis=2)
        if segment_ids is not None:
            gates = jnp.where(real(segment_ids, 3), gates, 0.0)
        before = jnp.zeros_like(gates[:, 0]) if state is None else state
        sums = before[:, None] + jnp.cumsum(gates, 1)
        return sums, sums, sums[:, -1]

    def rules(self, params, q_features=None, k_features=None):
        return pe.ContentBias(gate_difference, q_features=q_features, k_features=k_features)


def real(segment_ids, rank):
    return (segment_ids >= 0).reshape(*segment_ids.shape, *(1,) * (rank - 2))


@pytest.fixture(scope="module")
def chained():
    return testing.Case(pe.chain(KeyFoX(SIZES["num_heads"], SIZES["head_dim"])))


@pytest.mark.parametrize(
    "name",
    ["steps_after_right_padding_equal_rows_alone", "nan_in_the_padding_of_a_prompt_stays_there"],
)
def test_padding_does_not_change_a_running_sum_in_a_chain(chained, name):
    testing.PROPERTIES[name].check(chained)


def plane(shared, slope, q, k):
    return -slope * jnp.abs(q - k).sum().astype(jnp.float32)


@pytest.mark.parametrize("implementation", ["reference", "xla"])
def test_a_rule_on_two_axes(implementation):
    tokens = make_batch()
    bias = pe.LogitBias(plane, heads=pe.alibi_slopes(SIZES["num_heads"]))
    row, col = np.arange(LENGTH) // 5, np.arange(LENGTH) % 5
    grid = jnp.broadcast_to(jnp.stack([row, col])[:, None], (2, BATCH, LENGTH))
    out = pe.attention(
        tokens.q,
        tokens.k,
        tokens.v,
        rules=bias,
        q_coordinates=grid,
        k_coordinates=grid,
        is_causal=True,
        implementation=implementation,
    )
    slopes = np.asarray(bias.heads)
    distance = abs(row[:, None] - row) + abs(col[:, None] - col)

    def logit(q, k, n, i, j):
        return q @ k / q.size**0.5 - slopes[n] * distance[i, j]

    wanted = softmax_attention(tokens.q, tokens.k, tokens.v, logit)
    np.testing.assert_allclose(out, wanted, atol=1e-5)
    assert bias.dense(grid, grid).shape == (BATCH, SIZES["num_heads"], LENGTH, LENGTH)


@dataclasses.dataclass(frozen=True)
class Halves(pe.Scheme):
    """Two attentions, of the near and of the far keys, merged by their log-sum-exp."""

    near: int = 4

    def attend(
        self, params, q, k, v, q_coordinates, k_coordinates, q_features, k_features, attention
    ):
        outs, weights = [], []
        for sign in (1, -1):
            hidden = pe.LogitBias(Beyond(self.near, sign), heads=jnp.zeros((q.shape[2],)))
            out, lse = attention.replace(return_lse=True)(q, k, v, hidden)
            outs.append(out)
            weights.append(lse)
        weights = jax.nn.softmax(jnp.stack(weights), axis=0)
        return (jnp.stack(outs) * weights[..., None]).sum(0)


@dataclasses.dataclass(frozen=True)
class Beyond:
    """Hides keys nearer than a distance, or (sign -1) those beyond it."""

    near: int
    sign: int

    def __call__(self, shared, head, q, k):
        hidden = (q - k >= self.near) if self.sign > 0 else (q - k < self.near)
        return jnp.where(hidden, -1e30, 0.0)


def test_a_scheme_that_merges_several_attentions(tokens):
    params = {}
    wanted = output(pe.NoPE(), params, tokens)
    close(output(Halves(), params, tokens), wanted)
    out, _ = decode(Halves(), params, tokens, [9, 1, 9], empty_cache(Halves()))
    close(out, wanted)
    assert Halves().acts == pe.Acts.ATTENTION
    moved = pe.with_positions(Halves(), positions_in_pairs)
    close(output(moved, params, tokens), wanted)
    with pytest.raises(ValueError, match="replace attention"):
        pe.chain(Halves(), pe.ALiBi(num_heads=6))
    rope = pe.RoPE(head_dim=8)
    both = pe.chain(rope, Halves())
    close(output(both, ({}, {}), tokens), output(rope, {}, tokens))


def positions_in_pairs(positions):
    return positions // 2
