"""One attention of a scheme: its hooks, the cache and the engine, in their order.

This is what the Flax layers do between their projections, as one pure function.
"""

from typing import Any

import jax
import jax.numpy as jnp

from posenc_jax.cache import KVCache
from posenc_jax.checks import (
    array_of_rank,
    coordinate_values,
    integer_positions,
    require,
)
from posenc_jax.engine.api import AttentionCall
from posenc_jax.mask import Window, window_sides
from posenc_jax.positions import count_up
from posenc_jax.scheme import Acts, Params, Scheme


def scheme_embedding(
    scheme: Scheme,
    params: Params,
    x: jax.Array,
    *,
    positions: jax.Array | None = None,
    coordinates: jax.Array | None = None,
) -> jax.Array:
    """Returns token embeddings [B, T, D] with positions in them, if the scheme acts there.

    Args:
      scheme: what to encode positions with.
      params: its parameters.
      x: token embeddings [B, T, D].
      positions: integers [T] or [B, T]. Default 0 .. T - 1.
      coordinates: what the scheme reads, [B, T] or [A, B, T]. Default: the positions.

    Raises:
      ValueError: for what does not fit together.
      TypeError: for positions that are not integers.

    >>> import posenc_jax as pe
    >>> pe.scheme_embedding(pe.Sinusoidal(model_dim=2), {}, jnp.zeros((1, 1, 2)))
    Array([[[0., 1.]]], dtype=float32)
    """
    array_of_rank("scheme_embedding", "x", x, 3, "[B, T, D]")
    batch, length = x.shape[:2]
    if coordinates is None:
        at = count_up(batch, length) if positions is None else positions
        at = integer_positions("scheme_embedding", at)
        at = _rows("scheme_embedding", at, batch, length, "positions")
    else:
        at = _coordinates("scheme_embedding", scheme, coordinates, batch, length)
    return scheme.embed(params, x, at)


