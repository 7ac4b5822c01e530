"""Angles are exact at every int32 position: checked against integer arithmetic of rationals."""

from fractions import Fraction

import jax
import jax.numpy as jnp
import numpy as np

from posenc_jax.angles import cos_sin

# 2 pi to 70 digits (OEIS A019692); a turn at 2^31 radians uses 30 of them.
TURN = Fraction("6.283185307179586476925286766559005768394338798750211641949889184615632")
FREQUENCIES = np.array([1.0, 0.1, 10000 ** (-1 / 3), 1e-4, 3e-7, 0.0, 2.5, 100.0, -0.7])
BOUND = 2e-7


def exact(positions, frequencies):
    """Cosine and sine of the product, reduced to one turn without any rounding."""
    angle = [
        [float(int(p) * Fraction(float(w)) % TURN) for w in frequencies] for p in positions.ravel()
    ]
    angle = np.array(angle).reshape(*positions.shape, len(frequencies))
    return np.cos(angle), np.sin(angle)


def error(positions, frequencies=FREQUENCIES, dtype=jnp.int32, run=cos_sin):
    got = run(jnp.asarray(positions, dtype), frequencies)
    pairs = zip(got, exact(positions, frequencies), strict=True)
    return np.max([np.abs(a - b) for a, b in pairs])


def test_every_magnitude_of_position():
    near = [2**k + d for k in range(31) for d in (-1, 0, 1)]
    positions = np.array([[*near, *(-p for p in near), 10**6, 2**31 - 1, -(2**31)]])
    assert error(positions) < BOUND


def test_random_positions_and_frequencies():
    random = np.random.default_rng(0)
    positions = random.integers(-(2**31), 2**31, 500)
    assert error(positions, np.exp(random.uniform(-16, 1, 8))) < BOUND


def test_integers_of_eight_bits():
    assert error(np.array([-5, 0, 1, 127]), dtype=jnp.int8) < BOUND
    assert error(np.array([0, 1, 255]), dtype=jnp.uint8) < BOUND


def test_under_jit_and_with_any_number_of_axes():
    positions = jnp.arange(24, dtype=jnp.int32).reshape(2, 3, 4) * 1_000_003
    eager = cos_sin(positions, FREQUENCIES)
    jitted = jax.jit(lambda p: cos_sin(p, FREQUENCIES))(positions)
    for a, b in zip(eager, jitted, strict=True):
        assert a.shape == (2, 3, 4, 9) and a.dtype == jnp.float32
        np.testing.assert_allclose(a, b, atol=1e-7)


def test_fractions_are_float32_products():
    positions = jnp.array([0.5, -3.25], jnp.float32)
    cos, sin = cos_sin(positions, np.array([1.0, 0.5]))
    angle = np.outer([0.5, -3.25], [1.0, 0.5])
    np.testing.assert_allclose(cos, np.cos(angle), atol=1e-6)
    np.testing.assert_allclose(sin, np.sin(angle), atol=1e-6)


def test_learned_frequencies_are_exact_at_their_float32_values():
    random = np.random.default_rng(0)
    drawn = np.exp(random.uniform(-90, 8, 40)) * random.choice([-1, 1], 40)
    special = [0.0, -0.0, 1.0, -1.0, 2.0**-149, 3e38**0.5, 2.0**40, np.pi, 2 * np.pi, 2.0**-20]
    frequencies = np.array([*drawn, *special], np.float32)
    positions = np.array([[0, 1, 62, 257, 10**6, 2**31 - 1, -1, -(10**6), -(2**31)]])
    for run in (cos_sin, jax.jit(cos_sin)):
        assert error(positions, jnp.asarray(frequencies), run=run) < BOUND


def test_learned_frequencies_have_the_slope_of_the_formula():
    def loss(frequencies, positions=(7, 10**6)):
        cos, sin = cos_sin(jnp.array(positions), frequencies)
        return (2 * cos + 3 * sin).sum()

    coordinates, w = np.array([7, 10**6]), np.array([0.25, -1.0, 0.0], np.float32)
    cos, sin = exact(coordinates, w)
    slope = (coordinates[:, None] * (3 * cos - 2 * sin)).sum(0)
    np.testing.assert_allclose(jax.jit(jax.grad(loss))(w), slope, rtol=1e-5)
    np.testing.assert_allclose(jax.jit(jax.jacfwd(loss))(w), slope, rtol=1e-5)
    curved = np.diag(jax.jit(jax.hessian(lambda w: loss(w, (7,))))(w))
    cos, sin = exact(np.array([7]), w)
    np.testing.assert_allclose(curved, (49 * (-2 * cos - 3 * sin)).sum(0), rtol=1e-5)


def test_nan_in_a_learned_frequency_stays_in_its_pair():
    w = jnp.array([jnp.nan, jnp.inf, 1.0, 2.0**100], jnp.float32)
    for a in cos_sin(jnp.array([3]), w):
        np.testing.assert_array_equal(np.isnan(a), [[True, True, False, True]])
