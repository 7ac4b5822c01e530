"""Attention over whole rows of logits: decode steps, small sizes, and rules on whole rows.

Queries are computed in blocks against all keys, and anew in the backward pass, so memory
grows with T + S. Gradients of shared arrays are summed over blocks in one fixed order.
"""

import dataclasses
import functools
import math
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp

from posenc_jax.checks import positive_integers
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
from posenc_jax.engine.terms import Traced, trace_once


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
    by_slot = p.contiguous and p.prefix_length is None
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


@dataclasses.dataclass(frozen=True)
class LiveTiles:
    """Tiles of keys that one query reads, from the first with a key that it sees to the last.

    Attributes:
      size: keys of a tile.
      limits: the first tile and the one after the last, int32 [2].
    """

    size: int
    limits: jax.Array

    @classmethod
    def of(cls, seen: jax.Array, size: int) -> "LiveTiles | None":
        """Returns the tiles for bool [B, N or 1, T, S]; None for many queries or a single tile."""
        if seen.shape[2] > 1 or seen.shape[3] <= size:
            return None
        return cls(size, _ends(seen) // size + jnp.arange(2, dtype=jnp.int32))


@jax.custom_batching.custom_vmap
def _ends(seen: jax.Array) -> jax.Array:
    """Returns the first and the last key that any query sees, int32 [2].

    Under `vmap` all rows share them, so that loops over tiles have one length.
    """
    index = jnp.arange(seen.shape[-1], dtype=jnp.int32)
    live = jnp.any(seen, range(seen.ndim - 1))
    return jnp.stack([jnp.where(live, index, len(index)).min(), jnp.where(live, index, -1).max()])


@_ends.def_vmap
def _ends_of_rows(axis_size, in_batched, seen):
    return _ends(seen), False


def _products(q: jax.Array, k: jax.Array, tiles: LiveTiles | None) -> jax.Array:
    """Returns the dot products of [B, T, N, H] and [B, S, K, H], float32 [B, N, T, S].

    They may be zero outside of the tiles.
    """
    batch, length, heads, dim = q.shape
    if length == 1:
        by_head = functools.partial(_float_einsum, "btkgh,bskh->bkgts")
        q = q.reshape(batch, length, k.shape[2], -1, dim)
        out = _by_platform(by_head, _products_of_token, _products_of_tiles, q, k, tiles)
    else:  # With heads behind tokens, einsum computes [S, T] and transposes it.
        q, k = jnp.swapaxes(q, 1, 2), jnp.swapaxes(k, 1, 2)
        q = q.reshape(batch, k.shape[1], -1, dim)  # The queries of a group of heads in one product.
        out = _float_einsum("bkth,bksh->bkts", q, k)
    return out.reshape(batch, heads, length, -1)


def _sums(p: Problem, weights: jax.Array, tiles: LiveTiles | None) -> jax.Array:
    """Returns the sums of values with weights [B, N, T, S], float32 [B, T, N, V]."""
    batch, heads, length, keys = weights.shape
    kv_heads = p.v.shape[2]
    if length == 1:
        weights = weights.reshape(batch, kv_heads, -1, 1, keys)
        by_head = functools.partial(_float_einsum, "bkgts,bskv->btkgv")
        out = _by_platform(by_head, _sums_of_token, _sums_of_tiles, weights, p.v, tiles)
        return out.reshape(batch, 1, heads, -1)
    weights = weights.reshape(batch, kv_heads, -1, keys)
    out = _float_einsum("bkts,bksv->bktv", weights, jnp.swapaxes(p.v, 1, 2))
    return jnp.swapaxes(out.reshape(batch, heads, length, -1), 1, 2)


def _float_einsum(form: str, x: jax.Array, y: jax.Array) -> jax.Array:
    x, y = x.astype(jnp.float32), y.astype(jnp.float32)
    return jnp.einsum(form, x, y, precision="highest")


def _by_platform(
    by_head: Callable,
    of_token: Callable,
    of_tiles: Callable,
    x: jax.Array,
    y: jax.Array,
    tiles: LiveTiles | None,
) -> jax.Array:
    """Returns a product of one query for each head, or where it is faster for a whole token.

    For a product for each head, XLA for CPUs copies the cache to heads before tokens, and values
    to S behind V, element by element. A product with the heads of a key as one vector, which for
    each query is zero but for its own head, reads the cache once: it has K times the operations
    and takes a fifth of the time. On a mesh it would be a sum over heads of other devices. Sums of
    values multiply elements, which XLA does on all cores.

    With `tiles`, it reads these alone, so that the empty slots of a cache cost nothing, and a tile
    of a smaller type becomes float32 near the processor, not the whole cache in memory.
    """
    if not jax.sharding.get_abstract_mesh().empty:
        return by_head(x, y)
    if tiles is None:
        return jax.lax.platform_dependent(x, y, cpu=of_token, default=by_head)
    of_tiles = functools.partial(of_tiles, tiles.size)
    return jax.lax.platform_dependent(
        x, y, tiles.limits, cpu=of_tiles, default=lambda x, y, limits: by_head(x, y)
    )


def _tile(x: jax.Array, i: jax.Array, size: int, axis: int) -> tuple[jax.Array, jax.Array]:
    """Returns tile i, or the last `size` tokens where it has fewer, and its first token."""
    start = jnp.minimum(i * size, x.shape[axis] - size)
    tile = jax.lax.dynamic_slice_in_dim(x, start, size, axis, allow_negative_indices=False)
    return tile, start


@functools.partial(jax.custom_jvp, nondiff_argnums=(0,))
def _products_of_tiles(size: int, q: jax.Array, k: jax.Array, limits: jax.Array) -> jax.Array:
    """As `_products_of_token`, zero in other tiles."""
    of_halves = q.dtype == k.dtype == jnp.bfloat16 and q.shape[2] * q.shape[4] > 1

    def body(i, out):
        k_tile, start = _tile(k, i, size, 1)
        products = (_products_of_vectors if of_halves else _products_of_token)(q, k_tile)
        return jax.lax.dynamic_update_slice_in_dim(
            out, products, start, 4, allow_negative_indices=False
        )

    batch, _, heads, group, _ = q.shape
    return jax.lax.fori_loop(
        limits[0], limits[1], body, jnp.zeros((batch, heads, group, 1, k.shape[1]), jnp.float32)
    )


@functools.partial(jax.custom_jvp, nondiff_argnums=(0,))
def _sums_of_tiles(size: int, weights: jax.Array, v: jax.Array, limits: jax.Array) -> jax.Array:
    """As `_sums_of_token`, without other tiles."""

    def body(i, out):
        (v_tile, start), (tile, _) = _tile(v, i, size, 1), _tile(weights, i, size, 4)
        if v.shape[1] % size:  # The last tile begins in the one before.
            tile = jnp.where(start + jnp.arange(size, dtype=jnp.int32) >= i * size, tile, 0.0)
        return out + _sums_of_token(tile, v_tile)

    batch, heads, group, *_ = weights.shape
    return jax.lax.fori_loop(
        limits[0], limits[1], body, jnp.zeros((batch, 1, heads, group, v.shape[3]), jnp.float32)
    )


# Loops of unknown length have no transpose: derivatives read all tokens.
@_products_of_tiles.defjvp
def _products_jvp(size, primals, tangents):
    return jax.jvp(_products_of_token, primals[:2], tangents[:2])


@_sums_of_tiles.defjvp
def _sums_jvp(size, primals, tangents):
    return jax.jvp(_sums_of_token, primals[:2], tangents[:2])


def _products_of_token(q: jax.Array, k: jax.Array) -> jax.Array:
    """Returns q . k, [B, K, G, 1, S]; a key with NaN in one head is NaN in all.

    Args:
      q: [B, 1, K, G, H].
      k: [B, S, K, H].
    """
    return _products_of_vectors(q.astype(jnp.float32), k.astype(jnp.float32))


def _products_of_vectors(q: jax.Array, k: jax.Array) -> jax.Array:
    """As `_products_of_token`; of bfloat16 the products are exact, and their sums float32."""
    batch, _, heads, group, _ = q.shape
    own_head = jnp.eye(heads, dtype=bool)[:, None, :, None]
    q = jnp.where(own_head, jnp.moveaxis(q, 1, 3), 0).reshape(batch, heads * group, -1)
    k = k.reshape(*k.shape[:2], -1)
    sums_of = functools.partial(jnp.einsum, preferred_element_type=jnp.float32)
    out = sums_of("bsc,bnc->bsn", k, q, precision="highest")
    out = jnp.swapaxes(jax.lax.optimization_barrier(out), 1, 2)  # Products have S in front.
    return out.reshape(batch, heads, group, 1, -1)


def _sums_of_token(weights: jax.Array, v: jax.Array) -> jax.Array:
    """Returns the sums of values, [B, 1, K, G, V].

    Args:
      weights: [B, K, G, 1, S].
      v: [B, S, K, V].
    """
    batch, heads, group, _, keys = weights.shape
    weights = jax.lax.optimization_barrier(jnp.moveaxis(weights, 4, 1))
    weights, v = (pad_axis(x, 1, keys + -keys % 8) for x in (weights, v))
    weights = weights.reshape(batch, 8, -1, heads, group, 1)
    v = v.reshape(batch, 8, -1, heads, 1, v.shape[-1])
    # Seven of eight terms are sums of elements, which XLA reads as they are, on all cores.
    out = sum(weights[:, i] * v[:, i].astype(jnp.float32) for i in range(8))
    out = jax.lax.optimization_barrier(out)
    return _float_einsum("s,bskgv->bkgv", jnp.ones(out.shape[1], jnp.float32), out)[:, None]


def _attend(p: Problem, row_features: tuple, tile: int) -> tuple[jax.Array, LogSumExp]:
    """Attention of all queries of a problem; `row_features` has an entry for each rule."""
    seen, coordinates = p.visible(), (p.q_coordinates, p.k_coordinates)
    tiles = LiveTiles.of(seen, tile)
    scaled, unscaled = _products(p.q, p.k, tiles), None
    for rule in p.rules:
        if rule.whole_rows:
            continue
        if p.length == 1:
            term = rule.added_to_row(*coordinates, seen)
        else:
            term = rule.added_to_rows(*coordinates, seen)
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
    out = _sums(p, weights, tiles)
    for rule in p.rules:
        values = jax.vmap(rule.added_values)(weights, *coordinates)
        out = out if values is None else out + values
    return out.astype(p.q.dtype), jax.tree.map(lambda x: jnp.moveaxis(x, 1, 2), lse)
