"""The results of a scheme on a task, over its seeds: input of tables, plots and reports."""

import dataclasses
import functools
import math
from collections.abc import Callable, Iterable, Sequence

from experiments.models.schemes import has_table
from experiments.runs.run import Result, Run
from experiments.tasks.labels import Labels

Lookup = Callable[[Run], Result | None]
"""Returns the result of a run, None if it has none."""


def mean(values: Iterable[float | None]) -> float:
    """Returns the mean; NaN for no values, or if one is not finite.

    >>> mean([1, 2]), mean([])
    (1.5, nan)
    """
    numbers = [math.nan if x is None or not math.isfinite(x) else float(x) for x in values]
    return sum(numbers) / len(numbers) if numbers else math.nan


@dataclasses.dataclass(frozen=True)
class Score:
    """The scores of all seeds at a length.

    Attributes:
      values: one per seed, NaN where it is missing or not finite.
      in_distribution: whether the model was trained at this length.
      note: a remark for readers.
      places: means over seeds of the parts of a row; empty if not measured.
    """

    values: tuple[float, ...]
    in_distribution: bool
    note: str = ""
    places: tuple[float, ...] = ()


@dataclasses.dataclass(frozen=True)
class SchemeResults:
    """A scheme on a task: its runs, one per seed, and their results.

    Attributes:
      section: of the report: the name of the task, or of a size of a study.
      runs: one per seed.
      results: of these runs, None before they have ended.
      raised: the error of a run that raised.
    """

    section: str
    runs: tuple[Run, ...]
    results: tuple[Result | None, ...]
    raised: str = ""

    @property
    def scheme(self) -> str:
        """The name of the scheme."""
        return self.runs[0].scheme

    @property
    def labels(self) -> Labels:
        """The labels of the task."""
        labels, name = self.runs[0].task.labels, self.runs[0].task.name
        if self.section == name:
            return labels
        return dataclasses.replace(labels, about=f"{self.section}: {labels.about}")

    @functools.cached_property
    def ended(self) -> list[tuple[Run, Result]]:
        """Runs with their results."""
        return [(a, b) for a, b in zip(self.runs, self.results, strict=True) if b]

    @property
    def error(self) -> str:
        """Why there are no scores: a run raised, or seeds diverged."""
        diverged = [result.error for _, result in self.ended if result.status != "done"]
        if diverged and len(self.runs) > 1:
            return f"{len(diverged)} of {len(self.ended)} seeds: {diverged[0]}"
        return self.raised or next(iter(diverged), None) or ""

    @property
    def waiting(self) -> bool:
        """Whether no run has ended."""
        return not self.ended and not self.raised

    @property
    def done(self) -> bool:
        """Whether there are scores."""
        return bool(self.ended) and not self.error

    @property
    def seeds(self) -> list[int]:
        """The seeds that have ended."""
        return [run.seed for run, _ in self.ended]

    @property
    def first(self) -> Result | None:
        """The result of the first seed that has ended."""
        return self.ended[0][1] if self.ended else None

    @property
    def fitted(self) -> bool:
        """Whether all seeds learned the task."""
        return self.done and all(result.fitted for _, result in self.ended)

    @property
    def final_loss(self) -> float:
        """The mean of the last losses."""
        return mean(result.curve["loss"][-1] for _, result in self.ended if result.curve)

    @property
    def step_time(self) -> float:
        """Milliseconds per training step, NaN if they were not measured."""
        seconds, steps = self.mean_of("seconds"), self.runs[0].task.train.steps
        return 1e3 * seconds / steps if self.done and seconds else math.nan

    def mean_of(self, entry: str) -> float:
        """Returns the mean of an entry of the results, NaN if one has none."""
        return mean(getattr(result, entry) for _, result in self.ended)

    @property
    def views(self) -> list[tuple[str, str]]:
        """The mode and the zero-shot variant, or "", of all scores."""
        variants, modes = self.runs[0].task.zero_shot, []
        for view in self.first.scores if self.done and self.first else ():
            main = self.runs[0].task.views[0]
            modes.append((main, view) if view in variants else (view, ""))
        return modes

    def scores(self, mode: str, variant: str = "") -> dict[int, Score]:
        """Returns the scores of a mode and variant by length, ascending."""
        if not self.done or (mode, variant) not in self.views:
            return {}
        view, task = variant or mode, self.runs[0].task
        lengths = sorted({int(n) for _, result in self.ended for n in result.scores.get(view, {})})
        table = has_table(self.runs[0].position)
        return {length: self._score(view, length, task, table) for length in lengths}

    def _score(self, view: str, length: int, task, table: bool) -> Score:
        values = [result.scores.get(view, {}).get(str(length)) for _, result in self.ended]
        trained, note = task.in_distribution(view, length), ""
        if table and not trained:
            note = f"rows beyond position {task.train_length - 1} were never trained"
        rows = [result.places.get(str(length), ()) for _, result in self.ended]
        complete = view == task.views[0] and len(set(map(len, rows))) == 1
        places = tuple(mean(column) for column in zip(*rows, strict=True)) if complete else ()
        return Score(tuple(mean([x]) for x in values), trained, note, places)


def collect(section: str, runs: Sequence[Run], results: Lookup, raised: str = "") -> SchemeResults:
    """Returns the results of a scheme, for its runs with all seeds."""
    return SchemeResults(section, tuple(runs), tuple(map(results, runs)), raised)
