"""Terms: lowered rules, as backends evaluate them on a tile; and tiles of values per distance.

The unit is one head and one row of the batch: a tile is [Q, K]. Backends add the head and batch
axes: XLA by vmap, kernels by their grid. Leaves of `heads` have a head axis [N, ...] outside;
inside a tile a term holds the slice of one head.

Functions named `*_vjp` have a custom VJP: deterministic sums in place of scatters. Forward mode
cannot pass them, so they are used only where `jax.vjp` is applied at once; the argument `in_vjp`
says so.
"""

import abc
import dataclasses
import functools
import math
from collections.abc import Callable
from typing import Any, ClassVar, NamedTuple, Self

import jax
import jax.numpy as jnp
from jax.core import Tracer
from jax.extend.core import ClosedJaxpr, Literal, jaxpr_as_fun

from posenc_jax.engine.mask import add_saturated, differentiable_in_units

STATIC = {"static": True}  # Marks fields that are part of a pytree's structure.
_PART = 128  # Tokens whose products with vectors per distance are computed at once.


def in_reach(q: jax.Array, k: jax.Array) -> jax.Array:
    """Returns k, or for int32 the number nearest to it whose distance from q fits int32."""
    if not q.dtype == k.dtype == jnp.int32:
        return k
    most = jnp.iinfo(jnp.int32).max
    return jnp.clip(k, jnp.maximum(q, -1) - most, jnp.minimum(q, 0) + most)


@dataclasses.dataclass(frozen=True, eq=False)
class Traced:
    """A function that was traced: `traced(captured, *arguments)`.

    Attributes:
      closed: the jaxpr; constants that are None are the arrays `captured`.
      structure: of the result.
    """

    closed: ClosedJaxpr
    structure: Any

    def __call__(self, captured: tuple[jax.Array, ...], *arguments: Any) -> Any:
        arrays = iter(captured)
        consts = [next(arrays) if x is None else x for x in self.closed.consts]
        typed = zip(jax.tree.leaves(arguments), self.closed.in_avals, strict=True)
        leaves = [_like(x, aval) for x, aval in typed]
        out = jaxpr_as_fun(ClosedJaxpr(self.closed.jaxpr, consts))(*leaves)
        return jax.tree.unflatten(self.structure, out)


def trace_once(function: Callable, *arguments: Any) -> tuple[Traced, tuple[jax.Array, ...]]:
    """Returns a function as a jaxpr, and the traced arrays that it closes over.

    `jax.custom_vjp` traces derivatives after the function itself, and variables that a rule reads
    may have changed by then: its jaxpr serves both.

    These become arguments, so that they have gradients: a custom derivative has none with respect
    to arrays that its functions close over.

    Args:
      function: the function.
      *arguments: arrays, or their types; later ones are cast to their dtypes.
    """
    closed, out = jax.make_jaxpr(function, return_shape=True)(*arguments)
    varying = frozenset().union(*(x.mat.varying for x in closed.in_avals))

    def is_captured(x):  # Under `shard_map`, others have no type that a custom derivative allows.
        return isinstance(x, Tracer) and jax.typeof(x).mat.varying == varying

    captured = tuple(filter(is_captured, closed.consts))
    consts = [None if is_captured(x) else x for x in closed.consts]
    return Traced(ClosedJaxpr(closed.jaxpr, consts), jax.tree.structure(out)), captured


def with_captured(function: Any, captured: tuple[jax.Array, ...]) -> Any:
    """Returns a function; one that was traced with the arrays that it closes over."""
    return functools.partial(function, captured) if isinstance(function, Traced) else function


def _like(x: Any, aval: Any) -> jax.Array:
    """Casts an argument to a dtype, and makes it vary over the same mesh axes."""
    x = x if x.dtype == aval.dtype else x.astype(aval.dtype)
    missing = tuple(aval.mat.varying - jax.typeof(x).mat.varying)
    return jax.lax.pcast(x, missing, to="varying") if missing else x


