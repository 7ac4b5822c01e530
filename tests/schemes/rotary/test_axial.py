"""Axial RoPE against the vision models that use it, each written out from its own code."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import posenc_jax as pe
from tests.oracle import key, qkv, query, softmax_attention
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

LIKE = {
    "rope_vit": {"axes": (1, 0), "layout": "interleaved"},
    "llama4": {"theta": 1e4, "axes": (1, 0), "layout": "interleaved"},
    "eva": {"theta": 1e4, "layout": "interleaved"},
    "qwen2_vl": {"theta": 1e4},
    "dinov3": {},
    "sam3": {"theta": 1e4, "axes": (1, 0), "layout": "interleaved"},
    "gemma4": {"axes": (1, 0), "layout": "half_per_axis"},
    "pixtral": {"theta": 1e4, "frequencies": "dealt"},
    "kimi": {"theta": 1e4, "axes": (1, 0), "frequencies": "alternating"},
}


def complex_pairs(x, angles):
    """view_as_complex, times polar(1, angles), view_as_real."""
    return np.stack([x[0::2], x[1::2]]).T.copy().view(complex)[:, 0] * np.exp(1j * angles)


def flat(z):
    return np.stack([z.real, z.imag], -1).ravel()


def rotate_half(x, angles):
    """x * cos(cat(f, f)) + rotate_half(x) * sin(cat(f, f))."""
    both, half = np.concatenate([angles, angles]), len(x) // 2
    return x * np.cos(both) + np.concatenate([-x[half:], x[:half]]) * np.sin(both)


def rope_vit(x, row, column):
    """rope-vit: compute_axial_cis, columns first; apply_rotary_emb."""
    f = 1.0 / 100.0 ** (np.arange(0, len(x), 4)[: len(x) // 4] / len(x))
    return flat(complex_pairs(x, np.concatenate([column * f, row * f])))


def llama4(x, row, column):
    """transformers 5.23, Llama4VisionRotaryEmbedding and vision_apply_rotary_emb."""
    size = len(x) // 2
    f = 1.0 / 1e4 ** (np.arange(0, size, 2)[: size // 2] / size)
    return flat(complex_pairs(x, np.concatenate([(column + 1) * f, (row + 1) * f])))


def eva(x, row, column):
    """timm 1.0.31: build_rotary_pos_embed(in_pixels=False), apply_rot_embed."""
    bands = 1.0 / 1e4 ** (np.arange(len(x) // 4) / (len(x) // 4))
    angles = np.repeat(np.concatenate([row * bands, column * bands]), 2)
    swapped = np.stack([-x[1::2], x[0::2]], -1).ravel()
    return x * np.cos(angles) + swapped * np.sin(angles)


def qwen2_vl(x, row, column):
    """transformers 5.23, Qwen2VLVisionRotaryEmbedding."""
    size = len(x) // 2
    f = 1.0 / 1e4 ** (np.arange(0, size, 2) / size)
    return rotate_half(x, np.concatenate([row * f, column * f]))


def dinov3(x, row, column):
    """transformers 5.23, DINOv3ViTRopePositionEmbedding, coordinates in [-1, 1] times 2 pi."""
    f = 1 / 100.0 ** np.arange(0, 1, 4 / len(x))
    return rotate_half(x, np.concatenate([row * f, column * f]))


def gemma4(x, row, column):
    """transformers 5.24, Gemma4VisionRotaryEmbedding and apply_multidimensional_rope.

    Its image processor stacks the grid with the column first.
    """
    size = len(x) // 2
    f = 1.0 / 100.0 ** (np.arange(0, size, 2) / size)
    return np.concatenate([rotate_half(x[:size], column * f), rotate_half(x[size:], row * f)])


def sam3(x, row, column):
    """transformers 5.24, Sam3ViTRotaryEmbedding, precompute_positions and rotate_pairwise."""
    size = len(x) // 2
    f = 1.0 / 1e4 ** (np.arange(0, size, 2) / size)
    return flat(complex_pairs(x, np.concatenate([column * f, row * f])))


def kimi(x, row, column):
    """transformers 5.24, Kimi_K25VisionRotaryEmbedding: transposed, and the column first."""
    size = len(x) // 2
    f = 1.0 / 1e4 ** (np.arange(0, size, 2) / size)
    return rotate_half(x, np.stack([column * f, row * f], -1).ravel())


def pixtral(x, row, column):
    """transformers 5.23, PixtralVisionRotaryEmbedding."""
    f = 1.0 / 1e4 ** (np.arange(0, len(x), 2) / len(x))
    return rotate_half(x, np.concatenate([row * f[0::2], column * f[1::2]]))


MODELS = [rope_vit, llama4, eva, qwen2_vl, dinov3, sam3, gemma4, pixtral, kimi]
MODELS = {f.__name__: f for f in MODELS}


def moved(name, coordinates):
    """The coordinates to give for the model's own of the same patch."""
    return coordinates + 1 if name == "llama4" else coordinates


