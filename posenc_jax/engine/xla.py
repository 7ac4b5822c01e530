"""Tiled attention in plain JAX: exact, differentiable, memory linear in T + S.

The flash attention algorithm (Dao et al. 2022, https://arxiv.org/abs/2205.14135; its
backward pass as in https://arxiv.org/abs/2307.08691) over blocks of queries and keys, with
rules evaluated per tile. The forward pass loops over blocks of queries and, for each, over
the blocks of keys that it sees, with a running maximum m and sum l. The backward pass loops
over blocks of keys, recomputes their tiles from the log-sum-exp, and pulls the cotangent of
each tile through the rules to the arrays that they read. Its products read q and the cotangent
of the output once more, transposed: all five are then in a form that is fast on CPUs.

Sums run in one fixed order, so results are bitwise reproducible.
"""

import dataclasses
import functools
import math
from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from posenc_jax.checks import positive_integers
from posenc_jax.engine.block_mask import BlockMask
from posenc_jax.engine.blocks import (
    Blocks,
    Plan,
    TokenArrays,
    Visibility,
    make_plan,
    padded_tokens,
)
from posenc_jax.engine.dense import Dense
from posenc_jax.engine.dropout import keep_mask
from posenc_jax.engine.lower import Lowered, lower
from posenc_jax.engine.mask import (
    LEAST_LOGIT,
    MASK_VALUE,
    differentiable_in_units,
    visible,
)
from posenc_jax.engine.problem import (
    Implementation,
    LogSumExp,
    Problem,
    combine,
    join_blocks,
    lse_and_delta,
    pad_axis,
    partition,
    repeat_heads,
    vary_over,
    with_sinks,
)
from posenc_jax.engine.rule import shapes_of, traced
from posenc_jax.engine.rules import TableDot
from posenc_jax.engine.simplified import AllPairs, Term
from posenc_jax.engine.tables import ValueTable
from posenc_jax.engine.toeplitz import toeplitz_tile, toeplitz_tile_vjp
from posenc_jax.engine.tokens import STATIC, Tokens, vmap_rows_and_heads


@dataclasses.dataclass(frozen=True)
class XLA(Implementation):
    """Tiles; rules on whole rows in blocks of queries.

    Attributes:
      forward, backward: queries and keys per tile of each pass; one serves both if the other
        is None. Default: measured.
      pairs_at_once: pairs of a rule that are differentiated at once. It bounds the memory of the
        rule's intermediates in large tiles; FIRE's network has 32 numbers per pair.
      row_block: logits per block of queries, for rules on whole rows.
    """

    forward: Blocks | None = None
    backward: Blocks | None = None
    pairs_at_once: int = 2**15
    row_block: int = 2**20
    name = "xla"

    def __post_init__(self):
        for name in ("forward", "backward"):
            blocks = getattr(self, name)
            if not isinstance(blocks, Blocks | None):
                raise TypeError(f"XLA: {name} must be Blocks(q, k) or None, got {blocks!r}.")
        sizes = {"pairs_at_once": self.pairs_at_once, "row_block": self.row_block}
        positive_integers("XLA", **sizes)

    def __call__(self, problem: Problem) -> tuple[jax.Array, LogSumExp]:
        p = vary_over(problem)
        if p.whole_rows:
            return Dense(self.row_block)(p)
        dtype = p.q.dtype
        mixed = not dtype == p.k.dtype == p.v.dtype  # Weights are rounded to the dtype of v.
        if mixed or 1 in (p.q.shape[3], p.v.shape[3]):  # XLA for CPUs lacks some such products.
            arrays = {name: getattr(p, name).astype(jnp.float32) for name in "qkv"}
            p = dataclasses.replace(p, **arrays)
        heads = p.q.shape[0] * p.num_heads
        others = p.window, p.q_segment_ids, p.k_visible_until, p.block_mask, p.mask
        skips = any(x is not None for x in others)
        plan = make_plan(p.length, p.keys, heads, self.forward, self.backward, p.platform, skips)
        lowered = lower(p, max_table=plan.max_table)
        diff, nondiff = partition(_prepare(p, lowered, plan, self.pairs_at_once))
        out, lse = _attend(diff, nondiff)
        top, total = (jnp.moveaxis(x, 1, 2)[:, : p.length] for x in lse)
        top = top if lowered.lse_shift is None else top + lowered.lse_shift
        out, lse = with_sinks(p, out[:, : p.length], LogSumExp(top, total))
        return out.astype(dtype), lse


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class Operands:
    """A lowered problem, padded to whole blocks.

    Arrays are grouped by the part of them that a tile reads: a block of the tokens, a range of the
    distances, a tile of the pairs, or the whole.

    Attributes:
      q, k, v: [B, T, N, H], [B, K, S, H], [B, K, S, V].
      bias: float32 [N or 1, L], added at every distance, or None.
      strips: for each term, float32 [1 or N, F, L], or None.
      pairs: arrays of all pairs, [B or 1, N or 1, T, S].
      terms: one per rule that is neither in `bias` nor in `pairs`.
      values: a table on the values, or None.
      queries, keys: positions, segments, coordinates and features of tokens.
      mask: bool, [B or 1, N or 1, T, S], or None.
      block_mask: a function of two tokens, or None.
      prefix_length, dropout_seeds: as in `Problem`.
      plan: block sizes.
      pairs_at_once: as in `XLA`.
      visibility: the masks, and which tiles need rules.
      q_factor, logit_factor: factors on q, and on q . k after it; their product is the scale.
      softcap, dropout_rate: as in `attention`.
      origin: index of distance 0 in `bias` and `strips`.
      dtype: of the output.
    """

    q: Any
    k: Any
    v: Any
    bias: Any
    strips: tuple[Any, ...]
    pairs: tuple[AllPairs, ...]
    terms: tuple[Term, ...]
    values: ValueTable | None
    queries: TokenArrays
    keys: TokenArrays
    mask: Any
    block_mask: BlockMask | None
    prefix_length: Any
    dropout_seeds: Any
    plan: Plan = dataclasses.field(metadata=STATIC)
    pairs_at_once: int = dataclasses.field(metadata=STATIC)
    visibility: Visibility = dataclasses.field(metadata=STATIC)
    q_factor: float = dataclasses.field(metadata=STATIC)
    logit_factor: float = dataclasses.field(metadata=STATIC)
    softcap: float | None = dataclasses.field(metadata=STATIC)
    dropout_rate: float = dataclasses.field(metadata=STATIC)
    origin: int = dataclasses.field(metadata=STATIC)
    dtype: Any = dataclasses.field(metadata=STATIC)

    @property
    def heads(self) -> int:
        """N."""
        return self.q.shape[2]


