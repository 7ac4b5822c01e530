"""xPos against torchscale's code and the paper's formula, near and far, whole and in steps."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import posenc_jax as pe
from tests.oracle import attend, decode, qkv, softmax_attention
from tests.support import slow

OPTIONS = {pe.XPos: {"theta": 100.0, "scale_base": 64.0, "gamma": 0.8, "layout": "half"}}


def torchscale(x, offset=0, downscale=False, base=512):
    """XPOS.forward of microsoft/torchscale in NumPy, for one head: x is [T, H]."""
    length, dim = x.shape
    low = -(length + offset) // 2
    scale = (np.arange(0, dim, 2) + 0.4 * dim) / (1.4 * dim)
    scale = scale ** (np.arange(low, length + offset + low)[:, None] / base)
    place = np.arange(len(scale))[:, None] / 10000 ** (np.arange(dim // 2) / (dim // 2))
    scale, sin, cos = scale[-length:], np.sin(place)[-length:], np.cos(place)[-length:]
    scale = 1 / scale if downscale else scale
    sin, cos = np.repeat(sin * scale, 2, -1), np.repeat(cos * scale, 2, -1)
    rotated = np.stack([-x[:, 1::2], x[:, ::2]], -1).reshape(x.shape)
    return x * cos + rotated * sin


def logit(q, k, n, i, j, base=512, gamma=0.4, theta=1e4):
    """Equation 18 of the paper: the real part of sum_p q_p conj(k_p) z^(i - j) e^(i theta)."""
    dim, pair = len(q), np.arange(0, len(q), 2)
    z = (pair + gamma * dim) / ((1 + gamma) * dim)
    q, k = q[0::2] + 1j * q[1::2], k[0::2] + 1j * k[1::2]
    rotation = np.exp(1j * (i - j) * theta ** (-pair / dim)) * z ** ((i - j) / base)
    return (q * k.conj() * rotation).sum().real / np.sqrt(dim)


def scores(scheme, q, k, positions):
    rows, cols, _ = scheme.features({}, None, q, k, positions, None, None)
    q, k = scheme.query({}, q, positions, rows), scheme.key({}, k, positions, cols)
    return np.einsum("bthd,bshd->bts", np.asarray(q, float), np.asarray(k, float))[0]


def test_matches_torchscale():
    x = np.random.default_rng(0).normal(size=(2, 21, 12)).astype(np.float32)
    expected = torchscale(x[0].astype(float)) @ torchscale(x[1].astype(float), downscale=True).T
    scheme = pe.XPos(head_dim=12)
    q, k = (jnp.asarray(a)[None, :, None] for a in x)
    past = np.tri(21) > 0
    for start in (0, 10**6):
        got = scores(scheme, q, k, start + jnp.arange(21)[None])
        np.testing.assert_allclose(got[past], expected[past], atol=5e-5)


def test_attention_matches_the_paper_far_away():
    arrays, positions = qkv(length=21, dim=12), 2**30 + np.arange(21)
    out = attend(pe.XPos(head_dim=12), {}, *arrays, positions=positions, is_causal=True)
    np.testing.assert_allclose(out, softmax_attention(*arrays, logit), atol=1e-5)


@slow
def test_decoding_a_million_tokens_after_the_prompt():
    scheme = pe.XPos(head_dim=8)
    q, k, v = qkv(length=17)
    positions = np.r_[0:4, 3000:3004, 40_000:40_004, 10**6 : 10**6 + 5]
    expected = softmax_attention(q, k, v, logit, positions=positions)
    cache = pe.new_cache(scheme, 1, 17, num_heads=6, num_kv_heads=3, head_dim=8)
    for t in (slice(0, 4), slice(4, 8), slice(8, 12), slice(12, 16), slice(16, 17)):
        parts = (x[:, t] for x in (q, k, v))
        out, cache = decode(scheme, {}, cache, *parts, positions=positions[None, t])
        np.testing.assert_allclose(out, expected[:, t], atol=1e-5)
    assert cache.state[1][0].tolist() == [10**6 + 4]


def test_queries_far_apart_in_one_call():
    arrays = qkv(length=9)

    @jax.jit
    def output_and_slopes(arrays, positions):
        def loss(arrays):
            out = attend(pe.XPos(head_dim=8), {}, *arrays, positions=positions, is_causal=True)
            return (out**2).sum(), out

        slopes, out = jax.grad(loss, has_aux=True)(arrays)
        return out, slopes

    for span in (4000, 30_000):
        positions = np.linspace(0, span, 9).astype(int) + 10**6
        out, slopes = output_and_slopes(arrays, positions)
        expected = softmax_attention(*arrays, logit, positions=positions)
        np.testing.assert_allclose(out, expected, atol=1e-5)
        assert all(np.isfinite(slope).all() for slope in slopes)


@pytest.mark.parametrize(("far", "base"), [(33_000, 512), (100_000, 512), (4_460, 64)])
def test_queries_too_far_apart_give_nan(far, base):
    """Also just below the float32 limit, where keys underflow before queries overflow."""
    q, k, v = qkv(length=9)
    positions = np.r_[0:4, far : far + 5]
    of_base = functools.partial(logit, base=base)
    expected = softmax_attention(q, k, v, of_base, positions=positions)
    scheme = pe.XPos(head_dim=8, scale_base=base)
    out = np.asarray(attend(scheme, {}, q, k, v, positions=positions, is_causal=True))
    np.testing.assert_allclose(out[:, 4:], expected[:, 4:], atol=1e-5)
    assert np.isnan(out[:, :4]).all()


def test_float16_within_four_thousand():
    q, k, v = (a.astype(jnp.float16) for a in qkv(length=9))
    positions = np.linspace(0, 4000, 9).astype(int) + 10**6
    expected = softmax_attention(q, k, v, logit, positions=positions)
    out = attend(pe.XPos(head_dim=8), {}, q, k, v, positions=positions, is_causal=True)
    assert out.dtype == jnp.float16
    np.testing.assert_allclose(out.astype("f4"), expected, atol=5e-3)


def test_tokens_after_rejected_drafts_are_those_of_one_pass():
    scheme, arrays, back = pe.XPos(head_dim=8, scale_base=8.0), qkv(length=11), 2
    whole = attend(scheme, {}, *arrays, is_causal=True)
    sizes = {"num_heads": 6, "num_kv_heads": 3, "head_dim": 8, "max_rewind": back}
    drafts = [np.concatenate([x[:, :7], x[:, -back:] + 1], 1) for x in arrays]
    _, cache = decode(scheme, {}, pe.new_cache(scheme, 1, 32, **sizes), *drafts)
    cache = jax.jit(lambda cache: cache.rewind(back))(cache)
    for t in range(7, 11):
        out, cache = decode(scheme, {}, cache, *(x[:, t : t + 1] for x in arrays))
        np.testing.assert_allclose(out, whole[:, t : t + 1], atol=1e-5)


@slow
def test_a_row_that_starts_anew_forgets_the_origin_of_the_one_before():
    """Slots that `reset` and `rewind` empty still hold the coordinates of their old tokens."""
    scheme = pe.XPos(head_dim=8)
    q, k, v = (a[:1] for a in qkv(length=6))
    whole = attend(scheme, {}, q, k, v, is_causal=True)
    cache = pe.new_cache(scheme, 1, 15, num_heads=6, num_kv_heads=3, head_dim=8, max_rewind=6)
    far = np.arange(6)[None] + 5000
    _, used = decode(scheme, {}, cache, q, k, v, positions=far)
    for empty in jax.jit(lambda used: (used.reset(0), used.rewind(6)))(used):
        out, _ = decode(scheme, {}, empty, *(a[:, :3] for a in (q, k, v)))
        np.testing.assert_allclose(out, whole[:, :3], rtol=0, atol=1e-5)


@pytest.mark.parametrize("shift", [-(2**31) + 1, 40_000])
def test_origins_of_a_cache_are_of_the_segment(shift):
    """Queries of a call lie within 8 coordinates, whatever the row held before."""
    scheme, (q, k, v) = pe.XPos(head_dim=8), qkv(length=8, heads=1, kv_heads=1)
    positions = np.arange(8, dtype=np.int32)[None]
    want = attend(scheme, {}, q, k, v, positions=positions, is_causal=True)
    cache = pe.new_cache(scheme, 1, 24, num_heads=1, head_dim=8)
    outs = []
    for segment, start in ((0, shift), (1, 0)):
        for at in (slice(0, 5), slice(5, 8)):
            here = positions[:, at] + np.int32(start)
            places = {"positions": here, "segment_ids": np.full_like(here, segment)}
            out, cache = decode(scheme, {}, cache, *(x[:, at] for x in (q, k, v)), **places)
            outs.append(out)
    for first in (0, 2):
        np.testing.assert_allclose(np.concatenate(outs[first : first + 2], 1), want, atol=3e-6)