_FINITE = frozenset(
    "abs add and argmax argmin broadcast_in_dim ceil clamp concatenate convert_element_type copy "
    "cos dot_general dynamic_slice eq erf expand_dims floor gather ge gt iota le logistic lt max "
    "min mul ne neg not or pad reduce_and reduce_max reduce_min reduce_or reduce_sum reshape rev "
    "round select_n sign sin slice square squeeze stop_gradient sub tanh transpose".split()
)
"""Operations that are finite at finite numbers, and so are their derivatives."""


def may_be_infinite(function: Callable, *arguments: Any) -> bool:
    """Returns whether a function or its derivative may be NaN or infinite at finite numbers.

    Args:
      function: the function.
      *arguments: arrays, or their types.
    """
    closed = jax.make_jaxpr(function)(*arguments)
    return not all(map(_is_finite, closed.jaxpr.eqns))


_CALLS = frozenset(("jit", "pjit", "closed_call", "custom_jvp_call", "custom_vjp_call"))


def inner_jaxpr(eqn: Any) -> Any:
    """Returns the jaxpr that an equation calls, or None."""
    if eqn.primitive.name not in _CALLS:
        return None
    return eqn.params["call_jaxpr" if "call_jaxpr" in eqn.params else "jaxpr"]


def _is_finite(eqn: Any) -> bool:
    """Returns whether an equation is of operations that are finite at finite numbers."""
    if not any(jnp.issubdtype(x.aval.dtype, jnp.inexact) for x in eqn.outvars):
        return True  # Integers have no derivative.
    if (inner := inner_jaxpr(eqn)) is not None:
        return all(map(_is_finite, inner.jaxpr.eqns))
    name = eqn.primitive.name
    if name == "integer_pow":
        return eqn.params["y"] >= 0
    if name == "div":  # By a number of the function.
        return isinstance(eqn.invars[1], Literal) and eqn.invars[1].val != 0
    return name in _FINITE


def of_seen_pairs(seen: jax.Array, q: "Tokens", k: "Tokens") -> tuple["Tokens", "Tokens"]:
    """Returns the tokens of every pair, leaves [Q, K, ...], with a seen pair for each hidden one.

    A rule may be NaN or infinite at hidden pairs, and 0 * NaN would be NaN in the derivatives of
    arrays that all pairs share.

    Args:
      seen: bool [Q, K].
      q, k: queries and keys, leaves [Q, ...] and [K, ...].
    """
    first = jnp.argmax(seen.reshape(-1))
    row, column = first // seen.shape[1], first % seen.shape[1]

    def at(tokens, index):
        return jax.tree.map(lambda x: jnp.take(x, index, 0, mode="clip"), tokens)

    def spread(tokens, one, axis):
        def of_leaf(x, one):
            mask = seen.reshape(*seen.shape, *(1,) * (x.ndim - 1))
            return jnp.where(mask, jnp.expand_dims(x, axis), one[None, None])

        return jax.tree.map(of_leaf, tokens, one)

    query, key = at(q, row), at(k, column)
    # Where nothing is seen, a query and a key at its own place.
    place = jnp.where(jnp.any(seen), key.coordinates, query.coordinates)
    return spread(q, query, 1), spread(k, key._replace(coordinates=place), 0)


class Tokens(NamedTuple):
    """Queries or keys of a tile, as a term reads them for one head.

    Attributes:
      slots: int32 [T], consecutive.
      coordinates: [T] or [T, A].
      features: the rule's arrays of these tokens, leaves [T, ...].
    """

    slots: Any
    coordinates: Any
    features: Any


