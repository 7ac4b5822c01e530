"""KERPLE's power kernel at distance zero; test_kerple.py has the authors' code."""

import jax
import numpy as np

from posenc_jax import contrib


def test_gradients_are_finite_at_distance_zero():
    def total(params, positions):
        return contrib.KERPLEPower(num_heads=2).rules(params).dense(positions, positions).sum()

    params = {"r1": np.ones(2, "f4"), "r2": np.full(2, 0.5, "f4")}
    slopes = jax.jit(jax.grad(total, (0, 1)))(params, np.arange(3.0, dtype="f4"))
    assert all(np.all(np.isfinite(slope)) for slope in jax.tree.leaves(slopes))
