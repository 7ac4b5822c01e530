"""CABLE against a run of the authors' attention layer, and against FoX."""

import jax
import numpy as np

import posenc_jax as pe
from posenc_jax import contrib
from tests.oracle import attend
from tests.support import close, golden

GOLDEN = golden("cable")
ARRAYS = {
    name: np.asarray(values, np.float32) for name, values in GOLDEN.items() if name != "origin"
}
X, Q, K, V = (ARRAYS[name][None] for name in "xqkv")
PARAMS = {name: ARRAYS[name] for name in "wb"}
SCHEME = contrib.CABLE(num_heads=6, model_dim=24)


def test_matches_the_layer_of_the_authors():
    out = attend(SCHEME, PARAMS, Q, K, V, x=X, is_causal=True, scale=1.0, implementation="xla")
    close(out[0], ARRAYS["out"], 2e-6)


def test_is_fox_with_opposite_gates():
    fox = pe.FoX(num_heads=6, model_dim=24)
    gates = {"w": -PARAMS["w"], "b": -PARAMS["b"]}
    out = attend(fox, gates, Q, K, V, x=X, is_causal=True, scale=1.0)
    close(out[0], ARRAYS["out"], 2e-6)
    key = jax.random.key(0)
    for name, leaf in fox.init(key).items():
        np.testing.assert_array_equal(SCHEME.init(key)[name], leaf)
