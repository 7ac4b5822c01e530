"""Attention as it is written down: all logits, one softmax. It defines what is correct."""

import dataclasses
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp

from posenc_jax.engine.problem import Problem, dropout_seed, keep_mask, repeat_heads


def products(p: Problem) -> jax.Array:
    """Returns q . k, float32 [B, N, T, S]."""
    batch, length, heads, dim = p.q.shape
    q = p.q.reshape(batch, length, p.k.shape[2], -1, dim).astype(jnp.float32)
    out = jnp.einsum("btkgh,bskh->bkgts", q, p.k.astype(jnp.float32), precision="highest")
    return out.reshape(batch, heads, length, -1)


def logits(p: Problem) -> jax.Array:
    """Returns float32 [B, N, T, S], before masking."""
    scaled = products(p)
    unscaled = jnp.zeros_like(scaled)
    at = p.q_coordinates, p.k_coordinates
    terms = [(b.scaled, jax.vmap(b.tile)(*at)) for b in p.biases]
    terms += [(c.scaled, jax.vmap(c.tile)(c.q_features, c.k_features, *at)) for c in p.contents]
    for is_scaled, term in terms:
        if is_scaled:
            scaled += term.astype(jnp.float32)
        else:
            unscaled += term.astype(jnp.float32)
    out = p.scale * scaled + unscaled
    return out if p.softcap is None else p.softcap * jnp.tanh(out / p.softcap)


def attend(p: Problem) -> tuple[jax.Array, jax.Array]:
    """Returns the output, [B, T, N, V] in q's dtype, and the log-sum-exp, float32 [B, T, N].

    A query that sees nothing gets zeros and a log-sum-exp of -inf. Where a rule replaces the
    softmax, the log-sum-exp means nothing.
    """
    p, k_slots = in_order(p)
    p, slots = expanded(p), (jnp.arange(p.q.shape[1], dtype=jnp.int32), k_slots)
    if p.q.shape[1] > 1:
        return attend_slots(cleaned(p), *slots)
    # A decode step reads the cache once: zeroing what may be garbage in it takes ten times as
    # long, and is left for when there is some.
    out, lse = attend_slots(p, *slots)
    fine = jnp.isfinite(out).all() & jnp.isfinite(products(p)).all()
    return jax.lax.cond(fine, lambda p: (out, lse), lambda p: attend_slots(cleaned(p), *slots), p)


def cleaned(p: Problem) -> Problem:
    """Returns the problem with zeros for the keys and values that no query sees.

    They may be anything, and 0 * NaN is NaN.
    """
    used = jnp.any(p.visible(), axis=(1, 2))[:, :, None, None]
    zero = {n: jnp.where(used, x, jnp.zeros((), x.dtype)) for n, x in (("k", p.k), ("v", p.v))}
    return dataclasses.replace(p, **zero)


def in_order(p: Problem) -> tuple[Problem, jax.Array]:
    """Puts keys into the order that a rule on whole rows is promised, if there is one.

    Returns:
      The problem, and the slots that its keys were in, int32 [S] or [B, S].
    """
    if p.row_rule is None or p.contiguous:
        return p, jnp.arange(p.k.shape[1], dtype=jnp.int32)
    sort_by = (p.k_positions,) if p.k_segment_ids is None else (p.k_positions, p.k_segment_ids)
    order = jnp.lexsort(sort_by, axis=-1).astype(jnp.int32)

    def pick(x, axis=1):
        x = jnp.broadcast_to(x, (order.shape[0], *x.shape[1:]))
        shape = [1] * x.ndim
        shape[0], shape[axis] = order.shape
        return jnp.take_along_axis(x, order.reshape(shape), axis)

    return of_keys(p, pick), order


