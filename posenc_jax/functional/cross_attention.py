"""Attention of one sequence to another one, with a scheme."""

from typing import Any

import jax
import jax.numpy as jnp

from posenc_jax.checks import array_of_rank, require, token_integers
from posenc_jax.engine.api import AttentionCall
from posenc_jax.engine.block_mask import BlockMask
from posenc_jax.engine.mask import Window, by_coordinates
from posenc_jax.engine.problem import Implementations
from posenc_jax.functional.arguments import check_order, checked, scheme_coordinates
from posenc_jax.functional.pipeline import Norms, Pipeline, Projections
from posenc_jax.positions import count_up
from posenc_jax.schemes.scheme import Params, Scheme


def scheme_cross_attention(
    scheme: Scheme,
    params: Params,
    q: jax.Array,
    k: jax.Array,
    v: jax.Array,
    *,
    x: jax.Array | None = None,
    memory: jax.Array | None = None,
    positions: jax.Array | None = None,
    k_positions: jax.Array | None = None,
    coordinates: jax.Array | None = None,
    k_coordinates: jax.Array | None = None,
    segment_ids: jax.Array | None = None,
    k_segment_ids: jax.Array | None = None,
    norms: Norms | None = None,
    mask: jax.Array | BlockMask | None = None,
    is_causal: bool = False,
    window: Window = None,
    prefix_length: jax.Array | None = None,
    k_visible_until: jax.Array | None = None,
    scale: float | None = None,
    softcap: float | None = None,
    sinks: jax.Array | None = None,
    dropout_rate: float = 0.0,
    dropout_key: jax.Array | None = None,
    implementation: Implementations = None,
) -> jax.Array:
    """Attention of T tokens to S tokens of another sequence, with a scheme.

    Schemes other than `NoPE` need the positions of both sequences. Relating them makes sense where
    the sequences have a common axis, such as time.

    Args:
      scheme: the position encoding.
      params: its parameters.
      q: [B, T, N, H], as projected.
      k, v: [B, S, K, H] and [B, S, K, V], as projected.
      x: the activations that q was projected from, [B, T, D], which some schemes read.
      memory: the activations that k and v were projected from, [B, S, D].
      positions, k_positions: integers [T] or [B, T], and [S] or [B, S]; both or none.
      coordinates, k_coordinates: the numbers that the scheme encodes, [T], [B, T] or [A, B, T],
        with S in place of T for keys. Default: the positions.
      segment_ids, k_segment_ids: integers [T] or [B, T], and [S] or [B, S], below zero for padding.
        Tokens see their own segment, and all but padding where one sequence has none.
      norms: functions of q and of k after the scheme's `query` and `key`. Default: none.
      scale: the factor on q . k. Default: 1/sqrt(H), for every scheme.
      mask, is_causal, window, prefix_length, k_visible_until, softcap, sinks, dropout_rate,
        dropout_key, implementation: as in `attention`. Causality and windows compare positions.

    Returns:
      The output [B, T, N, V].

    Raises:
      ValueError: for arguments that do not fit, without positions for a scheme that needs them, and
        for a scheme of causal attention alone where queries may see later keys.
      NotImplementedError: for a scheme with a running state (FoX, PaTH, short convolutions).

    >>> import posenc_jax as pe
    >>> q, k = jnp.ones((1, 3, 2, 4)), jnp.ones((1, 5, 2, 4))
    >>> places = {"positions": jnp.arange(2, 5), "k_positions": jnp.arange(5)}
    >>> pe.scheme_cross_attention(pe.RoPE(head_dim=4), {}, q, k, k, **places).shape
    (1, 3, 2, 4)
    """
    call = AttentionCall(
        q_positions=positions,
        k_positions=k_positions,
        q_coordinates=coordinates,
        k_coordinates=k_coordinates,
        q_segment_ids=segment_ids,
        k_segment_ids=k_segment_ids,
        mask=mask,
        is_causal=is_causal,
        window=window,
        prefix_length=prefix_length,
        k_visible_until=k_visible_until,
        scale=scale,
        softcap=softcap,
        sinks=sinks,
        dropout_rate=dropout_rate,
        dropout_key=dropout_key,
        implementation=implementation,
    )
    return cross_attention(Pipeline(scheme, params, norms), Projections(q, k, v, x), memory, call)


