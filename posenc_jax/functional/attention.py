"""Embedding and attention with a scheme as pure functions, which the Flax layers call."""

import functools
from typing import Any, TypedDict, Unpack, overload

import jax
import jax.numpy as jnp
from jax.sharding import NamedSharding, PartitionSpec

from posenc_jax.cache.kv_cache import KVCache
from posenc_jax.checks import array_of_rank, coordinate_values, integer_positions, require
from posenc_jax.engine.api import AttentionCall
from posenc_jax.engine.mask import Window
from posenc_jax.engine.problem import Implementation
from posenc_jax.functional.tokens import (
    Norms,
    axis_coordinates,
    by_row,
    check_hooks,
    check_norms,
    check_params,
    check_tokens,
    contents,
    same,
    token_positions,
    zero_padding,
)
from posenc_jax.schemes.scheme import Acts, Params, Scheme


class TokenOptions(TypedDict, total=False):
    """Arguments of `scheme_attention` that attention layers take in a call."""

    positions: jax.Array | None
    coordinates: jax.Array | None
    segment_ids: jax.Array | None
    tables: Any
    mask: jax.Array | None
    prefix_length: jax.Array | None
    sinks: jax.Array | None


class LayerOptions(TypedDict, total=False):
    """Arguments of `scheme_attention` that attention layers have as settings."""

    norms: Norms | None

    is_causal: bool
    window: Window
    softcap: float | None
    scale: float | None
    dropout_rate: float
    dropout_key: jax.Array | None
    implementation: str | Implementation | None


class AttentionOptions(TokenOptions, LayerOptions, total=False):
    """Optional arguments of `scheme_attention`, except the cache."""

    x: jax.Array | None
    contiguous: bool | None


class CacheOptions(TypedDict, total=False):
    """Arguments of `new_cache` that attention layers pass on."""

    coordinates: jax.Array | jax.ShapeDtypeStruct | None
    ring: bool
    max_rewind: int
    qkv_sharding: PartitionSpec | None


def scheme_embedding(
    scheme: Scheme,
    params: Params,
    x: jax.Array,
    *,
    positions: jax.Array | None = None,
    coordinates: jax.Array | None = None,
    cache: KVCache | None = None,
) -> jax.Array:
    """Returns token embeddings [B, T, D] with positions encoded, if the scheme acts there.

    Args:
      scheme: the position encoding.
      params: its parameters.
      x: token embeddings [B, T, D].
      positions: integers [T] or [B, T]. Default: 0, 1, ... after the tokens in the cache.
      coordinates: what the scheme encodes, [T], [B, T] or [A, B, T]. Default: the positions.
      cache: the cache of an attention layer, before it is given these tokens.

    Raises:
      ValueError: for shapes or parameters that do not fit.
      TypeError: for positions that are not integers.

    >>> import posenc_jax as pe
    >>> pe.scheme_embedding(pe.Sinusoidal(model_dim=2), {}, jnp.zeros((1, 1, 2)))
    Array([[[0., 1.]]], dtype=float32)
    """
    where = "scheme_embedding"
    array_of_rank(where, "x", x, 3, "[B, T, D]")
    check_params(where, scheme, params)
    batch, length = x.shape[:2]
    at = token_positions(where, positions, cache, batch, length)
    if coordinates is not None:
        at = axis_coordinates(where, scheme, coordinates, batch, length)
    return scheme.embed(params, x, at)


def scheme_tables(scheme: Scheme, params: Params, coordinates: jax.Array) -> Any:
    """Returns arrays that q, k and all layers can share, for `scheme_attention(tables=...)`.

    Args:
      scheme: the position encoding.
      params: its parameters.
      coordinates: those of the calls, which default to the positions: [T], [B, T] or
        [A, B, T]. B = 1 serves any batch whose rows are alike.

    Returns:
      A pytree of arrays, or None for a scheme without tables.

    >>> import posenc_jax as pe
    >>> rope, q = pe.RoPE(head_dim=4), jnp.ones((2, 3, 2, 4))
    >>> tables = pe.scheme_tables(rope, {}, jnp.arange(3))  # Once for all layers.
    >>> out, _ = pe.scheme_attention(rope, {}, q, q, q, tables=tables)
    """
    check_params("scheme_tables", scheme, params)
    at = coordinate_values("scheme_tables", coordinates)
    return scheme.tables(params, at[None] if at.ndim == 1 else at)


@overload
def scheme_attention(
    scheme: Scheme,
    params: Params,
    q: jax.Array,
    k: jax.Array,
    v: jax.Array,
    *,
    cache: None = None,
    **options: Unpack[AttentionOptions],
) -> tuple[jax.Array, None]: ...


