"""No array of the tiled engine grows with T x S, forward or backward."""

import math
import re

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import posenc_jax as pe
from tests.engine.rules import KINDS
from tests.kernels.kernel_cases import arrays_of
from tests.support import slow

HEADS, DIM = 2, 16


def _step(kind, length):
    kind = KINDS[kind]
    tokens = [jax.ShapeDtypeStruct((1, length, HEADS, DIM), jnp.float32)] * 3
    params = kind.make(np.random.default_rng(0), HEADS, DIM)

    def loss(q, k, v, params):
        rules = kind.rules(params, q, k)
        out = pe.attention(q, k, v, is_causal=True, implementation="xla", rules=rules)
        return jnp.sum(out**2)

    return jax.value_and_grad(loss, (0, 1, 2, 3)), (*tokens, params)


def _largest(jaxpr):
    """Returns the number of elements of the largest array in a jaxpr, nested ones included."""
    return max(x.size for x in arrays_of(jaxpr))


IN_JAXPR = [k for k in KINDS if not KINDS[k].axes and k != "all_pairs"]
SOME = ("t5", "fire", "separable", "shaw", "wide", "whole", "unbounded")


@pytest.mark.parametrize(
    "kind", [pytest.param(k, marks=() if k in SOME else slow) for k in IN_JAXPR]
)
def test_no_array_of_all_pairs_in_the_jaxpr(kind):
    def largest(length):
        step, arguments = _step(kind, length)
        return _largest(jax.make_jaxpr(step)(*arguments).jaxpr)

    large = largest(8192)
    assert large <= 8 * largest(1024)  # All pairs would grow by 64.
    assert large < 8192 * 8192 // 4


@slow
@pytest.mark.parametrize("kind", ["unbounded", "t5", "fire", "whole", "shaw"])
def test_no_array_of_all_pairs_in_the_program(kind):
    compiled = {}
    for length in (2048, 4096):
        step, arguments = _step(kind, length)
        compiled[length] = jax.jit(step).lower(*arguments).compile()
    shapes = re.findall(r"(?:f32|pred|s32)\[([\d,]+)\]", compiled[4096].as_text())
    largest = max(math.prod(map(int, s.split(","))) for s in shapes)
    assert largest < 4096 * 4096 // 2
    small, large = (c.memory_analysis().temp_size_in_bytes for c in compiled.values())
    assert large <= 2.2 * small
