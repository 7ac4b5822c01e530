"""Attention over whole rows of logits: decode steps, small sizes, and rules on whole rows.

Queries are computed in blocks against all keys, and anew in the backward pass, so memory
grows with T + S. Gradients of shared arrays are summed over blocks in one fixed order.
"""

import dataclasses
import functools
import math
from typing import Any

import jax
import jax.numpy as jnp

from posenc_jax.checks import positive_integers
from posenc_jax.engine.dense_cpu import OneQuery, float_einsum
from posenc_jax.engine.dropout import keep_mask
from posenc_jax.engine.problem import (
    Implementation,
    LogSumExp,
    Problem,
    join_blocks,
    pad_axis,
    softmax,
    vary_over,
    zero_where,
)
from posenc_jax.engine.rule import added_logits
from posenc_jax.engine.tracing import Traced, trace_once


@dataclasses.dataclass(frozen=True)
class Dense(Implementation):
    """All keys at once, for blocks of queries.

    Attributes:
      block: logits per block; 2**20 are 4 MB, and a backward pass holds several such arrays.
      tile: keys that one query reads at once on CPUs. Tiles before the first key that it sees and
        after the last one are skipped, as the empty slots of a cache are; derivatives read all.
    """

    block: int = 2**20
    tile: int = 512
    name = "dense"

    def __post_init__(self):
        positive_integers("Dense", block=self.block, tile=self.tile)

    def __call__(self, problem: Problem) -> tuple[jax.Array, LogSumExp]:
        if problem.length == 1 and not problem.whole_rows:
            p = vary_over(problem)
            return _decode(*trace_once(functools.partial(_attend_row, self.tile), p), p)
        p = problem
        if p.whole_rows and not p.contiguous:
            p = p.sorted_keys()
        parts = []
        for (start, end), (low, high) in _causal_bands(p):
            keys = jax.tree.map(lambda x, a=low, b=high: x[:, a:b], p.tokens("k"))
            band = (p.with_tokens("k", keys) if (low, high) != (0, p.keys) else p).per_query_head()
            parts.append(_by_blocks(band, start, end, self))
        return jax.tree.map(lambda *x: jnp.concatenate(x, 1), *parts)


@functools.partial(jax.custom_jvp, nondiff_argnums=(0,))
def _decode(attend: Traced, captured: Any, p: Problem) -> tuple[jax.Array, LogSumExp]:
    """Attention of one query, reading the cache once; zeroing unused slots takes ten times longer.

    Values that the query does not see may hold NaN, and 0 * NaN is NaN: if the output is not
    finite, it is computed again with these values zeroed. A cache has finite values and skips that
    test, which is an all-reduce where it is sharded. Derivatives always zero them.
    """
    out, lse = attend(captured, p)
    if p.finite_values:
        return out, lse
    finite = jnp.isfinite(out).all()
    return jax.lax.cond(finite, lambda p: (out, lse), lambda p: _cleaned(attend, captured, p), p)


@_decode.defjvp
def _decode_jvp(attend, primals, tangents):
    return jax.jvp(functools.partial(_cleaned, attend), primals, tangents)


def _cleaned(attend: Traced, captured: Any, p: Problem) -> tuple[jax.Array, LogSumExp]:
    return attend(captured, p.without_unseen_keys())


def _attend_row(tile: int, p: Problem) -> tuple[jax.Array, LogSumExp]:
    return _attend(p.per_query_head(), (None,) * len(p.rules), tile)


def _causal_bands(p: Problem) -> list[tuple[tuple[int, int], tuple[int, int]]]:
    """Returns ranges of queries, each with the range of keys that it can see by its slots."""
    length, keys = p.length, p.keys
    by_slot = p.ordered_by_slot
    by_slot &= all(rule.reads_seen_only for rule in p.rules if rule.whole_rows)
    if not by_slot or not (p.is_causal or p.window) or length < 1024:
        return [((0, length), (0, keys))]
    left_side, right_side = p.window or (-1, -1)
    right_side = 0 if p.is_causal else right_side
    step = math.ceil(length / 4)
    bands = []
    for start in range(0, length, step):
        end = min(start + step, length)
        low = 0 if left_side < 0 else max(0, start - left_side)
        bands.append(((start, end), (low, keys if right_side < 0 else min(keys, end + right_side))))
    return bands


def _row_features(p: Problem) -> tuple:
    """Returns the key features that each rule on whole rows reads, zero for unseen keys."""
    seen = jnp.ones((1, p.keys), bool)
    if p.length == 1:
        seen = jnp.any(p.visible(), axis=(1, 2))
    if p.mask is not None:
        seen &= jnp.any(p.mask, axis=(1, 2))
    if p.block_mask is not None:
        seen &= jnp.any(p.block_mask.pairs(), axis=(1, 2))
    for rule in p.rules:
        if rule.pairs is not None:
            seen &= ~jnp.all(jnp.isneginf(rule.pairs), axis=(1, 2))
    if p.k_segment_ids is not None:
        seen &= p.k_segment_ids >= 0
    if p.is_causal and p.prefix_length is None:
        seen &= p.k_positions <= p.q_positions.max(1, keepdims=True)

    row_features = []
    for rule in p.rules:
        rule = rule.with_features(rule.q_features, zero_where(~seen, rule.k_features))
        row_features.append(rule.expanded().k_features if rule.whole_rows else None)
    return tuple(row_features)


