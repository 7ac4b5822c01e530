"""Tables of results without formatting, for the terminal and the report.

A grid is one task under one way of evaluating: rows are schemes (and zero-shot variants of
them), columns are lengths. A cell beyond the training length has a number only if the scheme fitted
the task at the training length.
"""

import dataclasses
import math
from collections.abc import Iterable, Sequence

from experiments.models.schemes import short
from experiments.pages.scheme_results import SchemeResults, mean
from experiments.tasks.labels import Labels

Results = Sequence[SchemeResults]


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
    """One scheme, or a zero-shot variant of it."""

    label: str
    scheme: str
    cells: tuple[Cell, ...]
    variant: str = ""


@dataclasses.dataclass(frozen=True)
class Grid:
    """One section under one way of evaluating."""

    section: str
    labels: Labels
    mode: str
    columns: tuple[Column, ...]
    rows: tuple[Row, ...]


def ordered(items: Iterable) -> list:
    """Returns the distinct items in order of first appearance."""
    return list(dict.fromkeys(items))


def one_line(text: object, width: int = 160) -> str:
    """Returns the first line of a text, shortened."""
    line = next(iter(str(text or "").strip().splitlines()), "")
    return line if len(line) <= width else line[: width - 1] + "…"


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


def label(scheme: str, variant: str = "") -> str:
    """Returns the label of a scheme, or of a zero-shot variant of it.

    >>> label("rope"), label("rope", "ntk"), label("rope+mypkg.mine:MyScheme")
    ('rope', 'rope + NTK', 'rope+MyScheme')
    """
    name = short(scheme)
    return f"{name} + {variant.upper()}" if variant else name


def footnotes(results: Results) -> list[str]:
    """Returns the distinct notes of all scores; a cell's `note` counts them from one."""
    return ordered(
        score.note
        for row in results
        for mode, variant in row.views
        for score in row.scores(mode, variant).values()
        if score.note
    )


def step_times(results: Results, section: str) -> dict[str, float]:
    """Returns milliseconds per training step by scheme."""
    rows = of_section(results, section)
    return {s: row.step_time for s, row in rows.items() if math.isfinite(row.step_time)}


def note_mark(number: int) -> str:
    """Returns the mark of a footnote, counted from one; nothing for zero.

    >>> note_mark(0), note_mark(2), note_mark(7)
    ('', '‡', '[7]')
    """
    return "†‡§¶"[number - 1 : number] or f"[{number}]" if number else ""


def grid(results: Results, section: str, mode: str | None = None) -> Grid | None:
    """Returns the grid of a section, in the mode with the most lengths unless one is named.

    None where nothing of that section was evaluated.
    """
    rows = of_section(results, section)
    mode = mode or next(iter(modes(results, section)), "")
    scores = [
        (length, score)
        for row in rows.values()
        for shown, variant in row.views
        if shown == mode
        for length, score in row.scores(mode, variant).items()
    ]
    if not scores:
        return None
    labels = next(iter(rows.values())).labels
    trained = {length for length, score in scores if score.in_distribution}
    columns = tuple(Column(n, n in trained) for n in sorted({length for length, _ in scores}))
    notes = footnotes(results)
    lines = [
        _row(row, labels, mode, variant, columns, notes)
        for row in rows.values()
        for variant in ("", *(v for m, v in row.views if v and m == mode))
    ]
    return Grid(section, labels, mode, columns, _mark_best(lines, labels, len(columns)))


def _row(
    row: SchemeResults,
    labels: Labels,
    mode: str,
    variant: str,
    columns: Sequence[Column],
    notes: list[str],
) -> Row:
    name = label(row.scheme, variant)
    if row.waiting:
        return Row(name, row.scheme, (Cell("waiting"),) * len(columns))
    if not row.done:
        return Row(name, row.scheme, (Cell("failed", "failed"),) * len(columns))
    scores, cells, digits = row.scores(mode, variant), [], labels.digits
    for column in columns:
        score = scores.get(column.length)
        if score is None:
            cells.append(Cell())
            continue
        note = notes.index(score.note) + 1 if score.note else 0
        text, spread = f"{mean(score.values):.{digits}f}", ""
        if len(score.values) > 1:
            spread = f"{min(score.values):.{digits}f}\u2013{max(score.values):.{digits}f}"
        kind = "value" if row.fitted or score.in_distribution else "unfitted"
        cells.append(Cell(kind, text, spread, note))
    return Row(name, row.scheme, tuple(cells), variant)


def _mark_best(rows: list[Row], labels: Labels, count: int) -> tuple[Row, ...]:
    """Marks the best number of each column, as printed: ties are all marked."""
    for column in range(count):
        texts = [row.cells[column].text for row in rows if row.cells[column].kind == "value"]
        texts = [text for text in texts if text != "nan"]
        if len(set(texts)) < 2:
            continue
        best = (max if labels.higher_is_better else min)(texts, key=float)
        for i, row in enumerate(rows):
            if row.cells[column].kind == "value" and row.cells[column].text == best:
                cells = list(row.cells)
                cells[column] = dataclasses.replace(cells[column], best=True)
                rows[i] = dataclasses.replace(row, cells=tuple(cells))
    return tuple(rows)
