"""Products of one query with the keys and values of a cache, as XLA for CPUs does them fast.

For a product for each head, XLA for CPUs copies the cache to heads before tokens, and values to S
behind V, element by element. A product with the heads of a key as one vector, which for each query
is zero but for its own head, reads the cache once: it has K times the operations and takes a fifth
of the time. On a mesh it would be a sum over heads of other devices. Sums of values multiply
elements, which XLA does on all cores.

Tiles of keys before the first one that the query sees and after the last one are skipped, so that
the empty slots of a cache cost nothing, and a tile of a smaller type becomes float32 near the
processor, not the whole cache in memory. Tiles of values are of one row, whose tokens are next to
each other: XLA reads such a tile where it is, and copies one of several rows. A product of matrices
is of a copy of the tile in any case, so more than half of the keys are read as they are, all at
once. Other platforms take a product for each head.
"""

import dataclasses
import functools
import math
from collections.abc import Callable

import jax
import jax.numpy as jnp

from posenc_jax.engine.problem import pad_axis


@dataclasses.dataclass(frozen=True)
class OneQuery:
    """The products of one query in each row.

    Attributes:
      size: keys of a tile.
      limits: of each row, the first tile that is read and the one after the last, int32 [B, 2];
        None: there is one tile.
    """

    size: int
    limits: jax.Array | None

    @classmethod
    def of(cls, seen: jax.Array, size: int) -> "OneQuery":
        """Returns the products for bool [B, N or 1, 1, S], the keys that the query sees."""
        if seen.shape[3] <= size:
            return cls(size, None)
        return cls(size, _ends(seen) // size + jnp.arange(2, dtype=jnp.int32)[None])

    def products(self, q: jax.Array, k: jax.Array) -> jax.Array:
        """Returns the dot products of [B, 1, N, H] and [B, S, K, H], float32 [B, N, 1, S].

        They may be zero in tiles that are not read.
        """
        batch, _, heads, dim = q.shape
        by_head = functools.partial(float_einsum, "btkgh,bskh->bkgts")
        q = q.reshape(batch, 1, k.shape[2], -1, dim)
        out = self._by_platform(by_head, _products_of_token, _products_of_tiles, q, k)
        return out.reshape(batch, heads, 1, -1)

    def sums(self, weights: jax.Array, v: jax.Array) -> jax.Array:
        """Returns the sums of values with weights [B, N, 1, S], float32 [B, 1, N, V]."""
        batch, heads, _, keys = weights.shape
        by_head = functools.partial(float_einsum, "bkgts,bskv->btkgv")
        weights = weights.reshape(batch, v.shape[2], -1, 1, keys)
        out = self._by_platform(by_head, _sums_of_token, _sums_of_tiles, weights, v)
        return out.reshape(batch, 1, heads, -1)

    def _by_platform(
        self, by_head: Callable, of_token: Callable, of_tiles: Callable, x: jax.Array, y: jax.Array
    ) -> jax.Array:
        """Returns a product for each head, or where it is faster for a whole token."""
        if not jax.sharding.get_abstract_mesh().empty:
            return by_head(x, y)
        if self.limits is None:
            return jax.lax.platform_dependent(x, y, cpu=of_token, default=by_head)
        of_tiles = functools.partial(of_tiles, self.size)
        return jax.lax.platform_dependent(
            x, y, self.limits, cpu=of_tiles, default=lambda x, y, limits: by_head(x, y)
        )


def float_einsum(form: str, x: jax.Array, y: jax.Array) -> jax.Array:
    """Returns an einsum of two arrays with exact products, in float32."""
    x, y = x.astype(jnp.float32), y.astype(jnp.float32)
    return jnp.einsum(form, x, y, precision="highest")


@jax.custom_batching.custom_vmap
def _ends(seen: jax.Array) -> jax.Array:
    """Returns the first and the last key that the query of each row sees, int32 [B, 2].

    Under `vmap` all share them, so that loops over tiles have one length.

    Args:
      seen: bool [B, N or 1, 1, S].
    """
    index = jnp.arange(seen.shape[-1], dtype=jnp.int32)
    live = jnp.any(seen, (1, 2))
    first, last = jnp.where(live, index, len(index)), jnp.where(live, index, -1)
    return jnp.stack([first.min(1), last.max(1)], 1)


@_ends.def_vmap
def _ends_of_any(axis_size, in_batched, seen):
    return _ends(jnp.any(seen, 0)), False


def _start(i: jax.Array, size: int, keys: int) -> jax.Array:
    """Returns the first key of tile i; the last tile has the last `size` keys."""
    return jnp.minimum(i * size, keys - size)


_slice = functools.partial(jax.lax.dynamic_slice, allow_negative_indices=False)
_update = functools.partial(jax.lax.dynamic_update_slice, allow_negative_indices=False)


@functools.partial(jax.custom_jvp, nondiff_argnums=(0,))
def _products_of_tiles(size: int, q: jax.Array, k: jax.Array, limits: jax.Array) -> jax.Array:
    """As `_products_of_token`; they may be zero in other tiles."""
    batch, keys, heads, dim = k.shape
    group = q.shape[3]
    first, stop = limits[:, 0].min(), limits[:, 1].max()

    def body(i, out):
        start = _start(i, size, keys)
        tile = _slice(k, (0, start, 0, 0), (batch, size, heads, dim))
        return _update(out, _products_of_token(q, tile), (0, 0, 0, 0, start))

    def of_tiles(q, k):
        return jax.lax.fori_loop(
            first, stop, body, jnp.zeros((batch, heads, group, 1, keys), jnp.float32)
        )

    if k.dtype != jnp.float32:
        return of_tiles(q, k)
    return jax.lax.cond(2 * size * (stop - first) > keys, _products_of_token, of_tiles, q, k)


@functools.partial(jax.custom_jvp, nondiff_argnums=(0,))
def _sums_of_tiles(size: int, weights: jax.Array, v: jax.Array, limits: jax.Array) -> jax.Array:
    """As `_sums_of_token`, without other tiles."""
    _, heads, group, *_ = weights.shape
    batch, keys, _, dim = v.shape

    def row(b, out):
        def body(i, total):
            start = _start(i, size, keys)
            tile = _slice(weights, (b, 0, 0, 0, start), (1, heads, group, 1, size))
            if keys % size:  # The last tile begins in the one before.
                tile = jnp.where(start + jnp.arange(size, dtype=jnp.int32) >= i * size, tile, 0.0)
            return total + _sums_of_token(tile, _slice(v, (b, start, 0, 0), (1, size, heads, dim)))

        zero = jnp.zeros((1, 1, heads, group, dim), jnp.float32)
        total = jax.lax.fori_loop(limits[b, 0], limits[b, 1], body, zero)
        return _update(out, total, (b, 0, 0, 0, 0))

    return jax.lax.fori_loop(0, batch, row, jnp.zeros((batch, 1, heads, group, dim), jnp.float32))


# Loops of unknown length have no transpose: derivatives read all tokens.
@_products_of_tiles.defjvp
def _products_jvp(size, primals, tangents):
    return jax.jvp(_products_of_floats, primals[:2], tangents[:2])


@_sums_of_tiles.defjvp
def _sums_jvp(size, primals, tangents):
    return jax.jvp(_sums_of_token, primals[:2], tangents[:2])


@jax.custom_jvp
def _products_of_token(q: jax.Array, k: jax.Array) -> jax.Array:
    """Returns q . k, float32 [B, K, G, 1, S]; a key with NaN in one head is NaN in all.

    Of bfloat16 the products are exact, and their sums float32. Derivatives are of float32.

    Args:
      q: [B, 1, K, G, H].
      k: [B, S, K, H].
    """
    if q.dtype == k.dtype == jnp.bfloat16 and math.prod(k.shape[2:]) > 1:
        return _products_of_vectors(q, k)
    return _products_of_floats(q, k)


@_products_of_token.defjvp
def _products_of_token_jvp(primals, tangents):
    return jax.jvp(_products_of_floats, primals, tangents)


def _products_of_floats(q: jax.Array, k: jax.Array) -> jax.Array:
    return _products_of_vectors(q.astype(jnp.float32), k.astype(jnp.float32))


def _products_of_vectors(q: jax.Array, k: jax.Array) -> jax.Array:
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
    return float_einsum("s,bskgv->bkgv", jnp.ones(out.shape[1], jnp.float32), out)[:, None]
