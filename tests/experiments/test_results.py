"""Results are read alike from the files of runs and from packs."""

import dataclasses
import gzip
import json

import pytest

from experiments.errors import ResultsError
from experiments.runs import results
from experiments.runs.results import PACK, Result, pack, packed, stored, write
from tests.experiments.one_line import raises

RESULTS = {}
for seed in range(5):
    settings = {"task": "kback", "seed": seed, "kback": {"rate": 1e-3}}
    RESULTS[f"kback-rope-s{seed}-{results.digest(settings)}"] = Result(
        settings,
        "done",
        "RoPE(head_dim=8)",
        {"jax": "0.1"},
        "abc",
        f"2026-01-0{seed + 1}T00:00:00Z",
        scores={"plain": {"64": 0.1 + 0.2 * seed, "128": None}},
        curve={"step": [1.0], "loss": [None]},
        memory_bytes=3 * 2**30,  # On a GPU.
    )
NAMES = list(RESULTS)


@pytest.fixture
def folder(tmp_path):
    for name, result in RESULTS.items():
        write(tmp_path, name, result)
    return tmp_path


def files(folder):
    return sorted(str(path.relative_to(folder)) for path in folder.rglob("*") if path.is_file())


def test_packed_results_are_those_of_the_files(folder):
    assert {name: stored(folder, name) for name in NAMES} == RESULTS
    (folder / NAMES[0] / "notes.txt").write_text("mine")
    assert pack(folder) == 5
    assert files(folder) == [f"{NAMES[0]}/notes.txt", PACK]
    assert {name: stored(folder, name) for name in NAMES} == RESULTS == packed(folder)
    assert list(stored(folder, NAMES[0]).scores["plain"]) == ["64", "128"]
    assert stored(folder, "kback-rope-s9-0123456789ab") is None
    lines = [json.loads(line) for line in gzip.open(folder / PACK)]
    assert [line["run"] for line in lines] == sorted(NAMES)
    assert lines[1]["result"] == dataclasses.asdict(RESULTS[sorted(NAMES)[1]])


def test_equal_results_are_equal_bytes(folder, tmp_path_factory):
    other = tmp_path_factory.mktemp("other")
    pack(folder)
    for name in reversed(NAMES):  # One at a time, and in another order.
        write(other, name, RESULTS[name])
        pack(other)
    assert pack(other) == 5  # Nothing is left to pack.
    assert (other / PACK).read_bytes() == (folder / PACK).read_bytes()


@pytest.mark.parametrize(("finished", "counts"), [("2026-01-02", "new"), ("2025-01-01", "packed")])
def test_the_result_that_was_finished_last_counts(folder, finished, counts):
    pack(folder)
    name = NAMES[0]
    new = dataclasses.replace(RESULTS[name], finished=finished, commit="new")
    write(folder, name, new)
    expected = {"new": new, "packed": RESULTS[name]}[counts]
    assert stored(folder, name) == expected
    pack(folder)
    assert files(folder) == [PACK] and stored(folder, name) == expected


@pytest.mark.parametrize(
    ("damage", "message"),
    [
        (lambda text: text.replace(b'"rate":0.001', b'"rate":0.002', 1), "other settings than its"),
        (lambda text: text.replace(b'"run":', b'"name":', 1), "must have run and result"),
        (lambda text: text.replace(b'"status":"done"', b'"status":"odd"', 1), "status 'odd'"),
        (lambda text: text.replace(b'"commit":', b'"x":NaN,"commit":', 1), "NaN is not a number"),
        (lambda text: text + b"{}\n", "must have run and result"),
        (lambda text: text * 2, "has two lines"),
        (lambda text: b"no results", "cannot be read"),
    ],
)
def test_a_line_of_a_pack_that_is_no_result_is_refused(folder, damage, message):
    pack(folder)
    text = gzip.decompress((folder / PACK).read_bytes())
    assert damage(text) != text
    (folder / PACK).write_bytes(gzip.compress(damage(text)))
    with raises(ResultsError, message):
        stored(folder, NAMES[0])


def test_a_damaged_pack_is_one_line(folder):
    pack(folder)
    content = (folder / PACK).read_bytes()
    bit = content[:-5] + bytes([content[-5] ^ 1]) + content[-4:]
    for damaged, message in ((bit, "cannot be read"), (content[:-20], "cannot"), (b"", "is empty")):
        (folder / PACK).write_bytes(damaged)
        with raises(ResultsError, message):
            stored(folder, NAMES[0])
