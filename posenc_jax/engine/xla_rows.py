"""Attention where a rule needs whole rows of logits: its definition, some queries at a time.

A block of queries against all keys is computed as the reference computes it, and anew in
the backward pass, so memory grows with T + S and not with T x S. Gradients of what all
blocks share are summed over the blocks in one fixed order.
"""

import dataclasses
import math
from typing import Any

import jax
import jax.numpy as jnp

from posenc_jax.engine.problem import Problem
from posenc_jax.engine.reference import attend_slots, cleaned, expanded, in_order, of_keys
from posenc_jax.engine.tiling import pad_axis
from posenc_jax.mask import window_sides

BLOCK = 2**20
"""Logits per block: 4 MB, of which a backward pass holds several."""


def attend(p: Problem) -> tuple[jax.Array, jax.Array]:
    """Returns the output, [B, T, N, V] in q's dtype, and the log-sum-exp, float32 [B, T, N]."""
    p, k_slots = in_order(p)
    parts = []
    for (start, end), (low, high) in _groups(p):

        def of_group(x, axis, low=low, high=high):
            return jax.lax.slice_in_dim(x, low, high, axis=axis)

        keys = of_keys(p, of_group) if (low, high) != (0, p.k.shape[1]) else p
        slots = of_group(k_slots, k_slots.ndim - 1)
        parts.append(_by_blocks(expanded(keys), start, end, slots))
    out, lse = zip(*parts, strict=True)
    return jnp.concatenate(out, 1), jnp.concatenate(lse, 1)


def _groups(p: Problem) -> list[tuple[tuple[int, int], tuple[int, int]]]:
    """Ranges of queries, and of the keys that these may see by their slots."""
    length, keys = p.q.shape[1], p.k.shape[1]
    whole = (0, length), (0, keys)
    by_slot = p.contiguous and p.prefix_length is None and length == keys
    sides = window_sides(p.window)
    if not by_slot or not (p.is_causal or sides) or length < 1024:
        return [whole]
    left, right = sides or (-1, -1)
    right = 0 if p.is_causal else right
    step = math.ceil(length / 4)
    groups = []
    for start in range(0, length, step):
        end = min(start + step, length)
        low = 0 if left < 0 else max(0, start - left)
        groups.append(((start, end), (low, keys if right < 0 else min(keys, end + right))))
    return groups


def _by_blocks(p: Problem, start: int, end: int, k_slots: jax.Array) -> tuple[Any, Any]:
    """Attention of the queries from `start` to `end`, to all keys of the problem."""
    rule: Any = p.row_rule
    batch, _, heads, _ = p.q.shape
    length = end - start
    size = max(1, min(length, BLOCK // (batch * heads * p.k.shape[1])))
    count = math.ceil(length / size)
    by_query: dict[str, Any] = {"q": p.q, "q_positions": p.q_positions}
    by_query |= {"q_coordinates": p.q_coordinates, "q_segment_ids": p.q_segment_ids}
    by_query["contents"] = [c.q_features for c in p.contents]
    by_query["row_rule"] = rule.q_features
    by_query["mask"] = None if p.mask is None else jnp.swapaxes(p.mask, 1, 2)
    by_query["slots"] = jnp.arange(p.q.shape[1], dtype=jnp.int32)[None]

    def blocked(x):
        x = pad_axis(jax.lax.slice_in_dim(x, start, end, axis=1), 1, count * size, mode="edge")
        x = x.reshape(x.shape[0], count, size, *x.shape[2:])
        return jnp.moveaxis(x, 1, 0)

    @jax.checkpoint
    def block(p, mine):
        slots, mask, rows = mine.pop("slots"), mine.pop("mask"), mine.pop("row_rule")
        contents = zip(p.contents, mine.pop("contents"), strict=True)
        part = dataclasses.replace(
            p,
            contents=tuple(dataclasses.replace(c, q_features=r) for c, r in contents),
            row_rule=dataclasses.replace(rule, q_features=rows),
            mask=None if mask is None else jnp.swapaxes(mask, 1, 2),
            contiguous=False,
            **mine,
        )
        return attend_slots(cleaned(part), slots[0], k_slots)

    bare = dataclasses.replace(
        p,
        q=None,
        q_positions=None,
        q_coordinates=None,
        q_segment_ids=None,
        mask=None,
        contents=tuple(dataclasses.replace(c, q_features=None) for c in p.contents),
        row_rule=dataclasses.replace(rule, q_features=None),
    )
    parts = jax.lax.map(lambda mine: block(bare, dict(mine)), jax.tree.map(blocked, by_query))
    return jax.tree.map(lambda x: _joined(x, length), parts)


def _joined(x: jax.Array, length: int) -> jax.Array:
    """[count, B, size, ...] to [B, length, ...]."""
    x = jnp.moveaxis(x, 0, 1)
    return x.reshape(x.shape[0], -1, *x.shape[3:])[:, :length]