def cross_attention(
    pipeline: Pipeline, tokens: Projections, memory: jax.Array | None, call: AttentionCall
) -> jax.Array:
    """Computes `scheme_cross_attention` of q and x in `tokens` to k, v and `memory`."""
    caller = "scheme_cross_attention"
    q, k, v = tokens.q, tokens.k, tokens.v
    queries, keys = tokens.replace(k=q, v=q), Projections(k, k, v, memory)
    queries.check(caller)
    array_of_rank(caller, "k", k, 4, "[B, S, K, H]")
    keys.check(caller, "k", "memory")
    require(
        memory is not None or not pipeline.scheme.traits.reads_x,
        f"{caller}: {pipeline.scheme!r} reads the layer's input at the keys; pass memory.",
    )
    pipeline = checked(caller, pipeline, q, k)
    scheme = pipeline.scheme
    check_order(caller, scheme, call, q.shape[1])
    q_ids, k_ids = _segments(call, q.shape[:2], k.shape[:2])
    sides = (
        ("", q, call.q_positions, call.q_coordinates),
        ("k_", k, call.k_positions, call.k_coordinates),
    )
    (q_positions, q_coordinates), (k_positions, k_coordinates) = (
        _places(scheme, side, x.shape[:2], *places) for side, x, *places in sides
    )
    # With T = S, positions of one side would be taken for both, and slots for missing ones.
    missing = [x is None for x in (q_positions, k_positions)]
    ordered = call.is_causal or call.window is not None or call.k_visible_until is not None
    require(
        not any(missing) or (all(missing) and not ordered),
        f"{caller}: positions and k_positions go together, and is_causal, window and "
        "k_visible_until need them.",
    )

    def read(tokens: Projections) -> Projections:
        tokens = pipeline.read(tokens)
        if jax.tree.leaves(tokens.state):
            raise NotImplementedError(
                f"{caller}: {scheme!r} has a running state of one sequence, and there are two."
            )
        return tokens

    def zeros(heads: jax.Array, sequence: jax.Array) -> jax.Array:
        return jnp.zeros((*sequence.shape[:2], *heads.shape[2:]), heads.dtype)

    # `read` needs q, k and v of one sequence: features of queries depend on q and x alone, those
    # of keys on k and memory, so zeros stand for the other arrays.
    queries = read(
        queries.replace(k=zeros(k, q), v=zeros(v, q), coordinates=q_coordinates, segment_ids=q_ids)
    )
    keys = read(keys.replace(q=zeros(q, k), coordinates=k_coordinates, segment_ids=k_ids))
    queries = queries.replace(q=pipeline.query(queries))
    keys = keys.replace(k=pipeline.key(keys), v=pipeline.value(keys))
    reads_coordinates = scheme.acts_in_attention or by_coordinates(call.window)
    call = call.replace(
        q_positions=q_positions,
        k_positions=k_positions,
        q_coordinates=q_coordinates if reads_coordinates else None,
        k_coordinates=k_coordinates if reads_coordinates else None,
        q_segment_ids=q_ids,
        k_segment_ids=k_ids,
        contiguous=False,
        scale=scheme.logit_scale(q.shape[-1]) if call.scale is None else call.scale,
    )
    return pipeline.attend(queries, keys, call)


def _segments(
    call: AttentionCall, q_shape: tuple[int, ...], k_shape: tuple[int, ...]
) -> tuple[jax.Array | None, jax.Array | None]:
    """Returns the ids of queries and keys; where one side has none, padding alone counts."""
    q_ids, k_ids = call.q_segment_ids, call.k_segment_ids
    if q_ids is None and k_ids is None:
        return None, None
    one_side = q_ids is None or k_ids is None

    def filled(name, ids, shape):
        if ids is None:
            return jnp.zeros(shape, jnp.int32)
        ids = _integers(name, ids, shape)
        return jnp.minimum(ids, 0) if one_side else ids

    return filled("segment_ids", q_ids, q_shape), filled("k_segment_ids", k_ids, k_shape)


def _places(
    scheme: Scheme, side: str, shape: tuple[int, ...], positions: Any, coordinates: Any
) -> tuple[jax.Array | None, jax.Array]:
    """Returns positions and coordinates of queries (side "") or keys (side "k_")."""
    caller = "scheme_cross_attention"
    if positions is not None:
        positions = _integers(f"{side}positions", positions, shape)
    if coordinates is not None:
        name = f"{side}coordinates"
        return positions, scheme_coordinates(caller, scheme, name, coordinates, shape)
    require(
        positions is not None or not scheme.acts_in_attention,
        f"{caller}: {scheme!r} relates the tokens of both sequences by their positions; give "
        f"{side}positions or {side}coordinates.",
    )
    return positions, count_up(*shape) if positions is None else positions


def _integers(name: str, x: jax.Array, shape: tuple[int, ...]) -> jax.Array:
    return jnp.broadcast_to(token_integers("scheme_cross_attention", name, x, shape), shape)
