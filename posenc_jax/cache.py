"""The key/value cache of one layer: keys and values with their positions."""

import dataclasses
import functools
from typing import Any, Self

import jax
import jax.numpy as jnp
from jax.core import Tracer

from posenc_jax.checks import require
from posenc_jax.mask import add_saturated


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class KVCache:
    """Keys and values with their positions, for one layer. A pytree; `append` returns a new one.

    Empty slots, left padding and right padding have a negative segment id. The result of
    attention does not depend on the order of the slots: a ring buffer overwrites the oldest.

    Caches of several layers can be stacked along leading axes, for `scan` and `vmap`.

    Attributes:
      k, v: [B, S, K, H] and [B, S, K, V].
      positions: int32 [B, S].
      segment_ids: int32 [B, S], -1 in empty slots.
      coordinates: [B, S] or [A, B, S] where calls give coordinates, or None.
      k_features: the scheme's arrays per key, [B, S, ...].
      state: the scheme's arrays per sequence, [B, ...].
      length: int32 scalar, the number of tokens appended so far.
      next_positions: int32 [B], the default position of the next token.
      ring: whether a full cache overwrites its oldest slots.
      num_sink_tokens: the number of leading slots that a ring does not overwrite.
    """

    k: jax.Array
    v: jax.Array
    positions: jax.Array
    segment_ids: jax.Array
    coordinates: jax.Array | None
    k_features: Any
    state: Any
    length: jax.Array
    next_positions: jax.Array
    ring: bool = dataclasses.field(default=False, metadata={"static": True})
    num_sink_tokens: int = dataclasses.field(default=0, metadata={"static": True})

    @property
    def capacity(self) -> int:
        """The number of slots S, also of stacked caches."""
        return self.k.shape[-3]

    @classmethod
    def empty(
        cls,
        k: jax.ShapeDtypeStruct,
        v: jax.ShapeDtypeStruct,
        capacity: int,
        *,
        coordinates: jax.ShapeDtypeStruct | None = None,
        k_features: Any = None,
        state: Any = None,
        ring: bool = False,
        num_sink_tokens: int = 0,
    ) -> Self:
        """Returns an empty cache of `capacity` slots for arrays shaped like these.

        Args:
          k, v: shapes [B, any, K, H] and [B, any, K, V], with dtypes.
          capacity: number of slots S. It must hold all tokens, or for a ring the window.
          coordinates: shape [B, any] or [A, B, any] to store coordinates, or None.
          k_features: pytree of shapes [B, any, ...].
          state: pytree of shapes [B, ...].
          ring: whether a full cache overwrites its oldest slots.
          num_sink_tokens: the number of leading slots that a ring does not overwrite.

        Raises:
          ValueError: if `capacity` is below one, or a ring has no slot to overwrite.
        """
        require(capacity >= 1, f"KVCache: capacity must be at least 1 slot, got {capacity}.")
        require(
            0 <= num_sink_tokens < (capacity if ring else 1),
            f"KVCache: num_sink_tokens must be below the {capacity} slots of a ring, else 0, "
            f"got {num_sink_tokens}.",
        )
        batch = k.shape[0]

        def slots(x, axis=1):
            shape = list(x.shape)
            shape[axis] = capacity
            return jnp.zeros(shape, x.dtype)

        return cls(
            k=slots(k),
            v=slots(v),
            positions=jnp.zeros((batch, capacity), jnp.int32),
            segment_ids=jnp.full((batch, capacity), -1, jnp.int32),
            coordinates=None if coordinates is None else slots(coordinates, -1),
            k_features=jax.tree.map(slots, k_features),
            state=jax.tree.map(lambda x: jnp.zeros(x.shape, x.dtype), state),
            length=jnp.zeros((), jnp.int32),
            next_positions=jnp.zeros((batch,), jnp.int32),
            ring=ring,
            num_sink_tokens=num_sink_tokens,
        )

    def append(
        self,
        k: jax.Array,
        v: jax.Array,
        positions: jax.Array,
        segment_ids: jax.Array,
        *,
        coordinates: jax.Array | None = None,
        k_features: Any = None,
        state: Any = None,
    ) -> Self:
        """Returns the cache with T more tokens; arguments as the attributes, with T for S.

        Under `jit` the number of used slots is unknown: tokens that do not fit are lost, and
        `overflowed` of the returned cache is true.

        Raises:
          ValueError: if the tokens are known not to fit, or an array differs in shape from
            those that the cache was made for.
        """
        count = k.shape[1]
        require(
            count <= self.capacity - self.num_sink_tokens,
            f"KVCache: {count} tokens do not fit a cache of {self.capacity} slots"
            + (
                f", of which {self.num_sink_tokens} hold sink tokens."
                if self.num_sink_tokens
                else "."
            ),
        )
        if not self.ring and not isinstance(self.length, Tracer):
            require(
                int(self.length) + count <= self.capacity,
                f"KVCache: {int(self.length)} of {self.capacity} slots are used and "
                f"{count} more tokens do not fit; make it larger, or a ring with a window.",
            )
        slots = self._next_slots(count)
        start = slots[0] if self.ring else self.length

        def write(name, old, new, axis=1):
            wanted = list(old.shape)
            wanted[axis] = count
            require(
                new.shape == tuple(wanted),
                f"KVCache: {name} must be {tuple(wanted)} for this cache, got {new.shape}.",
            )
            new = new.astype(old.dtype)
            if not self.ring or count == 1:
                return jax.lax.dynamic_update_slice_in_dim(old, new, start, axis)
            old, new = jnp.moveaxis(old, axis, 0), jnp.moveaxis(new, axis, 0)
            return jnp.moveaxis(old.at[slots].set(new, unique_indices=True), 0, axis)

        if (self.coordinates is None) != (coordinates is None):
            has = "no coordinates" if self.coordinates is None else "coordinates"
            raise ValueError(f"KVCache: the cache was made for {has}; give the same at each step.")
        if coordinates is not None and self.coordinates is not None:
            require(
                jnp.can_cast(coordinates.dtype, self.coordinates.dtype, "same_kind"),
                f"KVCache: the cache was made for {self.coordinates.dtype} coordinates, got "
                f"{coordinates.dtype}.",
            )
        after = jnp.where(segment_ids >= 0, add_saturated(positions, 1), 0).max(axis=1)
        return dataclasses.replace(
            self,
            k=write("k", self.k, k),
            v=write("v", self.v, v),
            positions=write("positions", self.positions, positions),
            segment_ids=write("segment_ids", self.segment_ids, segment_ids),
            coordinates=None
            if coordinates is None
            else write("coordinates", self.coordinates, coordinates, -1),
            k_features=jax.tree.map(
                functools.partial(write, "k_features"), self.k_features, k_features
            ),
            state=state,
            length=self.length + count,
            next_positions=jnp.maximum(self.next_positions, after).astype(jnp.int32),
        )

    def _next_slots(self, count: int) -> jax.Array:
        """Returns int32 [count], the slots of a ring that the next tokens are written to."""
        index = self.length + jnp.arange(count, dtype=jnp.int32)
        again = self.num_sink_tokens + (index - self.num_sink_tokens) % (
            self.capacity - self.num_sink_tokens
        )
        return jnp.where(index < self.num_sink_tokens, index, again)

    def evicts_visible(self, positions: jax.Array, segment_ids: jax.Array, left: int) -> jax.Array:
        """Returns bool [B]: whether appending to a ring evicts a token inside the new window.

        Padding occupies slots too: a ring with much padding holds fewer tokens.

        Args:
          positions: int32 [B, T], of the tokens to append.
          segment_ids: int32 [B, T].
          left: the number of tokens before its own that a query sees.
        """
        slots = self._next_slots(positions.shape[1])
        old, old_segments = self.positions[:, None, slots], self.segment_ids[:, None, slots]
        seen = (old_segments >= 0) & (old_segments == segment_ids[:, :, None])
        near = positions[:, :, None] <= add_saturated(old, left)
        return jnp.any(seen & near, axis=(1, 2))

    def evicted_sinks(self, positions: jax.Array, segment_ids: jax.Array) -> jax.Array:
        """Returns bool [B]: whether a sink token of these sequences was evicted.

        That happens where padding or another sequence occupied the reserved slots.

        Args:
          positions: int32 [B, T], of tokens in the cache.
          segment_ids: int32 [B, T].
        """
        first = (self.positions < self.num_sink_tokens)[:, None] & (segment_ids >= 0)[:, :, None]
        own = first & (self.segment_ids[:, None] == segment_ids[:, :, None])
        missing = own.sum(-1) < jnp.minimum(add_saturated(positions, 1), self.num_sink_tokens)
        return jnp.any(missing & (segment_ids >= 0), axis=1)

    @property
    def overflowed(self) -> jax.Array:
        """Bool, shaped like `length`: whether more tokens were appended than there are slots."""
        return jnp.zeros_like(self.length, bool) if self.ring else self.length > self.capacity
