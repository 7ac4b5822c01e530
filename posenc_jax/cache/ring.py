"""What a ring cache must still hold for the tokens that are appended to it."""

import jax
import jax.numpy as jnp

from posenc_jax.cache.kv_cache import KVCache
from posenc_jax.checks import require
from posenc_jax.engine.mask import Window, add_saturated, window_sides


def check_window(cache: KVCache, length: int, window: Window) -> int:
    """Returns the number of tokens before its own that a query sees.

    Raises:
      ValueError: without a window, or if a ring with `length` tokens at a time has too few slots.
    """
    sides = window_sides(window)
    if sides is None or sides[0] < 0:
        raise ValueError(
            "scheme_attention: a ring cache overwrites its oldest tokens, so it needs a window."
        )
    needed = cache.num_sink_tokens + sides[0] + length
    require(
        cache.capacity >= needed,
        f"scheme_attention: {length} tokens at a time with window {window} need a ring of "
        f"{needed} slots, and the cache has {cache.capacity}.",
    )
    return sides[0]


def loses_visible(
    cache: KVCache, positions: jax.Array, segment_ids: jax.Array, left: int
) -> jax.Array:
    """Returns bool [B]: rows whose ring does not hold all keys that new tokens may see.

    The ring has spare slots for T tokens at a time (`check_window`), so that happens where more
    tokens were taken back than there are spare slots, and where tokens are out of order: segment
    ids and positions must grow from token to token.

    Args:
      cache: the cache with these tokens, so that a step reads it after it was written.
      positions, segment_ids: int32 [B, T], of the tokens.
      left: the number of tokens before its own that a query sees.
    """
    if left == 0:
        return jnp.zeros(cache.lost.shape, bool)
    tokens = segment_ids >= 0
    start = cache.length - tokens.sum(1, dtype=jnp.int32)
    newest = cache.slots(jnp.maximum(start - 1, 0)[:, None])
    at, ids = (jnp.take_along_axis(x, newest, 1) for x in (cache.positions, cache.segment_ids))
    at = jnp.concatenate([at, positions], 1)
    ids = jnp.concatenate([jnp.where(start[:, None] > 0, ids, -1), segment_ids], 1)
    place = jnp.arange(at.shape[1], dtype=jnp.int32)[None]
    last = jax.lax.cummax(jnp.where(ids >= 0, place, 0), axis=1)[:, :-1]
    last_at, last_id = (jnp.take_along_axis(x, last, 1) for x in (at, ids))
    grows = (segment_ids > last_id) | ((segment_ids == last_id) & (positions > last_at))
    overwritten = cache.written - (cache.capacity - cache.num_sink_tokens)
    oldest = jnp.maximum(start - left, cache.num_sink_tokens)
    return jnp.any(tokens & ~grows, 1) | (tokens.any(1) & (oldest < overwritten))


def evicted_sinks(cache: KVCache, positions: jax.Array, segment_ids: jax.Array) -> jax.Array:
    """Returns bool [B]: whether a sink token of these sequences was evicted.

    That happens where another sequence of the row occupied the reserved slots.

    Args:
      cache: the cache with these tokens.
      positions, segment_ids: int32 [B, T], of the tokens.
    """
    first = (cache.positions < cache.num_sink_tokens)[:, None] & (segment_ids >= 0)[:, :, None]
    own = first & (cache.segment_ids[:, None] == segment_ids[:, :, None])
    missing = own.sum(-1) < jnp.minimum(add_saturated(positions, 1), cache.num_sink_tokens)
    return jnp.any(missing & (segment_ids >= 0), axis=1)
