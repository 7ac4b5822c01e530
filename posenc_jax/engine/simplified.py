"""Simplified rules, the results of `Rule.simplify`, and the facts of a problem that it needs."""

import dataclasses
from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp

from posenc_jax.engine.tables import DistanceRange, ValueTable
from posenc_jax.engine.tokens import STATIC


@dataclasses.dataclass(frozen=True)
class Context:
    """The properties of a problem that a rule needs to simplify itself.

    Attributes:
      length, keys: T and S.
      contiguous: coordinates grow by one per slot inside a segment.
      is_causal: no key after a query is visible.
      axes: number of coordinate axes; 0 for coordinates [B, T].
      integer: whether coordinates are int32.
      scale: the logit scale.
      drop_constants: whether terms may drop a constant per query from all its logits.
      max_table: distances of the largest tile. Each tile reads its part of a strip in place of a
        table with more distances; 0: no rule has a table where there can be a strip.
      seen: a function of int32 distances between slots; those at which all keys are hidden become
        one at which some is seen.
    """

    length: int
    keys: int
    contiguous: bool
    is_causal: bool
    axes: int
    integer: bool
    scale: float
    drop_constants: bool
    max_table: int
    seen: Callable[[jax.Array], jax.Array]

    @property
    def dtype(self) -> Any:
        """The dtype of coordinates."""
        return jnp.int32 if self.integer else jnp.float32

    @property
    def token(self) -> jax.ShapeDtypeStruct:
        """The type of the coordinates of a token."""
        return jax.ShapeDtypeStruct((self.axes,) if self.axes else (), self.dtype)

    def horizon(self, high: int | None, by_slot: bool) -> int | None:
        """Returns the distance from which on a rule with this upper bound is constant."""
        if high is None or self.axes:
            return None
        return min(high, self.length - 1) if by_slot else high

    def table_range(
        self, bounds: tuple[int | None, int | None], *, by_slot: bool, drop_high: bool
    ) -> DistanceRange | None:
        """Returns the distances to tabulate, or None where there are infinitely many.

        Args:
          bounds: of the rule.
          by_slot: whether distances are between slots.
          drop_high: whether the value beyond the upper end is dropped.
        """
        if self.axes or not self.integer:
            return None
        low, high = bounds[0], self.horizon(bounds[1], by_slot)
        past_only = by_slot and self.is_causal
        if by_slot and low is not None:
            low = max(low, 1 - self.keys)
        if past_only:
            low = 0 if low is None else max(low, 0)
        if low is None or high is None:
            return None
        open_low = not past_only or low > 0
        return DistanceRange(low, max(high, low), by_slot, open_low, not drop_high)


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True, kw_only=True)
class Term:
    """A rule that is evaluated on tiles, times a factor.

    Attributes:
      rule: a `Rule` with arrays by head and without features; its `tile` is called for each head.
      interior: the `Rule` of tiles beyond the horizon; None adds nothing there.
      factor: a factor on both.
      horizon: int or None; tiles with every q - k at or beyond it are interior. None: no such
        distance.
      careful: whether it may be NaN or infinite at hidden pairs, which are then not evaluated.
    """

    rule: Any
    interior: Any = None
    factor: float = dataclasses.field(default=1.0, metadata=STATIC)
    horizon: int | None = dataclasses.field(default=None, metadata=STATIC)
    careful: bool = dataclasses.field(default=False, metadata=STATIC)


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class AllPairs:
    """An array of all pairs [B or 1, N or 1, T, S], whose tiles backends read, and a factor."""

    pairs: jax.Array
    factor: float = dataclasses.field(metadata=STATIC)


class Simplified(NamedTuple):
    """A rule, in the parts that backends evaluate.

    Attributes:
      term: a `Term`, evaluated on tiles; None for a rule with `pairs`, `by_distance` or `values`.
      q_features, k_features: of the term, pytrees [B, T, N, ...] and [B, S, K or N, ...].
      strip: `strip(first, stop) -> float32 [1 or N, L, F]`, vectors of integers first to stop - 1;
        the term is a `TableDot`, which reads a part of them on each tile.
      pairs: an array of all pairs.
      by_distance: `by_distance(first, stop) -> float32 [N or 1, L]`: the rule is this number
        per distance.
      high: upper bound of `by_distance`, from which on it is constant.
      dropped: constant dropped from all logits of a query, [1, 1, N] or [B, T, N].
      values: a table on the values, minus `far_value`.
      far_value: float32 [N, V], to be added to all values.
    """

    term: Any = None
    q_features: Any = None
    k_features: Any = None
    strip: Callable[[int, int], jax.Array] | None = None
    pairs: AllPairs | None = None
    by_distance: Callable[[int, int], jax.Array] | None = None
    high: int | None = None
    dropped: jax.Array | None = None
    values: ValueTable | None = None
    far_value: jax.Array | None = None
