"""What positions and content add to the logits and values of one tile."""

import dataclasses
import math
from collections.abc import Callable
from typing import Any, ClassVar

import jax
import jax.numpy as jnp

from posenc_jax.engine.problem import Problem
from posenc_jax.engine.tiling import joined
from posenc_jax.engine.xla_spread import Band, by_band, by_index
from posenc_jax.rules import ContentBias, LogitBias

_STATIC = {"static": True}

PAIRS_AT_ONCE = 2**15
"""Pairs of a rule on coordinates that are pulled together: what the rule makes of them, some
tens of numbers each, should stay in the cache. For FIRE that is 3.5 times faster on CPU."""


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class Term:
    """One rule, as the tiles evaluate it, for every pair.

    Attributes:
      rule, heads, shared: of the LogitBias or ContentBias.
      factor: what the term is multiplied by.
      of_content: whether the rule takes a row and a column too.
      far: subtract the value at this distance and beyond: the softmax does not change,
        and tiles that are that far have nothing to add. None: do not.
    """

    rule: Callable = dataclasses.field(metadata=_STATIC)
    heads: Any
    shared: Any
    factor: float = dataclasses.field(metadata=_STATIC)
    of_content: bool = dataclasses.field(metadata=_STATIC)
    far: int | None = dataclasses.field(metadata=_STATIC)

    in_all: ClassVar[bool] = False
    """Whether plain tiles have the term too."""

    def tile(self, window, rows, cols, q: dict, k: dict, *, plain: bool, flip: bool) -> Any:
        """Returns float32 [B or 1, N, Q, K], or [B or 1, N, K, Q] flipped, to be pulled.

        None where there is nothing to add.
        """
        if plain:
            return None
        out = self._pairs(rows, cols, q["coordinates"], k["coordinates"], flip)
        if self.far is not None:
            out -= self.far_value(q["coordinates"].dtype)[None, :, None, None]
        return self.factor * out.astype(jnp.float32)

    def far_value(self, dtype: Any) -> jax.Array:
        """Returns the value of a rule without content at `far`, [N]."""
        at, zero = jnp.asarray(self.far, dtype), jnp.zeros((), dtype)
        return jax.vmap(self.rule, (None, 0, None, None))(self.shared, self.heads, at, zero)

    def _pairs(self, rows, cols, q, k, flip):
        def rule(head, row, col, q, k):
            given = (row, col, q, k) if self.of_content else (q, k)
            return self.rule(self.shared, head, *given)

        over_k, over_q = (None, None, 0, None, 0), (None, 0, None, 0, None)
        first, second = (over_q, over_k) if flip else (over_k, over_q)
        pairs = jax.vmap(jax.vmap(rule, first), second)
        by_head = jax.vmap(pairs, (0, 1, 1, None, None))
        if self.of_content:
            batch = max(x.shape[0] for x in jax.tree.leaves((rows, cols, q, k)))
            q, k = (jnp.broadcast_to(x, (batch, *x.shape[1:])) for x in (q, k))
            return jax.vmap(by_head, (None, 0, 0, 0, 0))(self.heads, rows, cols, q, k)

        def tile(k):
            if q.shape[0] == k.shape[0] == 1:  # A batch axis of one costs FIRE's gradient twofold.
                return by_head(self.heads, None, None, q[0], k[0])[None]
            return jax.vmap(by_head, (None, None, None, 0, 0))(self.heads, None, None, q, k)

        size = math.gcd(k.shape[1], max(PAIRS_AT_ONCE // q.shape[1], 1))
        if not flip or size == k.shape[1]:
            return tile(k)
        parts = jnp.moveaxis(k.reshape(k.shape[0], -1, size, *k.shape[2:]), 1, 0)
        return joined(jax.lax.map(jax.checkpoint(tile), parts), 2)


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class ValueTerm:
    """A table on the values, as the tiles evaluate it.

    Attributes:
      table: float32 [N, R, V], per distance of `band`, or per bucket.
      band: the distances of the table; None: `bucket` says which entry a pair has.
    """

    table: jax.Array
    band: Any = dataclasses.field(metadata=_STATIC)
    bucket: Callable = dataclasses.field(metadata=_STATIC)

    def spread(
        self, entries: jax.Array, q: dict, k: dict, *, flip: bool, pulled: bool = False
    ) -> jax.Array:
        """Spreads [B, N, Q, R] over [B, N, Q, K]; flipped [B, N, R, Q] over [B, N, K, Q]."""
        if self.band is not None:
            return by_band(entries, q, k, self.band, flip=flip, pulled=pulled)
        at = q["coordinates"], k["coordinates"]
        over_k, over_q = (None, 0), (0, None)
        first, second = (over_q, over_k) if flip else (over_k, over_q)
        pairs = jax.vmap(jax.vmap(jax.vmap(self.bucket, first), second))
        return by_index(entries, pairs(*at), flip)

    def collect(self, tile: jax.Array, q: dict, k: dict, *, flip: bool) -> jax.Array:
        """The transpose of `spread`: what of a tile falls on every entry."""

        def spread(entries):
            return self.spread(entries, q, k, flip=flip, pulled=True)

        axis = 2 if flip else 3
        shape = list(tile.shape)
        shape[axis] = self.table.shape[1]
        return jax.vjp(spread, jax.lax.full_like(tile, 0.0, shape=shape))[1](tile)[0]


def high_bound(rule: Any, problem: Problem, ordered: bool) -> int | None:
    """Returns the distance from which on a rule is constant, if there is one."""
    high = rule.bounds[1]
    if high is None or not rule.relative or problem.q_coordinates.ndim > 2:
        return None
    return min(high, problem.q.shape[1] - 1) if ordered else high


def band_of(rule: Any, problem: Problem, *, ordered: bool, shift: bool) -> Band | None:
    """Returns the distances to tabulate a rule for, or None where there is no end of them.

    Args:
      rule: a DotBias or ValueBias.
      problem: what it is for.
      ordered: whether distances are those of slots.
      shift: whether the value at the last one is left out.
    """
    at = problem.q_coordinates
    if not rule.relative or at.ndim > 2 or at.dtype != jnp.int32:
        return None
    low, high = rule.bounds[0], high_bound(rule, problem, ordered)
    past_only = ordered and problem.is_causal and problem.prefix_length is None
    if ordered and low is not None:
        low = max(low, 1 - problem.k.shape[1])
    if past_only:
        low = 0 if low is None else max(low, 0)
    if low is None or high is None:
        return None
    high = max(high, low)
    return Band(
        low,
        high,
        ordered=ordered,
        open_low=not past_only or low > 0,
        open_high=not shift,
    )


def bias_term(bias: LogitBias, problem: Problem, shift: bool) -> Term:
    """Returns a rule on coordinates that cannot be evaluated once per distance."""
    return Term(
        bias.rule,
        heads=bias.heads,
        shared=bias.shared,
        factor=problem.scale if bias.scaled else 1.0,
        of_content=False,
        far=high_bound(bias, problem, problem.contiguous) if shift else None,
    )


def content_term(content: ContentBias, problem: Problem) -> Term:
    """Returns a rule on content and coordinates."""
    return Term(
        content.rule,
        heads=content.heads,
        shared=content.shared,
        factor=problem.scale if content.scaled else 1.0,
        of_content=True,
        far=None,
    )
