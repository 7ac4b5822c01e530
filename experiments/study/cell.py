"""A scheme at a size of a study, and the runs that it needs."""

import dataclasses
import math
from typing import Any

from experiments.runs.run import Lookup, Run
from experiments.stats import mean
from experiments.study.clock import Clock
from experiments.study.selection import Selection, Size, score, variant


@dataclasses.dataclass(frozen=True)
class Cell:
    """A scheme at a size.

    Attributes:
      grid: a run at each learning rate with the first selection seed, measured at the trained
        length.
      task: with the whole evaluation.
      source: the scheme at the size that chooses its settings; None: this one.
      variants: changes without training, by which runs of their own measure the reported ones.
    """

    size: str
    scheme: str
    about: Size
    grid: tuple[Run, ...]
    task: Any
    has_parameters: bool
    source: "Cell | None" = None
    variants: tuple[str, ...] = ()

    def rank(self, results: Lookup) -> float | None:
        """Returns the mean score at the trained length, negative where higher is better.

        Infinite if a seed diverged; None before all seeds have ended.
        """
        known = [results(run) for run in self.finals(results)]
        if not known or None in known:
            return None
        scores = [score(result) for result in known]
        return math.inf if None in scores else self.task.labels.sign * mean(scores)

    @property
    def chooses(self) -> bool:
        """Whether runs of this size choose its settings."""
        return self.source is None or self.about.best > 0

    def selection(self, results: Lookup) -> Selection:
        source = self.source or self
        about = source.about
        if self.source is not None and self.about.best:
            seeds = max(self.about.selection_seeds, about.selection_seeds)
            about = dataclasses.replace(about, selection_seeds=seeds)
        return Selection(source.grid, about, source.has_parameters, results)

    def chosen(self, results: Lookup) -> Run | None:
        """Returns the chosen run of the first selection seed, None before the choice is made."""
        return self.selection(results).chosen

    def finals(self, results: Lookup) -> tuple[Run, ...]:
        """Returns the runs that are reported, one per seed; none before settings are chosen."""
        if (best := self.chosen(results)) is None:
            return ()
        chosen = best.task.train
        rate = self.about.rate or chosen.learning_rate
        rates = {"learning_rate": rate, "scheme_rate": chosen.scheme_rate}
        whole = variant(dataclasses.replace(self.grid[0], task=self.task), 0, **rates)
        return tuple(variant(whole, seed) for seed in range(self.about.seeds))

    def varied(self, results: Lookup) -> tuple[Run, ...]:
        """Returns runs that measure the variants: the reported ones, or others for these alone."""
        finals = self.finals(results) if self.variants else ()
        if {*self.variants} <= {*getattr(self.task, "variants", ())}:
            return finals
        return tuple(
            dataclasses.replace(run, task=run.task.with_variants(self.variants)) for run in finals
        )

    def timed(self, results: Lookup, baseline: "Cell", clock: Clock | None) -> tuple[Run, ...]:
        """Returns the runs that train as long as the baseline; none without times of both."""
        if not self.about.equal_time or self.scheme == baseline.scheme or clock is None:
            return ()
        if (ratio := clock.ratio(self.size, self.scheme, baseline.scheme)) is None:
            return ()
        return self._longer(self.finals(results), 1 / ratio)

    def budgeted(self, results: Lookup, budget: float) -> tuple[Run, ...]:
        """Returns the runs with `budget` times the steps; none before settings are chosen."""
        return self._longer(self.finals(results), budget)

    def _longer(self, runs: tuple[Run, ...], ratio: float) -> tuple[Run, ...]:
        """Returns runs with other numbers of steps, in whole calls and longer than the warm-up."""
        train = self.task.train
        calls = max(1, round(train.steps * ratio / train.steps_per_call))
        steps = max(calls * train.steps_per_call, train.warmup + train.steps_per_call)
        return tuple(variant(run, run.seed, steps=steps) for run in runs)
