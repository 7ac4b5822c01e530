"""RePo against the lines of the authors' code, in float64."""

import numpy as np
import pytest

import posenc_jax as pe
from tests.oracle import attend, qkv, softmax_attention, turned
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


def authors(params, q, k, v, x, theta=1e4):
    """SakanaAI/repo at 1508a73: predicted positions, `from_positions`, `apply_rotary_pos_emb`."""
    p = {name: np.asarray(leaf, np.float64) for name, leaf in params.items()}
    x = np.asarray(x, np.float64)
    gate = x @ p["gate"]
    positions = (gate / (1 + np.exp(-gate)) * (x @ p["content"])) @ p["out"]
    dim = q.shape[-1]
    freqs = positions[..., None] / theta ** (np.arange(0, dim, 2) / dim)

    def mapped(y):
        return turned(y, np.repeat(freqs, y.shape[2] // freqs.shape[2], 2))

    scale = np.sqrt(dim)
    return softmax_attention(mapped(q), mapped(k), v, lambda q, k, n, i, j: q @ k / scale)


@pytest.mark.parametrize("heads, groups, options", [(6, 1, {}), (12, 3, {"theta": 50.0})], ids=str)
def test_attention_matches_the_authors(heads, groups, options):
    scheme = pe.RePo(model_dim=24, head_dim=8, groups=groups, init_std=0.5, **options)
    params, arrays = parameters(scheme), qkv(length=21, heads=heads)
    assert params["gate"].shape == (24, 24 // 8)
    x = np.random.default_rng(3).normal(size=(1, 21, 24)).astype("f4")
    out = attend(scheme, params, *arrays, x=x, is_causal=True)
    np.testing.assert_allclose(out, authors(params, *arrays, x, **options), atol=1e-5)


ERRORS = [
    (pe.RePo, {"width": 0}, "width must be >= 1, got 0"),
    (pe.RePo, {"model_dim": -24, "width": 3}, "model_dim must be >= 1, got -24"),
    (pe.RePo, {"model_dim": 7}, "model_dim=7 is below 8; give a width"),
]
