"""How attention is cut into tiles: block sizes, padding, and which tiles need what.

A tile is a block of queries against a block of keys. From the lowest and highest position,
segment and coordinate of each block follows whether a tile is empty (never run), plain
(all visible, no rule has anything to add) or neither.
"""

import dataclasses
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp

from posenc_jax.mask import Window, window_sides


@dataclasses.dataclass(frozen=True)
class Blocks:
    """Queries and keys per tile."""

    q: int
    k: int


@dataclasses.dataclass(frozen=True)
class Plan:
    """Block sizes of both passes, and T and S rounded up to multiples of them."""

    forward: Blocks
    backward: Blocks
    length: int
    keys: int


def plan(length: int, keys: int, heads: int) -> Plan:
    """Returns how to tile T queries and S keys for `heads` = B * N heads.

    Measured on CPU, where a matrix product uses two cores only if it is wide enough, and
    where a tile of all heads should stay in the cache.

    >>> plan(2000, 2000, 8).forward
    Blocks(q=512, k=256)
    """
    if (heads >= 16 and max(length, keys) <= 512) or heads >= 64:
        forward, backward = Blocks(128, 128), Blocks(128, 128)
    elif length >= 1024:
        forward, backward = Blocks(512, 256), Blocks(256, 512)
    else:
        forward, backward = Blocks(256, 256), Blocks(256, 512)
    sizes = [
        _divide(count, (getattr(forward, side), getattr(backward, side)))
        for side, count in (("q", length), ("k", keys))
    ]
    (fq, bq, padded), (fk, bk, padded_keys) = sizes
    return Plan(Blocks(fq, fk), Blocks(bq, bk), padded, padded_keys)


