"""The page and the plot of a study, made from result files."""

import dataclasses
import itertools
import math
import statistics
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import numpy as np

from experiments.pages import plots
from experiments.pages.intervals import in_words, interval
from experiments.pages.markdown import provenance, table
from experiments.pages.scheme_results import Lookup, mean
from experiments.pages.tables import label, ordered
from experiments.runs.run import Result, Run, duration
from experiments.study.plan import Cell, Study
from experiments.study.selection import score

_HEAD = """\
# Which scheme? A study

This page is made by `python -m experiments study {file}` from the results in `{results}`; it is not
edited by hand. Every scheme has the same data, the same initial parameters and the same number of
steps. Its learning rate comes from a grid that is the same for all, by the score at the trained
length of a single run per rate, with seed {grid_seed}. The seeds that are reported took no part in
this choice, but they are scored on the same held-out data. So the rate is a good one and need not
be the best: where another is nearly as good, other seeds could choose it.

Intervals are 95 % intervals over seeds by Student's t, of the mean or of the mean of paired
differences to {baseline}; they do not hold the uncertainty of the rates. Two criteria apply:

1. A difference is resolved if its interval excludes 0.
2. The order of the schemes may not depend on which half of the grid is used: every other rate, from
   the first or from the second on.

In equal time, a scheme has more or fewer steps, so that its training takes as long as the training
of {baseline}. Its compute gain is the training time in which {baseline} reaches the same score,
divided by that equal time; it is read off the mean scores of {baseline} with more and fewer steps
at the same rate. Both need times that were not disturbed by other programs: they are shown if the
schemes' times relative to {baseline} agree within {uneven:.0f} % between grid and reported runs.
"""

UNEVEN = 0.03
"""The greatest change of relative times from which something is concluded."""


def page(study: Study, results: Lookup, file: str, folder: str, pictures: Mapping[str, str]) -> str:
    """Returns the page.

    Args:
      study: the study.
      results: of its runs.
      file, folder: where the study and its results are.
      pictures: files of the plots of differences (""), of lengths ("-lengths") and of places
        ("-maps"), as far as there are any.
    """
    about = study.about
    words = {"file": file, "results": folder, "baseline": label(about.baseline)}
    lines = [_HEAD.format(**words, grid_seed=about.grid_seed, uneven=100 * UNEVEN)]
    runs = list({run.name: run for run in study.runs(results)}.values())
    done = sum(results(run) is not None for run in runs)
    if done < len(runs):
        lines += [
            f"**{done} of {study.count} runs have ended**; the tables are incomplete.",
            "",
        ]
    captions = {
        "": f"Differences to {label(about.baseline)} with their intervals",
        "-lengths": "Scores by length, first size",
        "-maps": "Scores by length and place in the row, last size that has them; lines: where "
        "training ended",
    }
    for suffix, picture in pictures.items():
        lines += [f"![{captions[suffix]}]({picture})", ""]
    for size, cells in study.cells.items():
        lines += _size(size, cells, about, results)
    lines += _provenance([r for run in runs if (r := results(run))])
    return "\n".join(lines).rstrip() + "\n"


def drawing(study: Study, results: Lookup) -> str:
    """Returns the plot of differences to the baseline at the trained length, as <svg>.

    It has the sizes with the task of the first size.
    """
    rows: dict[str, dict[str, tuple[float, float, float]]] = {}
    task = next(iter(next(iter(study.cells.values())).values())).grid[0].task
    for size, cells in study.cells.items():
        if next(iter(cells.values())).grid[0].task.name != task.name:
            continue
        for scheme, row in _rows(cells, study.about.baseline, results).items():
            if scheme != study.about.baseline:
                bounds = interval(row.against)
                if not math.isnan(bounds[0]):
                    rows.setdefault(scheme, {})[size] = bounds
    if not rows:
        return ""
    rows = dict(sorted(rows.items(), key=lambda row: next(iter(row[1].values()))[0]))
    name = label(study.about.baseline)
    unit = f"{task.labels.unit} at the trained length, difference to {name}"
    return plots.differences(rows, unit, f"Differences to {name}")


