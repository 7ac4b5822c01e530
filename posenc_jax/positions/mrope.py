r"""Coordinates of text with images and videos, for M-RoPE.

    text token           c = (n, n, n),  and n grows by 1
    patch (t, h, w)      c = (n + t, n + h, n + w),  and after a T x H x W grid n grows by
                         max(T, H, W)

so an image takes max(H, W) coordinates, not H W. After it a token's coordinate is less than its
position; decode steps add the difference, `delta`, to the positions of a row.

transformers 5 lets n grow by max(H, W), with which a video of more frames than rows and columns
shares coordinates with the text after it; Qwen's own code and transformers 4 count time too.

Paper: Wang et al. Qwen2-VL. 2024. https://arxiv.org/abs/2409.12191
Reference code: QwenLM/Qwen2.5-VL, qwen-vl-finetune/qwenvl/data/rope2d.py (get_rope_index).
"""

import functools

import jax
import jax.numpy as jnp
import numpy as np
from jax.core import Tracer

from posenc_jax.checks import bool_rows, integer_positions, require, segments
from posenc_jax.positions.packing import changes


def mrope_coordinates(
    is_vision: jax.Array,
    grids: jax.Array,
    *,
    segment_ids: jax.Array | None = None,
    time_step: jax.Array | float = 1,
) -> tuple[jax.Array, jax.Array]:
    """Returns `(coordinates, delta)`, int32 [3, B, T] and [B].

    The token after a row has the coordinate `position + delta` on all axes, with positions
    counted from 0 in its segment. Give that as `coordinates` [B, 1] when decoding.

    Args:
      is_vision: bool [B, T], true for patches of images and videos.
      grids: integers [B, G, 3]: time, rows and columns of each image or video of a row, in
        order, counted in tokens (after merging patches), padded with zeros. If text separates
        the frames of a video (Qwen3-VL), each frame is a grid.
      segment_ids: integers [B, T]; coordinates restart with each segment, and are 0 in padding,
        below zero.
      time_step: the distance between frames, a number or [B, G]; times are rounded down. For
        Qwen2.5-VL, seconds per frame times tokens per second.

    Raises:
      ValueError: for shapes that do not match, or concrete grids of another number of patches.

    >>> text_image_text = jnp.array([[False, True, True, False]])
    >>> coordinates, delta = mrope_coordinates(text_image_text, jnp.array([[[1, 1, 2]]]))
    >>> coordinates[:, 0], delta
    (Array([[0, 1, 1, 3],
           [0, 1, 1, 3],
           [0, 1, 2, 3]], dtype=int32), Array([0], dtype=int32))
    """
    is_vision = bool_rows("mrope_coordinates", "is_vision", is_vision)
    batch = is_vision.shape[0]
    grids = integer_positions("mrope_coordinates", grids, "grids")
    require(
        grids.ndim == 3 and grids.shape[0] == batch and grids.shape[2] == 3,
        f"mrope_coordinates: grids must be [B, G, 3] with B={batch}, got {grids.shape}.",
    )
    segment_ids = segments("mrope_coordinates", segment_ids, is_vision.shape)
    valid = segment_ids >= 0
    vision = is_vision & valid
    _check(vision, grids)
    step = jnp.asarray(time_step)
    require(
        step.shape in ((), grids.shape[:2]),  # One per row would be taken for one per grid.
        f"mrope_coordinates: time_step must be a number or [B, G] = {grids.shape[:2]}, got "
        f"{step.shape}.",
    )
    step = jnp.broadcast_to(step, grids.shape[:2])
    step = step.astype(jnp.float32 if jnp.issubdtype(step.dtype, jnp.floating) else jnp.int32)
    grids = jnp.pad(grids, ((0, 0), (0, 1), (0, 0)))  # The grid of tokens after the last grid.
    step = jnp.pad(step, ((0, 0), (0, 1)))

    def frame(t, step):
        return (t.astype(step.dtype) * step).astype(jnp.int32)

    frames, height, width = jnp.moveaxis(grids, -1, 0)
    size = frames * height * width
    ends = jnp.cumsum(size, 1)
    grown = jnp.maximum(jnp.maximum(frame(frames - 1, step) + 1, height), width)
    grown = jnp.where(size > 0, grown, 0)

    patches, texts = vision.astype(jnp.int32), (valid & ~vision).astype(jnp.int32)
    before = jnp.cumsum(patches, 1) - patches
    find = jax.vmap(functools.partial(jnp.searchsorted, side="right", method="compare_all"))
    grid = jnp.minimum(find(ends, before), grids.shape[1] - 1).astype(jnp.int32)
    pick = functools.partial(jnp.take_along_axis, indices=grid, axis=1)
    n = jnp.cumsum(texts, 1) - texts + pick(jnp.cumsum(grown, 1) - grown)

    # Padding inside of a segment does not end it.
    slots = jnp.arange(valid.shape[1], dtype=jnp.int32)[None]
    known = jnp.maximum(jax.lax.cummax(jnp.where(valid, slots, -1), axis=1), 0)
    begins = changes(jnp.take_along_axis(segment_ids, known, 1))
    index = jnp.cumsum(valid, axis=1, dtype=jnp.int32) - 1
    index -= jax.lax.cummax(jnp.where(begins, index, 0), axis=1)
    first = jax.lax.cummax(jnp.where(begins, n, 0), axis=1)
    place = before - pick(ends - size)
    columns, area = jnp.maximum(pick(width), 1), jnp.maximum(pick(height * width), 1)
    patch = (frame(place // area, pick(step)), place % area // columns, place % columns)
    coordinates = (n - first)[None] + jnp.where(vision[None], jnp.stack(patch), 0)
    coordinates = jnp.where(valid[None], coordinates, 0)

    following = n - first + jnp.where(vision, pick(grown), texts)
    if not valid.shape[1]:
        return coordinates, jnp.zeros(batch, jnp.int32)
    last = jnp.max(jnp.where(valid, slots, 0), 1, keepdims=True)
    delta = jnp.take_along_axis(following - index - 1, last, 1)[:, 0]
    return coordinates, jnp.where(valid.any(1), delta, 0)


def _check(vision, grids) -> None:
    """Raises unless concrete grids have the number of patches of their rows."""
    if isinstance(vision, Tracer) or isinstance(grids, Tracer):
        return
    have, want = np.asarray(vision).sum(1), np.asarray(grids).prod(-1).sum(1)
    require(
        bool((np.asarray(grids) >= 0).all()) and np.array_equal(have, want),
        f"mrope_coordinates: the grids of each row need {want.tolist()} vision tokens, and "
        f"there are {have.tolist()}.",
    )