def _prepare(p: Problem, lowered: Lowered, plan: Plan, pairs_at_once: int) -> Operands:
    """Pads a lowered problem to whole blocks."""
    terms = lowered.terms
    length, keys = plan.length, plan.keys
    queries, key_tokens, visibility = padded_tokens(p, lowered.visibility, length, keys)

    def padded_features(features, count):
        def padded(x):
            return pad_axis(jnp.swapaxes(x, 1, 2), 2, count, mode="edge")

        return jax.tree.map(padded, tuple(features))

    q_coordinate, k_coordinate = (shapes_of(x, 2) for x in (p.q_coordinates, p.k_coordinates))

    def traced_term(x):
        q = Tokens(None, q_coordinate, shapes_of(x.q_features, 3))
        k = Tokens(None, k_coordinate, shapes_of(x.k_features, 3))
        return dataclasses.replace(x.term, rule=traced(x.term.rule, q, k))

    mask = p.mask
    if mask is not None:
        mask = pad_axis(pad_axis(mask, 2, length), 3, keys)
    # A power of two scales q exactly, but one above 1 may exceed float16.
    fits = p.q.dtype != jnp.float16 or abs(p.scale) <= 1
    exact = p.q.dtype == jnp.float32 or (math.frexp(p.scale)[0] == 0.5 and fits)
    q_factor, logit_factor = (p.scale, 1.0) if exact else (1.0, p.scale)
    # Rules by distance are evaluated once, from the first key's distance from the last query, or
    # for causal attention from one tile into the future, to the last query's from the first key.
    first, before, after = 1 - p.keys, keys - p.keys, length - p.length
    if p.is_causal and p.prefix_length is None:
        first, before = 0, plan.max_table + 1

    def padded_strip(strip, fill=0.0):
        widths = [(0, 0)] * (strip.ndim - 1) + [(before, after)]
        return jnp.pad(strip, widths, constant_values=fill)

    bias = None
    if lowered.bias is not None:
        fill = MASK_VALUE if visibility.mask_in_bias else 0.0
        bias = padded_strip(lowered.bias(first, p.length), fill)
    return Operands(
        q=pad_axis(p.q, 1, length),
        k=pad_axis(jnp.swapaxes(p.k, 1, 2), 2, keys),
        v=pad_axis(jnp.swapaxes(lowered.v, 1, 2), 2, keys),
        bias=bias,
        strips=tuple(
            None if x.strip is None else padded_strip(jnp.swapaxes(x.strip(first, p.length), 1, 2))
            for x in terms
        ),
        pairs=tuple(
            dataclasses.replace(x, pairs=pad_axis(pad_axis(x.pairs, 2, length), 3, keys))
            for x in lowered.pairs
        ),
        terms=tuple(map(traced_term, terms)),
        values=lowered.values and lowered.values.traced(q_coordinate, k_coordinate),
        queries=queries._replace(features=padded_features((x.q_features for x in terms), length)),
        keys=key_tokens._replace(features=padded_features((x.k_features for x in terms), keys)),
        mask=mask,
        block_mask=p.block_mask,
        prefix_length=p.prefix_length,
        dropout_seeds=p.dropout_seeds,
        plan=plan,
        pairs_at_once=pairs_at_once,
        visibility=visibility,
        q_factor=q_factor,
        logit_factor=logit_factor,
        softcap=p.softcap,
        dropout_rate=p.dropout_rate,
        origin=before - first,
        dtype=jnp.float32 if p.sinks is not None else p.q.dtype,
    )


