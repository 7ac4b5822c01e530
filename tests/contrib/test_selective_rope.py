"""Selective RoPE against the lines of the authors' code, in float64."""

import jax
import numpy as np
import pytest

from posenc_jax import contrib
from tests import oracle
from tests.oracle import qkv, softmax_attention, turned
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


def arrays(heads):
    x = np.random.default_rng(3).normal(size=(1, 21, 12)).astype(np.float32)
    return *qkv(length=21, heads=heads), x


def attend(scheme, params, q, k, v, x):
    return oracle.attend(scheme, params, q, k, v, x=x, is_causal=True)


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
        return turned(y, np.repeat(rotation, y.shape[2] // groups, 1)[None])

    scale = np.sqrt(q.shape[-1])
    return softmax_attention(mapped(q), mapped(k), v, lambda q, k, n, i, j: q @ k / scale)


def compare(params, heads=6, groups=1, numbers=None, **options):
    scheme = contrib.SelectiveRoPE(model_dim=12, head_dim=8, groups=groups, **options)
    params, tokens = parameters(scheme) | params, arrays(heads)
    params["up"] *= 5
    out = attend(scheme, params, *tokens)
    np.testing.assert_allclose(out, authors(params, *tokens, groups, **(numbers or {})), atol=1e-5)


@pytest.mark.parametrize("heads, groups", [(6, 1), (12, 3)])
def test_attention_matches_the_authors(heads, groups):
    compare({}, heads, groups)


@slow
@pytest.mark.parametrize("width", [1, 5])
def test_any_width_temperature_and_base(width):
    numbers = {"theta": 50.0, "temp_max": 2.0}
    compare({}, width=width, rank=3, numbers=numbers, **numbers)


@slow
def test_learned_temperatures():
    scheme = contrib.SelectiveRoPE(model_dim=12, head_dim=8, learn_temperature=True)
    params = scheme.init(jax.random.key(0))
    np.testing.assert_allclose(params["temperature"], 5e5 ** (-np.arange(4) / 4), rtol=1e-6)
    compare({"temperature": np.float32([0.5, 0.2, 3.0, 1.0])}, learn_temperature=True)


ERRORS = [
    (contrib.SelectiveRoPE, {"model_dim": 12, "groups": 5}, "groups=5 must divide model_dim=12"),
    (contrib.SelectiveRoPE, {"head_dim": 7}, "rotary dim must be even and positive, got 7"),
]
