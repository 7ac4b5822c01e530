"""Tables of results without formatting, for the terminal and the report.

A grid is one task under one way of evaluating: rows are schemes (and zero-shot variants of
them), columns are lengths. Beyond the training length a cell has a number only where the scheme
fitted the task at the training length.
"""

import dataclasses
import math
from collections.abc import Iterable, Mapping, Sequence
from typing import Any, ClassVar

from experiments.config_io import STRICT


@dataclasses.dataclass(frozen=True)
class Labels:
    """How tables and plots show the results of a task.

    Attributes:
      about: what is learned, a phrase.
      metric: name of the score.
      unit: the score in words.
      digits: of the score behind the point.
      higher_is_better: whether a higher score is.
      limits: the range of scores in plots; None: from the data.
      length_unit: what lengths count.
      every_length: whether narrow tables show all lengths, rather than the first and the last.
      modes: ways of evaluating by name, with an explanation of each.
      places: what `Evaluation.places` are, from the first (0) to the last (1).
    """

    __pydantic_config__: ClassVar[Any] = STRICT

    about: str = ""
    metric: str = "accuracy"
    unit: str = "accuracy"
    digits: int = 2
    higher_is_better: bool = True
    limits: tuple[float, float] | None = (-0.03, 1.05)
    length_unit: str = "symbols"
    every_length: bool = False
    modes: Mapping[str, str] = dataclasses.field(default_factory=dict)
    places: str = "place in the row"


@dataclasses.dataclass(frozen=True)
class Cell:
    """A number or the reason for its absence.

    Kind is value, unfitted, failed, waiting (for a run that has not ended) or missing.
    """

    kind: str = "missing"
    text: str = ""
    spread: str = ""
    note: int = 0
    best: bool = False


@dataclasses.dataclass(frozen=True)
class Column:
    """A length at which the task was evaluated."""

    length: int
    trained: bool


@dataclasses.dataclass(frozen=True)
class Row:
    """One scheme, or a zero-shot variant of it; `error` where its run failed."""

    label: str
    scheme: str
    cells: tuple[Cell, ...]
    error: str = ""
    variant: str = ""


@dataclasses.dataclass(frozen=True)
class Grid:
    """One task under one way of evaluating."""

    task: str
    labels: Labels
    mode: str
    columns: tuple[Column, ...]
    rows: tuple[Row, ...]


def numbers(values: Iterable) -> list[float]:
    """Returns values as floats, NaN for anything else."""
    ok = (int, float)
    return [float(v) if isinstance(v, ok) and math.isfinite(v) else math.nan for v in values]


def mean(values: Iterable) -> float:
    """Returns the mean; NaN for no values, or if one is not finite.

    >>> mean([1, 2]), mean([])
    (1.5, nan)
    """
    values = numbers(values)
    return sum(values) / len(values) if values else math.nan


def ordered(items: Iterable) -> list:
    """Returns the distinct items in order of first appearance."""
    return list(dict.fromkeys(items))


def one_line(text: object, width: int = 160) -> str:
    """Returns the first line of a text, shortened."""
    line = next(iter(str(text or "").strip().splitlines()), "")
    return line if len(line) <= width else line[: width - 1] + "…"


def tasks(results: dict) -> list[str]:
    """Returns the tasks of the results in order of first appearance."""
    return ordered(run["task"] for run in results.get("runs", []))


def labels(results: dict, task: str) -> Labels:
    """Returns the labels of a task."""
    return Labels(**results.get("tasks", {}).get(task, {}))


def schemes(results: dict) -> list[str]:
    """Returns the schemes of the results in order of first appearance."""
    return ordered(run["scheme"] for run in results.get("runs", []))


def runs_of(results: dict, task: str) -> dict[str, dict]:
    """Returns the runs of a task by scheme; the last one where there are several."""
    return {run["scheme"]: run for run in results.get("runs", []) if run["task"] == task}


def done(run: dict | None) -> bool:
    """Whether a run ended well."""
    return run is not None and run.get("status") == "done"


def modes(results: dict, task: str) -> list[str]:
    """Returns the modes in which a task was evaluated, those with most lengths first."""
    seen: dict[str, set[int]] = {}
    for run in runs_of(results, task).values():
        for evaluation in run.get("evaluations") or []:
            seen.setdefault(evaluation.get("mode") or "plain", set()).add(evaluation["length"])
    return sorted(seen, key=lambda mode: -len(seen[mode]))


def evaluations(run: dict, mode: str, variant: str | None = None) -> dict[int, dict]:
    """Returns a run's evaluations of one mode and variant by length, ascending."""
    found = {
        item["length"]: item
        for item in run.get("evaluations") or []
        if (item.get("mode") or "plain") == mode and item.get("variant") == variant
    }
    return dict(sorted(found.items()))


def places(results: dict, task: str) -> dict[str, dict[int, list[float]]]:
    """Returns the scores by scheme, length and place in the row, of runs that fitted the task.

    They are those of the mode with the most lengths.
    """
    mode = next(iter(modes(results, task)), "plain")
    found: dict[str, dict[int, list[float]]] = {}
    for scheme, run in runs_of(results, task).items():
        items = evaluations(run, mode) if done(run) and run.get("fitted") else {}
        rows = {n: numbers(item["places"]) for n, item in items.items() if item.get("places")}
        if rows:
            found[scheme] = rows
    return found


