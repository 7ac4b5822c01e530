"""Sinusoidal positions against the paper, tensor2tensor's code, and their own properties."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

import posenc_jax as pe
from posenc_jax import sinusoidal_encoding as encode
from tests.support import golden

OPTIONS = {pe.Sinusoidal: {"theta": 100.0, "layout": "concat"}}

GOLDEN = golden("sinusoidal")
AT = np.array([0, 1, 2, 62, 257, 10**6, -3])


def paper(position, dim, theta=10000.0):
    """Section 3.5 of the paper, one number at a time, in float64."""
    out = np.zeros(dim)
    for i in range(dim // 2):
        out[2 * i] = np.sin(position / theta ** (2 * i / dim))
        out[2 * i + 1] = np.cos(position / theta ** (2 * i / dim))
    return out


@pytest.mark.parametrize("dim, theta", [(2, 1e4), (4, 1e4), (12, 1e4), (6, 500.0), (64, 1e6)])
def test_matches_the_paper(dim, theta):
    got = encode(jnp.asarray(AT), dim, theta=theta)
    np.testing.assert_allclose(got, [paper(p, dim, theta) for p in AT], rtol=0, atol=3e-7)


@pytest.mark.parametrize("case", GOLDEN["cases"], ids=lambda case: str(case["dim"]))
def test_t2t_matches_the_code_of_tensor2tensor(case):
    positions = case["start"] + jnp.arange(4)
    got = encode(positions, case["dim"], layout="t2t")
    np.testing.assert_allclose(got, case["values"], rtol=0, atol=3e-5)  # Their float32 angles.


@pytest.mark.parametrize("dim", [2, 3, 4, 5, 12])
def test_t2t_matches_its_formula(dim):
    pairs = dim // 2  # log_timescale_increment of get_timing_signal_1d, in float64.
    waves = AT[:, None] * np.exp(-np.arange(pairs) * np.log(10000) / max(pairs - 1, 1))
    expected = np.concatenate([np.sin(waves), np.cos(waves), np.zeros((len(AT), dim % 2))], 1)
    got = encode(jnp.asarray(AT), dim, layout="t2t")
    np.testing.assert_allclose(got, expected, rtol=0, atol=3e-7)


def test_concat_matches_transformer_xl():
    inv_freq = 1 / 10000 ** (np.arange(0.0, 12, 2.0) / 12)  # PositionalEmbedding, float64.
    wave = np.outer(AT, inv_freq)
    expected = np.concatenate([np.sin(wave), np.cos(wave)], -1)
    got = encode(jnp.asarray(AT), 12, layout="concat")
    np.testing.assert_allclose(got, expected, rtol=0, atol=3e-7)


def test_a_widely_copied_worked_example_is_wrong():
    """Position 2, four dimensions. The published vector counts dimensions, not pairs."""
    ours = np.asarray(encode(jnp.array(2), 4), np.float64)
    np.testing.assert_allclose(ours, [0.9093, -0.4161, 0.0200, 0.9998], atol=5e-5)
    np.testing.assert_allclose(ours @ ours, 4 / 2, atol=1e-6)

    published = np.array([0.909, 0.9998, 0.0002, 1.0])
    i = np.arange(4)  # The dimension, where the pair i // 2 belongs.
    wave = 2 / 10000.0 ** (2 * i / 4)
    np.testing.assert_allclose(np.where(i % 2, np.cos(wave), np.sin(wave)), published, atol=5e-4)
    assert abs(published @ published - 4 / 2) > 0.8


@settings(deadline=None, max_examples=10)
@given(st.integers(-(2**30), 2**30), st.integers(-(2**30), 2**30 - 1))
def test_a_shift_is_a_rotation_independent_of_the_position(p, k):
    dim = 6
    rotation = np.zeros((dim, dim))
    for i in range(dim // 2):
        s, c = paper(k, dim)[2 * i : 2 * i + 2]
        rotation[2 * i : 2 * i + 2, 2 * i : 2 * i + 2] = [[c, s], [-s, c]]
    here, there = np.asarray(encode(np.array([p, p + k]), dim), np.float64)
    np.testing.assert_allclose(rotation @ here, there, rtol=0, atol=1e-6)
    np.testing.assert_allclose(here @ here, dim / 2, atol=2e-6)


def test_layouts_agree_only_at_two_dimensions():
    def all_at(dim):
        return [encode(jnp.array([7]), dim, layout=x) for x in ("interleaved", "concat", "t2t")]

    for x in all_at(2):
        np.testing.assert_array_equal(x, all_at(2)[0])
    a, b, c = all_at(6)
    for x, y in ((a, b), (b, c), (a, c)):
        assert np.abs(x - y).max() > 0.1


def test_embed_adds_the_encoding_with_the_same_options():
    x, positions = jnp.zeros((1, 3, 6)), jnp.arange(3)[None]
    plain = pe.Sinusoidal(model_dim=6).embed({}, x, positions)
    np.testing.assert_array_equal(plain, encode(positions, 6))
    for options in ({"theta": 100.0}, {"layout": "concat"}, {"layout": "t2t"}):
        changed = pe.Sinusoidal(model_dim=6, **options).embed({}, x, positions)
        np.testing.assert_array_equal(changed, encode(positions, 6, **options))
        assert np.abs(changed - plain).max() > 0.05


def test_embedding_adds_in_float32_and_keeps_the_dtype():
    x = jax.random.normal(jax.random.key(0), (1, 63, 12), jnp.bfloat16)
    scheme = pe.Sinusoidal(model_dim=12)
    out = pe.scheme_embedding(scheme, {}, x, positions=257 + jnp.arange(63))
    assert out.dtype == jnp.bfloat16
    waves = np.array([[paper(257 + t, 12) for t in range(63)]])
    exact = np.asarray(x, np.float64) + waves
    near = np.abs(np.asarray(out, np.float64) - exact) <= np.abs(exact) * 2.0**-8 + 1e-6
    assert near.all()  # Half a unit in the last place of bfloat16.
    assert (
        scheme.traits.scale_embedding
    )  # "we multiply those weights by sqrt(d_model)", section 3.4.


def test_fractional_positions():
    got = encode(jnp.array([[0.5, 2.25]], jnp.float32), 4)
    np.testing.assert_allclose(got[0], [paper(0.5, 4), paper(2.25, 4)], atol=1e-6)


@pytest.mark.parametrize("dtype", [jnp.bfloat16, jnp.float16, bool, jnp.complex64])
def test_positions_of_other_dtypes_raise(dtype):
    with pytest.raises(TypeError, match=r"sinusoidal: positions must be integers.*got"):
        encode(jnp.zeros(3, dtype), 4)


@pytest.mark.parametrize(
    "dim, options, message",
    [
        (5, {}, "model_dim must be even for layout 'interleaved', got 5"),
        (5, {"layout": "concat"}, "model_dim must be even for layout 'concat', got 5"),
        (0, {}, "model_dim must be at least 2, got 0"),
        (1, {"layout": "t2t"}, "model_dim must be at least 2, got 1"),
        (4, {"theta": 0.0}, "theta must be positive, got 0.0"),
        (4, {"layout": "half"}, r"layout must be one of \(.*\), got 'half'"),
    ],
)
def test_errors_name_the_setting_and_the_value(dim, options, message):
    for make in (
        lambda: encode(jnp.arange(3), dim, **options),
        lambda: pe.Sinusoidal(model_dim=dim, **options),
    ):
        with pytest.raises(ValueError, match=f"sinusoidal: {message}"):
            make()


def test_errors_name_the_shapes():
    scheme = pe.Sinusoidal(model_dim=4)
    with pytest.raises(ValueError, match=r"x must be \[B, T, 4\].*got \(1, 2, 6\) and \(1, 2\)"):
        scheme.embed({}, jnp.zeros((1, 2, 6)), jnp.array([[0, 1]]))
    with pytest.raises(ValueError, match=r"coordinates \[B, T\], got .* and \(2, 1, 2\)"):
        scheme.embed({}, jnp.zeros((1, 2, 4)), jnp.zeros((2, 1, 2), jnp.int32))
