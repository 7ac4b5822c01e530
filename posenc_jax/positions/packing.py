"""Positions of tokens, as data: for packed, padded and prefixed batches.

Positions, int32 [B, T], say in which order tokens came; which of them belong together, and which
are padding, is said by `segment_ids`: equal numbers attend to each other, a number below zero
marks padding. Coordinates, what a scheme encodes in their place, may come from the text
(`digit_places`, `bilevel`) or be drawn at random (`randomized`, `shifted`, `continuous`,
`skip_wise`; see `posenc_jax.positions.random`).

Papers: McLeish et al. Transformers Can Do Arithmetic with the Right Embeddings. 2024.
https://arxiv.org/abs/2405.17399
He et al. Two Stones Hit One Bird: Bilevel Positional Encoding for Better Length Extrapolation.
2024. https://arxiv.org/abs/2401.16421
Reference code: mcleish7/arithmetic, abacus.py; zhenyuhe00/BiPE, my_modeling_llama_bipe_rope.py.
"""

import jax
import jax.numpy as jnp

from posenc_jax.checks import array_of_rank, integer_positions, require


def count_up(batch: int, length: int, start: jax.Array | int = 0) -> jax.Array:
    """Returns `start, start + 1, ...` for every row; `start` is a number or [B].

    >>> count_up(2, 3, start=jnp.array([0, 10]))
    Array([[ 0,  1,  2],
           [10, 11, 12]], dtype=int32)
    """
    start = jnp.broadcast_to(integer_positions("count_up", start, "start"), (batch,))
    return start[:, None] + jnp.arange(length, dtype=jnp.int32)[None]


def from_segment_ids(segment_ids: jax.Array) -> jax.Array:
    """Returns positions that restart at 0 wherever the segment changes (packed batches).

    Args:
      segment_ids: integers [B, T]; the tokens of a segment stand side by side.

    >>> from_segment_ids(jnp.array([[0, 0, 0, 1, 1, -1]]))
    Array([[0, 1, 2, 0, 1, 0]], dtype=int32)
    """
    array_of_rank("from_segment_ids", "segment_ids", segment_ids, 2, "[B, T]")
    return _since(_changes(segment_ids))


def _changes(ids: jax.Array) -> jax.Array:
    """Returns bool [B, T]: whether a token differs from the one before. The first does."""
    changed = ids[:, 1:] != ids[:, :-1]
    return jnp.pad(changed, ((0, 0), (1, 0)), constant_values=True)


def _since(starts: jax.Array) -> jax.Array:
    """Returns int32 [B, T]: how many tokens ago the last start was; the first token is one."""
    index = jnp.arange(starts.shape[1], dtype=jnp.int32)[None]
    return index - jax.lax.cummax(jnp.where(starts, index, 0), axis=1)


def from_padding_mask(mask: jax.Array) -> tuple[jax.Array, jax.Array]:
    """Returns `(positions, segment_ids)` for rows padded on the left or on the right.

    Args:
      mask: bool [B, T], true where there is a token. The first token of a row has
        position 0 wherever it stands; padding has segment -1.

    >>> from_padding_mask(jnp.array([[False, False, True, True]]))[0]
    Array([[0, 0, 0, 1]], dtype=int32)
    """
    array_of_rank("from_padding_mask", "mask", mask, 2, "[B, T]")
    mask = jnp.asarray(mask, bool)
    positions = jnp.maximum(jnp.cumsum(mask, axis=1, dtype=jnp.int32) - 1, 0)
    return positions, jnp.where(mask, 0, -1).astype(jnp.int32)


def digit_places(
    digits: jax.Array,
    *,
    shift: jax.Array | int = 0,
    before: jax.Array | int = 0,
    segment_ids: jax.Array | None = None,
) -> jax.Array:
    """Returns the place of each digit in its number, from 1, and 0 for other tokens (Abacus).

    For `LearnedAbsolute` positions: digits of one place then share a vector at any length of the
    number. They must be written with the lowest digit first. In training the authors draw one shift
    from 0 to 99 for each batch.

    Args:
      digits: bool [B, T], true where a token is a digit; tokens in their order.
      shift: what to add to the places, a number or [B].
      before: the place, without shift, of the token before the first one, a number or [B]: a
        number goes on in a decode step.
      segment_ids: int32 [B, T]; numbers end where segments do. Default: one segment.

    >>> digit_places(jnp.array([[False, True, True, False, True]]))
    Array([[0, 1, 2, 0, 1]], dtype=int32)
    """
    array_of_rank("digit_places", "digits", digits, 2, "[B, T]")
    digits = jnp.asarray(digits, bool)
    starts = _changes(digits)
    if segment_ids is not None:
        starts = starts | _changes(_like("digit_places", segment_ids, digits))
    first = jnp.cumsum(starts, axis=1, dtype=jnp.int32) == 1
    shift, before = (
        jnp.broadcast_to(integer_positions("digit_places", x, name), digits.shape[:1])[:, None]
        for name, x in (("shift", shift), ("before", before))
    )
    places = _since(starts) + 1 + jnp.where(first, before, 0)
    return jnp.where(digits, places + shift, 0)


def bilevel(
    ends: jax.Array,
    *,
    start: tuple[jax.Array | int, jax.Array | int] = (0, 0),
    segment_ids: jax.Array | None = None,
) -> jax.Array:
    """Returns the place in a sentence and the number of the sentence (BiPE), int32 [2, B, T].

    For two schemes, each on an axis of its own (`posenc_jax.on_axis`). The authors let the places
    stop at the last row of their table, and ALiBi's slopes be 96 times as steep.

    Args:
      ends: bool [B, T], true where a token ends a sentence, which it belongs to; tokens in
        their order.
      start: place and sentence of the first token, numbers or [B]: for decode steps.
      segment_ids: int32 [B, T]; both restart where segments do. Default: one segment.

    >>> bilevel(jnp.array([[False, True, False, False]]))[:, 0]
    Array([[0, 1, 0, 1],
           [0, 0, 1, 1]], dtype=int32)
    """
    array_of_rank("bilevel", "ends", ends, 2, "[B, T]")
    before = jnp.pad(jnp.asarray(ends, bool)[:, :-1], ((0, 0), (1, 0)))
    new = _changes(
        jnp.zeros_like(before) if segment_ids is None else _like("bilevel", segment_ids, before)
    )
    first_segment = jnp.cumsum(new, axis=1, dtype=jnp.int32) == 1
    place, sentence = (
        jnp.broadcast_to(integer_positions("bilevel", x, "start"), before.shape[:1])[:, None]
        for x in start
    )
    ended = jnp.cumsum(before & ~new, axis=1, dtype=jnp.int32)
    since_new = jax.lax.cummax(jnp.where(new, ended, 0), axis=1)
    numbers = ended - since_new + jnp.where(first_segment, sentence, 0)
    goes_on = first_segment & (ended == 0)
    places = _since(before | new) + jnp.where(goes_on, place, 0)
    return jnp.stack([places, numbers])


def _like(where: str, segment_ids: jax.Array, tokens: jax.Array) -> jax.Array:
    segments = integer_positions(where, segment_ids, "segment_ids")
    require(
        segments.shape == tokens.shape,
        f"{where}: segment_ids must be [B, T] = {tokens.shape}, got {segments.shape}.",
    )
    return segments
