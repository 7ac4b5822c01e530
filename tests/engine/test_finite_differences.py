"""Gradients against central differences of the function itself, along random directions.

The function is float32, so steps are large and the differences are Richardson's: their error is
less than a thousandth of the slope.
"""

import jax
import numpy as np
import pytest

import posenc_jax as pe
from posenc_jax.engine.blocks import Blocks
from posenc_jax.engine.xla import XLA
from tests.engine.rules import KINDS
from tests.support import slow

B, T, N, K, H = 1, 12, 2, 1, 4
STEP = 0.012

TILES = XLA(Blocks(8, 4), Blocks(4, 8))
# The tiles have the gradients of the reference for every rule: test_every_implementation.py.
IN_TILES = ("t5", "fox", "shaw", "unbounded")
CASES = [*((kind, "xla") for kind in IN_TILES), ("whole", "reference")]
MORE_CASES = [(k, i) for k in KINDS for i in ("reference", "xla") if (k, i) not in CASES]
CASES += [pytest.param(*case, marks=slow) for case in MORE_CASES]


@pytest.mark.parametrize(("kind", "implementation"), CASES)
def test_the_gradient_is_the_slope(kind, implementation):
    kind = KINDS[kind]
    random = np.random.default_rng(2)  # No step crosses a kink of the ReLU in FIRE.

    def normal(*shape):
        return random.normal(size=shape).astype(np.float32)

    point = {"q": normal(B, T, N, H), "k": normal(B, T, K, H), "v": normal(B, T, K, H)}
    point["params"] = jax.device_get(kind.make(random, N, H))
    weights = normal(B, T, N, H)
    places = {}
    if kind.axes:
        coordinates = 3 * normal(kind.axes, B, T)
        places = {"q_coordinates": coordinates, "k_coordinates": coordinates + np.float32(0.25)}

    @jax.jit
    def gradient(point):
        def loss(point):
            q, k, v = point["q"], point["k"], point["v"]
            options = {"is_causal": True, "softcap": 8.0} | places
            options["implementation"] = TILES if implementation == "xla" else implementation
            out = pe.attention(q, k, v, rules=kind.rules(point["params"], q, k), **options)
            return (out * weights).sum(), out * weights

        return jax.grad(loss, has_aux=True)(point)

    for path, slope in jax.tree.leaves_with_path(gradient(point)[0]):
        for _ in range(2):
            way = normal(*slope.shape)
            way /= np.linalg.norm(way)

            def total(step, path=path, way=way):
                def move(leaf_path, x):
                    return x + np.float32(step) * way if leaf_path == path else x

                terms = gradient(jax.tree.map_with_path(move, point))[1]
                return np.asarray(terms, np.float64).sum()

            def difference(step, total=total):
                return (total(step) - total(-step)) / (2 * step)

            expected = (4 * difference(STEP) - difference(2 * STEP)) / 3
            product = float((np.asarray(slope) * way).sum())
            np.testing.assert_allclose(product, expected, atol=3e-4, rtol=1e-3, err_msg=str(path))
