"""A scheme inside the attention layers that come with Flax."""

from typing import Any

import jax
import jax.numpy as jnp

from posenc_jax.checks import require
from posenc_jax.engine.api import AttentionCall
from posenc_jax.positions import count_up
from posenc_jax.scheme import Params, Scheme


def stock_attention(
    scheme: Scheme,
    params: Params,
    query: jax.Array,
    key: jax.Array,
    value: jax.Array,
    *,
    mask: jax.Array | None = None,
    is_causal: bool = False,
    dropout_rng: jax.Array | None = None,
    dropout_rate: float = 0.0,
    deterministic: bool = True,
    **unused: Any,
) -> jax.Array:
    """Attention with a scheme from what Flax's stock layers give to their `attention_fn`.

    With as many queries as keys these are the same tokens, in order. With fewer, the
    keys are a cache, and each query is the last token that its mask lets it see.

    Args:
      scheme: any scheme whose `features` does not read `x`.
      params: its parameters.
      query, key, value: [..., T, N, H], [..., S, K, H] and [..., S, K, V].
      mask: bool [..., 1 or N, T, S].
      is_causal: whether to hide later keys.
      dropout_rng, dropout_rate, deterministic: dropout of the weights.
      **unused: precision and such, which do not apply.

    Raises:
      ValueError: for a cache without a mask, which says where a query is, and for schemes
        that act on the token embedding alone or read x.
    """
    require(
        not scheme.traits.reads_x,
        f"stock_attention: {scheme!r} reads x, which Flax's layers keep to themselves; use "
        "posenc_jax's Attention instead.",
    )
    require(
        scheme.acts_in_attention or not scheme.acts,
        f"stock_attention: {scheme!r} acts on the token embedding alone; put a "
        "PositionEncoding before the first layer instead.",
    )
    lead, (length, keys) = query.shape[:-3], (query.shape[-3], key.shape[-3])
    q, k, v = (x.reshape(-1, *x.shape[len(lead) :]) for x in (query, key, value))
    k_at = count_up(q.shape[0], keys)
    if mask is not None:
        mask = jnp.broadcast_to(mask, (*lead, *mask.shape[-3:])).astype(bool)
        mask = mask.reshape(-1, *mask.shape[-3:])
    if length == keys:
        q_at = k_at
    else:
        if mask is None:
            raise ValueError(
                f"stock_attention: {length} queries and {keys} keys without a mask: no query's "
                "position is known."
            )
        slots = jnp.arange(keys, dtype=jnp.int32)
        q_at = jnp.max(jnp.where(mask.any(1), slots[None, None], 0), axis=-1)
    features = scheme.features(params, None, q, k, q_at, None, None)
    q_features, k_features, _ = features
    drop = dropout_rate > 0 and not deterministic
    call = AttentionCall(
        mask=mask,
        q_positions=q_at,
        k_positions=k_at,
        contiguous=length == keys,
        is_causal=is_causal,
        scale=scheme.logit_scale(q.shape[-1]),
        dropout_rate=dropout_rate if drop else 0.0,
        dropout_key=dropout_rng if drop else None,
    )
    q, k = scheme.query(params, q, q_at, q_features), scheme.key(params, k, k_at, k_features)
    out = scheme.attend(params, q, k, v, q_at, k_at, q_features, k_features, call)
    return out.reshape(*lead, *out.shape[1:])
