"""Parameters of 16 bits: a model cast as a whole computes its position encodings in float32."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from support import build, make_batch

import posenc_jax as pe

LEARNED = [
    name
    for name, cls in pe.SCHEMES.items()
    if jax.tree.leaves(jax.eval_shape(build(cls).init, jax.random.key(0)))
]


@pytest.mark.parametrize("name", LEARNED)
def test_parameters_in_bfloat16_give_the_numbers_of_their_values(name):
    scheme, tokens = build(pe.SCHEMES[name]), make_batch()
    params = jax.jit(scheme.init)(jax.random.key(0))
    half = jax.tree.map(lambda a: np.asarray(a).astype(jnp.bfloat16), params)

    def attend(params):
        q = tokens.q + pe.scheme_embedding(scheme, params, tokens.x)[..., None, :8]
        options = {"x": tokens.x, "is_causal": True}
        return pe.scheme_attention(scheme, params, q, tokens.k, tokens.v, **options)[0]

    @jax.jit
    def run(half):
        return attend(half), attend(jax.tree.map(lambda a: a.astype(jnp.float32), half))

    with jax.numpy_dtype_promotion("standard"):
        np.testing.assert_allclose(*run(half), atol=2e-5)