@dataclasses.dataclass(frozen=True)
class DistanceRange:
    """The distances low, low + 1, ..., high for which a table has entries.

    Distances beyond an end use the entry of that end.

    Attributes:
      low, high: the first and the last.
      by_slot: whether distances are between slots, or else between coordinates.
      open_low, open_high: whether the cotangent of distances beyond an end is needed.
    """

    low: int
    high: int
    by_slot: bool
    open_low: bool
    open_high: bool

    @property
    def size(self) -> int:
        """The number of distances."""
        return self.high - self.low + 1

    def mirrored(self) -> "DistanceRange":
        """Returns the range for distances of key from query."""
        ends = (-self.high, -self.low)
        return DistanceRange(*ends, self.by_slot, self.open_high, self.open_low)

    def entries(self, q: jax.Array, k: jax.Array, transposed: bool) -> jax.Array:
        """Returns the table entry of each pair of int32 [Q] and [K]: [Q, K], or [K, Q]."""
        if self.by_slot:
            return jnp.clip(_distances(q, k, transposed), self.low, self.high) - self.low
        # Keys are clipped and not distances, which may exceed int32.
        nearest = add_saturated(q, -self.high), add_saturated(q, -self.low)
        q, k = jnp.expand_dims(q, 1 - transposed), jnp.expand_dims(k, int(transposed))
        low, high = (jnp.expand_dims(x, 1 - transposed) for x in nearest)
        return q - jnp.clip(k, low, high) - self.low


