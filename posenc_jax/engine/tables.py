"""Tables of numbers and vectors per distance, and their tiles.

The unit is one head and one row of the batch: a tile is [Q, K]. Functions named `*_vjp` have a
custom VJP: deterministic sums in place of scatters. Forward mode cannot pass them, so they are used
only where `jax.vjp` is applied at once; the argument `in_vjp` says so.
"""

import dataclasses
from collections.abc import Callable
from typing import Any, Self

import jax
import jax.numpy as jnp

from posenc_jax.engine.mask import add_saturated
from posenc_jax.engine.tokens import STATIC, Tokens
from posenc_jax.engine.tracing import trace_once, with_captured

_PART = 128  # Tokens whose products with vectors per distance are computed at once.


@dataclasses.dataclass(frozen=True)
class DistanceRange:
    """The distances low, low + 1, ..., high for which a table has entries.

    Distances beyond an end use the entry of that end.

    Attributes:
      low, high: the first and the last.
      by_slot: whether distances are between slots, or else between coordinates.
      open_low, open_high: whether the cotangent of distances beyond an end is needed.
    """

    low: int
    high: int
    by_slot: bool
    open_low: bool
    open_high: bool

    @property
    def size(self) -> int:
        """The number of distances."""
        return self.high - self.low + 1

    def mirrored(self) -> "DistanceRange":
        """Returns the range for distances of key from query."""
        ends = (-self.high, -self.low)
        return DistanceRange(*ends, self.by_slot, self.open_high, self.open_low)

    def entries(self, q: jax.Array, k: jax.Array, transposed: bool) -> jax.Array:
        """Returns the table entry of each pair of int32 [Q] and [K]: [Q, K], or [K, Q]."""
        if self.by_slot:
            return jnp.clip(_distances(q, k, transposed), self.low, self.high) - self.low
        # Keys are clipped and not distances, which may exceed int32.
        nearest = add_saturated(q, -self.high), add_saturated(q, -self.low)
        q, k = jnp.expand_dims(q, 1 - transposed), jnp.expand_dims(k, int(transposed))
        low, high = (jnp.expand_dims(x, 1 - transposed) for x in nearest)
        return q - jnp.clip(k, low, high) - self.low


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class ValueTable:
    """A table on the values, for one head: [R, V] inside a tile, [N, R, V] outside.

    Attributes:
      table: float32, per distance or per bucket.
      distances: of the table, whose last value is zero; None: `bucket` returns the entry.
      bucket: `bucket(q, k) -> int32`.
      captured: arrays that a traced `bucket` reads.
    """

    table: jax.Array
    distances: DistanceRange | None = dataclasses.field(metadata=STATIC)
    bucket: Callable = dataclasses.field(metadata=STATIC)
    captured: tuple[jax.Array, ...] = ()

    def traced(self, q: Any, k: Any) -> Self:
        """Returns the table with its bucket function traced, for types of two coordinates."""
        if self.distances is not None:
            return self
        bucket, captured = trace_once(self.bucket, q, k)
        return dataclasses.replace(self, bucket=bucket, captured=captured)

    @property
    def horizon(self) -> int | None:
        """The distance from which on nothing is added, or None."""
        return None if self.distances is None else self.distances.high

    def spread(
        self, entries: jax.Array, q: Tokens, k: Tokens, *, in_vjp: bool = False
    ) -> jax.Array:
        """Expands [Q, R] to [Q, K]."""
        if self.distances is not None:
            return table_tile(entries, q, k, self.distances, transposed=False, in_vjp=in_vjp)
        bucket = with_captured(self.bucket, self.captured)
        of_pairs = jax.vmap(jax.vmap(bucket, (None, 0)), (0, None))
        return gather_tile(entries, of_pairs(q.coordinates, k.coordinates), transposed=False)

    def collect(self, tile: jax.Array, q: Tokens, k: Tokens) -> jax.Array:
        """Sums [Q, K] to [Q, R] per entry, the transpose of `spread`."""
        shape = tile.shape[0], self.table.shape[0]

        def spread(entries):
            return self.spread(entries, q, k, in_vjp=True)

        return jax.vjp(spread, jax.lax.full_like(tile, 0.0, shape=shape))[1](tile)[0]


def table_tile(
    table: jax.Array,
    q: Tokens,
    k: Tokens,
    distances: DistanceRange,
    *,
    transposed: bool,
    in_vjp: bool,
) -> jax.Array:
    """Returns the tile of a table [Q, R], or [R, Q] transposed."""
    if distances.by_slot:
        spread = slot_tile_vjp if in_vjp else slot_tile
        return spread(table, q.slots, k.slots, distances, transposed)
    entries = distances.entries(q.coordinates, k.coordinates, transposed)
    return gather_tile(table, entries, transposed)


def dot_products(tokens: jax.Array, vectors: jax.Array, *, transposed: bool) -> jax.Array:
    """Returns the dot products of [Q, F] and [R, F], float32 [Q, R], or [R, Q] transposed."""
    tokens = tokens.astype(jnp.float32)
    form, pair = (
        ("rf,qf->rq", (vectors, tokens)) if transposed else ("qf,rf->qr", (tokens, vectors))
    )
    return jnp.einsum(form, *pair, precision="highest")


