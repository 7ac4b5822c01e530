"""Attention with a scheme as an `attention_fn` of Flax's own attention layers."""

from typing import Any

import jax
import jax.numpy as jnp

from posenc_jax.checks import coordinate_values, finite, require
from posenc_jax.engine.api import AttentionCall
from posenc_jax.functional.pipeline import Pipeline, Projections
from posenc_jax.positions import count_up
from posenc_jax.schemes.scheme import (
    Params,
    Scheme,
    check_direction,
    check_scheme,
)


def check_mask(caller: str, scheme: Scheme, query: jax.Array, mask: jax.Array | None) -> None:
    """Refuses a scheme for causal attention without a mask, or with one of padding alone."""
    if mask is None or ((mask.ndim < 2 or mask.shape[-2] == 1) and query.shape[-3] > 1):
        check_direction(caller, scheme)


def attention_fn(
    scheme: Scheme,
    params: Params,
    query: jax.Array,
    key: jax.Array,
    value: jax.Array,
    *,
    scale: float | None = None,
    mask: jax.Array | None = None,
    is_causal: bool = False,
    input_positions: jax.Array | None = None,
    dropout_rng: jax.Array | None = None,
    dropout_rate: float = 0.0,
    deterministic: bool = True,
    broadcast_dropout: bool = True,
    dtype: Any = None,
    precision: Any = None,
    force_fp32_for_softmax: bool = False,
    qk_attn_weights_einsum: Any = None,
    attn_weights_value_einsum: Any = None,
    module: Any = None,
) -> jax.Array:
    """Attention with a scheme, from the arguments of Flax's attention functions.

    As many queries as keys are self-attention. A single query with more keys is a decode step: the
    keys are the cache, and the query is the last token that its mask shows.

    Args:
      scheme: any scheme whose `features` does not read `x`.
      params: its parameters.
      query, key, value: [..., T, N, H], [..., S, K, H] and [..., S, K, V].
      scale: the factor on q . k. Default: 1/sqrt(H).
      mask: bool, broadcast to [..., 1 or N, T, S]. Schemes with a running state (short
        convolutions, Partial Key Offset) and `RoPEByLength` ignore it: they read a row as one
        sequence without padding.
      is_causal: whether to hide the keys of later slots.
      input_positions: the coordinates of the T = S tokens, integers or float32 [..., T].
        Causality compares slots.
      dropout_rng, dropout_rate, deterministic: dropout of the weights.
      broadcast_dropout: no effect: every weight is dropped independently.
      dtype: no effect: the layer projects q, k and v to its dtype.
      precision, force_fp32_for_softmax: no effect: products and softmax are exact to float32.
      qk_attn_weights_einsum, attn_weights_value_einsum, module: must be None.

    Raises:
      ValueError: for several queries and another number of keys, a decode step without a mask
        or with `input_positions`, and schemes that act on the token embedding alone or read x.
      NotImplementedError: for quantized products, `sow_weights=True`, and a decode step with a
        scheme that mixes tokens.
    """
    del broadcast_dropout, dtype, precision, force_fp32_for_softmax
    if module is not None:
        raise NotImplementedError("AttentionFn: sow_weights=True; the weights are not computed.")
    if qk_attn_weights_einsum is not None or attn_weights_value_einsum is not None:
        raise NotImplementedError("AttentionFn: products of attention cannot be replaced.")
    check_fits_flax("AttentionFn", scheme, scale)
    lead, (length, keys) = query.shape[:-3], (query.shape[-3], key.shape[-3])
    require(
        lead == key.shape[:-3] == value.shape[:-3],
        "AttentionFn: query, key and value must have the same leading axes, got "
        f"{query.shape}, {key.shape} and {value.shape}.",
    )
    q, k, v = (x.reshape(-1, *x.shape[len(lead) :]) for x in (query, key, value))
    k_slots = count_up(q.shape[0], keys)
    if mask is not None:
        heads = mask.shape[-3] if mask.ndim > 2 else 1
        mask = jnp.broadcast_to(mask, (*lead, heads, length, keys)).astype(bool)
        mask = mask.reshape(-1, heads, length, keys)
    if length == keys:
        q_slots = k_slots
    else:
        if length > 1 or mask is None:
            raise ValueError(
                f"AttentionFn: {length} queries and {keys} keys"
                f"{' without a mask' if mask is None else ''}: the positions of the queries are "
                "known for self-attention, and for decode steps of one token with a mask. For "
                "cross attention use posenc_jax.attention."
            )
        slots = jnp.arange(keys, dtype=jnp.int32)
        q_slots = jnp.max(jnp.where(mask.any(1), slots[None, None], 0), axis=-1)
    q_coordinates, k_coordinates = q_slots, k_slots
    if input_positions is not None:
        require(
            length == keys,
            "AttentionFn: input_positions in a decode step: Flax's cache has no positions of the "
            "earlier keys; use posenc_jax's Attention.",
        )
        coordinates = coordinate_values("AttentionFn", input_positions, "input_positions")
        coordinates = jnp.broadcast_to(coordinates, (*lead, length)).reshape(-1, length)
        q_coordinates = k_coordinates = coordinates
    pipeline = Pipeline(scheme, params)
    tables = scheme.tables(params, q_coordinates)
    tokens = pipeline.read(Projections(q, k, v, coordinates=q_coordinates, tables=tables))
    mixed = None if tokens.state is None else tokens.state[0]
    if length != keys and jax.tree.leaves(mixed):
        raise NotImplementedError(
            f"AttentionFn: a decode step with {scheme!r}, which reads the tokens before the query; "
            "Flax's cache has no place for them. Use posenc_jax's Attention."
        )
    drop = dropout_rate > 0 and not deterministic
    call = AttentionCall(
        mask=mask,
        q_positions=q_slots,
        k_positions=k_slots,
        contiguous=length == keys and input_positions is None,
        is_causal=is_causal,
        scale=scheme.logit_scale(query.shape[-1]) if scale is None else scale,
        dropout_rate=dropout_rate if drop else 0.0,
        dropout_key=dropout_rng if drop else None,
    )
    if input_positions is not None:
        call = call.replace(q_coordinates=q_coordinates, k_coordinates=k_coordinates)
    slots = tokens.replace(coordinates=k_coordinates, tables=tables if length == keys else None)
    slots = slots.replace(k=pipeline.key(slots), v=pipeline.value(slots))
    out = pipeline.attend(tokens.replace(q=pipeline.query(tokens)), slots, call)
    out = with_heads("AttentionFn", scheme, out, query.shape[-2])
    return out.reshape(*lead, *out.shape[1:])