@pytest.mark.parametrize("name", MODELS)
@pytest.mark.parametrize("number", [np.int32, np.float32])
def test_matches_the_models(name, number):
    random = np.random.default_rng(0)
    x = random.normal(size=(2, 7, 6, 12)).astype(np.float32)
    far = 10**6 if number == np.int32 else 50
    coordinates = random.integers(0, far, size=(2, 2, 7)).astype(number)
    coordinates += np.asarray(0.37, number)
    scheme = pe.AxialRoPE(head_dim=12, **LIKE[name])
    out = query(scheme, {}, jnp.asarray(x), jnp.asarray(moved(name, coordinates)))
    np.testing.assert_array_equal(
        out, key(scheme, {}, jnp.asarray(x), jnp.asarray(moved(name, coordinates)))
    )
    for b, t, n in np.ndindex(2, 7, 6):
        expected = MODELS[name](x[b, t, n].astype(float), *coordinates[:, b, t].astype(float))
        tolerance = 3e-6 if number == np.int32 else 3e-5
        np.testing.assert_allclose(out[b, t, n], expected, rtol=0, atol=tolerance)


@pytest.mark.parametrize(
    "name, angles, pairs",
    [
        # Made by the models' own code at row 1 and column 2 of a head of 8.
        ("qwen2_vl", [1.0, 0.01, 2.0, 0.02], [(0, 4), (1, 5), (2, 6), (3, 7)]),
        ("pixtral", [1.0, 0.01, 0.2, 0.002], [(0, 4), (1, 5), (2, 6), (3, 7)]),
        ("rope_vit", [2.0, 0.2, 1.0, 0.1], [(0, 1), (2, 3), (4, 5), (6, 7)]),
        ("llama4", [3.0, 0.03, 2.0, 0.02], [(0, 1), (2, 3), (4, 5), (6, 7)]),
        ("gemma4", [2.0, 0.2, 1.0, 0.1], [(0, 2), (1, 3), (4, 6), (5, 7)]),
        ("kimi", [2.0, 1.0, 0.02, 0.01], [(0, 4), (1, 5), (2, 6), (3, 7)]),
    ],
)
def test_angles_are_those_that_the_models_compute(name, angles, pairs):
    coordinates = moved(name, jnp.array([1, 2]).reshape(2, 1, 1))
    x = jnp.zeros(8).at[np.array([a for a, _ in pairs])].set(1.0).reshape(1, 1, 1, 8)
    out = np.asarray(query(pe.AxialRoPE(head_dim=8, **LIKE[name]), {}, x, coordinates)).ravel()
    got = [np.arctan2(out[b], out[a]) for a, b in pairs]
    np.testing.assert_allclose(got, angles, atol=2e-6)


@slow
def test_coordinates_of_one_row_serve_a_batch():
    q, k, v = qkv(batch=2, length=7, dim=12)
    c = np.random.default_rng(0).integers(0, 50, size=(2, 1, 7))
    turn = np.vectorize(lambda t, x: dinov3(x, *c[:, 0, t]), signature="(),(n)->(n)")
    at = np.arange(7)[:, None]
    expected = softmax_attention(
        turn(at, q), turn(at, k), v, lambda q, k, *_: q @ k / 12**0.5, sees=lambda i, j: True
    )
    scheme = pe.AxialRoPE(head_dim=12)
    out, _ = pe.scheme_attention(scheme, {}, q, k, v, coordinates=c)
    np.testing.assert_allclose(out, expected, atol=3e-6)

    rule = pe.LogitBias(lambda shared, head, q, k: -jnp.abs(q - k).sum().astype("f4"))

    def logit(q, k, n, i, j):
        return q @ k / 12**0.5 - np.abs(c[:, 0, i] - c[:, 0, j]).sum()

    expected = softmax_attention(q, k, v, logit, sees=lambda i, j: True)
    for tiles in ("reference", "xla"):
        call = {"q_coordinates": c, "k_coordinates": c, "rules": rule, "implementation": tiles}
        np.testing.assert_allclose(pe.attention(q, k, v, **call), expected, atol=3e-6)


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


ERRORS = [
    (pe.AxialRoPE, {"head_dim": 6}, "2 axes need a multiple of 4 dimensions, got 6"),
    (pe.AxialRoPE, {"axes": ()}, r"axes must be numbers of coordinate axes, got \(\)"),
    (pe.AxialRoPE, {"axes": (0, -1)}, r"axes must be numbers of coordinate axes, got \(0, -1\)"),
    (pe.AxialRoPE, {"rotary_dim": 12}, r"rotary_dim must be in \[0, head_dim=8\], got 12"),
]


def test_errors_name_the_sizes():
    with pytest.raises(ValueError, match=r"axial_rope: coordinates must be \[2, B, T\].*\(1, 1"):
        pe.AxialRoPE(head_dim=8).query({}, qkv(length=5)[0], jnp.zeros((1, 1, 5), int))
    with pytest.raises(ValueError, match="axial_rope: the scheme is for head_dim 4"):
        pe.AxialRoPE(head_dim=4).query({}, qkv(length=5)[0], jnp.zeros((2, 1, 5), int))
    with pytest.raises(ValueError, match=r"grid_coordinates: rows must be >= 1, got 0"):
        pe.grid_coordinates(1, 0, 3)
