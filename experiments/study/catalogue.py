"""The page of a study with many schemes: a picture, a summary and the best with more seeds."""

import math
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import matplotlib as mpl
import numpy as np

from experiments.models.schemes import label
from experiments.pages import plots
from experiments.pages.page import as_csv, fill
from experiments.runs.run import Lookup
from experiments.stats import holm, in_cell, in_words, mean, t_tests
from experiments.study.clock import Clock
from experiments.study.comparison import FLAT
from experiments.study.numbers import ratio
from experiments.study.page import origin
from experiments.study.plan import Study
from experiments.study.rows import Row, Rows, curve_of
from experiments.study.selection import score

_SHOWN = 0.1
"""How far beyond the baseline's score a scheme may be to be in the picture."""
_RISES = (
    (-math.inf, f"at most {FLAT:g}", plots.PALETTE[2]),
    (FLAT, "to 0.5", plots.PALETTE[4]),
    (0.5, "more", plots.PALETTE[1]),
)
"""Classes of the rise of a score beyond the trained length: above which, in words, the colour."""


def catalogue_page(
    study: Study,
    rows: Rows,
    results: Lookup,
    clock: Clock | None,
    pictures: Mapping[str, str],
    **places: str,
) -> str:
    """Returns the page: a summary of the first size, and a table of each further size.

    Arguments are as for `experiments.study.page.page`; `pictures[""]` is the file of the picture.
    """
    baseline, (first, *further) = study.about.baseline, study.cells
    cell, screen = study.cells[first][baseline], rows[first]
    task, about = cell.task, cell.about
    validated = task.selection_view != task.views[0]
    return fill(
        Path(__file__).with_name("catalogue.md.jinja"),
        about=study.about,
        baseline=label(baseline),
        schemes=len(study.cells[first]),
        ended=len(screen),
        model=task.model,
        train=task.train,
        length=task.train_length,
        longest=task.longest,
        times=f"{task.longest / task.train_length:g}",
        rates=len(about.rates),
        seeds=about.seeds,
        unit=task.labels.unit,
        on="validation text" if validated else "data of the report",
        limit=f"{FLAT:g}",
        shown=f"{_SHOWN:g}",
        picture=pictures.get("", ""),
        finalists=[
            _finalists(study, size, rows[size], screen, results) for size in further if rows[size]
        ],
        origin=origin(study.known(results, clock)[0], clock),
        **(_summary(screen, [rows[size] for size in further], baseline) if screen else {}),
        **places,
    )


def _summary(screen: Mapping[str, Row], finalists: list, baseline: str) -> dict[str, Any]:
    """Schemes that are better than the baseline, by its most exact results."""
    sign = screen[baseline].cell.task.labels.sign
    reference = next(of_size[baseline] for of_size in [*finalists, screen] if of_size)
    trained = {scheme: mean(row.at_trained_length) for scheme, row in screen.items()}
    longest = {scheme: mean(_longest(row)) for scheme, row in screen.items()}
    score = mean(reference.at_trained_length)
    scores = {s: row.at_trained_length for s, row in screen.items() if row.is_stable}
    ahead = [s for s in scores if s != baseline and sign * trained[s] < sign * score]
    p_values, spread = t_tests(scores, reference.at_trained_length)
    p_values.pop(baseline, None)
    rejected = holm(p_values)
    resolved = [scheme for scheme in ahead if scheme in rejected]
    flat = [s for s in resolved if sign * (longest[s] - trained[s]) <= FLAT]
    rates = {s: row.run.task.train.learning_rate for s, row in screen.items()}
    greatest = max(screen[baseline].cell.about.rates)

    return {
        "ahead": ahead,
        "tests": len(p_values),
        "untested": [label(scheme) for scheme in screen if scheme not in scores],
        "unstable": f"{reference.cell.about.unstable:g}",
        "scales": published_scales({s: trained[s] for s in scores}, spread),
        "pooled": f"{spread:.3f}",
        "resolved": [label(scheme) for scheme in resolved],
        "flat": [label(scheme) for scheme in flat],
        "score": f"{score:.3f}",
        "exact_seeds": len(reference.results),
        "highest": sum(rate == greatest for rate in rates.values()),
        "greatest": f"{greatest:g}",
        "rate": f"{reference.run.task.train.learning_rate:g}",
    }


def published_scales(trained: Mapping[str, float], spread: float) -> list[str]:
    """Returns by how much scores with the published logit scale differ from scores with 1/sqrt(H).

    The standard error of a difference of two means of two seeds is the standard deviation.

    >>> published_scales({"t5": 2.2, "t5_own_scale": 2.25, "rope": 2.0}, 0.02)
    ['t5 +0.050 (matters)']
    >>> published_scales({"t5": 2.2, "t5_own_scale": 2.17}, 0.02)
    ['t5 -0.030 (within two standard errors)']
    """
    by_name, lines = {label(scheme): value for scheme, value in trained.items()}, []
    for name, value in by_name.items():
        plain = name.removesuffix("_own_scale")
        if plain != name and plain in by_name:
            difference = value - by_name[plain]
            verdict = "matters" if abs(difference) > 2 * spread else "within two standard errors"
            lines.append(f"{plain} {difference:+.3f} ({verdict})")
    return lines


