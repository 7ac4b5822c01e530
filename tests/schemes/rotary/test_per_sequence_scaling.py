"""Frequencies by the length of each sequence, against transformers' formulas per sequence."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import AxisType, NamedSharding, PartitionSpec

import posenc_jax as pe
from posenc_jax.positions import from_segment_ids
from posenc_jax.schemes.rotary.per_sequence_scaling import segment_lengths
from tests.oracle import attend, qkv, softmax_attention, turned
from tests.support import LENGTH, ROTARY_OPTIONS, close, decode, empty_cache, output, slow

_GROWN = {"scaling": pe.DynamicNTK(factor=4.0, original_max_position=8, length=None)}
OPTIONS = {pe.RoPEByLength: {**ROTARY_OPTIONS, **_GROWN}}

LONG = pe.LongRoPE(
    short_factor=(1.0, 1.1, 1.2, 1.3),
    long_factor=(1.0, 1.5, 4.0, 16.0),
    factor=8.0,
    original_max_position=12,
    long=None,
)
NTK = pe.DynamicNTK(factor=3.0, original_max_position=12, length=None)
each = pytest.mark.parametrize("scaling", [LONG, NTK], ids=["longrope", "dynamic_ntk"])


def released(scaling, length, dim=8, theta=1e4):
    """transformers 5.23, modeling_rope_utils.py, for a batch of one sequence."""
    i = 2 * np.arange(dim // 2)
    if isinstance(scaling, pe.LongRoPE):
        past = length > scaling.original_max_position
        ext = np.array(scaling.long_factor if past else scaling.short_factor)
        g = np.sqrt(1 + np.log(scaling.factor) / np.log(scaling.original_max_position))
        return 1 / (ext * theta ** (i / dim)), g
    longest = max(length, scaling.original_max_position)
    grown = scaling.factor * longest / scaling.original_max_position - (scaling.factor - 1)
    return 1 / (theta * grown ** (dim / (dim - 2))) ** (i / dim), 1.0


@each
@pytest.mark.parametrize("length", [12, 13])
def test_matches_transformers_for_a_single_sequence(scaling, length):
    q, k, v = qkv(length=length)
    w, g = released(scaling, length)

    def logit(q, k, n, i, j):
        return g**2 * turned(q, (i - j) * w) @ k / np.sqrt(8)

    expected = softmax_attention(q, k, v, logit)
    out = attend(pe.RoPEByLength(head_dim=8, scaling=scaling), {}, q, k, v, is_causal=True)
    np.testing.assert_allclose(out, expected, atol=1e-5)
    frozen, factor = pe.rope_frequencies(8, scaling=scaling.frozen(length))
    np.testing.assert_allclose(frozen, w, rtol=1e-6)
    np.testing.assert_allclose(factor, g, rtol=1e-6)


@each
def test_angles_at_far_positions(scaling):
    """Relative error 1e-6 of the frequencies of dynamic NTK grows with the position."""
    base, _ = pe.rope_frequencies(8)
    for position in (1, 257, 10**6):
        positions = jnp.array([[position]])
        cos, sin = scaling.cos_sin(positions, positions + 1, base, 8, 1e4)
        w, g = released(scaling, position + 1)
        tolerance = 2e-6 if scaling is LONG else 2e-6 + 1e-6 * position * w
        assert np.all(np.abs(cos[0, 0] - g * np.cos(position * w)) < tolerance)
        assert np.all(np.abs(sin[0, 0] - g * np.sin(position * w)) < tolerance)


count = jax.jit(from_segment_ids)


def packed(scheme, tokens, segments):
    segments = np.array(segments, np.int32)
    placement = {"positions": count(segments), "segment_ids": segments}
    return np.asarray(output(scheme, {}, tokens, **placement))


@slow
@each
def test_rows_and_segments_of_different_length_equal_rows_alone(scaling, tokens):
    scheme = pe.RoPEByLength(head_dim=8, scaling=scaling)
    # Row 0 is long. Row 1 is short, and padded on the left. The same rows again, packed.
    out = packed(scheme, tokens, [[0] * 19, [-1] * 9 + [0] * 10])

    def alone(part):
        """The tokens of a part first, and padding after them."""
        length = part.stop - part.start
        first = tokens.map(lambda a: np.roll(a, -part.start, 1))
        return packed(scheme, first, [[0] * length + [-1] * (19 - length)] * 2)[:, :length]

    close(out[0], output(scheme, {}, tokens)[0])
    close(out[1, 9:], alone(slice(9, 19))[1])
    long = packed(scheme, tokens.map(lambda a: np.roll(a, -9, 1)), [[0] * 19] * 2)
    assert np.abs(out[1, 9:] - long[1, :10]).max() > 1e-3

    out = packed(scheme, tokens, [[5] * 14 + [2] * 5, [0] * 5 + [1] * 14])
    for row, cut in enumerate((14, 5)):
        for part in (slice(0, cut), slice(cut, 19)):
            close(out[row, part], alone(part)[row])


@slow
@each
def test_rows_cross_the_trained_length_at_their_own_step(scaling, tokens):
    """Row 0 begins with 11 tokens, row 1 with 7, in one padded prompt."""
    scheme = pe.RoPEByLength(head_dim=8, scaling=scaling)
    index, starts = np.arange(LENGTH)[None], np.array([[0], [4]])
    segments = np.where(index >= starts, 0, -1)[:, :11]
    placement = {"positions": np.maximum(index - starts, 0)[:, :11], "segment_ids": segments}
    _, cache = decode(scheme, {}, tokens[:, :11], [11], empty_cache(scheme), **placement)
    out, _ = decode(scheme, {}, tokens[:, 11:], [1] * 8, cache)
    for step in range(8):
        later = [-1] * (7 - step)
        whole = packed(
            scheme, tokens, [[0] * (12 + step) + later, [-1] * 4 + [0] * (8 + step) + later]
        )
        close(out[:, step], whole[:, 11 + step])


def test_lengths_on_an_explicit_mesh():
    ids = jnp.asarray([[0] * 14 + [1] * 5] * 8)
    arrays = from_segment_ids(ids), ids, ids
    with jax.set_mesh(jax.make_mesh((8,), ("data",), axis_types=(AxisType.Explicit,))):
        spread = NamedSharding(jax.sharding.get_mesh(), PartitionSpec("data"))
        out = jax.jit(segment_lengths)(*jax.device_put(arrays, spread))
    assert out.sharding.spec[0] == "data"
    np.testing.assert_array_equal(out, [[14] * 14 + [5] * 5] * 8)


def test_lengths_of_sequences():
    ids = jnp.array([[0, 0, 7, 7, 7, -1]])
    positions = jnp.array([[0, 1, 4, 6, 5, 90]])
    np.testing.assert_array_equal(segment_lengths(positions, ids, ids), [[2, 2, 7, 7, 7, 91]])
    np.testing.assert_array_equal(segment_lengths(positions, ids, jnp.array([[7, 0]])), [[7, 2]])
    np.testing.assert_array_equal(segment_lengths(positions, None, None), [[91]])


BY_LENGTH, NAME = pe.RoPEByLength, "rope_by_length: scaling must be per sequence"
ERRORS = [
    (BY_LENGTH, {"scaling": LONG.frozen(99)}, f"{NAME}.* RoPE is for"),
    (BY_LENGTH, {"scaling": pe.PI(factor=2.0)}, NAME),
    (pe.RoPE, {"scaling": LONG}, r"LongRoPE: long=None .* RoPEByLength"),
    (pe.RoPE, {"scaling": (NTK, pe.Resonance())}, r"DynamicNTK: length=None .* RoPEByLength"),
    (BY_LENGTH, {"rotary_dim": 6, "scaling": LONG}, "LongRoPE: has .* 4 pairs, but 3 rotate"),
    (BY_LENGTH, {"head_dim": 2, "scaling": NTK}, "NTK: needs more than 2 rotary .*, got 2"),
]