def _by_blocks(p: Problem, start: int, end: int, dense: Dense) -> tuple[jax.Array, LogSumExp]:
    """Attention of the queries from `start` to `end` to all keys of the problem."""
    length = end - start
    size = max(1, min(length, dense.block // max(p.q.shape[0] * p.num_heads * p.keys, 1)))
    count = math.ceil(length / size)

    def blocked(x):
        x = pad_axis(jax.lax.slice_in_dim(x, start, end, axis=1), 1, count * size, mode="edge")
        return jnp.moveaxis(x.reshape(x.shape[0], count, size, *x.shape[2:]), 1, 0)

    row_features = _row_features(p)
    rules = (r.with_features(r.q_features, None) if r.whole_rows else r for r in p.rules)
    p = dataclasses.replace(p, rules=tuple(rules), contiguous=False)
    if (start, end) == (0, p.length) and count == 1:
        return _attend(p.without_unseen_keys(), row_features, dense.tile)
    queries = p.tokens("q")
    bare = p.with_tokens("q", jax.tree.map(lambda x: None, queries))

    @jax.checkpoint
    def one_block(bare, row_features, queries):
        p = bare.with_tokens("q", queries).without_unseen_keys()
        return _attend(p, row_features, dense.tile)

    def block_of(queries):
        return one_block(bare, row_features, queries)

    parts = jax.lax.map(block_of, jax.tree.map(blocked, queries))
    return jax.tree.map(lambda x: join_blocks(x, 1)[:, :length], parts)


def _products(q: jax.Array, k: jax.Array) -> jax.Array:
    """Returns the dot products of [B, T, N, H] and [B, S, K, H], float32 [B, N, T, S]."""
    batch, length, heads, dim = q.shape
    # With heads behind tokens, einsum computes [S, T] and transposes it.
    q, k = jnp.swapaxes(q, 1, 2), jnp.swapaxes(k, 1, 2)
    q = q.reshape(batch, k.shape[1], -1, dim)  # The queries of a group of heads in one product.
    return float_einsum("bkth,bksh->bkts", q, k).reshape(batch, heads, length, -1)


def _sums(weights: jax.Array, v: jax.Array) -> jax.Array:
    """Returns the sums of values with weights [B, N, T, S], float32 [B, T, N, V]."""
    batch, heads, length, keys = weights.shape
    weights = weights.reshape(batch, v.shape[2], -1, keys)
    out = float_einsum("bkts,bksv->bktv", weights, jnp.swapaxes(v, 1, 2))
    return jnp.swapaxes(out.reshape(batch, heads, length, -1), 1, 2)


def _attend(p: Problem, row_features: tuple, tile: int) -> tuple[jax.Array, LogSumExp]:
    """Attention of all queries of a problem; `row_features` has an entry for each rule."""
    seen, coordinates = p.visible(), (p.q_coordinates, p.k_coordinates)
    query = OneQuery.of(seen, tile) if p.length == 1 else None
    scaled = _products(p.q, p.k) if query is None else query.products(p.q, p.k)
    unscaled = None
    for rule in p.rules:
        if rule.whole_rows:
            continue
        term = added_logits(rule, *coordinates, seen)
        if term is not None and rule.scaled:
            scaled += term
        elif term is not None:
            unscaled = term if unscaled is None else unscaled + term
    x = p.scale * scaled
    x = x if unscaled is None else x + unscaled
    if p.rules:  # They hide keys by -inf, under a softcap too.
        seen &= ~jnp.isneginf(x)
        x = jnp.where(seen, x, 0.0)
    if p.softcap is not None:
        x = p.softcap * jnp.tanh(x / p.softcap)
    for rule, features in zip(p.rules, row_features, strict=True):
        if rule.whole_rows:
            x = jnp.where(seen, x, 0.0)
            x = jax.vmap(rule.transformed_logits)(x, seen, rule.q_features, features, *coordinates)
    # Rules on whole rows hide keys by -inf, too; a row of them has no gradient.
    x = jnp.where(seen & ~jnp.isneginf(x), x, -jnp.inf)
    weights, lse = softmax(x, None if p.sinks is None else jnp.moveaxis(p.sinks, 1, 2))
    weights = weights if p.normalized else jnp.exp(x)
    if p.dropout_seeds is not None:
        keep = keep_mask(p.dropout_seeds, p.dropout_rate, p.q_slots, p.k_slots)
        weights = jnp.where(keep, weights / (1.0 - p.dropout_rate), 0.0)
    out = _sums(weights, p.v) if query is None else query.sums(weights, p.v)
    for rule in p.rules:
        values = jax.vmap(rule.added_values)(weights, *coordinates)
        out = out if values is None else out + values
    return out.astype(p.q.dtype), jax.tree.map(lambda x: jnp.moveaxis(x, 1, 2), lse)
