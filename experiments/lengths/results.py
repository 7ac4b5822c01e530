"""Results of cells: a file in the folder of each, or a line of one compressed file."""

import dataclasses
import functools
import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any, ClassVar

from experiments.errors import ResultsError
from experiments.runs.files import to_json, write_whole
from experiments.runs.results import FILE, PACK, digest, read_pack, write_pack
from experiments.settings.config_io import STRICT, convert

BIN = 1024
"""Places of one mean of `CellResult.losses`."""


@dataclasses.dataclass(frozen=True)
class CellResult:
    """The result of a pass.

    Attributes:
      settings: of the cell.
      losses: means over `BIN` places in nats; none of a probe.
      questions: of a probe: context, depth, distance, loss of the answer in nats, and 1 if greedy
        decoding would give it.
      copies: of a probe: distance, loss of the paragraph at its first and its second place.
      cpu_seconds, compile_seconds: processor time of the pass and of its compilation.
      temporary_mib: memory of the pass, without the parameters.
      peak_mib: resident memory of the process at its highest, so far.
      environment, commit, finished: as in `experiments.runs.results.Result`.
    """

    __pydantic_config__: ClassVar[Any] = STRICT

    settings: dict[str, Any]
    losses: list[float]
    questions: list[tuple[float, float, float, float, float]]
    copies: list[tuple[float, float, float]]
    cpu_seconds: float
    compile_seconds: float
    temporary_mib: float
    peak_mib: float
    environment: dict[str, Any]
    commit: str
    finished: str

    def __post_init__(self):
        losses = 0 if self.questions or self.copies else self.settings.get("count", 0) // BIN
        if len(self.losses) != losses:
            raise ValueError(f"must have {losses} losses, got {len(self.losses)}")


def read(folder: Path) -> dict[str, CellResult]:
    """Returns all results of a folder by the names of their cells."""
    result_of, pack = functools.partial(convert, CellResult), folder / PACK
    results = read_pack(pack, "cell", result_of) if pack.exists() else {}
    for file in sorted(folder.glob(f"*/{FILE}")):
        name = file.parent.name
        try:
            results[name] = result_of(json.loads(file.read_text("utf-8")), name)
            if name.rpartition("-")[2] != digest(results[name].settings):
                raise ValueError(f"{name} has other settings than its name says")
        except (OSError, ValueError, RecursionError) as error:
            raise ResultsError(f"{file}: cannot be read: {error}") from None
    return results


def write(folder: Path, name: str, result: CellResult) -> None:
    """Writes the result of a cell, whole or not at all."""
    write_whole(folder / name / FILE, to_json(dataclasses.asdict(result)) + "\n")


def pack(folder: Path, results: Mapping[str, CellResult]) -> None:
    """Writes results to the one file that is worth committing; equal results are equal bytes."""
    write_pack(folder, "cell", results)
