"""Coordinates of images in text against the loop of Qwen2-VL, and those of tokens after them."""

import numpy as np
import pytest

import posenc_jax as pe
from posenc_jax.positions import from_padding_mask
from tests.support import run, slow


def qwen(kinds, grids, step=1):
    """get_rope_index of Qwen2.5-VL's rope2d.py, token by token, for one row without padding.

    `kinds` is text, True where a patch is; every run of patches is one grid.
    """
    out, grids, token = [], list(zip(grids, np.broadcast_to(step, len(grids)), strict=True)), 0
    while token < len(kinds):
        start = max((max(c) for c in out), default=-1) + 1
        if not kinds[token]:
            out.append((start, start, start))
            token += 1
            continue
        (frames, rows, columns), step = grids.pop(0)
        for t, h, w in np.ndindex(frames, rows, columns):
            out.append((start + int(t * step), start + h, start + w))
        token += frames * rows * columns
    return np.array(out).T, max(max(c) for c in out) + 1 - len(kinds)


def coordinates_of(kinds, grids, **options):
    return run(_coordinates_of, (), kinds, grids, options)


def _coordinates_of(kinds, grids, options):
    return pe.mrope_coordinates(kinds, grids, **options)


def row(*parts):
    """Numbers are lengths of text, tuples are grids; returns kinds and grids."""
    kinds, grids = [], []
    for part in parts:
        if isinstance(part, tuple):
            grids.append(part)
        kinds += [isinstance(part, tuple)] * int(np.prod(part))
    return np.array(kinds), np.array(grids, np.int32).reshape(-1, 3)


ROWS = [
    row(3, (1, 2, 2), 2),
    row(1, (1, 5, 3), 4, (4, 2, 2), 1),
    row((2, 3, 2), 7),
    row(2, (1, 1, 9)),
    row(1, (6, 1, 1), (1, 2, 3), 5),
    row(63),
]


@pytest.mark.parametrize("step", [1, 0, 2.7])
def test_matches_the_loop_of_qwen(step):
    """Every row once before text and once after it, so that all are of one length."""
    rows = []
    for kinds, grids in ROWS:
        text = np.zeros(63 - len(kinds), bool)
        grids = np.pad(grids, ((0, 3 - len(grids)), (0, 0)))
        rows += [(np.concatenate(both), grids) for both in ((kinds, text), (text, kinds))]
    stacked = map(np.stack, zip(*rows, strict=True))
    steps = np.float32(step) * np.arange(1, 4, dtype=np.float32)  # One for each grid of a row.
    steps = steps if step % 1 else steps.astype(np.int32)
    options = {"time_step": np.tile(steps, (len(rows), 1))}
    got, delta = map(np.asarray, coordinates_of(*stacked, **options))
    assert got.dtype == delta.dtype == np.int32
    for b, (kinds, grids) in enumerate(rows):
        expected, expected_delta = qwen(kinds, grids, steps)
        np.testing.assert_array_equal(got[:, b], expected)
        assert delta[b] == expected_delta


@pytest.mark.parametrize("side", ["left", "right", "between"])
def test_rows_of_a_padded_batch_are_rows_alone(side):
    length = max(len(kinds) for kinds, _ in ROWS)
    kinds = np.zeros((len(ROWS), length), bool)
    segments, grids = np.full((len(ROWS), length), -1), np.zeros((len(ROWS), 3, 3), int)
    places = []
    for b, (k, g) in enumerate(ROWS):
        slots, first = np.arange(len(k)), {"left": 0, "right": len(k), "between": 2}[side]
        places.append(np.where(slots < first, slots, slots + length - len(k)))
        kinds[b, places[b]], segments[b, places[b]], grids[b, : len(g)] = k, 0, g
    coordinates, delta = map(np.asarray, coordinates_of(kinds, grids, segment_ids=segments))
    for b, (k, g) in enumerate(ROWS):
        expected, expected_delta = qwen(k, g)
        np.testing.assert_array_equal(coordinates[:, b, places[b]], expected)
        assert delta[b] == expected_delta
    assert np.all(coordinates[:, segments < 0] == 0)


def test_packed_segments_restart():
    kinds = np.concatenate([k for k, _ in ROWS])[None]
    grids = np.concatenate([g for _, g in ROWS])[None]
    segments = np.concatenate([np.full(len(k), i) for i, (k, _) in enumerate(ROWS)])[None]
    coordinates, delta = coordinates_of(kinds, grids, segment_ids=segments)
    expected = [qwen(k, g) for k, g in ROWS]
    np.testing.assert_array_equal(coordinates[:, 0], np.concatenate([w for w, _ in expected], 1))
    assert delta.tolist() == [expected[-1][1]]


def test_rows_without_tokens():
    kinds, grids = np.zeros((2, 0), bool), np.zeros((2, 0, 3), int)
    coordinates, delta = coordinates_of(kinds, grids)
    assert coordinates.shape == (3, 2, 0) and np.array_equal(delta, [0, 0])


@slow
def test_steps_after_an_image_go_on_with_delta():
    """Positions of a cache, which count tokens, and delta are the coordinates of later tokens."""
    prompts, more = [row(3, (1, 3, 2), 2), row(1, (2, 2, 2), 6)], 4
    kinds, segments = np.zeros((2, 2, 15 + more), int)
    segments[0, :4] = -1
    for whole, (of_prompt, _) in zip(kinds, prompts, strict=True):
        whole[15 - len(of_prompt) : 15] = of_prompt
    kinds, grids = kinds == 1, np.stack([grids for _, grids in prompts])
    _, delta = coordinates_of(kinds[:, :15], grids, segment_ids=segments[:, :15])
    everything, _ = coordinates_of(kinds, grids, segment_ids=segments)
    positions, _ = run(from_padding_mask, (), segments >= 0)
    later = (positions + delta[:, None])[:, 15:]
    np.testing.assert_array_equal(everything[..., 15:], np.stack([later] * 3))


def error(shape, grids, message, **options):
    arrays = {"is_vision": np.ones(shape, bool), "grids": np.ones(grids, int)}
    return pe.mrope_coordinates, arrays | options, f"mrope_coordinates: .*{message}"


ERRORS = [
    error((4,), (1, 1, 3), r"is_vision must be \[B, T\], got shape \(4,\)"),
    error((2, 4), (1, 3), r"grids must be \[B, G, 3\] with B=2, got \(1, 3\)"),
    error((2, 4), (1, 1, 3), r"grids must be \[B, G, 3\] with B=2, got \(1, 1, 3\)"),
    error((1, 4), (1, 2, 3), r"need \[2\] vision tokens, and there are \[4\]"),
    error((1, 4), (1, 4, 3), r"time_step must be .*\(1, 4\), got \(4,\)", time_step=np.ones(4)),
    error((1, 4), (1, 4, 3), r"segment_ids must be \[B, T\] = \(1, 4", segment_ids=np.zeros(4)),
]
