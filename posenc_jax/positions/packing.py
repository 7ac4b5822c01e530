"""Positions of packed and padded batches, and coordinates computed from text.

Positions, int32 [B, T], order the tokens. Segment ids, int32 [B, T], group them: tokens attend
to their own segment, and ids below zero mark padding. Coordinates, which schemes encode,
default to the positions; they can also be computed from text (`digit_places`, `bilevel`) or
drawn at random (`posenc_jax.positions.random`).

Papers: McLeish et al. Transformers Can Do Arithmetic with the Right Embeddings. 2024.
https://arxiv.org/abs/2405.17399
He et al. Two Stones Hit One Bird: Bilevel Positional Encoding for Better Length Extrapolation.
2024. https://arxiv.org/abs/2401.16421
Reference code: mcleish7/arithmetic, abacus.py; zhenyuhe00/BiPE, my_modeling_llama_bipe_rope.py.
"""

import functools
import weakref
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.core import Tracer

from posenc_jax.checks import array_of_rank, bool_rows, integer_positions, require, segments


def _by_row(caller: str, name: str, x: jax.Array | int, batch: int) -> jax.Array:
    """Returns integers, one or [B], as int32 [B, 1]."""
    x = integer_positions(caller, x, name)
    require(
        x.shape in ((), (1,), (batch,)),
        f"{caller}: {name} must be a number or [B] = ({batch},), got shape {x.shape}.",
    )
    return jnp.broadcast_to(x, (batch,))[:, None]


def count_up(batch: int, length: int, start: jax.Array | int = 0) -> jax.Array:
    """Returns positions [B, T] that count up from `start`, a number or [B].

    >>> count_up(2, 3, start=jnp.array([0, 10]))
    Array([[ 0,  1,  2],
           [10, 11, 12]], dtype=int32)
    """
    start = _by_row("count_up", "start", start, batch)
    return start + jnp.arange(length, dtype=jnp.int32)[None]


def from_segment_ids(segment_ids: jax.Array) -> jax.Array:
    """Returns positions that restart at 0 with each segment (packed batches).

    They are the default of attention with `segment_ids`. Tokens of a segment may lie anywhere, and
    padding, of ids below zero, does not count.

    Args:
      segment_ids: integers [B, T].

    >>> from_segment_ids(jnp.array([[0, 0, 0, 1, 1, -1]]))
    Array([[0, 1, 2, 0, 1, 0]], dtype=int32)
    """
    array_of_rank("from_segment_ids", "segment_ids", segment_ids, 2, "[B, T]")
    positions = restarting(integer_positions("from_segment_ids", segment_ids, "segment_ids"))
    _remember(positions, segment_ids)
    return positions


def restarting(ids: jax.Array) -> jax.Array:
    """Returns `from_segment_ids` of int32 [B, T]."""
    grouped, in_runs = are_grouped(ids), _in_runs(ids)
    if not isinstance(grouped, Tracer):
        return in_runs if grouped else _ranks(ids)
    return jax.lax.cond(grouped, lambda: in_runs, lambda: _ranks(ids))


def are_grouped(ids: Any) -> Any:
    """Returns whether the tokens of each segment are in consecutive slots, and segments ascend.

    Args:
      ids: int32 [B, T]; known ones give a known result.
    """
    if isinstance(ids, Tracer):
        most = jax.lax.cummax(ids, axis=1)
    else:
        ids = np.asarray(ids)
        most = np.maximum.accumulate(ids, 1)
    before, after = ids[:, :-1], ids[:, 1:]
    return ((after < 0) | (after == before) | (after > most[:, :-1])).all()


def grouping(ids: jax.Array) -> jax.Array:
    """Returns the slots of tokens by segment, in their order, and then of padding, int32 [B, T]."""
    order = jnp.where(ids < 0, jnp.uint32(2**32 - 1), ids.astype(jnp.uint32))
    return jnp.argsort(order, axis=1, stable=True).astype(jnp.int32)


def _ranks(ids: jax.Array) -> jax.Array:
    """Returns the number of tokens before each one in its segment, int32 [B, T]."""

    def of_rows(ids):
        order = grouping(ids)
        ranks = since(changes(jnp.take_along_axis(ids, order, 1)))
        return jnp.take_along_axis(ranks, jnp.argsort(order, axis=1), 1)

    spec = jax.typeof(ids).sharding.spec
    if any(spec):  # An explicit mesh: rows stay where they are.
        of_rows = jax.sharding.auto_axes(of_rows, out_sharding=spec)
    return of_rows(ids)


