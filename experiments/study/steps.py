"""The page of a study whose sizes are numbers of steps: which leads are of speed, which remain?"""

import dataclasses
import math
import statistics
from collections.abc import Collection, Mapping, Sequence
from pathlib import Path

import matplotlib as mpl
from scipy import special

from experiments.models.schemes import short
from experiments.pages import plots
from experiments.pages.page import fill
from experiments.runs.run import Lookup
from experiments.stats import Bounds, in_cell, mean, sign, t_tests
from experiments.study.page import origin, settings, shared
from experiments.study.plan import Study
from experiments.study.rows import Row, Rows

THETAS = {"rope": "10,000", "rope_500": "500", "rope_100": "100"}
"""Bases of the frequencies by the names of schemes."""
_ABOUT = {
    "local_rope": "RoPE in windows of a quarter of the length",
    "t5_own_scale": "factor 1 on q . k",
    **{name: f"theta {theta}" for name, theta in THETAS.items()},
}
_CLOSE = 0.02
"""The greatest difference of schemes that are equal in the limit."""
_SHOWN = 0.2
"""How far behind RoPE a scheme of the picture may be."""


@dataclasses.dataclass(frozen=True)
class Lead:
    """A difference of means, with a standard error from the pooled spread of all schemes."""

    mean: float
    error: float
    degrees: int

    @property
    def half(self) -> float:
        """Half the width of the 95 % interval by Student's t."""
        return float(special.stdtrit(self.degrees, 0.975)) * self.error

    @property
    def bounds(self) -> Bounds:
        """The mean and its interval."""
        return self.mean, self.mean - self.half, self.mean + self.half

    def __str__(self) -> str:
        """Returns the mean and its interval."""
        return "{:+.3f} [{:+.3f}, {:+.3f}]".format(*self.bounds)


def leads(rows: Mapping[str, Row], thetas: Collection[str] = THETAS) -> tuple[str, dict[str, Lead]]:
    """Returns the RoPE that is best on validation text, and differences of all schemes to it.

    The best is one of the names in `thetas`. Schemes that are not stable are left out. There is
    nothing before all of `thetas` have scores, or if none of them is stable.
    """
    by_name = {short(scheme): row for scheme, row in rows.items() if row.is_stable}
    if not {*thetas} <= {*map(short, rows)} or not by_name.keys() & {*thetas}:
        return "", {}
    task = next(iter(rows.values())).run.task

    def validated(name: str) -> tuple[bool, float]:
        value = mean(by_name[name].values(task.selection_view, task.train_length))
        return math.isnan(value), value  # Without a score it is the last.

    best = min([name for name in thetas if name in by_name], key=validated)
    scores = {name: row.at_trained_length for name, row in by_name.items()}
    degrees, (_, spread) = sum(len(x) - 1 for x in scores.values()), t_tests(scores, scores[best])

    def lead(x: Sequence[float]) -> Lead:
        error = spread * (1 / len(x) + 1 / len(scores[best])) ** 0.5
        return Lead(mean(x) - mean(scores[best]), error, degrees)

    return best, {name: lead(x) for name, x in scores.items()}


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


def _spreads(rows: Mapping[str, Row], best: str) -> list[str]:
    """Returns the pooled, the least and the greatest standard deviation over seeds."""
    scores = {short(scheme): row.at_trained_length for scheme, row in rows.items() if row.is_stable}
    spreads = {name: statistics.stdev(x) if len(x) > 1 else math.nan for name, x in scores.items()}
    ends = (find(spreads, key=lambda name: spreads[name]) for find in (min, max))
    _, pooled = t_tests(scores, scores[best])
    return [f"{pooled:.3f}", *(f"{spreads[name]:.3f} ({name})" for name in ends)]


def _verdict(lead: Lead, least: float = 0.0) -> str:
    """Returns whether a criterion holds: that a mean is at least a threshold."""
    _, low, high = lead.bounds
    word = "holds" if low >= least else "fails" if high < least else "is not resolved"
    return f"{word}: {lead}"