def check_fits_flax(caller: str, scheme: Scheme, scale: float | None) -> None:
    """Raises for a scheme whose place or inputs Flax's layers do not have."""
    check_acts_in_attention(caller, scheme)
    require(
        not scheme.traits.reads_x,
        f"{caller}: {scheme!r} reads the input of the layer, which an attention_fn does not get; "
        "use posenc_jax's Attention.",
    )
    if scale is not None:
        finite(caller, scale=scale)


def with_heads(caller: str, scheme: Scheme, out: jax.Array, num_heads: int) -> jax.Array:
    """Returns the output of attention; raises `ValueError` if a scheme changed its heads."""
    require(
        out.shape[-2] == num_heads,
        f"{caller}: {scheme!r} returns {out.shape[-2]} heads, and the output projection reads "
        f"{num_heads}; use scheme_attention and a projection of your own.",
    )
    return out


def check_acts_in_attention(caller: str, scheme: Scheme) -> None:
    """Raises for a scheme that acts on the token embedding alone, and for other types."""
    check_scheme(caller, scheme)
    require(
        scheme.acts_in_attention or not scheme.acts,
        f"{caller}: {scheme!r} acts on the token embedding alone; put a PositionEncoding of it "
        "before the first layer, and NoPE() into the layers.",
    )
