"""The decode kernel: a few queries against a long cache, for TPU.

Grid (B, the most blocks of keys that a row sees). A step reads a block of keys and values of all
heads, and the queries of all heads attend to it. The logits that rules add are [B, N, T, S], which
is small against the cache for few queries, so they are computed outside of the kernel, by any rule,
with the mask in them. Blocks without a visible key are not read.
"""

import dataclasses
import functools
from typing import Any

import jax
import jax.numpy as jnp
from jax.experimental import pallas as pl
from jax.experimental.pallas import tpu as pltpu

from posenc_jax.engine.mask import MASK_VALUE, in_units
from posenc_jax.engine.problem import LogSumExp, Problem, pad_axis
from posenc_jax.engine.rules import Rule
from posenc_jax.kernels.operands import LOG2E, out_struct
from posenc_jax.kernels.tpu.block_specs import Call
from posenc_jax.kernels.tpu.tile import (
    LANES,
    dot,
    finish_softmax,
    lanes,
    start_softmax,
    to_column,
    update_softmax,
)

MAX_QUERIES = 16
_BLOCK_BYTES = 2 * 2**20  # Of keys and values.
_MAX_DISTANCES = 1280  # Of a table whose entries are picked by products.
_EMPTY, _WHOLE, _PARTIAL = 0, 1, 2
"""Kinds of blocks: skipped; all keys are seen by a query; some are not, and may hold NaN."""
_KINDS = 3


def decodes(p: Problem) -> bool:
    """Whether the decode kernel serves a problem: T is at most 16, and nothing is dropped."""
    return p.length <= MAX_QUERIES and p.dropout_seeds is None


def decode(
    p: Problem, block: int | None, interpret: Any, vmem_limit: int
) -> tuple[jax.Array, LogSumExp]:
    """Returns the output, float32 [B, T, N, V], and the log-sum-exp, float32 [B, T, N].

    Sinks are left to the caller.

    Args:
      p: the problem, without rules on whole rows or values.
      block: keys per step, a multiple of 128. Default: 2 MiB of keys and values.
      interpret: see `PallasTPU`.
      vmem_limit: bytes that the kernel may use.
    """
    batch, length, heads, _ = p.q.shape
    out, *lse = _call(p, _grid(p, block), interpret, vmem_limit)()
    out = out.reshape(batch, heads, length, -1)
    top, total = (jnp.swapaxes(y[..., 0].reshape(batch, heads, length), 1, 2) for y in lse)
    return jnp.swapaxes(out, 1, 2), LogSumExp(top, total).divided(LOG2E)


def decode_refusal(p: Problem, block: int | None, vmem_limit: int) -> str | None:
    """Returns why a step needs more memory than there is, or None."""
    grid = _grid(p, block)
    length, heads, dim = p.q.shape[1:]
    sizes = f"a decode step of T = {length}, N = {heads}, H = {dim} by {grid.size} keys"
    return _call(p, grid, False, vmem_limit).refusal(sizes)


