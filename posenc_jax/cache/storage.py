"""Strategies of a cache to store the tokens of a row: in slots filled once, or in a ring.

Tokens of a row count from 0, without padding; `capacity` is the number of slots, S.
"""

import dataclasses
from typing import ClassVar

import jax
import jax.numpy as jnp

from posenc_jax.checks import require
from posenc_jax.engine.mask import Window, add_saturated, window_sides

Tokens = tuple[jax.Array, jax.Array]
"""Positions and segment ids of tokens, int32 [B, any] each."""


@dataclasses.dataclass(frozen=True)
class Slots:
    """Stores token i in slot i, and no token past the last slot."""

    num_sink_tokens: ClassVar[int] = 0

    def slots(self, tokens: jax.Array, capacity: int) -> jax.Array:
        """Returns the slot of each token."""
        return tokens

    def tokens(self, length: jax.Array, capacity: int) -> jax.Array:
        """Returns the newest token of each slot, int32 [1, S], where rows have `length` [B]."""
        return jnp.arange(capacity, dtype=jnp.int32)[None]

    def overflowed(self, length: jax.Array, capacity: int) -> jax.Array:
        """Returns bool [B]: rows of this length with more tokens than slots."""
        return length > capacity


@dataclasses.dataclass(frozen=True)
class Ring:
    """Overwrites the oldest tokens of a full row, except its first `num_sink_tokens`."""

    num_sink_tokens: int = 0

    def slots(self, tokens: jax.Array, capacity: int) -> jax.Array:
        """Returns the slot of each token."""
        sinks = self.num_sink_tokens
        return jnp.where(tokens < sinks, tokens, sinks + (tokens - sinks) % (capacity - sinks))

    def tokens(self, length: jax.Array, capacity: int) -> jax.Array:
        """Returns the newest token of each slot, int32 [B, S], where rows have `length` [B]."""
        slots, last = jnp.arange(capacity, dtype=jnp.int32)[None], length[:, None] - 1
        sinks = self.num_sink_tokens
        return jnp.where(slots < sinks, slots, last - (last - slots) % (capacity - sinks))

    def overflowed(self, length: jax.Array, capacity: int) -> jax.Array:
        """Returns false for all rows, of any length."""
        return jnp.zeros_like(length, bool)

    def loses_visible(
        self,
        cached: Tokens,
        last: Tokens,
        new: Tokens,
        length: jax.Array,
        written: jax.Array,
        tied: jax.Array,
        window: Window,
    ) -> tuple[jax.Array, jax.Array]:
        """Returns bool [B], rows that do not hold all keys that new tokens may see; and `tied`.

        Such a row has tokens out of order (segment ids and positions must not fall), or `rewind`
        took back more tokens than the ring has spare slots, or the reserved slots hold the first
        tokens of another sequence. Where positions grow from token to token, a window of W holds W
        tokens. In a tied row it holds more: nothing was overwritten unless the oldest token that
        is left is outside of the window, and reserved slots may not hold all sink tokens.

        Args:
          cached: all slots, [B, S], with the new tokens.
          last: the last token before the new ones, [B, 1].
          new: the new tokens, [B, T].
          length: int32 [B], the number of tokens before the new ones.
          written: int32 [B], the greatest length that the row has had.
          tied: bool [B], rows where tokens before the new ones have equal positions.
          window: the window of the attention.

        Raises:
          ValueError: for an unlimited window, and if the ring has too few slots for T tokens.
        """
        positions, segment_ids = new
        capacity, sinks = cached[0].shape[1], self.num_sink_tokens
        reach = self._reach(window, positions.shape[1], capacity)
        last_position, last_id = last
        last_id = jnp.where(length[:, None] > 0, last_id, -1)
        unordered, ties = order(
            jnp.concatenate([last_position, positions], 1),
            jnp.concatenate([last_id, segment_ids], 1),
        )
        tied |= ties
        first = written - (capacity - sinks)  # The first token that was not overwritten.
        real = segment_ids >= 0
        overwritten = jnp.any(real, 1) & (jnp.maximum(length - reach, sinks) < first)
        if not reach:  # No token sees an older one.
            overwritten = jnp.zeros_like(overwritten)
        slot = self.slots(jnp.maximum(first, 0)[:, None], capacity)
        oldest, oldest_id = (jnp.take_along_axis(x, slot, 1) for x in cached)
        near = (oldest_id == segment_ids) & (add_saturated(oldest, reach) >= positions)
        reached = jnp.any(real & near, 1) & (first > sinks)
        lost = unordered | jnp.where(tied, reached, overwritten)
        if sinks:
            negative = jnp.any(real & (positions < 0), 1)  # Sinks are positions 0, 1, ...
            lost |= negative | tied | _evicted_sinks(cached, new, sinks)
        return lost, tied

    def _reach(self, window: Window, count: int, capacity: int) -> int:
        """Returns the number of tokens before its own that a query sees.

        Raises:
          ValueError: without a limit, and if `count` tokens at a time need more slots.
        """
        sides = window_sides(window)
        if sides is None or sides[0] < 0:
            raise ValueError(
                "scheme_attention: a ring cache overwrites its oldest tokens, so it needs a window."
            )
        needed = self.num_sink_tokens + sides[0] + count
        require(
            capacity >= needed,
            f"scheme_attention: {count} tokens at a time with window {window} need a ring of "
            f"{needed} slots, and the cache has {capacity}.",
        )
        return sides[0]


def order(positions: jax.Array, segment_ids: jax.Array) -> tuple[jax.Array, jax.Array]:
    """Returns bool [B]: rows where a token comes before the one before it, or has its position.

    Args:
      positions, segment_ids: int32 [B, 1 + T]; padding is skipped.
    """
    index = jnp.arange(segment_ids.shape[1], dtype=jnp.int32)[None]
    before = jax.lax.cummax(jnp.where(segment_ids >= 0, index, 0), axis=1)[:, :-1]
    position_before, id_before = (
        jnp.take_along_axis(x, before, 1) for x in (positions, segment_ids)
    )
    positions, segment_ids = positions[:, 1:], segment_ids[:, 1:]
    real, same = segment_ids >= 0, segment_ids == id_before
    falls = (segment_ids < id_before) | (same & (positions < position_before))
    return jnp.any(real & falls, 1), jnp.any(real & same & (positions == position_before), 1)


def _evicted_sinks(cached: Tokens, new: Tokens, num_sink_tokens: int) -> jax.Array:
    """Returns bool [B]: rows where a sink token of a new token's sequence was evicted.

    It was evicted if another sequence of the row occupies the reserved slots.
    """
    (cached_positions, cached_ids), (positions, segment_ids) = cached, new
    sinks = (cached_positions < num_sink_tokens)[:, None] & (segment_ids >= 0)[:, :, None]
    held = sinks & (cached_ids[:, None] == segment_ids[:, :, None])
    missing = held.sum(-1) < jnp.minimum(add_saturated(positions, 1), num_sink_tokens)
    return jnp.any(missing & (segment_ids >= 0), axis=1)
