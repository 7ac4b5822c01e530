"""Axial RoPE against the vision models that use it, each written out from its own code."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import posenc_jax as pe
from tests.oracle import attend, key, qkv, query
from tests.support import slow

OPTIONS = {
    pe.AxialRoPE: {
        "theta": 10.0,
        "axes": (1, 0),
        "frequencies": "dealt",
        "layout": "half_per_axis",
        "rotary_dim": 4,
    }
}


def rotate_pairs(x, angles):
    """view_as_complex, times polar(1, angles), view_as_real."""
    z = (x[0::2] + 1j * x[1::2]) * np.exp(1j * angles)
    return np.stack([z.real, z.imag], -1).ravel()


def rotate_half(x, angles):
    """x * cos(cat(f, f)) + rotate_half(x) * sin(cat(f, f))."""
    both, half = np.concatenate([angles, angles]), len(x) // 2
    return x * np.cos(both) + np.concatenate([-x[half:], x[:half]]) * np.sin(both)


def columns_first(x, row, column, theta=1e4):
    """rope-vit: compute_axial_cis and apply_rotary_emb, with theta 100. transformers 5.24:
    Sam3ViTRotaryEmbedding, rotate_pairwise; Llama4VisionRotaryEmbedding, which counts from 1."""
    f = 1.0 / theta ** (np.arange(0, len(x), 4) / len(x))
    return rotate_pairs(x, np.concatenate([column * f, row * f]))


def eva(x, row, column):
    """timm 1.0.31: build_rotary_pos_embed(in_pixels=False), apply_rot_embed."""
    bands = 1.0 / 1e4 ** (np.arange(len(x) // 4) / (len(x) // 4))
    angles = np.repeat(np.concatenate([row * bands, column * bands]), 2)
    swapped = np.stack([-x[1::2], x[0::2]], -1).ravel()
    return x * np.cos(angles) + swapped * np.sin(angles)


def rows_first(x, row, column, theta=1e4):
    """transformers 5.23: Qwen2VLVisionRotaryEmbedding; DINOv3ViTRopePositionEmbedding, with theta
    100, of coordinates in [-1, 1] times 2 pi."""
    f = 1 / theta ** np.arange(0, 1, 4 / len(x))
    return rotate_half(x, np.concatenate([row * f, column * f]))


def gemma4(x, row, column):
    """transformers 5.24, Gemma4VisionRotaryEmbedding and apply_multidimensional_rope.

    Its image processor stacks the grid with the column first.
    """
    size = len(x) // 2
    f = 1.0 / 100.0 ** (np.arange(0, size, 2) / size)
    return np.concatenate([rotate_half(x[:size], column * f), rotate_half(x[size:], row * f)])


def kimi(x, row, column):
    """transformers 5.24, Kimi_K25VisionRotaryEmbedding: transposed, and the column first."""
    size = len(x) // 2
    f = 1.0 / 1e4 ** (np.arange(0, size, 2) / size)
    return rotate_half(x, np.stack([column * f, row * f], -1).ravel())


def pixtral(x, row, column):
    """transformers 5.23, PixtralVisionRotaryEmbedding."""
    f = 1.0 / 1e4 ** (np.arange(0, len(x), 2) / len(x))
    return rotate_half(x, np.concatenate([row * f[0::2], column * f[1::2]]))


COLUMNS, PAIRS = {"axes": (1, 0)}, {"layout": "interleaved"}
MODELS = {
    "rope_vit": (functools.partial(columns_first, theta=100.0), COLUMNS | PAIRS),
    "llama4": (lambda x, i, j: columns_first(x, i + 1, j + 1), {"theta": 1e4} | COLUMNS | PAIRS),
    "eva": (eva, {"theta": 1e4} | PAIRS),
    "qwen2_vl": (rows_first, {"theta": 1e4}),
    "dinov3": (functools.partial(rows_first, theta=100.0), {}),
    "sam3": (columns_first, {"theta": 1e4} | COLUMNS | PAIRS),
    "gemma4": (gemma4, COLUMNS | {"layout": "half_per_axis"}),
    "pixtral": (pixtral, {"theta": 1e4, "frequencies": "dealt"}),
    "kimi": (kimi, COLUMNS | {"theta": 1e4, "frequencies": "alternating"}),
}


def moved(name, coordinates):
    """The coordinates to give for the model's own of the same patch."""
    return coordinates + 1 if name == "llama4" else coordinates


@pytest.mark.parametrize("name, dtype", [*((name, "i4") for name in MODELS), ("dinov3", "f4")])
def test_matches_the_models(name, dtype):
    random, whole = np.random.default_rng(0), dtype == "i4"
    x = random.normal(size=(2, 7, 6, 12)).astype(np.float32)
    coordinates = random.integers(0, 10**6 if whole else 50, size=(2, 2, 7)).astype(dtype)
    coordinates += np.asarray(0.37, dtype)
    port, settings = MODELS[name]
    scheme, places = pe.AxialRoPE(head_dim=12, **settings), moved(name, coordinates)
    out = query(scheme, {}, x, places)
    np.testing.assert_array_equal(out, key(scheme, {}, x, places))
    for b, t, n in np.ndindex(2, 7, 6):
        expected = port(x[b, t, n].astype(float), *coordinates[:, b, t].astype(float))
        np.testing.assert_allclose(out[b, t, n], expected, rtol=0, atol=3e-6 if whole else 3e-5)


