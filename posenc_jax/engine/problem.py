"""One attention problem, checked and in one form, as every implementation gets it."""

import dataclasses

import jax
import jax.numpy as jnp

from posenc_jax.mask import Window, visible
from posenc_jax.rules import STATIC, ContentBias, DotBias, LogitBias, LogitsTransform, ValueBias


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class Problem:
    """What to attend to. Arrays are pytree leaves; the rest is static.

    Letters: B batch, T queries, S keys, N query heads, K key/value heads, H head dim,
    A coordinate axes.

    Attributes:
      q, k, v: [B, T, N, H], [B, S, K, H], [B, S, K, V].
      biases, contents, row_rule, value: rules of the scheme; `cols` of contents have N heads.
      mask: bool, [B or 1, N or 1, T, S], or None.
      q_positions, k_positions: int32 [B, T], [B, S].
      q_coordinates, k_coordinates: int32 or float32 [B, T], [B, S] or [B, T, A], [B, S, A].
      q_segment_ids, k_segment_ids: int32 [B, T], [B, S], or both None.
      prefix_length: int32 [B], or None.
      sinks: float32 [N], logits that take part in the softmax and have no value, or None.
      dropout_key: key, or None where nothing is dropped.
      contiguous: T = S, q and k have the same positions and coordinates, which grow by
        one per slot inside a segment.
      alike: all rows of the batch have the same coordinates.
      is_causal, window, scale, softcap, dropout_rate: as in `attention`.
    """

    q: jax.Array
    k: jax.Array
    v: jax.Array
    biases: tuple[LogitBias, ...]
    contents: tuple[ContentBias | DotBias, ...]
    row_rule: LogitsTransform | None
    value: ValueBias | None
    mask: jax.Array | None
    q_positions: jax.Array
    k_positions: jax.Array
    q_coordinates: jax.Array
    k_coordinates: jax.Array
    q_segment_ids: jax.Array | None
    k_segment_ids: jax.Array | None
    prefix_length: jax.Array | None
    sinks: jax.Array | None
    dropout_key: jax.Array | None
    contiguous: bool = dataclasses.field(metadata=STATIC)
    alike: bool = dataclasses.field(metadata=STATIC)
    is_causal: bool = dataclasses.field(metadata=STATIC)
    window: Window = dataclasses.field(metadata=STATIC)
    scale: float = dataclasses.field(metadata=STATIC)
    softcap: float | None = dataclasses.field(metadata=STATIC)
    dropout_rate: float = dataclasses.field(metadata=STATIC)

    def visible(self) -> jax.Array:
        """Returns bool [B, 1 or N, T, S], true where the query sees the key."""
        seen = visible(
            self.q_positions,
            self.k_positions,
            self.q_segment_ids,
            self.k_segment_ids,
            is_causal=self.is_causal,
            window=self.window,
            prefix_length=self.prefix_length,
        )[:, None]
        return seen if self.mask is None else seen & self.mask


def repeat_heads(x: jax.Array, num_heads: int, axis: int = 2) -> jax.Array:
    """Gives every query head its key/value head: [B, S, K, ...] to [B, S, N, ...]."""
    groups = num_heads // x.shape[axis]
    return x if groups == 1 else jnp.repeat(x, groups, axis)


def dropout_seed(problem: Problem) -> jax.Array | None:
    """Returns uint32 [2] for `keep_mask`, or None where nothing is dropped."""
    key = problem.dropout_key
    return None if key is None else jax.random.bits(key, (2,), jnp.uint32)


def keep_mask(
    seed: jax.Array, rate: float, shape: tuple[int, ...], rows: jax.Array, cols: jax.Array
) -> jax.Array:
    """Returns bool [B, N, T, S], false for the weights that dropout removes.

    A hash of the seed and of batch row, head, query slot and key slot: the same choice
    in every implementation, whatever its tiles, with nothing stored.

    Args:
      seed: of `dropout_seed`.
      rate: the share that is dropped.
      shape: B and N.
      rows: int32 [T], the slots of the queries.
      cols: int32 [S] or [B, S], the slots of the keys.
    """
    b = jnp.arange(shape[0], dtype=jnp.uint32)[:, None, None, None]
    n = jnp.arange(shape[1], dtype=jnp.uint32)[None, :, None, None]
    h = _mix(_mix(seed[0] ^ b) + n)
    h = _mix(h + rows.astype(jnp.uint32)[None, None, :, None])
    h = _mix((h ^ seed[1]) + cols.astype(jnp.uint32).reshape(-1, 1, 1, cols.shape[-1]))
    return h >= jnp.uint32(min(int(rate * 2**32), 2**32 - 1))


def _mix(h: jax.Array) -> jax.Array:
    """The finaliser of MurmurHash3: every input bit changes half of the output bits."""
    h = (h ^ (h >> 16)) * jnp.uint32(0x85EBCA6B)
    h = (h ^ (h >> 13)) * jnp.uint32(0xC2B2AE35)
    return h ^ (h >> 16)
