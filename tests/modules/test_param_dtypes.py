"""Parameters of 16 bits: a model cast as a whole computes its position encodings in float32."""

import functools

import jax
import jax.numpy as jnp
import pytest

import posenc_jax as pe
from tests.support import build, make_batch

SHAPES = {
    name: shapes
    for name, cls in pe.SCHEMES.items()
    if jax.tree.leaves(shapes := jax.eval_shape(build(cls).init, jax.random.key(0)))
}
EXACT = "broadcast_in_dim concatenate gather neg reshape slice split squeeze transpose unstack"


def attend(scheme, params):
    tokens = make_batch()
    q = tokens.q + pe.scheme_embedding(scheme, params, tokens.x)[..., None, :8]
    options = {"x": tokens.x, "is_causal": True}
    return pe.scheme_attention(scheme, params, q, tokens.k, tokens.v, **options)[0]


def rounding(jaxpr):
    """Yields the operations that round their results to bfloat16."""
    for equation in jaxpr.eqns:
        inner = [x for x in jax.tree.leaves(list(equation.params.values())) if hasattr(x, "eqns")]
        for part in inner:
            yield from rounding(getattr(part, "jaxpr", part))
        name = equation.primitive.name
        if not inner and name not in EXACT.split():
            yield from (name for v in equation.outvars if v.aval.dtype == jnp.bfloat16)


@pytest.mark.parametrize("name", SHAPES)
def test_nothing_is_computed_in_the_bfloat16_of_parameters(name):
    half = jax.tree.map(lambda a: jax.ShapeDtypeStruct(a.shape, jnp.bfloat16), SHAPES[name])
    with jax.numpy_dtype_promotion("standard"):
        traced = jax.make_jaxpr(functools.partial(attend, build(pe.SCHEMES[name])))(half)
    assert not set(rounding(traced.jaxpr))
