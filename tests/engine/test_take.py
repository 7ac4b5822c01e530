"""Rows of tables: the product that TPUs use equals indexing, bit for bit."""

import chex
import jax
import jax.numpy as jnp

from posenc_jax.ops.take import _by_index, _by_product, take_row


def test_product_equals_index():
    table = jax.random.normal(jax.random.key(0), (33, 6))
    index = jnp.array([0, 32, 7, 7, 1], jnp.int32)

    def rows(take):
        def loss(table):
            taken = jax.vmap(take, (None, 0))(table, index)
            return jnp.sum(taken**2), taken

        return jax.grad(loss, has_aux=True)(table)

    chex.assert_trees_all_equal(rows(_by_product), rows(_by_index))
    chex.assert_trees_all_equal(rows(take_row), rows(_by_index))


def test_only_tpus_use_the_product():
    def text(platform):
        arguments = jnp.ones((4, 2)), jnp.int32(1)
        return jax.jit(take_row).trace(*arguments).lower(lowering_platforms=(platform,)).as_text()

    assert "dot_general" in text("tpu")
    assert "dot_general" not in text("cpu")
