"""Blocks of a study whose sizes are numbers of steps: which leads are of speed, which remain?"""

import math
import statistics
from collections.abc import Collection, Iterator, Mapping

import matplotlib as mpl

from experiments.models.schemes import label, short
from experiments.pages import plots
from experiments.pages.page import table
from experiments.stats import Bounds, Estimate, in_cell, mean, sign, t_tests
from experiments.study.page import Context
from experiments.study.plan import Reference, Study
from experiments.study.rows import Row, Rows


def leads(rows: Mapping[str, Row], references: Collection[str]) -> tuple[str, dict[str, Estimate]]:
    """Returns the best reference, and differences of all schemes to the best one but themselves.

    The best is by the mean on validation text. Schemes that are not stable are left out. There is
    nothing before all references have scores, or if none of them is stable.
    """
    by_name = {short(scheme): row for scheme, row in rows.items() if row.is_stable}
    stable = [name for name in references if name in by_name]
    if not {*references} <= {*map(short, rows)} or not stable:
        return "", {}
    task = next(iter(rows.values())).task

    def validated(name: str) -> tuple[bool, float]:
        value = mean(by_name[name].values(task.selection_view, task.train_length))
        return math.isnan(value), task.labels.sign * value  # A reference without a score is last.

    stable.sort(key=validated)
    scores = {name: row.at_trained_length for name, row in by_name.items()}
    degrees, (_, spread) = sum(len(x) - 1 for x in scores.values()), t_tests(scores, [])
    out = {}
    for name, x in scores.items():
        if other := next((each for each in stable if each != name), None):
            error = spread * (1 / len(x) + 1 / len(scores[other])) ** 0.5
            out[name] = Estimate(mean(x) - mean(scores[other]), error, degrees)
    return stable[0], out


def outcome(first: Bounds, last: Bounds, close: float) -> str:
    """Returns the kind of a lead, from differences after the fewest and the most steps.

    >>> outcome((-0.1, -0.12, -0.08), (-0.01, -0.015, -0.005), 0.02)
    'speed'
    """
    if not sign(first):
        return "not resolved at first"
    if sign(last) == -sign(first):
        return "crosses"
    _, low, high = last
    if -close < low and high < close:
        return "speed"
    beyond = low > close if sign(first) > 0 else high < -close
    return "limit" if beyond else "not resolved"


def _spreads(rows: Mapping[str, Row]) -> list[str]:
    """Returns the pooled, the least and the greatest standard deviation over seeds."""
    scores = {short(scheme): row.at_trained_length for scheme, row in rows.items() if row.is_stable}
    spreads = {name: statistics.stdev(x) if len(x) > 1 else math.nan for name, x in scores.items()}
    ends = (find(spreads, key=lambda name: spreads[name]) for find in (min, max))
    _, pooled = t_tests(scores, [])
    return [f"{pooled:.3f}", *(f"{spreads[name]:.3f} ({name})" for name in ends)]


def picture(page: Context) -> Iterator[str]:
    caption = (
        "Differences to RoPE after each number of steps, with intervals, of schemes up to "
        f"{_reference(page.study).shown} behind it"
    )
    yield from page.picture("", caption, lambda: steps_picture(page.study, page.rows))


def _reference(study: Study) -> Reference:
    assert study.about.reference
    return study.about.reference


