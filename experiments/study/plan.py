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

Runs follow from results, in stages. `Selection` chooses the settings of each scheme: a run at each
rate of the grid; further seeds at the best rate and its neighbours, on until the best mean has its
neighbours around it; the best rate once more with other rounding; then `tries` other settings.
These runs are measured at the trained length alone, on the validation text if the task has one.
The chosen run is repeated with all reported seeds and, with `equal_time` and a clock
(`experiments.study.clock`), with the number of steps that takes the baseline's time. With
`budgets`, the baseline runs with more and fewer steps too, at the same rate, so that scores
translate into time.
"""

import dataclasses
import functools
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, Literal, get_args

import jax
from pydantic import NonNegativeInt, PositiveFloat

import posenc_jax as pe
from experiments.claims import Claim, check
from experiments.errors import ConfigError
from experiments.models.schemes import called, check_names, plain, schemes_in, short
from experiments.runs.experiment import from_file, refuse_plan
from experiments.runs.run import Lookup, Result, Run
from experiments.settings.config_io import convert, merge, near, read_toml, strict
from experiments.stats import ordered
from experiments.study.cell import Cell
from experiments.study.clock import Clock
from experiments.study.selection import Size, variant

_OfSteps = Literal["steps_picture", "steps"]
BlockName = (
    Literal["remark", "progress", "criterion", "differences", "tables", "claims", "pictures"]
    | Literal["so_far", "settings", "screen", "summary", "finalists", "origin"]
    | _OfSteps
)


@strict
class Reference:
    """Schemes that differ in a parameter; others are compared with the best of them at each size.

    It is the one with the best mean of its reported seeds on validation text.
    """

    about: str
    """The best of them in words."""
    parameter: str
    """Its name."""
    schemes: dict[str, str]
    """Its value by the short name of the scheme."""
    close: PositiveFloat
    """The greatest difference of schemes that are equal in the limit."""
    shown: PositiveFloat
    """How far behind a scheme of the picture may be."""


@strict
class _File:
    """A study, without the settings of its runs."""

    schemes: tuple[str, ...]
    """Schemes to compare."""
    sizes: dict[str, Any]
    """Sizes by name."""
    task: str = "text"
    """The task."""
    baseline: str = "rope"
    """The scheme that others are compared to."""
    title: str = "Which position encoding has the lowest loss? A study"
    """The heading of the page."""
    blocks: tuple[BlockName, ...] = (
        *("remark", "progress", "criterion", "differences", "tables", "claims", "pictures"),
        *("so_far", "settings"),
    )
    """The blocks of the page in their order; see `experiments.study.command.BLOCKS`."""
    criterion: str = ""
    """What decides the study's question, written before the runs."""
    first_selection_seed: NonNegativeInt = 100
    """The seed of the grid, above all that are reported."""
    variants_of_baseline: tuple[str, ...] = ()
    """Changes of the baseline without training; each reported seed runs once more for them, unless
    the variants of the task have them all."""
    reference: Reference | None = None
    """In place of the baseline, of a study whose sizes are numbers of steps."""
    notes: dict[str, str] = dataclasses.field(default_factory=dict)
    """Words on schemes by their short names."""
    claims: tuple[Claim, ...] = ()
    """Conditions on `scheme[length]` and `scheme.view[length]`, paired by seed at each size that is
    reported; with `reference` on `scheme.lead[steps]`, the difference to the best reference that is
    another scheme."""
    remark: str = ""
    """A change of the protocol after the first run, shown on the page."""


