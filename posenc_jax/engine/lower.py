"""Lowering: from the rules of a problem to terms, a bias per distance, and one mask plan.

Any backend starts here. Constants that are the same for all logits of a query cancel in the
softmax, so they may be dropped: tiles beyond the horizon of every rule then need no rule at
all. `lse_shift` is what was dropped; the log-sum-exp gets it back.
"""

import dataclasses
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp

from posenc_jax.engine.blocks import Visibility
from posenc_jax.engine.mask import MASK_VALUE
from posenc_jax.engine.problem import Problem, repeat_heads
from posenc_jax.engine.terms import Layout, Lowering, Term, ValueTable


@dataclasses.dataclass(frozen=True)
class Lowered:
    """The rules of a problem, as a backend evaluates them.

    Attributes:
      bias: `bias(first, stop) -> float32 [N or 1, L]`, added at every distance, less its
        constant; with `visibility.mask_in_bias`, distances that causality or the window hides
        have the mask value. None: nothing is added by distance alone.
      terms: evaluated on tiles; `features` and `strips` have an entry for each.
      q_features, k_features: pytrees [B, T, N, ...] and [B, S, K or N, ...].
      strips: `strip(first, stop) -> float32 [1 or N, L, F]`, or None.
      values: a table on the values, or None.
      v: the values, with the constant of the table added, [B, S, K or N, V].
      visibility: which tiles need what.
      lse_shift: dropped constants, [1 or B, 1 or T, N or 1], or None.
    """

    bias: Callable[[int, int], jax.Array] | None
    terms: tuple[Term, ...]
    q_features: tuple[Any, ...]
    k_features: tuple[Any, ...]
    strips: tuple[Callable[[int, int], jax.Array] | None, ...]
    values: ValueTable | None
    v: jax.Array
    visibility: Visibility
    lse_shift: jax.Array | None


def lower(p: Problem, max_table: int, pairs_at_once: int) -> Lowered:
    """Lowers the rules of a problem; rules on whole rows are left to the caller.

    Args:
      p: the problem.
      max_table: distances of the largest tile.
      pairs_at_once: pairs of a rule that are differentiated at once.
    """
    layout = Layout(
        length=p.length,
        keys=p.keys,
        contiguous=p.contiguous,
        is_causal=p.is_causal and p.prefix_length is None,
        axes=p.q_coordinates.shape[2] if p.q_coordinates.ndim == 3 else 0,
        integer=p.q_coordinates.dtype == p.k_coordinates.dtype == jnp.int32,
        scale=p.scale,
        drop_constants=p.softcap is None,
        max_table=max_table,
        pairs_at_once=pairs_at_once,
    )
    rules = [rule for rule in p.rules if not rule.whole_rows]
    lowered = _lower_rules(rules, layout)
    terms: list[tuple[Any, Any]] = [
        (rule, x) for rule, x in zip(rules, lowered, strict=True) if x.term is not None
    ]
    by_distance = [x for x in lowered if x.by_distance is not None]
    values, v = _lower_values(p, lowered)
    horizons: list[Any] = [x.term.horizon for _, x in terms]
    highs = [x.high for x in by_distance]
    drop = p.softcap is None and None not in horizons + highs
    if values is not None:
        horizons.append(values.horizon)
    if drop:
        horizons += highs
    # A mask joins in only where nothing else decides which keys a query sees.
    mask_in_bias = (
        bool(by_distance)
        and p.softcap is None
        and p.prefix_length is None
        and p.mask is None
        and (p.is_causal or p.window is not None)
    )
    bias = constant = None
    if by_distance:
        bias, constant = _sum_by_distance(p, by_distance, drop, mask_in_bias)
    dropped = [x for x in (*(x.dropped for _, x in terms), constant) if x is not None]
    return Lowered(
        bias=bias,
        terms=tuple(x.term for _, x in terms),
        q_features=tuple(rule.q_features for rule, _ in terms),
        k_features=tuple(rule.k_features for rule, _ in terms),
        strips=tuple(x.strip for _, x in terms),
        values=values,
        v=v,
        visibility=Visibility(
            is_causal=p.is_causal,
            window=p.window,
            mask_in_bias=mask_in_bias,
            bias_everywhere=bool(by_distance) and not drop,
            segments=p.q_segment_ids is not None,
            prefix=p.prefix_length is not None,
            mask=p.mask is not None,
            has_terms=bool(horizons),
            horizon=None if None in horizons else max(horizons, default=None),
            by_slot=p.contiguous,
        ),
        lse_shift=sum(dropped[1:], dropped[0]) if dropped else None,
    )


def _lower_rules(rules: list, layout: Layout) -> list[Lowering]:
    """Lowers rules; constants are dropped only where every term has a horizon."""
    lowered = [rule.lower(layout) for rule in rules]
    if any(x.term is not None and x.term.horizon is None for x in lowered):
        layout = dataclasses.replace(layout, drop_constants=False)
        lowered = [rule.lower(layout) for rule in rules]
    return lowered


def _lower_values(p: Problem, lowered: list[Lowering]) -> tuple[ValueTable | None, jax.Array]:
    """Returns the table on the values, and the values with its constant added."""
    found = [x for x in lowered if x.values is not None]
    if not found:
        return None, p.v
    (one,) = found
    if one.far_value is None:
        return one.values, p.v
    v = repeat_heads(p.v, p.num_heads).astype(jnp.float32) + one.far_value[None, None]
    return one.values, v.astype(p.v.dtype)


def _sum_by_distance(
    p: Problem, lowered: list[Any], drop: bool, mask_in_bias: bool
) -> tuple[Callable[[int, int], jax.Array], jax.Array | None]:
    """Returns the bias of distances, and the constant dropped from it, [1, 1, N or 1]."""

    def total(first, stop):
        parts = [x.by_distance(first, stop) for x in lowered]
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
    left, right = p.window or (-1, -1)
    right = 0 if p.is_causal else right
    seen = (distances <= left) | (left < 0)
    seen &= (-distances <= right) | (right < 0)
    return jnp.where(seen[None], bias, MASK_VALUE)
