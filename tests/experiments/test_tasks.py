"""Tasks against definitions written with loops."""

import dataclasses
import pathlib
import re

import jax
import numpy as np
import pytest

import posenc_jax as pe
from experiments.tasks import TASKS, KBack, Kth, Text
from experiments.tasks.base import Data

CONFIGS = pathlib.Path(__file__).parents[2] / "configs"


def drawn(sample, seed, *sizes):
    """Returns the arrays that a task draws, as NumPy arrays."""
    return [np.asarray(x) for x in jax.jit(lambda key: sample(key, *sizes))(jax.random.key(seed))]


def test_a_study_a_claim_or_a_tour_uses_every_task():
    texts = [path.read_text() for path in CONFIGS.rglob("*.toml")]
    lines = [line for text in texts for line in re.findall(r"(?m)^tasks? = .*", text)]
    assert not set(TASKS) - set(re.findall(r'"(\w+)"', "\n".join(lines)))


@pytest.mark.parametrize("offset", [1, 2, 4, 7])
def test_kback_answers_are_k_places_back(offset):
    task = KBack(offset=offset)
    tokens, mask = drawn(task.sample, offset, 8, 60)
    assert tokens.shape == mask.shape == (8, 61)
    assert tokens.dtype == np.int32 and mask.dtype == np.float32
    assert mask.sum() > 8
    for row, counts in zip(tokens, mask, strict=True):
        for t, token in enumerate(row):
            after_query = t > 0 and row[t - 1] == 0
            assert counts[t] == after_query
            if after_query:
                assert token == row[t - 1 - offset] > 0
                assert t - 1 >= offset
            assert 0 <= token < task.vocab_size


def test_kback_query_rate_and_uniform_symbols():
    task = KBack()
    tokens, mask = drawn(task.sample, 0, 512, 64)
    assert 0.13 < mask.sum() / (512 * 60) < 0.16  # 0.25 x 0.75 x 0.75, a little more at the start
    counts = np.bincount(tokens[tokens > 0], minlength=17)[1:]
    assert counts.min() > 0.9 * counts.mean()


def test_kback_test_lengths_split_the_positions_of_queries():
    task = KBack(test_lengths=(32, 48, 64))
    tokens, mask, index = drawn(task.sample_test, 0, 4)
    assert tokens.shape == mask.shape == index.shape == (4, 65)
    for t in range(1, 65):
        query = t - 1
        assert (index[:, t] == sum(query >= n for n in (32, 48, 64))).all()


def test_kth_answer_is_the_indexed_symbol():
    task = Kth()
    tokens, mask = drawn(task.sample, 0, 256, 32)
    lengths = set()
    for row, counts in zip(tokens, mask, strict=True):
        (answer_at,) = np.flatnonzero(counts)
        n = answer_at - 2
        lengths.add(int(n))
        index = row[n + 1] - 2 - task.symbols
        assert row[0] == 1
        assert 0 <= index < min(n, task.indices)
        assert row[answer_at] == row[1 + index]
        assert ((row[1 : n + 1] >= 2) & (row[1 : n + 1] < 2 + task.symbols)).all()
        assert (row[answer_at + 1 :] == 0).all()
    assert lengths == set(range(4, 31))


def test_kth_test_rows_fill_their_lengths():
    task = Kth(test_lengths=(32, 48, 64))
    _, mask, index = drawn(task.sample_test, 0, 9)
    for row, (counts, which) in enumerate(zip(mask, index[:, 0], strict=True)):
        (answer_at,) = np.flatnonzero(counts)
        assert which == row % 3
        assert answer_at <= 32 if which == 0 else answer_at == task.test_lengths[which]


@pytest.mark.parametrize("task", [KBack(), Kth()], ids=lambda t: t.name)
def test_samples_are_functions_of_the_key(task):
    sample = jax.jit(lambda key: task.sample(key, 4, 32))
    first, again, other = (sample(jax.random.key(seed)) for seed in (3, 3, 4))
    for a, b in zip(first, again, strict=True):
        np.testing.assert_array_equal(a, b)
    assert not np.array_equal(first[0], other[0])


def small_text(**changes):
    return dataclasses.replace(
        Text(train_length=8, test_lengths=(8, 16, 32), eval_bytes=64, stride=4, **changes),
        sliding_lengths=(8, 16, 32),
    )


def test_text_samples_windows_of_the_data():
    data = np.arange(200, dtype=np.uint8)
    tokens, mask = drawn(small_text().sample, 0, 64, 8, jax.numpy.asarray(data))
    np.testing.assert_array_equal(tokens, tokens[:, :1] + np.arange(9))
    assert (mask == 1).all() and tokens.min() < 20 and 180 < tokens.max() <= 199


@pytest.mark.parametrize("size", [130, 131, 1000])
def test_all_lengths_and_modes_score_the_same_bytes(size):
    task = small_text()
    held_out = np.arange(size) % 65536
    expected = None
    for length in task.test_lengths:
        for mode in ("nonoverlapping", "sliding"):
            windows, count = task.windows(held_out, length, mode)
            assert windows.shape[1] == length + 1
            np.testing.assert_array_equal(windows, windows[:, :1] + np.arange(length + 1))
            scored = np.sort(windows[:, -count:].ravel())
            assert len(set(scored)) == len(scored) == task.eval_bytes
            expected = scored if expected is None else expected
            np.testing.assert_array_equal(scored, expected)
            least = length - task.stride if mode == "sliding" else 0
            assert windows.shape[1] - count - 1 >= least


def test_validation_text_is_scored_alone_at_the_training_length(monkeypatch):
    """The losses are the bytes themselves: the score is the mean of the validation text's bytes."""
    held_out, validation = np.full(200, 3, np.uint8), np.arange(200, dtype=np.uint8)
    monkeypatch.setattr("experiments.tasks.text.structure", lambda *sizes: None)
    monkeypatch.setattr(
        "experiments.tasks.text._bits",
        lambda graphdef, params, windows, count: windows[None, :, -count:].astype(float),
    )
    task = small_text(validation=True, variants=())
    data = Data(held_out=(held_out, validation))
    scores = {(e.mode, e.length): e.values for e in task.evaluate(pe.NoPE(), None, [0], data)}
    windows, count = task.windows(validation, 8, "nonoverlapping")
    assert scores["validation", 8] == [windows[:, -count:].mean().round(5)]
    assert ("validation", 16) not in scores and scores["sliding", 32] == [3.0]
    assert (task.selection_view, small_text().selection_view) == ("validation", "nonoverlapping")
    short = task.at_trained_length()
    short.check()
    assert len(short.evaluate(pe.NoPE(), None, [0], data)) == 2
