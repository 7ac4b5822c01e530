"""`Rule`: a term of attention, as data; its kinds are in `rules.py`.

Methods define the numbers of a rule: `logit` or `tile` of one row and head, `transformed_logits`,
and `added_values`. Backends evaluate what `Rule.simplify` returns: rules again, for a tile of one
head and row, after tables and constants were taken out of them.
"""

import abc
import dataclasses
from collections.abc import Callable, Mapping
from typing import Any, ClassVar, NamedTuple, Self

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import NamedSharding, PartitionSpec

from posenc_jax.checks import require
from posenc_jax.engine.simplified import Context, Simplified, Term
from posenc_jax.engine.tokens import (
    STATIC,
    Tokens,
    pairs_of,
    vmap_rows_and_heads,
)
from posenc_jax.engine.tracing import Traced, may_be_infinite, trace_once

NO_BOUNDS: tuple[int | None, int | None] = (None, None)


class Sizes(NamedTuple):
    """Sizes of an attention call: B, T, S, N, K, V; axes (0: none) and dtype of coordinates."""

    batch: int
    length: int
    keys: int
    num_heads: int
    kv_heads: int
    value_dim: int
    axes: int
    dtype: Any


class Rule(abc.ABC):
    """A term of attention, as data: arrays, and static functions that read them.

    A rule of your own is a pytree with `on` and `logit`, the number of one query and one key, or
    `tile`, the numbers of many pairs. Arrays in fields of other names are of all heads and tokens:

    >>> @jax.tree_util.register_dataclass
    ... @dataclasses.dataclass(frozen=True)
    ... class Slope(pe.Rule):
    ...     heads: jax.Array  # [N]
    ...
    ...     def on(self, transform):
    ...         return self
    ...
    ...     def logit(self, q, k):
    ...         return -self.heads * jnp.abs(q.coordinates - k.coordinates).astype(jnp.float32)
    >>> q = k = v = jnp.ones((1, 5, 2, 4))
    >>> pe.attention(q, k, v, rules=Slope(jnp.array([0.5, 0.25])), is_causal=True).shape
    (1, 5, 2, 4)

    Attributes:
      heads: pytree of arrays [N, ...], or None.
      shared: pytree of arrays that all heads share, or None.
      q_features: pytree of arrays [B, T, N, ...] that belong to the queries, or None.
      k_features: pytree of arrays [B, S, K or N, ...] that belong to the keys, or None.
      pairs: an array [B or 1, N or 1, T, S] that belongs to both, or None.
      scaled: whether the term is multiplied by the logit scale, as q . k is.
      whole_rows: whether the rule needs all logits of a query at once.
      adds_values: whether the rule adds to the values.
      bounds: `(low, high)`; distances beyond them are as the ends are. None: no bound.
      normalized: whether the weights are a softmax of the logits.
      reads_seen_only: of a rule on whole rows, see `LogitsTransform`.
    """

    heads: Any = None
    shared: Any = None
    q_features: Any = None
    k_features: Any = None
    pairs: Any = None
    scaled: bool = False
    bounds: tuple[int | None, int | None] = NO_BOUNDS
    whole_rows: bool = False
    adds_values: bool = False
    normalized: bool = True
    reads_seen_only: bool = False

    axes: ClassVar[Mapping[str, str]] = {
        "heads": "N",
        "shared": "",
        "q_features": "BTN",
        "k_features": "BSK",
        "pairs": "BNTS",
        "table": "N",
    }
    """The first axes of the arrays by field, by which meshes shard them."""

    any_value: ClassVar[bool] = True
    """Whether numbers may be of any size, infinite too."""

    @abc.abstractmethod
    def on(self, transform: Callable[[jax.Array], jax.Array]) -> Self:
        """Returns the rule reading `transform(coordinate)` for the coordinates of each token.

        Args:
          transform: a function of one token's coordinates, a scalar or [A]: a module-level
            function or a frozen dataclass with `__call__`.
        """

    def with_features(self, q_features: Any, k_features: Any) -> Self:
        """Returns the rule with other features; a rule without features returns itself."""
        return self

    def with_pairs(self, pairs: Any) -> Self:
        """Returns the rule with another array of pairs; a rule without one returns itself."""
        return self

    def check(self, sizes: Sizes) -> None:
        """Raises `ValueError` or `TypeError` unless the rule fits an attention call."""
        name, heads = type(self).__name__, sizes.num_heads
        if not (self.adds_logits or self.pairs is not None or self.whole_rows or self.adds_values):
            raise TypeError(f"attention: {name} adds nothing: it has no `logit` and no `tile`.")
        for leaf in jax.tree.leaves(self):
            if jnp.issubdtype(leaf.dtype, jnp.complexfloating):
                raise TypeError(
                    f"attention: arrays of a {name} must be real, got {leaf.dtype}; give real and "
                    "imaginary parts."
                )
        for leaf in jax.tree.leaves(self.heads):
            require(
                jnp.shape(leaf)[:1] == (heads,),
                f"attention: {name}.heads must be [N, ...] = ({heads}, ...), "
                f"got {jnp.shape(leaf)}.",
            )
        pair = isinstance(self.bounds, tuple) and len(self.bounds) == 2
        known = [x for x in self.bounds if x is not None] if pair else []
        require(
            pair and all(isinstance(x, int | np.integer) for x in known) and known == sorted(known),
            f"attention: {name}.bounds must be integers (low, high) with low <= high, got "
            f"{self.bounds}.",
        )
        require(
            not known or getattr(self, "relative", True),
            f"attention: {name}.bounds are of distances: they need relative=True, got {known}.",
        )
        expected = sizes.batch, sizes.length, heads
        for leaf in jax.tree.leaves(self.q_features):
            require(
                leaf.shape[:3] == expected,
                f"attention: {name}.q_features must be [B, T, N, ...] = {expected}, "
                f"got {leaf.shape}.",
            )
        expected = sizes.batch, sizes.keys
        for leaf in jax.tree.leaves(self.k_features):
            require(
                leaf.shape[:2] == expected and leaf.shape[2:3] in ((sizes.kv_heads,), (heads,)),
                f"attention: {name}.k_features must be [B, S, K or N, ...] = "
                f"({expected[0]}, {expected[1]}, {sizes.kv_heads} or {heads}), got {leaf.shape}.",
            )

    def simplify(self, context: Context) -> Simplified:
        """Returns the parts of the rule that a backend evaluates; none for a rule on whole rows."""
        return Simplified(self._term(context)) if self.adds_logits else Simplified()

    def _term(self, context: Context) -> Term:
        """Returns the rule as it is, for tiles."""
        return Term(
            rule=self._bare(),
            factor=context.scale if self.scaled else 1.0,
            careful=self.careful(context.token),
        )

    def _bare(self) -> Self:
        """Returns the rule without features."""
        return self.with_features(None, None)

    def without_heads(self: Any) -> Any:
        """Returns the rule without the arrays of heads, which `of_head` takes."""
        return self if self.heads is None else dataclasses.replace(self, heads=None)

    def expanded(self) -> Self:
        """Returns a rule on whole rows after its `expand` of `k_features`, if it has one."""
        return self

    def logit(self, q: Tokens, k: Tokens) -> jax.Array | None:
        """Returns the float32 number that is added for one query and one key.

        `heads` has the arrays of one head, and features are in the tokens: see `of_head`.
        """
        return None

    def tile(self, q: Tokens, k: Tokens, seen: jax.Array | None = None) -> jax.Array:
        """Returns the numbers of all pairs of one row and head, float32 [T, S]; default: `logit`.

        Args:
          q, k: leaves [T, ...] and [S, ...], without slots.
          seen: bool [T, S]; other pairs may get any number, and their gradient is to be zero where
            that is NaN or infinite. None: all pairs are seen.
        """
        return pairs_of(self.logit, q, k, seen)

    @property
    def is_pairwise(self) -> bool:
        """Whether the rule is a function of one query and one key."""
        return type(self).logit is not Rule.logit

    @property
    def adds_logits(self) -> bool:
        """Whether the rule adds to logits by `logit` or `tile`."""
        return self.is_pairwise or type(self).tile is not Rule.tile

    def of_head(self, heads: Any) -> Self:
        """Returns the rule with the arrays of one head, and without features."""
        bare: Any = self._bare()
        return bare if heads is None else dataclasses.replace(bare, heads=heads)

    def careful(self, token: Any) -> bool:
        """Returns whether the rule may be NaN or infinite, for coordinates of this type."""
        if not self.is_pairwise:
            return True  # Its `tile` gets the pairs that are seen.
        arrays = self._bare(), shapes_of(self.heads, 1)
        features = shapes_of(self.q_features, 3), shapes_of(self.k_features, 3)
        return may_be_infinite(logit_of, *arrays, *(Tokens(None, token, x) for x in features))

    def transformed_logits(
        self, logits: jax.Array, seen: jax.Array, q_features, k_features, q, k
    ) -> jax.Array:
        """Returns the logits [N, T, S] of one row; `seen` is bool [N or 1, T, S]."""
        return logits

    def added_values(self, weights: jax.Array, q: jax.Array, k: jax.Array) -> jax.Array | None:
        """Returns float32 [T, N, V] to add to the output of one row, or None."""
        return None


