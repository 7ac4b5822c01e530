"""The layout of arrays of tokens, and how the kernels address their blocks."""

import math
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
from jax.experimental import pallas as pl

from posenc_jax.engine.tpu.strip import LANES

At = Callable[..., tuple[Any, Any, Any]]
"""Grid indices to batch row, head and block."""


def matrix_spec(x: Any, block: int, dim: int, at: At) -> pl.BlockSpec:
    """Returns the blocks of tokens of an array in the layout of `to_layout`."""
    if x.ndim == 3:

        def packed(*ids):
            b, head, index = at(*ids)
            return b, index, head

        return pl.BlockSpec((None, block, dim), packed)
    return pl.BlockSpec((None, None, block, dim), lambda *ids: (*at(*ids), 0))


def row_spec(x: Any, block: int, at: At) -> pl.BlockSpec:
    """Returns the blocks of tokens of an array [B or 1, 1, T]."""

    def index(*ids):
        b, _, index = at(*ids)
        return (0 if x.shape[0] == 1 else b), 0, index

    return pl.BlockSpec((None, 1, block), index)


def number_spec(x: Any, block: int, at: At, group: int = 1) -> pl.BlockSpec:
    """Returns the blocks of tokens of an array [B, N, 1, T], or [B, N / group, 1, T]."""

    def index(*ids):
        b, head, index = at(*ids)
        return b, jax.lax.div(head, jnp.int32(group)), 0, index

    return pl.BlockSpec((None, None, 1, block), index)


def to_layout(x: jax.Array) -> jax.Array:
    """[B, T, N, H] to [B, T, N * H] where heads are whole lanes, so that nothing moves.

    Else to [B, N, T, H].
    """
    if x.shape[3] % LANES == 0:
        return x.reshape(*x.shape[:2], -1)
    return jnp.swapaxes(x, 1, 2)


def from_layout(x: jax.Array, heads: int) -> jax.Array:
    """The inverse of `to_layout`."""
    if x.ndim == 3:
        return x.reshape(*x.shape[:2], heads, -1)
    return jnp.swapaxes(x, 1, 2)


def check_memory(what: str, limit: int, scratch: Any, arrays: Any, specs: Any) -> None:
    """Raises `NotImplementedError` if a kernel needs more VMEM than `limit` bytes.

    Args:
      what: the pass and its sizes, for the message.
      limit: bytes.
      scratch: pytree of what the kernel keeps.
      arrays, specs: pytrees of arrays and of their blocks, of which two are in memory at a time.
    """

    def size(shape, dtype):
        *outer, rows, columns = (1, *(n for n in shape if n is not None))
        padded = -(-rows // 8) * 8 * -(-columns // LANES) * LANES
        return math.prod(outer) * padded * jnp.dtype(dtype).itemsize

    def block(spec, x):
        return 0 if spec.block_shape is None else 2 * size(spec.block_shape, x.dtype)

    sizes = jax.tree.leaves(jax.tree.map(block, specs, arrays))
    sizes += [size(x.shape, x.dtype) for x in jax.tree.leaves(scratch)]
    if sum(sizes) > limit:
        raise NotImplementedError(
            f'attention: implementation="pallas": {what} needs {sum(sizes) >> 20} MiB of VMEM '
            f"and may use {limit >> 20}; shard the sequence (posenc_jax.sharding), or use "
            'implementation="xla".'
        )
