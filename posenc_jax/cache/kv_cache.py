"""The cache of one attention layer: keys and values with their positions."""

import dataclasses
import functools
from collections.abc import Callable
from typing import Any, Self

import jax
import jax.numpy as jnp
import numpy as np
from jax import export
from jax.core import Tracer
from jax.sharding import PartitionSpec

from posenc_jax.cache.serialization import from_bytes, to_bytes
from posenc_jax.cache.slots import (
    appended_states,
    batch_first,
    finite_values,
    same_sharding,
    sharded_axes,
    states_without,
    write_slots,
)
from posenc_jax.cache.storage import Ring, Slots, order
from posenc_jax.checks import array_of_rank, integer_positions, integers_from, require
from posenc_jax.engine.mask import SlidingWindow, Window, add_saturated, window_sides
from posenc_jax.positions.packing import restarting
from posenc_jax.schemes.combinators.chain import reads_order
from posenc_jax.schemes.scheme import Scheme

_BY_ROW = "length", "written", "rewindable", "next_positions", "next_segment_ids", "tied", "lost"
"""Arrays [B] of a cache."""

_VALUES = "k", "v", "k_features", "state", "past_states"
"""Fields whose arrays have numbers of tokens, and may be sharded in other ways than the others."""

_ALWAYS = 2**31 - 1
"""`visible_until` of tokens that all later ones see."""


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class KVCache:
    """Keys and values with their positions, for one layer. A pytree; methods return a new one.

    Each row holds its own number of tokens, so rows of a batch start and end independently.
    A token takes the next slot of its row, and padding takes none. Methods run under `jit`. They
    write a donated cache in place: `append` writes T slots per row, whatever S is.

    `take`, `insert`, `reset` and `rewind` change all arrays of a row, the scheme's arrays and
    running sums included. Caches of several layers can be stacked along leading axes, for `scan`
    and `vmap`; call the methods of a stacked cache under `jax.vmap`.

    Attributes:
      k, v: [B, S, K, H] and [B, S, K, V].
      positions: int32 [B, S].
      segment_ids: int32 [B, S], -1 in empty slots.
      coordinates: [B, S] or [A, B, S] where calls give coordinates, or None.
      visible_until: int32 [B, S] where calls may give it, or None.
      k_features: the scheme's arrays per key, [B, S, ...].
      state: the scheme's arrays per sequence, [B, ...].
      past_states: states without the last 1, 2, ... tokens, [B, max_rewind, ...], or None.
      length: int32 [B], the number of tokens.
      written: int32 [B], the greatest length since `reset`; `rewind` does not lower it.
      rewindable: int32 [B], the number of tokens that `past_states` can take back.
      next_positions: int32 [B], the default position of the next token, in the last one's segment.
      next_segment_ids: int32 [B], its default segment, which is the last token's; 0 in empty rows.
      tied: bool [B], rows of a ring where tokens of a sequence have equal positions.
      lost: bool [B], rows that recover in `reset` only; see `overflowed`.
      scheme: the scheme whose arrays the cache holds, or None.
      storage: `Slots`, or a `Ring` that overwrites the oldest tokens of a full row.
      ids_per_segment: how many consecutive ids are one segment: 16 in a layer with chunks.
    """

    k: jax.Array
    v: jax.Array
    positions: jax.Array
    segment_ids: jax.Array
    coordinates: jax.Array | None
    visible_until: jax.Array | None
    k_features: Any
    state: Any
    past_states: Any
    length: jax.Array
    written: jax.Array
    rewindable: jax.Array
    next_positions: jax.Array
    next_segment_ids: jax.Array
    tied: jax.Array
    lost: jax.Array
    scheme: Scheme | None = dataclasses.field(default=None, metadata={"static": True})
    storage: Slots | Ring = dataclasses.field(default=Slots(), metadata={"static": True})
    ids_per_segment: int = dataclasses.field(default=1, metadata={"static": True})

    @property
    def capacity(self) -> int:
        """Number of slots S."""
        return self.positions.shape[-1]

    @property
    def ring(self) -> bool:
        """Whether a full row overwrites its oldest tokens."""
        return isinstance(self.storage, Ring)

    @property
    def max_rewind(self) -> int | None:
        """Maximum number of tokens that `rewind` takes back at once; None for any number."""
        if not jax.tree.leaves(self.state):
            return None
        past_states = jax.tree.leaves(self.past_states)
        return past_states[0].shape[self.length.ndim] if past_states else 0

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
        visible_until: bool = False,
        scheme: Scheme | None = None,
        max_rewind: int = 0,
        ring: bool = False,
        num_sink_tokens: int = 0,
    ) -> Self:
        """Returns an empty cache of `capacity` slots.

        Args:
          k, v: shapes [B, any, K, H] and [B, any, K, V] with dtypes. These and the other shapes
            may have shardings on explicit mesh axes.
          capacity: number of slots S, for all tokens of a row, or in a ring for its window.
          coordinates: shape [B, any] or [A, B, any] to store coordinates, or None.
          k_features: pytree of shapes [B, any, ...].
          state: pytree of shapes [B, ...].
          visible_until: whether tokens may have one.
          scheme: the scheme whose arrays the cache holds.
          max_rewind: maximum number of tokens that `rewind` takes back, if there is a `state`.
          ring: whether a full row overwrites its oldest tokens.
          num_sink_tokens: number of first tokens of a row that a ring does not overwrite.

        Raises:
          TypeError: if `capacity` or `max_rewind` is not an integer.
          ValueError: if `capacity` is below one, `max_rewind` is negative, or a ring has no slot
            to overwrite.
        """
        integers_from(1, "KVCache", capacity=capacity)
        integers_from(0, "KVCache", max_rewind=max_rewind)
        require(
            0 <= num_sink_tokens < (capacity if ring else 1),
            f"KVCache: num_sink_tokens must be below the {capacity} slots of a ring, else 0, "
            f"got {num_sink_tokens}.",
        )
        batch = k.shape[0]
        rows = sharded_axes(k)[:1]

        def zeros(shape, dtype=jnp.int32, spec=rows, value=0):
            sharding = {"out_sharding": PartitionSpec(*spec)} if any(spec) else {}
            return jnp.full(shape, value, dtype, **sharding)

        def slots(x, axis=1):
            shape = list(x.shape)
            shape[axis] = capacity
            return zeros(shape, x.dtype, sharded_axes(x))

        def past(x):
            spec = sharded_axes(x)
            return zeros((batch, max_rewind, *x.shape[1:]), x.dtype, (*spec[:1], None, *spec[1:]))

        for name, tree, axes in (("state", state, 1), ("k_features", k_features, 2)):
            for x in jax.tree.leaves(tree):
                shape = "[B, ...]" if axes == 1 else "[B, S, ...]"
                require(
                    x.ndim >= axes and x.shape[0] == batch,
                    f"KVCache: {name} of {type(scheme).__name__} must be {shape} with B = {batch}, "
                    f"got {x.shape}.",
                )
        return cls(
            k=slots(k),
            v=slots(v),
            positions=zeros((batch, capacity)),
            segment_ids=zeros((batch, capacity), value=-1),
            coordinates=None if coordinates is None else slots(coordinates, -1),
            visible_until=zeros((batch, capacity), value=_ALWAYS) if visible_until else None,
            k_features=jax.tree.map(slots, k_features),
            state=jax.tree.map(lambda x: zeros(x.shape, x.dtype, sharded_axes(x)), state),
            past_states=jax.tree.map(past, state) if max_rewind else None,
            length=zeros((batch,)),
            written=zeros((batch,)),
            rewindable=zeros((batch,)),
            next_positions=zeros((batch,)),
            next_segment_ids=zeros((batch,)),
            tied=zeros((batch,), bool),
            lost=zeros((batch,), bool),
            scheme=scheme,
            storage=Ring(num_sink_tokens) if ring else Slots(),
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
        past_states: Any = None,
        visible_until: jax.Array | None = None,
        window: Window = None,
    ) -> Self:
        """Returns the cache with T more tokens.

        Tokens with a segment id below zero are padding: they take no slot. A row of padding does
        not change.

        Under `jit` the number of used slots is unknown: tokens that do not fit are not stored,
        and `overflowed` of the returned cache is true for their row.

        Args:
          k, v, positions, segment_ids, coordinates, k_features: arrays of the new tokens, with
            the shapes of the attributes and T for S.
          state: the scheme's arrays per sequence, after these tokens.
          past_states: states without the last 1, 2, ... tokens of each row,
            [B, min(T - 1, max_rewind), ...].
          visible_until: as in `scheme_attention`, int32 [B, T]. Default: later tokens see these.
          window: the window of the attention, as in `attention`. A row of a ring is lost if it
            does not hold all keys in the window of these tokens. Default: not checked.

        Raises:
          ValueError: if T, padding included, exceeds the slots, or the tokens are known not to fit;
            if an array does not have the shape that the cache was made for; and if a ring has too
            few slots for `window`.
        """
        count, sinks = k.shape[1], self.storage.num_sink_tokens
        require(
            count <= self.capacity - sinks,
            f"KVCache: {count} tokens do not fit a cache of {self.capacity} slots"
            + (f", of which {sinks} hold sink tokens." if sinks else "."),
        )
        batch = self.length.shape[0]

        def check(name, x, *axes):
            shape = batch, count, *axes
            require(
                x.shape == shape, f"KVCache: {name} must be {shape} for this cache, got {x.shape}."
            )

        positions = integer_positions("KVCache", positions)
        check("positions", positions)
        check("segment_ids", segment_ids)
        check("k", k, *self.k.shape[2:])
        check("v", v, *self.v.shape[2:])
        jax.tree.map(
            lambda old, x: check("k_features", x, *old.shape[2:]), self.k_features, k_features
        )
        jax.tree.map(
            lambda old, x: require(
                x.shape == old.shape,
                f"KVCache: state must be {old.shape} for this cache, got {x.shape}.",
            ),
            *(self.state, state),
        )
        window = None if isinstance(self.storage, Slots) else _with_pairs(window)
        new, slots, added, is_full = self._without_values()._counted(
            *(positions, segment_ids, coordinates, visible_until),
            limit=self.max_rewind or 0,
            window=window,
            in_order=reads_order(self.scheme),
        )
        self._check_room(new.length, is_full)
        old = tuple(getattr(self, name) for name in _VALUES)
        values = _stored(old, (k, v, k_features, state, past_states), slots, added)
        return dataclasses.replace(
            new, scheme=self.scheme, **dict(zip(_VALUES, values, strict=True))
        )

    def _without_values(self) -> Self:
        """Returns the cache with its counts and tokens alone."""
        without: dict[str, Any] = dict.fromkeys(_VALUES)
        return dataclasses.replace(self, scheme=None, **without)

    # Outside of `jit` every operation of `append` would be a program, some forty to compile. These
    # are two, as the compiler would shard counts and positions like the keys of their program.
    @functools.partial(jax.jit, static_argnames=("limit", "window", "in_order"), inline=True)
    def _counted(
        self,
        positions: jax.Array,
        segment_ids: jax.Array,
        coordinates: jax.Array | None,
        visible_until: jax.Array | None,
        *,
        limit: int,
        window: Window,
        in_order: bool,
    ) -> tuple[Self, jax.Array, jax.Array, jax.Array]:
        """Returns the cache of `append` without `_VALUES`, and how these are written.

        With it come the slots of the tokens, the number of tokens of each row, and whether a row
        has more tokens than slots.
        """
        count, sinks = positions.shape[1], self.storage.num_sink_tokens
        tokens = segment_ids >= 0
        added = tokens.sum(1, dtype=jnp.int32)
        length = self.length + added
        is_full = self.storage.overflowed(length, self.capacity).any()
        index = self.length[:, None] + jnp.cumsum(tokens, 1, dtype=jnp.int32) - 1
        slots = self.storage.slots(index, self.capacity)
        # Tokens that are not stored have different slots past the end, which are not written.
        past_end = self.capacity + jnp.arange(count, dtype=jnp.int32)[None]
        slots = jnp.where(tokens & (slots < self.capacity), slots, past_end)
        last = jnp.where(added > 0, _last(segment_ids, index, tokens), self.next_segment_ids)
        after = _after(positions, tokens & (segment_ids == last[:, None]))
        continues = (self.length > 0) & (self.next_segment_ids == last)
        after = jnp.where(continues, jnp.maximum(after, self.next_positions), after)
        # Caches are also made of zeros, from their shapes alone.
        unused = jnp.arange(self.capacity, dtype=jnp.int32)[None] >= self.written[:, None]
        ids = jnp.where(unused, -1, self.segment_ids)
        new = dataclasses.replace(
            self,
            positions=write_slots("positions", self.positions, positions, slots),
            segment_ids=write_slots("segment_ids", ids, segment_ids, slots),
            coordinates=self._with_coordinates(coordinates, slots),
            visible_until=self._with_visible_until(visible_until, slots),
            length=length,
            written=jnp.maximum(self.written, length),
            rewindable=jnp.minimum(self.rewindable + added, limit),
            next_positions=jnp.where(length > 0, after, self.next_positions),
            next_segment_ids=last,
        )
        if window is None or isinstance(self.storage, Slots):
            return new, slots, added, is_full
        # A donated cache is not copied if it is read after the write only. As many tokens as slots
        # overwrite the last one.
        before = self if count == self.capacity - sinks else new
        slot = self.storage.slots(jnp.maximum(self.length - 1, 0)[:, None], self.capacity)
        newest = (
            jnp.take_along_axis(before.positions, slot, 1),
            jnp.take_along_axis(before.segment_ids, slot, 1),
        )
        cached, appended = (new.positions, new.segment_ids), (positions, segment_ids)
        counts = self.length, new.written, self.tied
        lost, tied = self.storage.loses_visible(cached, newest, appended, *counts, window)
        # Keys at one position are in the order of slots, in which a ring turns.
        lost |= tied & in_order
        return dataclasses.replace(new, tied=tied, lost=new.lost | lost), slots, added, is_full

    def take(self, rows: jax.Array) -> Self:
        """Returns the cache whose row i is row `rows[i]` of this one, as in beam search.

        Args:
          rows: integers [any], from 0 to B - 1, in any order and number.

        Raises:
          ValueError: for rows that are known to be out of range; under `jit` they are lost.
        """
        self._check_one_layer("take")
        rows = integer_positions("KVCache.take", rows, "rows")
        array_of_rank("KVCache.take", "rows", rows, 1, "[any]")
        inside = self._inside("take", rows)
        new = self._each(lambda x: x.at[rows].get(mode="clip", **same_sharding(x)))
        return dataclasses.replace(new, lost=new.lost | ~inside)

    def insert(self, rows: jax.Array | int, other: "KVCache") -> Self:
        """Returns the cache with rows replaced by the rows of another one, such as a prefilled one.

        Args:
          rows: an integer or integers [any], the row of this cache for each row of `other`.
            Under `jit`, rows outside 0 .. B - 1 are not inserted.
          other: a cache of the same scheme and sizes. It may have fewer slots, unless it is a
            ring.

        Raises:
          ValueError: for a cache that does not fit, and rows known to be out of range.
        """
        self._check_one_layer("insert")
        rows = jnp.atleast_1d(integer_positions("KVCache.insert", rows, "rows"))
        self._check_like(other)
        require(
            rows.shape == other.length.shape,
            f"KVCache.insert: rows must be one for each of the {other.length.shape[0]} rows of "
            f"the other cache, got {rows.shape}.",
        )
        known = [] if isinstance(rows, Tracer) else np.asarray(rows).tolist()
        require(len({*known}) == len(known), f"KVCache.insert: rows must differ, got {known}.")
        into = jnp.where(self._inside("insert", rows), rows, self.length.shape[0])
        k, v = finite_values(other.k.astype(self.k.dtype), other.v.astype(self.v.dtype))
        lost, tied = other.overflowed, other.tied
        if self.ring and not other.ring:  # Its rows were not checked.
            falls, tied = order(other.positions, other.segment_ids)
            lost |= falls | tied & (reads_order(self.scheme) | (self.storage.num_sink_tokens > 0))
        other = dataclasses.replace(other, k=k, v=v, tied=tied, lost=lost, storage=self.storage)

        def put(old, new):
            # `new` may have fewer slots.
            index = into if new.ndim == 1 else (into, slice(new.shape[1]))
            return old.at[index].set(new.astype(old.dtype), mode="drop", **same_sharding(old))

        return self.reset(rows)._each(put, other)

    def reset(self, rows: jax.Array | int) -> Self:
        """Returns the cache with empty rows, for new sequences.

        Args:
          rows: bool [B], true for the rows to empty; or an integer or integers [any]. Under
            `jit`, integers outside 0 .. B - 1 empty no row.

        Raises:
          ValueError: for rows that are known to be out of range.
        """
        self._check_one_layer("reset")
        batch = self.length.shape[0]
        array = rows if isinstance(rows, jax.Array) else np.asarray(rows)
        array = array if array.size else jnp.zeros(array.shape, jnp.int32)  # [] is of floats.
        if array.dtype == jnp.bool_:
            chosen = jnp.asarray(array)
            require(
                chosen.shape == (batch,),
                f"KVCache.reset: rows must be [B] = ({batch},) or integers, got {chosen.shape}.",
            )
        else:
            array = jnp.atleast_1d(integer_positions("KVCache.reset", array, "rows"))
            into = jnp.where(self._inside("reset", array), array, batch)
            chosen = jnp.zeros((batch,), bool).at[into].set(True, mode="drop")

        def cleared(x, value=0):
            mask = chosen.reshape(-1, *(1,) * (x.ndim - 1))
            return jnp.where(mask, jnp.asarray(value, x.dtype), x)

        return dataclasses.replace(
            self,
            segment_ids=cleared(self.segment_ids, -1),
            state=jax.tree.map(cleared, self.state),
            **{name: cleared(getattr(self, name)) for name in _BY_ROW},
        )

    def rewind(self, count: jax.Array | int) -> Self:
        """Returns the cache without the last tokens of each row, such as rejected drafts.

        In a ring, these tokens have overwritten older ones. To take back n tokens, its capacity
        must be at least n, plus the tokens before its own that a query sees in the window, at least
        one, plus the sink tokens; a row that is taken back further is lost in the next call.

        Args:
          count: number of tokens to take back, without padding: an integer or integers [B].

        Raises:
          ValueError: for more tokens than the row is known to hold, all that a ring holds, and for
            a scheme with a running state more than `max_rewind`. Under `jit` such rows are lost.
        """
        self._check_one_layer("rewind")
        require(
            self.max_rewind != 0,
            "KVCache.rewind: the scheme has a running state; make the cache with max_rewind.",
        )
        count = integer_positions("KVCache.rewind", count, "count")
        require(
            count.shape in ((), self.length.shape),  # One of [1] would be taken for all rows.
            f"KVCache.rewind: count must be an integer or [B] = {self.length.shape}, got shape "
            f"{count.shape}.",
        )
        count = jnp.broadcast_to(count, self.length.shape)
        limit = self.length if self.max_rewind is None else self.rewindable
        lost = (count < 0) | (count > limit)
        if not isinstance(lost, Tracer) and lost.any():
            row = int(lost.argmax())
            raise ValueError(
                f"KVCache.rewind: row {row} can lose from 0 to {int(limit[row])} tokens, got "
                f"{int(count[row])}."
            )
        count = jnp.where(lost, 0, count)
        length = self.length - count
        tokens = self.storage.tokens(self.length, self.capacity)
        segment_ids = jnp.where(tokens < length[:, None], self.segment_ids, -1)
        held = segment_ids >= 0
        empty = (length > 0) & ~held.any(1)
        if not isinstance(empty, Tracer) and empty.any():
            row = int(empty.argmax())
            raise ValueError(
                f"KVCache.rewind: {int(count[row])} tokens are all of row {row} in the ring, "
                "and nothing then tells the position of the next one; make the ring larger."
            )
        lost |= empty
        last = _last(self.segment_ids, tokens, held)
        after = _after(self.positions, held & (segment_ids == last[:, None]))
        after = jnp.where((length > 0) & ~empty, after, 0)
        state, past_states = self.state, self.past_states
        if self.max_rewind:
            counts = count[:, None] + jnp.arange(self.max_rewind + 1, dtype=jnp.int32)[None]
            states = jax.tree.map(lambda x, y: states_without(x, y, counts), state, past_states)
            state = jax.tree.map(lambda x: x[:, 0], states)
            past_states = jax.tree.map(lambda x: x[:, 1:], states)
        return dataclasses.replace(
            self,
            segment_ids=segment_ids,
            state=state,
            past_states=past_states,
            length=length,
            tied=self.tied & (length > 0),
            rewindable=jnp.maximum(self.rewindable - count, 0),
            next_positions=jnp.where(count > 0, after, self.next_positions),
            next_segment_ids=jnp.where(count > 0, last, self.next_segment_ids),
            lost=self.lost | lost,
        )

    def keep(self, tokens: jax.Array, count: jax.Array | int) -> Self:
        """Returns the cache with only some of its last tokens, as a branch of a tree of drafts.

        They get the positions after the tokens before them, in their order, and later tokens see
        them. Their coordinates, depths in the tree, stay. A ring has the limits of `rewind`.

        Args:
          tokens: integers [B, n], the tokens to keep, counted from 0 for the first of the last
            `count`; entries below zero keep none.
          count: number of last tokens, without padding: an integer or integers [B].

        Raises:
          ValueError: for tokens that are known to be out of range, and as `rewind`. Under `jit`
            such rows are lost.
          NotImplementedError: for a scheme with a running state.
        """
        if jax.tree.leaves(self.state):
            raise NotImplementedError("KVCache.keep: the scheme has a running state.")
        caller, batch = "KVCache.keep", self.length.shape[0]
        tokens = integer_positions(caller, tokens, "tokens")
        array_of_rank(caller, "tokens", tokens, 2, "[B, n]")
        require(len(tokens) == batch, f"{caller}: tokens must be [{batch}, n], got {tokens.shape}.")
        before = self.rewind(count)
        past = tokens >= (self.length - before.length)[:, None]
        if not isinstance(past, Tracer) and past.any():
            row = int(past.any(1).argmax())
            raise ValueError(f"{caller}: row {row} has tokens {tokens[row]} of the last {count}.")
        slots = self.storage.slots(before.length[:, None] + jnp.maximum(tokens, 0), self.capacity)

        def at_slots(x):
            of_row = jax.vmap(lambda x, slots: x.at[slots].get(mode="clip"))
            return of_row(x, slots)

        k, v, features, ids = jax.tree.map(
            at_slots, (self.k, self.v, self.k_features, self.segment_ids)
        )
        ids = jnp.where(tokens < 0, -1, ids)
        coordinates = self.coordinates
        if coordinates is not None:
            coordinates = jnp.moveaxis(at_slots(batch_first(coordinates)), (0, 1), (-2, -1))
        segments = ids // self.ids_per_segment
        positions = restarting(segments) + before.positions_after(segments)
        new = before.append(
            *(k, v, positions, ids),
            coordinates=coordinates,
            k_features=features,
            state=self.state,
        )
        return dataclasses.replace(new, lost=new.lost | past.any(1))

    def positions_after(
        self, segment_ids: jax.Array, ids_per_segment: int | None = None
    ) -> jax.Array:
        """Returns the position after the last token of each segment in the cache, int32 [B, T].

        It is 0 for segments that the cache does not hold.

        Args:
          segment_ids: int32 [B, T].
          ids_per_segment: in place of the attribute, for a cache that no layer made.
        """
        return self._without_values()._position_after(
            segment_ids, ids_per_segment or self.ids_per_segment
        )

    @functools.partial(jax.jit, static_argnums=2, inline=True)
    def _position_after(self, segment_ids: jax.Array, ids_per_segment: int) -> jax.Array:
        """Returns `positions_after`; jitted, as a branch would compile in every call outside."""
        written = jnp.arange(self.capacity, dtype=jnp.int32)[None] < self.written[:, None]
        held = jnp.where(written, self.segment_ids // ids_per_segment, -1)
        last = jnp.where(self.length > 0, self.next_segment_ids // ids_per_segment, -1)
        after = jnp.where(segment_ids == last[:, None], self.next_positions[:, None], 0)
        others = (segment_ids >= 0) & (segment_ids != last[:, None])
        others &= segment_ids <= held.max(1, keepdims=True)

        def of_others():  # Rows that go back to an earlier segment are rare.
            def of_token(ids):
                same = held == ids[:, None]
                return jnp.where(jnp.any(same, 1), _after(self.positions, same), 0)

            of_tokens = jax.lax.map(of_token, jnp.moveaxis(segment_ids, 1, 0))
            return jnp.where(others, jnp.moveaxis(of_tokens, 0, 1), after)

        return jax.lax.cond(jnp.any(others), of_others, lambda: after)

    @property
    def overflowed(self) -> jax.Array:
        """Rows that lost tokens which later tokens may see, bool [B]; their outputs are NaN.

        A row with more tokens than slots recovers when tokens are taken back; `rewind` begins with
        tokens that were not stored. A row where a ring, `take` or `rewind` was used beyond its
        limits recovers in `reset`.
        """
        return self.lost | self.storage.overflowed(self.length, self.capacity)

    def _check_room(self, length: jax.Array, is_full: jax.Array) -> None:
        """Raises `ValueError` if rows of these lengths are known not to fit."""
        if isinstance(is_full, Tracer) or not is_full:
            return
        row = int(length.argmax())
        used = int(self.length[row])
        raise ValueError(
            f"KVCache: {used} of {self.capacity} slots of row {row} are used and "
            f"{int(length[row]) - used} more tokens do not fit; make it larger, or a ring with a "
            "window."
        )

    def _with_coordinates(self, new: jax.Array | None, slots: jax.Array) -> jax.Array | None:
        """Returns the coordinates after new ones [B, T] or [A, B, T] are written into slots."""
        old = self.coordinates
        if old is None or new is None:
            has = "no coordinates" if old is None else "coordinates"
            require(
                old is new, f"KVCache: the cache was made for {has}; give the same at each step."
            )
            return None
        require(
            jnp.can_cast(new.dtype, old.dtype, "same_kind"),
            f"KVCache: the cache was made for {old.dtype} coordinates, got {new.dtype}.",
        )
        shape = (*old.shape[:-1], slots.shape[1])
        require(
            new.shape == shape,
            f"KVCache: coordinates must be {shape} for this cache, got {new.shape}.",
        )
        return write_slots("coordinates", old, new, slots, batch=old.ndim - 2)

    def _with_visible_until(self, new: jax.Array | None, slots: jax.Array) -> jax.Array | None:
        """Returns `visible_until` with the numbers of new tokens, [B, T], in their slots."""
        if self.visible_until is None:
            require(new is None, "KVCache: visible_until needs a cache that was made for it.")
            return None
        new = jnp.full(slots.shape, _ALWAYS, jnp.int32) if new is None else new
        return write_slots("visible_until", self.visible_until, new, slots)

    def _check_one_layer(self, method: str) -> None:
        """Raises `ValueError` for the stacked caches of several layers."""
        require(
            self.length.ndim == 1,
            f"KVCache.{method}: the cache has several layers, so it needs jax.vmap over them.",
        )

    def _inside(self, method: str, rows: jax.Array) -> jax.Array:
        """Returns whether rows are in range; raises `ValueError` if they are known not to be."""
        batch = self.length.shape[0]
        inside = (rows >= 0) & (rows < batch)
        if not isinstance(inside, Tracer) and not inside.all():
            raise ValueError(f"KVCache.{method}: rows must be from 0 to {batch - 1}, got {rows}.")
        return inside

    def _each(self, function: Callable[..., jax.Array], *others: "KVCache") -> Self:
        """Returns the cache with a function applied to its arrays, with the batch axis first."""
        caches = jax.tree.map(jnp.asarray, (self, *others))  # On the host they are of NumPy.
        new = jax.tree.map(function, *(dataclasses.replace(c, coordinates=None) for c in caches))
        coordinates = [batch_first(c.coordinates) for c in caches if c.coordinates is not None]
        if not coordinates:
            return new
        changed = jnp.moveaxis(function(*coordinates), (0, 1), (-2, -1))
        return dataclasses.replace(new, coordinates=changed)

    def _check_like(self, other: "KVCache") -> None:
        """Raises unless `other` is a cache whose rows can be rows of this one."""
        if other.scheme != self.scheme:
            raise ValueError(
                f"KVCache.insert: the cache is for {self.scheme!r}, the other for {other.scheme!r}."
            )
        same_ring = (other.storage, other.capacity) == (self.storage, self.capacity)
        require(
            same_ring if other.ring else other.capacity <= self.capacity,
            f"KVCache.insert: the other cache must have at most {self.capacity} slots or be the "
            f"same ring, got {other.capacity} slots{', a ring' if other.ring else ''}.",
        )
        require(
            other.ids_per_segment == self.ids_per_segment,
            "KVCache.insert: caches with and without chunks; the cache has "
            f"{self.ids_per_segment} ids per segment, the other {other.ids_per_segment}.",
        )

        def sizes(cache):
            coordinates = None if cache.coordinates is None else batch_first(cache.coordinates)
            per_key = cache.k, cache.v, coordinates, cache.visible_until, cache.k_features
            per_row = cache.state, cache.past_states
            shapes = [
                jax.tree.map(lambda x, n=axes: x.shape[n:], tree)
                for axes, tree in ((2, per_key), (1, per_row))
            ]
            return [*shapes, "" if coordinates is None else str(coordinates.dtype)]

        expected, actual = sizes(self), sizes(other)
        if actual != expected:
            raise ValueError(
                f"KVCache.insert: arrays must be {expected} per key and per row, got {actual}."
            )


def _with_pairs(window: Window) -> Window:
    """Returns a window with pairs for lists, which have no hash; raises as `window_sides` does."""
    sides = window_sides(window)
    if isinstance(window, SlidingWindow) and not isinstance(window.window, int):
        return dataclasses.replace(window, window=window.sides)
    return sides if isinstance(window, list) else window


@functools.partial(jax.jit, inline=True)
def _stored(old: tuple, new: tuple, slots: jax.Array, added: jax.Array) -> tuple:
    """Returns the `_VALUES` of a cache after new ones, of `added` tokens for each row."""
    *by_slot, state, past_states = old
    *new_by_slot, new_state, new_past_states = new
    written = (
        jax.tree.map(functools.partial(write_slots, name, slots=slots), a, b)
        for name, a, b in zip(_VALUES, by_slot, new_by_slot, strict=False)
    )
    if jax.tree.leaves(past_states):
        past_states = jax.tree.map(
            lambda state, past, new: appended_states(state, past, added, new),
            *(state, past_states, _as(state, new_past_states)),
        )
    return *written, _as(state, new_state), past_states


def _as(old: Any, new: Any) -> Any:
    """Returns arrays with the dtypes of old ones, so that a scan can carry the cache."""
    return jax.tree.map(lambda x, y: y.astype(x.dtype), old, new)


def _last(segment_ids: jax.Array, numbers: jax.Array, tokens: jax.Array) -> jax.Array:
    """Returns the segment of the token with the greatest number, int32 [B]; 0 without tokens."""
    numbers = jnp.where(tokens, numbers, -1)
    newest = tokens & (numbers == numbers.max(1, keepdims=True, initial=-1))
    return jnp.where(newest, segment_ids, 0).sum(1, dtype=jnp.int32)


def _after(positions: jax.Array, tokens: jax.Array) -> jax.Array:
    """Returns the position after the last of the tokens, int32 [B]; undefined without tokens."""
    least = jnp.iinfo(jnp.int32).min
    return jnp.where(tokens, add_saturated(positions, 1), least).max(1, initial=least)


export.register_pytree_node_serialization(
    KVCache,
    serialized_name="posenc_jax.KVCache",
    serialize_auxdata=to_bytes,
    deserialize_auxdata=from_bytes,
)
