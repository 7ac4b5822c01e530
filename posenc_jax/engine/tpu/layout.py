"""How the kernels address blocks of arrays of tokens.

Heads come before tokens, [B, N, T, H]: XLA writes the products that make q, k and v, and
rotations of them, in that order. [B, T, N * H] would be a copy.
"""

import dataclasses
import math
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
from jax.experimental import pallas as pl
from jax.experimental.pallas import tpu as pltpu

from posenc_jax.engine.elements import Element
from posenc_jax.engine.tpu.strip import LANES

At = Callable[..., tuple[Any, Any, Any]]
"""Grid indices to batch row, head and block."""


def matrix_spec(x: Any, block: int, at: At) -> pl.BlockSpec:
    """Returns the blocks of tokens of an array [B, N, T, H]."""
    return pl.BlockSpec((None, None, block, x.shape[3]), lambda *ids: (*at(*ids), 0))


def row_spec(x: Any, block: int, at: At) -> pl.BlockSpec:
    """Returns the blocks of tokens of an array [B or 1, 1, T]."""

    def index(*ids):
        b, _, index = at(*ids)
        return (0 if x.shape[0] == 1 else b), 0, index

    return pl.BlockSpec((None, 1, block), index)


def number_spec(x: Any, block: int, at: At, group: int = 1) -> pl.BlockSpec:
    """Returns the blocks of tokens of an array [B, N, F, T], or [B, N / group, F, T]."""

    def index(*ids):
        b, head, index = at(*ids)
        return b, jax.lax.div(head, jnp.int32(group)), 0, index

    return pl.BlockSpec((None, None, x.shape[2], block), index)


def element_specs(
    elements: tuple[Element, ...], heads: int, queries: tuple[int, At], keys: tuple[int, At]
) -> tuple[Element, ...]:
    """Returns the blocks of the arrays of elements.

    Args:
      elements: the terms.
      heads: N.
      queries, keys: block size, and the block of the grid's indices, by query head.
    """

    def one(element):
        return dataclasses.replace(
            element,
            numbers=tuple(pl.BlockSpec(memory_space=pltpu.SMEM) for _ in element.numbers),
            q_numbers=tuple(number_spec(y, *queries) for y in element.q_numbers),
            k_numbers=tuple(
                number_spec(y, *keys, group=heads // y.shape[1]) for y in element.k_numbers
            ),
        )

    return tuple(map(one, elements))


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
