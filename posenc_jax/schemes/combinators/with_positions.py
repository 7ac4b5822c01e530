"""A scheme on transformed coordinates."""

import dataclasses
from collections.abc import Callable

import jax

from posenc_jax.checks import require
from posenc_jax.schemes.combinators.wrapper import Wrapper, refuse_streaming
from posenc_jax.schemes.scheme import Scheme, check_scheme


@dataclasses.dataclass(frozen=True)
class _WithPositions(Wrapper):
    """See `with_positions`."""

    function: Callable

    @property
    def transform(self):
        return self.function

    @property
    def traits(self):
        return dataclasses.replace(self.scheme.traits, relative=False, mirrored=False)


def with_positions(scheme: Scheme, transform: Callable[[jax.Array], jax.Array]) -> Scheme:
    """Returns `scheme` reading `transform(coordinates)` instead of the coordinates.

    Masks and windows still use the positions. Coordinates that differ between calls
    (random offsets, image grids) are data: give them to the model as `coordinates`.

    Args:
      scheme: any scheme that reads coordinates.
      transform: an elementwise function; a module-level function or a frozen dataclass
        with `__call__`, so that equal schemes share one compilation.

    Raises:
      TypeError: if `scheme` is not a `Scheme`, or `transform` not callable.
      ValueError: if `scheme` reads no coordinates, or only their order, or is `streaming`.

    >>> import posenc_jax as pe
    >>> def grouped(positions):
    ...     return positions // 2
    >>> pe.with_positions(pe.ALiBi(num_heads=1), grouped).rules({})[0].dense(
    ...     jnp.array([5]), jnp.array([0, 4, 5])
    ... ) * 256
    Array([[[-2., -0., -0.]]], dtype=float32)
    """
    check_scheme("with_positions", scheme)
    if not callable(transform):
        raise TypeError(f"with_positions: transform must be a function, got {transform!r:.60}.")
    require(bool(scheme.acts), f"with_positions: {scheme!r} reads no positions.")
    require(
        not scheme.traits.order_only,
        f"with_positions: {scheme!r} reads only the order of positions, so nothing would change.",
    )
    refuse_streaming("with_positions", scheme)
    return _WithPositions(scheme, transform)
