"""A key/value cache whose rows share a pool of blocks."""

import dataclasses
import functools
from collections.abc import Callable
from typing import Any, Self

import jax
import jax.numpy as jnp
from jax.core import Tracer
from jax.sharding import PartitionSpec

from posenc_jax.cache.kv_cache import KVCache
from posenc_jax.cache.slots import resharded, sharded_axes
from posenc_jax.checks import require
from posenc_jax.schemes.scheme import Scheme


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True, kw_only=True)
class PagedKVCache(KVCache):
    """A cache in blocks, as in PagedAttention: memory for the tokens that rows have.

    A row of up to `capacity` tokens gets a block of the pool when its tokens need one, and gives
    it back in `reset`, `rewind` and `take`. Which blocks are free is data, so all runs under `jit`
    in one trace, and the same calls allocate the same blocks. Arrays of k, v and `k_features` are
    in blocks; positions, segment ids and coordinates are not, as they are small.

    `take` shares blocks: rows that continue one row refer to its full blocks, and only the last
    block, which they go on to fill, is copied. `rewind` copies a shared block that it leaves
    part of.

    A pool without a free block is as a row without a free slot: it raises outside of `jit`, and
    inside tokens are not stored and `overflowed` is true for their row. Rows in front of others
    are served first.

    Kwon et al., "Efficient Memory Management for Large Language Model Serving with
    PagedAttention", https://arxiv.org/abs/2309.06180.

    >>> import posenc_jax as pe
    >>> sizes = {"num_heads": 4, "head_dim": 8, "block_size": 16, "num_blocks": 64}
    >>> cache = pe.new_cache(pe.RoPE(head_dim=8), 8, 512, **sizes)
    >>> cache.k.shape, cache.block_table.shape
    ((64, 16, 4, 8), (8, 32))

    Attributes:
      k, v: [P, block_size, K, H] and [P, block_size, K, V]; the pool of P blocks.
      k_features: the scheme's arrays per key, [P, block_size, ...].
      block_table: int32 [B, capacity / block_size], the blocks of each row in order.
      num_blocks: int32 [B], how many of these a row has; those behind have no meaning.
      free_blocks: int32 [P], whose last `num_free_blocks` are the free ones.
      num_free_blocks: int32, a scalar.
    """

    block_table: jax.Array
    num_blocks: jax.Array
    free_blocks: jax.Array
    num_free_blocks: jax.Array

    @property
    def block_size(self) -> int:
        """The number of slots of a block."""
        return self.capacity // self.block_table.shape[-1]

    @property
    def room(self) -> jax.Array:
        """Int32 [B]: the number of slots that rows have."""
        return self.num_blocks * self.block_size

    @classmethod
    def empty(  # ty: ignore[incompatible-method-override]
        cls,
        k: jax.ShapeDtypeStruct,
        v: jax.ShapeDtypeStruct,
        capacity: int,
        *,
        block_size: int,
        num_blocks: int | None = None,
        coordinates: jax.ShapeDtypeStruct | None = None,
        k_features: Any = None,
        state: Any = None,
        scheme: Scheme | None = None,
        max_rewind: int = 0,
    ) -> Self:
        """Returns an empty cache; other arguments as in `KVCache.empty`.

        Args:
          k, v: shapes [B, any, K, H] and [B, any, K, V].
          capacity: the most tokens of a row, a multiple of `block_size`.
          block_size: number of slots of a block.
          num_blocks: number of blocks of the pool, P. Default: enough for B full rows.

        Raises:
          ValueError: for sizes that do not fit, and rows sharded on an explicit mesh.
        """
        where, batch = "PagedKVCache", k.shape[0]
        require(block_size >= 1, f"{where}: block_size must be at least 1, got {block_size}.")
        require(
            capacity >= 1 and capacity % block_size == 0,
            f"{where}: capacity must be a multiple of block_size={block_size}, got {capacity}.",
        )
        per_row = capacity // block_size
        count = batch * per_row if num_blocks is None else num_blocks
        require(count >= 1, f"{where}: num_blocks must be at least 1, got {num_blocks}.")
        require(
            sharded_axes(k)[0] is None,
            f"{where}: rows share one pool of blocks, so k must not be sharded by row, got "
            f"{PartitionSpec(*sharded_axes(k))}.",
        )

        def sized(x, size):
            return jax.ShapeDtypeStruct((size, *x.shape[1:]), x.dtype, sharding=x.sharding)

        per_key = jax.tree.map(lambda x: sized(x, count), (k, v, k_features))
        pool = KVCache.empty(*per_key[:2], block_size, k_features=per_key[2])
        nothing = jax.ShapeDtypeStruct((batch, 0, 0, 0), k.dtype)
        rows = KVCache.empty(
            nothing,
            nothing,
            capacity,
            coordinates=coordinates,
            state=state,
            scheme=scheme,
            max_rewind=max_rewind,
        )
        in_blocks: dict[str, Any] = {name: getattr(pool, name) for name in _IN_BLOCKS}
        return cls(
            **_fields(rows) | in_blocks,
            block_table=jnp.zeros((batch, per_row), jnp.int32),
            num_blocks=jnp.zeros((batch,), jnp.int32),
            free_blocks=jnp.arange(count, dtype=jnp.int32),
            num_free_blocks=jnp.int32(count),
        )

    def contiguous(self) -> KVCache:
        """Returns the cache with arrays per key as [B, S, ...], which attention reads.

        Blocks are copied. Slots behind the tokens of a row hold those of other rows.
        """

        def gathered(pool):
            blocks = pool[self.block_table]
            return blocks.reshape(*self.positions.shape, *pool.shape[2:])

        return dataclasses.replace(
            _without_blocks(self),
            k=gathered(self.k),
            v=gathered(self.v),
            k_features=jax.tree.map(gathered, self.k_features),
        )

    def _with_room(self, length: jax.Array, added: int) -> Self:
        """Returns the cache with blocks for rows of these lengths, as far as there are any."""
        super()._with_room(length, added)
        size, most = self.block_size, self.block_table.shape[1]
        wanted = jnp.minimum(_ceil_div(length, size), most) - self.num_blocks
        # Rows that lost tokens get none: their gap would look like tokens that are stored.
        return self._allocated(jnp.where(self.overflowed, 0, wanted), _ceil_div(added, size))

    def _allocated(self, count: jax.Array, most: int) -> Self:
        """Returns the cache with `count` [B] <= `most` more blocks per row, as far as possible."""
        pool, (batch, per_row) = self.free_blocks.shape[0], self.block_table.shape
        if not isinstance(count, Tracer) and (needed := int(count.sum())) > self.num_free_blocks:
            raise ValueError(
                f"KVCache: {int(self.num_free_blocks)} of {pool} blocks are free and {needed} are "
                "needed; make it with a larger num_blocks, or free rows with reset."
            )
        before = jnp.cumsum(count, dtype=jnp.int32) - count
        count = jnp.clip(self.num_free_blocks - before, 0, count)
        new = jnp.arange(most, dtype=jnp.int32)[None]
        start = pool - self.num_free_blocks + before[:, None]
        blocks = self.free_blocks.at[start + new].get(mode="clip")
        at = jnp.where(new < count[:, None], self.num_blocks[:, None] + new, per_row + new)
        rows = jnp.arange(batch, dtype=jnp.int32)[:, None]
        return dataclasses.replace(
            self,
            block_table=self.block_table.at[rows, at].set(blocks, mode="drop"),
            num_blocks=self.num_blocks + count,
            num_free_blocks=self.num_free_blocks - count.sum(dtype=jnp.int32),
        )

    def _freed(self) -> Self:
        """Returns the cache without the blocks that no row has tokens in."""
        count = jnp.minimum(self.num_blocks, _ceil_div(self.length, self.block_size))
        pool, per_row = self.free_blocks.shape[0], self.block_table.shape[1]
        has = jnp.arange(per_row, dtype=jnp.int32)[None] < count[:, None]
        used = jnp.zeros((pool,), bool)
        used = used.at[jnp.where(has, self.block_table, pool)].set(True, mode="drop")
        return dataclasses.replace(
            self,
            num_blocks=count,
            free_blocks=jnp.argsort(~used).astype(jnp.int32),  # It is stable: free ones last.
            num_free_blocks=(~used).sum(dtype=jnp.int32),
        )

    def _unshared(self) -> Self:
        """Returns the cache with a copy of the last block, if not full, where others have it too.

        Full blocks are only read. Of rows that share one that is not full, the first keeps it.
        """
        pool, (batch, per_row) = self.free_blocks.shape[0], self.block_table.shape
        rows = jnp.arange(batch, dtype=jnp.int32)
        columns = jnp.arange(per_row, dtype=jnp.int32)[None]
        full = jnp.minimum(self.length // self.block_size, self.num_blocks)
        has = columns < self.num_blocks[:, None]
        owner = jnp.where(columns < full[:, None], -1, rows[:, None])
        owners = jnp.full((pool,), batch, jnp.int32)
        owners = owners.at[jnp.where(has, self.block_table, pool)].min(owner, mode="drop")

        def last(table):
            return jnp.take_along_axis(table, full[:, None], 1, mode="clip")[:, 0]

        old = last(self.block_table)
        copied = (full < self.num_blocks) & (owners[old] != rows)
        lacking = copied.astype(jnp.int32)
        given_back = dataclasses.replace(self, num_blocks=self.num_blocks - lacking)
        new = given_back._allocated(lacking, 1)
        copied &= new.num_blocks == self.num_blocks
        into = jnp.where(copied, last(new.block_table), pool + rows)

        def copy(pool):
            return pool.at[into].set(pool[old], mode="drop", unique_indices=True)

        copies = (jax.tree.map(copy, x) for x in (self.k, self.v, self.k_features))
        return dataclasses.replace(new, **dict(zip(_IN_BLOCKS, copies, strict=True)))

    def _with_keys(self, slots: jax.Array, k: jax.Array, v: jax.Array, k_features: Any) -> Self:
        """Returns the cache with keys [B, T, ...] in slots [B, T]."""
        return self._written(self.block_table, slots, k, v, k_features)

    def _inserted(self, into: jax.Array, other: KVCache) -> Self:
        """Returns the cache with the rows of a contiguous one; rows at B are left out."""
        length = self.length.at[into].set(other.length, mode="drop")
        new = self._with_room(length, other.capacity)
        room = jnp.minimum(new.room.at[into].get(mode="fill", fill_value=0), other.length)
        slots = jnp.arange(other.capacity, dtype=jnp.int32)[None]
        slots = jnp.where(slots < room[:, None], slots, self.capacity)
        table = new.block_table.at[into].get(mode="clip")
        new = new._written(table, slots, other.k, other.v, other.k_features)
        return super(PagedKVCache, new)._inserted(into, other)

    def _written(
        self, table: jax.Array, slots: jax.Array, k: jax.Array, v: jax.Array, k_features: Any
    ) -> Self:
        """Returns the cache with keys [any, T, ...] in slots of rows with these block tables."""
        size, end = self.block_size, self.free_blocks.shape[0] * self.block_size
        block = jnp.take_along_axis(table, slots // size, 1, mode="clip")
        # What is not stored is put beyond the end, each at a place of its own.
        beyond = end + jnp.arange(slots.size, dtype=jnp.int32).reshape(slots.shape)
        at = jnp.where(slots < self.capacity, block * size + slots % size, beyond).ravel()

        def write(name, pool, new):
            new = resharded(name, new, (None, None, *sharded_axes(pool)[2:]))
            flat, new = (x.reshape(-1, *x.shape[2:]) for x in (pool, new.astype(pool.dtype)))
            return flat.at[at].set(new, mode="drop", unique_indices=True).reshape(pool.shape)

        features = functools.partial(write, "k_features")
        return dataclasses.replace(
            self,
            k=write("k", self.k, k),
            v=write("v", self.v, v),
            k_features=jax.tree.map(features, self.k_features, k_features),
        )

    def _each(self, function: Callable[..., jax.Array], *others: KVCache) -> Self:
        """Returns the cache with a function applied to its arrays but those in blocks."""
        rows = [_without_blocks(cache) for cache in (self, *others)]
        new = _fields(rows[0]._each(function, *rows[1:]))
        new = {name: x for name, x in new.items() if name not in _IN_BLOCKS}
        if not others:
            new |= {n: function(getattr(self, n)) for n in ("block_table", "num_blocks")}
        return dataclasses.replace(self, **new)


_IN_BLOCKS = "k", "v", "k_features"


def _without_blocks(cache: KVCache) -> KVCache:
    """Returns a cache without its arrays per key."""
    return KVCache(**_fields(cache) | dict.fromkeys(_IN_BLOCKS))  # ty: ignore[invalid-argument-type]


def _fields(cache: KVCache) -> dict[str, Any]:
    """Returns the fields of `KVCache` by name."""
    return {f.name: getattr(cache, f.name) for f in dataclasses.fields(KVCache)}


def _ceil_div(x: Any, size: int) -> Any:
    return (x + size - 1) // size
