"""Rotary frequencies: their values, and the maps that extend the context."""

import dataclasses

import jax.numpy as jnp
import numpy as np
import pytest

import posenc_jax as pe
from tests.oracle import apply_rope

OPTIONS = {pe.PI: {"factor": 2.0}, pe.NTK: {"factor": 2.0}}

# Made by transformers 5.23.0, modeling_rope_utils.py, for 16 dimensions and theta 10000, in
# float32. Its dynamic NTK with factor 2, trained at 2048 and reading 4096, scales the base by
# 2 * 4096 / 2048 - 1 = 3; reading 8192 by 7.
LINEAR_4 = [0.25, 0.079056941, 0.025, 0.0079056947, 0.0025, 0.00079056947, 0.00025, 7.9056947e-05]
NTK_3 = [
    1.0,
    0.270296127,
    0.0730599985,
    0.0197478328,
    0.00533776265,
    0.00144277664,
    0.000389976922,
    0.000105409257,
]
NTK_7 = [
    1.0,
    0.239481375,
    0.057351321,
    0.0137345716,
    0.00328917382,
    0.00078769587,
    0.000188638471,
    4.51753949e-05,
]


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
    "scaling, expected",
    [(pe.PI(factor=4.0), LINEAR_4), (pe.NTK(factor=3.0), NTK_3), (pe.NTK(factor=7.0), NTK_7)],
    ids=str,
)
def test_maps_match_transformers(scaling, expected):
    got, factor = pe.rope_frequencies(16, scaling=scaling)
    np.testing.assert_allclose(got, expected, rtol=1e-6)
    assert factor == 1.0


def test_ntk_counts_the_rotary_dimensions():
    x, positions = jnp.ones((1, 1, 1, 16)), jnp.array([1000])
    partial = apply_rope(x, positions, rotary_dim=8, scaling=pe.NTK(factor=8.0))[..., :8]
    alone = apply_rope(x[..., :8], positions, scaling=pe.NTK(factor=8.0))
    np.testing.assert_array_equal(partial, alone)


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


@pytest.mark.parametrize("cls", [pe.PI, pe.NTK])
@pytest.mark.parametrize("factor", [0.5, float("inf"), float("nan")])
def test_a_factor_below_one_is_refused(cls, factor):
    with pytest.raises(
        ValueError, match=f"{cls.__name__}: factor must be at least 1 and finite, got"
    ):
        cls(factor=factor)


def test_ntk_needs_two_pairs():
    with pytest.raises(ValueError, match="NTK: needs more than 2 rotary dimensions, got 2"):
        pe.RoPE(head_dim=2, scaling=pe.NTK(factor=2.0))


ERRORS = [
    (pe.rope_frequencies, {"dim": 3, "theta": 10000.0}, "rope: .*even and positive, got 3"),
    (pe.rope_frequencies, {"dim": 0, "theta": 10000.0}, "rope: .*got 0"),
    (pe.rope_frequencies, {"dim": 4, "theta": -1.0}, "rope: .*positive, got -1.0"),
    (pe.RoPE, {"scaling": "yarn"}, "scaling must be a FrequencyMap", TypeError),
    (pe.RoPE, {"scaling": 4.0}, "scaling must be a FrequencyMap", TypeError),
    (pe.RoPE, {"scaling": {"factor": 4.0}}, "scaling must be a FrequencyMap", TypeError),
    (pe.RoPE, {"scaling": (pe.PI(factor=2.0), "ntk")}, "scaling must be a FrequencyMap", TypeError),
]


def test_at_most_one_map_extends_the_context():
    yarn = pe.YaRN(factor=4.0, original_max_position=64)
    dynamic = pe.DynamicNTK(2.0, 64, 128)
    for maps in [
        (yarn, yarn),
        (yarn, dynamic),
        (dynamic, pe.Resonance(), yarn),
        (pe.PI(factor=8.0), pe.NTK(factor=8.0)),
        (pe.Llama3(), pe.PI(factor=2.0)),
    ]:
        with pytest.raises(ValueError, match="several maps that extend the context"):
            pe.RoPE(head_dim=8, scaling=maps)
    yarn = pe.YaRN(factor=4.0, original_max_position=4096)
    for other in (
        pe.Resonance(),
        pe.HighFrequenciesOnly(original_max_position=4096),
        pe.ClippedFrequencies(pairs=20),
        pe.Proportional(),
    ):
        pe.RoPE(head_dim=128, scaling=(yarn, other))


@pytest.mark.parametrize("cls", [pe.YaRN, pe.NTKByParts, pe.LongRoPE, pe.DynamicNTK])
def test_every_map_says_that_the_trained_length_is_missing(cls):
    message = f"{cls.__name__}: original_max_position must be the trained length, got 0"
    with pytest.raises(ValueError, match=message):
        cls(factor=2.0)