@dataclasses.dataclass(frozen=True)
class LoweringContext:
    """The properties of a problem that a rule needs to lower itself.

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
      pairs_at_once: pairs of a rule that are differentiated at once.
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
    pairs_at_once: int
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


@dataclasses.dataclass(frozen=True, kw_only=True)
class Term(abc.ABC):
    """Adds to the logits of a tile, of one head and one row of the batch.

    Attributes:
      factor: a factor on the term.
      horizon: int or None; tiles with every q - k at or beyond it are interior: the term adds
        nothing there, or `interior`. None: no such distance.
      careful: whether it may be NaN or infinite at hidden pairs, which are then not evaluated.
      gathers: whether slots and coordinates should be given per head and row, as indices of
        one gather (a gather with shared indices is slow on CPU).
      any_value: whether its numbers may be of any size, infinite too.
      by_head: the fields with arrays [N or 1, ...], which on a tile are of one head.
    """

    factor: float = dataclasses.field(default=1.0, metadata=STATIC)
    horizon: int | None = dataclasses.field(default=None, metadata=STATIC)
    careful: bool = dataclasses.field(default=False, metadata=STATIC)

    gathers: ClassVar[bool] = False
    by_head: ClassVar[tuple[str, ...]] = ()

    def tile(
        self, strip: Any, q: Tokens, k: Tokens, seen: jax.Array | None = None, *, in_vjp: bool
    ) -> jax.Array:
        """Returns float32 [Q, K], by default `pair` of all pairs.

        Args:
          strip: the part of `strip` that the tile covers, [F, Q + K - 1], or None.
          q, k: tokens of the tile.
          seen: bool [Q, K]; other pairs may get any number. None: all are.
          in_vjp: whether `jax.vjp` is applied at once.
        """
        return pairs_of(self.pair, q, k, seen)

    def traced(self, q: Tokens, k: Tokens) -> Self:
        """Returns the term with its functions traced, so that the backward pass uses these traces.

        Args:
          q, k: types of the coordinates and features of one token and head.
        """
        return self

    @abc.abstractmethod
    def pair(self, q: Tokens, k: Tokens) -> Any:
        """Returns the float32 number of one query and one key; None if there is no such rule.

        Args:
          q, k: leaves (), or [A] for coordinates with axes.
        """
        return None

    def interior(self, q: Tokens, k: Tokens) -> jax.Array | None:
        """Returns the tile that is added beyond the horizon, or None."""
        return None

    @property
    def has_interior(self) -> bool:
        """Whether `interior` adds something."""
        return False

    @property
    def any_value(self) -> bool:
        return False


class Lowering(NamedTuple):
    """A rule, lowered.

    Attributes:
      term: evaluated on tiles; None for a rule with `pairs`, `by_distance` or `values`.
      pairs: an array of all pairs.
      by_distance: `by_distance(first, stop) -> float32 [N or 1, L]`: the rule is this number
        per distance, of integers first to stop - 1.
      high: upper bound of `by_distance`, from which on it is constant.
      strip: `strip(first, stop) -> float32 [1 or N, L, F]`; `term.tile` reads a part of it.
      dropped: constant dropped from all logits of a query, [1, 1, N] or [B, T, N].
      values: a table on the values, minus `far_value`.
      far_value: float32 [N, V], to be added to all values.
    """

    term: Term | None = None
    pairs: "AllPairs | None" = None
    by_distance: Callable[[int, int], jax.Array] | None = None
    high: int | None = None
    strip: Callable[[int, int], jax.Array] | None = None
    dropped: jax.Array | None = None
    values: "ValueTable | None" = None
    far_value: jax.Array | None = None


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True, kw_only=True)
class RuleTerm(Term):
    """A rule, evaluated for every pair.

    Attributes:
      heads: the rule's arrays by head, [N, ...].
      rule: the rule without its arrays by head, query or key.
      captured: arrays that a traced `function` reads.
      function: `pair_of`, traced, or None.
      pairs_at_once: pairs that are differentiated at once.
    """

    heads: Any
    rule: Any
    captured: tuple[jax.Array, ...] = ()
    function: Traced | None = dataclasses.field(default=None, metadata=STATIC)
    pairs_at_once: int = dataclasses.field(metadata=STATIC)

    by_head: ClassVar[tuple[str, ...]] = ("heads",)

    @property
    def any_value(self):
        return self.rule.any_value

    def traced(self, q, k):
        if not self.rule.is_pairwise:
            return self
        head = jax.eval_shape(lambda: jax.tree.map(lambda x: x[0], self.heads))
        function, captured = trace_once(pair_of, self.rule, head, _bare(q), _bare(k))
        return dataclasses.replace(self, function=function, captured=captured)

    def pair(self, q, k):
        if not self.rule.is_pairwise:
            return None
        out = self._number(q, k)
        if self.horizon is not None:
            out -= self._far(q.coordinates.dtype)
        return differentiable_in_units(out, self.factor)

    def tile(self, strip, q, k, seen=None, *, in_vjp):
        length, keys = q.slots.shape[0], k.slots.shape[0]
        size = math.gcd(length, max(self.pairs_at_once // keys, 1))
        reads_features = bool(jax.tree.leaves((q.features, k.features)))
        if reads_features or size == length or not in_vjp or not self.rule.is_pairwise:
            return self._tile(q, k, seen)

        @jax.checkpoint
        def part(q_and_seen):
            q, seen = q_and_seen
            return self._tile(q, k, seen)

        parts = jax.tree.map(lambda x: x.reshape(-1, size, *x.shape[1:]), (q, seen))
        return jax.lax.map(part, parts).reshape(length, keys)

    def _tile(self, q, k, seen):
        if not self.rule.is_pairwise:
            out = self.rule.of_head(self.heads).tile(_bare(q), _bare(k), seen)
            return differentiable_in_units(out, self.factor)
        return pairs_of(self.pair, q, k, seen)

    def dropped(self, dtype: Any) -> jax.Array | None:
        """Returns the constant that `tile` drops, [1, 1, N], for coordinates of a dtype."""
        if self.horizon is None:
            return None

        def far(heads):
            return dataclasses.replace(self, heads=heads)._far(dtype)

        return self.factor * over_heads(far, self.heads)[None, None]

    def _number(self, q, k):
        traced = self.function
        pair = pair_of if traced is None else functools.partial(traced, self.captured)
        return pair(self.rule, self.heads, _bare(q), _bare(k))

    def _far(self, dtype):
        distance, zero = jnp.asarray(self.horizon, dtype), jnp.zeros((), dtype)
        return self._number(*(Tokens(None, x, None) for x in (distance, zero)))


def pair_of(rule: Any, heads: Any, q: Tokens, k: Tokens) -> jax.Array:
    """Returns the number of one query and one key, of a rule with the arrays of one head."""
    return rule.of_head(heads).logit(q, k).astype(jnp.float32)


def pairs_of(pair: Callable, q: Tokens, k: Tokens, seen: jax.Array | None) -> jax.Array:
    """Returns `pair` of all pairs [Q, K]; pairs that are not in `seen` may get any number."""
    if seen is None:
        return jax.vmap(jax.vmap(pair, (None, 0)), (0, None))(q, k)
    return jax.vmap(jax.vmap(pair))(*of_seen_pairs(seen, q, k))


def _bare(tokens: Tokens) -> Tokens:
    """Returns tokens as rules read them."""
    return tokens._replace(slots=None)


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class AllPairs:
    """An array of all pairs [B or 1, N or 1, T, S], whose tiles backends read, and a factor."""

    pairs: jax.Array
    factor: float = dataclasses.field(metadata=STATIC)


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True, kw_only=True)
class DotTerm(Term):
    """The features of the query or key, dot a vector of the distance.

    Distances are query from key, or key from query for features of keys.

    Attributes:
      vectors: a table of the vectors, float32 [N or 1, R, F], or None for a strip of them.
      far: the vector beyond the horizon for features of keys, float32 [N or 1, F], or None.
      of_keys: whether features belong to keys.
      distances: of the table. None: there is no table, and tiles get a strip of vectors.
      horizon: beyond it a query adds nothing (its constant is dropped), and a key one number.
    """

    vectors: Any
    far: Any
    of_keys: bool = dataclasses.field(metadata=STATIC)
    distances: DistanceRange | None = dataclasses.field(metadata=STATIC)

    gathers: ClassVar[bool] = True
    by_head: ClassVar[tuple[str, ...]] = ("vectors", "far")

    @property
    def has_interior(self):
        return self.of_keys

    def pair(self, q, k):
        return None

    def tile(self, strip, q, k, seen=None, *, in_vjp):
        # The tokens with the features are in the place of the queries.
        tokens, others = (k, q) if self.of_keys else (q, k)
        if self.distances is None:
            vectors = strip[:, ::-1] if self.of_keys else strip
            out = strip_tile(tokens.features, vectors, others.slots.shape[0], in_vjp=in_vjp)
            out = out.T if self.of_keys else out
        else:
            table = _products(tokens.features, self.vectors, transposed=self.of_keys)
            options = {"transposed": self.of_keys, "in_vjp": in_vjp}
            out = table_tile(table, tokens, others, self.distances, **options)
        return self.factor * out

    def interior(self, q, k):
        if not self.of_keys:
            return None
        out = _products(k.features, self.far[None], transposed=True)
        return self.factor * out


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class ValueTable:
    """A table on the values, for one head: [R, V] inside a tile, [N, R, V] outside.

    Attributes:
      table: float32, per distance or per bucket.
      distances: of the table, whose last value is zero; None: `bucket` returns the entry.
      bucket: `bucket(q, k) -> int32`.
      captured: arrays that a traced `bucket` reads.
    """

    table: jax.Array
    distances: DistanceRange | None = dataclasses.field(metadata=STATIC)
    bucket: Callable = dataclasses.field(metadata=STATIC)
    captured: tuple[jax.Array, ...] = ()

    def traced(self, q: Any, k: Any) -> Self:
        """Returns the table with its bucket function traced, for types of two coordinates."""
        if self.distances is not None:
            return self
        bucket, captured = trace_once(self.bucket, q, k)
        return dataclasses.replace(self, bucket=bucket, captured=captured)

    @property
    def horizon(self) -> int | None:
        """The distance from which on nothing is added, or None."""
        return None if self.distances is None else self.distances.high

    def spread(
        self, entries: jax.Array, q: Tokens, k: Tokens, *, in_vjp: bool = False
    ) -> jax.Array:
        """Expands [Q, R] to [Q, K]."""
        if self.distances is not None:
            return table_tile(entries, q, k, self.distances, transposed=False, in_vjp=in_vjp)
        bucket = with_captured(self.bucket, self.captured)
        of_pairs = jax.vmap(jax.vmap(bucket, (None, 0)), (0, None))
        return gather_tile(entries, of_pairs(q.coordinates, k.coordinates), transposed=False)

    def collect(self, tile: jax.Array, q: Tokens, k: Tokens) -> jax.Array:
        """Sums [Q, K] to [Q, R] per entry, the transpose of `spread`."""
        shape = tile.shape[0], self.table.shape[0]

        def spread(entries):
            return self.spread(entries, q, k, in_vjp=True)

        return jax.vjp(spread, jax.lax.full_like(tile, 0.0, shape=shape))[1](tile)[0]


def vmap_rows_and_heads(f: Callable, *arguments: Any) -> jax.Array:
    """Returns `f` for all rows and heads, [B or 1, N or 1, ...].

    Leaves of the arguments are [B or 1, N or 1, ...]. Axes of length one are not mapped over, which
    would double the time of FIRE's gradient.
    """
    return _vmap_leading(functools.partial(_vmap_leading, f), *arguments)


def _vmap_leading(f: Callable, *arguments: Any) -> jax.Array:
    """Vmaps over the leading axis of the leaves where it is longer than one."""
    axes = jax.tree.map(lambda x: None if x.shape[0] == 1 else 0, arguments)
    arguments = jax.tree.map(lambda x: x[0] if x.shape[0] == 1 else x, arguments)
    if not jax.tree.leaves(axes):
        return f(*arguments)[None]
    return jax.vmap(f, axes)(*arguments)


def over_heads(function: Callable, heads: Any) -> jax.Array:
    """Returns `function` of every head's slice, [N, ...]; [1, ...] where heads share it."""
    if jax.tree.leaves(heads):
        return jax.vmap(function)(heads)
    return function(heads)[None]


