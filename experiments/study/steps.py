"""The page of a study whose sizes are numbers of steps: which leads are of speed, which remain?"""

import dataclasses
from collections.abc import Mapping
from pathlib import Path

import matplotlib as mpl

from experiments.models.schemes import short
from experiments.pages import plots
from experiments.pages.page import fill
from experiments.pages.tables import Lookup, in_words, interval, mean
from experiments.study.comparison import sign
from experiments.study.page import origin
from experiments.study.plan import Study
from experiments.study.rows import Bounds, Row, Rows

THETAS = {"rope": "10,000", "rope_500": "500", "rope_100": "100"}
"""Bases of the frequencies by the names of schemes."""
_CLOSE = 0.02
"""The greatest difference of schemes that are equal in the limit."""


def against_best(
    rows: Mapping[str, Row], names: Mapping[str, str] = THETAS
) -> tuple[str, dict[str, Row]]:
    """Returns the RoPE that is best on validation text, and all rows with differences to it."""
    by_name = {short(scheme): row for scheme, row in rows.items()}
    view = next(iter(rows.values())).run.task.selection_view
    length = next(iter(rows.values())).run.task.train_length
    best = min(names.keys() & by_name, key=lambda name: mean(by_name[name].values(view, length)))
    reference = by_name[best]
    changes = {"baseline": reference.results, "baseline_selection": reference.selection}
    return best, {name: dataclasses.replace(row, **changes) for name, row in by_name.items()}


def outcome(first: Bounds, last: Bounds) -> str:
    """Returns the kind of a lead, from differences after the fewest and the most steps.

    >>> outcome((-0.1, -0.12, -0.08), (-0.01, -0.015, -0.005))
    'speed'
    """
    if not sign(first):
        return "not resolved at first"
    if sign(last) == -sign(first):
        return "crosses"
    _, low, high = last
    if -_CLOSE < low and high < _CLOSE:
        return "speed"
    beyond = low > _CLOSE if sign(first) > 0 else high < -_CLOSE
    return "limit" if beyond else "not resolved"


def _verdict(values: list[float], least: float = 0.0) -> str:
    """Returns whether a criterion holds: that a mean is at least a threshold."""
    _, low, high = interval(values)
    word = "holds" if low >= least else "fails" if high < least else "is not resolved"
    return f"{word}: {in_words(values, sign='+')}"


def steps_page(
    study: Study, rows: Rows, results: Lookup, pictures: Mapping[str, str], **places: str
) -> str:
    """Returns the page.

    Args:
      study: the study.
      rows: of `rows_of`, by size.
      results: of its runs.
      pictures: the file of the picture by "", if there is one.
      **places: as for `page`.
    """
    runs = list({run.name: run for run in study.runs(results, None)}.values())
    known = [result for run in runs if (result := results(run))]
    sizes = {size: against_best(of_size) for size, of_size in rows.items() if of_size}
    first, *_, last = study.cells
    ends = [sizes[size][1] for size in (first, last) if size in sizes]
    lines = []
    for name in map(short, study.about.schemes):
        if name in THETAS:
            texts = [_score(of_size.get(name)) for _, of_size in sizes.values()]
            lines.append([f"{name}, theta {THETAS[name]}", *texts, ""])
        else:
            of_sizes = [of_size.get(name) for _, of_size in sizes.values()]
            texts = [row.difference_in_words() if row else "" for row in of_sizes]
            both = len(ends) == 2 and all(name in of_size for of_size in ends)
            bounds = [of_size[name].difference for of_size in ends] if both else []
            lines.append([name, *texts, outcome(*bounds) if both else ""])
    return fill(
        Path(__file__).with_name("steps.md.jinja"),
        about=study.about,
        task=study.cells[first][study.about.baseline].task,
        known=len(known),
        expected=len(runs),
        criteria=_criteria([rows[first], rows[last]]),
        sizes=sizes,
        thetas=THETAS,
        rows=lines,
        picture=pictures.get("", ""),
        origin=origin(known, None),
        **places,
    )


def _score(row: Row | None) -> str:
    return f"{mean(row.at_trained_length):.3f}" if row else ""


def _criteria(ends: list[Mapping[str, Row]]) -> dict[str, str]:
    """Returns the criteria with their outcomes; none before both ends have their schemes."""
    if not all({*THETAS, "t5"} <= {*map(short, rows)} for rows in ends):
        return {}
    first, last = (against_best(rows)[1]["t5"].against() for rows in ends)
    less = [b - a / 2 for a, b in zip(first, last, strict=True)]
    others = {name: theta for name, theta in THETAS.items() if name != "rope"}
    gains = [against_best(rows, others)[1]["rope"].against() for rows in ends]
    return {
        "T5's lead is at most half as large at last": _verdict(less),
        f"Theta 100 or 500 is {_CLOSE} ahead of 10,000 at first": _verdict(gains[0], _CLOSE),
        f"It is less than {_CLOSE} ahead at last": _verdict([_CLOSE - x for x in gains[1]]),
    }


def steps_picture(study: Study, rows: Rows) -> str:
    """Returns the plot of scores against steps, as <svg>; a line per scheme, one for RoPE."""
    lines: dict[str, dict[int, Bounds]] = {}
    for of_size in rows.values():
        best, by_name = against_best(of_size) if of_size else ("", {})
        for name, row in by_name.items():
            shown = "rope, best theta" if name == best else "" if name in THETAS else name
            bounds = interval(row.at_trained_length, row.shifts)
            lines.setdefault(shown, {})[row.run.task.train.steps] = bounds
    lines.pop("", None)
    if not lines:
        return ""
    task = study.cells[next(iter(study.cells))][study.about.baseline].task
    with mpl.rc_context({**plots.STYLE, "svg.hashsalt": study.name}):
        figure, axes = plots.new_figure(4.6)
        ends = []
        for name, (colour, marker) in plots.looks([*lines]).items():
            x, y = [*lines.get(name, ())], [*lines.get(name, {}).values()]
            reach = [[m - low for m, low, _ in y], [high - m for m, _, high in y]]
            means = [m for m, _, _ in y]
            axes.errorbar(x, means, yerr=reach, marker=marker, color=colour, elinewidth=1.2)
            ends += [(x[-1], means[-1], colour, 1.0, name)] if x else []
        axes.set_xscale("log")
        ticks = [cells[study.about.baseline].task.train.steps for cells in study.cells.values()]
        axes.set_xticks(ticks, [f"{n:,}" for n in ticks])
        axes.set_xticks([], minor=True)
        axes.set_xlabel("steps")
        axes.set_ylabel(task.labels.unit)
        plots.label_ends(axes, ends)
        return plots.drawing(figure, study.name, "Loss against steps")