class _Row:
    """A scheme's results of all seeds.

    Attributes:
      run: of the first seed.
      results: one per seed.
      against: differences to the baseline at the trained length, one per seed.
    """

    def __init__(self, runs: Sequence[Run], results: Sequence[Result], baseline: Sequence[Result]):
        self.run, self.results = runs[0], results
        self.against = _differences(results, baseline)

    def values(self, view: str, length: int) -> list[float]:
        """Returns the scores of a view at a length, without missing ones."""
        scores = (result.scores.get(view, {}).get(str(length)) for result in self.results)
        return [x for x in scores if x is not None]


def _rows(cells: Mapping[str, Cell], baseline: str, results: Lookup) -> dict[str, _Row]:
    """Returns the schemes whose seeds have all ended, where the baseline's have; best first."""
    of_baseline = _ended(cells[baseline].finals(results), results)
    if not of_baseline:
        return {}
    rows = {}
    for scheme, cell in cells.items():
        runs = cell.finals(results)
        if ended := _ended(runs, results):
            rows[scheme] = _Row(runs, ended, of_baseline)
    return dict(sorted(rows.items(), key=lambda item: _order(item[1])))


def _differences(results: Sequence[Result], baseline: Sequence[Result]) -> list[float]:
    """Returns differences at the trained length by seed, NaN where one diverged."""
    pairs = [(score(a), score(b)) for a, b in zip(results, baseline, strict=True)]
    return [math.nan if a is None or b is None else a - b for a, b in pairs]


def _order(row: _Row) -> float:
    sign = -1.0 if row.run.task.labels.higher_is_better else 1.0
    scores = [score(result) for result in row.results]
    return math.inf if None in scores else sign * mean(scores)


def _ended(runs: Sequence[Run], results: Lookup) -> list[Result]:
    """Returns the results of runs, none unless all have ended."""
    ended = [result for run in runs if (result := results(run))]
    return ended if len(ended) == len(runs) else []


def _size(size: str, cells: Mapping[str, Cell], about: Any, results: Lookup) -> Iterator[str]:
    baseline = about.baseline
    cell = cells[baseline]
    task = cell.grid[0].task
    model, train = task.model, task.train
    rows = _rows(cells, baseline, results)
    counts = ordered(r.parameters for row in rows.values() for r in row.results if r.parameters)
    yield f"## {size.capitalize()}"
    yield ""
    if task.name != about.task:
        yield f"Task {task.name}: {task.labels.about}."
        yield ""
    if counts:
        yield f"{min(counts) / 1e6:.2f} to {max(counts) / 1e6:.2f} million parameters,"
    yield (
        f"{model.num_layers} layers of width {model.model_dim} with {model.num_heads} heads; "
        f"{train.steps} steps of {train.batch} x {task.train_length}; {cell.about.seeds} seeds."
    )
    yield ""
    yield from _cautions(cells, baseline, rows, results)
    if rows:
        yield from _scores(rows, cells, baseline, results)
        yield from _budgets(rows[baseline], cells[baseline], results)
    yield from _grid(cells, results)
    yield from _orders(cells, results)
    yield from _scheme_rates(cells, results)