def steps_page(
    study: Study, rows: Rows, results: Lookup, pictures: Mapping[str, str], **places: str
) -> str:
    """Returns the page.

    Arguments are as for `experiments.study.page.page`; `pictures[""]` is the file of the picture.
    """
    known, expected = study.known(results, None)
    sizes = {size: leads(of_size) for size, of_size in rows.items() if of_size}
    sizes = {size: each for size, each in sizes.items() if each[0]}
    abouts = [settings(study, size, rows[size], results, None) for size in study.cells]
    first, *_, last = study.cells
    lines = []
    for scheme in study.about.schemes:
        name = short(scheme)
        texts = [str(of_size.get(name, "")) for _, of_size in sizes.values()]
        if name in THETAS:
            for i, (size, (best, _)) in enumerate(sizes.items()):
                row = rows[size].get(scheme)
                value = in_cell(row.at_trained_length) if row else ""
                texts[i] = f"{value} ({texts[i]})" if texts[i] and name != best else value
        elif first in sizes and last in sizes:
            ends = [sizes[size][1].get(name) for size in (first, last)]
            texts.append(outcome(*(lead.bounds for lead in ends if lead)) if all(ends) else "")
            if scheme in rows[first] and not any(x.fitted for x in rows[first][scheme].results):
                texts[-1] = "not learned at first"
        name += f", {_ABOUT[name]}" if name in _ABOUT else ""
        lines.append([name, *texts, *[""] * (1 + len(sizes) - len(texts))])
    return fill(
        Path(__file__).with_name("steps.md.jinja"),
        about=study.about,
        task=study.cells[first][study.about.baseline].task,
        known=len(known),
        expected=expected,
        criteria=_criteria([rows[first], rows[last]]),
        leads=sizes,
        spreads={size: _spreads(rows[size], best) for size, (best, _) in sizes.items()},
        close=_CLOSE,
        narrowest=min(x.half for x in sizes[last][1].values()) if last in sizes else 0.0,
        shared=shared(abouts),
        sizes=abouts,
        thetas=THETAS,
        rows=lines,
        picture=pictures.get("", ""),
        origin=origin(known, None),
        **places,
    )


def _criteria(ends: list[Mapping[str, Row]]) -> dict[str, str]:
    """Returns the criteria with their outcomes; none before both ends have their schemes."""
    compared = [leads(rows)[1] if rows else {} for rows in ends]
    if not all({*THETAS, "t5"} <= of_size.keys() for of_size in compared):
        return {}
    first, last = (of_size["t5"] for of_size in compared)
    error = (last.error**2 + first.error**2 / 4) ** 0.5
    words = "T5's lead is at most half as large at last (half the first minus the last)"
    if sign(first.bounds) >= 0:
        return {words: f"says nothing, as it has none at first: {first}"}
    less = Lead(last.mean - first.mean / 2, error, min(first.degrees, last.degrees))
    gains = [leads(rows, [name for name in THETAS if name != "rope"])[1]["rope"] for rows in ends]
    margin = dataclasses.replace(gains[1], mean=_CLOSE - gains[1].mean)
    return {
        words: _verdict(less),
        f"Theta 100 or 500 is {_CLOSE} ahead of 10,000 at first (its lead)": _verdict(
            gains[0], _CLOSE
        ),
        f"It is less than {_CLOSE} ahead at last ({_CLOSE} minus its lead)": _verdict(margin),
    }


def steps_picture(study: Study, rows: Rows) -> str:
    """Returns the plot of differences to the best RoPE against steps, as <svg>.

    It is empty before there are scores after two numbers of steps.
    """
    lines: dict[str, dict[int, Bounds]] = {}
    ropes: dict[int, float] = {}
    for of_size in filter(None, rows.values()):
        best, differences = leads(of_size)
        for scheme, row in of_size.items():
            name, steps = short(scheme), row.run.task.train.steps
            if name == best:
                ropes[steps] = mean(row.at_trained_length)
            elif name in differences and name not in THETAS and differences[name].mean <= _SHOWN:
                lines.setdefault(name, {})[steps] = differences[name].bounds
    if len(ropes) < 2:
        return ""
    task = study.cells[next(iter(study.cells))][study.about.baseline].task
    with mpl.rc_context({**plots.STYLE, "svg.hashsalt": study.name}):
        figure, axes = plots.new_figure(4.6, left=0.75)
        axes.axhline(0.0, color=plots.BASELINE, linewidth=1.2)
        axes.set_xscale("log")
        ends = [(max(ropes), 0.0, plots.BASELINE, 1.0, "rope, best theta")]
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
