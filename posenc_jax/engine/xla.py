"""Attention by tiles in plain JAX: exact, differentiable, and linear in memory.

The forward pass runs over blocks of queries and, for each, over the blocks of keys that it
sees, with a running maximum and sum. The backward pass runs over blocks of keys, computes
their tiles anew from the stored log-sum-exp, and pulls the cotangent of each tile's logits
through the rules to the arrays they read. Nothing of size T x S is ever held.

Sums run in one fixed order, so that results are the same bits in every run.
"""

import dataclasses
import functools
from typing import Any

import jax
import jax.numpy as jnp

from posenc_jax.engine.problem import Problem
from posenc_jax.engine.tiling import add_at, cut, joined, zeros
from posenc_jax.engine.xla_once import reversed_once
from posenc_jax.engine.xla_prepare import HIDDEN, Operands, Spec, prepare
from posenc_jax.engine.xla_rows import attend as attend_rows
from posenc_jax.engine.xla_tile import (
    Tile,
    clean_keys,
    einsum,
    own_keys,
    scan_blocks,
    sides,
    visit,
)


def attend(p: Problem) -> tuple[jax.Array, jax.Array]:
    """Returns the output, [B, T, N, V] in q's dtype, and the log-sum-exp, float32 [B, T, N]."""
    if p.row_rule is not None:
        return attend_rows(_varying_alike(p))
    spec, operands, left_out = prepare(_varying_alike(p))
    moving = jax.tree.map(lambda x: x if _moves(x) else None, operands)
    fixed = jax.tree.map(lambda x: None if _moves(x) else x, operands)
    try:
        out, lse = _attend(spec, moving, fixed)
    except TypeError as error:
        if "custom_vjp" not in str(error):
            raise
        raise NotImplementedError(
            "attention: tiles have reverse mode, and forward mode over it; for forward mode "
            'alone use implementation="reference".'
        ) from error
    length = p.q.shape[1]
    out, lse = out[:, :length], jnp.moveaxis(lse, 1, 2)[:, :length]
    if left_out is not None:
        lse += left_out
    if p.sinks is not None:
        sinks = p.sinks.astype(jnp.float32)[None, None]
        total = jnp.logaddexp(lse, sinks)
        share = jnp.exp(lse - jnp.where(jnp.isneginf(total), 0.0, total))
        out, lse = (out * share[..., None]).astype(p.q.dtype), total
    return out, lse


def _moves(x: jax.Array) -> bool:
    """Whether an array can have a gradient."""
    return jnp.issubdtype(x.dtype, jnp.inexact)


def _varying_alike(p: Problem) -> Problem:
    """Inside `shard_map`, lets every array vary over all axes that one of them varies over."""
    axes = frozenset().union(*(jax.typeof(x).mat.varying for x in jax.tree.leaves(p)))

    def vary(x):
        missing = tuple(axes - jax.typeof(x).mat.varying)
        return jax.lax.pcast(x, missing, to="varying") if missing else x

    return jax.tree.map(vary, p) if axes else p


def _merge(moving: Any, fixed: Any) -> Any:
    return jax.tree.map(
        lambda a, b: b if a is None else a, moving, fixed, is_leaf=lambda x: x is None
    )


@functools.partial(jax.custom_vjp, nondiff_argnums=(0,))
def _attend(spec: Spec, moving: Operands, fixed: Operands):
    return _forward(spec, _merge(moving, fixed))


def _attend_forward(spec, moving, fixed):
    out, lse = _forward(spec, _merge(moving, fixed))
    return (out, lse), (moving, fixed, out, lse)


def _attend_backward(spec, saved, cotangents):
    moving, fixed, out, lse = saved
    grads = _backward(spec, moving, fixed, out, lse, *cotangents)
    return jax.tree.map(reversed_once, grads), None


_attend.defvjp(_attend_forward, _attend_backward)