def _divide(count: int, wanted: tuple[int, int]) -> tuple[int, int, int]:
    """Two block sizes of at most the wanted ones, and the multiple of both to pad to."""
    largest = max(wanted)
    blocks = -(-count // largest)
    size = -(-count // blocks)
    if size > 8:
        size = -(-size // 16) * 16
    small = size if size % 16 or size <= min(wanted) else size * min(wanted) // largest
    first, second = (size if w == largest else small for w in wanted)
    return first, second, blocks * size


def pad_axis(x: jax.Array, axis: int, length: int, *, mode: str = "zero") -> jax.Array:
    """Pads one axis at its end: with zeros, or with copies of the last entry ("edge")."""
    missing = length - x.shape[axis]
    if missing == 0:
        return x
    if mode == "edge":
        last = jax.lax.slice_in_dim(x, x.shape[axis] - 1, x.shape[axis], axis=axis)
        shape = (*x.shape[:axis], missing, *x.shape[axis + 1 :])
        return jnp.concatenate([x, jnp.broadcast_to(last, shape)], axis)
    widths = [(0, missing if a == axis else 0) for a in range(x.ndim)]
    return jnp.pad(x, widths)


def cut(tree: Any, axis: int, index: jax.Array | int, size: int) -> Any:
    """Returns block `index` of every leaf."""
    return jax.tree.map(lambda x: jax.lax.dynamic_slice_in_dim(x, index * size, size, axis), tree)


def add_at(tree: Any, block: Any, axis: int, index: jax.Array | int, size: int) -> Any:
    """Adds a block of every leaf in its place; what `cut` reads."""

    def add(x, b):
        old = jax.lax.dynamic_slice_in_dim(x, index * size, size, axis)
        new = old + b.astype(x.dtype)
        return jax.lax.dynamic_update_slice_in_dim(x, new, index * size, axis)

    return jax.tree.map(add, tree, block)


def joined(x: jax.Array, axis: int) -> jax.Array:
    """Blocks [n, ..., size, ...] to one axis: [..., n * size, ...]."""
    x = jnp.moveaxis(x, 0, axis)
    return x.reshape(*x.shape[:axis], -1, *x.shape[axis + 2 :])


def zeros(like: jax.Array, shape: tuple[int, ...], fill: float = 0.0) -> jax.Array:
    """Returns float32 of a shape, varying over the mesh axes that `like` varies over."""
    return jax.lax.full_like(like, fill, jnp.float32, shape)


def for_each(chosen: jax.Array, body: Callable[[jax.Array, Any], Any], carry: Any) -> Any:
    """Runs `carry = body(i, carry)` for every i with `chosen[i]`, a bool [n]."""
    counts = jnp.cumsum(chosen, dtype=jnp.int32)

    def step(number, carry):
        return body(jnp.argmax(counts > number).astype(jnp.int32), carry)

    return jax.lax.fori_loop(jnp.int32(0), counts[-1], step, carry)


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class Extent:
    """The lowest and highest number in every block, [B or 1, blocks]."""

    low: jax.Array
    high: jax.Array

    @classmethod
    def of(cls, x: jax.Array, size: int, valid: jax.Array | None = None) -> "Extent":
        """Of [B, T]; where not `valid`, a number is left out."""
        low = high = x
        if valid is not None:
            top = jnp.iinfo(jnp.int32).max if x.dtype == jnp.int32 else jnp.inf
            top = jnp.asarray(top, x.dtype)
            low, high = jnp.where(valid, x, top), jnp.where(valid, x, -top)
        low, high = (y.reshape(y.shape[0], -1, size) for y in (low, high))
        return cls(low.min(-1), high.max(-1))


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class Side:
    """What is known of the blocks of one side; None where it plays no part.

    Attributes:
      positions, segments, coordinates: extents; of segments, those of tokens only.
      whole: bool [B, blocks], whether a block has no padding.
    """

    positions: Extent
    segments: Extent | None
    whole: jax.Array | None
    coordinates: Extent | None


@dataclasses.dataclass(frozen=True)
class Visibility:
    """Which masks there are, and from which distance on no rule has anything to add.

    Attributes:
      is_causal, window: as in `attention`.
      folded: the two are in the vector of distances: they empty tiles, but need no mask.
      vector_in_all: whether plain tiles have the vector of distances too.
      segments, prefix, mask: whether there are any.
      far: distance of coordinates from which on tiles are plain; None: none ever is,
        -1: all are.
      ordered: whether distances are those of slots.
    """

    is_causal: bool
    window: Window
    folded: bool
    vector_in_all: bool
    segments: bool
    prefix: bool
    mask: bool
    far: int | None
    ordered: bool

    def side(self, by: dict[str, Any], size: int) -> Side:
        """Returns what is known of blocks of tokens whose arrays are [B or 1, T].

        Args:
          by: "positions", "segments" or None, and "slots" or "coordinates" for distances.
          size: tokens per block.
        """
        segments, at = by["segments"], None
        valid: Any = None
        if segments is not None:
            valid = segments >= 0
        if self.far is not None and self.far >= 0:
            at = Extent.of(by["slots" if self.ordered else "coordinates"], size)
        return Side(
            Extent.of(by["positions"], size),
            None if segments is None else Extent.of(segments, size, valid),
            None if valid is None else valid.reshape(valid.shape[0], -1, size).all(-1),
            at,
        )

    @property
    def masks(self) -> bool:
        """Whether any tile may need a mask."""
        ordered = (self.is_causal or self.window is not None) and not self.folded
        return ordered or self.segments or self.mask

    @property
    def always_plain(self) -> bool:
        """Whether every tile that is not empty is plain."""
        return not self.masks and self.far == -1

    @property
    def never_plain(self) -> bool:
        """Whether no tile is plain."""
        return self.mask or self.far is None

    def classify(self, q: Any, k: Any, prefix: jax.Array | None) -> tuple[jax.Array, jax.Array]:
        """Returns bool [blocks] twice: the tiles to run with rules and masks, and the plain ones.

        One of `q` and `k` has a single block, the other all of them.
        """
        shape = jnp.broadcast_shapes(q.positions.low.shape, k.positions.low.shape)
        live = full = jnp.ones(shape, bool)
        limits = [(self.is_causal, 0, "after")]
        left, right = window_sides(self.window) or (-1, -1)
        limits += [(left >= 0, left, "before"), (right >= 0, right, "after")]
        for applies, limit, side in limits:
            near, far = (q, k) if side == "before" else (k, q)
            if applies:  # near - far <= limit
                near, far = near.positions, far.positions
                live &= near.low - far.high <= limit
                full &= near.high - far.low <= limit
        if self.folded and self.vector_in_all:
            full = jnp.ones(shape, bool)
        if prefix is not None:
            live |= k.positions.low < prefix[:, None]
        if self.segments:
            a, b = q.segments, k.segments
            live &= (a.low <= b.high) & (b.low <= a.high)
            full &= (a.low == b.high) & (b.low == a.high) & (a.low == a.high)
            full &= q.whole & k.whole
        if self.far is not None and self.far >= 0:
            full &= q.coordinates.low - k.coordinates.high >= self.far
        live, full = jnp.any(live, 0), jnp.all(full, 0)
        if self.never_plain:
            full = jnp.zeros_like(full)
        return live & ~full, live & full
