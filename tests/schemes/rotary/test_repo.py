"""RePo against the lines of the authors' code, in float64."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import posenc_jax as pe
from tests.oracle import qkv, softmax_attention
from tests.support import initial, parameters

OPTIONS = {
    pe.RePo: {
        "groups": 2,
        "width": 3,
        "theta": 100.0,
        "layout": "interleaved",
        "init_std": initial(0.5),
    }
}


def arrays(heads=6, length=21, dim=24):
    q, k, v = qkv(length=length, heads=heads)
    x = np.random.default_rng(3).normal(size=(1, length, dim))
    return q, k, v, jnp.asarray(x, jnp.float32)


def attend(scheme, params, q, k, v, x, **options):
    def run(params, q, k, v, x):
        return pe.scheme_attention(scheme, params, q, k, v, x=x, is_causal=True, **options)[0]

    return jax.jit(run)(params, q, k, v, x)


def authors(params, q, k, v, x, theta=1e4):
    """SakanaAI/repo at 1508a73: predicted positions, `from_positions`, `apply_rotary_pos_emb`."""
    p = {name: np.asarray(leaf, np.float64) for name, leaf in params.items()}
    x = np.asarray(x, np.float64)
    gate = x @ p["gate"]
    positions = (gate / (1 + np.exp(-gate)) * (x @ p["content"])) @ p["out"]
    dim = q.shape[-1]
    freqs = positions[..., None] / theta ** (np.arange(0, dim, 2) / dim)

    def mapped(y):
        y = np.asarray(y, np.float64)
        emb = np.repeat(np.concatenate([freqs, freqs], -1), y.shape[2] // freqs.shape[2], 2)
        a, b = np.split(y, 2, -1)
        return y * np.cos(emb) + np.concatenate([-b, a], -1) * np.sin(emb)

    scale = np.sqrt(dim)
    return softmax_attention(mapped(q), mapped(k), v, lambda q, k, n, i, j: q @ k / scale)


@pytest.mark.parametrize("heads, groups", [(6, 1), (6, 3), (12, 3)])
@pytest.mark.parametrize("options", [{}, {"theta": 50.0}], ids=str)
def test_attention_matches_the_authors(heads, groups, options):
    scheme = pe.RePo(model_dim=24, head_dim=8, groups=groups, init_std=0.5, **options)
    params = parameters(scheme)
    tokens = arrays(heads)
    out = attend(scheme, params, *tokens)
    np.testing.assert_allclose(out, authors(params, *tokens, **options), atol=1e-5)


def test_initial_parameters_are_normal():
    scheme = pe.RePo(model_dim=400, head_dim=8, groups=20, init_std=0.1)
    for name, leaf in scheme.init(jax.random.key(0)).items():
        assert abs(np.std(leaf) - 0.1) < 0.01, name
    assert scheme.init(jax.random.key(0))["gate"].shape == (400, 50)


ERRORS = [
    (pe.RePo, {"width": 0}, "width must be >= 1, got 0"),
    (pe.RePo, {"model_dim": -24, "width": 3}, "model_dim must be >= 1, got -24"),
    (pe.RePo, {"model_dim": 7}, "model_dim=7 is below 8; give a width"),
]