@pytest.mark.parametrize(
    "name, angles",
    [
        # Made by the models' own code at row 1 and column 2 of a head of 8.
        ("qwen2_vl", [1.0, 0.01, 2.0, 0.02]),
        ("pixtral", [1.0, 0.01, 0.2, 0.002]),
        ("rope_vit", [2.0, 0.2, 1.0, 0.1]),
        ("llama4", [3.0, 0.03, 2.0, 0.02]),
        ("gemma4", [2.0, 0.2, 1.0, 0.1]),
        ("kimi", [2.0, 1.0, 0.02, 0.01]),
    ],
)
def test_angles_are_those_that_the_models_compute(name, angles):
    scheme = pe.AxialRoPE(head_dim=8, **MODELS[name][1])
    pairs = {"half": [0, 1, 2, 3], "interleaved": [0, 2, 4, 6], "half_per_axis": [0, 1, 4, 5]}
    first = np.array(pairs[scheme.layout])
    second = first + {"half": 4, "interleaved": 1, "half_per_axis": 2}[scheme.layout]
    x = np.isin(np.arange(8), first).astype("f4").reshape(1, 1, 1, 8)
    out = query(scheme, {}, x, moved(name, np.array([1, 2]).reshape(2, 1, 1))).ravel()
    np.testing.assert_allclose(np.arctan2(out[second], out[first]), angles, atol=2e-6)


@slow
def test_coordinates_of_one_row_serve_a_batch():
    arrays = qkv(batch=2, length=7, dim=12)
    row = np.random.default_rng(0).integers(0, 50, size=(2, 1, 7))
    rows = np.repeat(row, 2, 1)
    outs = [attend(pe.AxialRoPE(head_dim=12), {}, *arrays, coordinates=c) for c in (row, rows)]
    np.testing.assert_allclose(*outs, atol=3e-6)
    rule = pe.LogitBias(lambda shared, head, q, k: -jnp.abs(q - k).sum().astype("f4"))
    for tiles in ("reference", "xla"):
        call = functools.partial(pe.attention, *arrays, rules=rule, implementation=tiles)
        outs = [call(q_coordinates=c, k_coordinates=c) for c in (row, rows)]
        np.testing.assert_allclose(*outs, atol=3e-6)


def test_centred_coordinates_are_those_of_dinov3():
    # DINOv3's RopePositionEmbedding, run for 2 x 2 patches and a head of 8.
    expected = np.pi * np.array([[-1, -1], [-1, 1], [1, -1], [1, 1]])
    coordinates = pe.grid_coordinates(1, 2, 2, centred=True)
    np.testing.assert_allclose(coordinates[:, 0].T, expected, rtol=1e-6)
    # get_patches_center_coordinates for 3 x 5, times 2 pi.
    coordinates = pe.grid_coordinates(3, 3, 5, prefix=2, centred=True)
    assert coordinates.shape == (2, 3, 17) and coordinates.dtype == jnp.float32
    assert np.all(np.asarray(coordinates)[:, :, :2] == 0)
    for i, (row, column) in enumerate(np.ndindex(3, 5)):
        expected = [2 * np.pi * (2 * (row + 0.5) / 3 - 1), 2 * np.pi * (2 * (column + 0.5) / 5 - 1)]
        np.testing.assert_allclose(coordinates[:, 1, 2 + i], expected, rtol=1e-6, atol=1e-6)


def test_axes_of_unequal_size_are_a_chain():
    parts = [(16, 0), (56, 16), (56, 72)]  # Flux, axes_dim: black-forest-labs/flux, math.py, rope.
    options = {"layout": "interleaved", "theta": 1e4}
    ropes = (pe.RoPE(128, rotary_dim=d, rotary_start=s, **options) for d, s in parts)
    scheme = pe.chain(*(pe.on_axis(rope, axis, 3) for axis, rope in enumerate(ropes)))
    rng = np.random.default_rng(0)
    x, coordinates = rng.normal(size=(2, 5, 6, 128)), rng.integers(0, 4096, (3, 2, 5))
    expected = x.copy()
    for c, (d, start) in zip(coordinates, parts, strict=True):
        z = x[..., start : start + d : 2] + 1j * x[..., start + 1 : start + d : 2]
        turned = z * np.exp(1j * c[..., None, None] * 1e4 ** (-np.arange(0, d, 2) / d))
        expected[..., start : start + d : 2] = turned.real
        expected[..., start + 1 : start + d : 2] = turned.imag
    got = query(scheme, scheme.init(jax.random.key(0)), x.astype("f4"), jnp.asarray(coordinates))
    np.testing.assert_allclose(got, expected, atol=2e-6)


AXIAL, Q = pe.AxialRoPE(head_dim=8), qkv(length=5)[0]
ERRORS = [
    (pe.AxialRoPE, {"head_dim": 6}, "2 axes need a multiple of 4 dimensions, got 6"),
    (pe.AxialRoPE, {"axes": ()}, r"axes must be numbers of coordinate axes, got \(\)"),
    (pe.AxialRoPE, {"axes": (0, -1)}, r"axes must be numbers of coordinate axes, got \(0, -1\)"),
    (pe.AxialRoPE, {"rotary_dim": 12}, r"rotary_dim must be in \[0, head_dim=8\], got 12"),
    (lambda: AXIAL.query({}, Q, np.zeros((1, 1, 5), int)), {}, r"must be \[2, B, T\].*\(1, 1"),
    (lambda: pe.AxialRoPE(4).query({}, Q, np.zeros((2, 1, 5), int)), {}, "is for head_dim 4, got"),
    (lambda: pe.grid_coordinates(1, 0, 3), {}, "grid_coordinates: rows must be >= 1, got 0"),
]
