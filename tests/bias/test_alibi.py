"""ALiBi against its authors' slopes and the paper's formula."""

import json
import pathlib

import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from oracle import attend, qkv, softmax_attention

import posenc_jax as pe

GOLDEN = json.loads((pathlib.Path(__file__).parents[1] / "golden" / "alibi.json").read_text())
SLOPES = {int(n): s for n, s in GOLDEN["slopes"].items()}  # Printed by the authors' get_slopes.
ARRAYS = qkv()


@pytest.mark.parametrize("heads", SLOPES)
def test_slopes_are_those_of_the_authors_code(heads):
    np.testing.assert_allclose(pe.alibi_slopes(heads), SLOPES[heads], rtol=1e-6)
    np.testing.assert_array_equal(pe.ALiBi(num_heads=heads).bias({}).heads, pe.alibi_slopes(heads))


def test_slopes_worked_out_by_hand():
    np.testing.assert_array_equal(pe.alibi_slopes(8), [2.0**-h for h in range(1, 9)])  # Section 3.
    six = [2.0**-h for h in (2, 4, 6, 8, 1, 3)]  # Those of 4 heads, then two of those of 8.
    np.testing.assert_array_equal(pe.alibi_slopes(6), six)
    plain = 2.0 ** (-8 * np.arange(1, 13) / 12)  # For every N, as OLMo has it: another model.
    assert np.abs(pe.alibi_slopes(12) - plain).max() > 0.1


@pytest.mark.parametrize("is_causal", [True, False])
def test_attention_matches_the_paper(is_causal):
    expected = softmax_attention(
        *ARRAYS,
        lambda q, k, n, i, j: q @ k / np.sqrt(8) - SLOPES[6][n] * abs(i - j),
        sees=lambda i, j: j <= i or not is_causal,
    )
    out = attend(pe.ALiBi(num_heads=6), {}, *ARRAYS, is_causal=is_causal)
    np.testing.assert_allclose(out, expected, atol=1e-5)


def test_the_penalty_at_far_positions():
    at = np.array([1, 257, 10**6])
    dense = pe.ALiBi(num_heads=12).bias({}).dense(jnp.asarray(at), jnp.asarray(at))
    wanted = -np.array(SLOPES[12])[:, None, None] * abs(at[:, None] - at[None])
    np.testing.assert_allclose(dense, wanted, rtol=1e-6)


@settings(deadline=None, max_examples=10)
@given(*[st.integers(0, 2**29)] * 3)
def test_depends_on_the_distance_alone(i, j, shift):
    def at(a, b):
        return pe.ALiBi(num_heads=4).bias({}).dense(jnp.array([a]), jnp.array([b]))

    np.testing.assert_array_equal(at(i, j), at(j, i))
    np.testing.assert_array_equal(at(i, j), at(i + shift, j + shift))


def test_errors_name_the_argument_and_the_value():
    for make in (pe.alibi_slopes, lambda n: pe.ALiBi(num_heads=n)):
        with pytest.raises(ValueError, match=r"alibi: num_heads must be .*1, got 0"):
            make(0)
    with pytest.raises(ValueError, match="attention: bias is for 4 heads but q has 6"):
        pe.attention(*ARRAYS, bias=pe.ALiBi(num_heads=4).bias({}))
