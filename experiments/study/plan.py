"""A study as a TOML file: sizes of a model, and schemes that are compared at each.

    task = "text"
    baseline = "rope"                       differences are to this scheme
    schemes = ["none", "rope", "alibi"]

    [text]                                  settings for all runs, as for `compare`
    ngram = 6

    [sizes.small]
    rates = [1e-3, 2e-3, 4e-3, 8e-3]        the grid of learning rates
    seeds = 5
    text.model.model_dim = 96               settings of a size

    [sizes.order]
    task = "kth"                            a size may have another task
    rates = [1e-3, 2e-3, 4e-3]

Runs follow from results, in stages: each scheme runs at each rate of the grid with a seed of its
own; where `own_rates` names the scheme, the best run is repeated with other rates for the scheme's
parameters; the run with the best score at the trained length is repeated with all seeds and, with
`equal_time`, with as many steps as take the baseline's training time. With `budgets`, the baseline
runs with more and fewer steps too, at the same rate, so that scores translate into time.
"""

import dataclasses
import math
import statistics
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Annotated, Any, ClassVar

from pydantic import Field, NonNegativeInt, PositiveFloat

from experiments.errors import ConfigError
from experiments.pages.scheme_results import Lookup
from experiments.runs.experiment import from_file
from experiments.runs.run import Result, Run
from experiments.settings.common import Seeds
from experiments.settings.config_io import STRICT, convert, merge, near, read_toml


@dataclasses.dataclass(frozen=True)
class _Size:
    """Settings of a size without settings of runs."""

    __pydantic_config__: ClassVar[Any] = STRICT

    rates: tuple[PositiveFloat, ...]
    """Learning rates, at least three, growing."""
    task: str = ""
    """The task; empty: that of the study."""
    seeds: Seeds = 5
    """Paired seeds at the best rate: 0, 1, ..."""
    own_rates: dict[str, tuple[PositiveFloat, ...]] = dataclasses.field(default_factory=dict)
    """By scheme: other learning rates for its parameters, relative to that of the rest."""
    equal_time: bool = False
    """Whether to run with the baseline's training time too."""
    budgets: tuple[Annotated[float, Field(gt=0, le=1000)], ...] = ()
    """Other numbers of steps for the baseline, relative to its own, growing."""


@dataclasses.dataclass(frozen=True)
class _File:
    """A study, without the settings of its runs."""

    __pydantic_config__: ClassVar[Any] = STRICT

    schemes: tuple[str, ...]
    """Schemes to compare."""
    sizes: dict[str, Any]
    """Sizes by name."""
    task: str = "text"
    """The task."""
    baseline: str = "rope"
    """The scheme that others are compared to."""
    grid_seed: NonNegativeInt = 100
    """The seed of the grid, none of those that are reported."""


@dataclasses.dataclass(frozen=True)
class Cell:
    """A scheme at a size.

    Attributes:
      size, scheme: their names.
      about: settings of the size.
      grid: a run at each learning rate.
      make: returns a run with other settings of training and another seed.
    """

    size: str
    scheme: str
    about: _Size
    grid: tuple[Run, ...]

    def variant(self, run: Run, seed: int, **train: Any) -> Run:
        """Returns a run with another seed and other settings of training."""
        task = dataclasses.replace(run.task, train=dataclasses.replace(run.task.train, **train))
        return dataclasses.replace(run, task=task, seed=seed)

    def own(self, best: Run) -> tuple[Run, ...]:
        """Returns the runs with other learning rates for the scheme's parameters."""
        rates = self.about.own_rates.get(self.scheme, ())
        return tuple(self.variant(best, best.seed, scheme_rate=rate) for rate in rates)

    def chosen(self, results: Lookup) -> Run | None:
        """Returns the run of the grid with the best score; None before all have ended.

        A run that diverged is never the best. If all did, it is the one at the lowest rate.
        """
        best = self.best(self.grid, results)
        return best and self.best((best, *self.own(best)), results)

    def best(self, runs: tuple[Run, ...], results: Lookup) -> Run | None:
        """Returns the run with the best score; None before all have ended."""
        ended = [results(run) for run in runs]
        if any(result is None for result in ended):
            return None
        worst = -math.inf if runs[0].task.labels.higher_is_better else math.inf
        scores = [worst if (x := score(result)) is None else x for result in ended]
        pick = max if runs[0].task.labels.higher_is_better else min
        return runs[scores.index(pick(scores))]

    def finals(self, results: Lookup) -> tuple[Run, ...]:
        """Returns the runs that are reported, one per seed; none before a rate is chosen."""
        best = self.chosen(results)
        return tuple(self.variant(best, seed) for seed in range(self.about.seeds)) if best else ()

    def timed(self, results: Lookup, baseline: "Cell") -> tuple[Run, ...]:
        """Returns the runs that train as long as the baseline; none unless both have times.

        Times are medians over the runs of the grid that did not diverge.
        """
        if not self.about.equal_time or self.scheme == baseline.scheme:
            return ()
        of_scheme, of_baseline = ([results(run) for run in cell.grid] for cell in (self, baseline))
        finals = self.finals(results)
        if not finals or any(result is None for result in (*of_scheme, *of_baseline)):
            return ()
        times, limits = seconds_of(of_scheme), seconds_of(of_baseline)
        if not times or not limits:
            return ()
        return self._longer(finals, statistics.median(limits) / statistics.median(times))

    def budgeted(self, results: Lookup, budget: float) -> tuple[Run, ...]:
        """Returns the runs with `budget` times the steps; none before a rate is chosen."""
        return self._longer(self.finals(results), budget)

    def _longer(self, runs: tuple[Run, ...], ratio: float) -> tuple[Run, ...]:
        """Returns runs with other numbers of steps, in whole calls and longer than the warm-up."""
        train = self.grid[0].task.train
        calls = max(1, round(train.steps * ratio / train.steps_per_call))
        steps = max(calls * train.steps_per_call, train.warmup + train.steps_per_call)
        return tuple(self.variant(run, run.seed, steps=steps) for run in runs)