@overload
def scheme_attention(
    scheme: Scheme,
    params: Params,
    q: jax.Array,
    k: jax.Array,
    v: jax.Array,
    *,
    cache: KVCache,
    **options: Unpack[AttentionOptions],
) -> tuple[jax.Array, KVCache]: ...


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
    tables: Any = None,
    norms: Norms | None = None,
    contiguous: bool | None = None,
    scale: float | None = None,
    **options: Any,
) -> tuple[jax.Array, KVCache | None]:
    """Self-attention of T tokens with a scheme, after the tokens in the cache if one is given.

    Args:
      scheme: the position encoding.
      params: its parameters.
      q, k, v: [B, T, N, H], [B, T, K, H] and [B, T, K, V], as projected.
      x: the activations that they were projected from, [B, T, D], which some schemes read.
      positions: integers [T] or [B, T]. Default: 0, 1, ...; with a cache, after the tokens in it,
        where padding does not count. Rows of several segments need them.
      coordinates: what the scheme encodes, [T], [B, T] or [A, B, T]. Default: the positions.
      segment_ids: integers [T] or [B, T], below zero for padding. Default: one segment. Schemes
        with a running state (FoX, CABLE, PaTH, selective RoPE, short convolutions, Partial Key
        Offset) need the tokens of a segment to be consecutive, but for padding, and in the order
        of their positions, in the cache too.
      cache: keys and values of earlier tokens; see `new_cache`.
      tables: `scheme_tables` of these coordinates, to compute them once for all layers.
      norms: functions of q and of k after the scheme's `query` and `key`. Default: none.
      contiguous: as in `attention`, without a cache.
      scale: the factor on q . k. Default: the scheme's own.
      **options: `mask`, `is_causal`, `window`, `prefix_length`, `softcap`, `sinks`,
        `dropout_rate`, `dropout_key` and `implementation`, as in `attention`. With a cache, S
        is its capacity, where the slots of a row hold its tokens in their order, without padding;
        and all tokens of a prefix go into the first call.

    Returns:
      The output [B, T, N, V], and the cache with these tokens in it, or None.

    Raises:
      ValueError: for shapes, parameters or options that do not fit.
      TypeError: for positions that are not integers.

    >>> import posenc_jax as pe
    >>> scheme = pe.RoPE(head_dim=4)
    >>> q = k = v = jnp.ones((1, 3, 2, 4))
    >>> out, _ = pe.scheme_attention(scheme, {}, q, k, v, is_causal=True)
    >>> out.shape
    (1, 3, 2, 4)
    """
    where = "scheme_attention"
    check_tokens(where, q, k, v, x)
    check_params(where, scheme, params)
    known = {"cache", *AttentionOptions.__annotations__}
    unknown = sorted(options.keys() - known)
    if unknown:
        raise TypeError(
            f"{where}: unknown argument {unknown[0]!r}; it takes {', '.join(sorted(known))}."
        )
    require(
        cache is None or contiguous is None,
        f"{where}: contiguous has no meaning with a cache, got contiguous={contiguous}.",
    )
    mask = options.get("mask")
    if mask is not None and jnp.ndim(mask) != 4:
        raise ValueError(
            f"{where}: mask must be [B or 1, N or 1, T, S], got shape {jnp.shape(mask)}; padding "
            "goes into segment_ids, see posenc_jax.positions.from_padding_mask."
        )
    if cache is not None:
        require(
            cache.scheme in (None, scheme),
            f"{where}: the cache was made for {cache.scheme!r}, and the scheme is {scheme!r}.",
        )
    batch, length = q.shape[:2]
    if scale is None:
        scale = scheme.logit_scale(q.shape[-1])
    default = positions is None and coordinates is None and cache is None
    if segment_ids is not None:
        segment_ids = integer_positions(where, segment_ids, "segment_ids")
        segment_ids = by_row(where, segment_ids, batch, length, "segment_ids")
    at = positions = token_positions(where, positions, cache, batch, length, segment_ids)
    if coordinates is not None:
        at = coordinates = axis_coordinates(where, scheme, coordinates, batch, length)
    if tables is None:
        tables = scheme.tables(params, at)
    else:
        _check_tables(scheme, params, tables, at)

    projected, states = (x, q, k, v), None if cache is None else cache.state
    made = contents(scheme, params, projected, at, segment_ids, states)
    (q, k, v), q_features, k_features, states = made
    check_norms(where, scheme, norms)
    q_norm, k_norm = norms or (same, same)
    q = q_norm(scheme.query(params, q, at, q_features, tables))
    transformed = scheme.traits.cache_transformed_keys
    if transformed or cache is None:
        k = k_norm(scheme.key(params, k, at, k_features, tables))
    v = scheme.value(params, v, at, k_features, tables)

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
        return scheme.output(params, out, at, q_features, tables), None

    reads = not transformed or bool(scheme.acts & (Acts.LOGITS | Acts.VALUES | Acts.ATTENTION))
    if reads and coordinates is not None and cache.coordinates is None:
        raise ValueError(
            f"{where}: the scheme reads the coordinates of cached keys and the cache has "
            "none; make it with new_cache(..., coordinates=...)."
        )
    segments = jnp.zeros_like(positions) if segment_ids is None else segment_ids
    require(
        not cache.ring or options.get("prefix_length") is None,
        f"{where}: every query sees the keys of prefix_length, which a ring cache evicts.",
    )
    past_states = None
    if cache.max_rewind:
        most = min(length - 1, cache.max_rewind)
        read = functools.partial(contents, scheme, params, projected, at, states=cache.state)
        past_states = _past_states(lambda kept: read(segment_ids=kept)[-1], segments, most)
    window = options.get("window")
    stored = None if cache.coordinates is None else at
    k, v = _finite_values(k, v)
    cache = cache.append(
        k,
        v,
        positions,
        segments,
        coordinates=stored,
        k_features=k_features,
        state=states,
        past_states=past_states,
        window=(-1, -1) if window is None else window,  # All keys, which a ring refuses.
    )
    call = AttentionCall(
        q_positions=positions,
        k_positions=cache.positions,
        q_segment_ids=segments,
        k_segment_ids=cache.segment_ids,
        finite_values=True,
        **options,
    )
    k_at = cache.positions if cache.coordinates is None else cache.coordinates
    if stored is not None:
        call = call.replace(q_coordinates=at, k_coordinates=k_at)
    k = cache.k
    if not transformed:  # `key` may read all slots at once; empty ones count as padding.
        features = zero_padding(cache.k_features, cache.segment_ids)
        k = k_norm(scheme.key(params, k, k_at, features))
    out = scheme.attend(params, q, k, cache.v, at, k_at, q_features, cache.k_features, call)
    out = scheme.output(params, out, at, q_features, tables)
    # Overflow cannot raise under jit: the rows concerned become NaN.
    lost = cache.overflowed[:, None, None, None]
    return jnp.where(lost, jnp.nan, out).astype(out.dtype), cache


