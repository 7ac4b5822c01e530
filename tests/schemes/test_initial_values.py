"""Parameters start as in the authors' code: from their distributions, and at their constants."""

import math

import jax
import numpy as np
import pytest

import posenc_jax as pe
from posenc_jax import contrib
from posenc_jax.schemes.scheme import Scheme
from tests.support import is_contrib, slow_but

KEY = jax.random.key(0, impl="unsafe_rbg")  # It compiles fastest.


def normal(std, mean=0.0):
    """A check of samples of a normal distribution."""

    def check(x):
        error = 5 * std * x.size**-0.5  # The deviation has that of std / sqrt(2 n).
        assert abs(x.mean() - mean) < error and abs(x.std() - std) < error
        assert np.abs(x - mean).max() > 2.5 * std

    return check


def uniform(low, high):
    """A check of samples of a uniform distribution."""

    def check(x):
        width = high - low
        assert low <= x.min() < low + 0.03 * width and high - 0.03 * width < x.max() <= high
        assert abs(x.mean() - (low + high) / 2) < 2 * width * x.size**-0.5

    return check


def linear(fan_in):
    """As torch.nn.Linear and Conv1d draw weights and biases."""
    return uniform(-(fan_in**-0.5), fan_in**-0.5)


CASES: list[tuple[Scheme, dict]] = [
    (pe.LearnedAbsolute(512, 64), {"table": normal(0.02)}),  # initializer_range of BERT.
    (pe.ALiBi(4000, symmetry="learned"), dict.fromkeys(("past", "future"), normal(1, -2))),
    (
        pe.FIRE(num_heads=20, width=400, init_c=0.2),
        dict.fromkeys(("inner", "inner_bias"), linear(1))
        | {"outer": linear(400), "c": 0.2, "multiplier": 1.0},
    ),
    (pe.KERPLELog(num_heads=4000), {"r1": uniform(0, 2), "r2": uniform(0, 1)}),
    (contrib.KERPLEPower(num_heads=4000), {"r1": uniform(0, 1), "r2": uniform(0, 2)}),
    (pe.T5(num_heads=60), {"table": normal(0.02)}),
    (pe.CoPE(head_dim=8), {"table": 0.0}),
    (
        pe.DeBERTa(num_heads=8, head_dim=8, model_dim=16),
        {"keys": normal(0.02), "queries": normal(0.02), "table": normal(0.02), "bias": 0.0},
    ),
    (pe.FoX(num_heads=50, model_dim=40, init_bias=5.0), {"w": normal(0.02), "b": 5.0}),
    (
        pe.GRAPEA(num_heads=60, head_dim=64, gate="both", init_omega=3.0),
        {"omega": math.log(math.expm1(3.0)), "u": normal(1 / 8), "v": normal(1 / 8)},
    ),
    (pe.Inkling(num_heads=8, model_dim=32), {"project": normal(0.02), "bank": normal(0.02)}),
    # The default initialiser of tensor2tensor's get_variable is Glorot's.
    (
        pe.Shaw(num_heads=1, head_dim=128),
        dict.fromkeys(("keys", "values"), uniform(-((6 / 161) ** 0.5), (6 / 161) ** 0.5)),
    ),
    (
        pe.TransformerXL(num_heads=20, head_dim=32, model_dim=4),
        dict.fromkeys(("u", "v", "project"), normal(0.02)),
    ),
    (pe.LearnedRoPE(8, groups=2), {"alpha": 0.0}),
    (pe.PoPE(num_heads=2, head_dim=4), {"delta": 0.0}),
    (pe.PoPE(num_heads=60, head_dim=64, uniform=True), {"delta": uniform(-2 * np.pi, 0)}),
    (
        pe.RePo(model_dim=400, head_dim=8, groups=20, init_std=0.1),
        dict.fromkeys(("gate", "content", "out"), normal(0.1)),
    ),
    (pe.SSMax(num_heads=3, scale=0.0, offset=1.0), {"scale": 0.0, "offset": 1.0}),
    (
        pe.SwinV2(num_heads=4, width=300),
        {"in": linear(2), "in_bias": linear(2), "out": linear(300), "tau": math.log(10)},
    ),
    (
        contrib.DAPE(num_heads=20, width=100),
        {"in": linear(40), "in_bias": linear(40), "out": linear(100), "base": None},
    ),
    (contrib.ComRoPE(64, groups=9, init_std=0.5), {"matrix": normal(0.5), "multiplier": normal(1)}),
    (contrib.LearnableFourier(60, num_features=2000, gamma=3.0), {"waves": normal(1 / 9)}),
    (contrib.LieRE(head_dim=64, size=8, groups=3), {"upper": uniform(0, 2 * np.pi)}),
    (
        contrib.SelectiveRoPE(model_dim=100, head_dim=64, groups=4, rank=25),
        {"down": linear(100), "up": linear(25), "conv": linear(4)},
    ),
    (contrib.ShortConv(20, 20, head_dim=8), dict.fromkeys("qkv", linear(4))),
]


@pytest.mark.parametrize(
    ("scheme", "expected"),
    slow_but(CASES, *(case for case in CASES if not is_contrib(type(case[0])))),
    ids=lambda x: getattr(x, "name", ""),
)
def test_initial_values(scheme, expected):
    params = jax.device_get(jax.jit(scheme.init)(KEY))
    drawn = []
    for name, initial in expected.items():
        if callable(initial):
            initial(params[name])
            drawn.append(params[name].ravel())
        elif initial is not None:
            np.testing.assert_allclose(params[name], initial, rtol=1e-6)
    for n, x in enumerate(drawn):  # Each has its own key.
        size = min(map(np.size, drawn))
        assert all(np.abs(np.corrcoef(x[:size], y[:size])[0, 1]) < 0.5 for y in drawn[:n])
