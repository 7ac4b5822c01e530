"""Rows, streams and windows of tasks against definitions written as loops over tokens."""

import dataclasses
import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import posenc_jax as pe
from experiments.errors import ConfigError, CorpusError
from experiments.models.model import initialize
from experiments.settings.common import Model
from experiments.tasks import (
    Copy,
    FlipFlop,
    Induction,
    KBack,
    Kth,
    Majority,
    Masked,
    Sort,
    Text,
)
from experiments.tasks.base import Data
from experiments.tasks.lookup import Rows
from experiments.tasks.lookup import held_out as held_out_rows
from tests.experiments.one_line import raises
from tests.support import slow, slow_but

# Each function takes the tokens of a row without padding and returns the answers by place.


def parts(row):
    """Splits a row at its first separator; returns the question and the place of the answer."""
    assert row[0] == 1
    separator = row.index(2)
    return row[1:separator], separator + 1


def answers(row, tokens):
    """Returns the answers that fill a row after its separator, by place."""
    _, first = parts(row)
    assert len(row) == first + len(tokens)
    return {first + i: token for i, token in enumerate(tokens)}


def copy(task, row):
    x, _ = parts(row)
    assert all(3 <= token < 3 + task.symbols for token in x)
    assert task.kind != "unique" or len(set(x)) == len(x)
    return answers(row, [*x, 2])


def sort(task, row):
    x, _ = parts(row)
    assert len(set(x)) == len(x)
    return answers(row, [*sorted(x), 2])


def induction(task, row):
    x, first = parts(row)
    assert len(set(x)) == len(x)
    start = x.index(row[first])
    by_place = answers(row, x[start : start + task.repeated])
    del by_place[first]  # The first symbol is given.
    return by_place


def majority(task, row):
    x, _ = parts(row)
    assert len(x) % 2 == 1
    return answers(row, [max((3, 4), key=x.count)])


def flip_flop(task, row):
    by_place, last = {}, None
    for i in range(0, len(row) - 1, 2):
        kind, bit = row[i : i + 2]
        assert kind in (1, 2, 3) and bit in (4, 5) and (i or kind == 1)
        if kind == 3:
            by_place[i + 1] = last
        if kind == 1:
            last = bit
    return by_place


def kback(task, row):
    places = [i + 1 for i, token in enumerate(row[:-1]) if token == 0]
    assert all(i > task.offset for i in places)
    return {i: row[i - 1 - task.offset] for i in places}


def kth(task, row):
    *x, index, _ = row[1:]
    assert row[0] == 1 and all(2 <= token < 2 + task.symbols for token in x)
    index -= 2 + task.symbols
    assert 0 <= index < min(len(x), task.indices)
    return {len(row) - 1: x[index]}


CASES = {
    "copy": (Copy(), copy),
    "copy-unique": (Copy(kind="unique"), copy),
    "sort": (Sort(), sort),
    "induction": (Induction(), induction),
    "majority": (Majority(), majority),
    "flip_flop": (FlipFlop(), flip_flop),
    "kback": (KBack(), kback),
    "kth": (Kth(), kth),
}


def drawn(sample, *sizes):
    """Returns the arrays that a task draws, as numpy arrays."""
    return [np.asarray(x) for x in jax.jit(lambda key: sample(key, *sizes))(jax.random.key(0))]


def check(name, tokens, mask):
    """Compares the answers of a task with its loop; returns the lengths of rows."""
    task, loop = CASES[name]
    assert tokens.dtype == np.int32 and mask.dtype == np.float32
    assert 0 <= int(tokens.min()) and int(tokens.max()) < task.vocab_size
    sizes = []
    for row, counts in zip(tokens.tolist(), mask, strict=True):
        row = row[: row.index(0)] if isinstance(task, Rows | Kth) and 0 in row else row
        expected = loop(task, row)
        if counts.any() or name in STREAMS:
            assert set(np.flatnonzero(counts).tolist()) == set(expected)
        assert all(row[place] == token for place, token in expected.items())
        sizes.append(len(row))
    return np.asarray(sizes)


@jax.jit
def _held_out(rows):
    return held_out_rows(rows)


def held_out(rows):
    """Which rows are held out of training, by one program for rows of all lengths."""
    return np.asarray(_held_out(np.pad(rows, ((0, 0), (0, 129 - rows.shape[1])))))


STREAMS = [name for name, (task, _) in CASES.items() if not isinstance(task, Rows)]


@pytest.mark.parametrize("name", STREAMS)
def test_streams_equal_a_loop(name):
    task, _ = CASES[name]
    task.check()
    sizes = check(name, *drawn(task.sample, 256, task.train_length))
    assert name != "kth" or {*sizes} == {*range(7, 34)}