def table_tile(
    table: jax.Array,
    q: Tokens,
    k: Tokens,
    distances: DistanceRange,
    *,
    transposed: bool,
    in_vjp: bool,
) -> jax.Array:
    """Returns the tile of a table [Q, R], or [R, Q] transposed."""
    if distances.by_slot:
        spread = slot_tile_vjp if in_vjp else slot_tile
        return spread(table, q.slots, k.slots, distances, transposed)
    entries = distances.entries(q.coordinates, k.coordinates, transposed)
    return gather_tile(table, entries, transposed)


def _products(tokens: jax.Array, vectors: jax.Array, *, transposed: bool) -> jax.Array:
    """Returns the dot products of [Q, F] and [R, F], float32 [Q, R], or [R, Q] transposed."""
    tokens = tokens.astype(jnp.float32)
    form, pair = (
        ("rf,qf->rq", (vectors, tokens)) if transposed else ("qf,rf->qr", (tokens, vectors))
    )
    return jnp.einsum(form, *pair, precision="highest")


def strip_tile(tokens: jax.Array, vectors: jax.Array, count: int, *, in_vjp: bool) -> jax.Array:
    """Returns the dot products of tokens and the vectors of their distances, float32 [Q, K].

    Args:
      tokens: [Q, F].
      vectors: [F, Q + K - 1], by ascending distance of the token from the others.
      count: K.
      in_vjp: as for `Term.tile`.
    """
    products = _strip_products_vjp if in_vjp else _strip_products
    length, parts = tokens.shape[0], []
    # A part of the tokens needs the distances of its own pairs alone.
    for start in range(0, length, _PART):
        part = tokens[start : start + _PART].astype(jnp.float32)
        near = vectors[:, start : start + part.shape[0] + count - 1]
        parts.append(_skewed(products(part, near[:, ::-1]), count))
    return jnp.concatenate(parts)


