"""Schemes of a user's own; the tests here import this file under other names."""

import dataclasses

import jax.numpy as jnp

import posenc_jax as pe


@dataclasses.dataclass(frozen=True)
class Parity(pe.Scheme):
    """Tells even positions from odd ones."""

    model_dim: int
    strength: float = 0.1

    def embed(self, params, x, coordinates):
        """Returns x plus a constant at odd positions."""
        return x + self.strength * jnp.asarray(coordinates % 2, x.dtype)[..., None]


@dataclasses.dataclass(frozen=True)
class Broken(pe.Scheme):
    """Raises as soon as it is used."""

    def embed(self, params, x, coordinates):
        """Raises."""
        raise RuntimeError("this scheme\nis broken")


class NoScheme:
    """Not a scheme."""
