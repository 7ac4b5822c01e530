"""Arguments of functions of schemes on tokens: their types, checks and defaults."""

import difflib
import functools
import inspect
from collections.abc import Iterable, Mapping
from typing import Any, TypedDict

import jax
import jax.numpy as jnp

from posenc_jax.cache.kv_cache import KVCache
from posenc_jax.checks import array_of_rank, coordinate_values, integer_positions, require
from posenc_jax.engine.api import AttentionCall
from posenc_jax.engine.mask import Window
from posenc_jax.engine.problem import Implementation
from posenc_jax.functional.pipeline import Norms, Pipeline, Projections
from posenc_jax.positions import count_up, from_padding_mask
from posenc_jax.schemes.scheme import HOOKS, Acts, Params, Scheme, check_scheme


class TokenOptions(TypedDict, total=False):
    """Arguments of `scheme_attention` that attention layers take in a call."""

    positions: jax.Array | None
    coordinates: jax.Array | None
    segment_ids: jax.Array | None
    tables: Any
    mask: jax.Array | None
    prefix_length: jax.Array | None
    sinks: jax.Array | None


class AttentionOptions(TokenOptions, total=False):
    """Optional arguments of `scheme_attention`, except the cache."""

    x: jax.Array | None
    norms: Norms | None
    contiguous: bool | None
    is_causal: bool
    window: Window
    softcap: float | None
    scale: float | None
    dropout_rate: float
    dropout_key: jax.Array | None
    implementation: str | Implementation | None


def attention_call(**options: Any) -> AttentionCall:
    """Returns a call with these options, where `positions` are its `q_positions`, and so on."""
    queries = ("positions", "coordinates", "segment_ids")
    return AttentionCall(**{f"q_{n}" if n in queries else n: x for n, x in options.items()})


_ELSEWHERE = dict.fromkeys(
    ("bias", "rules"), "pe.attention(pe.apply_rope(q, ...), pe.apply_rope(k, ...), v, rules=...)"
)
"""Arguments of `attention`, and how to combine them with a scheme."""


def refuse_unknown(caller: str, options: Mapping[str, Any], known: Iterable[str]) -> None:
    """Raises `TypeError` for an option whose name is not known."""
    known = sorted(known)
    for name in sorted(options.keys() - set(known)):
        hint = _ELSEWHERE.get(name) or ", ".join(difflib.get_close_matches(name, known, 1))
        raise TypeError(
            f"{caller}: unknown argument {name!r}; it takes {', '.join(known)}"
            f"{hint and f'; write {hint}'}."
        )


def check_tokens(caller: str, tokens: Projections) -> None:
    """Raises unless all arrays have the tokens of q; hooks would broadcast other shapes."""
    q = tokens.q
    for name, array, axes in (
        ("q", q, "[B, T, N, H]"),
        ("k", tokens.k, "[B, T, K, H]"),
        ("v", tokens.v, "[B, T, K, V]"),
        ("x", tokens.x, "[B, T, D]"),
    ):
        if array is not None:
            array_of_rank(caller, name, array, len(axes.split()), axes)
            require(
                array.shape[:2] == q.shape[:2],
                f"{caller}: {name} must be {axes} with the B and T of q {q.shape}, "
                f"got {array.shape}.",
            )


def check_hooks(caller: str, scheme: Scheme) -> dict[str, tuple[int, ...]]:
    """Returns the shapes of parameters by path; raises for settings or hooks that cannot work."""
    check_scheme(caller, scheme)
    try:
        hash(scheme)
    except TypeError:
        raise TypeError(
            f"{caller}: settings of {scheme!r} must be hashable; use tuples for lists."
        ) from None
    _check_signatures(type(scheme))
    return _shapes_of_params(scheme)


def check_params(caller: str, scheme: Scheme, params: Params) -> None:
    """Raises unless a scheme is valid and `params` has its parameters, of their shapes."""
    expected, shapes = check_hooks(caller, scheme), _shapes(params)
    missing = expected.keys() - shapes
    if missing:
        raise ValueError(
            f"{caller}: params lack {', '.join(sorted(missing))} of {scheme!r}; make them with "
            "scheme.init(key)."
        )
    for path, shape in expected.items():
        if shapes[path] != shape:
            raise ValueError(
                f"{caller}: params{path} must be {shape} for {scheme!r}, got {shapes[path]}."
            )