def as_tuple(x: Any) -> tuple:
    """Returns None, a value, or a tuple or list of values as a tuple."""
    if x is None:
        return ()
    return tuple(x) if isinstance(x, tuple | list) else (x,)


def shapes_of(tree: Any, axes: int) -> Any:
    """Returns the types of arrays without their first axes."""

    def one(x):  # Inside `shard_map`, it varies over the same mesh axes.
        full = jax.typeof(x)
        sharding = NamedSharding(full.sharding.mesh, PartitionSpec()) if full.mat.varying else None
        shape = full.shape[axes:]
        return jax.ShapeDtypeStruct(shape, x.dtype, sharding=sharding, manual_axis_type=full.mat)

    return jax.tree.map(one, tree)


def added_logits(
    rule: Rule, q: jax.Array, k: jax.Array, seen: jax.Array | None = None
) -> jax.Array | None:
    """Returns the numbers that a rule adds to logits, float32 [B or 1, N or 1, T, S], or None.

    Args:
      rule: the rule; its features are [B, T or S, N, ...].
      q, k: coordinates [B, T] and [B, S], or [B, T, A] and [B, S, A].
      seen: bool [B, N or 1, T, S]; other pairs may get any number, and have no gradient. None: all
        pairs are seen.
    """
    if rule.pairs is not None:
        return rule.pairs.astype(jnp.float32)
    if not rule.adds_logits:
        return None
    token = jax.ShapeDtypeStruct(q.shape[2:], jnp.promote_types(q.dtype, k.dtype))
    seen = seen if seen is not None and rule.careful(token) else None

    def of_head(heads, q, k, seen):
        return rule.of_head(heads).tile(q, k, seen).astype(jnp.float32)

    def tokens(x, features):
        return Tokens(None, x[:, None], jax.tree.map(_by_head, features))

    heads = jax.tree.map(lambda x: x[None], rule.heads)
    places = tokens(q, rule.q_features), tokens(k, rule.k_features)
    return vmap_rows_and_heads(of_head, heads, *places, seen)


