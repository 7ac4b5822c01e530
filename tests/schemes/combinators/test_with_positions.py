"""Schemes on one axis of several, and relative biases on other distances."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import posenc_jax as pe
from tests.oracle import attend, decode, embed, qkv, softmax_attention
from tests.support import build, parameters, slow, slow_but

ARRAYS = qkv(length=21)
COORDINATES = np.stack([np.arange(21) % 5, np.arange(21) // 5])[:, None]


def capped(positions):
    """The authors of BiPE let places in a sentence stop at the last row of their table."""
    return jnp.minimum(positions, 3)


def steep(positions):
    return 96 * positions


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
    inner = pe.with_positions(pe.ALiBi(num_heads=6), steep)
    learned = pe.with_positions(pe.LearnedAbsolute(max_length=4, model_dim=20), capped)
    bipe = pe.chain(pe.on_axis(learned, 0), pe.on_axis(inner, 1))
    params = parameters(bipe)
    positions = pe.positions.bilevel(np.isin(np.arange(21), [2, 3, 11])[None])
    places = [0, 1, 2, 0, *range(8), *range(9)]
    sentences = [0] * 3 + [1] + [2] * 8 + [3] * 9
    np.testing.assert_array_equal(positions[:, 0], [places, sentences])
    embedded = embed(bipe, params, np.zeros((1, 21, 20), "f4"), positions)
    rows = np.asarray(params[0]["table"])[np.minimum(places, 3)]
    np.testing.assert_allclose(embedded[0], rows, atol=1e-6)
    slopes = 96 * np.asarray(pe.alibi_slopes(6), np.float64)

    def logit(q, k, n, i, j):
        return q @ k / np.sqrt(8) - slopes[n] * (sentences[i] - sentences[j])

    out = attend(bipe, params, *ARRAYS, coordinates=positions, is_causal=True)
    np.testing.assert_allclose(out, softmax_attention(*ARRAYS, logit), atol=1e-5)
    sizes = {"num_heads": 6, "num_kv_heads": 3, "head_dim": 8, "coordinates": positions}
    cache = pe.new_cache(bipe, 1, 21, **sizes)
    for part in (slice(0, 19), slice(19, 20), slice(20, 21)):
        arrays, places = [a[:, part] for a in ARRAYS], np.asarray(positions)[:, :, part]
        here, cache = decode(bipe, params, cache, *arrays, coordinates=places)
        np.testing.assert_allclose(here, out[:, part], atol=2e-5)


def test_coordinates_without_axes_are_read_unchanged():
    rope = pe.RoPE(head_dim=8)
    wrapped = pe.on_axis(rope, 1, 3)
    assert wrapped.traits.num_axes == 3
    assert wrapped == pe.on_axis(rope, 1, 3) != pe.on_axis(rope, 0, 3)
    np.testing.assert_allclose(attend(wrapped, {}, *ARRAYS), attend(rope, {}, *ARRAYS), atol=1e-6)


class Attending(pe.ALiBi):
    """Calls attention itself, as a user's scheme may."""

    def attend(self, params, q, k, v, q_coordinates, k_coordinates, *features_and_call):
        return features_and_call[-1](q, k, v, self.rules(params))


def test_a_promise_about_coordinates_is_none_about_others():
    """Without it, attention reads distances from slots."""
    user, same = (pe.with_positions(cls(num_heads=6), steep) for cls in (Attending, pe.ALiBi))
    options = {"is_causal": True, "implementation": "xla", "contiguous": True}
    out = attend(user, {}, *ARRAYS, **options)
    expected = attend(same, {}, *ARRAYS, is_causal=True, implementation="reference")
    np.testing.assert_allclose(out, expected, atol=1e-5)


def refused(message, make, *arguments, error=ValueError):
    return lambda: make(*arguments), {}, message, error


ROPE, ALIBI, STREAMING = pe.RoPE(head_dim=8), pe.ALiBi(1), pe.streaming(pe.RoPE(head_dim=8))


def on_distances(scheme, *distances):
    return pe.on_distances(scheme.rules(parameters(scheme)), *distances)


ERRORS = [
    refused("streaming compares .* must be positions", pe.with_positions, STREAMING, abs),
    refused("on_axis: streaming compares coordinates with its window", pe.on_axis, STREAMING, 0),
    refused("on_axis: .*NoPE.* reads no positions", pe.on_axis, pe.NoPE(), 0),
    refused("must read one axis, got AxialRoPE", pe.on_axis, pe.AxialRoPE(head_dim=8), 0),
    refused("StickBreaking.* reads all keys between", pe.on_axis, pe.StickBreaking(), 0),
    refused("got axis 2 of 2", pe.on_axis, ROPE, 2),
    refused("got axis 0 of 1", pe.on_axis, ROPE, 0, 1),
    refused("does not depend on the distance alone", on_distances, pe.FIRE(1), np.arange(3)),
    refused("future must have at least one", on_distances, ALIBI, np.arange(3), np.arange(0)),
    refused(r"past must be \[L\], got shape \(2, 2\)", on_distances, ALIBI, np.zeros((2, 2))),
    refused("on_axis: scheme must be a Scheme, got", pe.on_axis, pe.RoPE, 0, error=TypeError),
    refused("scheme must be a Scheme, got 'ro", pe.with_positions, "rope", abs, error=TypeError),
    refused("scheme must be a Scheme, got <class", pe.streaming, pe.RoPE, error=TypeError),
]
