"""Blocks of a study with many schemes: a picture, a summary and the best with more seeds."""

import math
from collections.abc import Iterator, Mapping

import matplotlib as mpl
import numpy as np

from experiments.models.schemes import label
from experiments.pages import plots
from experiments.pages.page import as_csv, table
from experiments.runs.scores import UNSTABLE
from experiments.stats import holm, in_cell, in_words, mean, t_tests
from experiments.study.comparison import FLAT
from experiments.study.numbers import ratio
from experiments.study.page import Context
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


def screen(page: Context) -> Iterator[str]:
    """Yields the settings of the first size."""
    cells = next(iter(page.study.cells.values()))
    task, about = cells[page.study.about.baseline].task, cells[page.study.about.baseline].about
    model, train = task.model, task.train
    on = "validation text" if task.selection_view != task.views[0] else "data of the report"
    yield (
        f"A screen of {len(cells)} schemes, chains and patterns of layers: {model.num_layers} "
        f"layers of width\n{model.model_dim} with {model.num_heads} heads, {train.steps} steps of "
        f"{train.batch} x {task.train_length} bytes, {about.seeds} reported seeds at the\n"
        f"best of {len(about.rates)} rates by one run on {on} (*: the least or the greatest)."
    )


def summary(page: Context) -> Iterator[str]:
    """Yields the schemes that are better than the baseline, by its most exact results."""
    baseline, name = page.study.about.baseline, page.baseline
    screened, *finalists = page.rows.values()
    count = len(next(iter(page.study.cells.values())))
    if len(screened) < count:
        yield f"**{len(screened)} of {count} schemes have ended.**"
    if not screened:
        return
    task = screened[baseline].task
    reference = next(of_size[baseline] for of_size in [*finalists, screened] if of_size)
    trained = {scheme: mean(row.at_trained_length) for scheme, row in screened.items()}
    scores = {s: row.at_trained_length for s, row in screened.items() if row.is_stable}
    value = mean(reference.at_trained_length)
    ahead = [s for s in scores if s != baseline and task.labels.sign * (trained[s] - value) < 0.0]
    lines = [
        f"{len(ahead)} of {len(scores)} have a better mean than {name}'s {value:.3f} over "
        f"{len(reference.results)} seeds at the trained\nlength."
    ]
    p_values, spread = t_tests(scores, reference.at_trained_length)
    p_values.pop(baseline, None)
    if p_values:
        resolved = [scheme for scheme in ahead if scheme in holm(p_values)]
        names = f": {', '.join(map(label, resolved))}" if resolved else ""
        lines[0] += (
            f" By t tests with the pooled standard deviation of {spread:.3f} and Holm's correction "
            f"for {len(p_values)} comparisons,\n{len(resolved)} of these are ahead{names}."
        )
        lines += _notes(screened, resolved, reference)
        if scales := published_scales({s: trained[s] for s in scores}, spread):
            lines.append(
                f"With the logit scale that they were published with: {', '.join(scales)}."
            )
    greatest = max(screened[baseline].cell.about.rates)
    highest = sum(x.task.train.learning_rate == greatest for x in screened.values())
    lines.append(
        f"The greatest rate, {greatest:g}, is the best one for {highest} of {len(screened)} "
        f"schemes; {name}'s {len(reference.results)} seeds have "
        f"{reference.task.train.learning_rate:g}."
    )
    yield "\n".join(lines)
    caption = (
        f"Scores by the time of a step, without those {_SHOWN:g} and more behind {name}; colour: "
        "their rise at the longest"
    )
    yield from page.picture("", caption, lambda: catalogue_picture(page.study, page.rows))
    yield (
        f"[{page.numbers}]({page.numbers}): {task.labels.unit} in windows of each length; time and "
        "memory of a training step,\nrelative to no encoding."
    )
    yield f"```{{csv-table}}\n:file: {page.numbers}\n:header-rows: 1\n```"


