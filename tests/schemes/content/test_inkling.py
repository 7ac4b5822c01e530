"""Inkling against the code of its model in Hugging Face transformers.

`authors` is huggingface/transformers, models/inkling/modeling_inkling.py, InklingAttention
with InklingRelativeLogits after its projections and norms, from torch to NumPy in float64.
"""

import numpy as np
import pytest

import posenc_jax as pe
from tests import oracle
from tests.oracle import qkv, weighted
from tests.support import Option, initial, parameters

OPTIONS = {
    pe.Inkling: {
        "rank": 4,
        "extent": 8,
        "log_scaling_start": Option(8, {"slope": 0.1}),
        "slope": Option(0.5, {"log_scaling_start": 8}),
        "stddev": initial(0.1),
        "clip": 0.05,
    }
}


def authors(q, k, relative_states, proj, positions, floor, slope):
    """[T, N, H], [S, K, H], [T, N, rank] and [rank, extent]: the logits [N, T, S]."""
    arrays = q, k, relative_states, proj
    q, k, relative_states, proj = (np.asarray(a, np.float64) for a in arrays)
    k = np.repeat(k, q.shape[1] // k.shape[1], 1)
    rel_logits = np.moveaxis(relative_states @ proj, 1, 0)
    extent = proj.shape[1]
    distance = positions[:, None] - positions[None, :]
    index = np.clip(distance, 0, extent - 1)[None].repeat(q.shape[1], 0)
    position_bias = np.take_along_axis(rel_logits, index, -1)
    position_bias = np.where((distance < 0) | (distance >= extent), 0.0, position_bias)
    if floor is not None:
        tau = 1.0 + slope * np.log(np.maximum((positions + 1) / floor, 1.0))
        q, position_bias = q * tau[:, None, None], position_bias * tau[None, :, None]
    logits = np.einsum("inh,jnh->nij", q, k) / q.shape[-1] + position_bias
    return np.where(distance < 0, -np.inf, logits)


def make(**options):
    scheme = pe.Inkling(num_heads=6, model_dim=20, stddev=0.5, **options)
    return scheme, parameters(scheme)


@pytest.mark.parametrize(
    "options, far, implementation",
    [
        ({}, False, "xla"),
        ({"extent": 7, "rank": 3}, True, "xla"),
        ({"log_scaling_start": 5}, False, "reference"),
        ({"log_scaling_start": 300, "slope": 0.5}, True, "reference"),
    ],
    ids=str,
)
def test_matches_the_code_of_the_model(options, far, implementation):
    positions = np.r_[1, 257, 10**6 + np.arange(35)] if far else np.arange(37)
    q, k, v = qkv(length=37)
    x = np.random.default_rng(3).normal(size=(1, 37, 20)).astype("f4")
    scheme, params = make(**options)
    states = np.einsum("td,dnr->tnr", np.asarray(x[0], np.float64), params["project"])
    settings = scheme.log_scaling_start, scheme.slope
    logits = authors(q[0], k[0], states, params["bank"], positions, *settings)
    options = {"implementation": implementation} | ({"positions": positions} if far else {})
    out = oracle.attend(scheme, params, q, k, v, x=x, is_causal=True, scale=1 / 8, **options)
    np.testing.assert_allclose(out, weighted(logits, np.repeat(v, 2, 2)), atol=1e-5)


def test_log_scaling_acts_on_q_and_is_not_relative():
    plain, sharpened = make()[0], make(log_scaling_start=100)[0]
    assert plain.traits.relative and plain.acts == pe.Acts.LOGITS
    assert not sharpened.traits.relative and sharpened.acts == pe.Acts.QK | pe.Acts.LOGITS


ERRORS = [
    (pe.Inkling, {"log_scaling_start": 0}, "log_scaling_start must be None or >= 1, got 0"),
    (pe.Inkling, {"slope": 0.5}, "slope is of log scaling, which needs log_scaling_start, got 0.5"),
    (pe.Inkling, {"clip": 0.0}, "clip must be positive, got 0.0"),
]