def new_cache(
    scheme: Scheme,
    batch: int,
    capacity: int,
    *,
    num_heads: int,
    head_dim: int,
    num_kv_heads: int | None = None,
    value_dim: int | None = None,
    model_dim: int | None = None,
    dtype: Any = jnp.float32,
    coordinates: jax.Array | jax.ShapeDtypeStruct | None = None,
    ring: bool = False,
    max_rewind: int = 0,
    qkv_sharding: PartitionSpec | None = None,
    params: Params | None = None,
) -> KVCache:
    """Returns an empty cache for `scheme_attention` with this scheme.

    Args:
      scheme: the position encoding; its hooks determine what is stored.
      batch: B.
      capacity: number of slots, for the tokens of a row; padding takes none. A ring needs the
        window, plus the tokens per call less one, plus the sink tokens.
      num_heads: N.
      head_dim: H.
      num_kv_heads: K. Default: N.
      value_dim: V, the head dim of v. Default: H.
      model_dim: D, for schemes that read `x`.
      dtype: of k and v.
      coordinates: an array or shape [T], [B, T] or [A, B, T] like those that calls will give,
        if they give coordinates: integers, or real numbers for float32.
      ring: whether a full cache overwrites its oldest slots; needs a window.
      max_rewind: the most tokens that `rewind` of the cache takes back at once, if the scheme
        has a running state; other schemes take back any number.
      qkv_sharding: on explicit mesh axes, how q, k and v [B, T, heads, H] are sharded, as in
        `nnx.MultiHeadAttention`; all arrays of the cache follow. Needs `jax.set_mesh`.
      params: the scheme's parameters, if they are sharded on explicit mesh axes: its own arrays in
        the cache are sharded as it makes them from q, k and these.

    Raises:
      ValueError: without `model_dim` for a scheme that reads `x`, and for invalid sizes.

    >>> import posenc_jax as pe
    >>> cache = pe.new_cache(pe.RoPE(head_dim=8), 2, 16, num_heads=4, head_dim=8)
    >>> cache.k.shape
    (2, 16, 4, 8)
    """
    check_hooks("new_cache", scheme)
    require(
        model_dim is not None or not scheme.traits.reads_x,
        f"new_cache: {scheme!r} reads x, so the cache needs model_dim.",
    )
    kv_heads = num_heads if num_kv_heads is None else num_kv_heads

    def shape(sizes, dtype, spec):
        if qkv_sharding is None:
            return jax.ShapeDtypeStruct(sizes, dtype)
        spec = PartitionSpec(*spec, *(None,) * (len(sizes) - len(spec)))
        sharding = NamedSharding(jax.sharding.get_abstract_mesh(), spec)
        return jax.ShapeDtypeStruct(sizes, dtype, sharding=sharding)

    spec = () if qkv_sharding is None else tuple(qkv_sharding)
    q = shape((batch, 1, num_heads, head_dim), dtype, spec)
    k = shape((batch, 1, kv_heads, head_dim), dtype, spec)
    v = shape((batch, 1, kv_heads, head_dim if value_dim is None else value_dim), dtype, spec)
    x = None if model_dim is None else shape((batch, 1, model_dim), dtype, spec[:1])
    at = shape((batch, 1), jnp.int32, spec[:1])
    if coordinates is not None:
        real = jnp.issubdtype(coordinates.dtype, jnp.floating)
        lead = coordinates.shape[:-2]
        at = shape(
            (*lead, batch, 1), jnp.float32 if real else jnp.int32, (*(None,) * len(lead), *spec[:1])
        )
        coordinates = at

    def stored(params, x, q, k, v, at):
        made = contents(scheme, params, (x, q, k, v), at, None, None)
        (_, k, v), _, k_features, states = made
        v = scheme.value(params, v, at, k_features)
        if scheme.traits.cache_transformed_keys:
            k = scheme.key(params, k, at, k_features)
        return k, v, k_features, states

    if params is None:
        params = jax.eval_shape(scheme.init, jax.random.key(0))
    stored_k, stored_v, k_features, state = jax.eval_shape(stored, params, x, q, k, v, at)
    return KVCache.empty(
        stored_k,
        stored_v,
        capacity,
        coordinates=coordinates,
        k_features=k_features,
        state=state,
        scheme=scheme,
        max_rewind=max_rewind,
        ring=ring,
        num_sink_tokens=scheme.traits.num_sink_tokens if ring else 0,
    )


