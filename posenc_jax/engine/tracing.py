"""Functions as jaxprs: traced once for both passes, and whether they may be infinite."""

import dataclasses
import functools
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
from jax.core import Tracer
from jax.extend.core import ClosedJaxpr, Literal, jaxpr_as_fun


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
    if name == "cond":  # Rows of tables are taken in one way on each platform.
        return all(_is_finite(x) for branch in eqn.params["branches"] for x in branch.jaxpr.eqns)
    if name == "integer_pow":
        return eqn.params["y"] >= 0
    if name == "div":  # By a number of the function.
        return isinstance(eqn.invars[1], Literal) and eqn.invars[1].val != 0
    return name in _FINITE
