"""Masks that are functions of two tokens, with a table of the blocks that they hide or show.

PyTorch's FlexAttention has them as `mask_mod` and `BlockMask`. The table is made once for a
pattern, a block of queries at a time, and serves all layers and steps: it goes through `jax.jit` as
a pytree. Blocks that it hides are skipped, and in blocks that it shows no pair is masked; in the
others the function is evaluated inside tiles. It has one byte for the 16,384 pairs of a block.

Paper: Dong et al. Flex Attention: A Programming Model for Generating Optimized Attention Kernels.
2024. https://arxiv.org/abs/2412.05496
"""

import dataclasses
from collections.abc import Callable
from typing import Any, ClassVar, Self

import jax
import jax.numpy as jnp
import numpy as np

from posenc_jax.checks import integers_from, positive_integers, require, token_integers
from posenc_jax.engine.toeplitz import diagonal_sums

MaskMod = Callable[..., jax.Array]

STATIC = {"static": True}
EMPTY, PARTIAL, FULL = 0, 1, 2
"""Entries of the table: no pair of a block is visible, some are, all are."""


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class BlockMask:
    """A mask for `attention(mask=...)`, made by `block_mask`.

    Attributes:
      table: `EMPTY`, `PARTIAL` or `FULL`, int8 [1 or B, 1 or N, blocks of queries, of keys].
      distances: bool [T + S - 1], by ascending distance of slots, whether it has a visible pair.
      q_idx, kv_idx: the integers that the function gets for queries and keys, int32 [1 or B, T] and
        [1 or B, S].
      rows, heads: the rows of the batch and the heads that it gets, int32 [1 or B] and [1 or N].
      arrays: its other arguments.
      function: `function(b, h, q_idx, kv_idx, *arrays) -> bool`, of scalars.
      block_size: queries and keys of a block.
    """

    table: jax.Array
    distances: jax.Array
    q_idx: jax.Array
    kv_idx: jax.Array
    rows: jax.Array
    heads: jax.Array
    arrays: Any
    function: MaskMod = dataclasses.field(metadata=STATIC)
    block_size: int = dataclasses.field(metadata=STATIC)

    axes: ClassVar[dict[str, str]] = {
        **{"table": "BN", "distances": "", "q_idx": "BT", "kv_idx": "BS"},
        **{"rows": "B", "heads": "N", "arrays": ""},
    }

    @property
    def shape(self) -> tuple[int, int, int, int]:
        """(1 or B, 1 or N, T, S), as of a mask of all pairs."""
        batch, heads = self.table.shape[:2]
        return batch, heads, self.q_idx.shape[1], self.kv_idx.shape[1]

    def visible(self, q_idx: jax.Array, kv_idx: jax.Array) -> jax.Array:
        """Returns bool [1 or B, 1 or N, Q, K] for indices [1 or B, Q] and [1 or B, K]."""

        def of_pair(b, h, q, k):
            return jnp.asarray(self.function(b, h, q, k, *self.arrays), bool)

        of_keys = jax.vmap(of_pair, (None, None, None, 0))
        of_head = jax.vmap(of_keys, (None, None, 0, None))
        of_heads = jax.vmap(of_head, (None, 0, None, None))
        batch = max(len(self.rows), len(q_idx), len(kv_idx))
        rows = [jnp.broadcast_to(x, (batch, *x.shape[1:])) for x in (self.rows, q_idx, kv_idx)]
        return jax.vmap(of_heads, (0, None, 0, 0))(rows[0], self.heads, *rows[1:])

    def pairs(self) -> jax.Array:
        """Returns the mask of all pairs, bool [1 or B, 1 or N, T, S]."""
        return self.visible(self.q_idx, self.kv_idx)

    def moved_unless(self, in_place: jax.Array, batch: int) -> Self:
        """Returns the mask of tokens that are moved to other slots, unless `in_place` is true.

        It has indices for all rows, [B, T] and [B, S]. All blocks are partial if tokens are moved.
        """
        return dataclasses.replace(
            self,
            table=jnp.where(in_place, self.table, jnp.int8(PARTIAL)),
            distances=self.distances | ~in_place,
            q_idx=jnp.broadcast_to(self.q_idx, (batch, self.q_idx.shape[1])),
            kv_idx=jnp.broadcast_to(self.kv_idx, (batch, self.kv_idx.shape[1])),
        )

    def tiles(self, q: int, k: int, length: int, keys: int) -> tuple[jax.Array, jax.Array]:
        """Returns which tiles of q queries and k keys have a visible pair, and which no hidden one.

        Args:
          q, k: queries and keys of a tile.
          length, keys: T and S, rounded up to whole tiles.

        Returns:
          bool [1 or B, tiles of queries, tiles of keys] twice, of all heads.
        """
        blocks = self.table.shape[2:]
        cover_q = _covered(q, length // q, self.block_size, blocks[0])
        cover_k = _covered(k, keys // k, self.block_size, blocks[1])

        def count(chosen):
            counts = chosen.sum(1, dtype=jnp.float32)
            return jnp.einsum("qi,bij,kj->bqk", cover_q, counts, cover_k, precision="highest")

        live = count(self.table != EMPTY) > 0
        return live, live & (count(self.table != FULL) == 0)


def _covered(size: int, count: int, block_size: int, blocks: int) -> np.ndarray:
    """Returns float32 [count, blocks], 1 where a tile has tokens of a block."""
    start = size * np.arange(count)[:, None]
    block = block_size * np.arange(blocks)[None]
    return ((start < block + block_size) & (block < start + size)).astype(np.float32)


@dataclasses.dataclass(frozen=True)
class OfIndices:
    """The function of a block mask that reads two indices alone."""

    function: MaskMod

    def __call__(self, q_idx: jax.Array, kv_idx: jax.Array) -> jax.Array:
        """Returns whether the query may see the key."""
        return jnp.asarray(self.function(jnp.int32(0), jnp.int32(0), q_idx, kv_idx), bool)


def block_mask(
    function: MaskMod,
    length: int,
    keys: int,
    *arrays: Any,
    batch: int | None = None,
    num_heads: int | None = None,
    q_idx: jax.Array | None = None,
    kv_idx: jax.Array | None = None,
    block_size: int = 128,
) -> BlockMask:
    """Returns a `mask_mod` of FlexAttention as a mask for `attention`, with its table of blocks.

    Args:
      function: `function(b, h, q_idx, kv_idx, *arrays) -> bool`, true where the query may see the
        key, for int32 scalars. Compilations are shared where it is the same function.
      length, keys: T and S.
      *arrays: pytrees of arrays that the function reads. They have no gradients.
      batch, num_heads: B and N, for a function that reads b or h. Default: one mask for all.
      q_idx, kv_idx: the indices of queries and keys, integers [T] or [B, T], and [S] or [B, S].
        Default: slots. They are no positions: causality and windows do not read them.
      block_size: queries and keys of a block of the table.

    Raises:
      TypeError: for indices that are not integers, and sizes.
      ValueError: for a function that reads b or h without `batch` or `num_heads`, or does not
        return one bool.

    >>> def dilated(b, h, q_idx, kv_idx):
    ...     return (q_idx - kv_idx) % 2 == 0
    >>> q = k = v = jnp.ones((1, 9, 2, 4))
    >>> mask = block_mask(dilated, 9, 9)
    >>> pe.attention(q, k, v, mask=mask, is_causal=True).shape
    (1, 9, 2, 4)
    """
    caller = "block_mask"
    positive_integers(caller, block_size=block_size)
    integers_from(0, caller, length=length, keys=keys)
    sizes = {"batch": batch, "num_heads": num_heads}
    integers_from(0, caller, **{name: x for name, x in sizes.items() if x is not None})
    _check(function, arrays, batch, num_heads)
    arrays = jax.tree.map(jnp.asarray, arrays)
    rows, heads = (jnp.arange(1 if n is None else n, dtype=jnp.int32) for n in sizes.values())

    def indices(name, x, count):
        if x is None:
            return jnp.arange(count, dtype=jnp.int32)[None]
        lead = len(x) if jnp.ndim(x) == 2 else 1
        return jnp.broadcast_to(token_integers(caller, name, x, (lead, count)), (lead, count))

    q_idx, kv_idx = indices("q_idx", q_idx, length), indices("kv_idx", kv_idx, keys)
    table = jnp.zeros((1, 1, 0, 0), jnp.int8), jnp.zeros(max(length + keys - 1, 0), bool)
    mask = BlockMask(*table, q_idx, kv_idx, rows, heads, arrays, function, block_size)
    if not length or not keys:
        return mask
    table, distances = _table(mask)
    return dataclasses.replace(mask, table=table, distances=distances)


@jax.jit
def _table(mask: BlockMask) -> tuple[jax.Array, jax.Array]:
    """Returns the table and the distances of a mask, from one block of queries at a time."""
    size, (length, keys) = mask.block_size, mask.shape[2:]
    q_blocks, k_blocks = -(-length // size), -(-keys // size)
    slots = jnp.arange(q_blocks * size, dtype=jnp.int32)
    # Copies of the last token do not change a block.
    kv_idx = mask.kv_idx[:, np.minimum(np.arange(k_blocks * size), keys - 1)]

    def of_block(distances, start):
        slot = jax.lax.dynamic_slice_in_dim(slots, start, size)
        seen = mask.visible(mask.q_idx[:, jnp.minimum(slot, length - 1)], kv_idx)
        blocks = seen.reshape(*seen.shape[:3], k_blocks, size)
        some, all_seen = (x.astype(jnp.int8) for x in (blocks.any((2, 4)), blocks.all((2, 4))))
        pairs = seen[..., :keys].any((0, 1)) & (slot < length)[:, None]
        seen = diagonal_sums(pairs.astype(jnp.float32))[::-1] > 0  # From the last key's distance.
        before = jax.lax.dynamic_slice_in_dim(distances, start, len(seen))
        return jax.lax.dynamic_update_slice_in_dim(
            distances, before | seen, start, 0
        ), some + all_seen

    distances = jnp.zeros(q_blocks * size + keys - 1, bool)
    distances, kinds = jax.lax.scan(of_block, distances, size * np.arange(q_blocks, dtype="i4"))
    return jnp.moveaxis(kinds, 0, 2), distances[: length + keys - 1]


def _check(function: MaskMod, arrays: Any, batch: int | None, num_heads: int | None) -> None:
    """Raises unless a function returns one bool, and reads b and h where there are sizes alone."""
    for leaf in jax.tree.leaves(arrays):
        if not hasattr(leaf, "dtype"):
            raise TypeError(f"block_mask: arrays must be arrays, got {leaf!r:.60}.")
    index = jax.ShapeDtypeStruct((), jnp.int32)
    closed = jax.make_jaxpr(function)(*(index,) * 4, *arrays)
    name = getattr(function, "__name__", function)
    require(
        [(x.shape, x.dtype) for x in closed.out_avals] == [((), bool)],
        f"block_mask: {name} must return one bool, got {[str(x) for x in closed.out_avals]}.",
    )
    read = {id(x) for eqn in closed.jaxpr.eqns for x in eqn.invars} | set(
        map(id, closed.jaxpr.outvars)
    )
    for letter, size, argument, variable in zip(
        "bh", (batch, num_heads), ("batch", "num_heads"), closed.jaxpr.invars, strict=False
    ):
        require(
            size is not None or id(variable) not in read,
            f"block_mask: {name} reads {letter}; give {argument}=.",
        )
