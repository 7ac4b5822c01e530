"""Programs without running them: for TPU and CUDA, and without arrays that grow with T x S."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import posenc_jax as pe
from posenc_jax.ops.take import _by_index, _by_product, take_row
from tests import support
from tests.engine.rules import KINDS
from tests.kernels.kernel_cases import arrays_of
from tests.support import slow

# Of schemes that need the same of attention, one, and LieRE, which needs eigenvectors.
SOME = {*support.KINDS, "liere"}


@pytest.mark.parametrize("name", support.slow_but(pe.SCHEMES, *SOME))
def test_a_scheme_lowers_for_tpu_and_cuda_with_its_gradients(name):
    """JAX's part of compiling is all that runs without such hardware."""
    scheme = support.build(pe.SCHEMES[name])

    def loss(params, tokens):
        return (support.output(scheme, params, tokens) ** 2).sum()

    params = jax.eval_shape(scheme.init, jax.random.key(0))
    tokens = support.make_batch(length=40)
    traced = jax.jit(jax.value_and_grad(loss, (0, 1))).trace(params, tokens)
    traced.lower(lowering_platforms=("tpu", "cuda"))


HEADS, DIM = 2, 16
QUICK = ("t5", "fire", "separable", "shaw", "wide", "unbounded"), ("whole",)  # Rules in one call.
MORE = [(k,) for k in KINDS if not KINDS[k].axes and k not in ("all_pairs", "whole")]


@pytest.mark.parametrize(
    "kinds", [*QUICK, *(pytest.param(k, marks=slow) for k in MORE)], ids="+".join
)
def test_no_array_of_all_pairs_in_the_jaxpr(kinds):
    params = {name: KINDS[name].make(np.random.default_rng(0), HEADS, DIM) for name in kinds}

    def loss(q, k, v, params):
        rules = tuple(rule for n, x in params.items() for rule in KINDS[n].rules(x, q, k))
        out = pe.attention(q, k, v, is_causal=True, implementation="xla", rules=rules)
        return jnp.sum(out**2)

    def largest(length):
        tokens = [jax.ShapeDtypeStruct((1, length, HEADS, DIM), jnp.float32)] * 3
        step = jax.make_jaxpr(jax.value_and_grad(loss, (0, 1, 2, 3)))(*tokens, params)
        return max(x.size for x in arrays_of(step.jaxpr))

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


def test_rows_of_tables_by_a_product_are_those_by_index_bit_for_bit():
    table = np.random.default_rng(0).normal(size=(33, 6)).astype(np.float32)
    index = np.array([0, 32, 7, 7, 1], np.int32)

    @jax.jit
    def rows(table):
        def loss(table, take):
            taken = jax.vmap(take, (None, 0))(table, index)
            return jnp.sum(taken**2), taken

        slopes = jax.grad(loss, has_aux=True)
        return [slopes(table, take) for take in (_by_product, take_row, _by_index)]

    *others, expected = rows(table)
    for got in others:
        jax.tree.map(np.testing.assert_array_equal, got, expected)
    traced = jax.jit(take_row).trace(table, jnp.int32(1))
    for platform, has_product in (("tpu", True), ("cpu", False)):
        text = traced.lower(lowering_platforms=(platform,)).as_text()
        assert ("dot_general" in text) == has_product
