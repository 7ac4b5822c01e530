"""Results of runs: a file in the folder of each new run, and one compressed file of packed ones.

RUN/result.json     the result of one run
results.jsonl.gz    a line per packed run, {"run": name, "result": result}, sorted by name; equal
                    results are equal bytes, and only this file is worth committing

A name ends with a digest of the settings, which is checked when a line is read. Of a run that is in
both, the result that was finished last counts.
"""

import collections
import contextlib
import dataclasses
import functools
import gzip
import hashlib
import json
import zlib
from collections.abc import Callable, Iterable, Mapping
from pathlib import Path
from typing import Any

from experiments.errors import ResultsError
from experiments.runs.files import locked, to_json, write_whole
from experiments.settings.config_io import convert

FILE, PACK = "result.json", "results.jsonl.gz"
VERSIONS = ("jax", "jaxlib", "flax", "optax", "numpy", "device")
"""Entries of the environment that must be equal where runs are compared."""


@dataclasses.dataclass(frozen=True)
class Result:
    """The result of a run.

    Attributes:
      status: "done", or "diverged" where the loss was not finite.
      scores: by view (`Task.views`), then by length.
      places: of the first view, by length, as `Evaluation.places` has them.
      curve: some points of the curve of the loss, "step" and "loss".
      commit: of the code, with a plus where files differed from it.
      finished: when, ISO 8601.
    """

    settings: dict[str, Any]
    status: str
    scheme_repr: str
    environment: dict[str, Any]
    commit: str
    finished: str
    error: str | None = None
    parameters: int | None = None
    memory_bytes: int | None = None
    fitted: bool = False
    fit_rule: str = ""
    scores: dict[str, dict[str, float | None]] = dataclasses.field(default_factory=dict)
    places: dict[str, list[float | None]] = dataclasses.field(default_factory=dict)
    curve: dict[str, list[float | None]] = dataclasses.field(default_factory=dict)
    compile_seconds: float = 0.0
    train_seconds: float = 0.0
    cpu_seconds: float = 0.0

    @property
    def versions(self) -> tuple[str, ...]:
        """The versions that must be equal where runs are compared."""
        return versions_of(self.environment)

    @property
    def summary(self) -> str:
        if self.status != "done":
            return f"{self.status}: {self.error}"
        return ", ".join(f"{n}: {x}" for n, x in next(iter(self.scores.values())).items())

    def score(self, view: str, length: int) -> float | None:
        """Returns the score of a view at a length, None where there is none."""
        return self.scores.get(view, {}).get(str(length))

    @property
    def seconds(self) -> float:
        """Time of training: CPU time on CPUs, which other programs disturb less, or wall time."""
        on_cpu = str(self.environment.get("device")).startswith("cpu")
        return self.cpu_seconds if on_cpu else self.train_seconds

    @property
    def processor(self) -> str:
        return str(self.environment.get("processor"))


def versions_of(environment: Mapping[str, Any]) -> tuple[str, ...]:
    """Returns the versions that must be equal where runs are compared."""
    return tuple(f"{name} {environment.get(name)}" for name in VERSIONS)


def mixture(results: Iterable[Result], *, commits: bool = True) -> str:
    """Returns a sentence on the versions, and commits, in which results differ; "" if in none."""
    rows = [(*result.versions, *[f"commit {result.commit}"] * commits) for result in results]
    counts = map(collections.Counter, zip(*rows, strict=True))
    parts = [
        " and ".join(f"{name} ({n} run{'s' * (n > 1)})" for name, n in each.items())
        for each in counts
        if len(each) > 1
    ]
    return f"Results are of {'; '.join(parts)}, which may be why they differ." if parts else ""


def digest(settings: Mapping[str, Any]) -> str:
    """Returns a hash of settings of JSON's types, 12 digits."""
    text = json.dumps(settings, sort_keys=True, separators=(",", ":"))
    return hashlib.sha256(text.encode()).hexdigest()[:12]


def _parse(text: str | bytes) -> Any:
    """Returns JSON without NaN and infinities, which are written as null."""

    def refuse(word: str) -> None:
        raise ValueError(f"{word} is not a number of JSON")

    return json.loads(text, parse_constant=refuse)