@dataclasses.dataclass(frozen=True)
class Study:
    """A study: its cells by size and scheme."""

    name: str
    about: _File
    cells: Mapping[str, Mapping[str, Cell]]

    @property
    def reported(self) -> dict[str, Mapping[str, Cell]]:
        """The sizes of the page, without sizes of one seed that choose the rates of another."""
        of_size = {size: next(iter(cells.values())).about for size, cells in self.cells.items()}
        sources = {about.rates_of for about in of_size.values()}
        hidden = {size for size, about in of_size.items() if about.seeds == 1 and size in sources}
        return {size: cells for size, cells in self.cells.items() if size not in hidden}

    @property
    def timed_sizes(self) -> dict[str, Mapping[str, Cell]]:
        """The sizes whose steps the clock measures: all without `best`."""
        baseline = self.about.baseline
        return {s: cells for s, cells in self.cells.items() if not cells[baseline].about.best}

    def runs(self, results: Lookup, clock: Clock | None) -> Iterator[Run]:
        """Returns all runs that are known so far; more follow from their results."""
        for size in self.cells:
            yield from self.runs_of(size, results, clock)

    def known(self, results: Lookup, clock: Clock | None) -> tuple[list[Result], int]:
        """Returns the results of the runs that are known so far, and the number of these runs."""
        runs = {run.name: run for run in self.runs(results, clock)}.values()
        return [result for run in runs if (result := results(run))], len(runs)

    def compared(self, size: str, results: Lookup) -> Mapping[str, Cell]:
        """Returns the schemes of a size; with `best`, none before the best are known."""
        cells = self.cells[size]
        about = cells[self.about.baseline].about
        if not about.best:
            return cells
        ranks = {name: cell.source.rank(results) for name, cell in cells.items() if cell.source}
        known = {name: rank for name, rank in ranks.items() if rank is not None}
        if len(known) < len(cells):
            return {}
        best = sorted(known, key=lambda name: known[name])[: about.best]
        chosen = {self.about.baseline, *about.always, *best}
        return {name: cell for name, cell in cells.items() if name in chosen}

    def runs_of(self, size: str, results: Lookup, clock: Clock | None) -> Iterator[Run]:
        """Returns the runs of a size that are known so far, the baseline's first: all need them."""
        cells = self.compared(size, results)
        if not cells:
            return
        for cell in sorted(cells.values(), key=lambda cell: cell.scheme != self.about.baseline):
            if cell.chooses:
                yield from cell.selection(results).runs
            yield from cell.finals(results)
            yield from cell.timed(results, cells[self.about.baseline], clock)
            yield from cell.varied(results)
        baseline = cells[self.about.baseline]
        for budget in baseline.about.budgets:
            yield from baseline.budgeted(results, budget)


def load(path: Path, also: Sequence[str] = ()) -> Study:
    """Returns the study of a TOML file, with further schemes to compare."""
    tables = read_toml(path)
    known = {f.name for f in dataclasses.fields(_File)}
    try:
        about = convert(_File, {k: v for k, v in tables.items() if k in known}, "")
        schemes = tuple(ordered(map(plain, [*about.schemes, *also])))
        check_names(schemes)
        about = dataclasses.replace(about, schemes=schemes)
        if about.baseline not in about.schemes:
            hint = near(about.baseline, about.schemes)
            raise ConfigError(f"baseline: must be one of the schemes{hint}")
        if not about.sizes:
            raise ConfigError("sizes: must hold at least one")
        of_steps = [name for name in about.blocks if name in get_args(_OfSteps)]
        if of_steps and (about.reference is None or len(about.sizes) < 2):
            raise ConfigError(f"blocks: {of_steps[0]} needs a reference and two sizes or more")
        names = [*map(short, schemes)]
        for name in about.reference.schemes if about.reference else ():
            if name not in names:
                raise ConfigError(f"reference.schemes: {name!r} is not compared{near(name, names)}")
        common = {k: v for k, v in tables.items() if k not in known}
        refuse_plan(common, "a study")
        cells: dict[str, dict[str, Cell]] = {}
        for size, table in about.sizes.items():
            cells[size] = _cells(size, table, about, common, cells)
        check(about.claims, functools.partial(_without_score, about, cells))
    except ConfigError as error:
        raise ConfigError(f"{path}: {error}") from None
    return Study(path.stem, about, cells)


def _without_score(
    about: _File, cells: Mapping[str, Mapping[str, Cell]], name: str, view: str | None, length: int
) -> str:
    """Returns why a study has no score of a claim, or ""."""
    known = [*map(short, about.schemes)]
    if name not in known:
        return f"{name} is not compared{near(name, known)}"
    tasks = [of_size[about.baseline].task for of_size in cells.values()]
    if about.reference is None:
        return next(filter(None, (task.without_score(view, length) for task in tasks)), "")
    if view != "lead":
        return "claims of a study with a reference are on scheme.lead[steps]"
    steps = [task.train.steps for task in tasks]
    return "" if length in steps else f"no size has {length} steps, only {steps}"


