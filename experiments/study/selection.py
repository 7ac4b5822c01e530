"""The choice of a scheme's settings in a study, by scores of several seeds.

The grid runs once, with the first selection seed. Its best rate and the neighbours of this run with
all selection seeds; while the best mean has a neighbour that has not, so does this one. A rate is
unstable if its seeds have a standard deviation above `UNSTABLE`, or if the same run with other
rounding (a rate higher by a millionth) differs by more; the best stable rate is chosen. Then
`Size.tries` further settings run at this rate with the first seed, and the improvements with all
seeds; the best mean is chosen.
"""

import dataclasses
import itertools
import math
import statistics
from collections.abc import Iterable, Sequence
from typing import Annotated, Any

from pydantic import Field, NonNegativeInt, PositiveFloat

from experiments.runs.run import Lookup, Result, Run
from experiments.runs.scores import UNSTABLE
from experiments.settings.common import Seeds
from experiments.settings.config_io import strict
from experiments.stats import mean

_SCHEME_RATES = (10.0, 3.0)
_HALF_STEP = math.sqrt(2.0)
_OTHER_ROUNDING = 1 + 1e-6


@strict
class Size:
    """Settings of a size without settings of runs."""

    rates: tuple[PositiveFloat, ...] = ()
    """Learning rates, at least three, growing."""
    rates_of: str = ""
    """In place of `rates`: the size whose chosen settings this one has."""
    rate: PositiveFloat | None = None
    """With `rates_of`: the learning rate of all schemes, where the chosen ones do not serve."""
    task: str = ""
    """The task; empty: that of the study."""
    seeds: Seeds = 5
    """Paired seeds at the best rate: 0, 1, ..."""
    selection_seeds: Annotated[int, Field(ge=1, le=6)] = 3
    """Seeds by which settings are chosen: `first_selection_seed` and the next ones."""
    tries: Annotated[int, Field(ge=0, le=2)] = 0
    """Further settings of each scheme at its best rate: with parameters of its own, other learning
    rates for these, 10 and 3 times that of the rest; without, rates half a step up and down."""
    equal_time: bool = False
    """Whether to run with the baseline's training time too."""
    budgets: tuple[Annotated[float, Field(gt=0, le=1000)], ...] = ()
    """Other numbers of steps for the baseline, relative to its own, growing."""
    best: NonNegativeInt = 0
    """With `rates_of`: the number of schemes with the best mean scores there that run; 0: all. If
    this size has more selection seeds, these choose their settings anew."""
    always: tuple[str, ...] = ()
    """With `best`: further schemes that run, besides the baseline."""


def variant(run: Run, seed: int, **train: Any) -> Run:
    """Returns a run with another seed and other settings of training."""
    task = dataclasses.replace(run.task, train=dataclasses.replace(run.task.train, **train))
    return dataclasses.replace(run, task=task, seed=seed)


def score(result: Result | None) -> float | None:
    """Returns the score at the trained length, None where there is none."""
    if result is None or not result.scores:
        return None
    return next(iter(next(iter(result.scores.values())).values()))