def _call(p: Problem, grid: "DecodeGrid", interpret: Any, vmem_limit: int) -> Call:
    """Returns the kernel's call for a problem."""
    batch, length, heads, dim = p.q.shape
    kv_heads, value_dim = p.v.shape[2:]
    rows = heads * length
    unit = LOG2E if p.softcap is None else 1.0 / p.softcap
    k, v = (pad_axis(x, 1, max(LANES, p.keys)) for x in (p.k, p.v))
    seen, added = p.visible(), _added(p, unit)
    added = jnp.where(seen, added, -jnp.inf).reshape(batch, -1, p.keys)
    missing = (0, 0, 0), (0, 0, 0), (0, grid.steps * grid.size - p.keys, 0)
    added = jax.lax.pad(added, jnp.float32(-jnp.inf), missing)
    q = p.q.astype(jnp.float32) * (p.scale * unit)
    q = jnp.swapaxes(q.astype(p.q.dtype), 1, 2).reshape(batch, kv_heads, -1, dim)
    count, schedule = _schedule(seen, grid.size, grid.steps)
    arrays: dict[str, Any] = {"q": q, "added": added}
    specs: dict[str, Any] = {}
    specs["q"] = pl.BlockSpec((None, *q.shape[1:]), lambda b, *_: (b, 0, 0, 0))
    specs["added"] = pl.BlockSpec((None, added.shape[1], grid.size), grid.added_block)
    arrays["k"], specs["k"] = grid.cache_blocks(k, grid.k_order)
    arrays["v"], specs["v"] = grid.cache_blocks(v, grid.v_order)
    outs = tuple(out_struct(p.q, (batch, rows, width)) for width in (value_dim, LANES, LANES))
    return Call(
        "attention_decode",
        functools.partial(_kernel, grid, p.softcap),
        grid=(batch, count),
        semantics=("parallel", "arbitrary"),
        scalars=(schedule,),
        arrays=arrays,
        specs=specs,
        outs=outs,
        out_specs=tuple(pl.BlockSpec((None, *y.shape[1:]), lambda b, *_: (b, 0, 0)) for y in outs),
        scratch={
            "m": pltpu.VMEM((rows, LANES), jnp.float32),
            "l": pltpu.VMEM((rows, LANES), jnp.float32),
            "out": pltpu.VMEM((rows, value_dim), jnp.float32),
        },
        vmem_limit=vmem_limit,
        interpret=interpret,
    )


