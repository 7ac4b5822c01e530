"""Schemes on one axis of several, and relative biases on other distances."""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import posenc_jax as pe
from tests.oracle import attend, decode, embed, qkv, softmax_attention
from tests.support import build, parameters, slow, slow_but

ARRAYS = qkv(length=21)
COORDINATES = np.stack([np.arange(21) % 5, np.arange(21) // 5])[:, None]


@dataclasses.dataclass(frozen=True)
class Capped:
    """The authors of BiPE let places in a sentence stop at the last row of their table."""

    most: int

    def __call__(self, positions):
        return jnp.minimum(positions, self.most)


@dataclasses.dataclass(frozen=True)
class Times:
    factor: int

    def __call__(self, positions):
        return positions * self.factor


# One that acts in each place, and with each kind of rule.
KINDS = ["learned", "rope", "shaw", "transformer_xl", "fox", "dape", "rerope"]


@pytest.mark.parametrize("name", slow_but(KINDS, "learned", "rope", "shaw", "fox"))
def test_a_scheme_on_an_axis_reads_that_axis(name):
    scheme = build(pe.SCHEMES[name])
    params = parameters(scheme)
    x = np.random.default_rng(1).normal(size=(1, 21, 20)).astype("f4")

    def outputs(scheme, coordinates):
        embedded = pe.scheme_embedding(scheme, params, x, coordinates=coordinates)
        options = {"coordinates": coordinates, "is_causal": True}
        return embedded, pe.scheme_attention(scheme, params, *ARRAYS, x=x, **options)[0]

    both = jax.jit(lambda x: (outputs(pe.on_axis(scheme, 1), x), outputs(scheme, x[1])))
    for got, other in zip(*both(COORDINATES), strict=True):
        np.testing.assert_allclose(got, other, atol=1e-5)


@slow
def test_bipe():
    """The authors' Llama: learned places in a sentence, steep ALiBi on sentences."""
    inner = pe.with_positions(pe.ALiBi(num_heads=6), Times(96))
    learned = pe.with_positions(pe.LearnedAbsolute(max_length=4, model_dim=20), Capped(3))
    bipe = pe.chain(pe.on_axis(learned, 0), pe.on_axis(inner, 1))
    params = parameters(bipe)
    positions = pe.positions.bilevel(np.isin(np.arange(21), [2, 3, 11])[None])
    places = [0, 1, 2, 0, *range(8), *range(9)]
    sentences = [0] * 3 + [1] + [2] * 8 + [3] * 9
    np.testing.assert_array_equal(positions[:, 0], [places, sentences])
    embedded = embed(bipe, params, np.zeros((1, 21, 20), "f4"), positions)
    rows = np.minimum(places, 3)
    np.testing.assert_allclose(embedded[0], np.asarray(params[0]["table"])[rows], atol=1e-6)
    slopes = 96 * np.asarray(pe.alibi_slopes(6), np.float64)

    def logit(q, k, n, i, j):
        return q @ k / np.sqrt(8) - slopes[n] * (sentences[i] - sentences[j])

    out = attend(bipe, params, *ARRAYS, coordinates=positions, is_causal=True)
    np.testing.assert_allclose(out, softmax_attention(*ARRAYS, logit), atol=1e-5)
    cache = pe.new_cache(
        bipe, 1, 21, num_heads=6, num_kv_heads=3, head_dim=8, coordinates=positions
    )
    for part in (slice(0, 19), slice(19, 20), slice(20, 21)):
        where = {"coordinates": np.asarray(positions)[:, :, part]}
        here, cache = decode(bipe, params, cache, *(a[:, part] for a in ARRAYS), **where)
        np.testing.assert_allclose(here, out[:, part], atol=2e-5)


def test_coordinates_without_axes_are_read_unchanged():
    rope = pe.RoPE(head_dim=8)
    wrapped = pe.on_axis(rope, 1, 3)
    assert wrapped.traits.num_axes == 3 and wrapped == pe.on_axis(rope, 1, 3) != pe.on_axis(
        rope, 0, 3
    )
    np.testing.assert_allclose(attend(wrapped, {}, *ARRAYS), attend(rope, {}, *ARRAYS), atol=1e-6)


class Attending(pe.ALiBi):
    """Calls attention itself, as a user's scheme may."""

    def attend(self, params, q, k, v, q_coordinates, k_coordinates, *features_and_call):
        return features_and_call[-1](q, k, v, self.rules(params))


def test_a_promise_about_coordinates_is_none_about_others():
    """Without it, attention reads distances from slots."""
    outs = [
        attend(
            pe.with_positions(scheme(num_heads=6), Times(3)), {}, *ARRAYS, is_causal=True, **more
        )
        for scheme, more in (
            (Attending, {"implementation": "xla", "contiguous": True}),
            (pe.ALiBi, {"implementation": "reference"}),
        )
    ]
    np.testing.assert_allclose(*outs, atol=1e-5)


FIRE = pe.FIRE(num_heads=1)
ERRORS = [
    (
        lambda: pe.with_positions(pe.streaming(pe.RoPE(head_dim=8)), abs),
        {},
        "streaming compares coordinates with its window, so that they must be positions",
    ),
    (
        lambda: pe.on_axis(pe.streaming(pe.RoPE(head_dim=8)), 0),
        {},
        "on_axis: streaming compares coordinates with its window",
    ),
    (lambda: pe.on_axis(pe.NoPE(), 0), {}, "on_axis: .*NoPE.* reads no positions"),
    (lambda: pe.on_axis(pe.AxialRoPE(head_dim=8), 0), {}, "must read one axis, got AxialRoPE"),
    (lambda: pe.on_axis(pe.StickBreaking(), 0), {}, "StickBreaking.* reads all keys between"),
    (lambda: pe.on_axis(pe.RoPE(head_dim=8), 2), {}, "got axis 2 of 2"),
    (lambda: pe.on_axis(pe.RoPE(head_dim=8), 0, 1), {}, "got axis 0 of 1"),
    (
        lambda: pe.on_distances(
            pe.FIRE(num_heads=1).rules(parameters(pe.FIRE(num_heads=1))), jnp.arange(3)
        ),
        {},
        "on_distances: .* does not depend on the distance alone",
    ),
    (
        lambda: pe.on_distances(pe.ALiBi(num_heads=1).rules({}), jnp.zeros((2, 2))),
        {},
        r"on_distances: past must be \[L\], got shape \(2, 2\)",
    ),
    (
        lambda: pe.on_distances(
            pe.ALiBi(num_heads=1).rules({}), jnp.arange(3), jnp.zeros(0, jnp.int32)
        ),
        {},
        "on_distances: future must have at least one distance",
    ),
    (lambda: pe.on_axis(pe.RoPE, 0), {}, "on_axis: scheme must be a Scheme, got", TypeError),
    (lambda: pe.with_positions("rope", abs), {}, "scheme must be a Scheme, got 'ro", TypeError),
    (lambda: pe.streaming(pe.RoPE), {}, "scheme must be a Scheme, got <class", TypeError),
]
