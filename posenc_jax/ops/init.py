"""Initial values of learned arrays, always float32."""

from collections.abc import Iterable, Mapping

import jax
import jax.numpy as jnp


def torch_uniform(key: jax.Array, shape: tuple[int, ...], fan_in: int) -> jax.Array:
    """Returns float32 [shape], uniform in +-1 / sqrt(fan_in), as torch.nn.Linear draws both."""
    limit = fan_in**-0.5
    return jax.random.uniform(key, shape, jnp.float32, -limit, limit)


def torch_uniforms(
    keys: Iterable[jax.Array], arrays: Mapping[str, tuple[tuple[int, ...], int]]
) -> dict[str, jax.Array]:
    """Returns `torch_uniform` of the shape and fan-in of each array, with a key for each."""
    return {
        name: torch_uniform(key, shape, fan_in)
        for key, (name, (shape, fan_in)) in zip(keys, arrays.items(), strict=True)
    }


def normals(
    keys: Iterable[jax.Array], stddev: float, shapes: Mapping[str, tuple[int, ...]]
) -> dict[str, jax.Array]:
    """Returns float32 arrays from a normal of mean zero, with a key for each."""
    return {
        name: stddev * jax.random.normal(key, shape, jnp.float32)
        for key, (name, shape) in zip(keys, shapes.items(), strict=True)
    }