def _cautions(
    cells: Mapping[str, Cell], baseline: str, rows: Mapping[str, _Row], results: Lookup
) -> Iterator[str]:
    """Yields the limits of the tables: of the order, the rates and the times."""
    if swapped := _swapped(_halves(cells, results)):
        names = "; ".join(f"{label(a)} and {label(b)}" for a, b in swapped)
        yield f"* **Criterion 2 fails**: with the half of the grid, these change places: {names}."
    if near := [f"{label(s)} ({_rates(r)})" for s in rows if (r := _near(cells[s], results))]:
        yield (
            "* **The best rate is not resolved** for "
            f"{', '.join(near)}. At the rates in brackets, the run of the grid is within two "
            "standard deviations over the reported seeds of the best run."
        )
    scheme, change = _uneven(cells, baseline, results)
    if change > UNEVEN:
        of_grid, of_finals = _relative_times(cells, baseline, results)[scheme]
        yield (
            f"* **Nothing is concluded from time**: with {label(scheme)}, training took "
            f"{of_grid:.2f} of the time of {label(baseline)} in the grid and {of_finals:.2f} in "
            "the reported runs. Runs in equal time were made, but are not shown."
        )
    yield ""


def _near(cell: Cell, results: Lookup) -> list[float]:
    """Returns other rates of the grid at which a run is within two deviations of the best."""
    best = cell.best(cell.grid, results)
    scores = [x for run in cell.finals(results) if (x := score(results(run))) is not None]
    top = score(results(best)) if best else None
    if top is None or len(scores) < 2:
        return []
    reach = 2 * statistics.stdev(scores)
    return [
        run.task.train.learning_rate
        for run in cell.grid
        if run is not best and (x := score(results(run))) is not None and abs(x - top) <= reach
    ]


def _rates(rates: Sequence[float]) -> str:
    return ", ".join(f"{rate:g}" for rate in rates)


def _relative_times(
    cells: Mapping[str, Cell], baseline: str, results: Lookup
) -> dict[str, tuple[float, float]]:
    """Returns median times relative to the baseline: of the grid, and of the reported runs."""
    times = {}
    for name, cell in cells.items():
        ended = [[results(run) for run in runs] for runs in (cell.grid, cell.finals(results))]
        seconds = [seconds_of(part) for part in ended]
        if all(seconds):
            times[name] = tuple(map(statistics.median, seconds))
    if baseline not in times:
        return {}
    of_grid, of_finals = times[baseline]
    return {name: (a / of_grid, b / of_finals) for name, (a, b) in times.items()}


def _uneven(cells: Mapping[str, Cell], baseline: str, results: Lookup) -> tuple[str, float]:
    """Returns the scheme whose relative time changes most, and by which part of it."""
    times = _relative_times(cells, baseline, results)
    changes = {name: max(a / b, b / a) - 1 for name, (a, b) in times.items()}
    return max(changes.items(), key=lambda item: item[1], default=("", 0.0))


def _scores(
    rows: Mapping[str, _Row], cells: Mapping[str, Cell], baseline: str, results: Lookup
) -> Iterator[str]:
    task = next(iter(rows.values())).run.task
    main, trained = task.views[0], task.train_length
    columns = [
        (view, n)
        for view in task.views
        for n in task.test_lengths
        if (view, n) != (main, trained) and any(row.values(view, n) for row in rows.values())
    ]
    timed = {s: _ended(cells[s].timed(results, cells[baseline]), results) for s in rows}
    if _uneven(cells, baseline, results)[1] > UNEVEN:
        timed = {}
    heads = [f"{task.labels.unit}", f"difference to {label(baseline)}", "rate"]
    heads += ["in equal time, difference"] if any(timed.values()) else []
    curve = _curve(rows[baseline], cells[baseline], results) if any(timed.values()) else {}
    heads += ["compute gain"] if curve else []
    lines = []
    for scheme, row in rows.items():
        train = row.run.task.train
        scheme_rate = f" ({train.scheme_rate:g} x)" if train.scheme_rate != 1 else ""
        cells_of = [
            in_words(row.values(main, trained)),
            "" if scheme == baseline else in_words(row.against, sign="+"),
            f"{train.learning_rate:g}{scheme_rate}",
        ]
        if any(timed.values()):
            against = _differences(timed[scheme], rows[baseline].results) if timed[scheme] else []
            cells_of.append(in_words(against, sign="+") if against else "")
            cells_of += [_gain(against, curve) if against else ""] if curve else []
        lines.append([label(scheme), *cells_of])
    yield from table(["scheme", *heads], lines)
    if columns:
        yield "Other lengths and ways of evaluating, means over seeds:"
        yield ""
        lines = [
            [label(scheme), *(_mean(row.values(view, n)) for view, n in columns)]
            for scheme, row in rows.items()
        ]
        yield from table(["scheme", *(f"{view} {n}" for view, n in columns)], lines)
    failed = {s: sum(r.status != "done" for r in row.results) for s, row in rows.items()}
    grids = [r for s in rows for run in cells[s].grid if (r := results(run))]
    processors = sorted({r.processor for r in grids if r.on_cpu})
    if any(timed.values()) and len(processors) > 1:
        yield (
            "**Equal times and compute gains are not comparable**: training was timed on different "
            f"processors: {'; '.join(processors)}."
        )
        yield ""
    if any(failed.values()):
        words = (f"{label(s)} in {n} of {len(rows[s].results)}" for s, n in failed.items() if n)
        yield f"Seeds that diverged: {', '.join(words)}."
        yield ""


