"""Tables of scores without formatting.

A grid is one task under one way of evaluating: rows are schemes (and zero-shot variants of
them), columns are lengths. A cell beyond the training length has a number only if the scheme fitted
the task at the training length.
"""

import dataclasses
import math
from collections.abc import Sequence

from experiments.runs.scores import (
    Results,
    SchemeResults,
    Score,
    modes,
    of_section,
    sections,
    seeds_in_words,
)
from experiments.stats import in_cell, mean, ordered
from experiments.tasks.base import Labels

UNTRAINED = (
    "† beyond the trained length a learned table has rows that are as at the start: a score that "
    "is good there does not need them"
)


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
    label: str
    cells: list[Cell]


@dataclasses.dataclass(frozen=True)
class Grid:
    labels: Labels
    lengths: list[int]
    trained: set[int]
    rows: list[Row]


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
