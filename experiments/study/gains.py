"""Compute gains of a study: the time in which the baseline reaches a score, relative to equal time.

A gain is read off the mean scores of the baseline with more and fewer steps; it is 0 or infinite
where these do not reach far enough.
"""

import math
from collections.abc import Mapping

import numpy as np

from experiments.pages.intervals import interval
from experiments.pages.tables import Lookup, mean
from experiments.study.rows import Bounds, Row, ended
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
