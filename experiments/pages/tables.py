"""The results of schemes on tasks, over their seeds, and their tables without formatting.

A grid is one task under one way of evaluating: rows are schemes (and zero-shot variants of
them), columns are lengths. A cell beyond the training length has a number only if the scheme fitted
the task at the training length.
"""

import dataclasses
import functools
import math
from collections.abc import Mapping, Sequence

from experiments.models.methods import sized
from experiments.models.schemes import has_table, label
from experiments.runs.run import Lookup, Result, Run
from experiments.stats import in_cell, mean, ordered
from experiments.tasks.base import Labels

UNTRAINED = (
    "† beyond the trained length a learned table has rows that are as at the start: a score that "
    "is good there does not need them"
)


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

    def label(self, variant: str = "") -> str:
        """Returns the label of the scheme, or of a zero-shot variant of it."""
        return label(self.scheme, sized(variant, self.runs[0].task.train_length))

    @property
    def labels(self) -> Labels:
        """The labels of the task."""
        return self.runs[0].task.labels

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
    def step_time(self) -> float:
        """Milliseconds per training step, NaN if they were not measured."""
        seconds = mean(result.seconds for _, result in self.ended)
        return 1e3 * seconds / self.runs[0].task.train.steps if self.done and seconds else math.nan

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
        trained = task.in_distribution(view, length)
        rows = [result.places.get(str(length), ()) for _, result in self.ended]
        complete = view == task.views[0] and len(set(map(len, rows))) == 1
        places = tuple(mean(column) for column in zip(*rows, strict=True)) if complete else ()
        return Score(tuple(mean([x]) for x in values), trained, table and not trained, places)


def collect(section: str, runs: Sequence[Run], results: Lookup, raised: str = "") -> SchemeResults:
    """Returns the results of a scheme, for its runs with all seeds."""
    return SchemeResults(section, tuple(runs), tuple(map(results, runs)), raised)


def by_scheme(
    runs: Sequence[Run], results: Lookup, errors: Mapping[str, str]
) -> list[SchemeResults]:
    """Returns runs with their results, by task and scheme; `errors` are by the names of runs."""
    groups: dict[tuple[str, str], list[Run]] = {}
    for run in runs:
        groups.setdefault((run.task.name, run.scheme), []).append(run)
    return [
        collect(task, seeds, results, next((errors[r.name] for r in seeds if r.name in errors), ""))
        for (task, _), seeds in groups.items()
    ]


Results = Sequence[SchemeResults]


@dataclasses.dataclass
class Cell:
    """A number or the reason for its absence.

    Kind is value, unfitted, failed or missing.
    """

    kind: str = "missing"
    text: str = ""
    spread: str = ""
    untrained: bool = False
    best: bool = False


@dataclasses.dataclass(frozen=True)
class Row:
    """One scheme, or a zero-shot variant of it, with a cell for each length."""

    label: str
    cells: list[Cell]


@dataclasses.dataclass(frozen=True)
class Grid:
    """One section under one way of evaluating."""

    labels: Labels
    lengths: list[int]
    trained: set[int]
    rows: list[Row]


def sections(results: Results) -> list[str]:
    """Returns the sections of the results in order of first appearance."""
    return ordered(row.section for row in results)


def schemes(results: Results) -> list[str]:
    """Returns the schemes of the results in order of first appearance."""
    return ordered(row.scheme for row in results)


def of_section(results: Results, section: str) -> dict[str, SchemeResults]:
    """Returns the results of a section by scheme."""
    return {row.scheme: row for row in results if row.section == section}


def modes(results: Results, section: str) -> list[str]:
    """Returns the modes in which a section was evaluated, by descending number of lengths."""
    lengths: dict[str, set[int]] = {}
    for row in of_section(results, section).values():
        for mode, variant in row.views:
            lengths.setdefault(mode, set()).update(row.scores(mode, variant))
    return sorted(lengths, key=lambda mode: -len(lengths[mode]))


