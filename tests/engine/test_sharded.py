"""Batch and heads over devices, by sharding the arrays alone: the numbers of one device.

All rules are in one program per mesh, since compilation takes most of the time.
"""

import functools

import chex
import jax
import numpy as np
import pytest
from jax.sharding import AxisType, NamedSharding, PartitionSpec

import posenc_jax as pe
from posenc_jax.engine.blocks import Blocks
from posenc_jax.engine.xla import XLA
from tests.engine.rules import KINDS
from tests.support import slow

B, T, N, K, H = 2, 24, 8, 2, 8
TILES = XLA(Blocks(16, 8), Blocks(8, 16))
RULES = ("t5", "fire", "fox", "shaw")
MESHES = {
    "data": ((2,), ("data",)),
    "data and heads": ((2, 2), ("data", "heads")),
    "more devices than key heads": ((8,), ("heads",)),
}


def make_arrays():
    random = np.random.default_rng(0)
    q, k, v = (random.normal(size=(B, T, n, H)).astype(np.float32) for n in (N, K, K))
    params = {rule: KINDS[rule].make(random, N, H) for rule in RULES}
    return {rule: (q, k, v, jax.device_get(params[rule])) for rule in RULES}


@functools.partial(jax.jit, static_argnums=1)
def outcome(arrays, implementation):
    """Outputs, and gradients of q, k, v and every leaf, by rule."""
    weights = np.random.default_rng(1).normal(size=(B, T, N, H)).astype(np.float32)

    def loss(arrays):
        options, outs = {"is_causal": True, "implementation": implementation}, {}
        for rule, (q, k, v, params) in arrays.items():
            rules = KINDS[rule].rules(params, q, k)
            outs[rule] = pe.attention(q, k, v, rules=rules, **options)
        return sum((out * weights).sum() for out in outs.values()), outs

    return jax.grad(loss, has_aux=True)(arrays)


@functools.cache
def unsharded():
    return jax.device_get(outcome(make_arrays(), "reference"))


def spread(arrays, mesh):
    """Puts arrays on a mesh: key heads where they divide, parameters whole on every device."""

    def put(x, *axes):
        sizes = dict(zip(mesh.axis_names, mesh.devices.shape, strict=True))
        names = ("data", None, "heads", None)[: len(axes)]
        fits = (
            n if size % sizes.get(n, size + 1) == 0 else None
            for n, size in zip(names, axes, strict=True)
        )
        return jax.device_put(x, NamedSharding(mesh, PartitionSpec(*fits)))

    return {
        rule: (*(put(x, *x.shape) for x in qkv), jax.tree.map(put, params))
        for rule, (*qkv, params) in arrays.items()
    }


AUTO, EXPLICIT = AxisType.Auto, AxisType.Explicit
# Without their mesh around, explicit arrays have the other rules.
CASES = [("more devices than key heads", TILES, AUTO, ("fox",))]
CASES += [pytest.param("data and heads", TILES, AUTO, ("shaw",), marks=slow)]
CASES += [pytest.param("data and heads", TILES, EXPLICIT, ("fire",), marks=slow)]
MORE_CASES = [(mesh, TILES, kind) for mesh in MESHES for kind in (AUTO, EXPLICIT)]
MORE_CASES += [("data and heads", "reference", kind) for kind in (AUTO, EXPLICIT)]
CASES += [pytest.param(*case, RULES, marks=slow) for case in MORE_CASES]


@pytest.mark.parametrize(("mesh", "implementation", "kind", "rules"), CASES)
def test_outputs_and_all_gradients_are_those_of_one_device(mesh, implementation, kind, rules):
    shape, names = MESHES[mesh]
    mesh = jax.make_mesh(shape, names, axis_types=(kind,) * len(names))
    with jax.set_mesh(mesh):
        arrays = spread({rule: make_arrays()[rule] for rule in rules}, mesh)
        program = outcome.lower(arrays, implementation).compile()
        got = program(arrays)
    assert_those_of_one_device(got, names)
    if (names, implementation, kind) == (("data", "heads"), TILES, AUTO):
        assert_nothing_but_sums_is_sent(program.as_text())


@slow
def test_explicit_arrays_are_enough_without_their_mesh_around():
    shape, names = MESHES["data and heads"]
    mesh = jax.make_mesh(shape, names, axis_types=(EXPLICIT,) * 2)
    arrays = spread({rule: make_arrays()[rule] for rule in ("t5",)}, mesh)
    assert_those_of_one_device(outcome(arrays, TILES), names)


def assert_those_of_one_device(got, names):
    for out in got[1].values():
        assert [n for n in out.sharding.spec if n] == list(names)
    expected = unsharded()
    for rule in got[1]:
        mine, alone = (jax.device_get((x[0][rule], x[1][rule])) for x in (got, expected))
        chex.assert_trees_all_close(mine, alone, atol=5e-5, rtol=1e-4)
        assert all(np.any(leaf != 0) for leaf in jax.tree.leaves(alone))


def assert_nothing_but_sums_is_sent(text):
    """Of heads on their devices: key heads divide by the devices."""
    assert "all-reduce" in text
    for collective in ("all-gather", "all-to-all", "collective-permute"):
        assert f" {collective}" not in text