def _strip_products(tokens: jax.Array, vectors: jax.Array) -> jax.Array:
    """Returns the products of [Q, F] and [F, R]."""
    return jnp.einsum("qf,fr->qr", tokens, vectors, precision="highest")


def _strip_products_forward(tokens, vectors):
    return _strip_products(tokens, vectors), (tokens, vectors)


def _strip_products_backward(saved, products):
    tokens, vectors = saved
    d_tokens = jnp.einsum("qr,fr->qf", products, vectors, precision="highest")
    # Autodiff computes [R, F], which takes longer on CPU, and transposes it.
    return d_tokens, jnp.einsum("qf,qr->fr", tokens, products, precision="highest")


_strip_products_vjp = jax.custom_vjp(_strip_products)
_strip_products_vjp.defvjp(_strip_products_forward, _strip_products_backward)


def _skewed(table: jax.Array, columns: int) -> jax.Array:
    """Returns [R, columns] of [R, R + columns - 1]: row r from column R - 1 - r on.

    In rows that are read as shorter by one, each begins one column before the row above it. They
    are written out: XLA on CPU would fuse them with their uses and divide indices per number.
    """
    rows, width = table.shape
    if rows == 1:
        return table
    flat = table.reshape(-1)[rows - 1 : rows - 1 + rows * (width - 1)]
    return jax.lax.optimization_barrier(flat.reshape(rows, width - 1))[:, :columns]