def _curve(row: _Row, cell: Cell, results: Lookup) -> dict[float, float]:
    """Returns the baseline's mean score by budget, ascending; nothing before all have ended."""
    curve = {1.0: mean(row.values(row.run.task.views[0], row.run.task.train_length))}
    for budget in cell.about.budgets:
        runs = cell.budgeted(results, budget)
        scores = [score(result) for result in _ended(runs, results)]
        steps = runs[0].task.train.steps / row.run.task.train.steps  # At least the warm-up.
        curve[steps] = mean([math.nan if x is None else x for x in scores])
    known = len(curve) > 1 and all(map(math.isfinite, curve.values()))
    return dict(sorted(curve.items())) if known else {}


def _gain(against: Sequence[float], curve: Mapping[float, float]) -> str:
    """Returns in words the budgets at which a curve differs from its score at 1 by `against`."""
    budgets = np.log2(list(curve))
    scores = np.array(list(curve.values())) - curve[1.0]
    sign = 1.0 if scores[-1] > scores[0] else -1.0  # Of lower budgets, the scores are worse.
    if not np.all(np.diff(sign * scores) > 0) or any(map(math.isnan, against)):
        return "-"
    words = []
    for difference in interval(against):
        change = sign * difference
        if change < sign * scores[0]:
            words.append(f"< {min(curve):g}")
        elif change > sign * scores[-1]:
            words.append(f"> {max(curve):g}")
        else:
            words.append(f"{2 ** np.interp(change, sign * scores, budgets):.2f}")
    middle, low, high = words if sign > 0 else (words[0], *words[:0:-1])
    return middle if low == high or len(against) < 2 else f"{middle} [{low}, {high}]"


def _budgets(row: _Row, cell: Cell, results: Lookup) -> Iterator[str]:
    """The curve that compute gains are read off."""
    if curve := _curve(row, cell, results):
        name = label(row.run.scheme)
        shown = ", ".join(f"{budget:g} x: {value:.3f}" for budget, value in curve.items())
        yield f"Scores of {name} by training time, at the rate that is best for 1 x: {shown}."
        yield ""


def _grid(cells: Mapping[str, Cell], results: Lookup) -> Iterator[str]:
    results_by_scheme = {n: [results(run) for run in cell.grid] for n, cell in cells.items()}
    if not any(r for row in results_by_scheme.values() for r in row):
        return
    rates = next(iter(cells.values())).about.rates
    yield "The grid of learning rates (one seed, score at the trained length; the best is bold):"
    yield ""
    lines, edges = [], []
    for name, row in results_by_scheme.items():
        best = cells[name].best(cells[name].grid, results)
        texts = []
        for run, result in zip(cells[name].grid, row, strict=True):
            value = score(result)
            text = "" if result is None else "diverged" if value is None else f"{value:.3f}"
            texts.append(f"**{text}**" if run is best else text)
        if best in (cells[name].grid[0], cells[name].grid[-1]):
            edges.append(label(name))
        lines.append([label(name), *texts])
    yield from table(["scheme", *(f"{rate:g}" for rate in rates)], lines)
    if edges:
        yield f"The best rate lies at the edge of the grid for {', '.join(edges)}."
        yield ""


