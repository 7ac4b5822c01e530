"""All numbers of a study as CSV, a row per size and scheme."""

import math
import statistics
from collections.abc import Mapping

from experiments.models.schemes import label
from experiments.pages.page import as_csv
from experiments.runs.run import Lookup, Run
from experiments.stats import in_cell, in_words
from experiments.study.cell import Cell
from experiments.study.plan import Study
from experiments.study.rows import Row, Rows, curve_of, gain
from experiments.study.selection import Selection


def numbers(study: Study, rows: Rows, results: Lookup) -> str:
    """Returns a table as CSV, best schemes first.

    The last columns say how settings were chosen. At each rate there is the score of one seed, or
    the mean and the standard deviation over the selection seeds (of those that have ended, with
    their number), in brackets if they are unstable, with * at the best. Relative to the best rate's
    are the same run with other rounding and the tries, with * if chosen. Those of variants are
    relative to the same runs' scores at the trained length.
    """
    lines = []
    for size, of_size in rows.items():
        cells = study.compared(size, results)
        curve = curve_of(of_size[study.about.baseline], results) if of_size else {}
        for scheme in [*of_size, *(scheme for scheme in cells if scheme not in of_size)]:
            line = {"size": size, "scheme": label(scheme)}
            if scheme in of_size:
                line |= _scores(of_size[scheme], scheme, study.about.baseline, curve)
            lines.append(line | _choice(cells[scheme], results))
    return as_csv(lines)


def _scores(row: Row, scheme: str, baseline: str, curve: Mapping[float, float]) -> dict[str, str]:
    task, first, name = row.task, row.results[0], label(baseline)
    line = {
        "unit": task.labels.unit,
        "score": in_words(row.at_trained_length, shifts=row.shifts),
        f"difference to {name}": "" if scheme == baseline else row.difference_in_words(),
        "rate": row.rate_in_words(),
        f"step relative to {name}": ratio(row.step, 1.0),
        "in equal time, difference": row.difference_in_words(row.timed) if row.timed else "",
        "compute gain": _gain(row, curve) if curve and row.timed else "",
        "parameters": f"{first.parameters:,}" if first.parameters else "",
    }
    for view in task.views:
        for length in sorted({int(n) for r in row.results for n in r.scores.get(view, {})}):
            line[f"{view} {length}"] = in_cell(row.values(view, length))
    for name, by_length in row.variants.items():
        for length, differences in by_length.items():
            line[f"{row.label(name)} {length}"] = in_words(differences, sign="+")
    return line


def ratio(number: float | None, whole: float | None) -> str:
    """Returns a ratio as text, nothing where a number is not known."""
    return f"{number / whole:.2f}" if number and whole else ""


def _gain(row: Row, curve: Mapping[float, float]) -> str:
    if (bounds := gain(row, curve)) is None:
        return "-"
    words = []
    for budget in bounds:
        beyond = {0.0: f"< {min(curve):g}", math.inf: f"> {max(curve):g}"}
        words.append(beyond.get(budget, f"{budget:.2f}"))
    middle, low, high = words
    return middle if low == high or len(row.timed) < 2 else f"{middle} [{low}, {high}]"


def _choice(cell: Cell, results: Lookup) -> dict[str, str]:
    if cell.source is not None:
        return {}
    selection = cell.selection(results)
    line = {
        f"rate {run.task.train.learning_rate:g}": _score(run, selection, results)
        for run in selection.first
    }
    best = selection.best_of_grid
    if best is None:
        return line
    if again := selection.other_rounding:
        line["other rounding"] = f"{selection.score(again) - selection.score(best):+.3f}"
    middle = selection.means([best])[best]
    for i, run in enumerate(selection.tries, 1):
        if run in selection.tried:
            change = selection.means([run])[run] - middle
        else:
            change = selection.score(run) - selection.score(best)
        text = f"{_setting(run, best)}: {f'{change:+.3f}' if math.isfinite(change) else '-'}"
        text = f"({text})" if run in selection.unstable else text
        line[f"try {i}"] = f"{text} *" if run == selection.chosen else text
    return line


def _score(run: Run, selection: Selection, results: Lookup) -> str:
    """Returns the score of a rate in words, nothing before its run has ended."""
    if results(run) is None:
        return ""
    runs = selection.tried.get(run, (run,))
    scores = [selection.score(each) for each in runs if results(each)]
    if not all(map(math.isfinite, scores)):
        return in_cell(scores)
    text = f"{statistics.fmean(scores):.3f}"
    if len(scores) < len(runs):
        text += f" ({len(scores)} of {len(runs)} seeds)"
    elif len(runs) > 1:
        text += f" ± {statistics.stdev(scores):.3f}"
    if run in selection.unstable:
        return f"({text})"
    return f"{text} *" if run == selection.best_of_grid else text


def _setting(run: Run, best: Run) -> str:
    """Returns in words how the setting of a try differs from the best rate's."""
    train = run.task.train
    if train.scheme_rate != best.task.train.scheme_rate:
        return f"{train.scheme_rate:g} x"
    return f"{train.learning_rate:.2g}"
