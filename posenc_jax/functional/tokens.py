"""What functions of schemes on tokens share: their checks, their defaults, and what hooks read."""

import functools
import inspect
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp

from posenc_jax.cache.kv_cache import KVCache
from posenc_jax.checks import array_of_rank, coordinate_values, integer_positions, require
from posenc_jax.engine.problem import zero_where
from posenc_jax.positions import count_up, from_padding_mask
from posenc_jax.schemes.scheme import Acts, Params, Scheme, check_scheme

Norms = tuple[Callable[[jax.Array], jax.Array], Callable[[jax.Array], jax.Array]]
"""Functions of q [B, T, N, H] and of k [B, S, K, H]."""


def contents(
    scheme: Scheme, params: Params, projected: Any, at: Any, segment_ids: Any, states: Any
) -> tuple[Any, Any, Any, Any]:
    """Returns what hooks read from content: (q, k, v) after `mix`, both features, and the states.

    Args:
      scheme, params: the scheme and its parameters.
      projected: x, q, k and v.
      at: coordinates.
      segment_ids: int32 [B, T] or None.
      states: those of `mix` and of `features` before these tokens, or None.
    """
    x, q, k, v = zero_padding(projected, segment_ids)
    mixed, state = (None, None) if states is None else states
    q, k, v, mixed = scheme.mix(params, q, k, v, segment_ids, mixed)
    q_features, k_features, state = scheme.features(params, x, q, k, at, segment_ids, state)
    states = None if mixed is None and state is None else (mixed, state)
    return (q, k, v), q_features, k_features, states


def check_norms(where: str, scheme: Scheme, norms: Norms | None) -> None:
    """Raises for norms after the rotations of a scheme that rotates within its attention."""
    if norms is not None and Acts.ATTENTION in scheme.acts:
        raise NotImplementedError(
            f"{where}: {scheme!r} rotates q and k within its attention, so that no norm can come "
            "after it."
        )


def same(x: jax.Array) -> jax.Array:
    """Returns x: the norm of a layer without one."""
    return x


def check_tokens(where: str, q: jax.Array, k: jax.Array, v: jax.Array, x: Any) -> None:
    """Raises unless all arrays have the tokens of q; hooks would broadcast others."""
    for name, array, axes in (
        ("q", q, "[B, T, N, H]"),
        ("k", k, "[B, T, K, H]"),
        ("v", v, "[B, T, K, V]"),
        ("x", x, "[B, T, D]"),
    ):
        if array is not None:
            array_of_rank(where, name, array, len(axes.split()), axes)
            require(
                array.shape[:2] == q.shape[:2],
                f"{where}: {name} must be {axes} with the B and T of q {q.shape}, "
                f"got {array.shape}.",
            )


def check_hooks(where: str, scheme: Scheme) -> frozenset[str]:
    """Returns the paths of a scheme's parameters; raises for settings or hooks that cannot work."""
    check_scheme(where, scheme)
    try:
        hash(scheme)
    except TypeError:
        raise TypeError(
            f"{where}: settings of {scheme!r} must be hashable; use tuples for lists."
        ) from None
    return _paths_of_params(scheme)


def check_params(where: str, scheme: Scheme, params: Params) -> None:
    """Raises unless a scheme is valid and `params` has all of its parameters."""
    missing = check_hooks(where, scheme) - _paths(params)
    if missing:
        raise ValueError(
            f"{where}: params lack {', '.join(sorted(missing))} of {scheme!r}; make them with "
            "scheme.init(key)."
        )


@functools.lru_cache(256)
def _paths_of_params(scheme: Scheme) -> frozenset[str]:
    """Returns the paths of a scheme's parameters, once its hooks are known to be well-formed."""
    cls = type(scheme)
    hooks = "embed tables mix features query key value rules attend output"
    for name in hooks.split():
        wanted = inspect.signature(getattr(Scheme, name))
        given = inspect.signature(getattr(cls, name))
        try:
            given.bind(*wanted.parameters)
        except TypeError:
            raise TypeError(
                f"{cls.__name__}.{name} must take the arguments of Scheme.{name}, "
                f"({', '.join(wanted.parameters)}), got ({', '.join(given.parameters)})."
            ) from None
    return _paths(jax.eval_shape(scheme.init, jax.random.key(0)))


def _paths(tree: Any) -> frozenset[str]:
    """Returns the paths of the leaves of a tree."""
    return frozenset(jax.tree_util.keystr(path) for path, _ in jax.tree.leaves_with_path(tree))


def token_positions(
    where: str,
    positions: jax.Array | None,
    cache: KVCache | None,
    batch: int,
    length: int,
    segment_ids: jax.Array | None = None,
) -> jax.Array:
    """Returns positions as int32 [B, T]; by default tokens follow those in the cache."""
    if cache is not None:
        *stacked, rows = cache.length.shape
        require(
            not stacked,
            f"{where}: cache must be that of one layer, got caches stacked along "
            f"{len(stacked)} more axes; give each layer its own by scan, vmap or indexing.",
        )
        require(
            rows == batch,
            f"{where}: the cache is for batch size {rows}, got arrays of batch size {batch}.",
        )
    if positions is None:
        if cache is None:
            return count_up(batch, length)
        if segment_ids is not None:
            return from_padding_mask(segment_ids >= 0, cache.next_positions)[0]
        return count_up(batch, length, cache.next_positions)
    return by_row(where, integer_positions(where, positions), batch, length, "positions")


def axis_coordinates(
    where: str, scheme: Scheme, coordinates: jax.Array, batch: int, length: int
) -> jax.Array:
    """Returns coordinates [B, T] for [T] or [B, T], and [A, B, T] unchanged."""
    coordinates = coordinate_values(where, coordinates)
    if coordinates.ndim != 3:
        return by_row(where, coordinates, batch, length, "coordinates")
    axes = scheme.traits.num_axes
    wanted = (axes, batch, length)
    require(
        not scheme.acts or (axes > 1 and coordinates.shape == wanted),
        f"{where}: {scheme!r} reads coordinates of {axes} axes, [A, B, T] = {wanted} or "
        f"[B, T], got {coordinates.shape}.",
    )
    return coordinates


def zero_padding(tree: Any, segment_ids: jax.Array | None) -> Any:
    """Zeroes padding, which may hold anything: what hooks make of NaN has NaN gradients."""
    return tree if segment_ids is None else zero_where(segment_ids < 0, tree)


def by_row(where: str, x: jax.Array, batch: int, length: int, name: str) -> jax.Array:
    """Returns [B, T] for [T], [1, T] or [B, T]."""
    x = x[None] if x.ndim == 1 else x
    require(
        x.ndim == 2 and x.shape[0] in (1, batch) and x.shape[1] == length,
        f"{where}: {name} must be [T] or [B, T] = ({batch}, {length}), got {x.shape}.",
    )
    return jnp.broadcast_to(x, (batch, length))
