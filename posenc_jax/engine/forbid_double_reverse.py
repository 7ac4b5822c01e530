"""Identity that raises a clear error under reverse mode over reverse mode.

Loops over tiles with limits of their own cannot be transposed, and JAX's message about that
names neither attention nor a way out. Forward mode, vmap and shard_map pass.
"""

import jax
from jax.extend.core import Primitive
from jax.interpreters import ad, batching, mlir


def forbid_double_reverse(x: jax.Array) -> jax.Array:
    """Returns x.

    Raises:
      NotImplementedError: where reverse mode is applied to it.
    """
    return _primitive.bind(x)


def _refuse(cotangent, x):
    raise NotImplementedError(
        "attention: tiles have reverse mode, and forward mode over it; for reverse mode over "
        'reverse mode use implementation="reference", or jax.jvp of jax.grad.'
    )


_primitive = Primitive("forbid_double_reverse")
_primitive.def_impl(lambda x: x)
_primitive.def_abstract_eval(lambda aval: aval)
mlir.register_lowering(_primitive, lambda context, x: [x])
batching.defvectorized(_primitive)
ad.deflinear2(_primitive, _refuse)
