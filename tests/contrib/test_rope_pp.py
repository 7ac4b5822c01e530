"""RoPE++ against the lines of the authors' code, in float64."""

import numpy as np
import pytest

import posenc_jax as pe
from posenc_jax import contrib
from tests.oracle import attend, decode, qkv, softmax_attention, turned
from tests.support import ROTARY_OPTIONS, slow

OPTIONS = {contrib.RoPEPlusPlus: {**ROTARY_OPTIONS, "heads": "odd"}}

MODES = {"second_half": "imagh", "odd": "imagx", "all": "imago", "added": "imag2"}


def authors(q, k, positions, mode, theta=1e4):
    """OpenMOSS/rope_pp at 91ba335, LlamaAttention.apply_rotary_pos_emb, with heads third."""
    q, k = (np.asarray(x, np.float64) for x in (q, k))
    inv_freq = theta ** (-np.arange(0, q.shape[-1], 2) / q.shape[-1])
    angles = np.asarray(positions, np.float64)[None, :, None, None] * inv_freq
    real, imag, k = turned(q, angles), -turned(q, angles + np.pi / 2), turned(k, angles)
    batch, length, heads, dim = q.shape
    if mode == "imagh":
        real[:, :, heads // 2 :] = imag[:, :, heads // 2 :]
    elif mode == "imagx":
        real[:, :, 1::2] = imag[:, :, 1::2]
    elif mode == "imago":
        real = imag
    else:
        real = np.stack([real, imag], 3).reshape(batch, length, 2 * heads, dim)
    return real, k


@pytest.mark.parametrize("heads, count", list(zip(MODES, (6, 12, 6, 12), strict=True)))
def test_attention_matches_the_authors(heads, count):
    q, k, v = qkv(length=21, heads=count)
    mapped = authors(q, k, np.arange(21), MODES[heads])
    expected = softmax_attention(*mapped, v, lambda q, k, n, i, j: q @ k / np.sqrt(8))
    out = attend(contrib.RoPEPlusPlus(head_dim=8, heads=heads), {}, q, k, v, is_causal=True)
    np.testing.assert_allclose(out, expected, atol=1e-5)


@slow
def test_decodes_with_heads_added():
    scheme, arrays = contrib.RoPEPlusPlus(head_dim=8, heads="added"), qkv(length=9)
    whole = attend(scheme, {}, *arrays, is_causal=True)
    assert whole.shape == (1, 9, 12, 8)
    cache = pe.new_cache(scheme, 1, 9, num_heads=6, num_kv_heads=3, head_dim=8)
    for part in (slice(0, 6), slice(6, 9)):
        out, cache = decode(scheme, {}, cache, *(x[:, part] for x in arrays))
        np.testing.assert_allclose(out, whole[:, part], atol=1e-6)


ERRORS = [(contrib.RoPEPlusPlus, {"head_dim": 7}, "rotary dim must be even and positive, got 7")]