_RESTARTING: dict[int, tuple[weakref.ref, weakref.ref]] = {}
"""Positions that are `from_segment_ids` of other arrays, while these are being traced."""


def _remember(positions: jax.Array, segment_ids: jax.Array) -> None:
    """Notes that traced positions are the default for these segments: values are not known."""
    if isinstance(positions, Tracer) and isinstance(segment_ids, jax.Array | np.ndarray):
        key = id(positions)
        forget = weakref.ref(positions, lambda _: _RESTARTING.pop(key, None))
        _RESTARTING[key] = forget, weakref.ref(segment_ids)


def are_restarting(positions: Any, segment_ids: Any) -> bool:
    """Returns whether a helper returned these positions for these segments in this trace."""
    noted = _RESTARTING.get(id(positions))
    return noted is not None and (noted[0]() is positions and noted[1]() is segment_ids)


def are_consecutive(positions: Any, segment_ids: Any) -> bool:
    """Returns whether positions are known to grow by one per slot inside of every segment.

    Args:
      positions: integers [T] or [B, T].
      segment_ids: integers [T] or [B, T], or None for one segment.
    """
    if isinstance(positions, Tracer) or isinstance(segment_ids, Tracer):
        return False
    offsets = np.atleast_2d(np.asarray(positions))
    offsets = offsets - np.arange(offsets.shape[-1])
    ids = np.atleast_2d(np.zeros_like(offsets) if segment_ids is None else np.asarray(segment_ids))
    if not offsets.ndim == ids.ndim == 2 or offsets.shape[1] != ids.shape[1]:
        return False  # They are refused later.
    if len(offsets) != len(ids) and 1 not in (len(offsets), len(ids)):
        return False
    same = (ids[:, 1:] == ids[:, :-1]) & (ids[:, 1:] >= 0)
    return bool(are_grouped(ids) & np.all((offsets[:, 1:] == offsets[:, :-1]) | ~same))


def segment_ids_from_positions(positions: jax.Array) -> jax.Array:
    """Returns segment ids of packed rows that positions alone describe.

    Some data collators give position ids that begin again with each document, and no segment ids.
    Attention takes positions as the order of tokens, so that without segment ids the documents of
    a row see each other. A segment begins where a position is not greater than the one before.
    Padding needs -1: `jnp.where(mask, segment_ids_from_positions(positions), -1)`.

    Args:
      positions: integers [B, T], tokens in order.

    >>> segment_ids_from_positions(jnp.array([[0, 1, 2, 0, 1, 0]]))
    Array([[0, 0, 0, 1, 1, 2]], dtype=int32)
    """
    array_of_rank("segment_ids_from_positions", "positions", positions, 2, "[B, T]")
    positions = integer_positions("segment_ids_from_positions", positions)
    restarts = positions <= jnp.roll(positions, 1, axis=1)
    first = jnp.arange(positions.shape[1])[None] == 0
    return jnp.cumsum(restarts & ~first, axis=1, dtype=jnp.int32)


@functools.partial(jax.jit, inline=True)
def _in_runs(ids: jax.Array) -> jax.Array:
    """Returns int32 [B, T]: the number of tokens since the id changed."""
    return since(changes(ids))


def changes(ids: jax.Array) -> jax.Array:
    """Returns bool [B, T]: whether the id differs from the previous one; true for the first."""
    changed = ids[:, 1:] != ids[:, :-1]
    return jnp.pad(changed, ((0, 0), (1, 0)), constant_values=True)[:, : ids.shape[1]]


def since(starts: jax.Array) -> jax.Array:
    """Returns int32 [B, T]: the number of tokens since the last start; the first token is one."""
    index = jnp.arange(starts.shape[1], dtype=jnp.int32)[None]
    return index - jax.lax.cummax(jnp.where(starts, index, 0), axis=1)


