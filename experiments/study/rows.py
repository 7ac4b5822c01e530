"""The reported results of a study: a row per scheme, with differences to the baseline."""

import dataclasses
import functools
import math
from collections.abc import Mapping, Sequence

import numpy as np

from experiments.runs.run import Lookup, Result, Run
from experiments.runs.scores import SchemeResults
from experiments.stats import Bounds, in_words, interval, mean
from experiments.study.cell import Cell
from experiments.study.clock import Clock
from experiments.study.selection import Selection, score


@dataclasses.dataclass(frozen=True, kw_only=True)
class Row(SchemeResults):
    """A scheme's results of all reported seeds at a size, and the baseline's.

    Attributes:
      baseline: one per seed.
      timed: in equal time, one per seed; empty if there are none.
      varied: with the cell's variants, one per seed; empty if there are none.
      step: the time of a step relative to the baseline's, None where it is not known.
    """

    cell: Cell
    baseline: Sequence[Result]
    timed: Sequence[Result]
    varied: Sequence[Result]
    selection: Selection
    baseline_selection: Selection
    step: float | None

    @functools.cached_property
    def shifts(self) -> list[float]:
        """Changes of the mean score by other choices of the settings."""
        return self._shifts(self.selection) or [0.0]

    @functools.cached_property
    def shifts_against(self) -> list[float]:
        """Changes of the mean difference by other choices, of both schemes by the same seeds."""
        shifts = self._shifts(self.selection), self._shifts(self.baseline_selection)
        return [a - b for a, b in zip(*shifts, strict=True)] or [0.0]

    def _shifts(self, selection: Selection) -> list[float]:
        """Returns the shifts of a selection, none where the file sets the rate."""
        return [] if self.cell.about.rate else selection.shifts()

    def against(self, results: Sequence[Result] | None = None) -> list[float]:
        """Returns differences to the baseline at the trained length, NaN where one diverged."""
        pairs = zip(self.results if results is None else results, self.baseline, strict=True)
        scores = [(score(a), score(b)) for a, b in pairs]
        return [math.nan if a is None or b is None else a - b for a, b in scores]

    @property
    def difference(self) -> Bounds:
        return interval(self.against(), self.shifts_against)

    @property
    def variants(self) -> dict[str, dict[int, list[float]]]:
        """Differences of variants to the same runs' scores at the trained length, by length.

        One per seed, NaN where one diverged; a frequency map has none at the trained length.
        """
        lengths = self.task.train_length, self.task.longest
        return {
            name: {n: x for n in lengths if (x := self._against_own(name, n))}
            for name in (self.cell.variants if self.varied else ())
        }

    def _against_own(self, view: str, length: int) -> list[float]:
        pairs = [(r.score(view, length), score(r)) for r in self.varied]
        if all(a is None for a, _ in pairs):
            return []
        return [math.nan if a is None or b is None else a - b for a, b in pairs]

    def rate_in_words(self) -> str:
        train = self.task.train
        times = f" ({train.scheme_rate:g} x)" if train.scheme_rate != 1 else ""
        return f"{train.learning_rate:.4g}{times}"

    def difference_in_words(self, results: Sequence[Result] | None = None) -> str:
        """Returns the difference with its interval, in equal time with other results."""
        return in_words(self.against(results), sign="+", shifts=self.shifts_against)


Rows = Mapping[str, Mapping[str, Row]]
"""Rows by size, then by scheme."""


def rows_of(
    cells: Mapping[str, Cell], baseline: str, results: Lookup, clock: Clock | None
) -> dict[str, Row]:
    """Returns the schemes whose seeds have all ended, where the baseline's have; best first."""
    of_baseline = ended(cells[baseline].finals(results), results)
    if not of_baseline:
        return {}
    baseline_selection, rows = cells[baseline].selection(results), {}
    for scheme, cell in cells.items():
        runs = cell.finals(results)
        if of_scheme := ended(runs, results):
            is_baseline = scheme == baseline
            rows[scheme] = Row(
                cell.size,
                runs,
                tuple(of_scheme),
                cell=cell,
                baseline=of_baseline,
                timed=ended(cell.timed(results, cells[baseline], clock), results),
                varied=ended(cell.varied(results), results),
                selection=baseline_selection if is_baseline else cell.selection(results),
                baseline_selection=baseline_selection,
                step=clock.ratio(cell.size, scheme, baseline) if clock else None,
            )
    return dict(sorted(rows.items(), key=lambda item: item[1].cell.rank(results)))


def ended(runs: Sequence[Run], results: Lookup) -> list[Result]:
    """Returns the results of runs, none unless all have ended."""
    known = [result for run in runs if (result := results(run))]
    return known if len(known) == len(runs) else []


def curve_of(row: Row, results: Lookup, first: int = 0) -> dict[float, float]:
    """Returns the baseline's mean score by budget, ascending; nothing before all have ended.

    Means are over the seeds from the `first` on.
    """
    curve = {1.0: mean(map(score, row.results[first:]))}
    for budget in row.cell.about.budgets:
        runs = row.cell.budgeted(results, budget)
        steps = runs[0].task.train.steps / row.task.train.steps  # At least the warm-up.
        curve[steps] = mean(map(score, ended(runs, results)[first:]))
    known = len(curve) > 1 and all(map(math.isfinite, curve.values()))
    return dict(sorted(curve.items())) if known else {}


def gain(row: Row, curve: Mapping[float, float]) -> Bounds | None:
    """Returns the compute gain: the budgets at which the baseline reaches the scores in equal time.

    It is read off `curve`, the mean scores of the baseline with more and fewer steps; it is 0 or
    infinite where these do not reach far enough.

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