def _finite_values(k: jax.Array, v: jax.Array) -> tuple[jax.Array, jax.Array]:
    """Returns k and v of a cache, with NaN in the keys of values that are not finite.

    The logits of slots that a query does not see are masked, whatever their keys are; their values
    have weight zero, and 0 * NaN is NaN.
    """
    bad = ~jnp.isfinite(v).all(-1, keepdims=True)
    return jnp.where(bad, jnp.nan, k).astype(k.dtype), jnp.where(bad, 0, v).astype(v.dtype)


def new_params(scheme: Scheme, key: jax.Array) -> Params:
    """Returns `scheme.init(key)`, float32 with 64-bit types enabled too."""
    return jax.tree.map(
        lambda a: a.astype(jnp.float32) if a.dtype == jnp.float64 else a, scheme.init(key)
    )


def _check_tables(scheme: Scheme, params: Params, tables: Any, at: jax.Array) -> None:
    """Raises unless `tables` are shaped like those of coordinates `at`, for B or one row."""

    def shapes(tree):
        leaves, structure = jax.tree.flatten(tree)
        return structure, [jnp.shape(leaf) for leaf in leaves]

    whole, row = (shapes(jax.eval_shape(scheme.tables, params, a)) for a in (at, at[..., :1, :]))
    require(
        shapes(tables) in (whole, row),
        f"scheme_attention: tables must be scheme_tables of coordinates {at.shape}, with leaves "
        f"{whole[1]}, got {shapes(tables)[1]}.",
    )


def _past_states(states_of: Any, segments: jax.Array, most: int) -> Any:
    """Returns the states without the last 1 .. `most` tokens of each row, [B, most, ...].

    Args:
      states_of: a function of segment ids that returns the states.
      segments: int32 [B, T].
      most: how many states.
    """
    from_end = jnp.cumsum((segments >= 0)[:, ::-1], axis=1, dtype=jnp.int32)[:, ::-1]

    def without(count):
        return states_of(jnp.where(from_end > count, segments, -1))

    return jax.vmap(without, out_axes=1)(jnp.arange(1, most + 1, dtype=jnp.int32))
