r"""Range attention: rotary schemes that use different angles for far keys and near keys.

Keys are divided into ranges by their distance to the query. Each range has its rotation of q and
k, and q attends to the keys of that range alone. The parts are merged exactly by the
log-sum-exp of their logits (`posenc_jax.ops.lse`), so logits of several ranges are never held at
once: memory stays linear. Where the coordinates are the positions, ranges are masks by position, so
that tiles outside of a range are skipped and all ranges together cost about one attention; else a
rule masks each range, at the cost of one attention per range. Released code detaches the weights of
the merge, which makes its gradient wrong.
"""

import dataclasses
from collections.abc import Sequence
from typing import Protocol

import jax
import jax.numpy as jnp
import numpy as np

from posenc_jax.angles import cos_sin
from posenc_jax.checks import require
from posenc_jax.engine.api import AttentionCall
from posenc_jax.engine.mask import LEAST_LOGIT, window_sides
from posenc_jax.engine.rules import LogitBias
from posenc_jax.ops.lse import merge_partial_softmax
from posenc_jax.schemes.rotary.base import AttendRotary, check_coordinates


class Ranges(Protocol):
    """The range of a query and a key as a function of their coordinates."""

    def __call__(self, q: jax.Array, k: jax.Array) -> jax.Array:
        """Returns int32, from 0."""
        ...

    def calls(
        self, attention: AttentionCall, q: jax.Array, k: jax.Array
    ) -> tuple[AttentionCall, ...] | None:
        """Returns the attention of each range by position, None where masks cannot say it.

        Args:
          attention: the attention to all keys, without a prefix.
          q, k: int32 [B, T] and [B, S], the positions.
        """
        ...


@dataclasses.dataclass(frozen=True)
class OutOfRange:
    """The rule of a bias that masks the keys of all ranges but `index`, by `range_of(q, k)`."""

    range_of: Ranges
    index: int

    def __call__(self, shared, head, q, k):
        """Returns 0 or the least logit."""
        inside = self.range_of(q, k) == self.index
        # Finite: a query may have no key in a range.
        return jnp.where(inside, 0.0, LEAST_LOGIT).astype(jnp.float32)


@dataclasses.dataclass(frozen=True)
class Far:
    """The range of a key: 1 from the distance `window` on, else 0."""

    window: int

    def __call__(self, q, k):
        """Returns int32, 0 or 1."""
        return (q - k >= self.window).astype(jnp.int32)

    def calls(self, attention, q, k):
        """Returns attention in a window, and attention that is causal from the window on."""
        left, right = window_sides(attention.window) or (-1, -1)
        if 0 <= left < self.window:
            return None
        near = attention.replace(window=(self.window - 1, right))
        window = None if left < 0 else (left - self.window, 0)
        return near, keys_before(attention, q, k, self.window, window)


def keys_before(
    attention: AttentionCall,
    q: jax.Array,
    k: jax.Array,
    count: jax.Array | int,
    window: tuple[int, int] | None = None,
) -> AttentionCall:
    """Returns causal attention from `count` positions before each query on.

    Args:
      attention: the attention to all keys.
      q, k: int32 [B, T] and [B, S], the positions.
      count: the distance of the last key that is seen, an integer or int32 [B, T].
      window: the window of these keys, from the last one.
    """
    attention.refuse_branches("ReRoPE, Self-Extend and dual chunks")
    call = attention.replace(
        is_causal=True, window=window, contiguous=False, q_positions=q - count, k_positions=k
    )
    if attention.q_positions is None:  # They begin at 0, and q - count is an int32.
        return call
    q_ids, k_ids = attention.q_segment_ids, attention.k_segment_ids
    q_ids = jnp.zeros_like(q) if q_ids is None else q_ids
    none_before = q < jnp.iinfo(jnp.int32).min + count
    return call.replace(
        q_segment_ids=jnp.where(none_before, -1, q_ids),
        k_segment_ids=jnp.zeros_like(k) if k_ids is None else k_ids,
    )


@dataclasses.dataclass(frozen=True)
class RangeRotary(AttendRotary):
    """An abstract scheme that rotates q and k once for each range of keys."""

    def cos_sin(self, params, coordinates, slope=1.0, offset=0.0):
        """Returns cosine and sine at the positions `slope * coordinates + offset`."""
        frequencies = self.base_frequencies
        cos, sin = cos_sin(coordinates, slope * frequencies)
        if offset == 0.0:
            return cos, sin
        angle = offset * frequencies
        c, s = (f(angle).astype(np.float32)[None, None] for f in (np.cos, np.sin))
        return cos * c - sin * s, sin * c + cos * s

    def rotated(
        self, x: jax.Array, coordinates: jax.Array, *, slope: float = 1.0, offset: float = 0.0
    ) -> jax.Array:
        """Returns q or k [B, T, N, H] rotated by the positions `slope * coordinates + offset`."""
        coordinates = check_coordinates(self.name, coordinates, 1)
        return self.rotate(x, self.finish(*self.cos_sin({}, coordinates, slope, offset)))

    def attend_ranges(
        self,
        ranges: Sequence[tuple[jax.Array, jax.Array]],
        v: jax.Array,
        range_of: Ranges,
        attention: AttentionCall,
        *,
        relative: bool = False,
    ) -> jax.Array:
        """Returns one softmax attention [B, T, N, V] over the keys of all ranges.

        `ranges` has q and k for every range; `relative` says whether `range_of` is a function of
        the distance alone.
        """
        if attention.softcap is not None:
            raise NotImplementedError(
                f"{self.name}: softcap bounds the mask values of other ranges; leave it out."
            )
        require(not attention.return_lse, f"{self.name}: return_lse is used internally.")
        calls = self._calls(ranges[0], range_of, attention)
        heads = jnp.zeros((ranges[0][0].shape[2],), jnp.float32)
        outs, lses = [], []
        for index, (q, k) in enumerate(ranges):
            call, rules = attention, ()
            if calls is not None:
                call = calls[index]
            else:
                rules = LogitBias(OutOfRange(range_of, index), heads=heads, relative=relative)
            sinks = attention.sinks if index == 0 else None
            out, lse = call.replace(sinks=sinks, return_lse=True)(q, k, v, rules)
            outs.append(out.astype(jnp.float32))
            lses.append(lse)
        return merge_partial_softmax(outs, lses).astype(ranges[0][0].dtype)

    def _calls(self, tokens, range_of, attention):
        """Returns the attention of each range by position, or None."""
        if any(
            x is not None
            for x in (attention.q_coordinates, attention.k_coordinates, attention.prefix_length)
        ):
            return None

        return range_of.calls(attention, *attention.positions(*tokens))