def scheme_attention(
    scheme: Scheme,
    params: Params,
    q: jax.Array,
    k: jax.Array,
    v: jax.Array,
    *,
    x: jax.Array | None = None,
    positions: jax.Array | None = None,
    coordinates: jax.Array | None = None,
    segment_ids: jax.Array | None = None,
    cache: KVCache | None = None,
    contiguous: bool | None = None,
    scale: float | None = None,
    **options: Any,
) -> tuple[jax.Array, KVCache | None]:
    """Self-attention of T tokens with a scheme, after those in the cache if there is one.

    Args:
      scheme: what to encode positions with.
      params: its parameters.
      q, k, v: [B, T, N, H], [B, T, K, H] and [B, T, K, V], as projected.
      x: what they were projected from, [B, T, D]; some schemes read it.
      positions: integers [T] or [B, T]. Default: 0, 1, ... after what is in the cache.
      coordinates: what the scheme reads, [B, T] or [A, B, T]. Default: the positions.
      segment_ids: integers [T] or [B, T], below zero for padding. Default: one segment.
      cache: keys and values of earlier tokens; see `new_cache`.
      contiguous: as in `attention`, where there is no cache.
      scale: the factor on q . k. Default: the scheme's own.
      **options: further arguments of `attention`: `is_causal`, `window`, `softcap` ...

    Returns:
      The output [B, T, N, V], and the cache with these tokens in it, or None.

    Raises:
      ValueError: for what does not fit together.
      TypeError: for positions that are not integers.

    >>> import posenc_jax as pe
    >>> scheme = pe.RoPE(head_dim=4)
    >>> q = k = v = jnp.ones((1, 3, 2, 4))
    >>> out, _ = pe.scheme_attention(scheme, {}, q, k, v, is_causal=True)
    >>> out.shape
    (1, 3, 2, 4)
    """
    array_of_rank("scheme_attention", "q", q, 4, "[B, T, N, H]")
    batch, length = q.shape[:2]
    if scale is None:
        scale = scheme.logit_scale(q.shape[-1])
    default = positions is None and coordinates is None and cache is None
    start = 0 if cache is None else cache.next_positions
    positions = count_up(batch, length, start) if positions is None else positions
    positions = _rows(
        "scheme_attention",
        integer_positions("scheme_attention", positions),
        batch,
        length,
        "positions",
    )
    at = positions
    if coordinates is not None:
        at = _coordinates("scheme_attention", scheme, coordinates, batch, length)
        coordinates = at
    if segment_ids is not None:
        segment_ids = integer_positions("scheme_attention", segment_ids, "segment_ids")
        segment_ids = _rows("scheme_attention", segment_ids, batch, length, "segment_ids")

    state = None if cache is None else cache.state
    q_features, k_features, state = scheme.features(params, x, q, k, at, segment_ids, state)
    q = scheme.query(params, q, at, q_features)
    transformed = scheme.traits.cache_transformed_keys
    if transformed or cache is None:
        k = scheme.key(params, k, at, k_features)

    options["scale"] = scale
    if cache is None:
        call = AttentionCall(
            q_segment_ids=segment_ids,
            k_segment_ids=segment_ids,
            contiguous=contiguous,
            **options,
        )
        if not default:
            call = call.replace(q_positions=positions, k_positions=positions)
        if coordinates is not None:
            call = call.replace(q_coordinates=at, k_coordinates=at)
        out = scheme.attend(params, q, k, v, at, at, q_features, k_features, call)
        return _output(out), None

    reads = not transformed or bool(scheme.acts & (Acts.LOGITS | Acts.VALUES | Acts.ATTENTION))
    if reads and coordinates is not None and cache.coordinates is None:
        raise ValueError(
            "scheme_attention: the scheme reads the coordinates of cached keys and the cache has "
            "none; make it with new_cache(..., coordinates=...)."
        )
    segments = jnp.zeros_like(positions) if segment_ids is None else segment_ids
    lost = _check_ring(cache, positions, segments, options.get("window"))
    stored = None if cache.coordinates is None else at
    cache = cache.append(
        k, v, positions, segments, coordinates=stored, k_features=k_features, state=state
    )
    if cache.num_sink_tokens:
        lost |= cache.lacks_first(positions, segments)
    call = AttentionCall(
        q_positions=positions,
        k_positions=cache.positions,
        q_segment_ids=segments,
        k_segment_ids=cache.segment_ids,
        **options,
    )
    k_at = cache.positions if cache.coordinates is None else cache.coordinates
    if stored is not None:
        call = call.replace(q_coordinates=at, k_coordinates=k_at)
    k = cache.k if transformed else scheme.key(params, cache.k, k_at, cache.k_features)
    out = _output(
        scheme.attend(params, q, k, cache.v, at, k_at, q_features, cache.k_features, call)
    )
    # Tokens that a full cache lost cannot raise under jit: the output says so.
    lost = (lost | cache.overflowed)[:, None, None, None]
    return jnp.where(lost, jnp.nan, out).astype(out.dtype), cache


