"""YaRN against transformers, the equation of the paper, and DeepSeek's factors."""

import functools
import math

import numpy as np
import pytest

import posenc_jax as pe
from tests.support import Option, golden

_LONGER = {"factor": 4.0, "original_max_position": 64}
OPTIONS = {
    pe.YaRN: {
        "factor": Option(2.0, _LONGER),
        "original_max_position": Option(512, _LONGER),
        "beta_fast": Option(5.0, _LONGER),
        "beta_slow": Option(0.05, _LONGER),
        "ramp": Option("rotations", _LONGER),
        "truncate": Option(False, _LONGER),
        "attention_factor": Option(1.5, _LONGER),
        "mscale": Option(0.5, _LONGER),
        "mscale_all_dim": Option(0.5, _LONGER),
    }
}

GOLDEN = golden("frequency_maps")
BASE = {"factor": 4.0, "original_max_position": 2048}
SHIPPED = {
    "yarn": BASE,
    "yarn_truncate_false": BASE | {"truncate": False},
    "yarn_gpt_oss": {"factor": 32.0, "original_max_position": 4096, "truncate": False},
    "yarn_deepseek_v3": {"factor": 40.0, "original_max_position": 4096}
    | {"mscale": 1.0, "mscale_all_dim": 1.0},
}


def mapped(dim=16, theta=1e4, **options):
    return pe.rope_frequencies(dim, theta, pe.YaRN(**(BASE | options)))


@pytest.mark.parametrize("name", SHIPPED)
def test_matches_transformers(name):
    case = GOLDEN["cases"][name]
    got, factor = mapped(case["dim"], case["theta"], **SHIPPED[name])
    np.testing.assert_allclose(got, case["frequencies"], rtol=1e-6)
    np.testing.assert_allclose(factor, case["attention_factor"], rtol=1e-12)


@pytest.mark.parametrize("dim, theta, fast, slow", [(12, 5e5, 32.0, 1.0), (64, 1e4, 20.0, 3.0)])
def test_the_ramp_over_rotations_is_that_of_the_paper(dim, theta, fast, slow):
    """Equations 11 to 14, pair by pair."""
    length, s = 2048, 4.0
    got, factor = mapped(dim, theta, ramp="rotations", beta_fast=fast, beta_slow=slow)
    for p, w in enumerate(got):
        expected = theta ** (-2 * p / dim)
        r = length / (2 * math.pi / expected)
        gamma = 0.0 if r < slow else 1.0 if r > fast else (r - slow) / (fast - slow)
        np.testing.assert_allclose(w, (1 - gamma) * expected / s + gamma * expected, rtol=1e-12)
    np.testing.assert_allclose(factor, 0.1 * math.log(s) + 1, rtol=1e-12)  # Equation 15.


def test_mscale_as_deepseek_has_it():
    def g(mscale):
        return 0.1 * mscale * math.log(4.0) + 1

    for top, bottom in [(1.0, 1.0), (0.707, 0.707), (1.0, 0.5), (0.707, 0.0)]:
        _, factor = mapped(mscale=top, mscale_all_dim=bottom)
        np.testing.assert_allclose(factor, g(top) / g(bottom), rtol=1e-12)
    assert mapped(attention_factor=1.25)[1] == 1.25


def test_the_ramp_of_kimi_k2():
    """Both ends at one rotation: a step of one pair, by the formula of transformers 5.23."""
    dim, theta, factor, length = 64, 50000.0, 32.0, 4096
    end = dim * math.log(length / (2 * math.pi)) / (2 * math.log(theta))
    ramp = np.clip((np.arange(dim // 2) - math.floor(end)) / 1, 0, 1)
    plain = theta ** -(np.arange(0, dim, 2) / dim)
    expected = plain / factor * ramp + plain * (1 - ramp)
    yarn = pe.YaRN(factor, length, beta_fast=1.0, beta_slow=1.0)
    got, _ = pe.rope_frequencies(dim, theta, yarn)
    np.testing.assert_allclose(got, expected, rtol=1e-12)


def test_the_logit_scale_of_deepseek_v3():
    """Its 192 dimensions, factor 40 and mscale_all_dim 1: softmax_scale * mscale * mscale."""
    np.testing.assert_allclose(pe.yarn_logit_scale(192, 40.0), 0.1352337788608801, rtol=1e-12)
    assert pe.yarn_logit_scale(64, 40.0, 0.0) == pe.yarn_logit_scale(64, 1.0) == 0.125
    assert pe.yarn_logit_scale(64, 40.0, 0.707) < pe.yarn_logit_scale(64, 40.0)


yarn = functools.partial(pe.YaRN, **BASE)
ERRORS = [
    (yarn, {"beta_fast": 0.5}, r"0 < slow <= fast, got \(0.5, 1.0\)"),
    (yarn, {"beta_fast": 1.0, "ramp": "rotations"}, r"0 < slow < fast, got \(1.0, 1.0\)"),
    (yarn, {"beta_slow": 0.0}, r"0 < slow <= fast, got \(32.0, 0.0\)"),
    (yarn, {"ramp": "linear"}, "ramp must be .* got 'linear'"),
    (yarn, {"ramp": "rotations", "truncate": False}, "truncate=False is about the index ramp"),
    (yarn, {"mscale": -1.0}, "mscale must not be negative, got -1.0"),
    (yarn, {"mscale_all_dim": -1.0}, "mscale_all_dim must not be negative, got -1.0"),
    (yarn, {"attention_factor": 0.0}, "attention_factor must be positive, got 0.0"),
    (yarn, {"attention_factor": 1.2, "mscale": 0.7}, "attention_factor=1.2 contradicts mscale=0.7"),
    (yarn, {"attention_factor": 1.2, "mscale_all_dim": 1.0}, "contradicts .* mscale_all_dim=1.0"),
    *(  # Released code then interpolates nothing, or everything.
        (lambda n=n: mapped(8, 10.0, original_max_position=n), {}, "YaRN: .* no pair has between 3")
        for n in (2, 10**12)
    ),
    (pe.RoPE, {"theta": 1.0, "scaling": yarn()}, "YaRN: needs theta above 1, got 1.0"),
    (lambda: pe.yarn_logit_scale(8, 0.5), {}, "YaRN: factor must be at least 1"),
    (lambda: pe.yarn_logit_scale(8, 2.0, -1.0), {}, "YaRN: mscale_all_dim must not be negative"),
]
