"""Lowering: from the rules of a problem to simple ones, a bias per distance, and one mask plan.

Any backend starts here. A constant that is added to all logits of a query cancels in the softmax
and may be dropped, so that tiles beyond the horizon of every rule need no rule at all. The
log-sum-exp gets the dropped constants back as `lse_shift`.
"""

import dataclasses
import functools
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp

from posenc_jax.engine.blocks import Visibility
from posenc_jax.engine.mask import MASK_VALUE, add_saturated
from posenc_jax.engine.problem import Problem, repeat_heads
from posenc_jax.engine.rule import Rule
from posenc_jax.engine.simplified import AllPairs, Context, Simplified
from posenc_jax.engine.tables import ValueTable
from posenc_jax.engine.toeplitz import diagonal_sums
from posenc_jax.positions.packing import changes, since


@dataclasses.dataclass(frozen=True)
class Lowered:
    """The rules of a problem, as a backend evaluates them.

    Attributes:
      bias: `bias(first, stop) -> float32 [N or 1, L]`, the sum of rules by distance minus its
        constant, with the mask value at hidden distances if `visibility.mask_in_bias`. None: no
        rule goes by distance alone.
      terms: one per rule that is neither in `bias` nor in `pairs` or `values`.
      pairs: arrays of all pairs.
      values: a table on the values, or None.
      v: the values, with the constant of the table added, [B, S, K or N, V].
      visibility: the masks, and which tiles need rules.
      lse_shift: dropped constants, [1 or B, 1 or T, N or 1], or None.
    """

    bias: Callable[[int, int], jax.Array] | None
    terms: tuple[Simplified, ...]
    pairs: tuple[AllPairs, ...]
    values: ValueTable | None
    v: jax.Array
    visibility: Visibility
    lse_shift: jax.Array | None


def lower(p: Problem, *, max_table: int) -> Lowered:
    """Lowers the rules of a problem; rules on whole rows are left to the caller.

    Args:
      p: the problem.
      max_table: as in a `Context`.
    """
    context = Context(
        length=p.length,
        keys=p.keys,
        contiguous=p.contiguous,
        is_causal=p.is_causal and p.prefix_length is None,
        axes=p.q_coordinates.shape[2] if p.q_coordinates.ndim == 3 else 0,
        integer=p.q_coordinates.dtype == p.k_coordinates.dtype == jnp.int32,
        scale=p.scale,
        drop_constants=p.softcap is None,
        max_table=max_table,
        seen=functools.partial(_seen_distances, p),
    )
    rules = [rule for rule in p.rules if not rule.whole_rows]
    parts = _simplified(rules, context)
    terms = [x.term for x in parts if x.term is not None]
    pairs = tuple(x.pairs for x in parts if x.pairs is not None)
    by_distance = [x for x in parts if x.by_distance is not None]
    values, v = _lower_values(p, parts)

    # Rules by distance         none   constant dropped   constant kept
    # added by interior tiles   no     no                 yes: bias_everywhere
    # raises the horizon        no     yes                no
    horizons: list[int | None] = [*(x.horizon for x in terms), *(None for _ in pairs)]
    highs = [x.high for x in by_distance]
    drop = p.softcap is None and None not in horizons + highs
    if values is not None:
        horizons.append(values.horizon)
    if drop:
        horizons += highs
    known_horizons = [x for x in horizons if x is not None]

    # Causality and the window join the bias only where nothing else hides keys. A mask value does
    # not hide NaN, which hidden entries of an array of all pairs may be, and numbers of a function
    # of pairs.
    mask_in_bias = (
        bool(by_distance)
        and all(rule.pairs is None for rule in rules)
        and not any(x.rule.any_value for x in terms)
        and p.softcap is None
        and p.prefix_length is None
        and p.k_visible_until is None
        and p.mask is None
        and p.block_mask is None
        and (p.is_causal or p.window is not None)
    )
    bias = constant = None
    if by_distance:
        bias, constant = _sum_by_distance(p, by_distance, drop, mask_in_bias)
    dropped = [x for x in (*(x.dropped for x in parts), constant) if x is not None]
    return Lowered(
        bias=bias,
        terms=tuple(x for x in parts if x.term is not None),
        pairs=pairs,
        values=values,
        v=v,
        visibility=Visibility(
            is_causal=p.is_causal,
            window=p.window,
            window_by_coordinates=p.window_by_coordinates,
            mask_in_bias=mask_in_bias,
            bias_everywhere=bool(by_distance) and not drop,
            segments=p.q_segment_ids is not None,
            prefix=p.prefix_length is not None,
            mask=p.mask is not None,
            until=p.k_visible_until is not None,
            block_mask=p.block_mask is not None,
            has_terms=bool(horizons),
            horizon=None if None in horizons else max(known_horizons, default=None),
            by_slot=p.contiguous,
        ),
        lse_shift=sum(dropped[1:], dropped[0]) if dropped else None,
    )