@pytest.mark.parametrize("name", slow_but([x for x in CASES if x not in STREAMS], "copy", "sort"))
def test_rows_equal_a_loop(name):
    task, _ = CASES[name]
    task.check()
    tokens, mask, index = drawn(task.sample_test, 60)
    sizes = check(name, tokens, mask)
    trained, answered = index[:, 0] == 0, mask.any(1)
    assert answered[~trained].all() and held_out(tokens)[trained & answered].all()
    assert answered[trained].mean() > 0.6 and len(set(sizes[trained])) > 4
    beyond = np.asarray(task.test_lengths)[index[~trained, 0]] + 1 - sizes[~trained]
    assert 0 <= beyond.min() and beyond.max() < 6  # The longest row that fits.


@pytest.mark.parametrize("name", ["copy-unique", pytest.param("majority", marks=slow)])
def test_held_out_rows_are_not_trained_on(name):
    task, _ = CASES[name]
    tokens, mask = drawn(task.sample, 200, 32)
    assert len(set(check(name, tokens, mask))) > 10  # n is random.
    answered = mask.any(1)
    assert answered.mean() > 0.95 and not held_out(tokens)[answered].any()


def test_all_symbols_occur_at_every_length():
    """With more symbols than a row has tokens, training rows hold the symbols of longer rows."""
    task = Copy(kind="unique", symbols=64, train_length=17, test_lengths=(17, 64))
    tokens, _ = drawn(task.sample, 200, task.train_length)
    assert set(tokens[:, 1:5].ravel()) == {*range(3, 3 + task.symbols)}


def test_masked_symbols_repeat():
    task = Masked()
    tokens, mask = drawn(task.sample, 16, 32)
    assert (tokens[:, 8:] == tokens[:, :-8]).all() and tokens.min() >= 1
    assert 0.1 < mask.mean() < 0.2 and not mask[:, 0].any()


def test_a_length_without_answers_has_no_score(monkeypatch):
    task = FlipFlop(train_length=5, test_lengths=(5, 6), eval_batches=1)
    counts = np.array([[[3.0], [0.0]], [[4.0], [0.0]]])  # Right and all, at each length.
    monkeypatch.setattr("experiments.tasks.lookup._count_right", lambda *_, **__: counts)
    values = [e.value for e in task.evaluate(pe.NoPE(), None, 0, None)]
    assert values[:2] == [0.75, None]


@dataclasses.dataclass(frozen=True)
class BreaksAt(pe.Scheme):
    """Embeddings are NaN from a position on."""

    position: int = 32

    def embed(self, params, x, coordinates):
        return jnp.where((coordinates < self.position)[..., None], x, jnp.nan)


def test_logits_that_are_not_finite_are_no_answers():
    """The greatest of them is the first symbol, which may be right."""
    model = Model(model_dim=16, num_layers=1, num_heads=2)
    task = KBack(test_lengths=(32, 48), eval_batch=4, eval_batches=1, model=model)
    params = initialize(task.model, BreaksAt(), task.vocab_size, jax.random.key(0))
    for scheme in (BreaksAt(32), BreaksAt(48)):
        value = task.evaluate(scheme, params, 0, None)[1].value
        assert np.isnan(value) if scheme.position == 32 else 0 <= value < 0.5


def test_sparse_flip_flops_write_less_often():
    task = FlipFlop()
    shares = {}
    for mode, changed in task.test_modes.items():
        tokens = drawn(changed.sample, 256, 64)[0][:, 2:64:2]
        shares[mode] = [float((tokens == kind).mean()) for kind in (1, 2, 3)]
    np.testing.assert_allclose(shares["plain"], [0.1, 0.8, 0.1], atol=0.02)
    np.testing.assert_allclose(shares["sparse"], [0.01, 0.98, 0.01], atol=0.005)


def test_one_row_in_eight_is_held_out_and_padding_does_not_matter():
    rows = np.random.default_rng(0).integers(1, 20, (4096, 20))
    held = held_out(rows)
    assert 0.11 < held.mean() < 0.14
    padded = np.pad(rows, ((0, 0), (0, 30)))
    np.testing.assert_array_equal(held, _held_out(padded))
    few = np.asarray([[1, a, b, 2] for a in range(3, 9) for b in range(3, 9)])
    assert 0 < held_out(few).sum() < 18


@slow
@pytest.mark.parametrize("kind", ["shifted", "randomized", "random_floats"])
def test_coordinates_are_ordered_and_reach_the_longest_length(kind):
    task = KBack(coordinates=kind, coordinate_range=200)
    task.check()
    tokens = np.zeros((500, 33), np.int32)
    draw = jax.jit(functools.partial(task.draw_coordinates, training=True))
    coordinates = np.asarray(draw(jax.random.key(0), tokens))
    assert coordinates.shape == (500, 32) and (np.diff(coordinates) > 0).all()
    assert 0 <= coordinates.min() < 5 and 195 < coordinates.max() < 200
    if kind == "shifted":
        assert (np.diff(coordinates) == 1).all()
        assert task.draw_coordinates(jax.random.key(0), tokens, training=False) is None


