"""Embedding and attention with a scheme as pure functions, which the Flax layers call."""

import dataclasses
import functools
from collections.abc import Callable
from typing import Any, Unpack, overload

import jax
import jax.numpy as jnp
import numpy as np

from posenc_jax.cache.kv_cache import KVCache
from posenc_jax.cache.slots import finite_values
from posenc_jax.checks import (
    array_of_rank,
    coordinate_values,
    floating,
    require,
    token_integers,
)
from posenc_jax.engine.api import AttentionCall
from posenc_jax.engine.block_mask import BlockMask
from posenc_jax.engine.mask import SlidingWindow, Window, by_coordinates
from posenc_jax.engine.problem import Implementations
from posenc_jax.functional.arguments import (
    AttentionOptions,
    check_order,
    checked,
    checked_params,
    scheme_coordinates,
    token_positions,
)
from posenc_jax.functional.pipeline import Norms, Pipeline, Projections, an_array
from posenc_jax.positions.packing import are_consecutive, are_restarting
from posenc_jax.schemes.scheme import Acts, Params, Scheme

_BY_COORDINATES = Acts.LOGITS | Acts.VALUES | Acts.ATTENTION
"""Where a scheme reads the coordinates of pairs of tokens."""


def scheme_embedding(
    scheme: Scheme,
    params: Params,
    x: jax.Array,
    *,
    positions: jax.Array | None = None,
    coordinates: jax.Array | None = None,
    segment_ids: jax.Array | None = None,
    cache: KVCache | None = None,
) -> jax.Array:
    """Returns token embeddings [B, T, D] with positions encoded, if the scheme acts there.

    Args:
      scheme: the position encoding.
      params: its parameters.
      x: token embeddings [B, T, D], or [T, D] without a cache.
      positions: integers [T] or [B, T]. Default: 0, 1, ... in every segment, after its tokens in
        the cache; padding does not count.
      coordinates: the numbers that the scheme encodes, [T], [B, T] or [A, B, T]. Default: the
        positions.
      segment_ids: integers [T] or [B, T], as in `scheme_attention`.
      cache: the cache of an attention layer, before these tokens are appended.

    Raises:
      ValueError: for shapes or parameters that do not fit.
      TypeError: for positions that are not integers, and x that is not floating.

    >>> import posenc_jax as pe
    >>> pe.scheme_embedding(pe.Sinusoidal(model_dim=2), {}, jnp.zeros((1, 1, 2)))
    Array([[[0., 1.]]], dtype=float32)
    """
    caller = "scheme_embedding"
    if jnp.ndim(x) == 2 and cache is None:
        if coordinates is not None and jnp.ndim(coordinates) == 2:  # [A, T].
            coordinates = jnp.expand_dims(coordinates, 1)
        x = scheme_embedding(
            *(scheme, params, x[None]),
            positions=positions,
            coordinates=coordinates,
            segment_ids=segment_ids,
        )
        return x[0]
    floating(caller, "x", x)
    array_of_rank(caller, "x", x, 3, "[B, T, D]")
    params = checked_params(caller, scheme, params)
    shape = x.shape[:2]
    if segment_ids is not None:
        segment_ids = token_integers(caller, "segment_ids", segment_ids, shape)
        segment_ids = jnp.broadcast_to(segment_ids, shape)
    encoded = token_positions(caller, positions, cache, shape, segment_ids)
    if coordinates is not None:
        encoded = scheme_coordinates(caller, scheme, "coordinates", coordinates, shape)
    return an_array(scheme, "embed", scheme.embed(params, x, encoded))


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class Tables:
    """Arrays that depend on coordinates alone, and the scheme whose `tables` they are."""

    arrays: Any
    scheme: Scheme = dataclasses.field(metadata={"static": True})


def scheme_tables(scheme: Scheme, params: Params, coordinates: jax.Array) -> Tables | None:
    """Returns arrays that q, k and all layers can share, for `scheme_attention(tables=...)`.

    Args:
      scheme: the position encoding.
      params: its parameters.
      coordinates: as the calls are given them, or the positions by default: [T], [B, T] or
        [A, B, T]. B = 1 serves any batch with equal rows.

    Returns:
      A pytree of arrays that knows its scheme, or None for a scheme without tables.

    >>> import posenc_jax as pe
    >>> rope, q = pe.RoPE(head_dim=4), jnp.ones((2, 3, 2, 4))
    >>> tables = pe.scheme_tables(rope, {}, jnp.arange(3))  # Once for all layers.
    >>> out, _ = pe.scheme_attention(rope, {}, q, q, q, tables=tables)
    """
    params = checked_params("scheme_tables", scheme, params)
    coordinates = coordinate_values("scheme_tables", coordinates)
    arrays = scheme.tables(params, coordinates[None] if coordinates.ndim == 1 else coordinates)
    return Tables(arrays, scheme) if jax.tree.leaves(arrays) else None