@dataclasses.dataclass(frozen=True)
class Study:
    """A study.

    Attributes:
      name: of the file.
      about: the other entries of the file.
      cells: by size, then by scheme.
    """

    name: str
    about: _File
    cells: Mapping[str, Mapping[str, Cell]]

    def runs(self, results: Lookup) -> Iterator[Run]:
        """Returns all runs that are known so far; more follow from their results."""
        for size in self.cells:
            yield from self.runs_of(size, results)

    def runs_of(self, size: str, results: Lookup) -> Iterator[Run]:
        """Returns the runs of a size that are known so far."""
        cells = self.cells[size]
        for cell in cells.values():
            yield from cell.grid
            if best := cell.best(cell.grid, results):
                yield from cell.own(best)
            yield from cell.finals(results)
            yield from cell.timed(results, cells[self.about.baseline])
        baseline = cells[self.about.baseline]
        for budget in baseline.about.budgets:
            yield from baseline.budgeted(results, budget)

    @property
    def count(self) -> int:
        """How many runs there will be, if no scheme diverges at all rates."""
        return sum(
            len(cell.grid)
            + len(cell.about.own_rates.get(name, ()))
            + cell.about.seeds
            + cell.about.seeds
            * (len(cell.about.budgets) if name == self.about.baseline else cell.about.equal_time)
            for cells in self.cells.values()
            for name, cell in cells.items()
        )


def score(result: Result | None) -> float | None:
    """Returns the score at the trained length, None where there is none."""
    if result is None or not result.scores:
        return None
    return next(iter(next(iter(result.scores.values())).values()))


def load(path: Path) -> Study:
    """Returns the study of a file.

    Raises:
      ConfigError: if an entry is missing or wrong, with its path.
    """
    tables = read_toml(path)
    known = {f.name for f in dataclasses.fields(_File)}
    try:
        for name in ("schemes", "sizes"):
            if name not in tables:
                raise ConfigError(f"{name}: is missing")
        about = convert(_File, {k: v for k, v in tables.items() if k in known}, "")
        if about.baseline not in about.schemes:
            hint = near(about.baseline, about.schemes)
            raise ConfigError(f"baseline: must be one of the schemes{hint}")
        if not about.sizes:
            raise ConfigError("sizes: must hold at least one")
        common = {k: v for k, v in tables.items() if k not in known}
        cells = {size: _cells(size, table, about, common) for size, table in about.sizes.items()}
    except ConfigError as error:
        raise ConfigError(f"{path}: {error}") from None
    return Study(path.stem, about, cells)


def _cells(size: str, table: Any, about: _File, common: dict[str, Any]) -> dict[str, Cell]:
    try:
        table = convert(dict[str, Any], table, "")
        settings = {f.name for f in dataclasses.fields(_Size)}
        if "rates" not in table:
            raise ConfigError("rates: is missing")
        about_size = convert(_Size, {k: v for k, v in table.items() if k in settings}, "")
        if len(about_size.rates) < 3 or list(about_size.rates) != sorted(set(about_size.rates)):
            raise ConfigError(
                f"rates: must be at least three that grow, got {list(about_size.rates)}"
            )
        if about_size.seeds > about.grid_seed:
            raise ConfigError(f"seeds: must be up to grid_seed = {about.grid_seed}")
        if 1.0 in about_size.budgets or list(about_size.budgets) != sorted(set(about_size.budgets)):
            raise ConfigError(f"budgets: must grow, without 1, got {list(about_size.budgets)}")
        for name in about_size.own_rates:
            if name not in about.schemes:
                raise ConfigError(f"own_rates.{name}: is not compared{near(name, about.schemes)}")
        everything = merge(common, {k: v for k, v in table.items() if k not in settings})
        everything |= {"tasks": [about_size.task or about.task]}
        schemes = merge(everything.get("schemes", {}), {"names": list(about.schemes)})
        experiment = from_file(everything | {"schemes": schemes})
        experiment.check()
        (task,) = experiment.tasks.values()
        return {
            scheme: Cell(
                size,
                scheme,
                about_size,
                tuple(
                    dataclasses.replace(run, task=_at_rate(task, rate)) for rate in about_size.rates
                ),
            )
            for scheme in about.schemes
            for run in [experiment.run(task.name, scheme, about.grid_seed)]
        }
    except ConfigError as error:
        raise ConfigError(f"sizes.{size}: {error}") from None


def _at_rate(task: Any, rate: float) -> Any:
    return dataclasses.replace(task, train=dataclasses.replace(task.train, learning_rate=rate))


def seconds_of(results: Sequence[Result | None]) -> list[float]:
    """Returns the times of training of the runs that did not diverge."""
    return [result.seconds for result in results if result and result.status == "done"]