def screen_numbers(rows: Mapping[str, Row]) -> str:
    """Returns the table of all schemes as CSV, best first."""
    lines, none = [], rows.get("none")
    for scheme, row in rows.items():
        first, task = row.results[0], row.cell.task
        scores = {n: row.values(task.views[0], n) for n in task.test_lengths}
        line = {"scheme": label(scheme)}
        line |= {str(n): in_cell(x) for n, x in scores.items()}
        line["step"] = ratio(row.step, none.step if none else None)
        line["memory"] = ratio(first.memory_bytes, none.results[0].memory_bytes if none else None)
        line["parameters"] = f"{first.parameters:,}" if first.parameters else ""
        lines.append(line | {"rate": _rate(row)})
    return as_csv(lines)


def _rate(row: Row) -> str:
    """Returns the learning rate, marked if it is the least or the greatest of the grid."""
    rate = row.run.task.train.learning_rate
    return f"{rate:g}{'*' if row.selection.is_edge(rate) else ''}"


def _finalists(
    study: Study, size: str, rows: Mapping[str, Row], screen: Mapping[str, Row], results: Lookup
) -> dict[str, Any]:
    """The table of a size with more seeds."""
    baseline = study.about.baseline
    chose = screen[baseline].cell.about.seeds
    curve = curve_of(rows[baseline], results, chose)
    lines = []
    for scheme, row in rows.items():
        difference = in_words(row.against()[chose:], 3, "+", row.shifts_against)
        lines.append([label(scheme), in_cell(row.at_trained_length)])
        lines[-1] += ["" if scheme == baseline else difference, in_cell(_longest(row))]
        if curve:
            lines[-1].append(
                "" if scheme == baseline else _in_time(row, chose, screen[scheme].step, curve)
            )
    about, count = rows[baseline].cell.about, len(study.compared(size, results))
    return {"name": size, "about": about, "rows": lines, "schemes": count, "curve": curve}


def _in_time(row: Row, chose: int, step: float | None, curve: Mapping[float, float]) -> str:
    """Returns the difference to the baseline with as much time, read off its scores by steps.

    Seeds that `chose` the scheme, the first ones, are left out.
    """
    value = mean(map(score, row.results[chose:]))
    if step is None or math.isnan(value):
        return ""
    at_step = np.interp(np.log2(step), np.log2([*curve]), [*curve.values()])
    bound = "" if step <= max(curve) else "> " if row.cell.task.labels.sign > 0 else "< "
    return f"{bound}{value - at_step:+.3f}"


def catalogue_picture(study: Study, rows: Rows) -> str:
    """Returns the plot of scores against times of a step, as <svg>; colours are rises by length.

    Scores are of the last size that has them, with most seeds.
    """
    screen, *further = rows.values()
    best = dict(screen)
    for of_size in further:
        best |= of_size
    none = screen.get("none")
    if none is None or none.step is None:
        return ""
    task, baseline = none.cell.task, study.about.baseline
    sign = task.labels.sign
    limit = sign * mean(best[baseline].at_trained_length) + _SHOWN
    points = {
        scheme: (step / none.step, mean(row.at_trained_length), mean(_longest(row)))
        for scheme, row in best.items()
        if (step := screen[scheme].step)
    }
    points = {scheme: point for scheme, point in points.items() if sign * point[1] <= limit}
    if not points:
        return ""
    with mpl.rc_context({**plots.STYLE, "svg.hashsalt": study.name, "axes.grid.axis": "both"}):
        figure, axes = plots.new_figure(0.9 + 0.175 * max(16, len(points)), right=1.8, bottom=0.95)
        axes.set_xscale("log")
        kinds = [(words, colour) for _, words, colour in _RISES]
        if any(math.isnan(longest) for *_, longest in points.values()):
            kinds.append(("not known", plots.BASELINE))
        for words, colour in kinds:
            axes.plot([], [], "o", color=colour, label=words)
        for x, y, longest in points.values():
            axes.plot([x], [y], "o", color=_colour(sign * (longest - y)), markersize=6.5, zorder=3)
        axes.margins(0.05)
        axes.set_xlim(axes.get_xlim())
        ticks = [tick for tick in (1, 1.5, 2, 3, 4, 6, 8, 12) if tick <= axes.get_xlim()[1]]
        axes.set_xticks(ticks, [f"{tick:g}" for tick in ticks])
        axes.set_xticks([], minor=True)
        edge = axes.get_xlim()[1]
        for x, y, longest in points.values():
            axes.plot(
                (x, edge), (y, y), color=_colour(sign * (longest - y)), alpha=0.25, linewidth=0.6
            )
        axes.set_xlabel("time of a training step, relative to no encoding")
        axes.set_ylabel(f"{task.labels.unit} at {task.train_length}")
        ends = [(x, y, plots.INK, 1.0, label(scheme)) for scheme, (x, y, _) in points.items()]
        plots.label_ends(axes, ends)
        title = f"rise at {task.longest / task.train_length:g} times the length"
        figure.legend(loc="lower left", frameon=False, ncols=3, title=title, alignment="left")
        return plots.drawing(figure, study.name, "Loss against the time of a step")


def _colour(rise: float) -> str:
    return next((colour for least, _, colour in _RISES[::-1] if rise > least), plots.BASELINE)


def _longest(row: Row) -> list[float]:
    return row.values(row.run.task.views[0], row.cell.task.longest)
