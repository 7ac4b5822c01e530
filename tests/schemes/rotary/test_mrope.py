"""M-RoPE against transformers' axes and a loop over pairs, and RoPE on text."""

import jax.numpy as jnp
import numpy as np
import pytest

import posenc_jax as pe
from posenc_jax.schemes.rotary.mrope import mrope_axes
from tests.oracle import key, query
from tests.support import ROTARY_OPTIONS

_PAIRS = {"rotary_dim": 6, "sections": (1, 2, 1), "order": "alternating"}
OPTIONS = {pe.MRoPE: {**ROTARY_OPTIONS, **_PAIRS}}

T, H, W = range(3)
# transformers 5.23: Qwen2VLTextRotaryEmbedding.forward; recomposition_frequencies of qwen3_vl and
# ernie4_5_vl_moe.
PUBLISHED = [
    ((2, 3, 3), "contiguous", [T, T, H, H, H, W, W, W]),
    ((4, 2, 2), "interleaved", [T, H, W, T, H, W, T, T]),
    ((24, 20, 20), "interleaved", [T, H, W] * 20 + [T] * 4),
    ((11, 11, 10), "interleaved", [T, H, W] * 10 + [T, H]),
    ((2, 2, 2), "alternating", [H, W, H, W, T, T]),
    # m_modify_forward of Wiselnn570/VideoRoPE, with its sections; vLLM's XDRotaryEmbedding.
    ((16, 24, 24), "alternating", [H, W] * 24 + [T] * 16),
    ((2, 2, 1, 3), "contiguous", [0, 0, 1, 1, 2, 3, 3, 3]),
]


def rotate(x, place, axes, theta, layout):
    """The rotation of transformers, pair by pair in float64."""
    out, half = np.array(x, np.float64), len(axes)
    for p, axis in enumerate(axes):
        a, b = (2 * p, 2 * p + 1) if layout == "interleaved" else (p, p + half)
        z = (out[a] + 1j * out[b]) * np.exp(1j * float(place[axis]) * theta ** (-p / half))
        out[a], out[b] = z.real, z.imag
    return out


@pytest.mark.parametrize("sections, order, axes", PUBLISHED)
def test_axes_are_the_published_ones(sections, order, axes):
    assert list(mrope_axes(sections, order)) == axes


def test_hope_of_vision_models_matches_the_code_of_its_authors():
    """hrlics/HoPE, apply_hybrid_multimodal_rotary_pos_emb, from torch to NumPy in float64."""
    scaling = pe.ClippedFrequencies(pairs=2, hard=True)
    scheme = pe.MRoPE(head_dim=16, order="alternating", sections=(2, 3, 3), scaling=scaling)
    random = np.random.default_rng(0)
    coordinates, x = random.integers(0, 2000, size=(3, 1, 7)), random.normal(size=(1, 7, 6, 16))
    angles = np.tile(coordinates[..., None] * 10000.0 ** (-np.arange(8) / 8), 2)
    cos, sin = [], []
    for start, section in ((0, 6), (6, 2), (8, 6), (14, 2)):
        for i in range(start, start + section):
            axis = 1 + (i - start) % 2
            cos.append(np.cos(angles[axis, ..., i]) if section == 6 else np.ones((1, 7)))
            sin.append(np.sin(angles[axis, ..., i]) if section == 6 else np.zeros((1, 7)))
    cos, sin = (np.stack(c, -1)[:, :, None] for c in (cos, sin))
    expected = x * cos + np.concatenate([-x[..., 8:], x[..., :8]], -1) * sin
    out = query(scheme, {}, jnp.asarray(x, jnp.float32), jnp.asarray(coordinates))
    np.testing.assert_allclose(out, expected, rtol=0, atol=3e-6)


def test_default_sections_are_the_published_ones():
    assert pe.MRoPE(head_dim=128).axes == mrope_axes((16, 24, 24))
    qwen3 = pe.MRoPE(head_dim=128, order="interleaved")
    assert qwen3.axes == mrope_axes((24, 20, 20), "interleaved")


@pytest.mark.parametrize(
    "sections, order, layout, dtype",
    [
        (None, "contiguous", "interleaved", "i4"),
        (None, "interleaved", "half", "f4"),
        (None, "alternating", "half", "i4"),
        ((2, 2, 1, 3), "contiguous", "half", "i4"),
    ],
)
def test_matches_the_loop_over_pairs(sections, order, layout, dtype):
    options = {"theta": 1e6, "layout": layout, "rotary_dim": 16}
    scheme = pe.MRoPE(head_dim=20, sections=sections, order=order, **options)
    random, far = np.random.default_rng(0), 10**6 if dtype == "i4" else 300
    coordinates = random.integers(0, far, size=(scheme.traits.num_axes, 2, 7)).astype(dtype)
    x = random.normal(size=(2, 7, 6, 20)).astype(np.float32)
    out = query(scheme, {}, x, coordinates)
    for b, t, n in np.ndindex(2, 7, 6):
        expected = rotate(x[b, t, n, :16], coordinates[:, b, t], scheme.axes, 1e6, layout)
        tolerance = 3e-6 if dtype == "i4" else 1e-4
        np.testing.assert_allclose(out[b, t, n, :16], expected, rtol=0, atol=tolerance)
    np.testing.assert_array_equal(out[..., 16:], x[..., 16:])
    np.testing.assert_array_equal(out, key(scheme, {}, x, coordinates))


Q, PLACES = np.zeros((1, 5, 6, 8), "f4"), np.zeros((2, 1, 5), "i4")
ERRORS = [
    (pe.MRoPE, {"sections": (2, 2)}, "sections must be three positive numbers of pairs"),
    (pe.MRoPE, {"sections": (4, 4, 0)}, r"sections must be three positive .* got \(4, 4, 0\)"),
    (pe.MRoPE, {"sections": (2, 2, 2)}, r"sections must add up to 4 pairs, got \(2, 2, 2\)"),
    (pe.MRoPE, {"sections": (1, 2, 1), "order": "alternating"}, "as many pairs for rows"),
    (pe.MRoPE, {"sections": (1, 1, 2), "order": "interleaved"}, "need more"),
    (pe.MRoPE, {"head_dim": 4}, "2 pairs are too few for the default sections"),
    (pe.MRoPE, {"rotary_dim": 5}, "rotary dim must be even and positive, got 5"),
    (lambda: pe.MRoPE(8).query({}, Q, PLACES), {}, r"must be \[3, B, T\] .*, got \(2, 1, 5\)"),
    (
        lambda: pe.scheme_attention(pe.MRoPE(8), {}, Q, Q, Q, coordinates=PLACES),
        {},
        r"coordinates of 3 axes, \[A, B, T\] .*, got \(2, 1, 5\)",
    ),
]