class Selection:
    """The choice for one scheme at one size.

    Args:
      grid: a run at each learning rate, with the first selection seed.
      about: settings of the size.
      has_parameters: whether the scheme has parameters of its own.
      results: as far as runs have ended.

    Attributes:
      runs: all runs that it needs, as far as results determine them.
      first: the runs of the grid.
      tried: by run of the first selection seed, the runs of all selection seeds.
      unstable: runs in `tried` that are not chosen, with the reason.
      best_of_grid: the best stable run of the grid, None before it is known.
      other_rounding: `best_of_grid` with other rounding, None before it is known.
      tries: runs with further settings, of the first selection seed.
      chosen: the chosen run, of the first selection seed; None before it is known.
    """

    def __init__(self, grid: tuple[Run, ...], about: Size, has_parameters: bool, results: Lookup):
        self._about, self._has_parameters, self._results = about, has_parameters, results
        self._sign = -float(grid[0].task.labels.sign)
        self.first, self.runs = grid, list(grid)
        self.tried: dict[Run, tuple[Run, ...]] = {}
        self.unstable: dict[Run, str] = {}
        self.tries: tuple[Run, ...] = ()
        self.best_of_grid: Run | None = None
        self.other_rounding: Run | None = None
        self.chosen: Run | None = None
        if self._ended(self.first) and (best := self._choose_rate()):
            self._choose_settings(best)

    def score(self, run: Run) -> float:
        """Returns the score by which a run is chosen; the worst for one that diverged."""
        result = self._results(run)
        scores = result.scores.get(run.task.selection_view, {}) if result else {}
        value = scores.get(str(run.task.train_length))
        return -self._sign * math.inf if value is None else value

    def means(self, runs: Iterable[Run]) -> dict[Run, float]:
        """Returns the means over the selection seeds for runs in `tried`."""
        return {run: _mean([self.score(each) for each in self.tried[run]]) for run in runs}

    def is_edge(self, rate: float) -> bool:
        """Returns whether a rate is the least or the greatest of the grid."""
        return rate in {self.first[i].task.train.learning_rate for i in (0, -1)}

    @property
    def is_at_edge(self) -> bool:
        """Whether the best rate of the grid is its least or greatest."""
        return self.best_of_grid in (self.first[0], self.first[-1])

    def shifts(self) -> list[float]:
        """Returns by how much the reported score changes with resampled selection seeds.

        One number for each sequence of seeds drawn with replacement: the score at the trained
        length of the setting that these seeds choose, minus the chosen setting's, as means over
        all selection seeds. A draw chooses among the runs in `tried`, without runs that it makes
        unstable; which runs these are, and other rounding, is not drawn anew.
        """
        if self.chosen is None:
            return []
        runs = [run for run in self.tried if self.unstable.get(run, "spread") == "spread"]
        table = {run: [self.score(each) for each in self.tried[run]] for run in runs}
        reported = {
            run: mean([score(self._results(each)) for each in self.tried[run]])
            for run in {*runs, self.chosen}
        }
        best = []
        for drawn in itertools.product(range(len(self._seeds)), repeat=len(self._seeds)):
            scores = {run: [table[run][i] for i in drawn] for run in runs}
            stable = {run: _mean(x) for run, x in scores.items() if not self._spreads(x)}
            best.append(self._best(stable) if stable else self.chosen)
        return [reported[run] - reported[self.chosen] for run in best]

    @property
    def _seeds(self) -> Sequence[int]:
        first = self.first[0].seed
        return range(first, first + self._about.selection_seeds)

    def _choose_rate(self) -> Run | None:
        """Chooses a rate of the grid, and returns its run; None before it is known."""
        by_first = {run: self.score(run) for run in self.first}
        pending = self._with_neighbours(self._best(by_first))
        while True:
            for run in pending:
                self.tried[run] = tuple(variant(run, seed) for seed in self._seeds)
                self.runs += self.tried[run][1:]
            if not all(self._ended(runs) for runs in self.tried.values()):
                return None
            self._mark_spread()
            best = self._best(self.means(self._stable()))
            pending = [run for run in self._with_neighbours(best) if run not in self.tried]
            if pending:
                continue
            rate = best.task.train.learning_rate
            again = variant(best, best.seed, learning_rate=rate * _OTHER_ROUNDING)
            self.runs.append(again)
            if not self._ended([again]):
                return None
            if abs(self.score(again) - self.score(best)) > UNSTABLE:
                self.unstable[best] = "rounding"
                if any(run not in self.unstable for run in self.tried):
                    continue
            self.best_of_grid, self.other_rounding = best, again
            return best

    def _choose_settings(self, best: Run) -> None:
        """Chooses between the best rate and further settings at it."""
        self.tries = tuple(self._tries(best))
        self.runs += self.tries
        if not self._ended(self.tries):
            return
        sign = self._sign
        for run in self.tries:
            if sign * self.score(run) > sign * self.score(best):
                self.tried[run] = tuple(variant(run, seed) for seed in self._seeds)
                self.runs += self.tried[run][1:]
        if all(self._ended(runs) for runs in self.tried.values()):
            self._mark_spread()
            better = [run for run in self.tries if run in self.tried and run not in self.unstable]
            self.chosen = self._best(self.means([best, *better]))

    def _tries(self, best: Run) -> list[Run]:
        count, rate = self._about.tries, best.task.train.learning_rate
        if self._has_parameters:
            settings = [{"scheme_rate": factor} for factor in _SCHEME_RATES[:count]]
        else:
            factors = (_HALF_STEP, 1 / _HALF_STEP)[:count]
            settings = [{"learning_rate": rate * factor} for factor in factors]
        return [variant(best, best.seed, **each) for each in settings]

    def _mark_spread(self) -> None:
        for run, runs in self.tried.items():
            scores = [self.score(each) for each in runs]
            if not all(map(math.isfinite, scores)):
                self.unstable[run] = "diverged"
            elif self._spreads(scores):
                self.unstable[run] = "spread"

    def _spreads(self, scores: Sequence[float]) -> bool:
        return len(scores) > 1 and statistics.stdev(scores) > UNSTABLE

    def _stable(self) -> list[Run]:
        """Returns the runs that may be chosen: the lowest rate if none is stable."""
        stable = [run for run in self.tried if run not in self.unstable]
        return stable or [min(self.tried, key=lambda run: run.task.train.learning_rate)]

    def _with_neighbours(self, run: Run) -> list[Run]:
        place = self.first.index(run)
        return list(self.first[max(0, place - 1) : place + 2])

    def _best(self, scores: dict[Run, float]) -> Run:
        """Returns the run with the best score, the lowest rate if all are infinite."""
        return max(scores, key=lambda run: self._sign * scores[run])

    def _ended(self, runs: Iterable[Run]) -> bool:
        return all(self._results(run) for run in runs)


def _mean(values: Sequence[float]) -> float:
    """Returns the mean, infinite if a value is."""
    return math.fsum(values) / len(values)
