"""BAM against runs of the authors' two priors, and against ALiBi."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import posenc_jax as pe
from posenc_jax import contrib
from tests.support import golden, initial

OPTIONS = {
    contrib.BAM: {
        "learn_location": True,
        "scale_inside": True,
        "initial_shape": initial(0.5),
    }
}
GOLDEN = golden("bam")
BOTH = pytest.mark.parametrize("name", ["bam", "bam_inference"])


def params(name):
    return {n: jnp.asarray(GOLDEN[name][n], jnp.float32) for n in ("scale", "shape", "loc")}


@BOTH
def test_matches_the_prior_of_the_authors(name):
    scheme = contrib.BAM(num_heads=6, learn_location=True, scale_inside=name == "bam_inference")
    bias = scheme.rules(params(name)).dense(jnp.arange(9), jnp.arange(9))
    np.testing.assert_allclose(bias, GOLDEN[name]["bias"], rtol=2e-6, atol=2e-6)


@BOTH
def test_initial_prior_is_that_of_the_authors_and_alibi(name):
    scheme, positions = contrib.BAM(6, scale_inside=name == "bam_inference"), jnp.arange(9)
    bias = scheme.rules(scheme.init(jax.random.key(0))).dense(positions[-1:], positions)
    np.testing.assert_allclose(bias[:, 0], GOLDEN[name]["initial"], rtol=2e-6)
    alibi = pe.ALiBi(num_heads=6).rules({}).dense(positions[-1:], positions)
    np.testing.assert_allclose(bias, alibi, atol=1e-5)  # The epsilon is 1e-5.


def test_gradients_are_finite_where_a_key_is_at_the_centre_of_the_prior():
    """|j - i - m| is zero there, and its power has no derivative."""
    scheme = contrib.BAM(num_heads=6, learn_location=True)
    learned = params("bam") | {"loc": jnp.zeros(6)}

    def total(learned):
        return scheme.rules(learned).dense(jnp.arange(5), jnp.arange(5)).sum()

    for leaf in jax.tree.leaves(jax.jit(jax.grad(total))(learned)):
        assert np.isfinite(leaf).all()
