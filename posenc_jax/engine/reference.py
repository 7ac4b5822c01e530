"""Attention as it is written down: all logits, one softmax. It defines what is correct."""

import jax
import jax.numpy as jnp

from posenc_jax.engine.problem import Problem, dropout_seed, keep_mask, repeat_heads


def logits(p: Problem, k: jax.Array) -> jax.Array:
    """Returns float32 [B, N, T, S], before masking, for keys [B, S, N, H]."""
    q = p.q.astype(jnp.float32)
    scaled = jnp.einsum("btnh,bsnh->bnts", q, k, precision="highest")
    unscaled = jnp.zeros_like(scaled)
    at = p.q_coordinates, p.k_coordinates
    terms = [(b.scaled, jax.vmap(b.tile)(*at)) for b in p.biases]
    terms += [(c.scaled, jax.vmap(c.tile)(c.rows, c.cols, *at)) for c in p.contents]
    for is_scaled, term in terms:
        if is_scaled:
            scaled += term.astype(jnp.float32)
        else:
            unscaled += term.astype(jnp.float32)
    out = p.scale * scaled + unscaled
    return out if p.softcap is None else p.softcap * jnp.tanh(out / p.softcap)


def attend(p: Problem) -> tuple[jax.Array, jax.Array]:
    """Returns the output, [B, T, N, V] in q's dtype, and the log-sum-exp, float32 [B, T, N].

    A query that sees nothing gets zeros and a log-sum-exp of -inf.
    """
    num_heads = p.q.shape[2]
    seen = p.visible()
    # A key and value that nobody sees may be anything, and 0 * NaN is NaN.
    used = jnp.any(seen, axis=(1, 2))[:, :, None, None]
    k, v = (
        jnp.where(used, repeat_heads(x, num_heads).astype(jnp.float32), 0.0) for x in (p.k, p.v)
    )
    x = jnp.where(seen, logits(p, k), -jnp.inf)
    if p.sinks is not None:
        sinks = p.sinks.astype(jnp.float32)[None, :, None, None]
        x = jnp.concatenate([x, jnp.broadcast_to(sinks, (*x.shape[:3], 1))], -1)
    lse = jax.nn.logsumexp(x, -1)
    weights = jnp.exp(x - jnp.where(jnp.isinf(lse), 0.0, lse)[..., None])
    if p.sinks is not None:
        weights = weights[..., :-1]
    seed = dropout_seed(p)
    if seed is not None:
        rows, cols = (jnp.arange(n, dtype=jnp.int32) for n in weights.shape[2:])
        keep = keep_mask(seed, p.dropout_rate, weights.shape[:2], rows, cols)
        weights = jnp.where(keep, weights / (1.0 - p.dropout_rate), 0.0)
    out = jnp.einsum("bnts,bsnv->btnv", weights, v, precision="highest")
    if p.value is not None:
        buckets = jax.vmap(p.value.tile)(p.q_coordinates, p.k_coordinates)
        one_hot = jax.nn.one_hot(buckets, p.value.table.shape[1], dtype=jnp.float32)
        mass = jnp.einsum("bnts,btsr->btnr", weights, one_hot, precision="highest")
        out += jnp.einsum("btnr,nrv->btnv", mass, p.value.table, precision="highest")
    return out.astype(p.q.dtype), jnp.moveaxis(lse, 1, 2)
