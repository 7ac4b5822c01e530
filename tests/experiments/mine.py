"""Schemes and a task of a user's own; the tests here import this file under other names."""

import dataclasses
import functools

import jax.numpy as jnp

import posenc_jax as pe
from experiments.tasks.lookup import Rows


@dataclasses.dataclass(frozen=True)
class Parity(pe.Scheme):
    """Tells even positions from odd ones."""

    model_dim: int
    strength: float = 0.1

    def embed(self, params, x, coordinates):
        return x + self.strength * jnp.asarray(coordinates % 2, x.dtype)[..., None]


@dataclasses.dataclass(frozen=True)
class Broken(pe.Scheme):
    """Raises as soon as it is used."""

    def embed(self, params, x, coordinates):
        raise RuntimeError("this scheme\nis broken")


@dataclasses.dataclass(frozen=True)
class Uninitialised(pe.Scheme):
    """Raises as soon as it has parameters."""

    def init(self, key):
        raise RuntimeError("no parameters")

    def embed(self, params, x, coordinates):
        return x


@dataclasses.dataclass(frozen=True)
class Unhashable(Parity):
    """Has a list."""

    sizes: list = dataclasses.field(default_factory=list)


@dataclasses.dataclass(frozen=True)
class Misspelt(pe.Scheme):
    """Overrides no hook."""

    def embedd(self, params, x, coordinates):
        return x


class Unfinished(Rows):
    """A task without its two methods."""

    name = "unfinished"


class Options(Unfinished):
    """A task with the name of a setting."""

    name = "options"


class NoScheme:
    """Not a scheme."""


@dataclasses.dataclass(frozen=True)
class Lengths(pe.Scheme):
    """Holds both lengths that a model gives."""

    max_length: int
    trained_length: int

    def embed(self, params, x, coordinates):
        return x


narrow = functools.partial(pe.Shaw, clip=4)
both = pe.chain(pe.RoPE(head_dim=8), pe.ALiBi(num_heads=2))
layers = (pe.LayerSpec(pe.RoPE(head_dim=8), window=16), pe.NoPE())
long_pattern = (pe.NoPE(),) * 9


def biased(head_dim, num_heads, num_layers, *, theta: float = 1e4) -> tuple[pe.LayerSpec, ...]:
    """Returns a pattern from the sizes of the model."""
    rope = pe.chain(pe.RoPE(head_dim, theta=theta), pe.ALiBi(num_heads))
    return pe.layer_pattern(num_layers, rope, last=pe.T5(num_heads, max_distance=32))


def nothing() -> pe.Scheme:
    return None


def raises() -> pe.Scheme:
    raise RuntimeError("no\nscheme")


def exits() -> pe.Scheme:
    raise SystemExit(3)


def unannotated():
    open("called", "w").close()