def paired(
    results: dict, task: str, mode: str, length: int, baseline: str
) -> dict[str, tuple[list[float], list[float]]]:
    """Returns the scores by seed and their differences to the baseline's, by scheme, at a length.

    Schemes that did not fit the task have no scores beyond the training length; runs with other
    seeds than the baseline's have no differences.
    """
    runs, found = runs_of(results, task), {}
    for scheme, run in runs.items():
        item = evaluations(run, mode).get(length) if done(run) else None
        if item and (run.get("fitted") or item.get("in_distribution")):
            found[scheme] = numbers(item["values"])
    own = found.get(baseline, [])

    def differences(scheme: str) -> list[float]:
        if not own or runs[scheme].get("seeds") != runs[baseline].get("seeds"):
            return []
        return [a - b for a, b in zip(found[scheme], own, strict=True)]

    return {scheme: (values, differences(scheme)) for scheme, values in found.items()}


def trained_length(results: dict, task: str) -> int | None:
    """Returns the length at which a task was trained, None where no run says so."""
    found = (run.get("train_length") for run in runs_of(results, task).values())
    return next((length for length in found if length), None)


def variants(run: dict) -> list[str]:
    """Returns the zero-shot variants under which a run was evaluated."""
    return ordered(item["variant"] for item in run.get("evaluations") or [] if item.get("variant"))


def label(scheme: str, variant: str | None = None) -> str:
    """Returns the label of a scheme, or of a zero-shot variant of it.

    >>> label("rope"), label("rope", "ntk"), label("mypkg.mine:MyScheme")
    ('rope', 'rope + NTK', 'MyScheme')
    """
    name = scheme.rpartition(":")[2] or scheme
    return f"{name} + {variant.upper()}" if variant else name


def footnotes(results: dict) -> list[str]:
    """Returns the distinct notes of all evaluations; a cell's `note` counts them from one."""
    return ordered(
        item["note"]
        for run in results.get("runs", [])
        for item in run.get("evaluations") or []
        if item.get("note")
    )


def step_times(results: dict, task: str) -> dict[str, float]:
    """Returns milliseconds per training step by scheme, of finished runs."""
    return {
        scheme: 1e3 * run["train_seconds"] / run["steps"]
        for scheme, run in runs_of(results, task).items()
        if done(run) and run.get("train_seconds") and run.get("steps")
    }


def note_mark(number: int) -> str:
    """Returns the mark of a footnote, counted from one; nothing for zero.

    >>> note_mark(0), note_mark(2), note_mark(7)
    ('', '‡', '[7]')
    """
    return "†‡§¶"[number - 1 : number] or f"[{number}]" if number else ""


def grid(results: dict, task: str, mode: str | None = None) -> Grid | None:
    """Returns the grid of a task, in the mode with the most lengths unless one is named.

    None where nothing of that task was evaluated.
    """
    runs = runs_of(results, task)
    mode = mode or next(iter(modes(results, task)), "plain")
    items = [
        (run, item)
        for run in runs.values()
        for item in run.get("evaluations") or []
        if (item.get("mode") or "plain") == mode
    ]
    if not items:
        return None
    words = labels(results, task)
    trained = {item["length"] for run, item in items if item.get("in_distribution")}
    lengths = sorted({item["length"] for _, item in items})
    columns = tuple(Column(length, length in trained) for length in lengths)
    notes = footnotes(results)
    rows = [
        _row(run, words, mode, variant, columns, notes)
        for run in runs.values()
        for variant in (None, *variants(run))
        if not variant or evaluations(run, mode, variant)
    ]
    return Grid(task, words, mode, columns, _mark_best(rows, words, len(columns)))


def _row(
    run: dict,
    words: Labels,
    mode: str,
    variant: str | None,
    columns: Sequence[Column],
    notes: list[str],
) -> Row:
    name = label(run["scheme"], variant)
    if run.get("status") == "waiting":
        return Row(name, run["scheme"], (Cell("waiting"),) * len(columns))
    if not done(run):
        failed = (Cell("failed", "failed"),) * len(columns)
        return Row(name, run["scheme"], failed, one_line(run.get("error") or "failed"))
    found = evaluations(run, mode, variant)
    cells = []
    for column in columns:
        item = found.get(column.length)
        if item is None:
            cells.append(Cell())
            continue
        values, digits = numbers(item["values"]), words.digits
        note = notes.index(item["note"]) + 1 if item.get("note") else 0
        text, spread = f"{mean(values):.{digits}f}", ""
        if len(values) > 1:
            spread = f"{min(values):.{digits}f}\u2013{max(values):.{digits}f}"
        kind = "value" if run.get("fitted") or item.get("in_distribution") else "unfitted"
        cells.append(Cell(kind, text, spread, note))
    return Row(name, run["scheme"], tuple(cells), variant=variant or "")


def _mark_best(rows: list[Row], words: Labels, count: int) -> tuple[Row, ...]:
    """Marks the best number of each column, as printed: ties are all marked."""
    for at in range(count):
        texts = [row.cells[at].text for row in rows if row.cells[at].kind == "value"]
        texts = [text for text in texts if text != "nan"]
        if len(set(texts)) < 2:
            continue
        best = (max if words.higher_is_better else min)(texts, key=float)
        for i, row in enumerate(rows):
            if row.cells[at].kind == "value" and row.cells[at].text == best:
                cells = list(row.cells)
                cells[at] = dataclasses.replace(cells[at], best=True)
                rows[i] = dataclasses.replace(row, cells=tuple(cells))
    return tuple(rows)
