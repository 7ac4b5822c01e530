"""Attention layers of Inkling-2 from their inputs to their output.

The files have Inkling2FullAttention and Inkling2SlidingAttention of transformers 5.23 with random
weights, in float64. The mask is causal alone, as in `inkling_local`.
"""

import dataclasses
import functools
import math

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import posenc_jax as pe
from tests.hf.test_golden import parameters, read
from tests.support import slow


@functools.partial(jax.jit, static_argnums=0)
def layer(spec, weights, params, x, x_k, x_v):
    """The output of a layer."""

    def projected(x, name, heads):
        kernel = pe.heads_from_linear(weights[f"{name}_proj.weight"], heads)
        return jnp.einsum("btd,dnh->btnh", x, kernel)

    def convolved(y, x, name):
        name = f"{name}_sconv."
        if f"{name}static_weight" not in weights:
            kernel = weights[f"{name}conv1d.weight"][:, 0].T.reshape(-1, *y.shape[2:])
            scale = math.sqrt(len(kernel) + 1)
        else:  # The first tap is the token's own.
            static = weights[f"{name}static_weight"][::-1]
            dynamic = x @ weights[f"{name}weight_proj.weight"].T
            dynamic = dynamic.reshape(*y.shape[:3], -1)[..., ::-1]
            static = static.reshape(1, 1, -1, *y.shape[2:])
            kernel = static + jnp.moveaxis(dynamic, 3, 2)[..., None]
            scale = math.sqrt(2 * kernel.shape[2] + 1)
        return (y + pe.short_convolution(y, kernel)[0]) / scale

    norm = spec.qk_norm
    out, _ = pe.scheme_attention(
        spec.scheme,
        params,
        norm({"scale": weights["q_l2_clip.scale"]}, projected(x, "q", 4)),
        dataclasses.replace(norm, scale="none")({}, convolved(projected(x_k, "k", 2), x_k, "k")),
        pe.QKNorm(scale="none", epsilon=0.03)({}, convolved(projected(x_v, "v", 2), x_v, "v")),
        x=x,
        sinks=x @ weights["sink_proj.weight"].T,
        scale=spec.scale,
        is_causal=True,
        implementation="dense",
    )
    out *= jax.nn.sigmoid(projected(x, "gate", 4))
    return jnp.einsum("btnh,dnh->btd", out, weights["o_proj.weight"].reshape(-1, 4, 8))


@pytest.mark.parametrize("name", ["inkling2", pytest.param("inkling2_local", marks=slow)])
def test_a_layer_equals_that_of_transformers(name):
    _, arrays, spec = read(name)
    weights = {n.removeprefix("weights."): x for n, x in arrays.items() if n[:8] == "weights."}
    inputs = [arrays.get(n, arrays["x"]) for n in ("x", "x_k", "x_v")]
    out = layer(spec, weights, parameters(spec.scheme, arrays), *inputs)
    np.testing.assert_allclose(out, arrays["final"], atol=2e-6)