def _grid(p: Problem, block: int | None) -> "DecodeGrid":
    bytes_of_key = p.k.shape[2] * (p.k.shape[3] + p.v.shape[3]) * p.k.dtype.itemsize
    size = block or _block(max(LANES, p.keys), bytes_of_key)
    return DecodeGrid(size, -(-p.keys // size), _order(p.k), _order(p.v))


@dataclasses.dataclass(frozen=True)
class DecodeGrid:
    """The blocks of the cache.

    Attributes:
      size: keys per block.
      steps: blocks per row.
      k_order, v_order: the order of axes of keys and values, "BSKH", "BKSH" or "BKHS".
    """

    size: int
    steps: int
    k_order: str
    v_order: str

    def kind(self, schedule_ref: Any, b: Any, j: Any) -> Any:
        """Returns the kind of the block of a step."""
        return jax.lax.rem(schedule_ref[b * self.steps + j], jnp.int32(_KINDS))

    def block(self, schedule_ref: Any, b: Any, j: Any) -> tuple[Any, Any]:
        """Returns the row and the block that a step has in memory."""
        entry = jax.lax.div(schedule_ref[b * self.steps + j], jnp.int32(_KINDS))
        return jax.lax.div(entry, jnp.int32(self.steps)), jax.lax.rem(entry, jnp.int32(self.steps))

    def added_block(self, b: Any, j: Any, schedule_ref: Any) -> tuple[Any, ...]:
        row, block = self.block(schedule_ref, b, j)
        return row, 0, block

    def cache_blocks(self, x: jax.Array, order: str) -> tuple[list[jax.Array], list[pl.BlockSpec]]:
        """Returns keys or values in an order of axes, and their blocks, once for each part of H."""
        x = jnp.transpose(x, tuple(map("BSKH".index, order)))
        shape: dict[str, Any] = dict(zip(order, x.shape, strict=True))
        shape |= {"B": None, "S": self.size}
        if order == "BSKH":
            shape["H"] = LANES
        parts = x.shape[order.index("H")] // shape["H"]

        def spec(part):
            def index(b, j, schedule_ref):
                row, block = self.block(schedule_ref, b, j)
                indices = {"B": row, "S": block, "K": 0, "H": part}
                return tuple(indices[axis] for axis in order)

            return pl.BlockSpec(tuple(shape[axis] for axis in order), index)

        return [x] * parts, [spec(part) for part in range(parts)]


def _kernel(
    grid: DecodeGrid,
    softcap: float | None,
    schedule_ref: Any,
    refs: dict[str, Any],
    out_ref: Any,
    top_ref: Any,
    total_ref: Any,
    scratch: dict[str, Any],
) -> None:
    """Computes a step of the grid.

    Args:
      grid: the blocks.
      softcap: as in `attention`.
      schedule_ref: the schedule, in SMEM.
      refs: blocks of the inputs, by name.
      out_ref, top_ref, total_ref: blocks of the results.
      scratch: memory, by name.
    """
    b, j = pl.program_id(0), pl.program_id(1)
    kind = grid.kind(schedule_ref, b, j)
    pl.when(j == 0)(functools.partial(start_softmax, scratch))
    for one_kind in (_WHOLE, _PARTIAL):
        tile = functools.partial(_attend, grid, softcap, refs, scratch, one_kind == _PARTIAL)
        pl.when(kind == one_kind)(tile)

    @pl.when(j == pl.num_programs(1) - 1)
    def _():
        top_ref[...], total_ref[...] = finish_softmax(scratch, out_ref)


def _attend(
    grid: DecodeGrid,
    softcap: float | None,
    refs: dict[str, Any],
    scratch: dict[str, Any],
    has_unseen: bool,
) -> None:
    """Adds a block of the cache to the softmax.

    Args:
      grid, softcap, refs, scratch: as in `_kernel`.
      has_unseen: whether no query sees some of the keys, whose values may be NaN.
    """
    added, q = refs["added"][...], refs["q"]
    seen = jnp.max(added, 0, keepdims=True) != -jnp.inf
    rows, value_dim = scratch["out"].shape
    if added.shape[0] > 1:  # Else heads and queries share a row.
        added = jnp.concatenate([added] * (rows // added.shape[0]))
    axis = 0 if grid.k_order[-1] == "S" else 1
    k = (_head(refs["k"], grid.k_order, n) for n in range(q.shape[0]))
    s = jnp.concatenate([dot(q[n], x, (1, axis)) for n, x in enumerate(k)])
    s += added
    if softcap is not None:
        s = softcap * LOG2E * jnp.tanh(s)
    s = jnp.where(added != -jnp.inf, s, MASK_VALUE)
    p, decay = update_softmax(scratch, s)
    axis = 1 if grid.v_order[-1] == "S" else 0
    if has_unseen and axis == 0:
        seen = lanes(to_column(seen.astype(jnp.float32)), value_dim) > 0
    out = []
    for n, weights in enumerate(jnp.split(p.astype(refs["v"][0].dtype), q.shape[0])):
        v = _head(refs["v"], grid.v_order, n)
        if has_unseen:
            v = jnp.where(seen, v.astype(jnp.float32), 0.0).astype(v.dtype)
        out.append(dot(weights, v, (1, axis)))
    scratch["out"][...] = scratch["out"][...] * lanes(decay, value_dim) + jnp.concatenate(out)


def _block(keys: int, bytes_of_key: int) -> int:
    """Returns the keys of a step: a power of two, at least 128, at most S or 2048."""
    sizes = (2048, 1024, 512, 256)
    fits = (n for n in sizes if n * bytes_of_key <= _BLOCK_BYTES and n <= keys)
    return next(fits, LANES)


def _added(p: Problem, unit: float) -> jax.Array:
    """Returns the logits that rules add to the products, float32 [B, N or 1, T, S], or zero."""
    coordinates, total = (p.q_coordinates, p.k_coordinates), jnp.float32(0)
    for rule in p.per_query_head().rules:
        term = _from_table(rule, *coordinates)
        if term is None:
            term = rule.added_to_rows(*coordinates)
        if term is not None:
            total += in_units(term, unit * (p.scale if rule.scaled else 1.0))
    return total


def _from_table(rule: Rule, q: jax.Array, k: jax.Array) -> jax.Array | None:
    """Returns the logits of a rule on bounded distances, [B, N or 1, T, S]; None for other rules.

    They are computed once per distance, and picked from this table by products with zeros and
    ones, which are exact. XLA picks entries one by one, which takes about as long as the kernel.

    Args:
      rule: the rule.
      q, k: coordinates [B, T] and [B, S], or with more axes.
    """
    low, high = rule.bounds
    integer = q.ndim == 2 and q.dtype == k.dtype == jnp.int32
    if low is None or high is None or high - low >= _MAX_DISTANCES or not integer:
        return None
    distances = jnp.arange(low, high + 1, dtype=jnp.int32)
    table = rule.logits_by_distance(distances)
    if table is None:
        return None
    axes = "nr" if table.ndim == 2 else "btnr"
    entry = jnp.clip(q[:, :, None] - k[:, None], low, high) - low
    entries = jax.lax.broadcasted_iota(jnp.int32, (1, 1, len(distances), 1), 2)
    one_hot = (entry[:, :, None] == entries).astype(jnp.float32)
    # -inf times zero is NaN: it becomes the least number of 8 bits, which no other one becomes.
    hidden, parts = float(jnp.finfo(jnp.bfloat16).min), []
    table = jnp.where(table == MASK_VALUE, hidden, jnp.maximum(table, 0.995 * hidden))
    for _ in range(3):  # 8 of the 24 bits at a time, as products of default precision have.
        parts.append(jax.lax.reduce_precision(table, exponent_bits=8, mantissa_bits=7))
        table -= parts[-1]
    subscripts = f"p{axes},btrs->pbnts"
    out = jnp.einsum(subscripts, jnp.stack(parts), one_hot, precision="default").sum(0)
    return jnp.where(out == hidden, MASK_VALUE, out)


def _schedule(seen: jax.Array, size: int, steps: int) -> tuple[jax.Array, jax.Array]:
    """Returns the number of steps per row, and the entries of all steps, int32 [B * steps].

    The number counts the blocks with a visible key, in the row with most, and is at least 1. An
    entry is the kind of a block, and the block to have in memory. In each row, blocks with a
    visible key come first. Later steps name the next block with a visible key, of any row, so that
    it is copied once, while the last one is computed.

    Args:
      seen: bool [B, N or 1, T, S], which keys are visible.
      size: keys per block.
      steps: blocks per row.
    """
    used = pad_axis(jnp.any(seen, axis=(1, 2)), 1, steps * size).reshape(-1, steps, size)
    live, none = used.any(2), jnp.iinfo(jnp.int32).max
    blocks = jnp.arange(live.size, dtype=jnp.int32).reshape(live.shape)
    entries = _KINDS * blocks + jnp.where(used.all(2), _WHOLE, _PARTIAL)
    ordered = jnp.sort(jnp.where(live, entries, none), axis=1).reshape(-1)
    last = jnp.max(jnp.where(live, entries, _EMPTY))
    following = jax.lax.cummin(jnp.minimum(ordered, last), reverse=True)
    empty = following - jax.lax.rem(following, jnp.int32(_KINDS)) + _EMPTY
    count = jnp.maximum(jnp.max(jnp.sum(live, 1, dtype=jnp.int32)), 1)
    return count, jnp.where(ordered == none, empty, following).astype(jnp.int32)


def _order(x: jax.Array) -> str:
    """Returns the order of axes in which XLA keeps [B, S, K, H] on TPU: reading it is free."""
    heads, dim = x.shape[2:]
    if dim % LANES:
        return "BKHS"
    return "BSKH" if heads in (2, 4) or heads % 8 == 0 else "BKSH"


def _head(parts: list, order: str, head: int) -> jax.Array:
    """Returns one head of a block of the cache, [S, H] or, in the order BKHS, [H, S].

    Args:
      parts: references to the block, by 128 of H in the order BSKH, else one.
      order: of the axes.
      head: the index of the head.
    """
    if order != "BSKH":
        return parts[0][head]
    return jnp.concatenate([head_of_tokens(part, head) for part in parts], axis=1)


def head_of_tokens(block: Any, head: int) -> jax.Array:
    """Returns [S, 128] of a reference to [S, K, 128]: each K-th row, by loads with strides."""
    count, heads, dim = block.shape
    rows = block.reshape(count * heads, dim)
    if block.dtype == jnp.float32:
        return rows[pl.ds(head, count, heads)]
    # These loads are of 32 bits, which hold two heads.
    pairs = rows.bitcast(jnp.uint32)[pl.ds(head // 2, count, heads // 2)]
    bits = pairs & jnp.uint32(0xFFFF0000) if head % 2 else pairs << 16
    return jax.lax.bitcast_convert_type(bits, jnp.float32).astype(block.dtype)
