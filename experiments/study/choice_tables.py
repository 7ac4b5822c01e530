"""Tables of a study's page: how the settings of each scheme were chosen."""

import math
import statistics
from collections.abc import Iterator, Mapping
from typing import Any

from experiments.pages.markdown import table
from experiments.pages.scheme_results import Lookup
from experiments.pages.tables import label
from experiments.runs.run import Run
from experiments.study.plan import Cell
from experiments.study.selection import Selection


def chosen_on(task: Any) -> str:
    """Returns in words the data whose scores choose settings."""
    return "data of the report" if task.selection_view == task.views[0] else "validation text"


def choice_tables(cells: Mapping[str, Cell], results: Lookup) -> Iterator[str]:
    """Yields the tables of a size, as far as its runs have ended."""
    selections = {name: cell.selection(results) for name, cell in cells.items()}
    if not any(results(run) for each in selections.values() for run in each.first):
        return
    about, on = (cell := next(iter(cells.values()))).about, chosen_on(cell.task)
    if about.rates_of:
        yield f"The settings are those of the size {about.rates_of}."
        yield ""
        return
    yield (
        f"How the rates were chosen: scores on the {on}, of one seed, or the mean and "
        f"the standard deviation of {about.selection_seeds}. The best stable rate is bold, "
        "unstable ones are in brackets."
    )
    yield ""
    rates = [f"{rate:g}" for rate in about.rates]
    lines = [
        [label(name), *(_score(run, each, results) for run in each.first)]
        for name, each in selections.items()
    ]
    yield from table(["scheme", *rates], lines)
    edges = [
        label(name)
        for name, each in selections.items()
        if each.best_of_grid and each.best_of_grid in (each.first[0], each.first[-1])
    ]
    if edges:
        yield f"The best rate lies at the edge of the grid for {', '.join(edges)}."
        yield ""
    yield (
        "The next table is relative to the best rate's mean or, for one seed, to its run with it: "
        "the optimum of a parabola through the best rate and its neighbours, if these are near; "
        "the same run with other rounding; and the tries. A try that improved the run of one seed "
        f"has the mean of {about.selection_seeds}; unstable ones are in brackets. The "
        "chosen setting is bold."
    )
    yield ""
    heads = ["scheme", "optimum", "other rounding", *(f"try {i + 1}" for i in range(about.tries))]
    yield from table(
        heads, [[label(n), *_further(each, about.tries)] for n, each in selections.items()]
    )


def _score(run: Run, selection: Selection, results: Lookup) -> str:
    """Returns the score of a rate in words, nothing before its run has ended."""
    if results(run) is None:
        return ""
    runs = selection.tried.get(run, (run,))
    scores = [selection.score(each) for each in runs if results(each)]
    if not all(map(math.isfinite, scores)):
        return "diverged"
    text = f"{statistics.fmean(scores):.3f}"
    if len(scores) == len(runs) > 1:
        text += f" ± {statistics.stdev(scores):.3f}"
    if run in selection.unstable:
        return f"({text})"
    return f"**{text}**" if run == selection.best_of_grid else text


def _further(selection: Selection, tries: int) -> list[str]:
    best = selection.best_of_grid
    if best is None:
        return [""] * (2 + tries)
    optimum, again = selection.optimum(), selection.other_rounding
    texts = ["-" if optimum is None else f"{optimum:+.3f}"]
    texts.append(f"{selection.score(again) - selection.score(best):+.3f}" if again else "")
    middle = selection.means([best])[best]
    for run in selection.tries:
        if run in selection.tried:
            change = selection.means([run])[run] - middle
        else:
            change = selection.score(run) - selection.score(best)
        text = f"{_setting(run, best)}: {f'{change:+.3f}' if math.isfinite(change) else '-'}"
        if run in selection.unstable:
            text = f"({text})"
        texts.append(f"**{text}**" if run == selection.chosen else text)
    return texts


def _setting(run: Run, best: Run) -> str:
    """Returns in words how the setting of a try differs from the best rate's."""
    train = run.task.train
    if train.scheme_rate != best.task.train.scheme_rate:
        return f"{train.scheme_rate:g} x"
    return f"{train.learning_rate:.2g}"
