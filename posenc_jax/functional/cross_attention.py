"""Attention of one sequence to another one, with a scheme."""

from typing import Any

import jax
import jax.numpy as jnp

from posenc_jax.checks import require
from posenc_jax.engine.api import AttentionCall
from posenc_jax.functional.arguments import (
    AttentionOptions,
    attention_call,
    check_pipeline,
    check_tokens,
    refuse_unknown,
    token_coordinates,
    token_integers,
)
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
    scale: float | None = None,
    **options: Any,
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
      positions, k_positions: integers [T] or [B, T], and [S] or [B, S].
      coordinates, k_coordinates: the numbers that the scheme encodes, [T], [B, T] or [A, B, T],
        with S in place of T for keys. Default: the positions.
      segment_ids, k_segment_ids: integers [T] or [B, T], and [S] or [B, S], below zero for padding.
        Tokens see their own segment. Default: one segment.
      norms: functions of q and of k after the scheme's `query` and `key`. Default: none.
      scale: the factor on q . k. Default: the scheme's own.
      **options: `mask`, `is_causal`, `window`, `prefix_length`, `softcap`, `sinks`,
        `dropout_rate`, `dropout_key` and `implementation`, as in `attention`. Causality and
        windows compare positions.

    Returns:
      The output [B, T, N, V].

    Raises:
      ValueError: for arguments that do not fit, and without positions for a scheme that needs them.
      NotImplementedError: for a scheme with a running state (FoX, PaTH, short convolutions).

    >>> import posenc_jax as pe
    >>> q, k = jnp.ones((1, 3, 2, 4)), jnp.ones((1, 5, 2, 4))
    >>> places = {"positions": jnp.arange(2, 5), "k_positions": jnp.arange(5)}
    >>> pe.scheme_cross_attention(pe.RoPE(head_dim=4), {}, q, k, k, **places).shape
    (1, 3, 2, 4)
    """
    known = {"memory", "k_positions", "k_coordinates", "k_segment_ids"}
    known |= AttentionOptions.__annotations__.keys() - {"contiguous", "tables"}
    refuse_unknown("scheme_cross_attention", options, known)
    call = attention_call(
        positions=positions,
        k_positions=k_positions,
        coordinates=coordinates,
        k_coordinates=k_coordinates,
        segment_ids=segment_ids,
        k_segment_ids=k_segment_ids,
        scale=scale,
        **options,
    )
    return cross_attention(Pipeline(scheme, params, norms), Projections(q, k, v, x), memory, call)


def cross_attention(
    pipeline: Pipeline, tokens: Projections, memory: jax.Array | None, call: AttentionCall
) -> jax.Array:
    """Computes `scheme_cross_attention` of q and x in `tokens` to k, v and `memory`."""
    caller = "scheme_cross_attention"
    q, k, v = tokens.q, tokens.k, tokens.v
    queries, keys = tokens.replace(k=q, v=q), Projections(k, k, v, memory)
    check_tokens(caller, queries)
    check_tokens(caller, keys)
    check_pipeline(caller, pipeline)
    require(
        k.shape[0] == q.shape[0], f"{caller}: q {q.shape} and k {k.shape} differ in batch size."
    )
    q_ids, k_ids = call.q_segment_ids, call.k_segment_ids
    if q_ids is not None or k_ids is not None:
        q_ids = jnp.zeros(q.shape[1], jnp.int32) if q_ids is None else q_ids
        k_ids = jnp.zeros(k.shape[1], jnp.int32) if k_ids is None else k_ids
        q_ids = token_integers(caller, q_ids, q.shape[:2], "segment_ids")
        k_ids = token_integers(caller, k_ids, k.shape[:2], "k_segment_ids")
    scheme = pipeline.scheme
    q_coordinates = _coordinates(scheme, "", call.q_positions, call.q_coordinates, q.shape[:2])
    k_coordinates = _coordinates(scheme, "k_", call.k_positions, call.k_coordinates, k.shape[:2])

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
    call = call.replace(q_segment_ids=q_ids, k_segment_ids=k_ids, contiguous=False)
    call = call.replace(
        q_coordinates=q_coordinates if scheme.acts_in_attention else None,
        k_coordinates=k_coordinates if scheme.acts_in_attention else None,
    )
    if call.scale is None:
        call = call.replace(scale=pipeline.scale(q.shape[-1]))
    return pipeline.attend(queries, keys, call)


def _coordinates(
    scheme: Scheme, side: str, positions: Any, coordinates: Any, shape: tuple[int, ...]
) -> jax.Array:
    """Returns coordinates [B, T] or [A, B, T] of queries (side "") or keys (side "k_")."""
    caller = "scheme_cross_attention"
    if coordinates is not None:
        return token_coordinates(caller, scheme, coordinates, shape)
    if positions is None:
        require(
            not scheme.acts_in_attention,
            f"{caller}: {scheme!r} relates the tokens of both sequences by their positions; give "
            f"{side}positions or {side}coordinates.",
        )
        return count_up(*shape)
    return token_integers(caller, positions, shape, f"{side}positions")
