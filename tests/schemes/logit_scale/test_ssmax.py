"""SSMax against the formula of transformers' Mistral Large 4 in float64."""

import jax
import numpy as np

import posenc_jax as pe
from tests.oracle import query
from tests.support import build, close, initial, output

OPTIONS = {pe.SSMax: {"scale": initial(1.0), "offset": 0.5}}


def softmax_scaling(q, position_ids, scale, bias):
    """MistralLarge4TextSoftmaxScaling.forward, transformers 5.23.0, without its rounding."""
    log_pos = np.log(position_ids + 1.0)
    return q * (scale[None, None, :] * log_pos[:, :, None] + bias[None, None, :])[..., None]


def test_matches_transformers():
    heads = 6
    random = np.random.default_rng(0)
    q = random.normal(size=(1, 4, heads, 8)).astype("f4")
    scale, bias = random.normal(size=(2, heads)).astype("f4")
    positions = np.array([[0, 1, 257, 10**6]])
    scheme = pe.SSMax(num_heads=heads, offset=1.0)
    params = {"scale": scale, "offset": bias}
    out = query(scheme, params, q, positions)
    np.testing.assert_allclose(
        out, softmax_scaling(q, positions, scale, bias), rtol=2e-6, atol=1e-5
    )


def test_is_initially_the_identity_as_in_mistral_large_4(tokens):
    scheme = build(pe.SSMax, scale=0.0, offset=1.0)
    close(output(scheme, scheme.init(jax.random.key(0)), tokens), output(pe.NoPE(), {}, tokens), 0)


ERRORS = [(pe.SSMax, {"scale": 0.0}, "scale must not be 0 without an offset")]
