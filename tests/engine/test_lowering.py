"""Attention, forward and backward, becomes a program for TPU and for CUDA.

Without such hardware: JAX's part of compiling is all that runs. Of schemes that need the same of
attention, one runs by default, and LieRE, which needs eigenvectors; slow cases run every scheme.
"""

import jax
import pytest

import posenc_jax as pe
from tests.support import KINDS, build, make_batch, output, slow_but

SOME = {*KINDS, "liere"}


@pytest.mark.parametrize("name", slow_but(pe.SCHEMES, *SOME))
def test_lowers_with_its_gradients(name):
    scheme = build(pe.SCHEMES[name])

    def loss(params, tokens):
        return (output(scheme, params, tokens) ** 2).sum()

    params = jax.eval_shape(scheme.init, jax.random.key(0))
    tokens = make_batch(length=40)
    traced = jax.jit(jax.value_and_grad(loss, (0, 1))).trace(params, tokens)
    traced.lower(lowering_platforms=("tpu", "cuda"))
