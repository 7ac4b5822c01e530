"""FlexAttention's `score_mod` as a rule: a function of score, batch row, head and two positions.

    def alibi(score, b, h, q_idx, kv_idx, slopes):
        return score - slopes[h] * jnp.abs(q_idx - kv_idx)

    pe.attention(q, k, v, rules=pe.score_mod(alibi, q, slopes), is_causal=True)

PyTorch's functions capture arrays by closing over them; here they are arguments behind the others,
so that they have gradients. The type of the rule follows from the operations of the function, so
that no claim about it can be wrong; an operation that is not recognised makes the rule slower:

    adds to the score, by q_idx - kv_idx alone    `LogitBias`, evaluated once per distance
    adds to the score                             `LogitBias`, evaluated for pairs of tiles
    the same, and reads b                         `ContentBias`
    anything else, such as a tanh of the score    `LogitsTransform`, on whole rows of logits

A `mask_mod` is `jnp.where(mask_mod(b, h, q_idx, kv_idx), score, -jnp.inf)`; `is_causal`, `window`,
`prefix_length` and segment ids of `attention` also skip the tiles that they hide.

Paper: Dong et al. Flex Attention: A Programming Model for Generating Optimized Attention Kernels.
2024. https://arxiv.org/abs/2412.05496
"""

import dataclasses
import enum
import inspect
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.core import Tracer
from jax.extend.core import ClosedJaxpr, Literal

from posenc_jax.checks import array_of_rank, require
from posenc_jax.engine.rules import ContentBias, LogitBias, LogitsTransform

ScoreMod = Callable[..., jax.Array]


@dataclasses.dataclass(frozen=True)
class _Added:
    """The number that a function adds to any score, as a rule for pairs.

    If the function reads the row of the batch, the row is a feature of the query.
    """

    function: ScoreMod

    def __call__(self, arrays, head, *features_and_coordinates):
        *features, q, k = features_and_coordinates
        row = features[0] if features else jnp.int32(0)
        return self.function(jnp.float32(0), row, head, q, k, *arrays)


@dataclasses.dataclass(frozen=True)
class _OfScores:
    """A function of the score, as a rule for the scores [N, S] of a query."""

    function: ScoreMod

    def __call__(self, arrays, heads, row, cols, logits, seen, q_idx, k):
        def of_key(score, b, h, kv_idx):
            return jnp.asarray(self.function(score, b, h, q_idx, kv_idx, *arrays), jnp.float32)

        of_keys = jax.vmap(of_key, (0, None, None, 0))
        return jax.vmap(of_keys, (0, 0, 0, None))(logits, row, heads, k)


def score_mod(
    function: ScoreMod, q: jax.Array, *arrays: Any
) -> LogitBias | ContentBias | LogitsTransform:
    """Returns a `score_mod` of FlexAttention as a rule for `attention`.

    Args:
      function: `function(score, b, h, q_idx, kv_idx, *arrays) -> score`, for scalars: the score is
        float32, after the logit scale; the others are int32. Calls outside of `jit` share one
        compilation if it is a function of a module.
      q: the queries [B, T, N, H]; only the shape is read.
      *arrays: captured arrays, as pytrees. They have gradients.

    Returns:
      The rule; see the top of the file. `q_idx` and `kv_idx` are coordinates of `attention`, which
      default to positions, and these to slots.

    Raises:
      TypeError: for a function that does not take these arguments, and arrays that are none.
      ValueError: for queries of another rank, a result that is not a number, and a function that
        closes over arrays that are traced.

    >>> def later_keys_are_hidden(score, b, h, q_idx, kv_idx):
    ...     return jnp.where(kv_idx <= q_idx, score, -jnp.inf)
    >>> q = jnp.ones((1, 3, 2, 4))
    >>> rule = score_mod(later_keys_are_hidden, q)
    >>> type(rule).__name__, rule.relative
    ('LogitBias', True)
    """
    if not callable(function):
        raise TypeError(f"score_mod: function must be callable, got {function!r:.60}.")
    array_of_rank("score_mod", "q", q, 4, "[B, T, N, H]")
    batch, length, num_heads, _ = q.shape
    index = jax.ShapeDtypeStruct((), jnp.int32)
    score = jax.ShapeDtypeStruct((), jnp.float32)
    for leaf in jax.tree.leaves(arrays):
        if not hasattr(leaf, "dtype"):
            raise TypeError(f"score_mod: arrays must be arrays, got {leaf!r:.60}.")
    shapes = jax.tree.map(lambda x: jax.ShapeDtypeStruct(jnp.shape(x), x.dtype), arrays)
    name, arguments = getattr(function, "__name__", repr(function)), (score, *(index,) * 4, *shapes)
    try:
        inspect.signature(function).bind(*arguments)
    except TypeError as error:
        raise TypeError(
            f"score_mod: {name} must take (score, b, h, q_idx, kv_idx) and {len(arrays)} arrays: "
            f"{error}."
        ) from None
    except ValueError:  # It has no signature.
        pass
    closed = jax.make_jaxpr(function)(*arguments)
    require(
        [x.shape for x in closed.out_avals] == [()],
        f"score_mod: {name} must return one number, got {[str(x) for x in closed.out_avals]}.",
    )
    require(
        not any(isinstance(x, Tracer) for x in closed.consts),
        f"score_mod: {name} closes over an array that is traced; give it as an argument, "
        "score_mod(function, q, array), so that it has a gradient.",
    )
    heads = jnp.arange(num_heads, dtype=jnp.int32)
    row, of_b = None, closed.jaxpr.invars[1]
    reads_batch = any(of_b in _inputs(eqn) for eqn in closed.jaxpr.eqns)
    if reads_batch:
        row = jnp.broadcast_to(
            jnp.arange(batch, dtype=jnp.int32)[:, None, None], (batch, length, num_heads)
        )
    if _outcome(closed, [_Kind.SCORE] + [_Kind.FREE] * (len(closed.in_avals) - 1)) != [_Kind.SCORE]:
        if row is None:
            row = jnp.zeros((batch, length, num_heads), jnp.int32)
        return LogitsTransform(
            _OfScores(function), heads, arrays, q_features=row, reads_seen_only=True
        )
    if reads_batch:
        return ContentBias(_Added(function), heads, arrays, q_features=row)
    return LogitBias(_Added(function), heads, arrays, relative=_is_relative(closed))


