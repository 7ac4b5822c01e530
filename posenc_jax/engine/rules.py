"""Rules: terms that positions and content add to logits and values.

Each is written for one head, one query and one key, and serves every implementation of
attention. Rules are pytrees: arrays are leaves, and the functions that read them are static. A
function is one of a module or a frozen dataclass with `__call__`; a lambda is another function in
each call, which compiles again outside of `jit`.

    LogitBias        a number per pair of coordinates               ALiBi, T5, FIRE
    ContentBias      a number per pair, from features too           GRAPE-A
    DotBias          features dot a vector of the distance          Shaw, DeBERTa, Inkling
    SeparableBias    a number per query plus a number per key       FoX
    DenseBias        an array of all pairs                          pair biases
    LogitsTransform  a function of a query's complete logit row     CoPE, stick-breaking, PaTH
    ValueBias        a vector per pair, added to the values         Shaw
"""

import dataclasses
import functools
import inspect
import itertools
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.core import Tracer

from posenc_jax.checks import coordinate_values, require
from posenc_jax.engine.rule import (
    NO_BOUNDS,
    Rule,
    SimpleRule,
    Sizes,
    added_logits,
    logit_of,
    shapes_of,
)
from posenc_jax.engine.simplified import AllPairs, Simplified, Term
from posenc_jax.engine.tables import (
    DistanceRange,
    ValueTable,
    dot_products,
    strip_tile,
    table_tile,
)
from posenc_jax.engine.tokens import (
    STATIC,
    Tokens,
    in_reach,
    over_heads,
)
from posenc_jax.engine.tracing import may_be_infinite


class _FeatureRule(Rule):
    """A rule with the fields `q_features` and `k_features`."""

    def with_features(self: Any, q_features, k_features):
        return dataclasses.replace(self, q_features=q_features, k_features=k_features)


def _check_function(
    rule: Rule,
    field: str,
    signature: str,
    arguments: tuple,
    sizes: Sizes,
    shape: tuple | None = (),
) -> Any:
    """Returns the type of a rule's function of `arguments`; raises unless it has this shape.

    Args:
      rule: the rule.
      field: the field with the function.
      signature: its arguments and result, as messages show them.
      arguments: types of the arguments.
      sizes: of the call.
      shape: the shape of the result. None: any.
    """
    function, qualified_name = getattr(rule, field), f"{type(rule).__name__}.{field}"
    name = getattr(function, "__name__", repr(function))
    try:
        inspect.signature(function).bind(*arguments)
    except TypeError as error:
        raise TypeError(
            f"attention: {qualified_name} must be {field}{signature}, got {name}: {error}."
        ) from None
    axes = f" for coordinates of {sizes.axes} axes" if sizes.axes else ""
    result = "arrays" if shape is None else shape or "one number"
    message = f"attention: {qualified_name} {name} must return {result}{axes}"
    try:
        out = jax.eval_shape(function, *arguments)
    except Exception as error:
        one = ", of one head, one query and one key" if shape == () else ""
        error.add_note(
            f"{qualified_name} is called as {field}{signature}{one}; None and () stand for arrays "
            "that the rule was not given."
        )
        of_shapes = isinstance(error, TypeError | ValueError | IndexError)
        if not of_shapes or not sizes.axes or isinstance(error, jax.errors.JAXTypeError):
            raise
        raise ValueError(f"{message}: {error}") from error
    got = getattr(out, "shape", None)
    require(
        shape is None or got == shape,
        f"{message}, got {'no array' if got is None else f'shape {got}'}.",
    )
    if shape is not None and not any(
        jnp.issubdtype(out.dtype, kind) for kind in (jnp.floating, jnp.integer)
    ):
        hint = "; a rule hides keys by jnp.where(seen, 0.0, -jnp.inf)" * (out.dtype == bool)
        raise ValueError(f"{message}, got dtype {out.dtype}{hint}.")
    return out


def _coordinates(sizes: Sizes, *lead: int) -> jax.ShapeDtypeStruct:
    return jax.ShapeDtypeStruct((*lead, sizes.axes) if sizes.axes else lead, sizes.dtype)