def differences(page: Context) -> Iterator[str]:
    study, rows, reference = page.study, page.rows, _reference(page.study)
    sizes = {size: leads(of_size, reference.schemes) for size, of_size in rows.items() if of_size}
    sizes = {size: each for size, each in sizes.items() if each[0]}
    if not sizes:
        return
    best = ", ".join(f"{reference.schemes[x]} after {size} steps" for size, (x, _) in sizes.items())
    spreads = "; ".join(
        "{} after {} steps, pooled from {} to {}".format(pooled, size, *ends)
        for size in sizes
        for pooled, *ends in [_spreads(rows[size])]
        if pooled != "nan"
    )
    yield f"Differences are to {reference.about}: {best}." + (
        f"\nTheir intervals are unpaired, leave out the choice of {reference.parameter} and of "
        f"settings, and assume one standard deviation for\nall schemes: {spreads}."
        if spreads
        else ""
    )
    first, *_, last = study.cells
    lines = []
    for scheme in study.about.schemes:
        name = short(scheme)
        texts = [str(of_size.get(name, "")) for _, of_size in sizes.values()]
        if name in reference.schemes:
            for i, (size, (chosen, _)) in enumerate(sizes.items()):
                row = rows[size].get(scheme)
                value = in_cell(row.at_trained_length) if row else ""
                texts[i] = f"{value} ({texts[i]})" if texts[i] and name != chosen else value
        elif first in sizes and last in sizes:
            ends = [lead.bounds for size in (first, last) if (lead := sizes[size][1].get(name))]
            texts.append(outcome(*ends, reference.close) if len(ends) == 2 else "")
            if scheme in rows[first] and not any(x.fitted for x in rows[first][scheme].results):
                texts[-1] = "not learned at first"
        note = study.about.notes.get(name, "")
        if name in reference.schemes:
            note = f"{reference.parameter} {reference.schemes[name]}"
        name += f", {note}" if note else ""
        lines.append([name, *texts, *[""] * (1 + len(sizes) - len(texts))])
    yield table(["scheme", *sizes, "outcome"], lines)
    close = reference.close
    narrowest = min(x.half for x in sizes[last][1].values()) if last in sizes else 0.0
    yield (
        "Outcomes compare the first and the last column of differences that are resolved at first: "
        '"crosses" for a resolved\ndifference of the other sign at last, "speed" for an interval '
        f'within {close}, "limit" for one of the same sign\nbeyond {close}.'
    ) + (
        f" No interval can be within {close} at last: their half width is at least {narrowest:.3f}."
        if narrowest > close
        else ""
    )


def steps_picture(study: Study, rows: Rows) -> str:
    """Returns the plot of differences to the best RoPE against steps, as <svg>.

    It is empty before there are scores after two numbers of steps.
    """
    reference = _reference(study)
    lines: dict[str, dict[int, Bounds]] = {}
    ropes: dict[int, float] = {}
    for of_size in filter(None, rows.values()):
        best, differences = leads(of_size, reference.schemes)
        for scheme, row in of_size.items():
            name, steps = short(scheme), row.task.train.steps
            if name == best:
                ropes[steps] = mean(row.at_trained_length)
            elif name in reference.schemes or name not in differences:
                continue
            elif row.labels.sign * differences[name].mean <= reference.shown:
                lines.setdefault(name, {})[steps] = differences[name].bounds
    if len(ropes) < 2:
        return ""
    task = study.cells[next(iter(study.cells))][study.about.baseline].task
    with mpl.rc_context({**plots.STYLE, "svg.hashsalt": study.name}):
        figure, axes = plots.new_figure(4.6, left=0.75)
        axes.axhline(0.0, color=plots.BASELINE, linewidth=1.2)
        axes.set_xscale("log")
        ends = [
            (
                max(ropes),
                0.0,
                plots.BASELINE,
                1.0,
                f"{label(study.about.baseline)}, best {reference.parameter}",
            )
        ]
        looks = plots.looks([*lines])
        for i, (name, line) in enumerate(lines.items()):
            # Side by side, as intervals of one number of steps have one length.
            x = [n * 1.025 ** (i - len(lines) / 2) for n in line]
            means, y, (colour, marker) = [m for m, *_ in line.values()], line.values(), looks[name]
            reach = [[m - low for m, low, _ in y], [high - m for m, _, high in y]]
            axes.errorbar(x, means, yerr=reach, marker=marker, color=colour, elinewidth=1.0)
            ends.append((x[-1], means[-1], colour, 1.0, name))
        axes.set_xticks([*ropes], [f"{n:,}\n{loss:.3f}" for n, loss in ropes.items()])
        axes.set_xticks([], minor=True)
        axes.set_xlabel(f"steps, and {task.labels.unit} of RoPE")
        axes.set_ylabel(f"difference to RoPE, {task.labels.unit}")
        plots.label_ends(axes, ends)
        return plots.drawing(figure, study.name, "Differences to RoPE against steps")
