"""Rotary frequencies: their values, and the maps that extend the context."""

import dataclasses

import jax.numpy as jnp
import numpy as np
import pytest

import posenc_jax as pe
from tests.oracle import apply_rope
from tests.support import Option, golden

_LONG = {"factor": 4.0, "original_max_position": 64, "length": 256}
_SHORT = {"original_max_position": 256}
OPTIONS = {
    pe.PI: {"factor": 2.0},
    pe.NTK: {"factor": 2.0},
    pe.DynamicNTK: {
        "factor": Option(2.0, _LONG),
        "original_max_position": Option(32, _LONG),
        "length": Option(128, _LONG),
    },
    pe.Llama3: {
        "factor": 4.0,
        "original_max_position": 256,
        "low_freq_factor": Option(2.0, _SHORT),
        "high_freq_factor": Option(30.0, _SHORT),
    },
}

# Made by transformers 5.23.0, modeling_rope_utils.py, in float32. Its dynamic NTK with factor 2,
# trained at 2048 and reading 4096, scales the base by 2 * 4096 / 2048 - 1 = 3; reading 8192 by 7.
GOLDEN = golden("frequency_maps")["cases"]
LINEAR_4 = [0.25, 0.079056941, 0.025, 0.0079056947, 0.0025, 0.00079056947, 0.00025, 7.9056947e-05]
GOLDEN["linear_4"] = {"dim": 16, "theta": 1e4, "frequencies": LINEAR_4, "attention_factor": 1.0}


@dataclasses.dataclass(frozen=True)
class Shift(pe.FrequencyMap):
    """A map that does not commute with the others, and has a factor."""

    by: float = 0.5

    def __call__(self, frequencies, head_dim, theta):
        return frequencies + self.by, 1.5


@pytest.mark.parametrize("dim, theta", [(2, 1e4), (8, 1e4), (12, 5e5)])
def test_frequencies_are_the_powers_of_the_paper(dim, theta):
    got, factor = pe.rope_frequencies(dim, theta)
    np.testing.assert_allclose(got, [theta ** (-2 * p / dim) for p in range(dim // 2)], rtol=1e-14)
    assert got.dtype == np.float64 and factor == 1.0


@pytest.mark.parametrize(
    "scaling, name",
    [
        (pe.PI(factor=4.0), "linear_4"),
        (pe.NTK(factor=3.0), "dynamic_4096"),
        (pe.NTK(factor=7.0), "dynamic_8192"),
        (pe.DynamicNTK(2.0, 2048, 4096), "dynamic_4096"),
        (pe.DynamicNTK(2.0, 2048, 8192), "dynamic_8192"),
        (pe.Llama3(), "llama3"),
        (pe.Proportional(), "proportional"),
    ],
    ids=str,
)
def test_maps_match_transformers(scaling, name):
    case = GOLDEN[name]
    got, factor = pe.rope_frequencies(case["dim"], case["theta"], scaling)
    np.testing.assert_allclose(got, case["frequencies"], rtol=1e-6)
    assert factor == case["attention_factor"]


def test_ntk_counts_the_rotary_dimensions():
    ntk = pe.NTK(factor=8.0)
    part = pe.RoPE(head_dim=16, rotary_dim=8, scaling=ntk).base_frequencies
    np.testing.assert_array_equal(part, pe.rope_frequencies(8, scaling=ntk)[0])


def test_maps_compose_from_left_to_right():
    plain, _ = pe.rope_frequencies(8)
    a, factor = pe.rope_frequencies(8, scaling=(pe.PI(factor=2.0), Shift()))
    np.testing.assert_allclose(a, plain / 2 + 0.5)
    b, _ = pe.rope_frequencies(8, scaling=(Shift(), pe.PI(factor=2.0)))
    np.testing.assert_allclose(b, (plain + 0.5) / 2)
    assert factor == 1.5 and pe.rope_frequencies(8, scaling=(Shift(), Shift()))[1] == 1.5**2


def test_the_factor_multiplies_what_was_rotated_and_nothing_else():
    x, positions = jnp.ones((1, 3, 1, 8)), jnp.arange(3)
    out = apply_rope(x, positions, rotary_dim=4, scaling=Shift(by=0.0))
    plain = apply_rope(x, positions, rotary_dim=4)
    np.testing.assert_allclose(out[..., :4], 1.5 * plain[..., :4], rtol=1e-6)
    np.testing.assert_array_equal(out[..., 4:], x[..., 4:])


YARN, DYNAMIC = pe.YaRN(4.0, 4096), pe.DynamicNTK(2.0, 64, 128)
OTHERS = pe.Resonance(), pe.HighFrequenciesOnly(4096), pe.ClippedFrequencies(20), pe.Proportional()


def test_maps_that_do_not_extend_the_context_go_with_one_that_does():
    for other in OTHERS:
        pe.RoPE(head_dim=128, scaling=(YARN, other))


FACTORS = [pe.PI, pe.NTK, pe.Llama3, pe.YaRN, pe.NTKByParts, pe.LongRoPE, pe.DynamicNTK]
LENGTHS = {cls: {"factor": 2.0} for cls in FACTORS[2:]} | {pe.HighFrequenciesOnly: {}}
ERRORS = [
    *(
        (cls, {"factor": x}, f"{cls.__name__}: factor must be .*, got {x}")
        for cls in FACTORS
        for x in (0.5, float("nan"), float("inf"))
    ),
    *(
        (
            cls,
            more | {"original_max_position": x},
            f"{cls.__name__}: original_max_position must be the trained length, got {x}",
        )
        for cls, more in LENGTHS.items()
        for x in (0, float("nan"))
    ),
    *(
        (pe.RoPE, {"scaling": maps}, "several maps that extend the context")
        for maps in (
            (YARN, YARN),
            (DYNAMIC, pe.Resonance(), YARN),
            (pe.PI(factor=8.0), pe.NTK(factor=8.0)),
            (pe.Llama3(), pe.PI(factor=2.0)),
        )
    ),
    (pe.DynamicNTK, _LONG | {"length": 0}, "DynamicNTK: length must be at least 1, got 0"),
    (pe.Llama3, {"low_freq_factor": 5.0}, "Llama3: .*at most high_freq_factor, got 5.0 and 4.0"),
    (pe.Llama3, {"low_freq_factor": 0.0}, "Llama3: .*must be positive .*got 0.0 and 4.0"),
    (pe.rope_frequencies, {"dim": 3, "theta": 10000.0}, "rope: .*even and positive, got 3"),
    (pe.rope_frequencies, {"dim": 0, "theta": 10000.0}, "rope: .*got 0"),
    (pe.rope_frequencies, {"dim": 4, "theta": -1.0}, "rope: .*positive, got -1.0"),
    *(
        (pe.RoPE, {"scaling": scaling}, "scaling must be a FrequencyMap", TypeError)
        for scaling in ("yarn", 4.0, {"factor": 4.0}, (pe.PI(factor=2.0), "ntk"))
    ),
    *(
        (
            pe.RoPE,
            {"head_dim": 2, "scaling": ntk},
            "NTK: needs more than 2 rotary dimensions, got 2",
        )
        for ntk in (pe.NTK(factor=2.0), pe.DynamicNTK(2.0, 2048, 4096))
    ),
]