def from_padding_mask(mask: jax.Array, start: jax.Array | int = 0) -> tuple[jax.Array, jax.Array]:
    """Returns `(positions, segment_ids)` for rows with padding on the left, right or in between.

    Padding has segment id -1, and positions do not count it.

    Args:
      mask: bool [B, T], true for tokens.
      start: the position of the first token of each row, a number or [B], such as
        `cache.next_positions`.

    >>> from_padding_mask(jnp.array([[False, False, True, True]]))[0]
    Array([[0, 0, 0, 1]], dtype=int32)
    """
    mask, at_zero = (
        bool_rows("from_padding_mask", "mask", mask),
        isinstance(start, int) and start == 0,
    )
    start = _by_row("from_padding_mask", "start", start, mask.shape[0])
    positions = start + jnp.maximum(jnp.cumsum(mask, axis=1, dtype=jnp.int32) - 1, 0)
    segment_ids = jnp.where(mask, 0, -1).astype(jnp.int32)
    if at_zero:
        _remember(positions, segment_ids)
    return positions, segment_ids


def digit_places(
    digits: jax.Array,
    *,
    shift: jax.Array | int = 0,
    before: jax.Array | int = 0,
    segment_ids: jax.Array | None = None,
) -> jax.Array:
    """Returns the index of each digit in its number, from 1, and 0 for other tokens (Abacus).

    With `LearnedAbsolute`, digits of equal significance then share an embedding in numbers of
    any length, provided that numbers are written least significant digit first. In training
    the authors draw one shift from 0 to 99 per batch.

    Args:
      digits: bool [B, T], true for digits; tokens in order.
      shift: added to the indices of digits, a number or [B].
      before: the index, without shift, of the token before the first one, a number or [B]; a
        decode step may start within a number.
      segment_ids: int32 [B, T]; a number ends with its segment and at padding. Default: one
        segment.

    >>> digit_places(jnp.array([[False, True, True, False, True]]))
    Array([[0, 1, 2, 0, 1]], dtype=int32)
    """
    digits = bool_rows("digit_places", "digits", digits)
    ids = segments("digit_places", segment_ids, digits.shape)
    starts = changes(digits) | changes(ids)
    first = jnp.cumsum(starts & (ids >= 0), axis=1, dtype=jnp.int32) == 1
    shift, before = (
        _by_row("digit_places", name, x, digits.shape[0])
        for name, x in (("shift", shift), ("before", before))
    )
    places = since(starts) + 1 + jnp.where(first, before, 0)
    return jnp.where(digits, places + shift, 0)


def bilevel(
    ends: jax.Array,
    *,
    start: tuple[jax.Array | int, jax.Array | int] = (0, 0),
    segment_ids: jax.Array | None = None,
) -> jax.Array:
    """Returns the index within the sentence and the index of the sentence (BiPE), int32 [2, B, T].

    The two axes are for two schemes (`posenc_jax.on_axis`). The authors clip the first index
    to the last row of their table, and multiply ALiBi's slopes by 96.

    Args:
      ends: bool [B, T], true for the last token of each sentence; tokens in order.
      start: both indices of the first token, numbers or [B], for decode steps.
      segment_ids: int32 [B, T]; both indices restart with each segment and after padding. Default:
        one segment.

    >>> bilevel(jnp.array([[False, True, False, False]]))[:, 0]
    Array([[0, 1, 0, 1],
           [0, 0, 1, 1]], dtype=int32)
    """
    ends = bool_rows("bilevel", "ends", ends)
    ids = segments("bilevel", segment_ids, ends.shape)
    before = jnp.pad(ends & (ids >= 0), ((0, 0), (1, 0)))[:, :-1]
    new = changes(ids)
    first_segment = jnp.cumsum(new & (ids >= 0), axis=1, dtype=jnp.int32) == 1
    require(
        isinstance(start, tuple | list) and len(start) == 2,
        f"bilevel: start must be two indices, of the token and of the sentence, got {start!r}.",
    )
    place, sentence = (_by_row("bilevel", "start", x, ends.shape[0]) for x in start)
    ended = jnp.cumsum(before & ~new, axis=1, dtype=jnp.int32)
    since_new = jax.lax.cummax(jnp.where(new, ended, 0), axis=1)
    numbers = ended - since_new + jnp.where(first_segment, sentence, 0)
    continues = first_segment & (ended == 0)
    places = since(before | new) + jnp.where(continues, place, 0)
    return jnp.stack([places, numbers])
