"""Coordinates drawn at random, so that short sequences train the positions of longer ones.

Functions take a random key and positions [B, T] and return coordinates [B, T]; masks and
windows still use the positions. Rows, and segments of packed rows, draw independently,
by the key, the row and the segment id; for one draw per batch give `positions[:1]`. Reusing
the key continues a draw while decoding. Exceptions are `randomized` and
`random_floats`, which draw for all positions at once: draw for the prompt and the tokens to come,
then slice.

Papers: Ruoss et al. Randomized Positional Encodings Boost Length Generalization of Transformers.
2023. https://arxiv.org/abs/2305.16843
Kiyono et al. SHAPE: Shifted Absolute Position Embedding for Transformers. 2021.
https://arxiv.org/abs/2109.05644
Shimizu et al. Position Encoding with Random Float Sampling Enhances Length Generalization of
Transformers. 2026. https://arxiv.org/abs/2602.14050
Reference code: google-deepmind/randomized_positional_encodings, models/positional_encodings.py;
butsugiri/shape, onmt/modules/embeddings.py.
"""

from collections.abc import Callable

import jax
import jax.numpy as jnp

from posenc_jax import checks
from posenc_jax.checks import array_of_rank, integer_positions, require


def checked(
    caller: str, positions: jax.Array, segment_ids: jax.Array | None
) -> tuple[jax.Array, jax.Array]:
    """Returns positions and segment ids, int32 [B, T] each."""
    array_of_rank(caller, "positions", positions, 2, "[B, T]")
    positions = integer_positions(caller, positions)
    return positions, checks.segments(caller, segment_ids, positions.shape)


def by_segment(key: jax.Array, segments: jax.Array, draw: Callable, *arrays: jax.Array):
    """Returns `draw(key, *values)` for every token, with one key for each segment of each row."""
    rows = jax.vmap(jax.random.fold_in, (None, 0))(key, jnp.arange(segments.shape[0]))
    fold = jax.vmap(jax.vmap(jax.random.fold_in), (0, 0))
    keys = fold(jnp.broadcast_to(rows[:, None], segments.shape), segments)
    return jax.vmap(jax.vmap(draw))(keys, *arrays)


def randomized(
    key: jax.Array,
    positions: jax.Array,
    max_length: int,
    *,
    segment_ids: jax.Array | None = None,
) -> jax.Array:
    """Returns distinct integers below `max_length`, ordered as the positions: int32 [B, T].

    All subsets are equally likely. The authors use it in evaluation as in training.

    Args:
      key: a random key.
      positions: int32 [B, T].
      max_length: N, at least the length of the longest sequence.
      segment_ids: int32 [B, T]. Default: one segment.

    Raises:
      ValueError: if `max_length` is below T, or shapes differ.

    >>> positions = jnp.arange(4)[None]
    >>> bool((jnp.diff(randomized(jax.random.key(0), positions, 2048)[0]) > 0).all())
    True
    """
    positions, segments = checked("randomized", positions, segment_ids)
    checks.positive_integers("randomized", max_length=max_length)
    batch, length = positions.shape
    require(
        max_length >= length,
        f"randomized: max_length must be at least the {length} positions, got {max_length}.",
    )
    # Any slice of a random permutation is a uniform draw: each segment sorts its own.
    drawn = jax.vmap(lambda k: jax.random.permutation(k, max_length)[:length])(
        jax.random.split(key, batch)
    ).astype(jnp.int32)
    return _sorted_by_segment(drawn, positions, segments)


def _sorted_by_segment(drawn: jax.Array, positions: jax.Array, segments: jax.Array) -> jax.Array:
    """Returns the numbers [B, T], sorted within each segment by the positions."""
    by_place = jnp.lexsort((positions, segments))
    by_number = jnp.lexsort((drawn, segments))
    row = jnp.arange(positions.shape[0])[:, None]
    return jnp.zeros_like(drawn).at[row, by_place].set(drawn[row, by_number])


