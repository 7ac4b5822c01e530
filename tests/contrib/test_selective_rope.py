"""Selective RoPE against the lines of the authors' code, in float64."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from posenc_jax import contrib
from tests import oracle
from tests.oracle import qkv, softmax_attention
from tests.support import parameters, slow

OPTIONS = {
    contrib.SelectiveRoPE: {
        "groups": 2,
        "rank": 4,
        "width": 2,
        "theta": 100.0,
        "temp_max": 0.5,
        "learn_temperature": True,
    }
}


def arrays(heads=6, length=21, dim=12, **options):
    q, k, v = qkv(length=length, heads=heads, **options)
    x = np.random.default_rng(3).normal(size=(q.shape[0], length, dim))
    return q, k, v, x.astype(np.float32)


def attend(scheme, params, q, k, v, x, **options):
    return oracle.attend(scheme, params, q, k, v, x=x, is_causal=True, **options)


def angles(params, x, heads, theta=5e5, temp_max=1.0):
    """timurcarstensen/selective-rope at d12e825, SelectiveRoPE.forward: float64 [T, heads, P].

    Without gate and bias, for one row; `l2_norm` is over the part of each head.
    """
    p = {name: np.asarray(leaf, np.float64) for name, leaf in params.items()}
    x = np.asarray(x, np.float64).reshape(len(x), heads, -1)
    x = x / np.sqrt((x**2).sum(-1, keepdims=True) + 1e-6)
    phi = x.reshape(len(x), -1) @ p["down"] @ p["up"]
    width = len(p["conv"])
    padded = np.concatenate([np.zeros((width - 1, phi.shape[1])), phi])
    phi = np.stack([(padded[t : t + width] * p["conv"]).sum(0) for t in range(len(x))])
    pairs = phi.shape[1] // heads
    temperature = p.get("temperature", temp_max / theta ** (np.arange(pairs) / pairs))
    return np.cumsum(phi, 0).reshape(len(x), heads, pairs) * temperature


def authors(params, q, k, v, x, groups, **options):
    rotation = angles(params, x[0], groups, **options)

    def mapped(y):
        y = np.asarray(y, np.float64)
        a = np.repeat(rotation, y.shape[2] // groups, 1)[None]
        y0, y1 = np.split(y, 2, -1)
        return np.concatenate(
            [y0 * np.cos(a) - y1 * np.sin(a), y0 * np.sin(a) + y1 * np.cos(a)], -1
        )

    scale = np.sqrt(q.shape[-1])
    return softmax_attention(mapped(q), mapped(k), v, lambda q, k, n, i, j: q @ k / scale)


@pytest.mark.parametrize("heads, groups", [(6, 1), (12, 3)])
def test_attention_matches_the_authors(heads, groups):
    scheme = contrib.SelectiveRoPE(model_dim=12, head_dim=8, groups=groups)
    params = parameters(scheme)
    params |= {"up": 5 * params["up"]}
    tokens = arrays(heads)
    out = attend(scheme, params, *tokens)
    np.testing.assert_allclose(out, authors(params, *tokens, groups), atol=1e-5)


@slow
@pytest.mark.parametrize("width", [1, 5])
def test_any_width_temperature_and_base(width):
    options = {"theta": 50.0, "temp_max": 2.0}
    scheme = contrib.SelectiveRoPE(model_dim=12, head_dim=8, width=width, rank=3, **options)
    params = parameters(scheme)
    tokens = arrays(length=21)
    out = attend(scheme, params, *tokens)
    np.testing.assert_allclose(out, authors(params, *tokens, 1, **options), atol=1e-5)


@slow
def test_learned_temperatures():
    scheme = contrib.SelectiveRoPE(model_dim=12, head_dim=8, learn_temperature=True)
    params = scheme.init(jax.random.key(0))
    np.testing.assert_allclose(params["temperature"], 5e5 ** (-np.arange(4) / 4), rtol=1e-6)
    params |= {"temperature": jnp.asarray([0.5, 0.2, 3.0, 1.0])}
    tokens = arrays(length=9)
    out = attend(scheme, params, *tokens)
    np.testing.assert_allclose(out, authors(params, *tokens, 1), atol=1e-5)


ERRORS = [
    (contrib.SelectiveRoPE, {"model_dim": 12, "groups": 5}, "groups=5 must divide model_dim=12"),
    (contrib.SelectiveRoPE, {"head_dim": 7}, "rotary dim must be even and positive, got 7"),
]
