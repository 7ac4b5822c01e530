"""The layouts of RoPE against the models that use them, and weights moved between layouts."""

import itertools

import jax.numpy as jnp
import numpy as np
import pytest

import posenc_jax as pe
from tests.oracle import apply_rope

# x = [1, 2, 3, 4] at position 1. Made by gpt-neox, apply_rotary_pos_emb; mesh-transformer-jax, the
# same name; nanochat, apply_rotary_emb; transformers, deepseek_v3, apply_rotary_pos_emb_interleave.
AT_ONE = {
    "half": [-1.98411065, 1.95990067, 2.4623779, 4.01979967],
    "interleaved": [-1.14263966, 1.9220756, 2.95985067, 4.0297995],
    "half_negative": [3.06471526, 2.03989933, 0.779435933, 3.97980033],
    "interleaved_to_half": [-1.14263966, 2.95985067, 1.9220756, 4.0297995],
}
LAYOUTS = [*AT_ONE, "interleaved_negative"]
PARTS = [(None, 0), (8, 2)]


def rotated(x, position, layout, start, dim, theta):
    """Equation 34 of the paper in float64: each pair as a complex number, where a layout has it."""
    out, half = np.array(x, np.float64), dim // 2
    for p in range(half):
        side_by_side, apart = (2 * p, 2 * p + 1), (p, p + half)
        a, b = side_by_side if layout.startswith("interleaved") else apart
        c, d = side_by_side if layout in ("interleaved", "interleaved_negative") else apart
        sign = -1 if layout.endswith("negative") else 1
        angle = sign * position * theta ** (-2 * p / dim)
        z = (x[start + a] + 1j * x[start + b]) * np.exp(1j * angle)
        out[start + c], out[start + d] = z.real, z.imag
    return out


@pytest.mark.parametrize("layout", AT_ONE)
def test_matches_the_models_at_position_one(layout):
    x = jnp.array([1.0, 2.0, 3.0, 4.0]).reshape(1, 1, 1, 4)
    out = apply_rope(x, jnp.array([1]), layout=layout)
    np.testing.assert_allclose(out.ravel(), AT_ONE[layout], rtol=0, atol=1e-6)


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("dim, start, theta", [(None, 0, 1e4), (8, 2, 5e5)])
def test_matches_the_paper_at_any_position(layout, dim, start, theta):
    positions = np.array([62, 257, 10**6, 2**31 - 1, -(2**31)])
    x = np.random.default_rng(0).normal(size=(1, 5, 9, 12)).astype(np.float32)
    options = {"layout": layout, "rotary_dim": dim, "rotary_start": start, "theta": theta}
    out = apply_rope(x, positions, **options)
    dim = dim or 12 - start
    for t, n in np.ndindex(5, 9):
        expected = rotated(x[0, t, n], positions[t], layout, start, dim, theta)
        np.testing.assert_allclose(out[0, t, n], expected, rtol=0, atol=3e-6)
    unrotated = np.r_[:start, start + dim : 12]
    np.testing.assert_array_equal(out[..., unrotated], x[..., unrotated])


@pytest.mark.parametrize("source, target", [*itertools.permutations(LAYOUTS, 2)])
@pytest.mark.parametrize("dim, start", PARTS)
def test_permuted_weights_give_the_same_scores(source, target, dim, start):
    random = np.random.default_rng(0)
    x = random.normal(size=(1, 4, 5)).astype(np.float32)
    weights = [random.normal(size=(5, n * 12)).astype(np.float32) for n in (6, 3)]
    part = {"rotary_dim": dim, "rotary_start": start}

    def scores(layout, weights):
        heads = (x @ np.concatenate(weights, 1)).reshape(1, 4, 9, 12)
        out = apply_rope(heads, 257 + np.arange(0, 12, 3), layout=layout, **part)
        q, k = np.split(out.astype("f8"), [6], 2)
        return np.einsum("btnh,bsnh->bnts", q[:, :, ::2], k)

    moved = [pe.permute_qk(w, source, target, head_dim=12, **part) for w in weights]
    expected = scores(source, weights)
    np.testing.assert_allclose(scores(target, moved), expected, atol=1e-4)
    same = {source, target} == {"interleaved", "interleaved_to_half"}  # Pairs are read alike.
    assert (np.abs(scores(target, weights) - expected).max() > 0.1) != same


def test_weights_of_any_shape_and_kind():
    w = np.random.default_rng(0).normal(size=(5, 24)).astype(np.float32)
    moved = pe.permute_qk(w, "interleaved", "half", head_dim=8)
    # transformers, convert_llama_weights_to_hf.py: view(n, H / 2, 2, D).transpose(1, 2).
    hf = w.T.reshape(3, 4, 2, 5).swapaxes(1, 2).reshape(24, 5)
    np.testing.assert_array_equal(moved.T, hf)
    torch = pe.permute_qk(jnp.asarray(w.T), "interleaved", "half", head_dim=8, axis=0)
    np.testing.assert_array_equal(torch, hf)
    heads = pe.permute_qk(w.reshape(5, 3, 8), "interleaved", "half", head_dim=8)
    np.testing.assert_array_equal(heads.reshape(5, 24), moved)


def permuted(target):
    return pe.permute_qk(np.zeros((2, 12)), "interleaved", target, head_dim=8)


ERRORS = [
    (pe.RoPE, {"rotary_start": 8}, "rotary dim must be even and positive, got 0"),
    (pe.RoPE, {"rotary_dim": 6, "rotary_start": 4}, r"rotary_start must be in \[0, 2\].*got 4"),
    (lambda: permuted("neox"), {}, "permute_qk: layout must be one of .*, got 'neox'"),
    (lambda: permuted("half"), {}, r"permute_qk: axis 1 of \(2, 12\) must be a multiple .* 8"),
]
