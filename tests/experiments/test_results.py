"""Results are read alike from the files of runs and from packs."""

import dataclasses
import gzip
import json

import pytest

from experiments.errors import ResultsError
from experiments.runs import results
from experiments.runs.files import locked
from experiments.runs.results import PACK, Result, forget, pack, packed, stored, write

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
    (folder / NAMES[0] / "parameters.npz").write_bytes(b"kept")
    assert pack(folder) == 5
    assert files(folder) == [f"{NAMES[0]}/parameters.npz", PACK]
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


def test_results_are_forgotten_wherever_they_are(folder):
    pack(folder)
    write(folder, NAMES[1], RESULTS[NAMES[1]])
    forget(folder, NAMES[:2])
    assert [stored(folder, name) for name in NAMES] == [None, None, *list(RESULTS.values())[2:]]


def test_a_folder_in_which_a_run_works_is_not_packed(folder):
    with locked(folder / NAMES[2]), pytest.raises(ResultsError, match="another process works"):
        pack(folder)
    assert not (folder / PACK).exists() and stored(folder, NAMES[0])


@pytest.mark.parametrize(
    ("old", "new", "message"),
    [
        (b'"run":', b'"name":', "must have run and result"),
        (b'"status":"done"', b'"status":"odd"', "status 'odd'"),
        (b'"commit":', b'"compile_seconds":NaN,"commit":', "NaN is not a number"),
        (b"}\n", b"}\n{}\n", "must have run and result"),
    ],
)
def test_a_line_of_a_pack_that_is_no_result_is_refused(folder, old, new, message):
    pack(folder)
    text = gzip.decompress((folder / PACK).read_bytes())
    assert old in text
    (folder / PACK).write_bytes(gzip.compress(text.replace(old, new, 1)))
    with pytest.raises(ResultsError, match=message):
        stored(folder, NAMES[0])


def test_a_run_with_two_lines_and_an_empty_pack_are_refused(folder):
    pack(folder)
    text = gzip.decompress((folder / PACK).read_bytes())
    for content, message in ((gzip.compress(text * 2), "has two lines"), (b"", "is empty")):
        (folder / PACK).write_bytes(content)
        with pytest.raises(ResultsError, match=message):
            stored(folder, NAMES[0])


@pytest.mark.parametrize("damage", ["settings", "bit", "end", "text"])
def test_a_damaged_pack_is_one_line(folder, damage):
    pack(folder)
    content = (folder / PACK).read_bytes()
    if damage == "settings":
        text = gzip.decompress(content).replace(b'"rate":0.001', b'"rate":0.002', 1)
        content = gzip.compress(text)
    elif damage == "bit":
        content = content[:-5] + bytes([content[-5] ^ 1]) + content[-4:]
    elif damage == "end":
        content = content[:-20]
    else:
        content = gzip.compress(b"no results")
    (folder / PACK).write_bytes(content)
    message = "other settings than its name says" if damage == "settings" else "cannot be read"
    with pytest.raises(ResultsError, match=message) as caught:
        stored(folder, NAMES[0])
    assert PACK in str(caught.value) and "\n" not in str(caught.value)