class _Kind(enum.Enum):
    """How a number in a function depends on the score."""

    FREE = "independent of the score"
    HIDING = "-inf"
    SCORE = "the score plus a number that is independent of it, or -inf"
    OTHER = "anything else"


def _outcome(closed: ClosedJaxpr, inputs: list[_Kind]) -> list[_Kind]:
    """Returns the kinds of the results of a jaxpr for the kinds of its arguments."""
    jaxpr = closed.jaxpr
    kinds: dict[Any, _Kind] = dict(zip(jaxpr.invars, inputs, strict=True))

    def kind(x):
        if isinstance(x, Literal):
            hides = np.ndim(x.val) == 0 and np.isneginf(x.val)
            return _Kind.HIDING if hides else _Kind.FREE
        return kinds.get(x, _Kind.FREE)  # A constant.

    for eqn in jaxpr.eqns:
        operands = [kind(x) for x in eqn.invars]
        inner = eqn.params.get("jaxpr")
        if eqn.primitive.name in ("jit", "pjit") and isinstance(inner, ClosedJaxpr):
            results = _outcome(inner, operands)
        else:
            results = [_of_equation(eqn, operands)] * len(eqn.outvars)
        kinds |= dict(zip(eqn.outvars, results, strict=True))
    return [kind(x) for x in jaxpr.outvars]


def _of_equation(eqn: Any, kinds: list[_Kind]) -> _Kind:
    """Returns the kind of the results of an equation for the kinds of its operands."""
    name = eqn.primitive.name
    is_free = set(kinds) <= {_Kind.FREE, _Kind.HIDING}
    other = _Kind.FREE if is_free else _Kind.OTHER
    if name in ("convert_element_type", "broadcast_in_dim", "copy"):
        is_float = jnp.issubdtype(eqn.outvars[0].aval.dtype, jnp.floating)
        return kinds[0] if is_float else other
    if name == "add" and sorted(x.name for x in kinds) == ["FREE", "SCORE"]:
        return _Kind.SCORE
    if name == "sub" and kinds == [_Kind.SCORE, _Kind.FREE]:
        return _Kind.SCORE
    if name == "select_n" and kinds[0] is _Kind.FREE:
        cases = set(kinds[1:])
        if _Kind.SCORE in cases and cases <= {_Kind.SCORE, _Kind.HIDING}:
            return _Kind.SCORE
    return other


def _is_relative(closed: ClosedJaxpr) -> bool:
    """Whether a function reads the two positions by their difference and their order alone."""
    same_for_equal_differences = ("sub", "ge", "gt", "le", "lt", "eq", "ne")
    places: dict[Any, str | None] = dict(zip(closed.jaxpr.invars[3:5], "qk", strict=True))
    for eqn in closed.jaxpr.eqns:
        read = [places.get(x) for x in _inputs(eqn)]
        if not any(read):
            continue
        exact = getattr(eqn.outvars[0].aval, "dtype", None) in (jnp.int32, jnp.float32)
        if eqn.primitive.name == "convert_element_type" and exact:
            places[eqn.outvars[0]] = read[0]
        elif eqn.primitive.name not in same_for_equal_differences or {*read} != {"q", "k"}:
            return False
    return not any(places.get(x) for x in closed.jaxpr.outvars if not isinstance(x, Literal))


def _inputs(eqn: Any) -> list[Any]:
    return [x for x in eqn.invars if not isinstance(x, Literal)]
