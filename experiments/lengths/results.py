"""The result of a cell."""

import functools
from typing import Any

from experiments.runs.results import Kind
from experiments.settings.config_io import convert, strict
from experiments.stats import mean

BIN = 1024
"""Places of one mean of `CellResult.losses`."""


@strict
class CellResult:
    """The result of a pass.

    Attributes:
      losses: means over `BIN` places in nats; none of a probe.
      questions: of a probe: context, depth, distance, loss of the answer in nats, and 1 if greedy
        decoding would give it.
      copies: of a probe: distance, loss of the paragraph at its first and its second place.
      cpu_seconds, compile_seconds: processor time of the pass and of its compilation.
      temporary_mib: memory of the pass, without the parameters.
      peak_mib: resident memory of the process at its highest, so far.
      environment, commit, finished: as in `experiments.runs.results.Result`.
    """

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

    @property
    def summary(self) -> str:
        if self.losses:
            return f"{mean(self.losses):.3f} nats, {self.losses[-1]:.3f} at the end"
        hits = sum(row[-1] for row in self.questions)
        return f"{hits:.0f} of {len(self.questions)} answers"

    def __post_init__(self):
        losses = 0 if self.questions or self.copies else self.settings.get("count", 0) // BIN
        if len(self.losses) != losses:
            raise ValueError(f"must have {losses} losses, got {len(self.losses)}")


CELLS = Kind("cell", functools.partial(convert, CellResult))
"""These results in a folder."""