def strip_tile(tokens: jax.Array, vectors: jax.Array, count: int, *, in_vjp: bool) -> jax.Array:
    """Returns the dot products of tokens and the vectors of their distances, float32 [Q, K].

    Args:
      tokens: [Q, F].
      vectors: [F, Q + K - 1], by ascending distance of the token from the others.
      count: K.
      in_vjp: whether `jax.vjp` is applied at once.
    """
    products = _strip_products_vjp if in_vjp else _strip_products
    length, parts = tokens.shape[0], []
    # A part of the tokens needs the distances of its own pairs alone.
    for start in range(0, length, _PART):
        part = tokens[start : start + _PART].astype(jnp.float32)
        near = vectors[:, start : start + part.shape[0] + count - 1]
        parts.append(_skewed(products(part, near[:, ::-1]), count))
    return jnp.concatenate(parts)


def _strip_products(tokens: jax.Array, vectors: jax.Array) -> jax.Array:
    """Returns the products of [Q, F] and [F, R]."""
    return jnp.einsum("qf,fr->qr", tokens, vectors, precision="highest")


def _strip_products_forward(tokens, vectors):
    return _strip_products(tokens, vectors), (tokens, vectors)


def _strip_products_backward(saved, products):
    tokens, vectors = saved
    d_tokens = jnp.einsum("qr,fr->qf", products, vectors, precision="highest")
    # Autodiff computes [R, F], which takes longer on CPU, and transposes it.
    return d_tokens, jnp.einsum("qf,qr->fr", tokens, products, precision="highest")


_strip_products_vjp = jax.custom_vjp(_strip_products)
_strip_products_vjp.defvjp(_strip_products_forward, _strip_products_backward)


def _skewed(table: jax.Array, columns: int) -> jax.Array:
    """Returns [R, columns] of [R, R + columns - 1]: row r from column R - 1 - r on.

    In rows that are read as shorter by one, each begins one column before the row above it. They
    are written out: XLA on CPU would fuse them with their uses and divide indices per number.
    """
    rows, width = table.shape
    if rows == 1:
        return table
    flat = table.reshape(-1)[rows - 1 : rows - 1 + rows * (width - 1)]
    return jax.lax.optimization_barrier(flat.reshape(rows, width - 1))[:, :columns]


def gather_tile(table: jax.Array, entries: jax.Array, transposed: bool) -> jax.Array:
    """Returns the tile `table[query, entries[query, key]]`.

    Args:
      table: [Q, R], or [R, Q] transposed.
      entries: int32 [Q, K], or [K, Q] transposed, in [0, R).
      transposed: whether to return [K, Q].
    """
    return jnp.take_along_axis(table, entries, 0 if transposed else 1, mode="clip")


def slot_tile(
    table: jax.Array,
    q_slots: jax.Array,
    k_slots: jax.Array,
    distances: DistanceRange,
    transposed: bool,
) -> jax.Array:
    """Returns `gather_tile` for slots that grow by one.

    No two keys then have the same distance from a query, so that the cotangent of the table is a
    gather; `gather_tile` alone has a scatter, which is many times slower.

    Args:
      table: [Q, R], or [R, Q] transposed.
      q_slots, k_slots: int32 [Q], [K], consecutive.
      distances: of the table.
      transposed: whether to return [K, Q].
    """
    return gather_tile(table, distances.entries(q_slots, k_slots, transposed), transposed)


def _slot_forward(table, q_slots, k_slots, distances, transposed):
    return slot_tile(table, q_slots, k_slots, distances, transposed), (q_slots, k_slots)


def _slot_backward(distances, transposed, slots, tile):
    q_slots, k_slots = slots
    axis = 0 if transposed else 1
    entries = jnp.arange(distances.size, dtype=jnp.int32)
    # The one key at each distance from each query.
    keys = _distances(q_slots - k_slots[:1] - distances.low, entries, transposed)
    last = k_slots.shape[0] - 1
    out = gather_tile(tile, jnp.clip(keys, 0, last), transposed)
    out = jnp.where((keys >= 0) & (keys <= last), out, 0.0)
    of_pairs = _distances(q_slots, k_slots, transposed)
    entries = jnp.expand_dims(entries, 1 - axis)
    for is_open, entry, beyond in (
        (distances.open_low, 0, of_pairs < distances.low),
        (distances.open_high, distances.size - 1, of_pairs > distances.high),
    ):
        if is_open:
            total = jnp.where(beyond, tile, 0.0).sum(axis, keepdims=True)
            out += jnp.where(entries == entry, total, 0.0)
    return out, None, None


slot_tile_vjp = jax.custom_vjp(slot_tile, nondiff_argnums=(3, 4))
slot_tile_vjp.defvjp(_slot_forward, _slot_backward)


def _distances(q, k, transposed):
    """Returns q - k for [Q] and [K], [Q, K], or [K, Q] transposed."""
    return q[None, :] - k[:, None] if transposed else q[:, None] - k[None, :]
