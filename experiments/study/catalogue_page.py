"""The page of a study with many schemes: one table, one picture and a summary."""

import math
from collections.abc import Iterator, Mapping, Sequence

import matplotlib as mpl

from experiments.pages import plots
from experiments.pages.intervals import in_words
from experiments.pages.markdown import table
from experiments.pages.plot_labels import label_ends
from experiments.pages.scheme_results import Lookup, mean
from experiments.pages.tables import label
from experiments.study.answer import FLAT
from experiments.study.choice_tables import chosen_on
from experiments.study.clock import Clock
from experiments.study.page import provenance_of
from experiments.study.plan import Study
from experiments.study.rows import Row, rows_of

_HEAD = """\
# The catalogue in one table

This page is made by `python -m experiments study {file}` from the results in `{results}`; it is not
edited by hand.

A screen of {count} schemes, chains and patterns of layers: {layers} layers of width {width} with
{heads} heads, {steps} steps of {batch} x {length} bytes. Each scheme has the best of {rates} rates
by one run on {on}, marked * if it is the least or the greatest of them, and {seeds}
reported seeds. Scores are {unit} of held-out data in windows of each length; the
standard deviation over seeds is {spread:.3f} at the trained length in the median. Step time and
memory are of a training step, relative to no encoding. Differences of a few hundredths are
not resolved here, and one run chooses rates poorly. The grid is short and there are no further
tries: schemes with * may have better rates beyond it; [study.md](study.md) has a longer grid, more
tries and more seeds. On the site, a click on a heading sorts the table.
"""
_SHOWN = 0.1
"""How far beyond the baseline's score a scheme may be to be in the picture."""
_RISES = (
    (-math.inf, f"at most {FLAT:g}", plots.PALETTE[2]),
    (FLAT, "to 0.5", plots.PALETTE[4]),
    (0.5, "more", plots.PALETTE[1]),
)
"""Classes of the rise of a score beyond the trained length: above which, in words, the colour."""