def gather_tile(table: jax.Array, entries: jax.Array, transposed: bool) -> jax.Array:
    """Returns the tile `table[query, entries[query, key]]`.

    Args:
      table: [Q, R], or [R, Q] transposed.
      entries: int32 [Q, K], or [K, Q] transposed, in [0, R).
      transposed: whether to return [K, Q].
    """
    return jnp.take_along_axis(table, entries, 0 if transposed else 1, mode="clip")


def slot_tile(
    table: jax.Array,
    q_slots: jax.Array,
    k_slots: jax.Array,
    distances: DistanceRange,
    transposed: bool,
) -> jax.Array:
    """Returns `gather_tile` for slots that grow by one.

    No two keys then have the same distance from a query, so that the cotangent of the table is a
    gather; `gather_tile` alone has a scatter, which is many times slower.

    Args:
      table: [Q, R], or [R, Q] transposed.
      q_slots, k_slots: int32 [Q], [K], consecutive.
      distances: of the table.
      transposed: whether to return [K, Q].
    """
    return gather_tile(table, distances.entries(q_slots, k_slots, transposed), transposed)


def _slot_forward(table, q_slots, k_slots, distances, transposed):
    return slot_tile(table, q_slots, k_slots, distances, transposed), (q_slots, k_slots)


def _slot_backward(distances, transposed, slots, tile):
    q_slots, k_slots = slots
    axis = 0 if transposed else 1
    entries = jnp.arange(distances.size, dtype=jnp.int32)
    # The one key at each distance from each query.
    keys = _distances(q_slots - k_slots[:1] - distances.low, entries, transposed)
    last = k_slots.shape[0] - 1
    out = gather_tile(tile, jnp.clip(keys, 0, last), transposed)
    out = jnp.where((keys >= 0) & (keys <= last), out, 0.0)
    of_pairs = _distances(q_slots, k_slots, transposed)
    entries = jnp.expand_dims(entries, 1 - axis)
    for is_open, entry, beyond in (
        (distances.open_low, 0, of_pairs < distances.low),
        (distances.open_high, distances.size - 1, of_pairs > distances.high),
    ):
        if is_open:
            total = jnp.where(beyond, tile, 0.0).sum(axis, keepdims=True)
            out += jnp.where(entries == entry, total, 0.0)
    return out, None, None


slot_tile_vjp = jax.custom_vjp(slot_tile, nondiff_argnums=(3, 4))
slot_tile_vjp.defvjp(_slot_forward, _slot_backward)


def _distances(q, k, transposed):
    """Returns q - k for [Q] and [K], [Q, K], or [K, Q] transposed."""
    return q[None, :] - k[:, None] if transposed else q[:, None] - k[None, :]
