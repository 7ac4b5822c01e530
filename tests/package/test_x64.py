"""Schemes under JAX_ENABLE_X64=1, in one process of its own: the flag is global."""

import os
import subprocess
import sys

import posenc_jax as pe

PROGRAM = """
import sys

import jax
import jax.numpy as jnp

sys.path[:0] = ["."]
import posenc_jax as pe
from tests.support import SIZES, build

for name, cls in pe.SCHEMES.items():
    scheme = build(cls)
    params = jax.eval_shape(scheme.init, jax.random.key(0))
    for leaf in jax.tree.leaves(params):
        assert leaf.dtype == jnp.float32, (name, "init", leaf)

    def run(params, x, q, k, v):
        at = jnp.zeros((scheme.traits.num_axes, 1, 5), jnp.int32)
        at = at[0] if scheme.traits.num_axes == 1 else at
        x = pe.scheme_embedding(scheme, params, x, coordinates=at)
        return x, pe.scheme_attention(scheme, params, q, k, v, x=x, coordinates=at)[0]

    def array(*shape):
        return jax.ShapeDtypeStruct((1, 5, *shape), jnp.float32)

    dim = SIZES["head_dim"]
    tokens = array(SIZES["model_dim"]), array(6, dim), array(3, dim), array(3, dim)
    out = jax.eval_shape(run, params, *tokens)
    for leaf in out:
        assert leaf.dtype == jnp.float32, (name, "output", leaf)
    print(name)

tables = (jnp.ones((1, 5, 2), jnp.float64),) * 2
at = jnp.zeros((1, 5), jnp.int32)
for draw in (pe.positions.random_floats, pe.contrib.continuous):
    options = {"high": 8.0} if draw is pe.positions.random_floats else {}
    assert draw(jax.random.key(0), at, **options).dtype == jnp.float32, draw
q = jnp.ones((1, 40, 1, 4), jnp.float32)
loss = lambda pairs: pe.attention(q, q, q, rules=pe.DenseBias(pairs), implementation="xla").sum()
assert jax.eval_shape(jax.grad(loss), jnp.ones((1, 1, 40, 40))).dtype == jnp.float64
empty = jnp.zeros((1, 0, 1, 4), jnp.float32)
assert pe.attention(empty, empty, empty, return_lse=True)[1].dtype == jnp.float32
assert pe.apply_rotation(jnp.ones((1, 5, 1, 4), jnp.bfloat16), *tables).dtype == jnp.bfloat16
"""


def test_parameters_and_outputs_are_float32_under_x64():
    environment = os.environ | {"JAX_ENABLE_X64": "1", "JAX_PLATFORMS": "cpu"}
    done = subprocess.run(
        [sys.executable, "-c", PROGRAM], env=environment, capture_output=True, text=True
    )
    assert done.returncode == 0, done.stderr[-2000:]
    assert done.stdout.split() == list(pe.SCHEMES)
