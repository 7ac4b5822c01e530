"""Swin V2 against the class of its authors."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import posenc_jax as pe
from tests.oracle import attend, waves
from tests.support import golden, parameters

OPTIONS = {
    pe.SwinV2: {"window": (5, 6), "pretrained_window": (5, 5), "width": 5},
}

GOLDEN = golden("swin_v2")


@pytest.mark.parametrize("case", GOLDEN["cases"], ids=lambda c: str(c["pretrained"]))
@pytest.mark.parametrize("flat", [True, False])
def test_attention_matches_the_authors(case, flat):
    window, pretrained = tuple(case["window"]), tuple(case["pretrained"])
    pretrained = None if pretrained == (0, 0) else pretrained
    scheme = pe.SwinV2(num_heads=6, window=window, pretrained_window=pretrained)
    params = {"in": waves(512, 2), "in_bias": waves(512), "out": waves(6, 512) / 16}
    params["tau"] = np.array([0.5, 1, 2, 3, 4, 5], np.float32)
    q, k, v, expected = (jnp.asarray(case[n], jnp.float32)[None] for n in ("q", "k", "v", "out"))
    coordinates = None if flat else pe.grid_coordinates(1, *window)
    out = attend(scheme, params, q, k, v, coordinates=coordinates)
    np.testing.assert_allclose(out, expected, atol=1e-5)


def test_gradients_are_finite_where_q_is_zero():
    scheme = pe.SwinV2(num_heads=2, window=(2, 2))
    params = parameters(scheme)
    k, v = np.random.default_rng(1).normal(size=(2, 1, 4, 2, 8)).astype(np.float32)
    total = jax.grad(lambda q: pe.scheme_attention(scheme, params, q, k, v)[0].sum())
    assert np.isfinite(jax.jit(total)(np.zeros_like(k))).all()


ERRORS = [
    (pe.SwinV2, {"window": (1, 8)}, r"both sizes must be at least 2, got \(1, 8\)"),
    (pe.SwinV2, {"pretrained_window": (8, 1)}, r"both sizes must be at least 2, got \(8, 1\)"),
    (pe.SwinV2, {"pretrained_window": (8, 8, 8)}, r"pretrained_window must be .*, got \(8, 8, 8\)"),
]
