"""Rematerialisation and scan: names that policies can save, and tables outside of the loop."""

import re

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import linen as nn
from flax import nnx

import posenc_jax as pe
import posenc_jax.linen as pl
import posenc_jax.nnx as pn

D, N, H, T, LAYERS = 12, 2, 6, 5, 3
LAYER = {"head_dim": H, "is_causal": True, "position": pe.RoPE(H)}
X = np.random.default_rng(0).normal(size=(2, T, D)).astype(np.float32)
POLICIES = {
    "nothing": jax.checkpoint_policies.nothing_saveable,
    "projections": jax.checkpoint_policies.save_only_these_names(
        "query_proj", "key_proj", "value_proj"
    ),
}


def is_program(x):
    return hasattr(x, "eqns")


def primitives(program):
    """Names of the primitives of a program and of its inner programs."""
    for equation in program.eqns:
        yield equation.primitive.name
        for value in jax.tree.leaves(equation.params, is_leaf=is_program):
            if is_program(value):
                yield from primitives(value)


def count(f, name, *args):
    return list(primitives(jax.make_jaxpr(f)(*args))).count(name)


@pytest.mark.parametrize("flax", ["nnx", "linen"])
def test_policies_save_q_k_v_and_outputs_by_the_names_of_maxtext(flax):
    layer = pn.Attention(D, N, rngs=nnx.Rngs(0), **LAYER)
    graph, state = nnx.split(layer)
    params = {"params": nnx.to_pure_dict(state)}

    def loss(x, policy):
        if flax == "nnx":
            layer = nnx.merge(graph, state)
            return (nnx.remat(lambda x: layer(x), policy=policy)(x) ** 2).sum()
        run = nn.remat(pl.Attention, policy=policy)(N, **LAYER)
        return (run.apply(params, x) ** 2).sum()

    names = re.findall(r"name\[name=(\w+)\]", str(jax.make_jaxpr(lambda x: layer(x))(X)))
    assert names == ["query_proj", "key_proj", "value_proj", "context", "out_proj"]
    products = {
        name: count(jax.grad(lambda x, policy=policy: loss(x, policy)), "dot_general", X)
        for name, policy in POLICIES.items()
    }
    assert products["nothing"] - products["projections"] == 3  # q, k and v are not projected again.


def test_tables_are_computed_once_for_layers_under_scan_and_remat():
    @nnx.split_rngs(splits=LAYERS)
    @nnx.vmap(in_axes=(0,), out_axes=0)
    def make(rngs):
        return pn.Attention(D, N, rngs=rngs, **LAYER)

    graph, state = nnx.split(make(nnx.Rngs(0)))
    encoding = pn.PositionEncoding(pe.RoPE(H), rngs=nnx.Rngs(0))
    positions = jnp.arange(3, 3 + T)

    def loss(x, positions, shared):
        tables = encoding.tables(positions) if shared else None

        @jax.checkpoint
        def over(x, state):
            return x + nnx.merge(graph, state)(x, positions=positions, tables=tables), None

        return (jax.lax.scan(over, x, state)[0] ** 2).sum()

    def step(shared):
        return jax.grad(lambda x, positions: loss(x, positions, shared))

    exact = "shift_right_logical"  # Of the reduction of angles, which is in integers.
    once = count(encoding.tables, exact, positions)
    assert count(step(shared=True), exact, X, positions) == once > 0
    assert count(step(shared=False), exact, X, positions) > once