@overload
def scheme_attention(  # ty: ignore[inconsistent-overload-implementation]: see `attention`.
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
def scheme_attention(  # ty: ignore[inconsistent-overload-implementation]: see `attention`.
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
    mask: jax.Array | BlockMask | None = None,
    is_causal: bool = False,
    window: Window = None,
    prefix_length: jax.Array | None = None,
    visible_until: jax.Array | None = None,
    scale: float | None = None,
    softcap: float | None = None,
    sinks: jax.Array | None = None,
    dropout_rate: float = 0.0,
    dropout_key: jax.Array | None = None,
    implementation: Implementations = None,
) -> tuple[jax.Array, KVCache | None]:
    """Self-attention of T tokens with a scheme, after the tokens in the cache if one is given.

    Args:
      scheme: the position encoding.
      params: its parameters.
      q, k, v: [B, T, N, H], [B, T, K, H] and [B, T, K, V], as projected. Without a cache the batch
        axis may be missing, and is then missing in x, `mask`, coordinates [A, T] and the output.
      x: the activations that they were projected from, [B, T, D], which some schemes read.
      positions: integers [T] or [B, T]. Default: 0, 1, ... in every segment, after its tokens in
        the cache; padding does not count.
      coordinates: the numbers that the scheme encodes, [T], [B, T] or [A, B, T]. Default: the
        positions.
      segment_ids: integers [T] or [B, T], below zero for padding. Default: one segment, or the
        last one of each row of the cache. Schemes
        with a running state (FoX, CABLE, PaTH, selective RoPE, short convolutions, Partial Key
        Offset) need the tokens of a segment to be consecutive, except for padding, and in the
        order of their positions, also in the cache.
      cache: keys and values of earlier tokens; see `new_cache`.
      tables: `scheme_tables` of these coordinates, to compute them once for all layers.
      norms: functions of q and of k after the scheme's `query` and `key`. Default: none.
      contiguous: as in `attention`, without a cache.
      scale: the factor on q . k. Default: 1/sqrt(H), for every scheme.
      visible_until: integers [T] or [B, T]; tokens at this position and later do not see the token:
        the end of its branch, in trees of `positions.from_tree`. With a cache, it is stored, and
        tokens without one are seen by all later ones.
      mask, is_causal, window, prefix_length, softcap, sinks, dropout_rate, dropout_key,
        implementation: as in `attention`. With a cache, S is its capacity: the slots of a row hold
        its tokens in their order, without padding; a ring takes no mask. All tokens of a prefix go
        into one call, and later calls with a window need its length too.

    Returns:
      The output [B, T, N, V], and the cache with these tokens in it, or None.

    Raises:
      ValueError: for shapes, parameters or options that do not fit, and for a scheme of causal
        attention alone where queries may see later keys.
      TypeError: for positions that are not integers.
      NotImplementedError: for norms of a scheme that scales q or k, or replaces attention.

    >>> import posenc_jax as pe
    >>> scheme = pe.RoPE(head_dim=4)
    >>> q = k = v = jnp.ones((1, 3, 2, 4))
    >>> out, _ = pe.scheme_attention(scheme, {}, q, k, v, is_causal=True)
    >>> out.shape
    (1, 3, 2, 4)
    """
    call = AttentionCall(
        q_positions=positions,
        q_coordinates=coordinates,
        q_segment_ids=segment_ids,
        contiguous=contiguous,
        mask=mask,
        is_causal=is_causal,
        window=window,
        prefix_length=prefix_length,
        k_visible_until=visible_until,
        scale=scale,
        softcap=softcap,
        sinks=sinks,
        dropout_rate=dropout_rate,
        dropout_key=dropout_key,
        implementation=implementation,
    )
    tokens = Projections(q, k, v, x, tables=tables)
    pipeline = Pipeline(scheme, params, norms)
    if not np.ndim(q) == np.ndim(k) == np.ndim(v) == 3:
        return self_attention(pipeline, tokens, call, cache)
    require(
        cache is None,
        "scheme_attention: rows of a cache are a batch; give q, k and v as [1, T, heads, H].",
    )
    arrays = {"q": q, "k": k, "v": v, "x": x}
    arrays = {n: None if a is None else jnp.expand_dims(a, 0) for n, a in arrays.items()}
    out, _ = self_attention(pipeline, tokens.replace(**arrays), call.with_batch_axis())
    return out[0], None


def self_attention(
    pipeline: Pipeline, tokens: Projections, call: AttentionCall, cache: KVCache | None = None
) -> tuple[jax.Array, KVCache | None]:
    """Computes `scheme_attention` of q, k, v, x and tables in `tokens`.

    In `call`, the fields of queries hold positions, coordinates and segments as the caller gave
    them.
    """
    caller, scheme = "scheme_attention", pipeline.scheme
    tokens.check(caller)
    pipeline = checked(caller, pipeline, tokens.q, tokens.k)
    check_order(caller, scheme, call, tokens.q.shape[1])
    _check_call(call, cache, scheme)
    shape = tokens.q.shape[:2]
    places = call.q_positions, call.q_segment_ids
    by_default = call.q_coordinates is None and cache is None
    by_default &= call.q_positions is None or (are_restarting(*places) and not call.contiguous)
    if call.contiguous is None and cache is None and not by_default:
        known = call.q_coordinates is None and are_consecutive(*places)
        call = call.replace(contiguous=known)
    if call.scale is None:
        call = call.replace(scale=scheme.logit_scale(tokens.q.shape[-1]))
    segment_ids, coordinates = call.q_segment_ids, call.q_coordinates
    if segment_ids is not None:
        segment_ids = token_integers(caller, "segment_ids", segment_ids, shape)
        segment_ids = jnp.broadcast_to(segment_ids, shape)
    positions = token_positions(caller, call.q_positions, cache, shape, segment_ids)
    if coordinates is not None:
        coordinates = scheme_coordinates(caller, scheme, "coordinates", coordinates, shape)
    until = call.k_visible_until
    if until is not None:
        until = jnp.broadcast_to(token_integers(caller, "visible_until", until, shape), shape)
    call = call.replace(
        # By default attention knows them, so that rules are evaluated per distance.
        q_positions=None if by_default else positions,
        q_coordinates=coordinates,
        q_segment_ids=segment_ids,
        k_visible_until=until,
    )
    coordinates = positions if coordinates is None else coordinates
    if tokens.tables is None:
        tables = scheme.tables(pipeline.params, coordinates)
    else:
        tables = _tables_of(scheme, pipeline.params, tokens.tables, coordinates)
    tokens = tokens.replace(coordinates=coordinates, segment_ids=call.q_segment_ids, tables=tables)
    if cache is not None:
        return _with_cache(pipeline, tokens, positions, call, cache)
    tokens = pipeline.encode(_read(pipeline, tokens, call))
    call = call.replace(
        k_positions=call.q_positions,
        k_coordinates=call.q_coordinates,
        k_segment_ids=call.q_segment_ids,
    )
    return pipeline.attend(tokens, tokens, call), None


def _with_cache(
    pipeline: Pipeline,
    tokens: Projections,
    positions: jax.Array,
    call: AttentionCall,
    cache: KVCache,
) -> tuple[jax.Array, KVCache]:
    """Appends the tokens to the cache, and returns the output of attention to it and the cache."""
    scheme = pipeline.scheme
    reads_coordinates = not scheme.traits.cache_transformed_keys
    reads_coordinates |= bool(scheme.acts & _BY_COORDINATES) | by_coordinates(call.window)
    require(
        not reads_coordinates or call.q_coordinates is None or cache.coordinates is not None,
        "scheme_attention: the scheme or the window reads the coordinates of cached keys and the "
        "cache has none; make it with new_cache(..., coordinates=...).",
    )
    require(
        call.k_visible_until is None or cache.visible_until is not None,
        "scheme_attention: visible_until needs a cache made with new_cache(..., "
        "visible_until=True).",
    )
    segment_ids = tokens.segment_ids
    if segment_ids is None:
        segment_ids = jnp.broadcast_to(cache.next_segment_ids[:, None], positions.shape)
    tokens = tokens.replace(state=cache.state, segment_ids=segment_ids)
    past_states = None
    if cache.max_rewind:
        past_states = _past_states(
            lambda ids: pipeline.read(tokens.replace(segment_ids=ids)).state,
            segment_ids,
            min(positions.shape[1] - 1, cache.max_rewind),
        )
    read = _read(pipeline, tokens, call)
    stored = pipeline.stored(read)
    k, v = finite_values(stored.k.astype(cache.k.dtype), stored.v.astype(cache.v.dtype))
    cache = cache.append(
        k,
        v,
        positions,
        segment_ids,
        coordinates=None if cache.coordinates is None else tokens.coordinates,
        k_features=stored.k_features,
        state=stored.state,
        past_states=past_states,
        visible_until=call.k_visible_until,
        window=(-1, -1) if call.window is None else call.window,  # All keys: a ring refuses.
    )
    call = call.replace(
        q_coordinates=None if cache.coordinates is None else tokens.coordinates,
        q_segment_ids=segment_ids,
        k_positions=cache.positions,
        k_coordinates=cache.coordinates,
        k_segment_ids=cache.segment_ids,
        k_visible_until=cache.visible_until,
        finite_values=True,
    )
    queries = read.replace(q=pipeline.query(read))
    keys = tokens.replace(
        k=cache.k,
        v=cache.v,
        coordinates=cache.positions if cache.coordinates is None else cache.coordinates,
        segment_ids=cache.segment_ids,
        k_features=cache.k_features,
        tables=None,
    )
    out = pipeline.attend(queries, pipeline.loaded(keys), call)
    return _nan_in_rows(out, cache.overflowed), cache


@functools.partial(jax.jit, inline=True)
def _nan_in_rows(out: jax.Array, overflowed: jax.Array) -> jax.Array:
    """Returns NaN for rows that have overflowed: under `jit` they cannot raise."""
    return jnp.where(overflowed[:, None, None, None], jnp.nan, out).astype(out.dtype)


def _read(pipeline: Pipeline, tokens: Projections, call: AttentionCall) -> Projections:
    """Returns the tokens after `mix` and `features`, which read one sequence, not a tree."""
    read = pipeline.read(tokens)
    if call.k_visible_until is not None and jax.tree.leaves(read.state):
        raise NotImplementedError(
            f"scheme_attention: {pipeline.scheme!r} has a running state of one sequence, and "
            "visible_until makes a tree of several."
        )
    return read


def _check_call(call: AttentionCall, cache: KVCache | None, scheme: Scheme) -> None:
    """Raises for options that do not go together."""
    if cache is None:
        return
    if not hasattr(cache, "next_positions"):  # A Flax variable of a cache has it, too.
        raise TypeError(
            "scheme_attention: cache must be the KVCache of one layer, as new_cache makes it, got "
            f"{type(cache).__name__}."
        )
    require(
        call.contiguous is None,
        "scheme_attention: contiguous has no meaning with a cache, got contiguous="
        f"{call.contiguous}.",
    )
    if cache.scheme not in (None, scheme):
        raise ValueError(
            f"scheme_attention: the cache was made for {cache.scheme!r}, and the scheme is "
            f"{scheme!r}."
        )
    require(
        not cache.ring or call.prefix_length is None,
        "scheme_attention: every query sees the keys of prefix_length, which a ring cache evicts.",
    )
    require(
        not cache.ring or not by_coordinates(call.window),
        "scheme_attention: a ring counts positions, and the window coordinates: use a full cache.",
    )
    if cache.ring and isinstance(call.window, SlidingWindow):
        sinks = cache.storage.num_sink_tokens
        require(
            sinks >= call.window.num_sink_tokens,
            f"scheme_attention: {call.window} needs a ring with its num_sink_tokens, got {sinks}.",
        )
    require(
        not cache.ring or call.mask is None,
        "scheme_attention: mask is by slot, and the slots of a ring cache take new tokens in turn: "
        "use a full cache.",
    )


def _tables_of(scheme: Scheme, params: Params, tables: Any, coordinates: jax.Array) -> Any:
    """Returns the arrays of `scheme_tables` of this scheme, for B rows or one.

    Raises:
      ValueError: for tables of another scheme, or of coordinates of another shape.
      TypeError: for other arrays.
    """
    if not isinstance(tables, Tables):
        raise TypeError(
            f"scheme_attention: tables must be scheme_tables of {scheme!r}, got "
            f"{type(tables).__name__}."
        )
    require(
        tables.scheme == scheme,
        f"scheme_attention: tables must be of {scheme!r}, got those of {tables.scheme!r}.",
    )

    def types(tree):
        leaves, structure = jax.tree.flatten(tree)
        return structure, [f"{jnp.result_type(x)}{[*jnp.shape(x)]}" for x in leaves]

    rows = coordinates, coordinates[..., :1, :]
    whole, row = (types(jax.eval_shape(scheme.tables, params, x)) for x in rows)
    require(
        types(tables.arrays) in (whole, row),
        f"scheme_attention: tables must be scheme_tables of coordinates {coordinates.shape}, with "
        f"leaves {', '.join(whole[1])}, got {', '.join(types(tables.arrays)[1])}.",
    )
    return tables.arrays


def _past_states(states_of: Callable[[jax.Array], Any], segment_ids: jax.Array, count: int) -> Any:
    """Returns the states without the last 1 .. `count` tokens of each row, [B, count, ...].

    Args:
      states_of: a function of segment ids that returns the states.
      segment_ids: int32 [B, T].
      count: number of states.
    """
    from_end = jnp.cumsum((segment_ids >= 0)[:, ::-1], axis=1, dtype=jnp.int32)[:, ::-1]

    def without(last):
        return states_of(jnp.where(from_end > last, segment_ids, -1))

    return jax.vmap(without, out_axes=1)(jnp.arange(1, count + 1, dtype=jnp.int32))
