"""Attention masks from positions and segments.

The order of slots does not enter: one function masks a cache, a left-padded row, a packed
row and a shard of a sequence.
"""

import dataclasses
from typing import Any, Literal

import jax
import jax.numpy as jnp
import numpy as np

from posenc_jax.checks import integers_from, one_of, require

MASK_VALUE = float("-inf")
"""The logit of a hidden key. Every finite logit is legal, however low: see `LEAST_LOGIT`."""

LEAST_LOGIT = float(np.finfo(np.float32).min)
"""The least logit of a key that is not hidden, -3.4e38, where running maxima start.

Masks by numbers, such as -1e9, -1e30 or this one, are logits: a query whose keys all have one gets
the mean of their values, as by `jax.nn.dot_product_attention`. The sum of the terms of a logit must
be finite too. Kernels multiply logits by log2(e), and take those below -2.3e38 for -2.3e38.
"""


def in_units(x: jax.Array, unit: float) -> jax.Array:
    """Returns logits times a factor. Finite ones stay finite, -inf stays -inf.

    The product is rounded: XLA would fuse one with the sum after it, in one pass and not in the
    other, and one step of float32 at -1e9 is a factor of exp(64) on a weight.
    """
    if unit == 1.0:
        return x
    return jnp.where(x == MASK_VALUE, MASK_VALUE, jnp.maximum(unit * x, LEAST_LOGIT))


differentiable_in_units = jax.custom_jvp(in_units, nondiff_argnums=(1,))
"""`in_units` with the derivative of the product also where that would overflow."""
differentiable_in_units.defjvp(lambda unit, x, d_x: (in_units(x[0], unit), unit * d_x[0]))


def add_saturated(x: Any, number: int) -> Any:
    """Returns x + number; int32 that would overflow becomes the greatest or least int32.

    Of a NumPy array it returns one, which is known during tracing.
    """
    if x.dtype != jnp.int32:
        return x + number
    limits, numpy = jnp.iinfo(jnp.int32), np if isinstance(x, np.ndarray) else jnp
    if number >= 0:
        return numpy.minimum(x, limits.max - number) + number
    return numpy.maximum(x, limits.min - number) + number


@dataclasses.dataclass(frozen=True)
class SlidingWindow:
    """A window that keeps first tokens visible, or that counts coordinates.

    Attributes:
      window: as in `attention`: W, or `(left, right)`.
      num_sink_tokens: number of first tokens of a sequence, at positions from 0 on, that queries
        after them see outside of the window too, at their distances: "attention sinks".
      by: "positions", or "coordinates" where tokens share a position, as in an image (Gemma 3),
        or positions count the tokens of a tree and coordinates its depths.

    Raises:
      ValueError: for an invalid window, a negative number, sink tokens of a window without a left
        side or by coordinates, and another `by`.

    >>> SlidingWindow(4096, num_sink_tokens=4).sides
    (4095, 4095)
    """

    window: int | tuple[int, int]
    num_sink_tokens: int = 0
    by: Literal["positions", "coordinates"] = "positions"

    def __post_init__(self):
        integers_from(0, "SlidingWindow", num_sink_tokens=self.num_sink_tokens)
        one_of("SlidingWindow", ("positions", "coordinates"), by=self.by)
        left_side, _ = self.sides
        require(
            not self.num_sink_tokens or (left_side >= 0 and self.by == "positions"),
            "SlidingWindow: num_sink_tokens needs a window with a left side, by positions, got "
            f"{self!r}.",
        )

    @property
    def sides(self) -> tuple[int, int]:
        """The pair `(left, right)`."""
        sides = window_sides(self.window)
        if sides is None:
            raise TypeError("SlidingWindow: window must be an integer or a pair, got None.")
        return sides


Window = int | tuple[int, int] | SlidingWindow | None


def by_coordinates(window: Window) -> bool:
    """Returns whether a window counts coordinates."""
    return isinstance(window, SlidingWindow) and window.by == "coordinates"


_FAR = 2**31 - 1
"""The greatest int32 position. A larger window, such as `sys.maxsize`, hides no other keys."""


def window_sides(window: Window) -> tuple[int, int] | None:
    """Returns `(left, right)`: the numbers of tokens that a query sees on either side.

    An integer W is a sliding window of W tokens, the query's own included:
    `(W - 1, W - 1)`. A pair is returned unchanged; a negative side is unlimited.

    Raises:
      ValueError: for a window without tokens.
      TypeError: if `window` is neither an integer nor a pair of integers.
    """
    if window is None:
        return None
    if isinstance(window, SlidingWindow):
        return window.sides
    if isinstance(window, tuple | list):
        if len(window) == 2 and all(map(_is_integer, window)):
            return min(int(window[0]), _FAR), min(int(window[1]), _FAR)
    elif _is_integer(window):
        if window < 1:
            raise ValueError(f"attention: window must be at least 1 token, got {window}.")
        side = min(int(window) - 1, _FAR)
        return side, side
    raise TypeError(
        f"attention: window must be an integer, a pair or a SlidingWindow, got {window!r}."
    )


def _is_integer(x: object) -> bool:
    return isinstance(x, int | np.integer) and not isinstance(x, bool)


def visible(
    q_positions: jax.Array,
    k_positions: jax.Array,
    q_segment_ids: jax.Array | None = None,
    k_segment_ids: jax.Array | None = None,
    *,
    is_causal: bool = False,
    window: Window = None,
    window_places: tuple[jax.Array, jax.Array] | None = None,
    prefix_length: jax.Array | None = None,
    k_visible_until: jax.Array | None = None,
) -> jax.Array:
    """Returns bool [B, T, S], true where the query may see the key.

    Args:
      q_positions: int32 [B, T].
      k_positions: int32 [B, S].
      q_segment_ids: int32 [B, T]; below zero is padding. None: one segment.
      k_segment_ids: int32 [B, S]; below zero is padding. None: one segment.
      is_causal: whether keys at later positions are hidden.
      window: see `window_sides`.
      window_places: the numbers that the window counts, [B, T] and [B, S]. Default: positions.
      prefix_length: int32 [B]; keys at positions below it are visible to every query of
        their segment, causal or not (prefix language models).
      k_visible_until: int32 [B, S]; queries at this position and later do not see the key.
    """
    i, j = q_positions[:, :, None], k_positions[:, None, :]
    seen = jnp.ones(jnp.broadcast_shapes(i.shape, j.shape), bool)
    if is_causal:
        seen &= j <= i
    sides = window_sides(window)
    if sides is not None:
        left_side, right_side = sides
        q, k = (i, j) if window_places is None else window_places
        if window_places is not None:
            q, k = q[:, :, None], k[:, None, :]
        if left_side >= 0:
            seen &= q <= add_saturated(k, left_side)
        if right_side >= 0:
            seen &= k <= add_saturated(q, right_side)
    if prefix_length is not None:
        seen |= j < prefix_length[:, None, None]
    if k_visible_until is not None:
        seen &= i < k_visible_until[:, None, :]
    if q_segment_ids is not None:
        seen &= (q_segment_ids >= 0)[:, :, None]
    if k_segment_ids is not None:
        seen &= (k_segment_ids >= 0)[:, None, :]
    if q_segment_ids is not None and k_segment_ids is not None:
        seen &= q_segment_ids[:, :, None] == k_segment_ids[:, None, :]
    return seen
