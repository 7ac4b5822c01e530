"""Gradients against central differences of the function itself, along random directions.

The function is float32, so steps are large and the differences are Richardson's: their error is
less than a thousandth of the slope.
"""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from engine.rules import KINDS

import posenc_jax as pe
from posenc_jax.engine.blocks import Blocks
from posenc_jax.engine.xla import XLA

B, T, N, K, H = 1, 12, 2, 1, 4
STEP = 0.012


TILES = XLA(Blocks(8, 4), Blocks(4, 8))


@pytest.mark.parametrize("implementation", ["reference", TILES], ids=["reference", "xla"])
@pytest.mark.parametrize("kind", KINDS)
def test_the_gradient_is_the_slope(kind, implementation):
    kind = KINDS[kind]
    keys = jax.random.split(jax.random.key(0), 5)
    sizes = (B, T, N, H), (B, T, K, H), (B, T, K, H)
    q, k, v = (jax.random.normal(key, size) for key, size in zip(keys[:3], sizes, strict=True))
    point = {"q": q, "k": k, "v": v, "params": kind.make(keys[3], N, H)}
    weights = jax.random.normal(keys[4], (B, T, N, H))

    places = {}
    if kind.axes:
        coordinates = jax.random.normal(keys[4], (kind.axes, B, T)) * 3
        places = {"q_coordinates": coordinates, "k_coordinates": coordinates + 0.25}

    @jax.jit
    def loss(point):
        q, k, v = point["q"], point["k"], point["v"]
        options = {"is_causal": True, "softcap": 8.0, "implementation": implementation}
        out = pe.attention(q, k, v, **places, rules=kind.rules(point["params"], q, k), **options)
        return out * weights

    def total(point):
        return np.asarray(loss(point), np.float64).sum()

    gradient = jax.jit(jax.grad(lambda point: loss(point).sum()))(point)
    for path, slope in jax.tree.leaves_with_path(gradient):
        for seed in range(2):
            way = jax.random.normal(jax.random.key(seed), slope.shape)
            way /= jnp.linalg.norm(way)

            def moved(step, path=path, way=way):
                def move(leaf_path, x):
                    return x + jnp.float32(step) * way if leaf_path == path else x

                return total(jax.tree.map_with_path(move, point))

            def difference(step, moved=moved):
                return (moved(step) - moved(-step)) / (2 * step)

            expected = (4 * difference(STEP) - difference(2 * STEP)) / 3
            got = float((slope * way).sum())
            np.testing.assert_allclose(got, expected, atol=3e-4, rtol=1e-3, err_msg=str(path))
