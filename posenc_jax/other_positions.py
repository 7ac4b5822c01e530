"""One scheme on other coordinates."""

import dataclasses
import functools
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp

from posenc_jax.checks import array_of_rank, coordinate_values, require
from posenc_jax.scheme import (
    Content,
    ContentBias,
    DotBias,
    LogitBias,
    RowRule,
    Scheme,
    ValueBias,
    as_tuple,
    side_arrays,
)


@dataclasses.dataclass(frozen=True)
class _OnCoordinates:
    """A rule whose last two arguments, the coordinates, are transformed first."""

    rule: Callable
    transform: Callable

    def __call__(self, *arguments):
        *rest, q, k = arguments
        return self.rule(*rest, self.transform(q), self.transform(k))


@dataclasses.dataclass(frozen=True)
class _Then:
    """One function of coordinates after another."""

    first: Callable
    second: Callable

    def __call__(self, x):
        return self.second(self.first(x))


def _with_rule(bias: Any, wrap: Callable[[Callable], Callable]) -> Any:
    """Returns a bias with another rule, of which less is known."""
    field = "bucket" if isinstance(bias, ValueBias) else "rule"
    changes: dict[str, Any] = {field: wrap(getattr(bias, field))}
    if not isinstance(bias, ContentBias | RowRule):
        changes |= {"relative": False, "bounds": (None, None)}
    return dataclasses.replace(bias, **changes)


@dataclasses.dataclass(frozen=True)
class _Wrapped(Scheme):
    """A scheme that reads other coordinates: what `_at` says in hooks, and `_moved` in rules."""

    scheme: Scheme

    def _at(self, coordinates: jax.Array) -> jax.Array:
        raise NotImplementedError

    def _moved(self, bias: Any) -> Any:
        raise NotImplementedError

    @property
    def acts_on(self) -> tuple[str, ...]:
        return self.scheme.acts_on

    @property
    def by_order(self) -> bool:
        return self.scheme.by_order

    @property
    def num_axes(self) -> int:
        return self.scheme.num_axes

    @property
    def shared_over_layers(self) -> bool:
        return self.scheme.shared_over_layers

    @property
    def scale_embedding(self) -> bool:
        return self.scheme.scale_embedding

    @property
    def reads_segments(self) -> bool:
        return self.scheme.reads_segments

    @property
    def reads_x(self) -> bool:
        return self.scheme.reads_x

    @property
    def caches_mapped_keys(self) -> bool:
        return self.scheme.caches_mapped_keys

    @property
    def kept_tokens(self) -> int:
        return self.scheme.kept_tokens

    def init(self, key):
        return self.scheme.init(key)

    def embed(self, params, x, coordinates):
        return self.scheme.embed(params, x, self._at(coordinates))

    def side(self, params, x, q, k, coordinates, state, segment_ids=None):
        at = self._at(coordinates)
        return side_arrays(self.scheme, params, x, q, k, at, state, segment_ids)

    def query(self, params, q, coordinates, rows=None):
        return self.scheme.query(params, q, self._at(coordinates), rows)

    def key(self, params, k, coordinates, cols=None):
        return self.scheme.key(params, k, self._at(coordinates), cols)

    def bias(self, params) -> tuple[LogitBias, ...]:
        return tuple(map(self._moved, as_tuple(self.scheme.bias(params))))

    def content(self, params, rows, cols) -> tuple[Content, ...]:
        return tuple(map(self._moved, as_tuple(self.scheme.content(params, rows, cols))))

    def row_rule(self, params, rows):
        rule = self.scheme.row_rule(params, rows)
        return None if rule is None else self._moved(rule)

    def value(self, params):
        value = self.scheme.value(params)
        return None if value is None else self._moved(value)

    def attend(self, params, q, k, v, at, rows, cols, attention):
        if "attention" not in self.acts_on:
            return super().attend(params, q, k, v, at, rows, cols, attention)
        q_at, k_at = map(self._at, at)
        attention = functools.partial(attention, q_coordinates=q_at, k_coordinates=k_at)
        return self.scheme.attend(params, q, k, v, (q_at, k_at), rows, cols, attention)

    def logit_scale(self, head_dim):
        return self.scheme.logit_scale(head_dim)


@dataclasses.dataclass(frozen=True)
class _WithPositions(_Wrapped):
    """A scheme that reads transformed coordinates; see `with_positions`."""

    transform: Callable

    def _at(self, coordinates):
        return self.transform(coordinates)

    def _moved(self, bias: Any):
        if isinstance(bias, DotBias):
            transform, pair = self.transform, bias.pair
            if bias.transform is not None:
                transform = _Then(transform, bias.transform)
            pair = None if pair is None else _OnCoordinates(pair, self.transform)
            return dataclasses.replace(bias, transform=transform, pair=pair)
        return _with_rule(bias, lambda rule: _OnCoordinates(rule, self.transform))


