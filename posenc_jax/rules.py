"""Rules: terms that positions and content add to logits and values.

Each is written for one head, one query and one key, and serves every implementation of
attention. Rules are pytrees: arrays are leaves, and the functions that read them are static.
"""

import abc
import dataclasses
import functools
from collections.abc import Callable
from typing import Any, ClassVar, Self

import jax
import jax.numpy as jnp

from posenc_jax.checks import require

STATIC = {"static": True}  # Marks fields that are part of a pytree's structure.


def _axes_last(positions: jax.Array) -> jax.Array:
    """[A, B, T] to [B, T, A]; [B, T] and [T] stay."""
    return jnp.moveaxis(positions, 0, -1) if jnp.ndim(positions) == 3 else jnp.asarray(positions)


def _count_heads(heads: Any, what: str) -> int:
    shapes = [jnp.shape(leaf) for leaf in jax.tree.leaves(heads)]
    counts = {shape[:1] for shape in shapes}
    require(
        len(counts) == 1 and counts != {()},
        f"{what}: leaves of `heads` need one leading axis N, got shapes {shapes}.",
    )
    return shapes[0][0]


class Rule(abc.ABC):
    """A term of attention, as data: arrays, and static functions that read them."""

    @abc.abstractmethod
    def on(self, transform: Callable[[jax.Array], jax.Array]) -> Self:
        """Returns the rule reading `transform(coordinate)` for the coordinates of each token.

        Args:
          transform: a function of one token's coordinates, a scalar or [A]: a module-level
            function or a frozen dataclass with `__call__`.
        """


@dataclasses.dataclass(frozen=True)
class _OnCoordinates:
    """A function whose last two arguments, coordinates of a query and a key, are transformed."""

    rule: Callable
    transform: Callable

    def __call__(self, *arguments):
        *rest, q, k = arguments
        return self.rule(*rest, self.transform(q), self.transform(k))


@dataclasses.dataclass(frozen=True)
class _OnRow:
    """`_OnCoordinates` for rules on a whole row, whose last argument has all keys."""

    rule: Callable
    transform: Callable

    def __call__(self, *arguments):
        *rest, q, k = arguments
        return self.rule(*rest, self.transform(q), jax.vmap(self.transform)(k))


@dataclasses.dataclass(frozen=True)
class _Then:
    """One function of coordinates after another."""

    first: Callable
    second: Callable

    def __call__(self, x):
        return self.second(self.first(x))


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class LogitBias(Rule):
    """A number added to each logit, as a rule on two coordinates.

    Attributes:
      rule: `rule(shared, head, q, k) -> scalar`, written for one head, one query and one
        key: a module-level function or a frozen dataclass with `__call__`. `q` and `k`
        are scalars, or [A] where coordinates have A axes. It may not close over arrays.
      heads: pytree of arrays [N, ...]; the rule gets one head's slice.
      shared: pytree of arrays that all heads share.
      relative: whether the rule depends on q - k alone.
      bounds: `(low, high)`; the rule of a relative bias is constant for q - k <= low and
        for q - k >= high. None for a side means no bound. The value there is finite:
        it may be subtracted.
      scaled: whether the term is multiplied by the logit scale, as q . k is.
    """

    rule: Callable = dataclasses.field(metadata=STATIC)
    heads: Any = dataclasses.field()
    shared: Any = ()
    relative: bool = dataclasses.field(default=False, metadata=STATIC)
    bounds: tuple[int | None, int | None] = dataclasses.field(default=(None, None), metadata=STATIC)
    scaled: bool = dataclasses.field(default=False, metadata=STATIC)

    @property
    def num_heads(self) -> int:
        """The number N of query heads that the bias is for."""
        return _count_heads(self.heads, "LogitBias")

    def on(self, transform):
        """Returns the bias on transformed coordinates, of which nothing is known."""
        rule = _OnCoordinates(self.rule, transform)
        return dataclasses.replace(self, rule=rule, relative=False, bounds=(None, None))

    def tile(self, q: jax.Array, k: jax.Array) -> jax.Array:
        """Returns float32 [N, T, S] for coordinates [T] and [S], or [T, A] and [S, A]."""
        over_k = jax.vmap(self.rule, (None, None, None, 0))
        over_q = jax.vmap(over_k, (None, None, 0, None))
        over_heads = jax.vmap(over_q, (None, 0, None, None))
        return over_heads(self.shared, self.heads, q, k)

    @functools.partial(jax.jit, inline=True)  # One program to compile, not one an operation.
    def dense(self, q_positions: jax.Array, k_positions: jax.Array) -> jax.Array:
        """Returns the bias as an array, for any other attention.

        Args:
          q_positions: [T], [B, T], or [A, B, T] for A axes.
          k_positions: [S], [B, S] or [A, B, S].

        Returns:
          float32 [N, T, S], or [B, N, T, S] where positions have a batch axis.
        """
        q, k = _axes_last(q_positions), _axes_last(k_positions)
        if jnp.ndim(q_positions) == 1:
            return self.tile(q, k)
        return jax.vmap(self.tile)(q, k)


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class ContentBias(Rule):
    """A number added to each logit, from what query and key carry and where they are.

    Attributes:
      rule: `rule(shared, head, row, col, q, k) -> scalar`, as for `LogitBias`; `row` is
        the query's part of `rows` for that head, `col` the key's part of `cols`.
      heads: pytree of arrays [N, ...], or None.
      shared: pytree of arrays that all heads share, or None.
      q_features: pytree of arrays [B, T, N, ...] that belong to the queries.
      k_features: pytree of arrays [B, S, K, ...] or [B, S, N, ...] that belong to the keys.
      scaled: as for `LogitBias`.
    """

    rule: Callable = dataclasses.field(metadata=STATIC)
    heads: Any = None
    shared: Any = None
    q_features: Any = None
    k_features: Any = None
    scaled: bool = dataclasses.field(default=False, metadata=STATIC)

    def on(self, transform):
        """Returns the bias on transformed coordinates."""
        return dataclasses.replace(self, rule=_OnCoordinates(self.rule, transform))

    def tile(self, rows: Any, cols: Any, q: jax.Array, k: jax.Array) -> jax.Array:
        """Returns float32 [N, T, S] for rows [T, N, ...], cols [S, N, ...] and coordinates."""
        over_k = jax.vmap(self.rule, (None, None, None, 0, None, 0))
        over_q = jax.vmap(over_k, (None, None, 0, None, 0, None))
        over_heads = jax.vmap(over_q, (None, 0, 1, 1, None, None))
        return over_heads(self.shared, self.heads, rows, cols, q, k)