def _cells(
    size: str,
    table: Any,
    about: _File,
    common: dict[str, Any],
    sizes_above: Mapping[str, Mapping[str, Cell]],
) -> dict[str, Cell]:
    try:
        table = convert(dict[str, Any], table, "")
        settings = {f.name for f in dataclasses.fields(Size)}
        if ("rates" in table) == ("rates_of" in table):
            words = "and rates_of exclude each other" if "rates" in table else "is missing"
            raise ConfigError(f"rates: {words}")
        about_size = convert(Size, {k: v for k, v in table.items() if k in settings}, "")
        rates, source = about_size.rates, about_size.rates_of
        if source and source not in sizes_above:
            raise ConfigError(f"rates_of: must be a size above{near(source, sizes_above)}")
        if source and any(cell.source for cell in sizes_above[source].values()):
            raise ConfigError(f"rates_of: {source} has no rates of its own; name the size that has")
        if not source and (len(rates) < 3 or list(rates) != sorted(set(rates))):
            raise ConfigError(f"rates: must be at least three that grow, got {list(rates)}")
        if about_size.seeds > about.first_selection_seed:
            raise ConfigError(
                f"seeds: must be up to first_selection_seed = {about.first_selection_seed}"
            )
        if about_size.best and not source:
            raise ConfigError("best: needs rates_of, the size whose best schemes run")
        for name in ("tries", *(() if about_size.best else ("selection_seeds",))):
            if source and name in table:
                raise ConfigError(f"{name}: belongs to {source}, which chooses the settings")
        if about_size.equal_time and about_size.best:
            raise ConfigError("equal_time: needs a size without best; others are not timed")
        if about_size.rate and (about_size.best or not source):
            raise ConfigError("rate: needs rates_of, without best")
        if about_size.always and not about_size.best:
            raise ConfigError("always: needs best")
        if unknown := [name for name in about_size.always if name not in about.schemes]:
            hint = near(unknown[0], about.schemes)
            raise ConfigError(f"always: {unknown[0]} is not compared{hint}")
        if 1.0 in about_size.budgets or list(about_size.budgets) != sorted(set(about_size.budgets)):
            raise ConfigError(f"budgets: must grow, without 1, got {list(about_size.budgets)}")
        of_size = {k: v for k, v in table.items() if k not in settings}
        refuse_plan(of_size, "a size")
        everything = merge(common, of_size)
        everything |= {"tasks": [about_size.task or about.task]}
        schemes = about.schemes
        tables = merge(everything.get("schemes", {}), {"names": list(schemes)})
        experiment = from_file(everything | {"schemes": tables})
        experiment.check()
        for task in experiment.tasks.values():
            if task.rates:
                raise ConfigError(f"{task.name}.rates: a study has the rates of its sizes")
        return {
            scheme: _cell(
                size, scheme, about, about_size, experiment, sizes_above.get(source, {}).get(scheme)
            )
            for scheme in schemes
        }
    except ConfigError as error:
        raise ConfigError(f"sizes.{size}: {error}") from None


def _cell(
    size: str,
    scheme: str,
    about: _File,
    about_size: Size,
    experiment: Any,
    source: Cell | None,
) -> Cell:
    (task,) = experiment.tasks.values()
    run = experiment.run(task.name, scheme, about.first_selection_seed)
    first = dataclasses.replace(run, task=task.at_trained_length())
    rates = about_size.rates or (task.train.learning_rate,)
    grid = tuple(variant(first, run.seed, learning_rate=rate) for rate in rates)
    has_parameters = called(
        lambda: any(map(_has_parameters, schemes_in(run.position))), [], {}, scheme
    )
    variants = about.variants_of_baseline if scheme == about.baseline else ()
    if variants and not hasattr(task, "with_variants"):
        raise ConfigError(f"variants_of_baseline: task {task.name} has no variants")
    if variants:
        task.with_variants(variants).check()
    return Cell(size, scheme, about_size, grid, task, has_parameters, source, variants)


@functools.cache
def _has_parameters(scheme: pe.Scheme) -> bool:
    return bool(jax.tree.leaves(jax.eval_shape(lambda: scheme.init(jax.random.key(0)))))