def of_keys(p: Problem, pick: Callable[[jax.Array, int], jax.Array]) -> Problem:
    """Returns the problem with `pick(array, axis of the keys)` for all arrays by key."""
    by_key: dict[str, Any] = {"k": p.k, "v": p.v, "k_positions": p.k_positions}
    by_key |= {"k_coordinates": p.k_coordinates, "k_segment_ids": p.k_segment_ids}
    by_key["contents"] = [c.k_features for c in p.contents]
    rule = p.row_rule
    by_key["rule"] = None if rule is None else rule.k_features
    picked: dict[str, Any] = jax.tree.map(lambda x: pick(x, 1), by_key)
    contents = zip(p.contents, picked.pop("contents"), strict=True)
    cols = picked.pop("rule")
    return dataclasses.replace(
        p,
        row_rule=None if rule is None else dataclasses.replace(rule, k_features=cols),
        contents=tuple(dataclasses.replace(c, k_features=cols) for c, cols in contents),
        mask=None if p.mask is None else pick(p.mask, 3),
        **picked,
    )


def expanded(p: Problem) -> Problem:
    """Returns the problem with `cols` of a rule on whole rows as the rule gets them."""
    rule = p.row_rule
    if rule is None or not jax.tree.leaves(rule.k_features):
        return p
    cols = jax.tree.map(lambda x: repeat_heads(x, p.q.shape[2]), rule.k_features)
    if p.k_segment_ids is not None:
        real = p.k_segment_ids >= 0
        cols = jax.tree.map(
            lambda x: jnp.where(real.reshape(*real.shape, *(1,) * (x.ndim - 2)), x, 0), cols
        )
    if rule.expand is not None:
        cols = jax.vmap(rule.expand, (None, None, 0))(rule.shared, rule.heads, cols)
    return dataclasses.replace(p, row_rule=dataclasses.replace(rule, k_features=cols))


def attend_slots(p: Problem, q_slots: jax.Array, k_slots: jax.Array) -> tuple[jax.Array, jax.Array]:
    """Does what `attend` does, for queries and keys that have been in these slots."""
    seen = p.visible()
    x = logits(p)
    if p.row_rule is not None:
        at = p.q_coordinates, p.k_coordinates
        x = jnp.where(seen, x, 0.0)
        x = jax.vmap(p.row_rule.tile)(p.row_rule.q_features, p.row_rule.k_features, x, seen, *at)
    x = jnp.where(seen, x, -jnp.inf)
    if p.sinks is not None:
        sinks = p.sinks.astype(jnp.float32)[None, :, None, None]
        x = jnp.concatenate([x, jnp.broadcast_to(sinks, (*x.shape[:3], 1))], -1)
    lse = jax.nn.logsumexp(x, -1)
    less = jnp.where(jnp.isinf(lse), 0.0, lse)[..., None]
    weights = jnp.exp(x - less if p.row_rule is None or p.row_rule.normalized else x)
    if p.sinks is not None:
        weights = weights[..., :-1]
    seed = dropout_seed(p)
    if seed is not None:
        keep = keep_mask(seed, p.dropout_rate, weights.shape[:2], q_slots, k_slots)
        weights = jnp.where(keep, weights / (1.0 - p.dropout_rate), 0.0)
    by_group = weights.reshape(weights.shape[0], p.v.shape[2], -1, *weights.shape[2:])
    v = p.v.astype(jnp.float32)
    out = jnp.einsum("bkgts,bskv->btkgv", by_group, v, precision="highest")
    out = out.reshape(*out.shape[:2], -1, out.shape[-1])
    if p.value is not None:
        buckets = jax.vmap(p.value.tile)(p.q_coordinates, p.k_coordinates)
        one_hot = jax.nn.one_hot(buckets, p.value.table.shape[1], dtype=jnp.float32)
        mass = jnp.einsum("bnts,btsr->btnr", weights, one_hot, precision="highest")
        out += jnp.einsum("btnr,nrv->btnv", mass, p.value.table, precision="highest")
    return out.astype(p.q.dtype), jnp.moveaxis(lse, 1, 2)