@dataclasses.dataclass(frozen=True)
class _Dot:
    """The rule of a DotBias for one pair, as it is defined."""

    vector: Callable
    transform: Callable | None

    def __call__(self, shared, head, row, col, q, k):
        q, k = (x if self.transform is None else self.transform(x) for x in (q, k))
        own = (col if row is None else row).astype(jnp.float32)
        return jnp.dot(own, self.vector(shared, head, q - k), precision="highest")


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class DotBias(Rule):
    """A number added to each logit: a vector of the query or the key, dot one of the distance.

    There are few distances, so that their vectors are computed once, and the products are
    those of matrices.

    Attributes:
      vector: `vector(shared, head, distance) -> [F]`, for one head and one distance q - k:
        a module-level function or a frozen dataclass with `__call__`.
      heads: pytree of arrays [N, ...], or None where all heads have the same vectors.
      shared: pytree of arrays that all heads share, or None.
      q_features: [B, T, N, F], the vectors of the queries, or None.
      k_features: [B, S, K or N, F], the vectors of the keys, or None; one of the two is given.
      bounds: as for `LogitBias`.
      scaled: as for `LogitBias`.
      pair: the same as the rule of a `ContentBias`; it is used where distances have no
        bounds and tokens do not stand in order. Without it `vector` runs for every pair
        there.
      transform: what coordinates pass through before their difference is taken.
    """

    vector: Callable = dataclasses.field(metadata=STATIC)
    heads: Any = None
    shared: Any = None
    q_features: jax.Array | None = None
    k_features: jax.Array | None = None
    bounds: tuple[int | None, int | None] = dataclasses.field(default=(None, None), metadata=STATIC)
    scaled: bool = dataclasses.field(default=False, metadata=STATIC)
    pair: Callable | None = dataclasses.field(default=None, metadata=STATIC)
    transform: Callable | None = dataclasses.field(default=None, metadata=STATIC)

    relative: ClassVar[bool] = True
    """As for `LogitBias`."""

    def vectors(self, distances: jax.Array) -> jax.Array:
        """Returns float32 [N, R, F] for distances [R]; [1, R, F] where heads share them."""
        heads = self.heads
        if not jax.tree.leaves(heads):
            return self._of_head(heads, distances)[None]
        return jax.vmap(self._of_head, (0, None))(heads, distances)

    def _of_head(self, head: Any, distances: jax.Array) -> jax.Array:
        over = jax.vmap(self.vector, (None, None, 0))
        return over(self.shared, head, distances).astype(jnp.float32)

    def on(self, transform):
        """Returns the bias on transformed coordinates."""
        pair = None if self.pair is None else _OnCoordinates(self.pair, transform)
        if self.transform is not None:
            transform = _Then(transform, self.transform)
        return dataclasses.replace(self, transform=transform, pair=pair)

    def by_pair(self) -> ContentBias:
        """Returns the same as a rule on every pair."""
        rule = self.pair or _Dot(self.vector, self.transform)
        return ContentBias(
            rule, self.heads, self.shared, self.q_features, self.k_features, self.scaled
        )

    def moved(self, coordinates: jax.Array, token_axes: int = 1) -> jax.Array:
        """Returns the coordinates whose differences are the distances.

        Args:
          coordinates: of tokens along the first `token_axes` axes.
          token_axes: 1 for [T] and [T, A], 2 for [B, T] and [B, T, A].
        """
        transform = self.transform
        if transform is None:
            return coordinates
        for _ in range(token_axes):
            transform = jax.vmap(transform)
        return transform(coordinates)

    def tile(self, rows: Any, cols: Any, q: jax.Array, k: jax.Array) -> jax.Array:
        """Returns float32 [N, T, S] for rows [T, N, F] or cols [S, N, F] and coordinates."""
        low, high = self.bounds
        at, to = self.moved(q), self.moved(k)
        if low is None or high is None or at.ndim > 1 or at.dtype != jnp.int32:
            return self.by_pair().tile(rows, cols, q, k)
        vectors = self.vectors(jnp.arange(low, high + 1, dtype=jnp.int32))
        own = jnp.moveaxis(cols if rows is None else rows, 1, 0).astype(jnp.float32)
        table = jnp.matmul(own, jnp.swapaxes(vectors, 1, 2), precision="highest")
        entry = jnp.clip(at[:, None] - to[None], low, high) - low
        if rows is None:
            return jnp.swapaxes(jnp.take_along_axis(table, entry.T[None], 2), 1, 2)
        return jnp.take_along_axis(table, entry[None], 2)


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class LogitsTransform(Rule):
    """What becomes of all logits of a query, where a rule needs all keys or all heads.

    It runs once the logits are complete: scale, biases, contents and softcap are in them.

    Attributes:
      rule: `rule(shared, heads, row, cols, logits, seen, q, k) -> [N, S]`, written for one
        query: `row` is its part of `rows`, [N, ...]; `cols` those of all keys, [S, N, ...];
        `logits` float32 [N, S], 0 where it does not see the key; `seen` bool [N or 1, S];
        `q` and `k` coordinates, a scalar and [S], or [A] and [S, A]. Of the keys, those of
        a segment stand in the order of their positions. What is returned for keys that are
        not seen has no effect.
      heads: pytree of arrays [N, ...], or None.
      shared: pytree of arrays that all heads share, or None.
      q_features: pytree of arrays [B, T, N, ...] that belong to the queries, or None.
      k_features: pytree of arrays [B, S, K or N, ...] that belong to the keys, or None.
      expand: `expand(shared, heads, cols) -> cols`; what the rule gets as `cols`, of any
        shapes. It runs once for all queries. Keys that are padding are zeros there.
      normalized: whether weights are the softmax of what is returned. False: they are its
        exponential.
    """

    rule: Callable = dataclasses.field(metadata=STATIC)
    heads: Any = None
    shared: Any = None
    q_features: Any = None
    k_features: Any = None
    expand: Callable | None = dataclasses.field(default=None, metadata=STATIC)
    normalized: bool = dataclasses.field(default=True, metadata=STATIC)

    def on(self, transform):
        """Returns the rule on transformed coordinates."""
        return dataclasses.replace(self, rule=_OnRow(self.rule, transform))

    def tile(
        self,
        rows: Any,
        cols: Any,
        logits: jax.Array,
        seen: jax.Array,
        q: jax.Array,
        k: jax.Array,
    ) -> jax.Array:
        """Returns [N, T, S] for rows [T, N, ...], logits [N, T, S] and coordinates."""
        over_q = jax.vmap(self.rule, (None, None, 0, None, 1, 1, 0, None), 1)
        return over_q(self.shared, self.heads, rows, cols, logits, seen, q, k)


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class ValueBias(Rule):
    """A vector added to each value, from a table over buckets of two coordinates.

    The output gains `sum_j p[i, j] * table[bucket(i, j)]`, which needs only the
    probability mass that falls into each bucket.

    Attributes:
      bucket: `bucket(q, k) -> int32 scalar` in [0, R), for one query and one key.
      table: [N, R, H].
      relative, bounds: as for `LogitBias`.
    """

    bucket: Callable = dataclasses.field(metadata=STATIC)
    table: jax.Array = dataclasses.field()
    relative: bool = dataclasses.field(default=False, metadata=STATIC)
    bounds: tuple[int | None, int | None] = dataclasses.field(default=(None, None), metadata=STATIC)

    def on(self, transform):
        """Returns the bias on transformed coordinates, of which nothing is known."""
        bucket = _OnCoordinates(self.bucket, transform)
        return dataclasses.replace(self, bucket=bucket, relative=False, bounds=(None, None))

    def tile(self, q: jax.Array, k: jax.Array) -> jax.Array:
        """Returns int32 buckets [T, S]."""
        return jax.vmap(jax.vmap(self.bucket, (None, 0)), (0, None))(q, k)


def as_tuple(x: Any) -> tuple:
    """Returns None, one thing or a tuple or list of things as a tuple."""
    if x is None:
        return ()
    return tuple(x) if isinstance(x, tuple | list) else (x,)