def _forward(spec: Spec, x: Operands) -> tuple[jax.Array, jax.Array]:
    """Returns the output, [B, T, N, V], and the log-sum-exp, float32 [B, N, T]."""
    blocks = spec.plan.forward
    tile = Tile(spec, x, blocks, flip=False)
    q_sides, k_sides = sides(spec, x, blocks)
    count = spec.plan.keys // blocks.k

    def row(_, i):
        q, by_q = (cut(y, 1, i, blocks.q) for y in (x.q, x.by_q))
        q = tile.queries(q)

        def body(plain):
            def step(j, carry):
                top, total, out = carry
                by_k = cut(x.by_k, 1, j, blocks.k)
                k, v = (own_keys(cut(y, 2, j, blocks.k), spec.heads) for y in (x.k, x.v))
                seen = None if plain else tile.seen(i, j, by_q, by_k)
                used = tile.used(seen)
                v = clean_keys(used, v, 2)
                by_k["cols"] = clean_keys(used, by_k["cols"], 1, heads=2)
                windows = tile.windows(i, j, plain)
                added = tile.added(windows, x.terms, by_q, by_k, plain=plain)
                s, _ = tile.logits(tile.products(q, k), added, seen)
                # Nothing depends on it, and its tangent divides by the number of maxima found,
                # which rounding may make none.
                new = jnp.maximum(top, jax.lax.stop_gradient(s).max(3))
                p, old = jnp.exp(s - new[..., None]), jnp.exp(top - new)
                total = total * old + p.sum(3)
                kept = tile.kept(by_q, by_k)
                if kept is not None:
                    p *= kept
                out = out * old[..., None]
                out += einsum("bnqk,bnkv->bnqv", p.astype(v.dtype), v)
                if x.value is not None and not plain:
                    mass = x.value.collect(p, by_q, by_k, flip=False)
                    out += einsum("bnqr,nrv->bnqv", mass, x.value.table)
                return new, total, out

            return step

        shape = q.shape[:3]
        carry = (
            zeros(x.q, shape, HIDDEN),
            zeros(x.q, shape),
            zeros(x.q, (*shape, x.v.shape[3])),
        )
        q_side = cut(q_sides, 1, i, 1)
        top, total, out = visit(spec, q_side, k_sides, x.prefix, count, body, carry)
        # A maximum may pass over NaN; a sum does not.
        blind = ((top <= HIDDEN / 2) | (total == 0)) & ~jnp.isnan(total)
        total = jnp.where(blind, 1.0, total)
        out = jnp.where(blind[..., None], 0.0, out / total[..., None])
        lse = jnp.where(blind, -jnp.inf, top + jnp.log(total))
        return None, (jnp.swapaxes(out, 1, 2).astype(spec.dtype), lse)

    _, (out, lse) = scan_blocks(row, None, spec.plan.length // blocks.q)
    return joined(out, 1), joined(lse, 2)


def _backward(spec: Spec, moving: Any, fixed: Any, out, lse, d_out, d_lse):
    """Returns the cotangents of `moving`."""
    x = _merge(moving, fixed)
    blocks = spec.plan.backward
    tile = Tile(spec, x, blocks, flip=True)
    q_sides, k_sides = sides(spec, x, blocks)
    count = spec.plan.length // blocks.q

    delta = jnp.einsum("btnv,btnv->bnt", d_out.astype(jnp.float32), out.astype(jnp.float32))
    delta -= d_lse
    # A query that sees nothing has no weights: exp(anything - 1e30) is zero.
    lse = jnp.where(jnp.isneginf(lse), -HIDDEN, lse)
    d_out = jnp.swapaxes(d_out, 1, 2).astype(x.v.dtype)
    moving_q, fixed_q = moving.by_q, fixed.by_q
    moving_k, fixed_k = moving.by_k, fixed.by_k
    blank = functools.partial(jax.tree.map, lambda y: zeros(y, y.shape))
    batch, dim = x.q.shape[0], x.q.shape[3]
    queries = tile.queries(x.q)

    # Made once, before the loops: a product with it as it lies is twice as fast.
    upright = jnp.swapaxes(x.k, 2, 3)

    def column(carry, j):
        k, v = (own_keys(cut(y, 2, j, blocks.k), spec.heads) for y in (x.k, x.v))
        k_upright = own_keys(cut(upright, 3, j, blocks.k), spec.heads)
        in_k, by_k = cut(moving_k, 1, j, blocks.k), cut(fixed_k, 1, j, blocks.k)

        def body(plain):
            def step(i, carry):
                dq, d_by_q, d_terms, d_lines, d_table, dk, dv, d_by_k = carry
                q, do = (cut(y, 2, i, blocks.q) for y in (queries, d_out))
                top, rest = (cut(y, 2, i, blocks.q)[:, :, None] for y in (lse, delta))
                in_q, by_q = (cut(y, 1, i, blocks.q) for y in (moving_q, fixed_q))
                all_q, all_k = _merge(in_q, by_q), _merge(in_k, by_k)
                seen = None if plain else tile.seen(i, j, all_q, all_k)
                used = tile.used(seen)
                k_, v_ = clean_keys(used, k, 2), clean_keys(used, v, 2)

                def added(windows, terms, in_q, in_k):
                    q, k = _merge(in_q, by_q), _merge(in_k, by_k)
                    k["cols"] = clean_keys(used, k["cols"], 1, heads=2)
                    terms = _merge(terms, fixed.terms)
                    return tile.added(windows, terms, q, k, plain=plain)

                windows = tile.windows(i, j, plain)
                ruled = windows[0] is not None or tile.ruled(plain)
                extra: Any = None
                pull: Any = None
                if ruled:
                    extra, pull = jax.vjp(added, windows, moving.terms, in_q, in_k)
                s, slope = tile.logits(tile.products(q, k_), extra, seen)
                p = jnp.exp(s - top)
                dp = einsum("bnkv,bnqv->bnkq", v_, do)
                kept = tile.kept(all_q, all_k)
                left = p if kept is None else p * kept
                if x.value is not None and not plain:
                    entries = einsum("nrv,bnqv->bnrq", x.value.table, _like(do))
                    dp += x.value.spread(entries, all_q, all_k, flip=True)
                    mass = x.value.collect(left, all_q, all_k, flip=True)
                    d_table += einsum("bnrq,bnqv->nrv", mass, _like(do))
                if kept is not None:
                    dp *= kept
                ds = p * (dp - rest)
                if slope is not None:
                    ds *= slope
                if ruled:
                    d_windows, d_terms_, d_in_q, d_in_k = pull(_fit(ds, extra))
                    d_lines = _add_slices(d_lines, d_windows, tile.window_start(i, j))
                    if tile.ruled(plain):
                        d_terms, d_by_k = _sum((d_terms, d_by_k), (d_terms_, d_in_k))
                        d_by_q = add_at(d_by_q, d_in_q, 1, i, blocks.q)
                if spec.factor != 1.0:
                    ds *= spec.factor
                ds = ds.astype(q.dtype)
                dv += einsum("bnkq,bnqv->bnkv", left.astype(v.dtype), do)
                dk += einsum("bnkq,bnqh->bnkh", ds, q)
                dq_ = einsum("bnhk,bnkq->bnhq", clean_keys(used, k_upright, 3), ds)
                dq = add_at(dq, dq_, 3, i, blocks.q)
                return dq, d_by_q, d_terms, d_lines, d_table, dk, dv, d_by_k

            return step

        here = zeros(x.q, k.shape), zeros(x.q, v.shape), blank(in_k)
        k_side = cut(k_sides, 1, j, 1)
        carry = (*carry, *here)
        *carry, dk, dv, d_by_k = visit(spec, q_sides, k_side, x.prefix, count, body, carry)
        dk, dv = (_groups(y, z.shape[1]).astype(z.dtype) for y, z in ((dk, x.k), (dv, x.v)))
        d_by_k = jax.tree.map(lambda y, z: y.astype(z.dtype), d_by_k, in_k)
        return tuple(carry), (dk, dv, d_by_k)

    d_table = None if x.value is None else blank(x.value.table)
    carry = (
        zeros(x.q, (batch, spec.heads, dim, spec.plan.length)),
        blank(moving_q),
        blank(moving.terms),
        blank((x.vector, x.lines)),
        d_table,
    )
    carry, (dk, dv, d_by_k) = scan_blocks(column, carry, spec.plan.keys // blocks.k)
    dq, d_by_q, d_terms, d_lines, d_table = carry
    d_value = None
    if x.value is not None:
        d_value = dataclasses.replace(moving.value, table=d_table)
    return dataclasses.replace(
        moving,
        q=(jnp.transpose(dq, (0, 3, 1, 2)) * spec.q_factor).astype(x.q.dtype),
        k=joined(dk, 2),
        v=joined(dv, 2),
        vector=d_lines[0],
        lines=d_lines[1],
        terms=_cast(d_terms, moving.terms),
        value=d_value,
        by_q=_cast(d_by_q, moving_q),
        by_k=jax.tree.map(lambda y: joined(y, 1), d_by_k),
    )


def _like(x: jax.Array) -> jax.Array:
    return x.astype(jnp.float32)


def _cast(tree: Any, like: Any) -> Any:
    return jax.tree.map(lambda x, y: x.astype(y.dtype), tree, like)


def _sum(tree: Any, more: Any) -> Any:
    return jax.tree.map(lambda x, y: x + y.astype(x.dtype), tree, more)


def _fit(tile: jax.Array, like: jax.Array) -> jax.Array:
    """Sums over the axes along which `like` was broadcast."""
    axes = tuple(a for a in range(4) if tile.shape[a] != like.shape[a])
    return tile.sum(axes, keepdims=True) if axes else tile


def _add_slices(lines: Any, parts: Any, start: jax.Array) -> Any:
    """Adds parts of lines in their place; None for a part adds nothing."""

    def add(part, line):
        if part is None:
            return line
        old = jax.lax.dynamic_slice_in_dim(line, start, part.shape[1], 1)
        return jax.lax.dynamic_update_slice_in_dim(line, old + part, start, 1)

    return jax.tree.map(add, parts, lines, is_leaf=lambda x: x is None)


def _groups(x: jax.Array, kv_heads: int) -> jax.Array:
    """[B, N, ...] to [B, K, ...]: sums the query heads of each key head."""
    if x.shape[1] == kv_heads:
        return x
    return x.reshape(x.shape[0], kv_heads, -1, *x.shape[2:]).sum(2)