def logit_of(rule: Rule, heads: Any, q: Tokens, k: Tokens) -> jax.Array:
    """Returns the number of one query and one key, of a rule with the arrays of one head."""
    out: Any = rule.of_head(heads).logit(q, k)
    return out.astype(jnp.float32)


def _by_head(x: jax.Array) -> jax.Array:
    return jnp.moveaxis(x, 2, 1)


class SimpleRule(Rule):
    """A rule that others were simplified to; it reads coordinates as they are."""

    def on(self, transform):
        return self


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class TracedRule(SimpleRule):
    """A rule whose `logit` was traced, so that the backward pass uses this trace.

    Attributes:
      rule: without `heads`.
      captured: the traced arrays that its functions close over.
      function: of `captured`, the rule and the arguments of `logit_of`.
      heads: of the rule.
    """

    rule: Any
    captured: tuple[jax.Array, ...]
    function: Traced = dataclasses.field(metadata=STATIC)
    heads: Any = None

    def logit(self, q, k):
        return self.function(self.captured, self.rule, self.heads, q, k)


def traced(rule: Rule, q: Tokens, k: Tokens) -> Rule:
    """Returns a rule with its `logit` traced, if it has one.

    Args:
      rule: without features.
      q, k: types of the coordinates and features of one token and head.
    """
    if not rule.is_pairwise:
        return rule
    bare, head = rule.without_heads(), shapes_of(rule.heads, 1)
    function, captured = trace_once(logit_of, bare, head, q, k)
    return TracedRule(bare, captured, function, rule.heads)
