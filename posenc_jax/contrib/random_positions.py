"""Coordinates drawn at random by CAPE and PoSE, with arguments as in `posenc_jax.positions`.

Papers: Likhomanenko et al. CAPE: Encoding Relative Positions with Continuous Augmented Positional
Embeddings. 2021. https://arxiv.org/abs/2106.03143
Zhu et al. PoSE: Efficient Context Window Extension of LLMs via Positional Skip-wise Training.
2023. https://arxiv.org/abs/2309.10400
Reference code: gcambara/cape, cape/cape.py; dwzhu-pku/PoSE, src/train_pose.py.
"""

import math

import jax
import jax.numpy as jnp

from posenc_jax.checks import require
from posenc_jax.positions.random import by_segment, checked


def continuous(
    key: jax.Array,
    positions: jax.Array,
    *,
    global_shift: float = 5.0,
    local_shift: float = 0.5,
    max_scaling: float = 1.03,
    segment_ids: jax.Array | None = None,
) -> jax.Array:
    """Returns positions shifted, jittered and scaled at random (CAPE), float32 [B, T].

    The coordinate of position p is (p + d + e) s. Each segment draws d uniformly from
    +-global_shift and ln s from +-ln max_scaling; each token draws e from +-local_shift.
    Defaults are for text; evaluation uses the positions. For audio the authors subtract
    the mean of each sequence from its positions first.

    Args:
      key: a random key.
      positions: int32 [B, T].
      global_shift: the greatest shift of a segment.
      local_shift: the greatest jitter of a token; up to 0.5 the order of tokens is kept.
      max_scaling: the greatest scale factor.
      segment_ids: int32 [B, T]. Default: one segment.

    Raises:
      ValueError: for negative shifts, `max_scaling` below one, or shapes that differ.

    >>> continuous(jax.random.key(0), jnp.arange(3)[None]).dtype
    dtype('float32')
    """
    positions, segments = checked("continuous", positions, segment_ids)
    require(
        min(global_shift, local_shift) >= 0,
        f"continuous: shifts must not be negative, got {global_shift} and {local_shift}.",
    )
    require(max_scaling >= 1, f"continuous: max_scaling must be at least 1, got {max_scaling}.")

    def draw(key, position):
        segment_key, token_key = jax.random.split(key)
        shift, scale = jax.random.uniform(segment_key, (2,), jnp.float32, minval=-1.0)
        token_key = jax.random.fold_in(token_key, position)
        jitter = jax.random.uniform(token_key, (), jnp.float32, minval=-1.0)
        moved = position.astype(jnp.float32) + global_shift * shift + local_shift * jitter
        return moved * jnp.exp(math.log(max_scaling) * scale)

    return by_segment(key, segments, draw, positions)


def skip_wise(
    key: jax.Array,
    positions: jax.Array,
    max_length: int,
    *,
    segment_ids: jax.Array | None = None,
) -> jax.Array:
    """Returns positions with one gap (PoSE), int32 [B, T], all below `max_length`.

    Of n tokens, a random number from 1 to (n + 1) // 2 keep their positions; a random number from
    0 to `max_length - n` is added to the positions of the others. The authors may also take the
    two chunks from different places of a text; the caller can.

    Args:
      key: a random key.
      positions: int32 [B, T], from 0 in every segment.
      max_length: the context length to fine-tune for.
      segment_ids: int32 [B, T]. Default: one segment.

    Raises:
      ValueError: if `max_length` is below T, or shapes differ.

    >>> coordinates = skip_wise(jax.random.key(0), jnp.arange(8)[None], 1000)
    >>> int((jnp.diff(coordinates[0]) > 1).sum())
    1
    """
    positions, segments = checked("skip_wise", positions, segment_ids)
    require(
        max_length >= positions.shape[1],
        f"skip_wise: max_length must be at least the {positions.shape[1]} positions, "
        f"got {max_length}.",
    )

    def draw(key, position, size):
        cut_key, gap_key = jax.random.split(key)
        cut = jax.random.randint(cut_key, (), 1, (size + 1) // 2 + 1, jnp.int32)
        gap = jax.random.randint(gap_key, (), 0, max_length - size + 1, jnp.int32)
        return position + jnp.where(position >= cut, gap, 0)

    return by_segment(key, segments, draw, positions, _sizes(segments))


def _sizes(segments: jax.Array) -> jax.Array:
    """Returns int32 [B, T]: the number of tokens in each token's segment."""

    def of_row(ids):
        order = jnp.sort(ids)
        end, start = (jnp.searchsorted(order, ids, side=side) for side in ("right", "left"))
        return (end - start).astype(jnp.int32)

    return jax.vmap(of_row)(segments)
