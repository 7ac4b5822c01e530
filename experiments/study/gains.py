"""Compute gains of a study: the time in which the baseline reaches a score, relative to equal time.

A gain is read off the mean scores of the baseline with more and fewer steps; it is 0 or infinite
where these do not reach far enough. With several sizes, gains are drawn against parameters.
"""

import math
from collections.abc import Iterator, Mapping

import numpy as np

from experiments.pages import plots
from experiments.pages.intervals import interval
from experiments.pages.scheme_results import Lookup, mean
from experiments.pages.tables import label
from experiments.study.clock import Clock
from experiments.study.plan import Study
from experiments.study.rows import Bounds, Row, ended, rows_of
from experiments.study.selection import score


def curve_of(row: Row, results: Lookup) -> dict[float, float]:
    """Returns the baseline's mean score by budget, ascending; nothing before all have ended."""
    curve = {1.0: mean(row.at_trained_length)}
    for budget in row.cell.about.budgets:
        runs = row.cell.budgeted(results, budget)
        scores = [score(result) for result in ended(runs, results)]
        steps = runs[0].task.train.steps / row.run.task.train.steps  # At least the warm-up.
        curve[steps] = mean([math.nan if x is None else x for x in scores])
    known = len(curve) > 1 and all(map(math.isfinite, curve.values()))
    return dict(sorted(curve.items())) if known else {}


def gain(row: Row, curve: Mapping[float, float]) -> Bounds | None:
    """Returns the gain with its interval: the budgets at which a curve reaches the scores.

    Args:
      row: with results in equal time.
      curve: of `curve_of`.

    Returns:
      The gain, its lower and its upper bound (NaN for one seed). None if a seed diverged or the
      curve does not improve throughout.
    """
    against = row.against(row.timed)
    budgets = np.log2(list(curve))
    scores = np.array(list(curve.values())) - curve[1.0]
    sign = 1.0 if scores[-1] > scores[0] else -1.0  # Of lower budgets, the scores are worse.
    if not np.all(np.diff(sign * scores) > 0) or any(map(math.isnan, against)):
        return None

    def budget(difference: float) -> float:
        change = sign * difference
        if math.isnan(change):
            return math.nan
        if change < sign * scores[0]:
            return 0.0
        if change > sign * scores[-1]:
            return math.inf
        return float(2 ** np.interp(change, sign * scores, budgets))

    middle, low, high = map(budget, interval(against, row.shifts_against))
    return (middle, low, high) if sign > 0 else (middle, high, low)


def by_scheme(
    study: Study, results: Lookup, clock: Clock | None
) -> dict[str, dict[str, tuple[float, Bounds]]]:
    """Returns the baseline's parameters in millions and gains, by scheme and size."""
    gains: dict[str, dict[str, tuple[float, Bounds]]] = {}
    for size, cells in study.cells.items():
        rows = rows_of(cells, study.about.baseline, results, clock)
        curve = curve_of(rows[study.about.baseline], results) if rows else {}
        for scheme, row in rows.items():
            bounds = gain(row, curve) if curve and row.timed else None
            if bounds and not math.isnan(bounds[1]):
                parameters = mean(result.parameters for result in row.baseline) / 1e6
                gains.setdefault(scheme, {})[size] = parameters, bounds
    return gains


def trends(study: Study, results: Lookup, clock: Clock | None) -> Iterator[str]:
    """Yields for each scheme whether its gain changes from the first to the last size."""
    for scheme, gains in by_scheme(study, results, clock).items():
        if len(gains) > 1 and set(gains) == set(study.cells):
            (_, first), *_, (_, last) = gains.values()
            words = f"in equal time {trend(first, last)} from the first to the last size"
            yield f"* The gain of {label(scheme)} {words}."


def trend(first: Bounds, last: Bounds) -> str:
    """Returns in a word how a gain changes between sizes, by the criteria of a study's file.

    >>> trend((1.3, 1.2, 1.4), (1.6, 1.5, 1.7)), trend((1.3, 1.2, 1.4), (1.0, 0.9, 1.1))
    ('grows', 'vanishes')
    >>> trend((1.3, 1.2, 1.4), (1.35, 1.3, 1.5)), trend((1.3, 1.2, 1.4), (1.1, 0.9, 1.3))
    ('stays', 'is not resolved')
    """
    if last[1] > first[2]:
        return "grows"
    if last[2] < first[1]:
        return "vanishes" if first[1] > 1 >= last[1] else "shrinks"
    return "stays" if min(first[1], last[1]) > 1 else "is not resolved"


def gains_picture(study: Study, results: Lookup, clock: Clock | None) -> str:
    """Returns the plot of gains against parameters, as <svg>; nothing for fewer than two sizes."""
    gains = by_scheme(study, results, clock)
    if max(map(len, gains.values()), default=0) < 2:
        return ""
    points = {scheme: list(row.values()) for scheme, row in gains.items()}
    finite = [x for row in points.values() for _, b in row for x in b if 0 < x < math.inf]
    ends = min([*finite, 1.0]) / 1.1, max([*finite, 1.0]) * 1.1
    clipped = {
        scheme: [(at, tuple(np.clip(bounds, *ends))) for at, bounds in row]
        for scheme, row in points.items()
    }
    name = label(study.about.baseline)
    unit = f"time of {name} / equal time"
    return plots.by_parameters(clipped, unit, f"Compute gain over {name}", "gains", 1.0, ends)
