"""Positions of tokens, as data: for packed, padded and prefixed batches.

Every function returns int32 [B, T]. Positions say in which order tokens came; which of
them belong together, and which are padding, is said by `segment_ids`: equal numbers
attend to each other, a number below zero marks padding.
"""

import jax
import jax.numpy as jnp

from posenc_jax.checks import array_of_rank, integer_positions


def count_up(batch: int, length: int, start: jax.Array | int = 0) -> jax.Array:
    """Returns `start, start + 1, ...` for every row; `start` is a number or [B].

    >>> count_up(2, 3, start=jnp.array([0, 10]))
    Array([[ 0,  1,  2],
           [10, 11, 12]], dtype=int32)
    """
    start = jnp.broadcast_to(integer_positions("count_up", start, "start"), (batch,))
    return start[:, None] + jnp.arange(length, dtype=jnp.int32)[None]


def from_segment_ids(segment_ids: jax.Array) -> jax.Array:
    """Returns positions that restart at 0 wherever the segment changes (packed batches).

    Args:
      segment_ids: integers [B, T]; the tokens of a segment stand side by side.

    >>> from_segment_ids(jnp.array([[0, 0, 0, 1, 1, -1]]))
    Array([[0, 1, 2, 0, 1, 0]], dtype=int32)
    """
    array_of_rank("from_segment_ids", "segment_ids", segment_ids, 2, "[B, T]")
    index = jnp.arange(segment_ids.shape[1], dtype=jnp.int32)
    changed = segment_ids[:, 1:] != segment_ids[:, :-1]
    starts = jnp.pad(changed, ((0, 0), (1, 0)), constant_values=True)
    return index[None] - jax.lax.cummax(jnp.where(starts, index[None], 0), axis=1)


def from_padding_mask(mask: jax.Array) -> tuple[jax.Array, jax.Array]:
    """Returns `(positions, segment_ids)` for rows padded on the left or on the right.

    Args:
      mask: bool [B, T], true where there is a token. The first token of a row has
        position 0 wherever it stands; padding has segment -1.

    >>> from_padding_mask(jnp.array([[False, False, True, True]]))[0]
    Array([[0, 0, 0, 1]], dtype=int32)
    """
    array_of_rank("from_padding_mask", "mask", mask, 2, "[B, T]")
    mask = jnp.asarray(mask, bool)
    positions = jnp.maximum(jnp.cumsum(mask, axis=1, dtype=jnp.int32) - 1, 0)
    return positions, jnp.where(mask, 0, -1).astype(jnp.int32)
