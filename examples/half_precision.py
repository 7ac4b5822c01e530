"""Products of one token with weights in half precision on CPUs.

`families.load(config, state, param_dtype=jnp.bfloat16, dot_general=dot_general)` has them in every
projection of a decoder.
"""

import functools
import math
from typing import Any

import jax
import jax.numpy as jnp


def dot_general(
    x: jax.Array, w: jax.Array, dimension_numbers: Any, precision: Any = None, **options: Any
) -> jax.Array:
    """As `jax.lax.dot_general`, without a copy of half-precision weights for one token on CPUs.

    For products, XLA for CPUs writes bfloat16 weights to memory as float32. It converts operands of
    elementwise operations as it reads them, so the product of one token is a sum of elements here.
    """
    plain = functools.partial(
        jax.lax.dot_general, dimension_numbers=dimension_numbers, precision=precision, **options
    )
    ((of_x, of_w), (batch, _)) = dimension_numbers
    size = math.prod(x.shape[axis] for axis in of_x)
    ends = tuple(range(len(of_w))), tuple(range(w.ndim - len(of_w), w.ndim))
    in_order = of_w and tuple(of_w) in ends and list(of_x) == sorted(of_x)
    on_mesh = not jax.sharding.get_abstract_mesh().empty
    if batch or on_mesh or not in_order or x.size != size or w.dtype.itemsize != 2:
        return plain(x, w)

    def by_elements(x, w):
        out = jax.eval_shape(plain, x, w)
        x, w = jax.lax.optimization_barrier((x, w))  # Weights alone are converted beforehand.
        x = x.astype(jnp.float32).reshape(-1)
        if of_w[0] == 0:  # Sums over rows are slow: most of them are sums of 8 arrays.
            count = math.gcd(size, 8)
            x, w = x.reshape(count, -1, 1), w.reshape(count, size // count, -1)
            y = sum(x[i] * w[i].astype(jnp.float32) for i in range(count))
            y = jnp.ones(size // count, jnp.float32) @ jax.lax.optimization_barrier(y)
        else:
            y = (w.reshape(-1, size).astype(jnp.float32) * x[None]).sum(1)
        return y.astype(out.dtype).reshape(out.shape)

    return jax.lax.platform_dependent(x, w, cpu=by_elements, default=plain)
