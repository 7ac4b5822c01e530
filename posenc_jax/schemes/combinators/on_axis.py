"""A scheme on one axis of the coordinates."""

import dataclasses

from posenc_jax.checks import require
from posenc_jax.schemes.combinators.chain import reads_order
from posenc_jax.schemes.combinators.wrapper import Wrapper, refuse_streaming
from posenc_jax.schemes.scheme import Scheme, check_scheme


@dataclasses.dataclass(frozen=True)
class _Axis:
    """Selects one axis of a token's coordinates [A]; a scalar is returned unchanged."""

    axis: int

    def __call__(self, x):
        return x[self.axis] if x.ndim else x


@dataclasses.dataclass(frozen=True)
class _OnAxis(Wrapper):
    """See `on_axis`."""

    axis: int
    num_axes: int

    @property
    def transform(self):
        return _Axis(self.axis)

    def transformed(self, coordinates):
        return coordinates[self.axis] if coordinates.ndim == 3 else coordinates

    @property
    def traits(self):
        return dataclasses.replace(self.scheme.traits, num_axes=self.num_axes)


def on_axis(scheme: Scheme, axis: int, num_axes: int = 2) -> Scheme:
    """Returns `scheme` reading one axis of coordinates [A, B, T].

    Schemes of a chain can thus read different axes: BiPE encodes the position within a sentence
    by a learned table and the sentence by RoPE. Coordinates [B, T] are read unchanged.

    Args:
      scheme: a scheme of one axis.
      axis: the axis to read.
      num_axes: A, the same for all schemes of a chain.

    Raises:
      TypeError: if `scheme` is not a `Scheme`.
      ValueError: if `scheme` reads no positions, their order or several axes, or is `streaming`, or
        there is no such axis.

    >>> import posenc_jax as pe
    >>> bipe = pe.chain(
    ...     pe.on_axis(pe.LearnedAbsolute(max_length=512, model_dim=64), 0),
    ...     pe.on_axis(pe.RoPE(head_dim=16), 1),
    ... )
    >>> bipe.acts
    <Acts.EMBEDDING|QK: 3>
    """
    check_scheme("on_axis", scheme)
    require(bool(scheme.acts), f"on_axis: {scheme!r} reads no positions.")
    require(
        scheme.traits.num_axes == 1,
        f"on_axis: scheme must read one axis, got {scheme!r} of {scheme.traits.num_axes}.",
    )
    require(
        not reads_order(scheme),
        f"on_axis: {scheme!r} reads all keys between two tokens, in the order of positions, which "
        "an axis does not have.",
    )
    refuse_streaming("on_axis", scheme)
    integers = all(isinstance(n, int) and not isinstance(n, bool) for n in (axis, num_axes))
    require(
        integers and 0 <= axis < num_axes and num_axes >= 2,
        f"on_axis: axis must be one of at least 2 axes, got axis {axis!r} of {num_axes!r}.",
    )
    return _OnAxis(scheme, axis, num_axes)
