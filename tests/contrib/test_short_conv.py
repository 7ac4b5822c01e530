"""Short convolutions against the layer of the authors of Canon, and against loops."""

import jax
import numpy as np
import pytest

import posenc_jax as pe
from posenc_jax import contrib
from tests import oracle
from tests.oracle import qkv, softmax_attention
from tests.support import build, close, golden, parameters, slow

OPTIONS = {contrib.ShortConv: {"on": "kv", "width": 3, "residual": False, "silu": True}}

GOLDEN = golden("short_conv")


def convolved(x, kernel, segment_ids, residual=True, silu=False):
    """[B, T, F] in float64, token by token; padding reads nothing and is read by none.

    `kernel` is [W, F], or [B, T, W, F].
    """
    x, kernel = np.asarray(x, np.float64), np.asarray(kernel, np.float64)
    kernel = np.broadcast_to(kernel, (*x.shape[:2], *kernel.shape[-2:]))
    out = np.zeros_like(x)
    for b, t in np.ndindex(*x.shape[:2]):
        segment = [s for s in range(t + 1) if segment_ids[b, s] == segment_ids[b, t] >= 0]
        for back, s in enumerate(segment[::-1][: kernel.shape[2]]):
            out[b, t] += kernel[b, t, -1 - back] * x[b, s]
    out = out / (1 + np.exp(-out)) if silu else out
    return out + x if residual else out


@pytest.mark.parametrize("case", GOLDEN["cases"], ids=lambda case: str(case["width"]))
def test_the_scheme_is_the_canon_layer_on_q_k_and_v(case):
    """Their channels are q, then k, then v: here 2 heads, 2 and 1 of 2 channels."""
    sizes = {name: case[name] for name in ("width", "residual", "silu")}
    scheme = contrib.ShortConv(num_heads=3, num_kv_heads=1, head_dim=2, **sizes)
    x, expected, kernels = (
        np.split(np.asarray(case[name], np.float32), [6, 8], -1) for name in ("x", "out", "kernel")
    )
    q, k, v = (a.reshape(2, 9, -1, 2) for a in x)
    params = {name: a.reshape(len(a), -1, 2) for name, a in zip("qkv", kernels, strict=True)}
    *mixed, _ = jax.jit(scheme.mix)(params, q, k, v, None, None)
    for got, other in zip(mixed, expected, strict=True):
        close(got.reshape(2, 9, -1), other, 1e-6)


SEGMENTS = np.zeros((2, 23), np.int32)
SEGMENTS[0, [0, 1, 6, 7, 8]] = -1  # On the left and within the first segment.
SEGMENTS[0, 12:] = 5
SEGMENTS[1, 3:] = 1
SEGMENTS[1, 20:] = -1
X = np.random.default_rng(0).normal(size=(2, 23, 5)).astype("f4")
KERNEL = np.random.default_rng(1).normal(size=(4, 5)).astype("f4")
DYNAMIC = np.random.default_rng(3).normal(size=(2, 23, 4, 1)).astype("f4")


@pytest.mark.parametrize(("chunk", "kernel"), [(1, KERNEL), (7, DYNAMIC)])
def test_convolution_matches_a_loop_whole_and_in_chunks(chunk, kernel):
    expected = convolved(X, kernel, SEGMENTS, residual=False)
    step, state, outs = jax.jit(pe.short_convolution), None, []
    for start in range(0, 23, chunk):
        part = slice(start, start + chunk)
        taps = kernel if kernel.ndim == 2 else kernel[:, part]
        out, state = step(X[:, part], taps, SEGMENTS[:, part], state)
        outs.append(out)
    out, real = np.concatenate(outs, 1), SEGMENTS >= 0
    np.testing.assert_allclose(out[real], expected[real], atol=1e-6)


@slow
def test_a_state_after_no_tokens_is_that_of_the_start():
    for ids in (None, SEGMENTS):
        first, rest = (None, None) if ids is None else (ids[:, :0], ids)
        _, state = pe.short_convolution(X[:, :0], KERNEL, first)
        out, _ = pe.short_convolution(X, KERNEL, rest, state)
        np.testing.assert_array_equal(out, pe.short_convolution(X, KERNEL, rest)[0])


@pytest.mark.parametrize(("on", "implementation"), [("qkv", "xla"), ("v", "reference")])
def test_attention_matches_a_loop_in_packed_rows(on, implementation):
    scheme = contrib.ShortConv(num_heads=6, num_kv_heads=3, head_dim=8, on=on, silu=True)
    params = parameters(scheme)
    arrays = dict(zip("qkv", qkv(length=21), strict=True))
    segment_ids = np.repeat([0, 1], [9, 12])[None].astype(np.int32)
    mixed = dict(arrays)
    for name in on:
        x, kernel = arrays[name], np.reshape(params[name], (4, -1))
        out = convolved(x.reshape(1, 21, -1), kernel, segment_ids, silu=True)
        mixed[name] = out.reshape(x.shape)
    expected = softmax_attention(
        *mixed.values(),
        lambda q, k, n, i, j: q @ k / np.sqrt(8),
        sees=lambda i, j: j <= i and segment_ids[0, i] == segment_ids[0, j],
    )
    places = {"positions": np.arange(21, dtype=np.int32)[None], "segment_ids": segment_ids}
    options = {"is_causal": True, "implementation": implementation} | places
    close(oracle.attend(scheme, params, *arrays.values(), **options), expected, 2e-6)


ERRORS = [
    (build, {"cls": contrib.ShortConv, "on": ""}, "some of the letters qkv"),
    (build, {"cls": contrib.ShortConv, "on": "qq"}, "some of the letters qkv"),
]