def new_cache(
    scheme: Scheme,
    batch: int,
    capacity: int,
    *,
    num_heads: int,
    head_dim: int,
    num_kv_heads: int | None = None,
    model_dim: int | None = None,
    dtype: Any = jnp.float32,
    coordinates: jax.Array | jax.ShapeDtypeStruct | None = None,
    ring: bool = False,
) -> KVCache:
    """Returns an empty cache for `scheme_attention` with this scheme.

    Args:
      scheme: the scheme; what it stores per key and per sequence is asked of its hooks.
      batch: B.
      capacity: number of slots; for a ring at least the window and one chunk less one, and
        as many more as there is padding between tokens and first tokens that the scheme
        keeps (too few: NaN, never other numbers).
      num_heads: N.
      head_dim: H.
      num_kv_heads: K. Default: N.
      model_dim: D, for schemes that read `x`.
      dtype: of k and v.
      coordinates: an array or shape [B, T] or [A, B, T] like those that will be given,
        where they are not the positions.
      ring: whether to write over the oldest tokens once full; needs a window.

    >>> import posenc_jax as pe
    >>> cache = pe.new_cache(pe.RoPE(head_dim=8), 2, 16, num_heads=4, head_dim=8)
    >>> cache.k.shape
    (2, 16, 4, 8)
    """
    kv_heads = num_heads if num_kv_heads is None else num_kv_heads
    q = jax.ShapeDtypeStruct((batch, 1, num_heads, head_dim), dtype)
    k = jax.ShapeDtypeStruct((batch, 1, kv_heads, head_dim), dtype)
    x = None if model_dim is None else jax.ShapeDtypeStruct((batch, 1, model_dim), dtype)
    at = jax.ShapeDtypeStruct((batch, 1), jnp.int32)
    if coordinates is not None:
        shape = (*coordinates.shape[:-1], 1)
        number = jnp.float32 if coordinates.dtype == jnp.float32 else jnp.int32
        coordinates = at = jax.ShapeDtypeStruct(shape, number)

    def stored(params, x, q, k, at):
        _, k_features, state = scheme.features(params, x, q, k, at, None, None)
        if scheme.traits.cache_transformed_keys:
            k = scheme.key(params, k, at, k_features)
        return k, k_features, state

    params = jax.eval_shape(scheme.init, jax.random.key(0))
    stored_k, k_features, state = jax.eval_shape(stored, params, x, q, k, at)
    return KVCache.empty(
        stored_k,
        k,
        capacity,
        coordinates=coordinates,
        k_features=k_features,
        state=state,
        ring=ring,
        num_sink_tokens=scheme.traits.num_sink_tokens if ring else 0,
    )


def _output(result: jax.Array | tuple[jax.Array, jax.Array]) -> jax.Array:
    """The output alone, where no log-sum-exp was asked for."""
    if isinstance(result, tuple):
        raise ValueError("scheme_attention: return_lse goes with `attention` only.")
    return result


def _coordinates(
    where: str, scheme: Scheme, coordinates: jax.Array, batch: int, length: int
) -> jax.Array:
    """[T] or [B, T] to [B, T]; [A, B, T] stay."""
    coordinates = coordinate_values(where, coordinates)
    if coordinates.ndim != 3:
        return _rows(where, coordinates, batch, length, "coordinates")
    axes = scheme.traits.num_axes
    wanted = (axes, batch, length)
    require(
        not scheme.acts or (axes > 1 and coordinates.shape == wanted),
        f"{where}: {scheme!r} reads coordinates of {axes} axes, [A, B, T] = {wanted} or "
        f"[B, T], got {coordinates.shape}.",
    )
    return coordinates


def _rows(where: str, x: jax.Array, batch: int, length: int, name: str) -> jax.Array:
    """[T], [1, T] or [B, T] to [B, T]."""
    x = x[None] if x.ndim == 1 else x
    require(
        x.ndim == 2 and x.shape[0] in (1, batch) and x.shape[1] == length,
        f"{where}: {name} must be [T] or [B, T] = ({batch}, {length}), got {x.shape}.",
    )
    return jnp.broadcast_to(x, (batch, length))


def _check_ring(
    cache: KVCache, positions: jax.Array, segments: jax.Array, window: Window
) -> jax.Array:
    """Returns bool [B], whether a ring forgets what its next tokens see; raises if it must."""
    if not cache.ring:
        return jnp.zeros(positions.shape[0], bool)
    sides = window_sides(window)
    if sides is None or sides[0] < 0:
        raise ValueError("scheme_attention: a ring cache forgets tokens, so it needs a window.")
    length = positions.shape[1]
    needed = cache.num_sink_tokens + sides[0] + length
    require(
        cache.capacity >= needed,
        f"scheme_attention: {length} tokens at a time with window {window} need a ring of "
        f"{needed} slots, and the cache has {cache.capacity}.",
    )
    return cache.forgets(positions, segments, sides[0])