def places(results: Results, section: str) -> dict[str, dict[int, tuple[float, ...]]]:
    """Returns the scores by scheme, length and place in the row, of schemes that fitted.

    The mode is the one with the most lengths.
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


def step_times(results: Results, section: str) -> dict[str, float]:
    """Returns milliseconds per training step by scheme."""
    rows = of_section(results, section)
    return {s: row.step_time for s, row in rows.items() if math.isfinite(row.step_time)}


def grid(results: Results, section: str, mode: str) -> Grid:
    """Returns the scores of a section, with the best of each length marked."""
    schemes = of_section(results, section).values()
    lines = [
        (row, variant, row.scores(mode, variant))
        for row in schemes
        for variant in ("", *(v for m, v in row.views if v and m == mode))
    ]
    lengths = sorted({length for *_, scores in lines for length in scores})
    trained = {n for *_, scores in lines for n, score in scores.items() if score.in_distribution}
    labels = next(iter(schemes)).labels
    rows = [
        Row(
            row.label(variant) + " (not fitted)" * (row.done and not row.fitted),
            [_cell(row, scores.get(length), labels.digits) for length in lengths],
        )
        for row, variant, scores in lines
    ]
    for column in zip(*(row.cells for row in rows), strict=True):
        numbers = [x for x in column if x.kind == "value"]
        texts = {x.text for x in numbers}  # As printed: ties are all marked.
        best = (max if labels.higher_is_better else min)(texts, key=float, default="")
        for x in numbers:
            x.best = len(texts) > 1 and x.text == best
    return Grid(labels, lengths, trained, rows)


def _cell(row: SchemeResults, score: Score | None, digits: int) -> Cell:
    if not row.done:
        return Cell("failed", "failed")
    if score is None:
        return Cell()
    text, spread = in_cell(score.values, f".{digits}f"), ""
    if math.isnan(mean(score.values)):
        return Cell("missing", text)
    if len(score.values) > 1:
        spread = f"{min(score.values):.{digits}f}\u2013{max(score.values):.{digits}f}"
    kind = "value" if row.fitted or score.in_distribution else "unfitted"
    return Cell(kind, text, spread, score.untrained)


def aligned(rows: Sequence[Sequence[str]]) -> list[str]:
    """Returns the lines of a table for a terminal, whose first column holds words.

    >>> aligned([["nats", "0-2"], ["rope", "3.101"]])
    ['nats    0-2', 'rope  3.101']
    """
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    lines = []
    for first, *others in rows:
        padded = (f"{text:>{width}}" for text, width in zip(others, widths[1:], strict=True))
        lines.append("  ".join([f"{first:{widths[0]}}", *padded]))
    return lines


def as_text(results: Results) -> str:
    """Returns the scores for a terminal: a table per task, and the errors."""
    lines = []
    results = [row for row in results if not row.waiting]
    for section in sections(results):
        if not (ways := modes(results, section)):
            continue
        shown = grid(results, section, ways[0])
        table = [[section, *(f"{n}{'*' if n in shown.trained else ''}" for n in shown.lengths)]]
        for row in shown.rows:
            texts = [{"unfitted": "-"}.get(cell.kind, cell.text) for cell in row.cells]
            marks = ["†" * (cell.untrained and cell.kind == "value") for cell in row.cells]
            table.append([row.label, *map("".join, zip(texts, marks, strict=True))])
        lines += aligned(table)
        labels = shown.labels
        seeds = seeds_in_words([row for row in results if row.section == section])
        text = f"{labels.unit} at each length, {labels.better} is better; * the training length"
        lines += [text + (f"; means of {seeds}" if seeds else ""), ""]
    unfitted = [row.first for row in results if row.done and not row.fitted]
    if rules := ordered(result.fit_rule for result in unfitted if result):
        lines.append(f"- not fitted: needs {' or '.join(rules)}")
    if any("†" in line for line in lines):
        lines.append(UNTRAINED)
    lines += [
        f"{x.section}, {x.scheme} failed: {next(iter(x.error.strip().splitlines()), '')}"
        for x in results
        if x.error
    ]
    return "\n".join(lines)
