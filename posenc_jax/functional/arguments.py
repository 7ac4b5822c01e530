"""Arguments of functions of schemes: their types, checks and defaults."""

import dataclasses
import functools
from typing import Any, TypedDict

import jax
import jax.numpy as jnp

from posenc_jax.cache.kv_cache import KVCache
from posenc_jax.checks import require, token_coordinates, token_integers
from posenc_jax.engine.api import AttentionCall, CommonOptions
from posenc_jax.engine.block_mask import BlockMask
from posenc_jax.functional.pipeline import Norms, Pipeline
from posenc_jax.positions.packing import count_up, restarting
from posenc_jax.schemes.scheme import (
    Acts,
    Params,
    Scheme,
    check_direction,
    check_scheme,
    check_sizes,
)


class TokenOptions(TypedDict, total=False):
    """Arguments of `scheme_attention` that attention layers take in a call."""

    positions: jax.Array | None
    coordinates: jax.Array | None
    segment_ids: jax.Array | None
    tables: Any
    mask: jax.Array | BlockMask | None
    prefix_length: jax.Array | None
    visible_until: jax.Array | None
    sinks: jax.Array | None
    contiguous: bool | None


class AttentionOptions(TokenOptions, CommonOptions, total=False):
    """Optional arguments of `scheme_attention`, except the cache."""

    x: jax.Array | None
    norms: Norms | None


def checked_params(caller: str, scheme: Scheme, params: Params) -> Params:
    """Returns the parameters of a scheme in the structure that `init` gives them.

    They may have another one with the same names, such as {} for a chain without parameters.

    Raises:
      TypeError: for anything but a scheme.
      ValueError: for parameters with other names or shapes.
    """
    check_scheme(caller, scheme)
    leaves = _by_path(params)
    expected, structure = _shapes_of_params(scheme)
    shapes = {path: jnp.shape(leaf) for path, leaf in leaves.items()}
    other = ", ".join(sorted(shapes.keys() - expected))
    got = f", got {other}" if other else ""
    for missing, message in (
        (expected.keys() - shapes, "lack {} of {!r}{}; make them with scheme.init(key)."),
        (shapes.keys() - expected, "have {}, and {!r} has no such parameters."),
    ):
        names = ", ".join(sorted(missing))
        require(not missing, f"{caller}: params " + message.format(names, scheme, got))
    for path, shape in expected.items():
        if shapes[path] != shape:
            raise ValueError(
                f"{caller}: params{path} must be {shape} for {scheme!r}, got {shapes[path]}."
            )
    return jax.tree.unflatten(structure, [leaves[path] for path in expected])


def checked(caller: str, pipeline: Pipeline, q: jax.Array, k: jax.Array) -> Pipeline:
    """Returns a pipeline whose scheme, parameters and norms fit together, and q and k.

    Raises:
      ValueError, TypeError, NotImplementedError: unless they do.
    """
    scheme = pipeline.scheme
    params = checked_params(caller, scheme, pipeline.params)
    pipeline = dataclasses.replace(pipeline, params=params)
    (num_heads, head_dim), num_kv_heads = q.shape[-2:], k.shape[-2]
    sizes = {"num_heads": num_heads, "num_kv_heads": num_kv_heads, "head_dim": head_dim}
    check_sizes(caller, scheme, **sizes)
    norms = pipeline.norms
    if norms is None:
        return pipeline
    if not (isinstance(norms, tuple) and len(norms) == 2 and all(map(callable, norms))):
        raise TypeError(f"{caller}: norms must be two functions, (of q, of k), got {norms!r:.100}.")
    in_attention = Acts.ATTENTION in scheme.acts
    if in_attention or not scheme.traits.norm_after:
        how = "rotates q and k within its attention" if in_attention else "scales q or k"
        raise NotImplementedError(f"{caller}: {scheme!r} {how}, so that no norm can come after it.")
    return pipeline


def check_order(caller: str, scheme: Scheme, call: AttentionCall, length: int) -> None:
    """Raises where several queries of a scheme for causal attention may see later keys."""
    hidden = call.is_causal or call.mask is not None or length == 1
    check_direction(caller, scheme, hidden, call.window, call.prefix_length)


@functools.lru_cache(256)
def _shapes_of_params(scheme: Scheme) -> tuple[dict[str, tuple[int, ...]], Any]:
    """Returns the shapes of a scheme's parameters by their paths, and their structure."""
    params = jax.eval_shape(scheme.init, jax.random.key(0))
    shapes = {path: leaf.shape for path, leaf in _by_path(params).items()}
    return shapes, jax.tree.structure(params)


def _by_path(tree: Any) -> dict[str, Any]:
    """Returns the leaves of a tree by their paths."""
    return {jax.tree_util.keystr(path): x for path, x in jax.tree.leaves_with_path(tree)}


def token_positions(
    caller: str,
    positions: jax.Array | None,
    cache: KVCache | None,
    shape: tuple[int, ...],
    segment_ids: jax.Array | None = None,
    ids_per_segment: int | None = None,
) -> jax.Array:
    """Returns positions as int32 [B, T].

    By default they count the tokens of each segment, after those in the cache; tokens without
    `segment_ids` continue the last segment there. For `ids_per_segment` see
    `KVCache.positions_after`.
    """
    if cache is not None:
        require(
            cache.length.shape == shape[:1],
            f"{caller}: the cache must be that of one layer with {shape[0]} rows, got "
            f"{cache.length.shape}; give layers their own by scan, vmap or indexing.",
        )
    if positions is None:
        if segment_ids is None:
            return count_up(shape[0], shape[1], 0 if cache is None else cache.next_positions)
        positions = restarting(segment_ids)
        if cache is None:
            return positions
        return positions + cache.positions_after(segment_ids, ids_per_segment)
    return jnp.broadcast_to(token_integers(caller, "positions", positions, shape), shape)


def scheme_coordinates(
    caller: str, scheme: Scheme, name: str, coordinates: jax.Array, shape: tuple[int, ...]
) -> jax.Array:
    """Returns coordinates [B, T] for [T] or [B, T], and [A, B, T] for a scheme of A axes."""
    coordinates = token_coordinates(caller, name, coordinates, shape)
    if coordinates.ndim != 3:
        return jnp.broadcast_to(coordinates, shape)
    axes = scheme.traits.num_axes
    shapes = f"[B, T] = {shape}"
    if axes > 1:
        shapes = f"{axes} axes, [A, B, T] = {(axes, *shape)} or [B, T]"
    require(
        not scheme.acts or len(coordinates) == axes > 1,
        f"{caller}: {scheme!r} reads coordinates of {shapes}, got {coordinates.shape}.",
    )
    return coordinates
