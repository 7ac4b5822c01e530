"""The base of rotary schemes: a subclass computes cosine and sine, the base rotates by them.

A rotary scheme rotates pairs of dimensions of q and k by angles that depend on the position:

    (x_a, x_b) -> (x_a cos - x_b sin,  x_b cos + x_a sin)

A subclass overrides `cos_sin`, the cosine and sine of each pair. The base checks settings and
shapes, assigns sets of tables to heads, multiplies by the attention factor, computes in float32,
and lets q, k and all layers share one computation of the tables.
"""

import abc
import dataclasses
from typing import Any, ClassVar, Self

import jax
import numpy as np

from posenc_jax.angles import cos_sin
from posenc_jax.checks import coordinate_values, positive_fields, require
from posenc_jax.schemes.rotary.frequencies import FrequencyMap, rope_frequencies
from posenc_jax.schemes.rotary.layouts import check_layout, rotary_dims
from posenc_jax.schemes.rotary.rotate import materialize, rotate_pairs
from posenc_jax.schemes.scheme import Params, Scheme, Traits

Tables = tuple[jax.Array, jax.Array]
"""Cosine and sine, float32 [B or 1, T, P], or [B or 1, T, G, P] for G sets."""


def check_heads(name: str, x: jax.Array, head_dim: int, groups: int = 1) -> None:
    """Raises `ValueError` unless x [B, T, N, H] has the scheme's head dim and groups."""
    require(
        x.shape[-1] == head_dim,
        f"{name}: the scheme is for head_dim {head_dim}, got an array of shape {x.shape}.",
    )
    require(
        x.shape[2] % groups == 0,
        f"{name}: the number of heads must be a multiple of groups={groups}, got an array of "
        f"shape {x.shape}.",
    )


def check_coordinates(name: str, coordinates: jax.Array, num_axes: int) -> jax.Array:
    """Returns coordinates [B, T] or [A, B, T] as int32 or float32; raises for others."""
    coordinates = coordinate_values(name, coordinates)
    ndim, shape = coordinates.ndim, coordinates.shape
    axes = f"[{num_axes}, B, T] or [B, T]" if num_axes > 1 else "[B, T]"
    require(
        ndim == 2 or (num_axes > 1 and ndim == 3 and shape[0] == num_axes),
        f"{name}: coordinates must be {axes}, got {shape}.",
    )
    return coordinates