def _seen_distances(p: Problem, distances: jax.Array) -> jax.Array:
    """Returns distances between slots; where all keys of a distance are hidden, another distance.

    Rules may be NaN at hidden distances. Earlier queries see keys below `prefix_length` too. Where
    all are hidden, the other distance is 0.
    """
    low: Any = 1 - p.keys
    high: Any = p.length - 1
    left_side, right_side = p.window or (-1, -1)
    right_side = 0 if p.is_causal else right_side
    if right_side >= 0:
        low = max(low, -right_side)
    if p.prefix_length is not None:
        low = jnp.minimum(low, jnp.min(p.q_positions) + 1 - jnp.max(p.prefix_length))
    elif left_side >= 0:
        high = min(high, left_side)
    if p.q_segment_ids is not None:
        inside = since(changes(p.q_segment_ids))
        longest = jnp.max(jnp.where(p.q_segment_ids < 0, 0, inside))
        low, high = jnp.maximum(low, -longest), jnp.minimum(high, longest)
    if p.k_visible_until is not None:
        high = jnp.minimum(high, jnp.max(_last_distances(p)))
    distances = jnp.where(low <= high, jnp.clip(distances, low, high), 0)
    if p.mask is None and p.block_mask is None:
        return distances
    every = jnp.arange(1 - p.keys, p.length, dtype=jnp.int32)
    seen = (every >= low) & (every <= high)
    if p.mask is not None:
        seen &= diagonal_sums(jnp.any(p.mask, (0, 1)).astype(jnp.float32))[::-1] > 0
    if p.block_mask is not None:
        seen &= p.block_mask.distances
    another = jnp.where(jnp.any(seen), every[jnp.argmax(seen)], 0)
    return jnp.where(seen[distances - every[0]], distances, another)


def _last_distances(p: Problem) -> jax.Array:
    """Returns the greatest distance at which `k_visible_until` shows each key, int32 [B, S]."""
    first = jnp.zeros((1, p.keys), bool).at[:, 0].set(True)
    starts = first if p.k_segment_ids is None else changes(p.k_segment_ids[:, ::-1])
    to_the_end = since(starts)[:, ::-1]  # Of the segment.
    limits = (add_saturated(p.k_positions, count) for count in (-p.keys, p.keys))
    last = jnp.clip(p.k_visible_until, *limits) - 1 - p.k_positions
    last = jnp.minimum(last, to_the_end)
    return last if p.k_segment_ids is None else jnp.where(p.k_segment_ids < 0, -p.keys, last)


def _simplified(rules: list[Rule], context: Context) -> list[Simplified]:
    """Simplifies rules; constants are dropped only where every term has a horizon."""
    parts = [rule.simplify(context) for rule in rules]
    if any(x.pairs is not None or (x.term and x.term.horizon is None) for x in parts):
        context = dataclasses.replace(context, drop_constants=False)
        parts = [rule.simplify(context) for rule in rules]
    pairs = zip(rules, parts, strict=True)
    return [x._replace(q_features=r.q_features, k_features=r.k_features) for r, x in pairs]


def _lower_values(p: Problem, parts: list[Simplified]) -> tuple[ValueTable | None, jax.Array]:
    """Returns the table on the values, and the values with its constant added."""
    # At most one rule adds to the values: `attention` refuses more.
    part = next((x for x in parts if x.values is not None), None)
    if part is None or part.far_value is None:
        return part and part.values, p.v
    v = repeat_heads(p.v, p.num_heads).astype(jnp.float32) + part.far_value[None, None]
    return part.values, v.astype(p.v.dtype)


def _sum_by_distance(
    p: Problem, by_distance: list[Any], drop: bool, mask_in_bias: bool
) -> tuple[Callable[[int, int], jax.Array], jax.Array | None]:
    """Returns the bias of distances, and the constant dropped from it, [1, 1, N or 1]."""

    def total(first, stop):
        parts = [x.by_distance(first, stop) for x in by_distance]
        return sum(parts[1:], parts[0])

    constant = total(p.length - 1, p.length) if drop else None

    def bias(first, stop):
        out = total(first, stop)
        if constant is not None:
            out -= constant
        distances = jnp.arange(first, stop, dtype=jnp.int32)
        return masked_by_order(p, distances, out) if mask_in_bias else out

    return bias, None if constant is None else constant[:, 0][None, None]


def masked_by_order(p: Problem, distances: jax.Array, bias: jax.Array) -> jax.Array:
    """Returns a bias [N or 1, L] with the mask value at distances that are not visible."""
    left_side, right_side = p.window or (-1, -1)
    right_side = 0 if p.is_causal else right_side
    seen = (distances <= left_side) | (left_side < 0)
    seen &= (-distances <= right_side) | (right_side < 0)
    return jnp.where(seen[None], bias, MASK_VALUE)