def with_positions(scheme: Scheme, transform: Callable[[jax.Array], jax.Array]) -> Scheme:
    """Returns `scheme` reading `transform(coordinates)` in place of the coordinates.

    Order, masks and windows go on following the positions. For coordinates that differ
    from call to call (random offsets, image grids) give them to the model as data.

    Args:
      scheme: any scheme that reads positions.
      transform: an elementwise function; a module-level function or a frozen dataclass
        with `__call__`, so that equal schemes share one compilation.

    Raises:
      ValueError: if `scheme` reads no positions, or no more than the order of tokens.

    >>> import posenc_jax as pe
    >>> def grouped(positions):
    ...     return positions // 2
    >>> pe.with_positions(pe.ALiBi(num_heads=1), grouped).bias({})[0].dense(
    ...     jnp.array([5]), jnp.array([0, 4, 5])
    ... ) * 256
    Array([[[-2., -0., -0.]]], dtype=float32)
    """
    require(
        bool(scheme.acts_on) and not scheme.by_order,
        f"with_positions: {scheme!r} reads no positions"
        f"{' but their order' if scheme.acts_on else ''}, so nothing would change.",
    )
    return _WithPositions(scheme, transform)


@dataclasses.dataclass(frozen=True)
class _OfAxis:
    """A rule that reads one axis of the coordinates, the last two arguments."""

    rule: Callable
    axis: int

    def __call__(self, *arguments):
        *rest, q, k = arguments
        if jnp.ndim(q) == 1:  # For rules on rows, k is [S, A].
            q, k = q[self.axis], k[..., self.axis]
        return self.rule(*rest, q, k)


@dataclasses.dataclass(frozen=True)
class _OnAxis(_Wrapped):
    """A scheme that reads one axis of the coordinates; see `on_axis`."""

    axis: int
    axes: int

    @property
    def num_axes(self) -> int:
        return self.axes

    def _at(self, coordinates):
        return coordinates[self.axis] if coordinates.ndim == 3 else coordinates

    def _moved(self, bias):
        bias = bias.by_pair() if isinstance(bias, DotBias) else bias
        return _with_rule(bias, lambda rule: _OfAxis(rule, self.axis))


def on_axis(scheme: Scheme, axis: int, num_axes: int = 2) -> Scheme:
    """Returns `scheme` reading one axis of coordinates [A, B, T].

    So schemes that read one number can read different ones, in a chain: BiPE has learned
    positions in a sentence and rotary ones of sentences. Coordinates [B, T] are read as they are.

    Args:
      scheme: a scheme that reads one number.
      axis: which one it shall read.
      num_axes: A, the same for all schemes of a chain.

    Raises:
      ValueError: if `scheme` reads no positions or several axes, or there is no such axis.

    >>> import posenc_jax as pe
    >>> bipe = pe.chain(
    ...     pe.on_axis(pe.Learned(max_length=512, model_dim=64), 0),
    ...     pe.on_axis(pe.RoPE(head_dim=16), 1),
    ... )
    >>> bipe.acts_on
    ('embedding', 'q, k')
    """
    require(
        bool(scheme.acts_on),
        f"on_axis: {scheme!r} reads no positions, so nothing would change.",
    )
    require(
        scheme.num_axes == 1,
        f"on_axis: {scheme!r} reads {scheme.num_axes} axes, and would get one.",
    )
    require(
        0 <= axis < num_axes and num_axes >= 2,
        f"on_axis: axis must be one of at least 2 axes, got axis {axis} of {num_axes}.",
    )
    return _OnAxis(scheme, axis, num_axes)


@dataclasses.dataclass(frozen=True)
class _OfDistances:
    """A relative rule that reads what stands for a distance."""

    rule: Callable

    def __call__(self, shared, head, q, k):
        shared, past, future = shared
        n = q - k
        entry = jnp.abs(n) - 1
        far = jnp.where(n > 0, past.shape[0], future.shape[0])
        read = jnp.where(n > 0, past.at[entry].get(mode="clip"), -future.at[entry].get(mode="clip"))
        read = jnp.where(n == 0, jnp.zeros_like(read), read)
        term = self.rule(shared, head, read, jnp.zeros_like(read))
        return jnp.where(entry < far, term, jnp.nan)


def on_distances(bias: LogitBias, past: jax.Array, future: jax.Array | None = None) -> LogitBias:
    """Returns a relative bias that reads `past[n - 1]` where a key is n tokens back.

    Randomized distances of Ruoss et al., who draw them for ALiBi and Transformer-XL in place of
    positions: the distance of two tokens is then no sum of those between. `positions.
    randomized_distances` draws them. Pairs further apart than there are entries are NaN.

    Args:
      bias: a bias that depends on q - k alone.
      past: distances [L], growing; int32 or float32.
      future: those to later keys. Default: the same.

    Raises:
      ValueError: for a bias that is not relative, or arrays of another rank.

    >>> import posenc_jax as pe
    >>> alibi = pe.on_distances(pe.ALiBi(num_heads=1).bias({}), jnp.array([2, 5]))
    >>> alibi.dense(jnp.array([7]), jnp.array([5, 6, 7])) * 256
    Array([[[-5., -2., -0.]]], dtype=float32)
    """
    require(bias.relative, f"on_distances: {bias.rule} does not depend on the distance alone.")
    future = past if future is None else future
    for name, x in (("past", past), ("future", future)):
        array_of_rank("on_distances", name, x, 1, "[L]")
    shared = bias.shared, *(coordinate_values("on_distances", x) for x in (past, future))
    return dataclasses.replace(
        bias, rule=_OfDistances(bias.rule), shared=shared, bounds=(None, None)
    )