def check_pipeline(caller: str, pipeline: Pipeline) -> None:
    """Raises unless the scheme, its parameters and the norms fit together."""
    scheme = pipeline.scheme
    check_params(caller, scheme, pipeline.params)
    norms = pipeline.norms
    if norms is None:
        return
    if not (isinstance(norms, tuple) and len(norms) == 2 and all(map(callable, norms))):
        raise TypeError(f"{caller}: norms must be two functions, (of q, of k), got {norms!r:.100}.")
    in_attention = Acts.ATTENTION in scheme.acts
    if in_attention or not scheme.traits.norm_after:
        how = "rotates q and k within its attention" if in_attention else "scales q and k by call"
        raise NotImplementedError(f"{caller}: {scheme!r} {how}, so that no norm can come after it.")


@functools.lru_cache(256)
def _check_signatures(scheme: type[Scheme]) -> None:
    """Raises for a hook that does not take the arguments of `Scheme`'s."""
    for name in ("init", *HOOKS):
        base = inspect.signature(getattr(Scheme, name))
        hook = inspect.signature(getattr(scheme, name))
        try:
            hook.bind(*base.parameters)
        except TypeError:
            raise TypeError(
                f"{scheme.__name__}.{name} must take the arguments of Scheme.{name}, "
                f"({', '.join(base.parameters)}), got ({', '.join(hook.parameters)})."
            ) from None


@functools.lru_cache(256)
def _shapes_of_params(scheme: Scheme) -> dict[str, tuple[int, ...]]:
    """Returns the shapes of a scheme's parameters by their paths."""
    return _shapes(jax.eval_shape(scheme.init, jax.random.key(0)))


def _shapes(tree: Any) -> dict[str, tuple[int, ...]]:
    """Returns the shapes of the leaves of a tree by their paths."""
    leaves = jax.tree.leaves_with_path(tree)
    return {jax.tree_util.keystr(path): jnp.shape(leaf) for path, leaf in leaves}


def token_positions(
    caller: str,
    positions: jax.Array | None,
    cache: KVCache | None,
    shape: tuple[int, ...],
    segment_ids: jax.Array | None = None,
) -> jax.Array:
    """Returns positions as int32 [B, T]; by default tokens follow those in the cache."""
    if cache is not None:
        *stacked, rows = cache.length.shape
        require(
            not stacked,
            f"{caller}: cache must be that of one layer, got caches stacked along "
            f"{len(stacked)} more axes; give each layer its own by scan, vmap or indexing.",
        )
        require(
            rows == shape[0],
            f"{caller}: the cache is for batch size {rows}, got arrays of batch size {shape[0]}.",
        )
    if positions is None:
        if cache is None:
            return count_up(*shape)
        if segment_ids is not None:
            return from_padding_mask(segment_ids >= 0, cache.next_positions)[0]
        return count_up(*shape, cache.next_positions)
    return token_integers(caller, positions, shape, "positions")


def token_integers(caller: str, x: jax.Array, shape: tuple[int, ...], name: str) -> jax.Array:
    """Returns integers per token as int32 [B, T]."""
    return _by_row(caller, integer_positions(caller, x, name), shape, name)


def token_coordinates(
    caller: str, scheme: Scheme, coordinates: jax.Array, shape: tuple[int, ...]
) -> jax.Array:
    """Returns coordinates [B, T] for [T] or [B, T], and [A, B, T] unchanged."""
    coordinates = coordinate_values(caller, coordinates)
    if coordinates.ndim != 3:
        return _by_row(caller, coordinates, shape, "coordinates")
    axes = scheme.traits.num_axes
    expected = (axes, *shape)
    require(
        not scheme.acts or (axes > 1 and coordinates.shape == expected),
        f"{caller}: {scheme!r} reads coordinates of {axes} axes, [A, B, T] = {expected} or "
        f"[B, T], got {coordinates.shape}.",
    )
    return coordinates


def _by_row(caller: str, x: jax.Array, shape: tuple[int, ...], name: str) -> jax.Array:
    """Returns [B, T] for [T], [1, T] or [B, T]."""
    x = x[None] if x.ndim == 1 else x
    require(
        x.ndim == 2 and x.shape[0] in (1, shape[0]) and x.shape[1] == shape[1],
        f"{caller}: {name} must be [T] or [B, T] = {shape}, got {x.shape}.",
    )
    return jnp.broadcast_to(x, shape)