def _notes(screened: Mapping[str, Row], resolved: list[str], reference: Row) -> Iterator[str]:
    task = reference.task
    rises = {s: mean(_longest(x)) - mean(x.at_trained_length) for s, x in screened.items()}
    if flat := [label(s) for s in resolved if task.labels.sign * rises[s] <= FLAT]:
        yield (
            f"Of these, {', '.join(flat)} lose at most {FLAT:g} at "
            f"{task.longest / task.train_length:g} times the length."
        )
    if untested := [label(scheme) for scheme, row in screened.items() if not row.is_stable]:
        yield (
            "Not tested, as a seed has no finite score or seeds have a standard deviation above "
            f"{UNSTABLE:g}: {', '.join(untested)}."
        )


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
        first, task = row.results[0], row.task
        scores = {n: row.values(task.views[0], n) for n in task.test_lengths}
        line = {"scheme": label(scheme)}
        line |= {str(n): in_cell(x) for n, x in scores.items()}
        line["step"] = ratio(row.step, none.step if none else None)
        line["memory"] = ratio(first.memory_bytes, none.results[0].memory_bytes if none else None)
        line["parameters"] = f"{first.parameters:,}" if first.parameters else ""
        lines.append(line | {"rate": _rate(row)})
    return as_csv(lines)


def _rate(row: Row) -> str:
    rate = row.task.train.learning_rate
    return f"{rate:g}{'*' if row.selection.is_edge(rate) else ''}"


def finalists(page: Context) -> Iterator[str]:
    """Yields a table of each further size, whose schemes the first one chose."""
    (first, screened), *further = page.rows.items()
    name = page.baseline
    for size, rows in further:
        if not rows:
            continue
        baseline = rows[page.study.about.baseline]
        about, task = baseline.cell.about, baseline.task
        chose = page.study.cells[first][page.study.about.baseline].about.seeds
        curve = curve_of(baseline, page.results, chose)
        heads = ["scheme", task.labels.unit, f"difference to {name}", f"at {task.longest}"]
        heads += [f"to {name} in its time"] if curve else []
        lines = []
        for scheme, row in rows.items():
            difference = in_words(row.against()[chose:], 3, "+", row.shifts_against)
            is_baseline = scheme == page.study.about.baseline
            lines.append([label(scheme), in_cell(row.at_trained_length)])
            lines[-1] += ["" if is_baseline else difference, in_cell(_longest(row))]
            if curve:
                in_time = _in_time(row, chose, screened[scheme].step, curve)
                lines[-1].append("" if is_baseline else in_time)
        yield f"## {size.capitalize()}"
        also = (
            f" {name.capitalize()} also ran for other numbers of steps, at the same rate."
            if curve
            else ""
        )
        yield (
            f"{len(rows)} of {len(page.study.compared(size, page.results))} schemes with "
            f"{about.seeds} seeds: the {about.best} with the best means above, and\nothers for "
            f"comparison, at the best of the same rates by {about.selection_seeds} runs. The first "
            f"{chose} seeds chose\nthese schemes, so differences are of the other seeds.{also}"
        )
        yield table(heads, lines)


def _in_time(row: Row, chose: int, step: float | None, curve: Mapping[float, float]) -> str:
    """Returns the difference to the baseline with as much time, read off its scores by steps.

    Seeds that `chose` the scheme, the first ones, are left out.
    """
    value = mean(map(score, row.results[chose:]))
    if step is None or math.isnan(value):
        return ""
    at_step = np.interp(np.log2(step), np.log2([*curve]), [*curve.values()])
    # Beyond the numbers of steps that the baseline has, it is at least, or at most, this good.
    signs = "<>" if row.task.labels.sign > 0 else "><"
    bound = f"{signs[0]} " if step < min(curve) else f"{signs[1]} " if step > max(curve) else ""
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
    task, baseline = none.task, study.about.baseline
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
    return row.values(row.task.views[0], row.task.longest)
