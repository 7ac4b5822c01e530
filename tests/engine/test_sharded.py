"""Batch and heads over devices, by sharding the arrays alone: the numbers of one device.

All rules are in one program per mesh, since compilation takes most of the time.
"""

import contextlib
import functools
import re

import chex
import jax
import numpy as np
import pytest
from jax.sharding import AxisType

import posenc_jax as pe
from posenc_jax.engine.blocks import Blocks
from posenc_jax.engine.xla import XLA
from tests.engine.rules import KINDS
from tests.kernels.kernel_cases import on_mesh
from tests.support import slow

B, T, N, K, H = 2, 24, 8, 2, 8
TILES = XLA(Blocks(16, 8), Blocks(8, 16))
RULES = ("t5", "fire", "fox", "shaw")
TWO_AXES, HEADS = ((2, 2), ("data", "heads")), ((8,), ("heads",))


def make_arrays(rules=RULES):
    random = np.random.default_rng(0)
    q, k, v = (random.normal(size=(B, T, n, H)).astype(np.float32) for n in (N, K, K))
    params = {rule: jax.device_get(KINDS[rule].make(random, N, H)) for rule in RULES}
    return {rule: {"q": q, "k": k, "v": v, "params": params[rule]} for rule in rules}


@functools.partial(jax.jit, static_argnums=1)
def outcome(arrays, implementation):
    """Outputs, and gradients of q, k, v and every leaf, by rule."""
    weights = np.random.default_rng(1).normal(size=(B, T, N, H)).astype(np.float32)

    def loss(arrays):
        options, outs = {"is_causal": True, "implementation": implementation}, {}
        for rule, x in arrays.items():
            rules = KINDS[rule].rules(x["params"], x["q"], x["k"])
            outs[rule] = pe.attention(x["q"], x["k"], x["v"], rules=rules, **options)
        return sum((out * weights).sum() for out in outs.values()), outs

    return jax.grad(loss, has_aux=True)(arrays)


@functools.cache
def unsharded():
    return jax.device_get(outcome(make_arrays(), "reference"))


AUTO, EXPLICIT = AxisType.Auto, AxisType.Explicit
CASES = [(HEADS, TILES, AUTO, ("fox",))]  # More devices than key heads.
CASES += [pytest.param(TWO_AXES, TILES, None, ("t5",), marks=slow)]
CASES += [
    pytest.param(*case, RULES, marks=slow)
    for case in [
        (TWO_AXES, TILES, AUTO),
        (TWO_AXES, TILES, EXPLICIT),
        (HEADS, TILES, EXPLICIT),
        (TWO_AXES, "reference", AUTO),
        (TWO_AXES, "reference", EXPLICIT),
    ]
]


@pytest.mark.parametrize(("mesh", "implementation", "kind", "rules"), CASES)
def test_outputs_and_all_gradients_are_those_of_one_device(mesh, implementation, kind, rules):
    """None: explicit arrays are enough without their mesh around."""
    shape, names = mesh
    mesh = jax.make_mesh(shape, names, axis_types=(kind or EXPLICIT,) * len(names))
    axes = names if len(names) == 2 else (None, *names)
    with contextlib.nullcontext() if kind is None else jax.set_mesh(mesh):
        arrays = {rule: on_mesh(mesh, x, *axes) for rule, x in make_arrays(rules).items()}
        program = outcome.lower(arrays, implementation).compile()
        got = program(arrays)
    for out in got[1].values():
        assert [n for n in out.sharding.spec if n] == list(names)
    expected = unsharded()
    for rule in rules:
        mine, alone = (jax.device_get((x[0][rule], x[1][rule])) for x in (got, expected))
        chex.assert_trees_all_close(mine, alone, atol=5e-5, rtol=1e-4)
        assert all(np.any(leaf != 0) for leaf in jax.tree.leaves(alone))
    if (names, implementation, kind) == (("data", "heads"), TILES, AUTO):
        # Nothing but sums: key heads divide by the devices.
        text = program.as_text()
        assert "all-reduce" in text
        assert not re.search(" all-gather| all-to-all| collective-permute", text)
