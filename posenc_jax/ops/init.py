"""Initial values of learned arrays, always float32."""

import jax
import jax.numpy as jnp


def torch_uniform(key: jax.Array, shape: tuple[int, ...], fan_in: int) -> jax.Array:
    """Returns float32 [shape], uniform in +-1 / sqrt(fan_in), as torch.nn.Linear initialises.

    torch.nn.Linear draws its weight and its bias from this distribution.

    Args:
      key: a PRNG key.
      shape: of the result.
      fan_in: number of inputs of the layer.

    >>> bool(jnp.abs(torch_uniform(jax.random.key(0), (8, 4), 4)).max() <= 0.5)
    True
    """
    limit = fan_in**-0.5
    return jax.random.uniform(key, shape, jnp.float32, -limit, limit)
