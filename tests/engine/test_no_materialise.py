"""No array of the tiled engine grows with T x S, forward or backward."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import posenc_jax as pe
from tests.engine.rules import KINDS
from tests.kernels.kernel_cases import arrays_of
from tests.support import slow

HEADS, DIM = 2, 16


def _step(kinds, length):
    tokens = [jax.ShapeDtypeStruct((1, length, HEADS, DIM), jnp.float32)] * 3
    params = {name: KINDS[name].make(np.random.default_rng(0), HEADS, DIM) for name in kinds}

    def loss(q, k, v, params):
        rules = tuple(rule for n, x in params.items() for rule in KINDS[n].rules(x, q, k))
        out = pe.attention(q, k, v, is_causal=True, implementation="xla", rules=rules)
        return jnp.sum(out**2)

    return jax.value_and_grad(loss, (0, 1, 2, 3)), (*tokens, params)


def _largest(jaxpr):
    """Returns the number of elements of the largest array in a jaxpr, nested ones included."""
    return max(x.size for x in arrays_of(jaxpr))


IN_JAXPR = [k for k in KINDS if not KINDS[k].axes and k != "all_pairs"]
TOGETHER = ("t5", "fire", "separable", "shaw", "wide", "unbounded")  # Rules in one call.


@pytest.mark.parametrize(
    "kinds",
    [TOGETHER, ("whole",), *(pytest.param((k,), marks=slow) for k in IN_JAXPR if k != "whole")],
    ids="+".join,
)
def test_no_array_of_all_pairs_in_the_jaxpr(kinds):
    def largest(length):
        step, arguments = _step(kinds, length)
        return _largest(jax.make_jaxpr(step)(*arguments).jaxpr)

    large = largest(8192)
    assert large <= 8 * largest(1024)  # All pairs would grow by 64.
    assert large < 8192 * 8192 // 4


@slow
def test_outputs_of_many_layers_take_the_memory_of_one():
    """XLA copies a constant for the loop of each layer, before the first of them."""
    length, dim = 1024, HEADS * DIM

    def temporary_bytes(layers):
        def model(x, weights):
            for weight in weights:
                q = (x @ weight).reshape(1, length, HEADS, DIM)
                x += pe.attention(q, q, q, is_causal=True, implementation="xla").reshape(x.shape)
            return x

        x, weight = (jax.ShapeDtypeStruct((n, dim), jnp.float32) for n in (length, dim))
        compiled = jax.jit(model).lower(x, [weight] * layers).compile()
        return compiled.memory_analysis().temp_size_in_bytes

    assert temporary_bytes(6) < temporary_bytes(2) + 4 * length * dim
