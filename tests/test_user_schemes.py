"""Schemes written by a user, of ten to twenty lines, in caches, packing and wrappers.

Each needs another hook: FoX carries a running sum, FIRE shares parameters between heads and
reads absolute positions, M-RoPE reads three axes of coordinates. Oracles are float64 loops
written from the papers.
"""

import dataclasses
import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from support import (
    BATCH,
    KV_HEADS,
    LENGTH,
    SIZES,
    close,
    decode,
    empty_cache,
    make_batch,
    output,
)

import posenc_jax as pe
from posenc_jax import positions as at

IMPLEMENTATIONS = ["reference", "xla"]


def gate_difference(shared, head, row, col, q, k):
    return row - col


@dataclasses.dataclass(frozen=True)
class FoX(pe.Scheme):
    """logits += c_i - c_j, c the running sum of log sigmoid(w x + b)."""

    num_heads: int
    model_dim: int

    def init(self, key):
        w = jax.random.normal(key, (self.model_dim, self.num_heads))
        return {"w": w, "b": jnp.zeros(self.num_heads)}

    def features(self, params, x, q, k, coordinates, segment_ids, state):
        gates = jax.nn.log_sigmoid(
            jnp.einsum("btd,dn->btn", x, params["w"]) + params["b"][None, None]
        )
        if segment_ids is not None:  # Padding does not change the sum.
            gates = jnp.where((segment_ids >= 0)[:, :, None], gates, 0.0)
        before = jnp.zeros_like(gates[:, 0]) if state is None else state
        sums = before[:, None] + jnp.cumsum(gates, 1)
        return sums, sums, sums[:, -1]

    def rules(self, params, q_features=None, k_features=None):
        return pe.ContentBias(gate_difference, q_features=q_features, k_features=k_features)


def fire_rule(shared, head, q, k):
    c, limit = shared["c"], shared["limit"]
    far = jnp.log(jnp.abs(c * jnp.maximum(q.astype(jnp.float32), limit)) + 1)
    near = jnp.log(jnp.abs(c * (q - k).astype(jnp.float32)) + 1)
    hidden = jax.nn.relu(shared["w1"] * (near / (far + 1e-6)) + shared["b1"])
    return jnp.sum(hidden * head["w2"]) + head["b2"]


@dataclasses.dataclass(frozen=True)
class FIRE(pe.Scheme):
    """logits += MLP(log(c n + 1) / log(c max(i, L) + 1)), the first layer shared by heads."""

    num_heads: int

    def init(self, key):
        a, b, c = jax.random.split(key, 3)
        shared = {"w1": jax.random.normal(a, (32,)), "b1": jax.random.normal(b, (32,))}
        shared |= {"c": jnp.float32(0.1), "limit": jnp.float32(4.0)}
        heads = {"w2": 0.3 * jax.random.normal(c, (self.num_heads, 32))}
        return {"shared": shared, "heads": heads | {"b2": jnp.zeros(self.num_heads)}}

    def rules(self, params, q_features=None, k_features=None):
        return pe.LogitBias(fire_rule, heads=params["heads"], shared=params["shared"])