def random_floats(
    key: jax.Array,
    positions: jax.Array,
    high: float,
    *,
    segment_ids: jax.Array | None = None,
) -> jax.Array:
    """Returns real numbers from [0, high), ordered as the positions (RFS): float32 [B, T].

    They are uniform and independent before they are sorted within each segment. Evaluation uses
    `spaced_floats`.

    Args:
      key: a random key.
      positions: int32 [B, T].
      high: the upper end of the range, whatever the length.
      segment_ids: int32 [B, T]. Default: one segment.

    Raises:
      ValueError: if `high` is not positive, or shapes differ.

    >>> positions = jnp.arange(4)[None]
    >>> bool((jnp.diff(random_floats(jax.random.key(0), positions, 64.0)[0]) > 0).all())
    True
    """
    positions, segments = checked("random_floats", positions, segment_ids)
    checks.positive("random_floats", high=high)
    drawn = jax.random.uniform(key, positions.shape, jnp.float32, maxval=high)
    return _sorted_by_segment(drawn, positions, segments)


def spaced_floats(positions: jax.Array, length: int, high: float) -> jax.Array:
    """Returns (position + 1/2) high / length, for evaluation after `random_floats`.

    A sequence of `length` tokens thus covers [0, high) evenly. Coordinates change with `length`:
    for decoding, count the prompt and all tokens to come.

    Args:
      positions: int32 [B, T].
      length: the number of tokens of the sequence; the authors take the trained length for
        shorter ones.
      high: the upper end of the range, as in training.

    Raises:
      ValueError: if `length` or `high` is not positive.

    >>> spaced_floats(jnp.arange(4)[None], 4, 8.0)
    Array([[1., 3., 5., 7.]], dtype=float32)
    """
    positions, _ = checked("spaced_floats", positions, None)
    checks.positive("spaced_floats", length=length, high=high)
    return (positions.astype(jnp.float32) + 0.5) * (high / length)


def randomized_distances(key: jax.Array, count: int, max_length: int) -> jax.Array:
    """Returns distinct, increasing distances from 1 to `max_length - 1`: int32 [count].

    For `posenc_jax.on_distances`: entry n - 1 replaces the distance n.

    Args:
      key: a random key.
      count: the greatest distance between tokens.
      max_length: one more than the greatest distance that is drawn.

    Raises:
      ValueError: unless 1 <= count < max_length.

    >>> randomized_distances(jax.random.key(0), 3, 4)
    Array([1, 2, 3], dtype=int32)
    """
    checks.positive_integers("randomized_distances", count=count, max_length=max_length)
    require(
        count < max_length,
        f"randomized_distances: count must be 1 to {max_length - 1} for max_length {max_length}, "
        f"got {count}.",
    )
    drawn = jax.random.permutation(key, max_length - 1)[:count]
    return jnp.sort(drawn).astype(jnp.int32) + 1


def shifted(
    key: jax.Array, positions: jax.Array, max_shift: int, *, segment_ids: jax.Array | None = None
) -> jax.Array:
    """Returns positions plus a random offset from 0 to `max_shift - 1` (SHAPE), int32 [B, T].

    In evaluation the authors add `max_shift`.

    Args:
      key: a random key.
      positions: int32 [B, T].
      max_shift: K; with a table of L rows at most L - T.
      segment_ids: int32 [B, T]. Default: one segment.

    Raises:
      ValueError: if `max_shift` is below one, or shapes differ.

    >>> coordinates = shifted(jax.random.key(0), jnp.arange(3)[None], 100)
    >>> jnp.diff(coordinates[0])
    Array([1, 1], dtype=int32)
    """
    positions, segments = checked("shifted", positions, segment_ids)
    checks.positive_integers("shifted", max_shift=max_shift)
    return positions + by_segment(
        key, segments, lambda k: jax.random.randint(k, (), 0, max_shift, jnp.int32)
    )
