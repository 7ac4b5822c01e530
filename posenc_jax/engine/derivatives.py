"""Errors for derivatives that tiles and kernels do not have.

JAX's own errors about them come from loops and kernels, and name neither attention nor a remedy.
"""

from typing import Any

import jax
from jax.extend.core import Primitive
from jax.interpreters import ad, batching, mlir


def limit_derivatives(
    tree: Any, *, forward: str | None = None, reverse: str | None = None, both: str | None = None
) -> Any:
    """Returns floating arrays unchanged; derivatives through them raise `NotImplementedError`.

    Args:
      tree: pytree of floating arrays.
      forward: message for forward mode that is not transposed to reverse mode, or None to allow it.
      reverse: message for reverse mode, or None to allow it.
      both: message for both modes, raised while JAX traces the derivative.
    """
    return jax.tree.map(lambda x: _limited.bind(x, messages=(forward, reverse, both)), tree)


_limited = Primitive("limited_derivatives")
"""The identity. Its tangents go through `_limited_tangent`."""

_limited_tangent = Primitive("limited_derivatives_tangent")
"""The identity; evaluated only in forward mode, transposed only in reverse mode."""


def _jvp(primals, tangents, *, messages):
    (x,), (tangent,), (*_, both) = primals, tangents, messages
    if isinstance(tangent, ad.Zero):
        return x, tangent
    if both is not None:
        raise NotImplementedError(both)
    # Not `_limited` of x: derivatives of higher order would meet it once more.
    return x, _limited_tangent.bind(tangent, messages=messages)


def _evaluate(x, *, messages):
    if messages[0] is not None:
        raise NotImplementedError(messages[0])
    return x


def _evaluate_batch(arguments, axes, *, messages):
    """Raises while `vmap` traces, as in `jax.jacfwd`, before JAX's own error about `custom_vjp`."""
    (x,), (axis,) = arguments, axes
    return _limited_tangent.bind(_evaluate(x, messages=messages), messages=messages), axis


def _transpose(cotangent, x, *, messages):
    if messages[1] is not None:
        raise NotImplementedError(messages[1])
    return [cotangent]


_limited.def_impl(lambda x, **_: x)
_limited.def_abstract_eval(lambda aval, **_: aval)
mlir.register_lowering(_limited, lambda context, x, **_: [x])
batching.defvectorized(_limited)
ad.primitive_jvps[_limited] = _jvp

_limited_tangent.def_impl(_evaluate)
_limited_tangent.def_abstract_eval(lambda aval, **_: aval)
mlir.register_lowering(
    _limited_tangent, lambda context, x, *, messages: [_evaluate(x, messages=messages)]
)
batching.primitive_batchers[_limited_tangent] = _evaluate_batch
ad.deflinear2(_limited_tangent, _transpose)
