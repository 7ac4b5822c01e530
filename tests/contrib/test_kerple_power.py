"""KERPLE's power kernel against ALiBi; tests/schemes/bias/test_kerple.py has the authors' code."""

import jax
import jax.numpy as jnp
import numpy as np

import posenc_jax as pe
from posenc_jax import contrib


def test_power_one_is_alibi_with_learned_slopes():
    positions, slopes = jnp.arange(21), np.asarray(pe.alibi_slopes(6))
    params = {"r1": jnp.asarray(slopes.clip(0.01)), "r2": jnp.ones(6)}
    got = contrib.KERPLEPower(6).rules(params).dense(positions, positions)
    alibi = pe.ALiBi(num_heads=6).rules({}).dense(positions, positions)
    steep = slopes >= 0.01
    np.testing.assert_allclose(np.asarray(got)[steep], np.asarray(alibi)[steep], rtol=2e-6)


def test_gradients_are_finite_at_distance_zero():
    def total(params, positions):
        return contrib.KERPLEPower(num_heads=2).rules(params).dense(positions, positions).sum()

    params = {"r1": jnp.ones(2), "r2": jnp.full(2, 0.5)}
    for grad in jax.tree.leaves(jax.jit(jax.grad(total, (0, 1)))(params, jnp.arange(3.0))):
        assert np.all(np.isfinite(grad))
