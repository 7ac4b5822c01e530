"""The results of schemes on tasks over their seeds: one table of scores for reports and studies."""

import dataclasses
import math
import statistics
from collections.abc import Mapping, Sequence

from experiments.models.methods import sized
from experiments.models.schemes import has_table, label
from experiments.runs.run import Lookup, Result, Run
from experiments.stats import mean, ordered
from experiments.tasks.base import Labels, Task

UNSTABLE = 0.1
"""The standard deviation over seeds above which a mean says little."""


@dataclasses.dataclass(frozen=True)
class Score:
    """The scores of all seeds at a length.

    Attributes:
      values: one per seed, NaN where it is missing or not finite.
      in_distribution: whether the model was trained at this length.
      untrained: whether it needs rows of a table that were never trained.
      places: means over seeds of the parts of a row; empty if not measured.
    """

    values: tuple[float, ...]
    in_distribution: bool
    untrained: bool = False
    places: tuple[float, ...] = ()


@dataclasses.dataclass(frozen=True)
class SchemeResults:
    """A scheme on a task: its runs, one per seed, and their results.

    Attributes:
      section: of the report: the name of the task, or of a size of a study.
      runs: one per seed.
      raised: the error of a run that raised.
    """

    section: str
    runs: tuple[Run, ...]
    results: tuple[Result, ...]
    raised: str = ""

    @property
    def task(self) -> Task:
        return self.runs[0].task

    @property
    def scheme(self) -> str:
        return self.runs[0].scheme

    def label(self, variant: str = "") -> str:
        return label(self.scheme, sized(variant, self.task.train_length))

    @property
    def labels(self) -> Labels:
        return self.task.labels

    @property
    def error(self) -> str:
        """Why there are no scores: a run raised, or seeds diverged."""
        diverged = [result.error for result in self.results if result.status != "done"]
        if diverged and len(self.runs) > 1:
            return f"{len(diverged)} of {len(self.results)} seeds: {diverged[0]}"
        return self.raised or next(iter(diverged), None) or ""

    @property
    def waiting(self) -> bool:
        return not self.results and not self.raised

    @property
    def done(self) -> bool:
        """Whether there are scores."""
        return bool(self.results) and not self.error

    @property
    def seeds(self) -> list[int]:
        """The seeds that have ended."""
        return [result.settings["seed"] for result in self.results]

    @property
    def first(self) -> Result | None:
        """The result of the first seed that has ended."""
        return self.results[0] if self.results else None

    @property
    def fitted(self) -> bool:
        return self.done and all(result.fitted for result in self.results)

    @property
    def views(self) -> list[tuple[str, str]]:
        """The mode and the zero-shot variant, or "", of all scores."""
        variants, modes = self.task.zero_shot, []
        for view in self.first.scores if self.done and self.first else ():
            main = self.task.views[0]
            modes.append((main, view) if view in variants else (view, ""))
        return modes

    def scores(self, mode: str, variant: str = "") -> dict[int, Score]:
        """Returns the scores of a mode and variant by length, ascending."""
        if not self.done or (mode, variant) not in self.views:
            return {}
        view = variant or mode
        lengths = sorted({int(n) for result in self.results for n in result.scores.get(view, {})})
        return {length: self._score(view, length) for length in lengths}

    def _score(self, view: str, length: int) -> Score:
        trained, table = self.task.in_distribution(view, length), has_table(self.runs[0].position)
        rows = [result.places.get(str(length), ()) for result in self.results]
        complete = view == self.task.views[0] and len(set(map(len, rows))) == 1
        places = tuple(mean(column) for column in zip(*rows, strict=True)) if complete else ()
        return Score(tuple(self.values(view, length)), trained, table and not trained, places)

    def values(self, view: str, length: int) -> list[float]:
        """Returns the scores of a view at a length, one per seed, NaN where there is none."""
        return [mean([result.score(view, length)]) for result in self.results]

    @property
    def at_trained_length(self) -> list[float]:
        """The main scores at the trained length, one per seed, NaN where there is none."""
        return self.values(self.task.views[0], self.task.train_length)

    @property
    def spread(self) -> float:
        """The standard deviation of these scores without NaN, 0 for fewer than two."""
        values = [x for x in self.at_trained_length if math.isfinite(x)]
        return statistics.stdev(values) if len(values) > 1 else 0.0

    @property
    def is_stable(self) -> bool:
        return all(map(math.isfinite, self.at_trained_length)) and self.spread <= UNSTABLE


def by_scheme(
    runs: Sequence[Run], results: Lookup, errors: Mapping[str, str]
) -> list[SchemeResults]:
    """Returns runs with their results, by task and scheme; `errors` are by the names of runs."""
    groups: dict[tuple[str, str], list[Run]] = {}
    for run in runs:
        groups.setdefault((run.task.name, run.scheme), []).append(run)
    return [
        SchemeResults(
            section=task,
            runs=tuple(seeds),
            results=tuple(result for run in seeds if (result := results(run))),
            raised=next((errors[run.name] for run in seeds if run.name in errors), ""),
        )
        for (task, _), seeds in groups.items()
    ]


Results = Sequence[SchemeResults]


def sections(results: Results) -> list[str]:
    return ordered(row.section for row in results)


def schemes(results: Results) -> list[str]:
    return ordered(row.scheme for row in results)


def of_section(results: Results, section: str) -> dict[str, SchemeResults]:
    return {row.scheme: row for row in results if row.section == section}


def modes(results: Results, section: str) -> list[str]:
    """Returns the modes in which a section was evaluated, the main one first.

    The others are in the order of their numbers of lengths.
    """
    rows, lengths = of_section(results, section).values(), {}
    for row in rows:
        for mode, variant in row.views:
            lengths.setdefault(mode, set()).update(row.scores(mode, variant))
    main = next((row.task.views[0] for row in rows), "")
    return sorted(lengths, key=lambda mode: (mode != main, -len(lengths[mode])))


def places(results: Results, section: str) -> dict[str, dict[int, tuple[float, ...]]]:
    """Returns the scores by scheme, length and place in the row, of schemes that fitted.

    The mode is the main one.
    """
    mode, out = next(iter(modes(results, section)), ""), {}
    for scheme, row in of_section(results, section).items():
        scores = row.scores(mode) if row.fitted else {}
        if by_place := {n: score.places for n, score in scores.items() if score.places}:
            out[scheme] = by_place
    return out


def paired(
    results: Results, section: str, mode: str, length: int, baseline: str
) -> dict[str, tuple[list[float], list[float]]]:
    """Returns the scores by seed and their differences to the baseline's, by scheme, at a length.

    Schemes that did not fit the task have no scores beyond the training length; schemes with other
    seeds than the baseline's have no differences.
    """
    rows, scores = of_section(results, section), {}
    for scheme, row in rows.items():
        score = row.scores(mode).get(length)
        if score and (row.fitted or score.in_distribution):
            scores[scheme] = list(score.values)
    of_baseline = scores.get(baseline, [])

    def differences(scheme: str) -> list[float]:
        if not of_baseline or rows[scheme].seeds != rows[baseline].seeds:
            return []
        return [a - b for a, b in zip(scores[scheme], of_baseline, strict=True)]

    return {scheme: (values, differences(scheme)) for scheme, values in scores.items()}


def seeds_in_words(results: Results) -> str:
    """Returns the least and the greatest number of seeds that are averaged; nothing for one."""
    counts = [len(row.seeds) for row in results if row.done]
    least, most = min(counts, default=1), max(counts, default=1)
    few = f"{least} to " if least < most else ""
    return f"{few}{most} seeds" if most > 1 else ""
