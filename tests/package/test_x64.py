"""Schemes with 64-bit types enabled."""

import jax
import jax.numpy as jnp
import numpy as np

import posenc_jax as pe
from tests.support import SIZES, build, slow


@slow
def test_parameters_and_outputs_are_float32_under_x64():
    def array(*shape):
        return jax.ShapeDtypeStruct((1, 5, *shape), jnp.float32)

    dim = SIZES["head_dim"]
    tokens = array(SIZES["model_dim"]), array(6, dim), array(3, dim), array(3, dim)
    with jax.enable_x64(True), jax.numpy_dtype_promotion("standard"):
        for cls in pe.SCHEMES.values():
            scheme = build(cls)

            def run(params, x, q, k, v, scheme=scheme):
                axes = scheme.traits.num_axes
                at = np.zeros((axes, 1, 5) if axes > 1 else (1, 5), np.int32)
                x = pe.scheme_embedding(scheme, params, x, coordinates=at)
                options = {"x": x, "coordinates": at, "is_causal": True}
                return x, pe.scheme_attention(scheme, params, q, k, v, **options)[0]

            params = jax.eval_shape(scheme.init, jax.random.key(0))
            for leaf in jax.tree.leaves((params, jax.eval_shape(run, params, *tokens))):
                assert leaf.dtype == jnp.float32, scheme


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
