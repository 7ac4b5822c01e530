"""Blocks of queries and keys: their sizes, and the classification of tiles.

A tile is a block of queries against a block of keys. The range of positions, segments and
coordinates of each block decides whether a tile is empty (skipped), interior (all pairs are
visible and no rule adds anything) or near (masks and rules apply).
"""

import dataclasses
import functools
import math
import pathlib
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from posenc_jax.checks import positive_integers
from posenc_jax.engine.mask import add_saturated
from posenc_jax.engine.problem import Problem, pad_axis


@dataclasses.dataclass(frozen=True)
class Blocks:
    """Queries and keys per tile."""

    q: int
    k: int

    def __post_init__(self):
        positive_integers("Blocks", q=self.q, k=self.k)


@dataclasses.dataclass(frozen=True)
class Plan:
    """Block sizes of both passes, and T and S rounded up to multiples of them."""

    forward: Blocks
    backward: Blocks
    length: int
    keys: int

    @property
    def max_table(self) -> int:
        """The number of distances of the largest tile."""
        return max(blocks.q + blocks.k - 1 for blocks in (self.forward, self.backward))


def make_plan(
    length: int,
    keys: int,
    heads: int,
    forward: Blocks | None = None,
    backward: Blocks | None = None,
    platform: str = "cpu",
    skips: bool = False,
) -> Plan:
    """Returns the blocks for T queries and S keys, and `heads` = B * N heads.

    With `skips`, a window, segments or a mask hides tiles that causality does not: large tiles
    would hold more hidden pairs.

    The arguments `forward` and `backward` are used as they are; one alone serves both passes. The
    defaults were measured on CPU, where a matrix product uses two cores only if it is wide enough,
    and where a tile of all heads should stay in the cache; tokens of a single tile need no loop.
    With 2 MiB of cache per core (an Intel Xeon) long rows have larger tiles: 512 of up to four
    heads take 0.65 to 0.95 of the time of 256, and 256 of 16 or more take 0.86 to 0.92 of 128; the
    forward pass over 4,096 tokens and more takes 0.85 to 0.96 with 512 of up to 16 heads (1.07 with
    FIRE's network). On TPU many heads do not make blocks smaller: by its compiler's estimate,
    128 x 128 takes 1.3 to 1.4 times as long. On GPUs every operation of a tile is launched, for
    some microseconds: blocks are as large as 128 MiB of logits allow.

    >>> make_plan(2000, 2000, 8).forward
    Blocks(q=256, k=256)
    """
    first, second = forward or backward, backward or forward
    if first and second:
        steps = math.lcm(first.q, second.q), math.lcm(first.k, second.k)
        padded = (-(-n // step) * step for n, step in zip((length, keys), steps, strict=True))
        return Plan(first, second, *padded)
    first, second = _measured(length, keys, heads, platform, skips)
    fq, bq, padded = _divide(length, (first.q, second.q))
    fk, bk, padded_keys = _divide(keys, (first.k, second.k))
    return Plan(Blocks(fq, fk), Blocks(bq, bk), padded, padded_keys)


_GPU_PAIRS = 2**25  # Of a tile of all heads, 128 MiB in float32.


def _measured(
    length: int, keys: int, heads: int, platform: str, skips: bool
) -> tuple[Blocks, Blocks]:
    if platform == "gpu":
        size = next((n for n in (1024, 512, 256) if heads * n * n <= _GPU_PAIRS), 128)
        return Blocks(size, size), Blocks(size, size)
    if platform == "tpu":
        return Blocks(512, 256) if length >= 1024 else Blocks(256, 256), Blocks(256, 512)
    longest = max(length, keys)
    small = heads >= 16 or (heads >= 8 and longest <= 512)
    size = 128 if small and longest > 256 else 256
    if longest >= 2048 and not skips and _cache_per_core() >= 2**21:
        size = 512 if heads <= 4 else 256
        first = 512 if heads <= 16 and longest >= 4096 else size
        return Blocks(first, first), Blocks(size, size)
    return Blocks(size, size), Blocks(size, size)


@functools.lru_cache(1)
def _cache_per_core() -> int:
    """Returns the bytes of the second-level cache of a core, or 0 where Linux does not tell."""
    try:
        text = pathlib.Path("/sys/devices/system/cpu/cpu0/cache/index2/size").read_text()
    except OSError:
        return 0
    size = text.strip().removesuffix("K")
    return 1024 * int(size) if size.isdecimal() else 0


def _divide(count: int, sizes: tuple[int, int]) -> tuple[int, int, int]:
    """Returns two block sizes, at most `sizes`, and the length to pad to."""
    largest = max(sizes)
    blocks = -(-count // largest)
    size = -(-count // blocks)
    if size > 8:
        size = -(-size // 16) * 16
    small = size if size % 16 or size <= min(sizes) else size * min(sizes) // largest
    first, second = (size if w == largest else small for w in sizes)
    return first, second, blocks * size


class TokenArrays(NamedTuple):
    """The arrays of queries or of keys that masks and rules read, with tokens on axis 2.

    Attributes:
      slots: int32 [1, 1, T].
      positions: int32 [1 or B, 1, T].
      coordinates: [1 or B, 1, T] or [1 or B, 1, T, A].
      segments: int32 [1 or B, 1, T], or None.
      features: for each term, a pytree with leaves [B, N or K, T, ...].
      until: of keys, int32 [B, 1, S], or None.
      index: the indices that a block mask reads, int32 [1 or B, 1, T], or None.
    """

    slots: Any
    positions: Any
    coordinates: Any
    segments: Any
    features: tuple[Any, ...] = ()
    until: Any = None
    index: Any = None


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class BlockRange:
    """The lowest and highest number in every block, [B or 1, blocks]."""

    low: Any
    high: Any

    @classmethod
    def of(cls, x: jax.Array, size: int, valid: jax.Array | None = None) -> "BlockRange":
        """Returns the range of [B, T] by blocks, of the valid tokens only.

        A block without valid tokens has an empty range: low is the greatest number, high the
        least.
        """
        low = high = x
        if valid is not None:
            top = jnp.asarray(jnp.iinfo(x.dtype).max if x.dtype == jnp.int32 else jnp.inf, x.dtype)
            low, high = jnp.where(valid, x, top), jnp.where(valid, x, -top)
        low, high = (y.reshape(y.shape[0], -1, size) for y in (low, high))
        return cls(low.min(-1), high.max(-1))


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class BlockSummary:
    """Ranges of the blocks of queries or of keys; None where they are not needed.

    Attributes:
      positions, segments, coordinates, until: ranges of the tokens that are not padding.
      whole: bool [B, blocks], whether a block has no padding.
    """

    positions: BlockRange
    segments: BlockRange | None
    whole: jax.Array | None
    coordinates: BlockRange | None
    until: BlockRange | None


@dataclasses.dataclass(frozen=True)
class Visibility:
    """The masks of a problem, and the distance beyond which every rule is constant.

    Attributes:
      is_causal: as in `attention`.
      window: `(left, right)`, or None.
      window_by_coordinates: whether the window counts coordinates.
      mask_in_bias: causality and window are mask values in the bias by distance: they make
        tiles empty, but tiles need no mask for them.
      bias_everywhere: interior tiles add the bias by distance too.
      segments, prefix, mask, until, block_mask: whether the problem has segments, prefix lengths,
        a mask, positions until which keys are visible, a block mask.
      has_terms: whether rules add anything.
      horizon: tiles with all distances of coordinates at or beyond it are interior; None:
        none is.
      by_slot: whether distances are between slots.
    """

    is_causal: bool
    window: tuple[int, int] | None
    window_by_coordinates: bool
    mask_in_bias: bool
    bias_everywhere: bool
    segments: bool
    prefix: bool
    mask: bool
    until: bool
    block_mask: bool
    has_terms: bool
    horizon: int | None
    by_slot: bool

    def summary(self, tokens: TokenArrays, size: int) -> BlockSummary:
        """Returns the ranges of blocks of tokens."""
        slots, positions, coordinates, segments = jax.tree.map(lambda x: x[:, 0], tokens[:4])
        coordinate_range: Any = None
        valid: Any = None if segments is None else segments >= 0
        if self.window_by_coordinates:
            coordinate_range = BlockRange.of(coordinates, size, valid)
        elif self.has_terms and self.horizon is not None:
            coordinate_range = BlockRange.of(slots if self.by_slot else coordinates, size)
        return BlockSummary(
            BlockRange.of(positions, size, valid),
            None if segments is None else BlockRange.of(segments, size, valid),
            None if valid is None else valid.reshape(valid.shape[0], -1, size).all(-1),
            coordinate_range,
            None if tokens.until is None else BlockRange.of(tokens.until[:, 0], size, valid),
        )

    @property
    def ordered(self) -> bool:
        """Whether tiles may need a mask for causality or a window."""
        return (self.is_causal or self.window is not None) and not self.mask_in_bias

    @property
    def all_interior(self) -> bool:
        """Whether every tile that is not empty is interior."""
        hides = self.ordered or self.segments or self.mask or self.until or self.block_mask
        return not (hides or self.has_terms)

    @property
    def none_interior(self) -> bool:
        """Whether no tile is interior."""
        return self.mask or (self.has_terms and self.horizon is None)

    def known_tiles(
        self, blocks: Blocks, length: int, keys: int
    ) -> tuple[np.ndarray, np.ndarray] | None:
        """Returns `classify` of all tiles, NumPy bool [blocks of queries, blocks of keys] twice.

        None if they depend on positions or segments, and for more than 2^14 tiles.
        """
        shape = length // blocks.q, keys // blocks.k
        others = self.segments or self.prefix or self.until or self.block_mask
        if others or not self.by_slot or math.prod(shape) > 2**14:
            return None

        def slots(size, axis):
            low = np.expand_dims(size * np.arange(shape[axis], dtype=np.int32), 1 - axis)
            part = BlockRange(low, low + np.int32(size - 1))
            return BlockSummary(part, None, None, part, None)

        return self.classify(slots(blocks.q, 0), slots(blocks.k, 1), None)

    def classify(self, q: Any, k: Any, prefix: jax.Array | None) -> tuple[Any, Any]:
        """Returns bool [B or 1, blocks] twice: tiles with a visible pair, and interior tiles.

        Args:
          q, k: summaries, whose blocks are broadcast against each other. Of NumPy arrays the
            result is NumPy.
          prefix: int32 [B], or None.
        """
        live = full = np.ones(
            np.broadcast_shapes(q.positions.low.shape, k.positions.low.shape), bool
        )
        left_side, right_side = self.window or (-1, -1)
        at, of_window = (q.positions, k.positions), (q.positions, k.positions)
        if self.window_by_coordinates:
            of_window = q.coordinates, k.coordinates
        limits = [
            (self.is_causal, 0, *at[::-1]),
            (left_side >= 0, left_side, *of_window),
            (right_side >= 0, right_side, *of_window[::-1]),
        ]
        for applies, limit, late, early in limits:
            if applies:  # late - early <= limit, without overflow.
                live = live & (late.low <= add_saturated(early.high, limit))
                full = full & (late.high <= add_saturated(early.low, limit))
        if self.mask_in_bias and self.bias_everywhere:
            full = np.ones(live.shape, bool)
        if prefix is not None:
            live = live | (k.positions.low < prefix[:, None])
        if self.until:
            live = live & (q.positions.low < k.until.high)
            full = full & (q.positions.high < k.until.low)
        if self.segments:
            a, b = q.segments, k.segments
            live = live & (a.low <= b.high) & (b.low <= a.high)
            full = full & (a.low == b.high) & (b.low == a.high) & (a.low == a.high)
            full = full & q.whole & k.whole
        if self.has_terms and self.horizon is not None:
            q_low, k_high = q.coordinates.low, k.coordinates.high
            if q_low.dtype == k_high.dtype == jnp.int32:  # q - k > horizon - 1, without overflow.
                full = full & (q_low > add_saturated(k_high, self.horizon - 1))
            else:
                full = full & (q_low - k_high >= self.horizon)
        if self.none_interior:
            full = np.zeros(live.shape, bool)
        return live, live & full


def padded_tokens(
    p: Problem, visibility: Visibility, length: int, keys: int
) -> tuple[TokenArrays, TokenArrays, Visibility]:
    """Returns the queries and keys of a problem, padded to whole blocks, and their masks.

    Padding has segment -1. A problem without segments gets segment 0 for its tokens, unless
    causality by slot hides the padding. Causality does not hide the rows that kernels read beyond
    the last query of an array of all pairs.

    Args:
      p: the problem.
      visibility: the masks of the problem.
      length, keys: T and S, rounded up to whole blocks.
    """
    by_slot = p.ordered_by_slot
    q_segments, k_segments = p.q_segment_ids, p.k_segment_ids
    has_padding = length > p.length or keys > p.keys
    causality_hides_it = by_slot and p.is_causal
    causality_hides_it &= all(rule.pairs is None for rule in p.rules)
    if has_padding and q_segments is None and not causality_hides_it:
        q_segments, k_segments = (jnp.zeros((1, n), jnp.int32) for n in (p.length, p.keys))
        visibility = dataclasses.replace(visibility, segments=True)

    def padded(count, positions, coordinates, segments, index, until=None):
        slots = jnp.arange(count, dtype=jnp.int32)[None]
        coordinates = coordinates[:1] if p.same_rows else coordinates
        if segments is not None:  # Padding may have any id below zero, and gets -1.
            segments = pad_axis(jnp.maximum(segments, -1) + 1, 1, count) - 1
        arrays = TokenArrays(
            slots=slots,
            positions=slots if by_slot else pad_axis(positions, 1, count, mode="edge"),
            coordinates=pad_axis(coordinates, 1, count, mode="edge"),
            segments=segments,
            until=None if until is None else pad_axis(until, 1, count),
            index=None if index is None else pad_axis(index, 1, count, mode="edge"),
        )
        return jax.tree.map(lambda x: x[:, None], arrays)

    q_idx, kv_idx = (p.tokens(side)["index"] for side in "qk")
    queries = padded(length, p.q_positions, p.q_coordinates, q_segments, q_idx)
    of_keys = p.k_positions, p.k_coordinates, k_segments, kv_idx, p.k_visible_until
    return queries, padded(keys, *of_keys), visibility