def _result(value: Any, name: str) -> Result:
    result = convert(Result, value, name, measured=True)
    if result.status not in ("done", "diverged") or (result.status == "done" and not result.scores):
        raise ValueError(f"status {result.status!r} with {len(result.scores)} views of scores")
    return result


@dataclasses.dataclass(frozen=True)
class Kind:
    """Results of one class.

    Attributes:
      key: of names in the lines of a pack.
      parse: makes a result from JSON and its name, or raises ValueError.
    """

    key: str
    parse: Callable[[Any, str], Any]


RUNS = Kind("run", _result)


def stored(folder: Path, name: str, kind: Kind = RUNS) -> Any:
    """Returns the result of a name; None if there is none."""
    file = folder / name / FILE
    try:  # In this order: a pack is written before the files that it replaces are removed.
        alone = _of_name(name, kind.parse(_parse(file.read_text(encoding="utf-8")), ""))
    except (FileNotFoundError, NotADirectoryError):
        alone = None
    except (OSError, ValueError, RecursionError) as error:
        raise ResultsError(f"{file}: cannot be read: {error}") from None
    in_pack = packed(folder, kind).get(name)
    if alone and in_pack:
        return in_pack if in_pack.finished > alone.finished else alone
    return alone or in_pack


def _of_name(name: str, result: Any) -> Any:
    """Returns the result, if the name ends with the digest of its settings."""
    if name.rpartition("-")[2] != digest(result.settings):
        raise ValueError(f"{name} has other settings than its name says")
    return result


def read(folder: Path, kind: Kind = RUNS) -> dict[str, Any]:
    names = sorted(file.parent.name for file in folder.glob(f"*/{FILE}"))
    alone = {name: result for name in names if (result := stored(folder, name, kind))}
    return {**packed(folder, kind), **alone}


def write(folder: Path, name: str, result: Any) -> None:
    """Writes a result to a file of its own."""
    write_whole(folder / name / FILE, to_json(dataclasses.asdict(result), indent=1) + "\n")


def pack(folder: Path, kind: Kind = RUNS) -> int:
    """Packs all results of a folder, and removes their files; returns how many are packed."""
    with locked(folder):
        files, results = list(folder.glob(f"*/{FILE}")), read(folder, kind)
        if files:
            _write_pack(folder, kind, results)
        for file in files:  # Other processes write results once, and do not change them.
            file.unlink(missing_ok=True)
            with contextlib.suppress(OSError):  # It has other files.
                file.parent.rmdir()
        return len(results)


def _write_pack(folder: Path, kind: Kind, results: Mapping[str, Any]) -> None:
    entries = (
        {kind.key: name, "result": dataclasses.asdict(results[name])} for name in sorted(results)
    )
    lines = (to_json(entry, separators=(",", ":")) for entry in entries)
    content = "".join(f"{line}\n" for line in lines).encode()
    write_whole(folder / PACK, gzip.compress(content, mtime=0))


def packed(folder: Path, kind: Kind = RUNS) -> Mapping[str, Any]:
    try:
        stat = (folder / PACK).stat()
    except (FileNotFoundError, NotADirectoryError):
        return {}
    return _packed(folder / PACK, kind, stat.st_mtime_ns, stat.st_ino)


@functools.lru_cache(maxsize=8)
def _packed(file: Path, kind: Kind, *version: int) -> Mapping[str, Any]:
    """Reads a pack, again if it is another file."""
    results: dict[str, Any] = {}
    try:
        content = file.read_bytes()
        if not content:
            raise ValueError("it is empty")
        for line in gzip.decompress(content).splitlines():
            entry = _parse(line)
            if not isinstance(entry, dict) or entry.keys() != {kind.key, "result"}:
                raise ValueError(f"a line must have {kind.key} and result")
            name = str(entry[kind.key])
            if name in results:
                raise ValueError(f"{name} has two lines")
            results[name] = _of_name(name, kind.parse(entry["result"], name))
    except (OSError, EOFError, zlib.error, ValueError, RecursionError) as error:
        raise ResultsError(f"{file}: cannot be read: {error}") from None
    return results