def catalogue_page(
    study: Study, results: Lookup, clock: Clock | None, file: str, folder: str, picture: str
) -> str:
    """Returns the page: a table of the first size, and one with intervals for each further size.

    Args:
      study: the study.
      results: of its runs.
      clock: the times of steps, None before they are measured.
      file, folder: where the study and its results are.
      picture: the file of the picture, empty if there is none.
    """
    cells = next(iter(study.cells.values()))
    rows = rows_of(cells, study.about.baseline, results, clock)
    task = next(iter(cells.values())).task
    spreads = sorted(_spread(row.at_trained_length) for row in rows.values())
    words = {
        "file": file,
        "results": folder,
        "count": len(cells),
        "layers": task.model.num_layers,
        "width": task.model.model_dim,
        "heads": task.model.num_heads,
        "steps": task.train.steps,
        "batch": task.train.batch,
        "length": task.train_length,
        "rates": len(next(iter(cells.values())).about.rates),
        "seeds": next(iter(cells.values())).about.seeds,
        "unit": task.labels.unit,
        "on": chosen_on(task),
        "spread": spreads[len(spreads) // 2] if spreads else math.nan,
    }
    lines = [_HEAD.format(**words)]
    lines += [study.about.remark.strip(), ""] if study.about.remark else []
    if len(rows) < len(cells):
        lines += [f"**{len(rows)} of {len(cells)} schemes have ended.**", ""]
    finalists = {
        size: rows_of(study.compared(size, results), study.about.baseline, results, clock)
        for size in list(study.cells)[1:]
        if study.compared(size, results)
    }
    if rows:
        by_more = [each[study.about.baseline] for each in finalists.values() if each]
        reference = [*by_more, rows[study.about.baseline]][0]
        lines += [" ".join(_summary(rows, study.about.baseline, reference)), ""]
        if picture:
            caption = (
                "Scores at the trained length, of the table with most seeds, against the time of a "
                "step; colour: their rise at the longest. Left out: "
                f"{_SHOWN:g} and more behind {label(study.about.baseline)}"
            )
            lines += [f"![{caption}]({picture})", ""]
        lines += _table(rows)
    for size, of_size in finalists.items():
        if of_size:
            lines += _finalists(study, size, of_size, len(study.compared(size, results)))
    runs = list({run.name: run for run in study.runs(results, clock)}.values())
    lines += provenance_of([result for run in runs if (result := results(run))], clock)
    return "\n".join(lines).rstrip() + "\n"


def _summary(rows: Mapping[str, Row], baseline: str, reference: Row) -> Iterator[str]:
    """Yields sentences on schemes that are better than the baseline, by its most exact results."""
    task = rows[baseline].cell.task
    sign = -1 if task.labels.higher_is_better else 1
    trained = {scheme: mean(row.at_trained_length) for scheme, row in rows.items()}
    longest = {scheme: mean(_longest(row)) for scheme, row in rows.items()}
    score = mean(reference.at_trained_length)
    ahead = [s for s in rows if s != baseline and sign * trained[s] < sign * score]
    flat = [s for s in ahead if sign * (longest[s] - trained[s]) <= FLAT]
    times = f"{task.longest / task.train_length:g} times the length"
    yield (
        f"{len(ahead)} of {len(rows)} have a better mean than {label(baseline)}'s {score:.3f} over "
        f"{len(reference.results)} seeds at the trained length, and {len(flat)} of these lose at "
        f"most {FLAT:g} at {times}, by their means."
    )
    yield f"Best at the trained length: {_some(trained, sign)}."
    yield f"Best at {times}: {_some(longest, sign)}."
    steps = {s: row.step for s, row in rows.items() if s in flat and row.step}
    if steps:
        cheap = [s for s in flat if steps.get(s, math.inf) <= 1.1 * min(steps.values())]
        yield (
            f"The cheapest of those that are both ahead and flat: {', '.join(map(label, cheap))}."
        )


def _some(scores: Mapping[str, float], sign: int, count: int = 6) -> str:
    best = sorted(scores, key=lambda scheme: sign * scores[scheme])[:count]
    return ", ".join(f"{label(scheme)} {scores[scheme]:.3f}" for scheme in best)


def _table(rows: Mapping[str, Row]) -> Iterator[str]:
    task = next(iter(rows.values())).cell.task
    none = rows.get("none")
    heads = ["scheme", *map(str, task.test_lengths), "step", "memory", "parameters", "rate"]
    lines = []
    for scheme, row in rows.items():
        first = row.results[0]
        memory = _ratio(first.memory_bytes, none.results[0].memory_bytes if none else None)
        step = _ratio(row.step, none.step if none else None)
        scores = [row.values(task.views[0], n) for n in task.test_lengths]
        lines.append(
            [
                label(scheme),
                *(f"{mean(values):.3f}" if values else "diverged" for values in scores),
                f"{step:.2f}" if step else "",
                f"{memory:.2f}" if memory else "",
                f"{first.parameters:,}" if first.parameters else "",
                _rate(row),
            ]
        )
    yield from table(heads, lines)


def _finalists(study: Study, size: str, rows: Mapping[str, Row], count: int) -> Iterator[str]:
    """Yields the section of a size with more seeds.

    Args:
      study: the study.
      size: the size.
      rows: of the schemes whose seeds have ended.
      count: of its schemes.
    """
    row = rows[study.about.baseline]
    about, task, name = row.cell.about, row.cell.task, label(study.about.baseline)
    screen = next(iter(study.cells.values()))[study.about.baseline].about.seeds
    yield f"## {size.capitalize()}"
    yield ""
    yield (
        f"{len(rows)} of {count} schemes with {about.seeds} seeds: the {about.best} with the best "
        "means above, and others for comparison. Each has the best of the same rates by the mean "
        f"of {about.selection_seeds} runs on {chosen_on(task)}. Intervals are 95 % intervals over "
        "seeds by Student's t, of means and of paired differences, and include the choice of rates "
        f"as in [study.md](study.md); those at {task.longest} are over seeds alone. The first "
        f"{screen} seeds chose which schemes are in this table, so that their differences flatter "
        "the best: there is a column without them."
    )
    yield ""
    heads = ["scheme", f"{task.labels.unit}", f"difference to {name}", f"without {screen} seeds"]
    lines = []
    for scheme, row in rows.items():
        differences = [row.against(), row.against()[screen:]]
        lines.append([label(scheme), in_words(row.at_trained_length, shifts=row.shifts)])
        lines[-1] += [
            "" if scheme == study.about.baseline else in_words(x, 3, "+", row.shifts_against)
            for x in differences
        ]
        lines[-1] += [in_words(_longest(row)), _rate(row)]
    yield from table([*heads, f"at {task.longest}", "rate"], lines)


def _rate(row: Row) -> str:
    """Returns the learning rate, marked if it is the least or the greatest of the grid."""
    rates = [run.task.train.learning_rate for run in row.selection.first]
    rate = row.run.task.train.learning_rate
    return f"{rate:g}{'*' if rate in (rates[0], rates[-1]) else ''}"


def _ratio(number: float | None, whole: float | None) -> float | None:
    return number / whole if number and whole else None


def catalogue_picture(study: Study, results: Lookup, clock: Clock | None) -> str:
    """Returns the plot of scores against times of a step, as <svg>; colours are rises by length.

    Scores are of the last size that has them, with most seeds.
    """
    cells = next(iter(study.cells.values()))
    rows = rows_of(cells, study.about.baseline, results, clock)
    best = dict(rows)
    for size in list(study.cells)[1:]:
        if compared := study.compared(size, results):
            best |= rows_of(compared, study.about.baseline, results, clock)
    none = rows.get("none")
    if none is None or none.step is None:
        return ""
    task = none.cell.task
    sign = -1 if task.labels.higher_is_better else 1
    limit = sign * mean(best[study.about.baseline].at_trained_length) + _SHOWN
    points = {
        scheme: (step / none.step, mean(row.at_trained_length), mean(_longest(row)))
        for scheme, row in best.items()
        if (step := rows[scheme].step)
    }
    points = {scheme: point for scheme, point in points.items() if sign * point[1] <= limit}
    with mpl.rc_context({**plots.STYLE, "svg.hashsalt": study.name, "axes.grid.axis": "both"}):
        figure, axes = plots.new_figure(0.9 + 0.175 * max(16, len(points)), right=1.8, bottom=0.95)
        axes.set_xscale("log")
        kinds = [(words, colour) for _, words, colour in _RISES]
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
        label_ends(axes, ends)
        title = f"rise at {task.longest / task.train_length:g} times the length"
        figure.legend(loc="lower left", frameon=False, ncols=3, title=title, alignment="left")
        return plots.drawing(figure, study.name, "Loss against the time of a step")


def _colour(rise: float) -> str:
    return next(colour for least, _, colour in _RISES[::-1] if rise > least)


def _longest(row: Row) -> list[float]:
    return row.values(row.run.task.views[0], row.cell.task.longest)


def _spread(values: Sequence[float]) -> float:
    """Returns the standard deviation, 0 for one value."""
    middle = mean(values)
    return math.sqrt(sum((x - middle) ** 2 for x in values) / max(1, len(values) - 1))
