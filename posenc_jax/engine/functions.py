"""Static functions of rules: by field, and as jaxprs.

Functions are compared as `jax.jit` compares static arguments: by `==`, which for functions and
lambdas is identity.

`jax.custom_vjp` and `jax.custom_jvp` trace derivatives after the function itself, and variables
that a rule reads may have changed by then. A function that they call is therefore traced once,
where the function itself is; its jaxpr serves the derivatives too.
"""

import dataclasses
from collections.abc import Callable
from typing import Any

import jax
from jax.core import Tracer
from jax.extend.core import ClosedJaxpr, jaxpr_as_fun


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


def _like(x: Any, aval: Any) -> jax.Array:
    """Casts an argument to a dtype, and makes it vary over the same mesh axes."""
    x = x if x.dtype == aval.dtype else x.astype(aval.dtype)
    missing = tuple(aval.mat.varying - jax.typeof(x).mat.varying)
    return jax.lax.pcast(x, missing, to="varying") if missing else x


def static_functions(rule: Any) -> dict[str, Callable]:
    """Returns the functions of a rule by their fields."""
    if not dataclasses.is_dataclass(rule):
        return {}
    fields = (x.name for x in dataclasses.fields(rule) if x.metadata.get("static"))
    values = {name: getattr(rule, name) for name in fields}
    return {name: value for name, value in values.items() if callable(value)}
