"""Kinds of tiles: skipped, plain, with rules, with rules and masks."""

import dataclasses
from typing import Any

import jax
import jax.numpy as jnp

from posenc_jax.engine.blocks import Blocks, Visibility

EMPTY, PLAIN, RULED, MASKED = 0, 1, 2, 3
"""Kinds of tiles: skipped; without rules or masks; with rules alone; with both."""


def kinds(see: Visibility) -> tuple[int, ...]:
    """Returns the kinds of tiles that may occur, without `EMPTY`."""
    has_rules = see.has_terms or see.bias_everywhere or see.mask_in_bias
    possible = {
        PLAIN: not _ruled_everywhere(see),
        RULED: has_rules,
        MASKED: see.ordered or see.segments,
    }
    return tuple(kind for kind, occurs in possible.items() if occurs)


def _ruled_everywhere(see: Visibility) -> bool:
    return see.bias_everywhere or (see.has_terms and see.horizon is None)


def tile_kinds(
    see: Visibility, q: Any, k: Any, prefix: jax.Array | None, blocks: Blocks
) -> jax.Array:
    """Returns the kinds of tiles, int32 [B or 1, blocks of queries, blocks of keys].

    Args:
      see: the masks.
      q, k: inputs of `Visibility.summary`, in whole blocks of tokens.
      prefix: int32 [B], or None.
      blocks: queries and keys per tile.
    """
    of_q = jax.tree.map(lambda x: x[:, :, None], see.summary(q, blocks.q))
    of_k = see.summary(k, blocks.k)

    def classify(**without):
        part: Any = dataclasses.replace(see, **without)
        return jax.vmap(lambda x: part.classify(x, of_k, prefix), 1, 1)(of_q)

    live, _ = classify()
    unordered: dict[str, Any] = {"is_causal": False, "window": None}
    plain = jnp.zeros_like(live)
    if not _ruled_everywhere(see):
        # Causality and the window count where they are part of the bias.
        _, plain = classify(segments=False, **({} if see.mask_in_bias else unordered))
    _, seen = classify(has_terms=False, **(unordered if see.mask_in_bias else {}))
    kind = jnp.where(seen, jnp.where(plain, PLAIN, RULED), MASKED)
    return jnp.where(live, kind, EMPTY).astype(jnp.int32)
