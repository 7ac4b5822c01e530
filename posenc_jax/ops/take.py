"""Lookup of table rows."""

import jax
import jax.numpy as jnp


def take_row(table: jax.Array, index: jax.Array) -> jax.Array:
    """Returns `table[index]` of a table [R, F] and an int32 number, 0 <= index < R.

    On TPU it is a product with zeros and ones, which is exact: the gradient of indexing would be
    a scatter, which loops over all distances and takes microseconds for each.

    >>> take_row(jnp.arange(6.0).reshape(3, 2), jnp.int32(1))
    Array([2., 3.], dtype=float32)
    """
    return jax.lax.platform_dependent(table, index, tpu=_by_product, default=_by_index)


def _by_index(table, index):
    return table[index]


def _by_product(table, index):
    one_hot = jax.nn.one_hot(index, table.shape[0], dtype=table.dtype)
    return jnp.dot(one_hot, table, precision="highest")