def test_floats_of_evaluation_are_spaced_by_the_length_of_each_row():
    task = Copy(coordinates="random_floats", coordinate_range=256)
    tokens = np.zeros((3, 129), np.int32)
    for row, length in zip(tokens, (20, 65, 129), strict=True):
        row[:length] = 1
    draw = jax.jit(functools.partial(task.draw_coordinates, training=False))
    coordinates = np.asarray(draw(jax.random.key(0), tokens))
    for row, inputs in zip(coordinates, (32, 64, 128), strict=True):  # At least the trained length.
        np.testing.assert_allclose(row, (np.arange(128) + 0.5) * 256 / inputs, rtol=1e-6)


@pytest.mark.parametrize(
    ("task", "message"),
    [
        (KBack(coordinate_range=64), "kback.coordinates are positions"),
        (KBack(coordinates="shifted", coordinate_range=64), "below the longest test length 128"),
        (KBack(model=Model(is_causal=False)), "evaluated at the training length only"),
        (Copy(kind="unique", symbols=20), "20 are too few for 63 different symbols"),
        (Sort(shortest=16), "sort.shortest: a problem of size 16 does not fit"),
        (Masked(model=Model()), "masked.model.is_causal: must be false"),
        (Masked(period=20), "masked.period: 20 does not repeat"),
        (Majority(eval_batch=30), "majority.eval_batch: 30 is not a multiple of the 4 test len"),
        (Induction(repeated=9), "induction.repeated: must be 2 to"),
    ],
)
def test_contradictions_are_named(task, message):
    with raises(ConfigError, message):
        task.check()


def test_settings_are_chosen_with_the_coordinates_of_the_report():
    for coordinates, count in (("positions", 32), ("randomized", 128), ("shifted", 128)):
        task = KBack(coordinates=coordinates).at_trained_length()
        task.check()
        assert task.test_lengths == (32,) and task.num_coordinates == count
    other = KBack(coordinates="shifted", coordinate_range=200).at_trained_length()
    assert other.num_coordinates == 200


def test_kback_query_rate_and_uniform_symbols():
    task = KBack()
    tokens, mask = drawn(task.sample, 512, 64)
    assert 0.13 < mask.sum() / (512 * 60) < 0.16  # 0.25 x 0.75 x 0.75, a little more at the start
    counts = np.bincount(tokens[tokens > 0], minlength=17)[1:]
    assert counts.min() > 0.9 * counts.mean()


def test_kback_test_lengths_split_the_positions_of_queries():
    task = KBack(test_lengths=(32, 48, 64))
    *_, index = drawn(task.sample_test, 4)
    queries = np.arange(64)
    np.testing.assert_array_equal(index[:, 1:], [sum(queries >= n for n in (32, 48, 64))] * 4)


def small_text(**changes):
    return dataclasses.replace(
        Text(train_length=8, test_lengths=(8, 16, 32), eval_bytes=64, stride=4, **changes),
        sliding_lengths=(8, 16, 32),
    )


def test_text_samples_windows_of_the_data():
    data = np.arange(200, dtype=np.uint8)
    tokens, mask = drawn(small_text().sample, 64, 8, jax.numpy.asarray(data))
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


@pytest.mark.parametrize(
    ("bytes_held_out", "advice"),
    [
        (5892, "5,892 held out, needs 516 and 8,196; --text.eval-bytes 2048 would do"),
        (2048, "; text.test_lengths up to 1024 need 2,049 held out at least"),
    ],
)
def test_a_small_text_says_what_would_do(tmp_path, bytes_held_out, advice):
    for i in range(20):
        (tmp_path / f"{i:02}.txt").write_bytes(bytes(bytes_held_out))
    task = Text(corpus=str(tmp_path))
    with raises(CorpusError, advice):
        task.load()
    if "would do" in advice:
        dataclasses.replace(task, eval_bytes=2048).load()


def test_validation_text_is_scored_alone_at_the_training_length(monkeypatch):
    """The losses are the bytes themselves: the score is the mean of the validation text's bytes."""
    held_out, validation = np.full(200, 3, np.uint8), np.arange(200, dtype=np.uint8)
    monkeypatch.setattr("experiments.tasks.text.structure", lambda *sizes: None)
    monkeypatch.setattr(
        "experiments.tasks.text._bits",
        lambda graphdef, params, windows, count: windows[:, -count:].astype(float),
    )
    task = small_text(validation=True, variants=())
    data = Data(held_out=(held_out, validation))
    scores = {(e.mode, e.length): e.value for e in task.evaluate(pe.NoPE(), None, 0, data)}
    windows, count = task.windows(validation, 8, "nonoverlapping")
    assert scores["validation", 8] == windows[:, -count:].mean().round(5)
    assert ("validation", 16) not in scores and scores["sliding", 32] == 3.0
    assert (task.selection_view, small_text().selection_view) == ("validation", "nonoverlapping")
    short = task.at_trained_length()
    short.check()
    assert len(short.evaluate(pe.NoPE(), None, 0, data)) == 2
    split = small_text(ngram=2, variants=())
    data = Data(held_out=(np.arange(200, dtype=np.uint8), validation))  # No byte occurs twice.
    modes = {e.mode for e in split.evaluate(pe.NoPE(), None, 0, data)}
    assert modes == {"nonoverlapping", "sliding", "new"}
