"""The schedule of the tiles: which are skipped, and which need rules or masks."""

import dataclasses
from typing import Any

import jax
import jax.numpy as jnp

from posenc_jax.engine.blocks import Blocks, Visibility

EMPTY, PLAIN, RULED, MASKED = 0, 1, 2, 3
"""Kinds of tiles: skipped; without rules or masks; with rules alone; with both."""

_KINDS = 4


def kinds(see: Visibility) -> tuple[int, ...]:
    """Returns the kinds of tiles that there may be, less `EMPTY`."""
    made = () if _ruled_everywhere(see) else (PLAIN,)
    ruled = see.has_terms or see.bias_everywhere or see.mask_in_bias
    made += (RULED,) if ruled else ()
    return (*made, MASKED) if see.ordered or see.segments else made


def _ruled_everywhere(see: Visibility) -> bool:
    return see.bias_everywhere or (see.has_terms and see.horizon is None)


def schedule(
    see: Visibility, q: Any, k: Any, blocks: Blocks, prefix: jax.Array | None, by_key: bool
) -> jax.Array:
    """Returns the schedule of a pass: int32 [B or 1, blocks of queries, blocks of keys].

    An entry holds the kind of the tile, and the block of keys to have in memory: its own or,
    for empty tiles, that of the last tile that is not, so that nothing is copied for them. With
    `by_key`, the last two axes are exchanged, and blocks are those of queries.
    """
    of_q = jax.tree.map(lambda x: x[:, :, None], see.summary(q, blocks.q))
    of_k = see.summary(k, blocks.k)

    def classify(**without):
        part: Any = dataclasses.replace(see, **without)
        found = jax.vmap(lambda x: part.classify(x, of_k, prefix), 1, 1)(of_q)
        return [jnp.swapaxes(x, 1, 2) for x in found] if by_key else found

    live, _ = classify()
    unordered: dict[str, Any] = {"is_causal": False, "window": None}
    plain = jnp.zeros_like(live)
    if not _ruled_everywhere(see):
        # Causality and the window count where they are part of the bias.
        _, plain = classify(segments=False, **({} if see.mask_in_bias else unordered))
    _, seen = classify(has_terms=False, **(unordered if see.mask_in_bias else {}))
    at = jnp.broadcast_to(jnp.arange(live.shape[2], dtype=jnp.int32), live.shape)
    last = jax.lax.cummax(jnp.where(live, at, -1), axis=2)
    first = jnp.argmax(live, 2).astype(jnp.int32)[..., None]
    block = jnp.where(last < 0, first, last)
    kind = jnp.where(seen, jnp.where(plain, PLAIN, RULED), MASKED)
    return _KINDS * block + jnp.where(live, kind, EMPTY).astype(jnp.int32)


def block_of(entry: Any) -> Any:
    """Returns the block that an entry of a schedule has in memory."""
    return jax.lax.div(entry, jnp.int32(_KINDS))


def kind_of(entry: Any) -> Any:
    """Returns the kind of the tile of an entry of a schedule."""
    return jax.lax.rem(entry, jnp.int32(_KINDS))