@dataclasses.dataclass(frozen=True)
class _Half:
    """Every other rate of the grid: the rates, and the best score by scheme, best first."""

    rates: Sequence[float]
    scores: Mapping[str, float]


def _halves(cells: Mapping[str, Cell], results: Lookup) -> list[_Half]:
    """Returns both halves of the grid; none before all their runs have ended."""
    halves, known = [], next(iter(cells.values())).about.rates
    for part in (slice(0, None, 2), slice(1, None, 2)):
        scores = {}
        for name, cell in cells.items():
            best = cell.best(cell.grid[part], results)
            value = score(results(best)) if best else None
            if value is None:
                return []
            scores[name] = value
        highest_first = next(iter(cells.values())).grid[0].task.labels.higher_is_better
        order = sorted(scores, key=lambda n: scores[n], reverse=highest_first)
        halves.append(_Half(known[part], {name: scores[name] for name in order}))
    return halves


def _swapped(halves: Sequence[_Half]) -> list[tuple[str, str]]:
    """Returns the pairs of schemes that change places between the halves."""
    if not halves:
        return []
    first, second = (list(half.scores) for half in halves)
    pairs = itertools.combinations(first, 2)
    return [(a, b) for a, b in pairs if second.index(a) > second.index(b)]


def _orders(cells: Mapping[str, Cell], results: Lookup) -> Iterator[str]:
    """Whether the order of the schemes depends on the half of the grid."""
    halves = _halves(cells, results)
    if not halves:
        return
    yield "The order with every other rate of the grid only, from the first and from the second on:"
    yield ""
    for half in halves:
        shown = ", ".join(f"{label(name)} {value:.3f}" for name, value in half.scores.items())
        yield f"* {_rates(half.rates)}: {shown}"
    yield ""
    words = []
    for a, b in _swapped(halves):
        gaps = " and ".join(f"{abs(half.scores[a] - half.scores[b]):.3f}" for half in halves)
        words.append(f"{label(a)} and {label(b)} ({gaps} apart)")
    yield f"Pairs that change places: {'; '.join(words)}." if words else "The order is the same."
    yield ""


def _scheme_rates(cells: Mapping[str, Cell], results: Lookup) -> Iterator[str]:
    lines = []
    for name, cell in cells.items():
        best = cell.best(cell.grid, results)
        before = score(results(best)) if best else None
        for run in cell.own(best) if best else ():
            value = score(results(run))
            if value is not None and before is not None:
                rate = run.task.train.scheme_rate
                lines.append(f"* {label(name)}, {rate:g} x: {value:.3f} ({value - before:+.3f})")
    if lines:
        yield "Other learning rates for the scheme's own parameters, at its best rate for the rest:"
        yield ""
        yield from lines
        yield ""


def _provenance(results: Sequence[Result]) -> Iterator[str]:
    if not results:
        return
    yield "## How it was made"
    yield ""
    origin = provenance(results)
    yield f"* Versions: {origin.versions}"
    yield f"* Processor: {origin.processors}"
    yield f"* Code: {origin.commits}"
    wall = sum(result.train_seconds + result.compile_seconds for result in results)
    cpu = sum(result.cpu_seconds for result in results)
    yield f"* {len(results)} runs; {duration(wall)} in training and compilation one after the other"
    yield f"* {duration(cpu)} of processor time in training"
    facts = ordered(f"{k}: {v}" for r in results for k, v in r.environment.items() if "corpus" in k)
    yield from (f"* {fact}" for fact in facts)


def _mean(values: Sequence[float]) -> str:
    return f"{mean(values):.3f}" if values else ""
