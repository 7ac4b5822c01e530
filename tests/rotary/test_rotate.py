"""Tables that come from elsewhere: one for all heads, or sets of them."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import posenc_jax as pe


def test_sets_of_tables_serve_runs_of_heads():
    x = jax.random.normal(jax.random.key(0), (2, 5, 6, 8))
    cos, sin = jax.random.normal(jax.random.key(1), (2, 2, 5, 3, 4))
    whole = pe.rotate(x, cos, sin)
    for head in range(6):
        one = pe.rotate(x[:, :, head : head + 1], cos[:, :, head // 2], sin[:, :, head // 2])
        np.testing.assert_array_equal(whole[:, :, head], one[:, :, 0])


@pytest.mark.parametrize("shape", [(2, 5, 4, 4), (2, 4, 4), (3, 5, 4), (2, 5, 5), (5, 4)])
def test_tables_that_do_not_fit_are_refused(shape):
    with pytest.raises(ValueError, match=r"rotate: cos and sin must be .* x \(2, 5, 6, 8\)"):
        pe.rotate(jnp.ones((2, 5, 6, 8)), jnp.ones(shape), jnp.ones(shape))


def test_tables_that_are_there_are_not_copied_and_those_of_the_program_are_written():
    x = jnp.ones((1, 5, 2, 8))
    cos, sin = pe.cos_sin(jnp.arange(5)[None], pe.rope_frequencies(8)[0])
    given = jax.make_jaxpr(lambda x: pe.rotate(x, cos, sin))(x)
    made = jax.make_jaxpr(pe.rotate)(x, cos, sin)
    assert "scatter" not in str(given)
    assert "scatter" in str(made)
    np.testing.assert_allclose(jax.jit(pe.rotate)(x, cos, sin), pe.rotate(x, cos, sin), rtol=1e-6)