@jax.custom_vjp
def _attend(diff: Operands, nondiff: Operands):
    return _forward(combine(diff, nondiff))


def _attend_forward(diff, nondiff):
    out, lse = _forward(combine(diff, nondiff))
    return (out, lse), (diff, nondiff, out, lse)


def _attend_backward(saved, cotangents):
    d_out, d_lse = cotangents  # `d_lse.total` and `d_lse.top` have the same derivative.
    return _backward(*saved, d_out, d_lse.top), None


_attend.defvjp(_attend_forward, _attend_backward)


class Softmax(NamedTuple):
    """The running state of a block of queries: maximum and sum [B, N, Q], output [B, N, Q, V]."""

    m: jax.Array
    l: jax.Array
    out: jax.Array


def _forward(x: Operands) -> tuple[jax.Array, LogSumExp]:
    """Returns the output, [B, T, N, V], and the log-sum-exp, float32 [B, N, T]."""
    tiles = Tiles(x, x.plan.forward, backward=False)

    def query_block(i):
        q = tiles.scaled(take_block(x.q, 1, i, tiles.blocks.q))

        def key_block(interior):
            return lambda j, state: _forward_tile(tiles, i, j, q, state, interior=interior)

        shape = q.shape[:3]
        state = Softmax(
            zeros(x.q, shape, LEAST_LOGIT),
            zeros(x.q, shape),
            zeros(x.q, (*shape, x.v.shape[3])),
        )
        m, l, out = tiles.visit(0, i, key_block, state)
        out = out / jnp.where(l == 0, 1.0, l)[..., None]
        return jnp.swapaxes(out, 1, 2).astype(x.dtype), LogSumExp(m, l)

    def write_block(outs, i):
        out, lse = query_block(i)
        return put_slice(outs, out[None], i, 0), lse

    # Starts as numbers of q, all overwritten: XLA would share a constant between the layers of a
    # model, and copy it for each of them at once.
    first = take_block(x.q, 1, 0, tiles.blocks.q)[None, ..., :1].astype(x.dtype)
    count = x.plan.length // tiles.blocks.q
    outs = jnp.broadcast_to(first, (count, *first.shape[1:-1], x.v.shape[3]))
    outs, lse = _scan_blocks(write_block, outs, count)
    return join_blocks(outs, 1), jax.tree.map(lambda y: join_blocks(y, 2), lse)


def _forward_tile(tiles: "Tiles", i, j, q, state: Softmax, *, interior: bool) -> Softmax:
    """Returns the state after one more tile."""
    m, l, out = state
    x = tiles.operands
    k, v = tiles.key_values(j)
    queries, keys, seen, live = tiles.tokens(i, j, interior)
    v = zero_keys(live, v)
    keys = keys._replace(features=zero_keys(live, keys.features))
    by_distance, pairs = tiles.by_distance(i, j, interior), tiles.pairs(i, j)
    added = tiles.added(by_distance, pairs, x.terms, queries, keys, interior)
    s, _ = tiles.logits(_einsum("bnqh,bnkh->bnqk", q, k), added, seen)
    # The maximum only stabilises; its JVP would divide by the number of ties.
    m_new = jnp.maximum(m, jax.lax.stop_gradient(s).max(3))
    p, decay = jnp.exp(s - m_new[..., None]), jnp.exp(m - m_new)
    l = l * decay + p.sum(3)
    dropout = tiles.dropout_scale(queries, keys)
    p = p if dropout is None else p * dropout
    out = out * decay[..., None] + _einsum("bnqk,bnkv->bnqv", p.astype(v.dtype), v)
    if x.values is not None and not interior:
        mass = tiles.of_values(ValueTable.collect, p, queries, keys)
        out += _einsum("bnqr,nrv->bnqv", mass, x.values.table)
    return Softmax(m_new, l, out)


class QueryGrads(NamedTuple):
    """Sums over all blocks of keys: cotangents of queries and of arrays without tokens."""

    q: jax.Array
    tokens: TokenArrays
    terms: Any
    strips: Any
    pairs: Any
    table: Any


class KeyGrads(NamedTuple):
    """Cotangents of a block of keys: of k and v transposed, [B, N, H, K] and [B, N, V, K]."""

    k: jax.Array
    v: jax.Array
    tokens: TokenArrays


