"""SSMax against the formula of transformers' Mistral Large 4 in float64."""

import numpy as np

import posenc_jax as pe
from tests.oracle import query
from tests.support import initial

OPTIONS = {pe.SSMax: {"scale": initial(1.0), "offset": 0.5}}


def softmax_scaling(q, position_ids, scale, bias):
    """MistralLarge4TextSoftmaxScaling.forward, transformers 5.23.0, without its rounding."""
    log_pos = np.log(position_ids + 1.0)
    return q * (scale[None, None, :] * log_pos[:, :, None] + bias[None, None, :])[..., None]


def test_matches_transformers():
    random, positions = np.random.default_rng(0), np.array([[0, 1, 257, 10**6]])
    q, scale, bias = (random.normal(size=s).astype("f4") for s in ((1, 4, 6, 8), 6, 6))
    scheme = pe.SSMax(num_heads=6, offset=1.0)
    out = query(scheme, {"scale": scale, "offset": bias}, q, positions)
    expected = softmax_scaling(q, positions, scale, bias)
    np.testing.assert_allclose(out, expected, rtol=2e-6, atol=1e-5)


ERRORS = [(pe.SSMax, {"scale": 0.0}, "scale must not be 0 without an offset")]
