"""Attention of one sequence to another one, with a scheme."""

from typing import Any

import jax
import jax.numpy as jnp

from posenc_jax.checks import integer_positions, require
from posenc_jax.engine.api import AttentionCall
from posenc_jax.functional.tokens import (
    Norms,
    axis_coordinates,
    by_row,
    check_norms,
    check_params,
    check_tokens,
    contents,
    same,
)
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

    A scheme relates the tokens of both by their positions, which therefore must be given, unless it
    is `NoPE`. They have a meaning where both sequences have a common axis, such as time.

    Args:
      scheme: the position encoding.
      params: its parameters.
      q: [B, T, N, H], as projected.
      k, v: [B, S, K, H] and [B, S, K, V], as projected.
      x, memory: the activations that q, and k and v were projected from, [B, T, D] and [B, S, D],
        which some schemes read.
      positions, k_positions: integers [T] or [B, T], and [S] or [B, S].
      coordinates, k_coordinates: what the scheme encodes, [T], [B, T] or [A, B, T], and with S for
        T. Default: the positions.
      segment_ids, k_segment_ids: integers [T] or [B, T], and [S] or [B, S], below zero for padding.
        Tokens see their own segment. Default: one segment.
      norms: functions of q and of k after the scheme's `query` and `key`. Default: none.
      scale: the factor on q . k. Default: the scheme's own.
      **options: `mask`, `is_causal`, `window`, `prefix_length`, `softcap`, `sinks`,
        `dropout_rate`, `dropout_key` and `implementation`, as in `attention`. Masks go by
        positions.

    Returns:
      The output [B, T, N, V].

    Raises:
      ValueError: for arguments that do not fit, and without positions for a scheme that needs them.
      NotImplementedError: for a scheme with a running state (FoX, PaTH, short convolutions).

    >>> import posenc_jax as pe
    >>> q, k = jnp.ones((1, 3, 2, 4)), jnp.ones((1, 5, 2, 4))
    >>> at = {"positions": jnp.arange(2, 5), "k_positions": jnp.arange(5)}
    >>> pe.scheme_cross_attention(pe.RoPE(head_dim=4), {}, q, k, k, **at).shape
    (1, 3, 2, 4)
    """
    where = "scheme_cross_attention"
    check_tokens(where, q, q, q, x)
    check_tokens(where, k, k, v, memory)
    check_params(where, scheme, params)
    check_norms(where, scheme, norms)
    (batch, length), keys = q.shape[:2], k.shape[1]
    require(k.shape[0] == batch, f"{where}: q {q.shape} and k {k.shape} differ in batch size.")
    if segment_ids is None and k_segment_ids is not None:
        segment_ids = jnp.zeros((length,), jnp.int32)
    if k_segment_ids is None and segment_ids is not None:
        k_segment_ids = jnp.zeros((keys,), jnp.int32)
    q_at = _placed(scheme, "", positions, coordinates, batch, length)
    k_at = _placed(scheme, "k_", k_positions, k_coordinates, batch, keys)
    if segment_ids is not None and k_segment_ids is not None:
        segment_ids = integer_positions(where, segment_ids, "segment_ids")
        segment_ids = by_row(where, segment_ids, batch, length, "segment_ids")
        k_segment_ids = integer_positions(where, k_segment_ids, "k_segment_ids")
        k_segment_ids = by_row(where, k_segment_ids, batch, keys, "k_segment_ids")

    def read(projected, at, segment_ids):
        *made, states = contents(scheme, params, projected, at, segment_ids, None)
        if jax.tree.leaves(states):
            raise NotImplementedError(
                f"{where}: {scheme!r} has a running state of one sequence, and there are two."
            )
        return made

    # Hooks that read content make arrays of queries from q and x, and of keys from k and memory.
    no_keys = (jnp.zeros((batch, length, *a.shape[2:]), a.dtype) for a in (k, v))
    no_queries = jnp.zeros((batch, keys, *q.shape[2:]), q.dtype)
    (q, _, _), q_features, _ = read((x, q, *no_keys), q_at, segment_ids)
    (_, k, v), _, k_features = read((memory, no_queries, k, v), k_at, k_segment_ids)
    q_norm, k_norm = norms or (same, same)
    q = q_norm(scheme.query(params, q, q_at, q_features))
    k = k_norm(scheme.key(params, k, k_at, k_features))
    v = scheme.value(params, v, k_at, k_features)
    call = AttentionCall(
        q_segment_ids=segment_ids,
        k_segment_ids=k_segment_ids,
        contiguous=False,
        scale=scheme.logit_scale(q.shape[-1]) if scale is None else scale,
        **options,
    )
    if positions is not None or k_positions is not None:
        call = call.replace(q_positions=positions, k_positions=k_positions)
    if scheme.acts_in_attention:
        call = call.replace(q_coordinates=q_at, k_coordinates=k_at)
    out = scheme.attend(params, q, k, v, q_at, k_at, q_features, k_features, call)
    return scheme.output(params, out, q_at, q_features)


def _placed(
    scheme: Scheme, side: str, positions: Any, coordinates: Any, batch: int, count: int
) -> jax.Array:
    """Returns coordinates [B, count] or [A, B, count] of the tokens of one side."""
    where = "scheme_cross_attention"
    if coordinates is not None:
        return axis_coordinates(where, scheme, coordinates, batch, count)
    if positions is None:
        require(
            not scheme.acts_in_attention,
            f"{where}: {scheme!r} relates the tokens of both sequences by their positions; give "
            f"{side}positions or {side}coordinates.",
        )
        return count_up(batch, count)
    positions = integer_positions(where, positions, f"{side}positions")
    return by_row(where, positions, batch, count, f"{side}positions")
