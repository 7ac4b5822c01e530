"""Schemes with 64-bit types enabled."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import posenc_jax as pe
from tests.support import BATCH, LENGTH, build, slow


def outputs(scheme, key, tokens):
    axes, params, qkv = scheme.traits.num_axes, scheme.init(key), (tokens.q, tokens.k, tokens.v)
    at = np.zeros((axes, BATCH, LENGTH) if axes > 1 else (BATCH, LENGTH), np.int32)
    x = pe.scheme_embedding(scheme, params, tokens.x, coordinates=at)
    options = {"x": x, "coordinates": at, "is_causal": True}
    return params, x, pe.scheme_attention(scheme, params, *qkv, **options)[0]


@slow
@pytest.mark.parametrize("cls", pe.SCHEMES.values())
def test_parameters_and_outputs_are_float32_under_x64(cls, tokens):
    with jax.enable_x64(True), jax.numpy_dtype_promotion("standard"):
        run = functools.partial(outputs, build(cls))
        for leaf in jax.tree.leaves(jax.eval_shape(run, jax.random.key(0), tokens)):
            assert leaf.dtype == jnp.float32


def test_dtypes_of_functions_under_x64():
    with jax.enable_x64(True), jax.numpy_dtype_promotion("standard"):
        at, q = np.zeros((1, 5), np.int32), jax.ShapeDtypeStruct((1, 40, 1, 4), jnp.float32)
        for draw in (pe.positions.random_floats, pe.contrib.continuous):
            options = {"high": 8.0} if draw is pe.positions.random_floats else {}
            out = jax.eval_shape(lambda d=draw, o=options: d(jax.random.key(0), at, **o))
            assert out.dtype == jnp.float32, draw

        def loss(pairs, q):
            return pe.attention(q, q, q, rules=pe.DenseBias(pairs), implementation="xla").sum()

        pairs = jax.ShapeDtypeStruct((1, 1, 40, 40), jnp.float64)
        assert jax.eval_shape(jax.grad(loss), pairs, q).dtype == jnp.float64
        empty = jax.ShapeDtypeStruct((1, 0, 1, 4), jnp.float32)
        lse = jax.eval_shape(lambda q: pe.attention(q, q, q, return_lse=True)[1], empty)
        assert lse.dtype == jnp.float32
        half, tables = jax.ShapeDtypeStruct((1, 5, 1, 4), jnp.bfloat16), (np.ones((1, 5, 2)),) * 2
        assert jax.eval_shape(lambda x: pe.apply_rotation(x, *tables), half).dtype == jnp.bfloat16