class QueryArrays(NamedTuple):
    """Arrays of all queries for the backward pass, heads first: [B, N, T, ...].

    q and d_out are there once more transposed, [B, N, ..., T]: products with these are twice as
    fast.
    """

    q: jax.Array
    d_out: jax.Array
    lse: jax.Array
    delta: jax.Array
    q_t: jax.Array
    d_out_t: jax.Array


def _backward(diff: Operands, nondiff: Operands, out, lse, d_out, d_lse) -> Operands:
    """Returns the cotangents of `diff`."""
    x = combine(diff, nondiff)
    tiles = Tiles(x, x.plan.backward, backward=True)
    lse, delta, d_out = lse_and_delta(out, lse, d_out, d_lse)
    d_out = jnp.swapaxes(d_out, 1, 2).astype(x.v.dtype)
    q = tiles.scaled(x.q)
    queries = QueryArrays(
        q, d_out, lse, delta, q_t=jnp.swapaxes(q, 2, 3), d_out_t=jnp.swapaxes(d_out, 2, 3)
    )

    def key_block(grads, j):
        tokens = take_block(diff.keys, 2, j, tiles.blocks.k)

        def query_block(interior):
            return lambda i, grads: _backward_tile(tiles, i, j, queries, grads, interior=interior)

        shape = x.q.shape[0], x.heads, x.k.shape[3], tiles.blocks.k
        key_grads = KeyGrads(
            zeros(x.q, shape), zeros(x.q, (*shape[:2], x.v.shape[3], shape[3])), _blank(tokens)
        )
        grads, key_grads = tiles.visit(1, j, query_block, (grads, key_grads))
        key_grads = KeyGrads(
            _sum_groups(jnp.swapaxes(key_grads.k, 2, 3), x.k.shape[1]).astype(x.k.dtype),
            _sum_groups(jnp.swapaxes(key_grads.v, 2, 3), x.v.shape[1]).astype(x.v.dtype),
            _cast(key_grads.tokens, tokens),
        )
        return grads, key_grads

    grads = QueryGrads(
        q=zeros(x.q, q.shape),
        tokens=_blank(diff.queries),
        terms=_blank(diff.terms),
        strips=_blank((diff.bias, diff.strips)),
        pairs=_blank(diff.pairs),
        table=None if x.values is None else _blank(x.values.table),
    )
    grads, key_grads = _scan_blocks(key_block, grads, x.plan.keys // tiles.blocks.k)
    bias, strips = grads.strips
    values = diff.values
    return dataclasses.replace(
        diff,
        block_mask=jax.tree.map(jnp.zeros_like, diff.block_mask),
        q=(jnp.swapaxes(grads.q, 1, 2) * x.q_factor).astype(x.q.dtype),
        k=join_blocks(key_grads.k, 2),
        v=join_blocks(key_grads.v, 2),
        bias=bias,
        strips=strips,
        pairs=_cast(grads.pairs, diff.pairs),
        terms=_cast(grads.terms, diff.terms),
        values=values
        and dataclasses.replace(
            values, table=grads.table, captured=jax.tree.map(jnp.zeros_like, values.captured)
        ),
        queries=_cast(grads.tokens, diff.queries),
        keys=jax.tree.map(lambda y: join_blocks(y, 2), key_grads.tokens),
    )


def _backward_tile(
    tiles: "Tiles",
    i,
    j,
    arrays: QueryArrays,
    carry: tuple[QueryGrads, KeyGrads],
    *,
    interior: bool,
) -> tuple[QueryGrads, KeyGrads]:
    """Adds the cotangents of one tile; ds is the cotangent of its logits, [B, N, Q, K]."""
    x, (grads, key_grads) = tiles.operands, carry
    q, d_out, lse, delta = (take_block(y, 2, i, tiles.blocks.q) for y in arrays[:4])
    q_t, d_out_t = (take_block(y, 3, i, tiles.blocks.q) for y in arrays[4:])
    k, v = tiles.key_values(j)
    queries, keys, seen, live = tiles.tokens(i, j, interior)
    k, v = zero_keys(live, k), zero_keys(live, v)
    diff, nondiff = partition((x.terms, queries, keys))

    def added(by_distance, pairs, diff):
        terms, queries, keys = combine(diff, nondiff)
        keys = keys._replace(features=zero_keys(live, keys.features))
        tile = tiles.added(by_distance, pairs, terms, queries, keys, interior, seen)
        # A rule that reads no array does not vary over a mesh; its cotangent does.
        return vary_over(tile, jax.typeof(x.q).mat.varying)

    has_terms = any(not interior or term.interior is not None for term in x.terms)
    by_distance, pairs = tiles.by_distance(i, j, interior), tiles.pairs(i, j)
    extra: Any = None
    pull: Any = None
    if by_distance[0] is not None or has_terms or pairs:
        extra, pull = jax.vjp(added, by_distance, pairs, diff)
    s, softcap_grad = tiles.logits(_einsum("bnqh,bnkh->bnqk", q, k), extra, seen)
    p = jnp.exp(s - lse[..., None])
    dp = _einsum("bnqv,bnkv->bnqk", d_out, v)
    dropout = tiles.dropout_scale(queries, keys)
    dropped = p if dropout is None else p * dropout
    if x.values is not None and not interior:
        exact = d_out.astype(jnp.float32)
        entries = _einsum("bnqv,nrv->bnqr", exact, x.values.table)
        dp += tiles.of_values(ValueTable.spread, entries, queries, keys)
        mass = tiles.of_values(ValueTable.collect, dropped, queries, keys)
        table = grads.table + _einsum("bnqr,bnqv->nrv", mass, exact)
        grads = grads._replace(table=table)
    dp = dp if dropout is None else dp * dropout
    ds = p * (dp - delta[..., None])
    ds = ds if softcap_grad is None else ds * softcap_grad
    if pull is not None:
        d_by_distance, d_pairs, (d_terms, d_queries, d_keys) = pull(_sum_to(ds, extra))
        strips = _add_by_distance(grads.strips, d_by_distance, tiles.strip_start(i, j))
        grads = grads._replace(strips=strips, pairs=tiles.with_pairs(grads.pairs, d_pairs, i, j))
        if has_terms:
            tokens = add_block(grads.tokens, d_queries, 2, i, tiles.blocks.q)
            grads = grads._replace(terms=_sum(grads.terms, d_terms), tokens=tokens)
            key_grads = key_grads._replace(tokens=_sum(key_grads.tokens, d_keys))
    ds = (ds if x.logit_factor == 1.0 else ds * x.logit_factor).astype(q.dtype)
    key_grads = key_grads._replace(
        v=key_grads.v + _einsum("bnvq,bnqk->bnvk", d_out_t, dropped.astype(v.dtype)),
        k=key_grads.k + _einsum("bnhq,bnqk->bnhk", q_t, ds),
    )
    dq = add_block(grads.q, _einsum("bnqk,bnkh->bnqh", ds, k), 2, i, tiles.blocks.q)
    return grads._replace(q=dq), key_grads


@dataclasses.dataclass(frozen=True)
class Tiles:
    """Tiles of block i of queries and block j of keys, [B, N, Q, K].

    Attributes:
      operands: the arrays of all blocks.
      blocks: queries and keys per tile.
      backward: whether these are tiles of the backward pass, whose terms are evaluated inside of
        `jax.vjp`.
    """

    operands: Operands
    blocks: Blocks
    backward: bool

    def scaled(self, q: jax.Array) -> jax.Array:
        """Returns [B, N, Q, H] of [B, Q, N, H], times the factor on q."""
        return jnp.swapaxes(q, 1, 2) * jnp.asarray(self.operands.q_factor, q.dtype)

    def key_values(self, j) -> tuple[jax.Array, jax.Array]:
        """Returns k and v of a block, [B, N, K, ...]."""
        k, v = (take_block(y, 2, j, self.blocks.k) for y in (self.operands.k, self.operands.v))
        return self._per_query_head(k), self._per_query_head(v)

    def tokens(self, i, j, interior: bool) -> tuple[TokenArrays, TokenArrays, Any, Any]:
        """Returns queries and keys of a tile, and the masks of visible pairs and of live keys.

        Live keys, bool [B or 1, N or 1, K], are seen by some query of the tile; the mask is None
        where every key is visible to the query in its own slot.
        """
        q = take_block(self.operands.queries, 2, i, self.blocks.q)
        k = take_block(self.operands.keys, 2, j, self.blocks.k)
        seen = None if interior else self.seen(i, j, q, k)
        see = self.operands.visibility
        others = see.segments or see.mask or see.until or see.block_mask or self.operands.pairs
        known = see.by_slot and not others
        return q, k, seen, None if seen is None or known else jnp.any(seen, axis=2)

    def strip_start(self, i, j) -> jax.Array:
        """Returns the index of the last key's distance from the first query, in the strips."""
        return self.operands.origin + i * self.blocks.q - j * self.blocks.k - (self.blocks.k - 1)

    def by_distance(self, i, j, interior: bool) -> tuple[Any, Any]:
        """Returns the parts of the bias and of the strips that the tile covers."""
        start, count = self.strip_start(i, j), self.blocks.q + self.blocks.k - 1

        def part(x):
            return take_slice(x, start, count, x.ndim - 1)

        bias = self.operands.bias
        if bias is not None:
            used = not interior or self.operands.visibility.bias_everywhere
            bias = part(bias) if used else None
        strips = self.operands.strips
        return bias, (None,) * len(strips) if interior else jax.tree.map(part, strips)

    def pairs(self, i, j) -> tuple[AllPairs, ...]:
        """Returns the tile of every array of all pairs, [B or 1, N or 1, Q, K]."""
        rows = take_block(self.operands.pairs, 2, i, self.blocks.q)
        return take_block(rows, 3, j, self.blocks.k)

    def with_pairs(self, grads: Any, tiles: Any, i, j) -> Any:
        """Writes a tile of the cotangents of `pairs`; every tile is visited once."""
        zero = jnp.zeros((), jnp.int32)
        start = zero, zero, i * self.blocks.q, j * self.blocks.k

        def write(grad, tile):
            tile = tile.astype(grad.dtype)
            return jax.lax.dynamic_update_slice(grad, tile, start, allow_negative_indices=False)

        return jax.tree.map(write, grads, tiles)

    def added(
        self,
        by_distance,
        pairs,
        terms,
        q: TokenArrays,
        k: TokenArrays,
        interior: bool,
        seen: jax.Array | None = None,
    ) -> jax.Array | None:
        """Returns the sum of the rules, broadcastable to the tile, or None.

        Pairs that are not in `seen` may get any number, and have no gradient.
        """
        bias, strips = by_distance
        out = None
        if bias is not None:
            expand = toeplitz_tile_vjp if self.backward else toeplitz_tile
            shape = self.blocks.q, self.blocks.k
            out = jax.vmap(lambda values: expand(values, shape))(bias)[None]
            # One tile per row: XLA would otherwise sum rows inside the loop over diagonals.
            out = jnp.broadcast_to(out, (self.operands.q.shape[0], *out.shape[1:]))
        for term in pairs:
            tile = differentiable_in_units(term.pairs.astype(jnp.float32), term.factor)
            out = tile if out is None else out + tile
        k = k._replace(features=jax.tree.map(self._per_query_head, k.features))
        for n, (term, strip) in enumerate(zip(terms, strips, strict=True)):
            rule = term.interior if interior else term.rule
            if rule is not None:
                value = self._of_rule(
                    rule, term, strip, self._tokens(q, n), self._tokens(k, n), seen
                )
                out = value if out is None else out + value
        return out

    def _of_rule(
        self, rule: Any, term: Term, strip, q: Tokens, k: Tokens, seen: jax.Array | None
    ) -> jax.Array:
        """Evaluates a rule of a term for all rows and heads: [B or 1, N or 1, Q, K]."""
        seen = seen if term.careful else None
        in_table = isinstance(rule, TableDot)
        q, k = (self._for_gather(x) if in_table else x._replace(slots=None) for x in (q, k))
        has_features = bool(jax.tree.leaves((q.features, k.features)))

        def evaluate(heads, q, k, seen):
            of_head = rule.of_head(heads)
            if in_table:
                return term.factor * of_head.tile(q, k, in_vjp=self.backward)

            def tile(q, seen):
                return differentiable_in_units(of_head.tile(q, k, seen), term.factor)

            if self.backward and of_head.is_pairwise and not has_features:
                return self._in_parts(tile, q, seen, len(k.coordinates))
            return tile(q, seen)

        heads = jax.tree.map(lambda x: x[None], rule.heads if strip is None else strip)
        return vmap_rows_and_heads(evaluate, heads, q, k, seen)

    def _in_parts(self, tile: Callable, q: Tokens, seen: jax.Array | None, keys: int) -> jax.Array:
        """Returns `tile(q, seen)`, of `pairs_at_once` pairs at a time."""
        length = len(q.coordinates)
        size = math.gcd(length, max(self.operands.pairs_at_once // keys, 1))
        if size == length:
            return tile(q, seen)
        parts = jax.tree.map(lambda x: x.reshape(-1, size, *x.shape[1:]), (q, seen))
        out = jax.lax.map(lambda x: jax.checkpoint(tile)(*x), parts)
        return out.reshape(length, keys)

    def of_values(
        self, method: Callable, x: jax.Array, q: TokenArrays, k: TokenArrays
    ) -> jax.Array:
        """Calls `ValueTable.spread` or `collect` for all rows and heads of x [B, N, ...]."""
        values: Any = self.operands.values

        def evaluate(x, table, q, k):
            of_head = dataclasses.replace(values, table=table)
            return method(of_head, x, q, k)

        tokens = (self._for_gather(self._tokens(y)) for y in (q, k))
        return vmap_rows_and_heads(evaluate, x, values.table[None], *tokens)

    def _tokens(self, block: TokenArrays, term: int | None = None) -> Tokens:
        """Returns tokens as a term reads them, [B or 1, N or 1, T, ...]."""
        features = None if term is None else block.features[term]
        return Tokens(block.slots, block.coordinates, features)

    def _for_gather(self, x: Tokens) -> Tokens:
        """Returns tokens with slots and coordinates of every head and row.

        They are indices of one gather then; with shared indices, XLA for CPUs is slow.
        """
        shape = self.operands.q.shape[0], self.operands.heads
        slots, coordinates = (jnp.broadcast_to(y, (*shape, *y.shape[2:])) for y in x[:2])
        return Tokens(slots, coordinates, x.features)

    def _per_query_head(self, x: jax.Array) -> jax.Array:
        return repeat_heads(x, self.operands.heads, axis=1)

    def seen(self, i, j, q: TokenArrays, k: TokenArrays) -> jax.Array | None:
        """Returns bool, broadcastable to the tile, or None where all pairs are visible."""
        see, out = self.operands.visibility, None
        if see.ordered or see.segments or see.until:
            order = q.positions, k.positions, q.segments, k.segments
            order, places = jax.tree.map(lambda x: x[:, 0], (order, (q.coordinates, k.coordinates)))
            out = visible(
                *order,
                is_causal=see.is_causal and not see.mask_in_bias,
                window=None if see.mask_in_bias else see.window,
                window_places=places if see.window_by_coordinates else None,
                prefix_length=self.operands.prefix_length,
                k_visible_until=None if k.until is None else k.until[:, 0],
            )[:, None]
        if self.operands.block_mask is not None:
            blocks = self.operands.block_mask.visible(q.index[:, 0], k.index[:, 0])
            out = blocks if out is None else out & blocks
        if self.operands.mask is not None:
            mask = take_block(self.operands.mask, 2, i, self.blocks.q)
            mask = take_block(mask, 3, j, self.blocks.k)
            out = mask if out is None else out & mask
        for term in self.pairs(i, j):
            finite = ~jnp.isneginf(term.pairs)
            out = finite if out is None else out & finite
        return out

    def dropout_scale(self, q: TokenArrays, k: TokenArrays) -> jax.Array | None:
        """Returns the factor of dropout on every weight, or None."""
        if self.operands.dropout_seeds is None:
            return None
        rate = self.operands.dropout_rate
        keep = keep_mask(self.operands.dropout_seeds, rate, q.slots[:, 0], k.slots[:, 0])
        return jnp.where(keep, jnp.float32(1 / (1 - rate)), 0.0)

    def logits(self, products, added, seen) -> tuple[jax.Array, jax.Array | None]:
        """Returns masked logits, and the derivative of the softcap if there is one."""
        x, softcap_grad = products, None
        if self.operands.logit_factor != 1.0:
            x *= self.operands.logit_factor
        if added is not None:
            x += added
        if self.operands.softcap is not None:
            if added is not None:  # Rules hide keys by -inf.
                finite = ~jnp.isneginf(x)
                seen = finite if seen is None else seen & finite
                x = jnp.where(seen, x, 0.0)
            bounded = jnp.tanh(x / self.operands.softcap)
            x, softcap_grad = self.operands.softcap * bounded, 1.0 - bounded * bounded
        return x if seen is None else jnp.where(seen, x, MASK_VALUE), softcap_grad

    def visit(self, axis: int, index, body: Callable, carry: Any) -> Any:
        """Runs `body(interior)(other, carry)` over the blocks that meet block `index`.

        Args:
          axis: 0: `index` is a block of queries, the others are of keys; 1: the other way round.
          index: number of the block.
          body, carry: the loop.
        """
        see, x = self.operands.visibility, self.operands
        if (x.plan.keys // self.blocks.k, x.plan.length // self.blocks.q)[axis] == 1:
            return body(interior=see.all_interior)(jnp.int32(0), carry)
        row, tiles = index, see.known_tiles(self.blocks, x.plan.length, x.plan.keys)
        if tiles is None:
            q, k = see.summary(x.queries, self.blocks.q), see.summary(x.keys, self.blocks.k)
            q, k = (take_block(y, 1, index, 1) if n == axis else y for n, y in enumerate((q, k)))
            live, interior = see.classify(q, k, x.prefix_length)
            if x.block_mask is not None:
                sizes = self.blocks.q, self.blocks.k, x.plan.length, x.plan.keys
                tiles = (_take_row(y, index, 1 + axis) for y in x.block_mask.tiles(*sizes))
                live, interior = (a & b for a, b in zip((live, interior), tiles, strict=True))
            row, live, interior = None, jnp.any(live, 0), jnp.all(interior, 0)
        else:
            live, interior = (np.moveaxis(y, axis, 0) for y in tiles)
        if not see.all_interior:
            carry = for_each_block(live & ~interior, body(interior=False), carry, row)
        if not see.none_interior:
            carry = for_each_block(live & interior, body(interior=True), carry, row)
        return carry


# Starts are never negative; JAX would otherwise emit three operations for each to allow it.
take_slice = functools.partial(jax.lax.dynamic_slice_in_dim, allow_negative_indices=False)
put_slice = functools.partial(jax.lax.dynamic_update_slice_in_dim, allow_negative_indices=False)
_take_row = functools.partial(
    jax.lax.dynamic_index_in_dim, keepdims=False, allow_negative_indices=False
)


def take_block(tree: Any, axis: int, index: jax.Array | int, size: int) -> Any:
    """Returns block `index` of every leaf."""
    return jax.tree.map(lambda x: take_slice(x, index * size, size, axis), tree)


def add_block(tree: Any, block: Any, axis: int, index: jax.Array | int, size: int) -> Any:
    """Adds `block` to block `index` of every leaf."""

    def add(x, b):
        new = take_slice(x, index * size, size, axis) + b.astype(x.dtype)
        return put_slice(x, new, index * size, axis)

    return jax.tree.map(add, tree, block)


def zeros(like: jax.Array, shape: tuple[int, ...], fill: float = 0.0) -> jax.Array:
    """Returns float32 of a shape, varying over the mesh axes that `like` varies over."""
    return jax.lax.full_like(like, fill, jnp.float32, shape)


def for_each_block(
    chosen: jax.Array | np.ndarray,
    body: Callable[[jax.Array, Any], Any],
    carry: Any,
    row: jax.Array | None = None,
) -> Any:
    """Runs `carry = body(i, carry)` for every i with `chosen[i]`, a bool [n].

    With a row, `chosen` is a NumPy array [rows, n]: the blocks of each row are then listed while
    tracing, and a program without blocks has no loop.
    """
    if row is not None:
        counts: Any = np.sum(chosen, 1, dtype=np.int32)
        if not counts.any():
            return carry
        listed = np.argsort(~chosen, 1, kind="stable").astype(np.int32)[:, : counts.max()]
        blocks = _take_row(jnp.asarray(listed), row)
        if (counts == 1).all():
            return body(blocks[0], carry)
        return jax.lax.fori_loop(
            jnp.int32(0),
            _take_row(jnp.asarray(counts), row),
            lambda number, carry: body(_take_row(blocks, number), carry),
            carry,
        )
    counts = jnp.cumsum(chosen, dtype=jnp.int32)

    def step(number, carry):
        return body(jnp.argmax(counts > number).astype(jnp.int32), carry)

    return jax.lax.fori_loop(jnp.int32(0), counts[-1], step, carry)


def zero_keys(live: jax.Array | None, tree: Any) -> Any:
    """Zeroes the keys of arrays [B, N, K, ...] that no query sees: 0 * NaN is NaN."""
    if live is None:
        return tree

    def clean(x):
        shape = [1] * x.ndim
        shape[:3] = live.shape
        mask = live.reshape(shape)
        if live.shape[1] not in (1, x.shape[1]):  # A mask by query head, features by key head.
            mask = jnp.any(live.reshape(live.shape[0], x.shape[1], -1, live.shape[2]), 2)
            shape[1] = x.shape[1]
            mask = mask.reshape(shape)
        return jnp.where(mask, x, jnp.zeros((), x.dtype))

    return jax.tree.map(clean, tree)


def _sum_groups(x: jax.Array, kv_heads: int) -> jax.Array:
    """Sums the query heads of each key head: [B, N, ...] to [B, K, ...]."""
    if x.shape[1] == kv_heads:
        return x
    return x.reshape(x.shape[0], kv_heads, -1, *x.shape[2:]).sum(2)


def _scan_blocks(step: Callable, carry: Any, count: int) -> tuple[Any, Any]:
    """Runs `lax.scan` over block numbers; a single block needs no loop."""
    if count == 1:
        carry, out = step(carry, jnp.int32(0))
        return carry, jax.tree.map(lambda x: x[None], out)
    return jax.lax.scan(step, carry, jnp.arange(count, dtype=jnp.int32))


def _einsum(form: str, x: jax.Array, y: jax.Array) -> jax.Array:
    """Returns a product accumulated in float32, at full precision for float32 inputs."""
    exact = "highest" if x.dtype == jnp.float32 else None
    return jnp.einsum(form, x, y, precision=exact, preferred_element_type=jnp.float32)


def _add_by_distance(strips: Any, by_distance: Any, start: jax.Array) -> Any:
    """Adds parts of strips, from index `start` on; None adds nothing."""

    def add(part, strip):
        if part is None:
            return strip
        axis = part.ndim - 1
        old = take_slice(strip, start, part.shape[axis], axis)
        return put_slice(strip, old + part, start, axis)

    return jax.tree.map(add, by_distance, strips, is_leaf=lambda x: x is None)


def _blank(tree: Any) -> Any:
    return jax.tree.map(lambda x: zeros(x, x.shape), tree)


def _cast(tree: Any, like: Any) -> Any:
    return jax.tree.map(lambda x, y: x.astype(y.dtype), tree, like)


def _sum(tree: Any, more: Any) -> Any:
    return jax.tree.map(lambda x, y: x + y.astype(x.dtype), tree, more)


def _sum_to(tile: jax.Array, like: jax.Array) -> jax.Array:
    """Sums over the axes along which `like` was broadcast."""
    axes = tuple(a for a in range(4) if tile.shape[a] != like.shape[a])
    return tile.sum(axes, keepdims=True) if axes else tile
