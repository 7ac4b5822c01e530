"""Attention layers of Inkling-2 from their inputs to their output, whole and in steps.

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
from posenc_jax.engine.blocks import Blocks
from posenc_jax.engine.xla import XLA
from posenc_jax.kernels.tpu.implementation import PallasTPU
from tests.hf.test_golden import parameters, read
from tests.support import slow

IMPLEMENTATIONS = {
    "dense": "dense",
    "xla": XLA(Blocks(4, 4)),
    "pallas": PallasTPU(interpret=True),
}


def layer(spec, weights, params, inputs, state=None, implementation="reference"):
    """The output of a layer, and the state after these tokens."""
    x, x_k, x_v = inputs
    states, cache = ({}, None) if state is None else state

    def projected(x, name, heads):
        kernel = pe.heads_from_linear(weights[f"{name}_proj.weight"], heads)
        return jnp.einsum("btd,dnh->btnh", x, kernel)

    def convolved(y, x, name):
        old, name = states.get(name), f"{name}_sconv."
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
        out, new = pe.short_convolution(y, kernel, state=old)
        return (y + out) / scale, new

    norm = spec.qk_norm
    q = norm({"scale": weights["q_l2_clip.scale"]}, projected(x, "q", 4))
    k, k_state = convolved(projected(x_k, "k", 2), x_k, "k")
    v, v_state = convolved(projected(x_v, "v", 2), x_v, "v")
    out, cache = pe.scheme_attention(
        spec.scheme,
        params,
        q,
        dataclasses.replace(norm, scale="none")({}, k),
        pe.QKNorm(scale="none", epsilon=0.03)({}, v),
        x=x,
        sinks=x @ weights["sink_proj.weight"].T,
        scale=spec.scale,
        is_causal=True,
        cache=cache,
        implementation=implementation,
    )
    out *= jax.nn.sigmoid(projected(x, "gate", 4))
    out = jnp.einsum("btnh,dnh->btd", out, weights["o_proj.weight"].reshape(-1, 4, 8))
    return out, ({"k": k_state, "v": v_state}, cache)


def golden(name):
    _, arrays, spec = read(name)
    prefix = "weights."
    weights = {n.removeprefix(prefix): x for n, x in arrays.items() if n.startswith(prefix)}
    inputs = [arrays.get(n, arrays["x"]) for n in ("x", "x_k", "x_v")]
    return spec, weights, parameters(spec.scheme, arrays), inputs, arrays["final"]


CASES = [(name, how) for name in ("inkling2", "inkling2_local") for how in IMPLEMENTATIONS]


@pytest.mark.parametrize(
    "name, implementation",
    [pytest.param(*case, marks=() if case == CASES[0] else slow) for case in CASES],
)
def test_a_layer_equals_that_of_transformers_whole_and_in_steps(name, implementation):
    spec, *arrays, inputs, expected = golden(name)
    run = jax.jit(functools.partial(layer, spec), static_argnames="implementation")
    how = {"implementation": IMPLEMENTATIONS[implementation]}
    out, _ = run(*arrays, inputs, **how)
    np.testing.assert_allclose(out, expected, atol=2e-6)
    cache = pe.new_cache(spec.scheme, 1, 12, num_heads=4, num_kv_heads=2, head_dim=8, model_dim=24)
    state, steps = ({}, cache), []
    for i in range(12):
        out, state = run(*arrays, [x[:, i : i + 1] for x in inputs], state, **how)
        steps.append(out)
    np.testing.assert_allclose(np.concatenate(steps, 1), expected, atol=2e-6)
