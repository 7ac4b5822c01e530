"""Rows of tables: the product that TPUs use equals indexing, bit for bit."""

import chex
import jax
import jax.numpy as jnp
import numpy as np

from posenc_jax.ops.take import _by_index, _by_product, take_row


def test_product_equals_index():
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
        chex.assert_trees_all_equal(got, expected)


def test_only_tpus_use_the_product():
    def text(platform):
        arguments = jnp.ones((4, 2)), jnp.int32(1)
        return jax.jit(take_row).trace(*arguments).lower(lowering_platforms=(platform,)).as_text()

    assert "dot_general" in text("tpu")
    assert "dot_general" not in text("cpu")
