"""Batch and heads over devices, by sharding the arrays alone: the numbers of one device.

All rules are in one program per mesh, since compilation takes most of the time.
"""

import functools

import chex
import jax
import numpy as np
import pytest
from engine.rules import KINDS
from jax.sharding import AxisType, NamedSharding, PartitionSpec

import posenc_jax as pe
from posenc_jax.engine.blocks import Blocks
from posenc_jax.engine.xla import XLA

B, T, N, K, H = 2, 24, 8, 2, 8
TILES = XLA(Blocks(16, 8), Blocks(8, 16))
RULES = ("t5", "fire", "fox", "shaw")
MESHES = {
    "data": ((2,), ("data",)),
    "data and heads": ((2, 2), ("data", "heads")),
    "more devices than key heads": ((8,), ("heads",)),
}


def make_arrays():
    keys = jax.random.split(jax.random.key(0), 3)
    shapes = (B, T, N, H), (B, T, K, H), (B, T, K, H)
    q, k, v = (jax.random.normal(key, s) for key, s in zip(keys, shapes, strict=True))
    params = {rule: KINDS[rule].make(jax.random.key(1), N, H) for rule in RULES}
    return {rule: (q, k, v, params[rule]) for rule in RULES}


@functools.partial(jax.jit, static_argnums=1)
def outcome(arrays, implementation):
    """Outputs, and gradients of q, k, v and every leaf, by rule."""
    weights = jax.random.normal(jax.random.key(2), (B, T, N, H))

    def loss(arrays):
        outs = {
            rule: pe.attention(
                q,
                k,
                v,
                rules=KINDS[rule].rules(params, q, k),
                is_causal=True,
                implementation=implementation,
            )
            for rule, (q, k, v, params) in arrays.items()
        }
        return sum((out * weights).sum() for out in outs.values()), outs

    return jax.grad(loss, has_aux=True)(arrays)


@functools.cache
def unsharded(implementation):
    return jax.device_get(outcome(make_arrays(), implementation))


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


CASES = [(mesh, TILES) for mesh in MESHES] + [("data and heads", "reference")]


@pytest.mark.parametrize("kind", [AxisType.Auto, AxisType.Explicit], ids=["auto", "explicit"])
@pytest.mark.parametrize(("mesh", "implementation"), CASES)
def test_outputs_and_all_gradients_are_those_of_one_device(mesh, implementation, kind):
    shape, names = MESHES[mesh]
    mesh = jax.make_mesh(shape, names, axis_types=(kind,) * len(names))
    with jax.set_mesh(mesh):
        got = outcome(spread(make_arrays(), mesh), implementation)
    assert_those_of_one_device(got, names, implementation)


def test_explicit_arrays_are_enough_without_their_mesh_around():
    shape, names = MESHES["data and heads"]
    mesh = jax.make_mesh(shape, names, axis_types=(AxisType.Explicit,) * 2)
    assert_those_of_one_device(outcome(spread(make_arrays(), mesh), TILES), names, TILES)


def assert_those_of_one_device(got, names, implementation):
    for out in got[1].values():
        assert [n for n in out.sharding.spec if n] == list(names)
    expected = unsharded(implementation)
    for rule in RULES:
        mine, alone = (jax.device_get((x[0][rule], x[1][rule])) for x in (got, expected))
        chex.assert_trees_all_close(mine, alone, atol=5e-5, rtol=1e-4)
        assert all(np.any(leaf != 0) for leaf in jax.tree.leaves(alone))


def test_heads_on_their_devices_send_nothing_but_sums():
    mesh = jax.make_mesh((2, 2), ("data", "heads"), axis_types=(AxisType.Auto,) * 2)
    with jax.set_mesh(mesh):
        arrays = spread(make_arrays(), mesh)
        text = outcome.lower(arrays, "xla").compile().as_text()
    assert "all-reduce" in text
    for collective in ("all-gather", "all-to-all", "collective-permute"):
        assert f" {collective}" not in text
