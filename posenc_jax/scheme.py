"""What a position encoding is: a frozen dataclass of settings with pure functions as methods.

A scheme may act in these places. Every hook defaults to doing nothing, so a scheme is as
long as what it does:

    embed     on the token embedding                      learned, sinusoidal
    query/key on q and k after their projection           RoPE
    bias      on the logits, from two positions           ALiBi, T5
    content   on the logits, from content and positions   Shaw, FoX
    row_rule  on all logits of a query at once            CoPE, stick-breaking
    value     on the output, from two positions           Shaw
    attend    on all of it, in place of one attention     ReRoPE

`side` lets a scheme make arrays of its own per token (a forget gate, a second projection
of q). Those of keys are cached beside k and v.

Two arrays say where a token is. Positions, int32 [B, T], are its place in the order and
decide what is visible; no scheme reads them. Coordinates are what a scheme encodes: the
positions unless something else was given, int32 or float32, [B, T], or [A, B, T] where a
scheme reads A axes.
"""

import dataclasses
from collections.abc import Callable
from typing import Any, ClassVar, Self

import jax
import jax.numpy as jnp

from posenc_jax.checks import require

STATIC = {"static": True}  # Marks fields that are part of a pytree's structure.

Params = Any  # A pytree of arrays; {} where nothing is learned.


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


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class LogitBias:
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

    def tile(self, q: jax.Array, k: jax.Array) -> jax.Array:
        """Returns float32 [N, T, S] for coordinates [T] and [S], or [T, A] and [S, A]."""
        over_k = jax.vmap(self.rule, (None, None, None, 0))
        over_q = jax.vmap(over_k, (None, None, 0, None))
        over_heads = jax.vmap(over_q, (None, 0, None, None))
        return over_heads(self.shared, self.heads, q, k)

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
class ContentBias:
    """A number added to each logit, from what query and key carry and where they are.

    Attributes:
      rule: `rule(shared, head, row, col, q, k) -> scalar`, as for `LogitBias`; `row` is
        the query's part of `rows` for that head, `col` the key's part of `cols`.
      heads: pytree of arrays [N, ...], or None.
      shared: pytree of arrays that all heads share, or None.
      rows: pytree of arrays [B, T, N, ...] that belong to the queries.
      cols: pytree of arrays [B, S, K, ...] or [B, S, N, ...] that belong to the keys.
      scaled: as for `LogitBias`.
    """

    rule: Callable = dataclasses.field(metadata=STATIC)
    heads: Any = None
    shared: Any = None
    rows: Any = None
    cols: Any = None
    scaled: bool = dataclasses.field(default=False, metadata=STATIC)

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
class DotBias:
    """A number added to each logit: a vector of the query or the key, dot one of the distance.

    There are few distances, so that their vectors are computed once, and the products are
    those of matrices.

    Attributes:
      vector: `vector(shared, head, distance) -> [F]`, for one head and one distance q - k:
        a module-level function or a frozen dataclass with `__call__`.
      heads: pytree of arrays [N, ...], or None where all heads have the same vectors.
      shared: pytree of arrays that all heads share, or None.
      rows: [B, T, N, F], the vectors of the queries, or None.
      cols: [B, S, K or N, F], the vectors of the keys, or None; one of the two is given.
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
    rows: jax.Array | None = None
    cols: jax.Array | None = None
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

    def by_pair(self) -> ContentBias:
        """Returns the same as a rule on every pair."""
        rule = self.pair or _Dot(self.vector, self.transform)
        return ContentBias(rule, self.heads, self.shared, self.rows, self.cols, self.scaled)

    def moved(self, coordinates: jax.Array) -> jax.Array:
        """Returns the coordinates whose differences are the distances."""
        return coordinates if self.transform is None else self.transform(coordinates)

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
class RowRule:
    """What becomes of all logits of a query, where a rule needs all keys or all heads.

    It runs once the logits are complete: scale, biases, contents and softcap are in them.

    Attributes:
      rule: `rule(shared, heads, row, logits, seen, q, k) -> [N, S]`, written for one query:
        `row` is its part of `rows`, [N, ...]; `logits` float32 [N, S], 0 where it does not
        see the key; `seen` bool [N or 1, S]; `q` and `k` coordinates, a scalar and [S], or
        [A] and [S, A]. Of the keys, those of a segment stand in the order of their
        positions. What is returned for keys that are not seen has no effect.
      heads: pytree of arrays [N, ...], or None.
      shared: pytree of arrays that all heads share, or None.
      rows: pytree of arrays [B, T, N, ...] that belong to the queries, or None.
      normalized: whether weights are the softmax of what is returned. False: they are its
        exponential.
    """

    rule: Callable = dataclasses.field(metadata=STATIC)
    heads: Any = None
    shared: Any = None
    rows: Any = None
    normalized: bool = dataclasses.field(default=True, metadata=STATIC)

    def tile(
        self, rows: Any, logits: jax.Array, seen: jax.Array, q: jax.Array, k: jax.Array
    ) -> jax.Array:
        """Returns [N, T, S] for rows [T, N, ...], logits [N, T, S] and coordinates."""
        over_q = jax.vmap(self.rule, (None, None, 0, 1, 1, 0, None), 1)
        return over_q(self.shared, self.heads, rows, logits, seen, q, k)


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class ValueBias:
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

    def tile(self, q: jax.Array, k: jax.Array) -> jax.Array:
        """Returns int32 buckets [T, S]."""
        return jax.vmap(jax.vmap(self.bucket, (None, 0)), (0, None))(q, k)


Content = ContentBias | DotBias
"""What depends on content."""


@dataclasses.dataclass(frozen=True)
class Scheme:
    """A position encoding. Subclass it, override what the scheme does, and it is complete.

    Fields are settings: numbers, strings, tuples and frozen dataclasses, so that a scheme
    is hashable, compares by value and is static under `jit`. Fields without a default are
    sizes that the model supplies, from one vocabulary: `num_heads`, `head_dim`,
    `model_dim`, `max_length`.

    >>> @dataclasses.dataclass(frozen=True)
    ... class Shouting(Scheme):
    ...     volume: float = 2.0
    ...
    ...     def embed(self, params, x, coordinates):
    ...         return x * self.volume
    >>> Shouting(volume=3.0).embed({}, jnp.ones((1, 1, 1)), jnp.zeros((1, 1), int)).item()
    3.0
    """

    name: ClassVar[str] = ""
    """The word for the scheme in configs and tables; empty for one that is not exported."""
    relative: ClassVar[bool] = False
    """Whether attention stays the same when all coordinates of a row move by one number."""
    num_axes: ClassVar[int] = 1
    """How many axes A of coordinates the scheme reads; [B, T] it has to understand anyway."""
    shared_over_layers: ClassVar[bool] = False
    """Whether the authors use one set of parameters for all layers."""
    scale_embedding: ClassVar[bool] = False
    """Whether token embeddings are multiplied by sqrt(D) before `embed`, as published."""
    by_order: ClassVar[bool] = False
    """Whether the order of tokens is all that the scheme reads of their coordinates."""
    caches_mapped_keys: ClassVar[bool] = True
    """Whether `key` can run once, before k is cached. False where it depends on later tokens."""

    def init(self, key: jax.Array) -> Params:
        """Returns new parameters."""
        return {}

    def embed(self, params: Params, x: jax.Array, coordinates: jax.Array) -> jax.Array:
        """Returns token embeddings [B, T, D] with positions in them."""
        return x

    def side(
        self,
        params: Params,
        x: jax.Array | None,
        q: jax.Array,
        k: jax.Array,
        coordinates: jax.Array,
        state: Any,
    ) -> tuple[Any, Any, Any]:
        """Returns `(rows, cols, state)`: arrays per query, per key, and per sequence.

        Args:
          params: the scheme's parameters.
          x: what q and k were projected from, [B, T, D]. None in bare function calls.
          q: [B, T, N, H], before `query`.
          k: [B, T, K, H], before `key`.
          coordinates: [B, T] or [A, B, T].
          state: what the call for the tokens before these returned (running sums), leaves
            [B, ...]; None at the beginning of a sequence, where zeros must mean the same.
        """
        return None, None, state

    def query(
        self, params: Params, q: jax.Array, coordinates: jax.Array, rows: Any = None
    ) -> jax.Array:
        """Returns q [B, T, N, H] as attention shall see it; the last axis may change."""
        return q

    def key(
        self, params: Params, k: jax.Array, coordinates: jax.Array, cols: Any = None
    ) -> jax.Array:
        """Returns k [B, S, K, H] as attention shall see it; its last axis is that of q."""
        return k

    def bias(self, params: Params) -> LogitBias | tuple[LogitBias, ...] | None:
        """Returns what is added to the logits from positions alone."""
        return None

    def content(self, params: Params, rows: Any, cols: Any) -> Content | tuple[Content, ...] | None:
        """Returns what is added to the logits from content and positions."""
        return None

    def row_rule(self, params: Params, rows: Any) -> RowRule | None:
        """Returns what becomes of all logits of a query together."""
        return None

    def value(self, params: Params) -> ValueBias | None:
        """Returns what is added to the values from positions."""
        return None

    def attend(
        self,
        params: Params,
        q: jax.Array,
        k: jax.Array,
        v: jax.Array,
        at: tuple[jax.Array, jax.Array],
        rows: Any,
        cols: Any,
        attention: Callable[..., Any],
    ) -> jax.Array:
        """Returns the output [B, T, N, V]: one attention with the scheme's rules.

        A scheme that needs another one, or several, says so here.

        Args:
          params: the scheme's parameters.
          q, k, v: queries and keys after `query` and `key`, and values. Keys may be those
            of a cache, in any order.
          at: coordinates of queries and of keys.
          rows, cols: what `side` made for them.
          attention: `posenc_jax.attention` that knows all else: positions, masks, options.
        """
        return attention(
            q,
            k,
            v,
            bias=self.bias(params),
            content=self.content(params, rows, cols),
            row_rule=self.row_rule(params, rows),
            value_bias=self.value(params),
        )

    def logit_scale(self, head_dim: int) -> float | None:
        """Returns the factor on q . k that the scheme was published with; None: 1/sqrt(H)."""
        return None

    @property
    def acts_on(self) -> tuple[str, ...]:
        """Where the scheme acts: "embedding", "q, k", "logits", "output", "attention"."""
        places = {
            "embedding": ("embed",),
            "q, k": ("query", "key"),
            "logits": ("bias", "content", "row_rule"),
            "output": ("value",),
            "attention": ("attend",),
        }
        own = type(self)
        return tuple(
            place
            for place, hooks in places.items()
            if any(getattr(own, h) is not getattr(Scheme, h) for h in hooks)
        )

    @property
    def acts_in_attention(self) -> bool:
        """Whether attention layers have anything to do for the scheme."""
        return any(place != "embedding" for place in self.acts_on)

    def replace(self, **changes: Any) -> Self:
        """Returns a copy with some settings changed."""
        return dataclasses.replace(self, **changes)


def as_tuple(x: Any) -> tuple:
    """None, one thing or a tuple of things, as a tuple."""
    if x is None:
        return ()
    return x if isinstance(x, tuple) else (x,)