@dataclasses.dataclass(frozen=True)
class MRoPE(pe.Scheme):
    """Rotary pairs dealt out to three axes of coordinates [3, B, T]."""

    head_dim: int
    sections: tuple[int, ...] = (1, 1, 2)

    @property
    def traits(self):
        return pe.Traits(num_axes=3)

    def query(self, params, q, coordinates, features=None, tables=None):
        axis = np.repeat(np.arange(3), self.sections)
        w = 1e4 ** (-2 * np.arange(self.head_dim // 2) / self.head_dim)
        angle = (
            jnp.moveaxis(coordinates[axis], 0, -1).astype(jnp.float32)
            * w.astype(np.float32)[None, None]
        )
        cos, sin = jnp.cos(angle)[:, :, None], jnp.sin(angle)[:, :, None]
        a, b = jnp.split(q, 2, -1)
        return jnp.concatenate([a * cos - b * sin, b * cos + a * sin], -1)

    def key(self, params, k, coordinates, features=None, tables=None):
        return self.query(params, k, coordinates)


def softmax_rows(logits, v):
    out = np.zeros((LENGTH, v.shape[-1]))
    for i in range(LENGTH):
        w = np.exp(logits[i, : i + 1] - logits[i, : i + 1].max())
        out[i] = w @ v[: i + 1] / w.sum()
    return out


def oracle(tokens, logit):
    """Causal attention in float64; `logit(b, n, i, j)` is everything but q . k / sqrt(H)."""
    q, k, v = (np.asarray(a, np.float64) for a in (tokens.q, tokens.k, tokens.v))
    out = np.zeros_like(q)
    for b in range(BATCH):
        for n in range(q.shape[2]):
            g = n * KV_HEADS // q.shape[2]
            logits = q[b, :, n] @ k[b, :, g].T / np.sqrt(q.shape[-1])
            logits += [[logit(b, n, i, j) for j in range(LENGTH)] for i in range(LENGTH)]
            out[b, :, n] = softmax_rows(logits, v[b, :, g])
    return out


@functools.partial(jax.jit, static_argnums=0, static_argnames="implementation")
def attend(scheme, params, t, cache=None, **options):
    return pe.scheme_attention(
        scheme, params, t.q, t.k, t.v, x=t.x, cache=cache, is_causal=True, **options
    )


def new_cache(scheme, **options):
    sizes = {
        "num_heads": SIZES["num_heads"],
        "num_kv_heads": KV_HEADS,
        "head_dim": SIZES["head_dim"],
    }
    return pe.new_cache(scheme, BATCH, LENGTH, model_dim=SIZES["model_dim"], **sizes, **options)


@pytest.mark.parametrize("implementation", IMPLEMENTATIONS)
def test_forget_gates_are_a_running_sum(implementation):
    scheme, tokens = FoX(SIZES["num_heads"], SIZES["model_dim"]), make_batch()
    params = scheme.init(jax.random.key(0))
    z = np.asarray(tokens.x, np.float64) @ np.asarray(params["w"], np.float64)
    c = np.cumsum(-np.log1p(np.exp(-z)), 1)
    wanted = oracle(tokens, lambda b, n, i, j: c[b, i, n] - c[b, j, n])
    whole, _ = attend(scheme, params, tokens, implementation=implementation)
    np.testing.assert_allclose(whole, wanted, atol=1e-5)
    cache, outs = new_cache(scheme), []
    for part in (slice(0, 11), slice(11, 18), slice(18, 19)):
        out, cache = attend(scheme, params, tokens[:, part], cache, implementation=implementation)
        outs.append(out)
    np.testing.assert_allclose(jnp.concatenate(outs, 1), wanted, atol=1e-5)
    assert cache.state.shape == (BATCH, SIZES["num_heads"])


@dataclasses.dataclass(frozen=True)
class KeyFoX(pe.Scheme):
    """`FoX` with gates from the keys, one for each key head, which no layer has to provide."""

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


@pytest.mark.parametrize(
    "scheme",
    [FoX(SIZES["num_heads"], SIZES["model_dim"]), KeyFoX(SIZES["num_heads"], SIZES["head_dim"])],
    ids=lambda s: type(s).__name__,
)
@pytest.mark.parametrize("wrap", [lambda s: s, pe.chain], ids=["alone", "chain"])
@pytest.mark.parametrize("garbage", [0.0, np.nan])
def test_padding_does_not_change_a_running_sum(scheme, wrap, garbage):
    """Right-padded prompts, whatever the padding holds, decode as rows without padding."""
    scheme, tokens = wrap(scheme), make_batch()
    params = scheme.init(jax.random.key(0))
    lengths = [12, 5]
    mask = jnp.arange(12)[None] < jnp.array(lengths)[:, None]
    positions, segments = at.from_padding_mask(mask)
    where = {"positions": positions, "segment_ids": segments}
    padded = tokens[:, :12].map(lambda a: jnp.where(real(segments, a.ndim), a, garbage))
    _, cache = attend(scheme, params, padded, new_cache(scheme), **where)
    outs = []
    for part in (slice(12, 13), slice(13, 16)):
        out, cache = attend(scheme, params, tokens[:, part], cache)
        outs.append(out)
    out = jnp.concatenate(outs, 1)
    for row, n in enumerate(lengths):
        alone = tokens.map(
            lambda a, r=row, n=n: a[r : r + 1, np.array([*range(n), 12, 13, 14, 15])]
        )
        close(out[row], attend(scheme, params, alone)[0][0, -4:])


@pytest.mark.parametrize("implementation", IMPLEMENTATIONS)
def test_an_mlp_shared_by_heads(implementation):
    scheme, tokens = FIRE(SIZES["num_heads"]), make_batch()
    params = scheme.init(jax.random.key(0))
    p = jax.tree.map(lambda a: np.asarray(a, np.float64), params)
    s, h = p["shared"], p["heads"]

    def logit(b, n, i, j):
        z = np.log(0.1 * abs(i - j) + 1) / (np.log(0.1 * max(i, 4) + 1) + 1e-6)
        return np.maximum(s["w1"] * z + s["b1"], 0) @ h["w2"][n] + h["b2"][n]

    out, _ = attend(scheme, params, tokens, implementation=implementation)
    np.testing.assert_allclose(out, oracle(tokens, logit), atol=1e-5)

    def loss(params, implementation):
        out, _ = attend(scheme, params, tokens, implementation=implementation)
        return (out * tokens.q).sum()

    slopes = jax.jit(jax.grad(loss), static_argnums=1)
    grads, dense = (slopes(params, i) for i in (implementation, "reference"))
    for a, b in zip(jax.tree.leaves(grads), jax.tree.leaves(dense), strict=True):
        assert np.abs(b).max() > 0 or b.ndim == 1  # The last bias moves no softmax.
        np.testing.assert_allclose(a, b, rtol=2e-5, atol=2e-5)


def test_three_axes_of_coordinates():
    scheme, tokens = MRoPE(SIZES["head_dim"]), make_batch()
    text = at.count_up(BATCH, LENGTH)
    same = jnp.broadcast_to(text[None], (3, BATCH, LENGTH))
    out, _ = attend(scheme, {}, tokens, coordinates=same)
    plain, _ = attend(pe.RoPE(SIZES["head_dim"]), {}, tokens)
    np.testing.assert_allclose(out, plain, atol=1e-5)  # Text alone is plain RoPE.

    image = jnp.stack([text // 4, text % 4, text % 3])
    whole, _ = attend(scheme, {}, tokens, coordinates=image)
    assert np.abs(whole - plain).max() > 0.01
    shipped, _ = attend(
        pe.MRoPE(SIZES["head_dim"], sections=(1, 1, 2)), {}, tokens, coordinates=image
    )
    np.testing.assert_allclose(whole, shipped, atol=1e-5)
    cache, outs = new_cache(scheme, coordinates=image), []
    for part in (slice(0, 12), slice(12, 19)):
        out, cache = attend(scheme, {}, tokens[:, part], cache, coordinates=image[:, :, part])
        outs.append(out)
    np.testing.assert_allclose(jnp.concatenate(outs, 1), whole, atol=1e-5)


def plane(shared, slope, q, k):
    return -slope * jnp.abs(q - k).sum().astype(jnp.float32)


@pytest.mark.parametrize("implementation", IMPLEMENTATIONS)
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
    wanted = oracle(tokens, lambda b, n, i, j: -slopes[n] * distance[i, j])
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
    out, _ = decode(Halves(), params, tokens, [10, 1, 8], empty_cache(Halves()))
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