@dataclasses.dataclass(frozen=True)
class Rotary(Scheme, abc.ABC):
    """An abstract rotary scheme. Subclass it and override `cos_sin`.

    `theta` to `groups` are constants of the class: a dataclass makes no fields of names without an
    annotation. A subclass that repeats one with an annotation, `theta: float = 100.0`, makes it a
    field; without the annotation it sets another constant.

    Attributes:
      head_dim, theta, layout, rotary_dim, rotary_start, scaling: as in `RoPE`.
      groups: the number G of sets of tables; head n of N has the set n * G // N.

    >>> @dataclasses.dataclass(frozen=True)
    ... class Slow(Rotary):
    ...     rate: float = 0.5
    ...
    ...     def cos_sin(self, params, coordinates):
    ...         return pe.cos_sin(coordinates, self.rate * self.base_frequencies)
    >>> q = jnp.ones((1, 3, 2, 8))
    >>> Slow(head_dim=8).query({}, q, jnp.arange(3)[None]).shape
    (1, 3, 2, 8)
    """

    head_dim: int

    theta = 10000.0
    layout = "half"
    rotary_dim = None
    rotary_start = 0
    scaling = FrequencyMap()
    groups = 1

    def __post_init__(self):
        positive_fields(self, "head_dim", "groups")
        self._check_layout()
        rotary_dims(self.label, self.head_dim, self.rotary_dim, self.rotary_start)
        _ = self.base_frequencies  # Raises for an invalid theta, size or scaling.

    @property
    def label(self) -> str:
        """The name in messages."""
        return self.name or type(self).__name__

    def _check_layout(self) -> None:
        check_layout(self.label, self.layout)

    @property
    def traits(self):
        return Traits(relative=True)

    @property
    def num_rotated(self) -> int:
        """The number d of dimensions that are rotated."""
        return self.head_dim - self.rotary_start if self.rotary_dim is None else self.rotary_dim

    @property
    def base_frequencies(self) -> np.ndarray:
        """Radians per unit of position after `scaling`, float64 [P]."""
        return rope_frequencies(self.num_rotated, self.theta, self.scaling)[0]

    @property
    def attention_factor(self) -> float:
        """The factor of `scaling` on rotated q and k."""
        return rope_frequencies(self.num_rotated, self.theta, self.scaling)[1]

    @abc.abstractmethod
    def cos_sin(self, params: Params, coordinates: jax.Array) -> Tables:
        """Returns cosine and sine of the angle of each pair, without the attention factor.

        Args:
          params: the scheme's parameters.
          coordinates: int32 or float32, [B, T], or [A, B, T] for a scheme of A axes.
        """

    def tables(self, params: Params, coordinates: jax.Array) -> Any:
        axes = self.traits.num_axes
        return self.finish(*self.cos_sin(params, check_coordinates(self.label, coordinates, axes)))

    def finish(self, cos: jax.Array, sin: jax.Array) -> Tables:
        """Returns tables times the attention factor, as `rotate` takes them."""
        factor = self.attention_factor
        if factor != 1.0:
            cos, sin = factor * cos, factor * sin
        return materialize(cos, sin)

    def rotate(self, x: jax.Array, tables: Tables) -> jax.Array:
        """Returns q or k [B, T, N, H] rotated by finished tables, in its own dtype."""
        check_heads(self.label, x, self.head_dim, self.groups)
        pairs = self.num_rotated // 2
        require(
            tables[0].shape[-1:] == (pairs,),
            f"{self.label}: cos_sin must return [..., {pairs}], the angle of each of {pairs} "
            f"pairs, got {tables[0].shape}.",
        )
        return rotate_pairs(x, *tables, layout=self.layout, start=self.rotary_start)

    def query(self, params, q, coordinates, features=None, tables=None):
        return self.rotate(q, self.tables(params, coordinates) if tables is None else tables)

    def key(self, params, k, coordinates, features=None, tables=None):
        return self.rotate(k, self.tables(params, coordinates) if tables is None else tables)

    def with_scaling(self, scaling: FrequencyMap | tuple[FrequencyMap, ...]) -> Self:
        """Returns the scheme with other frequency maps.

        Raises:
          ValueError: for a scheme whose frequencies no map applies to, and for maps that the
            scheme does not accept.
        """
        raise ValueError(f"{self.label}: no frequency map applies to this scheme, got {scaling!r}.")


@dataclasses.dataclass(frozen=True)
class ScalableRotary(Rotary):
    """The base of rotary schemes with all settings of `RoPE`, frequency maps among them."""

    theta: float = 10000.0
    layout: str = "half"
    rotary_dim: int | None = None
    rotary_start: int = 0
    scaling: FrequencyMap | tuple[FrequencyMap, ...] = FrequencyMap()  # noqa: RUF009, frozen

    def cos_sin(self, params, coordinates):
        return cos_sin(coordinates, self.base_frequencies)

    def with_scaling(self, scaling):
        return self.replace(scaling=scaling)


@dataclasses.dataclass(frozen=True)
class AttendRotary(ScalableRotary):
    """An abstract rotary scheme whose `attend` rotates q and k, by the coordinates of both."""

    traits: ClassVar = Traits(cache_transformed_keys=False)
    tables, query, key = Scheme.tables, Scheme.query, Scheme.key


@dataclasses.dataclass(frozen=True)
class ContentRotary(Rotary):
    """An abstract rotary scheme whose angles depend on content, not on coordinates.

    A subclass overrides `features`, and `cos_sin`, whose `coordinates` are the features of the
    queries or keys.
    """

    traits: ClassVar = Traits(relative=True, order_only=True, reads_x=True)
    tables = Scheme.tables

    def query(self, params, q, coordinates, features: Any = None, tables=None):
        return self.rotate(q, self.finish(*self.cos_sin(params, features)))

    def key(self, params, k, coordinates, features: Any = None, tables=None):
        return self.rotate(k, self.finish(*self.cos_sin(params, features)))