@dataclasses.dataclass(frozen=True)
class _OnCoordinates:
    """A function whose last two arguments, coordinates of a query and a key, are transformed.

    The last argument has the coordinates of all keys if `all_keys` is set.
    """

    rule: Callable
    transform: Callable
    all_keys: bool = False

    def __call__(self, *arguments):
        *others, q, k = arguments
        of_keys = jax.vmap(self.transform) if self.all_keys else self.transform
        return self.rule(*others, self.transform(q), of_keys(k))


@dataclasses.dataclass(frozen=True)
class _InReach:
    """A rule on distances, where int32 distances may overflow."""

    rule: Callable

    def __call__(self, shared, head, q, k):
        return self.rule(shared, head, q, in_reach(q, k))


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class LogitBias(Rule):
    """A number added to each logit, as a rule on two coordinates.

    Attributes:
      rule: `rule(shared, head, q, k) -> scalar`, written for one head, one query and one
        key: a module-level function or a frozen dataclass with `__call__`. `q` and `k`
        are scalars, or [A] where coordinates have A axes. -inf hides the key; NaN in k and v
        behind it is hidden by `mask`, segment ids or a `DenseBias`. A finite number, however low,
        hides nothing: a query whose keys all get -1e9 has the mean of their values. At pairs that
        are hidden the rule may be NaN or infinite, as log(q - k) is at later keys.
      heads: pytree of arrays [N, ...]; the rule gets one head's slice. Or None.
      shared: pytree of arrays that all heads share.
      relative: whether the rule depends on q - k alone. It is then evaluated once per
        distance where coordinates are contiguous; if the claim is false, results are wrong
        wherever that happens (`posenc_jax.testing.check` finds it).
      bounds: `(low, high)`; the rule of a relative bias is constant for q - k <= low and
        for q - k >= high. None for a side means no bound.
      scaled: whether the term is multiplied by the logit scale, as q . k is.
      drop_far: whether the number at `high` may be subtracted from all, which leaves the softmax
        as it is, so that tiles of far keys need no rule. It must be finite and of the size of
        other logits: near numbers are rounded to its digits, and -1e9 leaves none.
    """

    rule: Callable = dataclasses.field(metadata=STATIC)
    heads: Any = None
    shared: Any = ()
    relative: bool = dataclasses.field(default=False, metadata=STATIC)
    bounds: tuple[int | None, int | None] = dataclasses.field(default=NO_BOUNDS, metadata=STATIC)
    scaled: bool = dataclasses.field(default=False, metadata=STATIC)
    drop_far: bool = dataclasses.field(default=False, metadata=STATIC)

    @property
    def of_pair(self) -> Callable:
        """The rule for any pair; distances beyond int32 count as 2^31 - 1."""
        return _InReach(self.rule) if self.relative else self.rule

    def logit(self, q, k):
        out = self.of_pair(self.shared, self.heads, q.coordinates, k.coordinates)
        return out.astype(jnp.float32)

    def on(self, transform):
        rule = _OnCoordinates(self.of_pair, transform)
        return dataclasses.replace(self, rule=rule, relative=False, bounds=NO_BOUNDS)

    def check(self, sizes):
        super().check(sizes)
        token = _coordinates(sizes)
        arguments = shapes_of(self.shared, 0), shapes_of(self.heads, 1), token, token
        _check_function(self, "rule", "(shared, head, q, k) -> scalar", arguments, sizes)

    def simplify(self, context):
        by_distance = self.relative and not context.axes
        high = self.bounds[1] if self.drop_far else None
        if by_distance and context.contiguous:
            factor = context.scale if self.scaled else 1.0
            seen = context.seen if self.careful(context.token) else None
            values = functools.partial(
                self._of_distances, factor=factor, dtype=context.dtype, seen=seen
            )
            return Simplified(by_distance=values, high=context.horizon(high, by_slot=True))
        term, horizon = self._term(context), None
        if by_distance and context.drop_constants:
            horizon = context.horizon(high, by_slot=False)
        if horizon is None:
            return Simplified(term)
        rule: Any = _LessFar(self.without_heads(), horizon, self.heads)
        far = over_heads(lambda head: rule.of_head(head).far(context.dtype), self.heads)
        term = dataclasses.replace(term, rule=rule, horizon=horizon)
        return Simplified(term, dropped=term.factor * far[None, None])

    def _of_distances(
        self, first: int, stop: int, factor: float, dtype: Any, seen: Callable | None
    ) -> jax.Array:
        """Returns float32 [N or 1, stop - first]."""
        over = jax.vmap(self.rule, (None, None, 0, None))
        zero = jnp.zeros((), dtype)

        def evaluate(distances):
            distances = distances if seen is None else seen(distances)
            distances = distances.astype(dtype)
            out = over_heads(lambda head: over(self.shared, head, distances, zero), self.heads)
            return factor * out.astype(jnp.float32)

        return _between(self.bounds, evaluate, first, stop)

    def dense(self, q_positions: jax.Array, k_positions: jax.Array) -> jax.Array:
        """Returns the bias as an array, for any other attention.

        Args:
          q_positions: integers or float32 [T], [B, T], or [A, B, T] for A axes.
          k_positions: [S], [B, S] or [A, B, S].

        Returns:
          float32 [N, T, S], or [B, N, T, S] where positions have a batch axis. N is 1 without
          `heads`.

        Raises:
          ValueError: for shapes that do not go together, a rule that does not read them, and known
            distances beyond int32. Under `jit` those count as 2^31 - 1 in rules on distances.
          TypeError: for positions of another dtype.
        """
        caller = "LogitBias.dense"
        q = coordinate_values(caller, q_positions, "q_positions")
        k = coordinate_values(caller, k_positions, "k_positions")
        require(
            q.ndim in (1, 2, 3) and q.shape[:-1] == k.shape[:-1],
            f"{caller}: q_positions and k_positions must be [T] and [S], [B, T] and [B, S], or "
            f"[A, B, T] and [A, B, S], got {q.shape} and {k.shape}.",
        )
        known = [x for x in (q, k) if x.size and x.dtype == jnp.int32 and not isinstance(x, Tracer)]
        for high, low in itertools.permutations([np.asarray(x, np.int64) for x in known], 2):
            reach = high.max(-1) - low.min(-1)
            require(
                bool(np.all(reach < 2**31)),
                f"{caller}: distances must fit int32, got positions from {np.min(low)} to "
                f"{np.max(high)}.",
            )
        return self._dense(q, k)

    @functools.partial(jax.jit, inline=True)  # One program to compile, not one an operation.
    def _dense(self, q: jax.Array, k: jax.Array) -> jax.Array:
        axes, arrays = q.shape[0] if q.ndim == 3 else 0, jax.tree.leaves(self.heads)
        heads = arrays[0].shape[0] if arrays else 1
        dtype = jnp.int32 if q.dtype == k.dtype == jnp.int32 else jnp.float32
        self.check(Sizes(1, q.shape[-1], k.shape[-1], heads, heads, 0, axes, dtype))
        rows = (jnp.moveaxis(x, 0, -1) if axes else jnp.atleast_2d(x) for x in (q, k))
        out: Any = added_logits(self, *rows)
        return out[0] if q.ndim == 1 else out


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class _LessFar(SimpleRule):
    """A bias minus its number at a distance, from which on it is constant."""

    rule: LogitBias  # Without `heads`.
    horizon: int = dataclasses.field(metadata=STATIC)
    heads: Any = None

    def far(self, dtype: Any) -> jax.Array:
        """Returns the number of one head at the horizon, for coordinates of a dtype."""
        distance, zero = jnp.asarray(self.horizon, dtype), jnp.zeros((), dtype)
        return logit_of(self.rule, self.heads, *(Tokens(None, x, None) for x in (distance, zero)))

    def logit(self, q, k):
        return logit_of(self.rule, self.heads, q, k) - self.far(q.coordinates.dtype)


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class ContentBias(_FeatureRule):
    """A number added to each logit, from features of query and key and their coordinates.

    Attributes:
      rule: `rule(shared, head, q_feature, k_feature, q, k) -> scalar`, as for `LogitBias`,
        with one query's and one key's slice of the features of that head.
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
        return dataclasses.replace(self, rule=_OnCoordinates(self.rule, transform))

    def check(self, sizes):
        super().check(sizes)
        require(
            bool(jax.tree.leaves((self.q_features, self.k_features))),
            "attention: ContentBias has neither q_features nor k_features; compute them with the "
            "scheme's `features`.",
        )
        token = _coordinates(sizes)
        features = shapes_of(self.q_features, 3), shapes_of(self.k_features, 3)
        arguments = shapes_of(self.shared, 0), shapes_of(self.heads, 1), *features, token, token
        signature = "(shared, head, q_feature, k_feature, q, k) -> scalar"
        _check_function(self, "rule", signature, arguments, sizes)

    def logit(self, q, k):
        coordinates = q.coordinates, k.coordinates
        out = self.rule(self.shared, self.heads, q.features, k.features, *coordinates)
        return out.astype(jnp.float32)


@dataclasses.dataclass(frozen=True)
class _VectorOfPair:
    """The rule of a DotBias for one pair."""

    vector: Callable

    def __call__(self, shared, head, row, col, q, k):
        features = (col if row is None else row).astype(jnp.float32)
        return jnp.dot(features, self.vector(shared, head, q - in_reach(q, k)), precision="highest")


def _between(
    bounds: tuple[int | None, int | None], evaluate: Callable, first: int, stop: int
) -> jax.Array:
    """Returns `evaluate(distances)`, [N, R, ...], for the distances from `first` to before `stop`.

    A rule is evaluated between its bounds only, and repeated beyond: the gradient of a table is
    a scatter, which takes a TPU microseconds per distance.
    """
    low, high = bounds
    start = first if low is None else min(max(first, low), stop - 1)
    end = stop if high is None else max(min(stop, high + 1), start + 1)
    out = evaluate(jnp.arange(start, end, dtype=jnp.int32))

    def repeated(x, count):
        return jnp.broadcast_to(x, (x.shape[0], count, *x.shape[2:]))

    before, after = repeated(out[:, :1], start - first), repeated(out[:, -1:], stop - end)
    return jnp.concatenate([before, out, after], 1)


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class DotBias(_FeatureRule):
    """A number added to each logit: features of the query or key, dot a vector of the distance.

    Distances are few: their vectors are computed once and the term is a matrix product.

    Attributes:
      vector: `vector(shared, head, distance) -> [F]`, for one head and one distance q - k:
        a module-level function or a frozen dataclass with `__call__`.
      heads: pytree of arrays [N, ...], or None where all heads have the same vectors.
      shared: pytree of arrays that all heads share, or None.
      q_features: [B, T, N, F], or None.
      k_features: [B, S, K or N, F], or None; exactly one of the two is given.
      bounds: as for `LogitBias`.
      scaled: as for `LogitBias`.
      pair: an equal `ContentBias.rule`, used where distances have no bounds and coordinates are
        not contiguous. Default: `vector` is evaluated for every pair there.
    """

    vector: Callable = dataclasses.field(metadata=STATIC)
    heads: Any = None
    shared: Any = None
    q_features: jax.Array | None = None
    k_features: jax.Array | None = None
    bounds: tuple[int | None, int | None] = dataclasses.field(default=NO_BOUNDS, metadata=STATIC)
    scaled: bool = dataclasses.field(default=False, metadata=STATIC)
    pair: Callable | None = dataclasses.field(default=None, metadata=STATIC)

    def on(self, transform):
        return self.by_pair().on(transform)

    def check(self, sizes):
        super().check(sizes)
        require(
            (self.q_features is None) != (self.k_features is None),
            "attention: a DotBias has either q_features or k_features, got "
            f"{'neither' if self.q_features is None else 'both'}.",
        )
        features: Any = self.k_features if self.q_features is None else self.q_features
        distance = jax.ShapeDtypeStruct((), sizes.dtype)
        arguments = shapes_of(self.shared, 0), shapes_of(self.heads, 1), distance
        signature = "(shared, head, distance) -> [F]"
        _check_function(self, "vector", signature, arguments, sizes, None)
        vectors = jax.eval_shape(self.vectors, jax.ShapeDtypeStruct((1,), sizes.dtype))
        require(
            features.ndim == 4 and vectors.shape[2:] == features.shape[3:],
            f"attention: the vectors of a DotBias have shape {vectors.shape[2:]} per distance and "
            f"{features.shape} of tokens; the last axes must be equal.",
        )
        if sizes.axes:
            self.by_pair().check(sizes)

    def vectors(self, distances: jax.Array) -> jax.Array:
        """Returns float32 [N, R, F] for distances [R]; [1, R, F] where heads share them."""
        over = jax.vmap(self.vector, (None, None, 0))
        out = over_heads(lambda head: over(self.shared, head, distances), self.heads)
        return out.astype(jnp.float32)

    def by_pair(self) -> ContentBias:
        """Returns an equal rule that is evaluated for every pair."""
        rule = self.pair or _VectorOfPair(self.vector)
        features = self.q_features, self.k_features
        return ContentBias(rule, self.heads, self.shared, *features, self.scaled)

    def simplify(self, context):
        if context.axes or not context.integer:
            return self.by_pair().simplify(context)
        of_keys, by_slot = self.q_features is None, context.contiguous
        careful = self.careful(context.token)
        if careful and not by_slot:  # Which distances are seen is not known.
            return self.by_pair().simplify(context)
        # Beyond the horizon a key adds one number, and a query a constant that may be dropped.
        horizon = None
        if of_keys or context.drop_constants:
            horizon = context.horizon(self.bounds[1], by_slot)
        table = context.table_range(
            self.bounds, by_slot=by_slot, drop_high=horizon is not None and not of_keys
        )
        if by_slot and table is not None and table.size > context.max_table:
            table = None  # A strip is smaller on each tile.
        if table is None and not by_slot:
            return self.by_pair().simplify(context)
        seen = context.seen if careful else None
        return self._table_dot(context.scale if self.scaled else 1.0, horizon, table, seen)

    def careful(self, token):
        distance = jax.ShapeDtypeStruct((), jnp.int32)
        return may_be_infinite(
            self.vector, shapes_of(self.shared, 0), shapes_of(self.heads, 1), distance
        )

    def _table_dot(
        self,
        factor: float,
        horizon: int | None,
        distances: DistanceRange | None,
        seen: Callable | None,
    ) -> Simplified:
        """Returns products with a table of the vectors at some distances, or with a strip.

        Args:
          factor: the factor on the term.
          horizon: the distance from which on the vectors are constant, or None.
          distances: the distances of the table; None: a strip, one vector per distance.
          seen: as in a `Context`, or None for vectors that are finite anywhere.
        """
        of_keys, table, dropped = self.q_features is None, None, None
        far: Any = None

        def evaluate(distances):
            return self.vectors(distances if seen is None else seen(distances))

        if horizon is not None:
            far = evaluate(jnp.full((1,), horizon, jnp.int32))
        drop = far is not None and not of_keys

        def vectors(first, stop):
            out = _between(self.bounds, evaluate, first, stop)
            return out - far if drop else out

        if distances is not None:
            table = vectors(distances.low, distances.high + 1)
            if of_keys:
                distances, table = distances.mirrored(), table[:, ::-1]
        if drop:
            features: Any = jnp.asarray(self.q_features, jnp.float32)
            far = jnp.broadcast_to(far, (features.shape[2], *far.shape[1:]))
            dropped = factor * jnp.einsum("btnf,nrf->btn", features, far, precision="highest")
        term = Term(
            rule=TableDot(of_keys, distances, table),
            interior=_FarKeys(far[:, 0]) if of_keys and far is not None else None,
            factor=factor,
            horizon=horizon,
        )
        return Simplified(term, strip=vectors if distances is None else None, dropped=dropped)

    def tile(self, q, k, seen=None):
        (low, high), x = self.bounds, q.coordinates
        if low is None or high is None or x.ndim > 1 or x.dtype != jnp.int32 or seen is not None:
            return self.by_pair().tile(q, k, seen)
        over = jax.vmap(self.vector, (None, None, 0))
        vectors = over(self.shared, self.heads, jnp.arange(low, high + 1, dtype=jnp.int32))
        vectors = vectors.astype(jnp.float32)
        distances = DistanceRange(low, high, by_slot=False, open_low=True, open_high=True)
        of_keys = q.features is None
        if of_keys and len(x) == 1:  # A vector for each key, not all for each.
            entry = distances.entries(x, k.coordinates, transposed=False)
            return (k.features.astype(jnp.float32) * vectors[entry[0]]).sum(-1)[None]
        if of_keys:
            distances, vectors = distances.mirrored(), vectors[::-1]
        return TableDot(of_keys, distances, vectors).tile(q, k)


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class TableDot(SimpleRule):
    """The features of the query or key, dot a vector of the distance from a table.

    Distances are query from key, or key from query for features of keys.

    Attributes:
      of_keys: whether features belong to keys.
      distances: of the table.
      heads: the vectors, float32 [N or 1, R, F]. Without `distances` each tile gets the vectors of
        its own distances, ascending, [N or 1, F, Q + K - 1].
    """

    of_keys: bool = dataclasses.field(metadata=STATIC)
    distances: DistanceRange | None = dataclasses.field(metadata=STATIC)
    heads: Any = None

    any_value = False

    def tile(self, q, k, seen=None, *, in_vjp=False):
        # The tokens with the features are in the place of the queries.
        tokens, others = (k, q) if self.of_keys else (q, k)
        if self.distances is None:
            vectors = self.heads[:, ::-1] if self.of_keys else self.heads
            out = strip_tile(tokens.features, vectors, others.slots.shape[0], in_vjp=in_vjp)
            return out.T if self.of_keys else out
        table = dot_products(tokens.features, self.heads, transposed=self.of_keys)
        options = {"transposed": self.of_keys, "in_vjp": in_vjp}
        return table_tile(table, tokens, others, self.distances, **options)


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class _FarKeys(SimpleRule):
    """The features of the key, dot one vector, float32 [N or 1, F]."""

    heads: Any = None

    any_value = False

    def tile(self, q, k, seen=None):
        return dot_products(k.features, self.heads[None], transposed=True)


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class SeparableBias(_FeatureRule):
    """A number per query plus a number per key, added to each logit.

    Attributes:
      q_features: [B, T, N].
      k_features: [B, S, K or N].
      symmetric: the term is `-abs(sum)`. For a key in an earlier slot than the query, the sum must
        not be positive: under a causal mask with contiguous positions, tiles add the sum itself.
      scaled: as for `LogitBias`.
    """

    q_features: Any = None
    k_features: Any = None
    symmetric: bool = dataclasses.field(default=False, metadata=STATIC)
    scaled: bool = dataclasses.field(default=False, metadata=STATIC)

    any_value = False

    def on(self, transform):
        return self

    def check(self, sizes):
        super().check(sizes)
        for name in ("q_features", "k_features"):
            x = getattr(self, name)
            require(
                jnp.ndim(x) == 3,
                f"attention: SeparableBias.{name} must be one number per token and head, [B, "
                f"{'T, N' if name[0] == 'q' else 'S, K or N'}], got {jnp.shape(x)}.",
            )

    def simplify(self, context):
        # Tokens at equal positions, such as drafts in a tree, see keys in later slots.
        symmetric = self.symmetric and not (context.is_causal and context.contiguous)
        return Simplified(dataclasses.replace(self, symmetric=symmetric)._term(context))

    def logit(self, q, k):
        out = q.features.astype(jnp.float32) + k.features.astype(jnp.float32)
        return -jnp.abs(out) if self.symmetric else out


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class DenseBias(Rule):
    """An array that is added to the logits, such as a pair bias from a network.

    It belongs to slots, as `mask` does, not to coordinates. Attention in tiles reads one tile of
    it at a time; the bias and its gradient are the only arrays that grow with T x S. A bias that is
    a function of positions, or of features of query and key, takes less memory as one of the other
    rules.

    Attributes:
      pairs: [B or 1, N or 1, T, S], float. Entries of -inf hide a key, as `mask` does, with NaN or
        inf in its k, v and features if all queries have it hidden. Finite ones hide nothing, as in
        a `LogitBias`.
      scaled: as for `LogitBias`.

    >>> q = k = v = jnp.ones((1, 3, 2, 4))
    >>> bias = DenseBias(jnp.zeros((1, 2, 3, 3)))
    >>> pe.attention(q, k, v, rules=bias, is_causal=True).shape
    (1, 3, 2, 4)
    """

    pairs: jax.Array
    scaled: bool = dataclasses.field(default=False, metadata=STATIC)

    def on(self, transform):
        return self

    def with_pairs(self, pairs):
        return dataclasses.replace(self, pairs=pairs)

    def __post_init__(self):
        if isinstance(self.pairs, list | tuple):  # Of a pytree, it may be anything else.
            kind = type(self.pairs).__name__
            raise TypeError(
                f"DenseBias: pairs must be an array [B or 1, N or 1, T, S], got a {kind}."
            )

    def check(self, sizes):
        super().check(sizes)
        expected = sizes.batch, sizes.num_heads, sizes.length, sizes.keys
        shape = jnp.shape(self.pairs)
        fits = len(shape) == 4 and all(
            n == full or (n == 1 and axis < 2)
            for axis, (n, full) in enumerate(zip(shape, expected, strict=True))
        )
        require(
            fits,
            "attention: DenseBias.pairs must be [B or 1, N or 1, T, S] with B, N, T, S = "
            f"{expected}, got {shape}.",
        )
        if not jnp.issubdtype(self.pairs.dtype, jnp.floating):
            raise TypeError(
                f"attention: DenseBias.pairs must be floating, got {self.pairs.dtype}; a boolean "
                "array is a mask."
            )

    def simplify(self, context):
        factor = context.scale if self.scaled else 1.0
        return Simplified(pairs=AllPairs(self.pairs, factor))


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class LogitsTransform(_FeatureRule):
    """A function of a query's complete logit row, for rules that need all keys or all heads.

    It is applied to complete logits: scale, biases and softcap are in them.

    Attributes:
      rule: `rule(shared, heads, q_feature, k_features, logits, seen, q, k) -> [N, S]`, written
        for one query: `q_feature` leaves [N, ...]; `k_features` of all keys, leaves
        [S, N, ...]; `logits` float32 [N, S], 0 for keys that the query does not see; `seen`
        bool [N or 1, S]; `q` and `k` coordinates, a scalar and [S], or [A] and [S, A]. Keys of
        a segment are sorted by position. Results for keys that are not seen have no effect.
      heads: pytree of arrays [N, ...], or None.
      shared: pytree of arrays that all heads share, or None.
      q_features: pytree of arrays [B, T, N, ...] that belong to the queries, or None.
      k_features: pytree of arrays [B, S, K or N, ...] that belong to the keys, or None.
      expand: `expand(shared, heads, k_features) -> k_features`: computes, once for all queries,
        the `k_features` of the rule, of any shapes. Padding keys are zeros, and so are keys that
        `mask` hides from all queries of the call.
      normalized: whether weights are the softmax of the result. False: its exponential.
      reads_seen_only: whether the result for seen keys is the same without keys that are not
        seen, so that blocks of queries may leave these out: [N, S] has fewer keys then, and so
        have arrays per key.
    """

    rule: Callable = dataclasses.field(metadata=STATIC)
    heads: Any = None
    shared: Any = None
    q_features: Any = None
    k_features: Any = None
    expand: Callable | None = dataclasses.field(default=None, metadata=STATIC)
    normalized: bool = dataclasses.field(default=True, metadata=STATIC)
    reads_seen_only: bool = dataclasses.field(default=False, metadata=STATIC)

    whole_rows = True

    def on(self, transform):
        return dataclasses.replace(self, rule=_OnCoordinates(self.rule, transform, all_keys=True))

    def check(self, sizes):
        super().check(sizes)
        heads, keys = sizes.num_heads, sizes.keys
        k_features = jax.tree.map(
            lambda x: jax.ShapeDtypeStruct((keys, heads, *x.shape[3:]), x.dtype), self.k_features
        )
        logits = jax.ShapeDtypeStruct((heads, keys), jnp.float32)
        seen = jax.ShapeDtypeStruct((1, keys), bool)
        arrays = shapes_of(self.shared, 0), shapes_of(self.heads, 0), shapes_of(self.q_features, 2)
        if self.expand is not None:
            arguments = *arrays[:2], k_features
            signature = "(shared, heads, k_features) -> arrays"
            k_features = _check_function(self, "expand", signature, arguments, sizes, None)
        coordinates = _coordinates(sizes), _coordinates(sizes, keys)
        arguments = *arrays, k_features, logits, seen, *coordinates
        signature = "(shared, heads, q_feature, k_features, logits, seen, q, k) -> [N, S]"
        _check_function(self, "rule", signature, arguments, sizes, (heads, keys))

    def expanded(self):
        if self.expand is None:
            return self
        k_features = jax.vmap(self.expand, (None, None, 0))(
            self.shared, self.heads, self.k_features
        )
        return dataclasses.replace(self, k_features=k_features, expand=None)

    def transformed_logits(self, logits, seen, q_features, k_features, q, k):
        def of_query(q_feature, logits, seen, q):
            # A rule may be NaN at hidden keys, and 0 * NaN is NaN in its derivative.
            held = jnp.any(seen, 0)
            one = jnp.where(jnp.any(held), jnp.take(k, jnp.argmax(held), 0, mode="clip"), q)
            keys = jnp.where(held.reshape(-1, *(1,) * (k.ndim - 1)), k, one[None])
            return self.rule(self.shared, self.heads, q_feature, k_features, logits, seen, q, keys)

        return jax.vmap(of_query, (0, 1, 1, 0), 1)(q_features, logits, seen, q)


@dataclasses.dataclass(frozen=True)
class _InTable:
    """A bucket function, clipped to the rows of a table."""

    bucket: Callable
    size: int
    relative: bool

    def __call__(self, q: jax.Array, k: jax.Array) -> jax.Array:
        k = in_reach(q, k) if self.relative else k
        return jnp.clip(self.bucket(q, k), 0, self.size - 1)


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class ValueBias(Rule):
    """A vector added to each value, from a table over buckets of two coordinates.

    The output gains `sum_j p[i, j] * table[bucket(i, j)]`, which needs only the
    probability mass that falls into each bucket.

    Attributes:
      bucket: `bucket(q, k) -> int32 scalar` in [0, R), for one query and one key; those beyond
        are taken for the nearest bucket.
      table: [N, R, V].
      relative, bounds: as for `LogitBias`.
    """

    bucket: Callable = dataclasses.field(metadata=STATIC)
    table: jax.Array = dataclasses.field()
    relative: bool = dataclasses.field(default=False, metadata=STATIC)
    bounds: tuple[int | None, int | None] = dataclasses.field(default=NO_BOUNDS, metadata=STATIC)

    adds_values = True

    @property
    def _nearest(self) -> "_InTable":
        return _InTable(self.bucket, self.table.shape[1], self.relative)

    def on(self, transform):
        bucket = _OnCoordinates(self.bucket, transform)
        return dataclasses.replace(self, bucket=bucket, relative=False, bounds=NO_BOUNDS)

    def check(self, sizes):
        super().check(sizes)
        expected = (sizes.num_heads, self.table.shape[1], sizes.value_dim)
        require(
            self.table.shape == expected,
            f"attention: ValueBias.table must be [N, R, V] = {expected}, got {self.table.shape}.",
        )
        token = _coordinates(sizes)
        out = _check_function(self, "bucket", "(q, k) -> int32 scalar", (token, token), sizes)
        require(
            jnp.issubdtype(out.dtype, jnp.integer),
            f"attention: ValueBias.bucket must return an integer, got {out.dtype}.",
        )

    def simplify(self, context):
        table, span = self.table.astype(jnp.float32), None
        if self.relative:
            span = context.table_range(self.bounds, by_slot=context.contiguous, drop_high=True)
        if span is None:
            return Simplified(values=ValueTable(table, None, self._nearest))
        distances = jnp.arange(span.low, span.high + 1, dtype=jnp.int32)
        buckets = jax.vmap(self._nearest, (0, None))(distances, jnp.int32(0))
        table = jnp.take(table, buckets, axis=1, mode="clip")
        far = table[:, -1]
        values = ValueTable(table - far[:, None], span, self._nearest)
        return Simplified(values=values, far_value=far)

    def added_values(self, weights, q, k):
        buckets = jax.vmap(jax.vmap(self._nearest, (None, 0)), (0, None))(q, k)
        one_hot = jax.nn.one_hot(buckets, self.table.shape[1], dtype=jnp.float32)
        mass = jnp.einsum("nts,tsr->tnr", weights, one_hot, precision="highest")
        return jnp.einsum("tnr,nrv->tnv", mass, self.table, precision="highest")
