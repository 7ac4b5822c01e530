"""The page and the plot of a study, made from result files."""

import math
import re
import statistics
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from experiments.pages import plots
from experiments.pages.intervals import in_words
from experiments.pages.markdown import provenance, table
from experiments.pages.scheme_results import Lookup, mean
from experiments.pages.tables import label, ordered
from experiments.runs.run import Result, duration
from experiments.study.answer import answer
from experiments.study.choice_tables import choice_tables
from experiments.study.clock import BUSY, Clock
from experiments.study.comparison import (
    Rows,
    change_with_size,
    differences,
    has_corpora,
    is_ladder,
    over_corpora,
    repetition,
)
from experiments.study.gains import curve_of, gain, trends
from experiments.study.plan import Cell, Study
from experiments.study.rows import Bounds, Row, rows_of

_HEAD = """\
# {title}

This page is made by `python -m experiments study {file}` from the results in `{results}`; it is not
edited by hand.

## Protocol

* All schemes have the same data, the same initial parameters of everything else, and the same
  number of steps; seeds are paired.
{chosen}
* Each rate of the grid has a run. The best rate and its neighbours have one for each of
  {selection_seeds} selection seeds, and so on until the best mean lies between worse ones or at the
  edge of the grid.
* A rate is unstable, and not chosen, if its selection seeds have a standard deviation above
  {unstable:g}; the best of the grid also if the same run at a rate that is higher by a millionth,
  so with other rounding, differs by more.
{tries}
* The reported seeds took no part in the choice. Intervals are 95 % intervals over these seeds by
  Student's t, of means and of means of paired differences to {baseline}. They include the choice:
  each way of drawing the selection seeds with replacement chooses anew among the settings that ran
  with all seeds and do not spread in this draw, and the change of the score is a component of the
  distribution. Which settings ran with all seeds, by the first seed alone, is not drawn anew.
* Intervals of losses beyond the trained length are over the reported seeds alone.
"""

_CHOSEN = (
    """\
* The learning rate of each scheme is chosen by the score at the trained length on the data of the
  report, by other seeds.""",
    """\
* The learning rate of each scheme is chosen by the loss on validation text, of documents that take
  part in neither training nor the report.""",
    """\
* The learning rate of each scheme is chosen by the loss on validation text where the task has it,
  of documents that take part in neither training nor the report; else by the score at the trained
  length on the data of the report, by other seeds.""",
)
"""By whether no task, all or some have validation text."""

_TRIES = (
    "* No scheme has further tries.",
    """\
* Every scheme has one further try: for its own parameters, a learning rate 10 times the common
  rate; if it has none, a rate half a step of the grid up.""",
    """\
* Every scheme has 2 further tries: for its own parameters, learning rates 10 and 3 times the
  common rate; if it has none, rates half a step of the grid up and down.""",
)

_TIMES = """\
* Steps of all schemes are timed side by side in one process. In equal time each scheme trains for
  the time of {baseline}'s run, slower ones with fewer steps. The compute gain of a scheme is the
  time in which {baseline} reaches its score, divided by this time; it is read off the mean scores
  of {baseline} with more and fewer steps at the same rate.
"""

_PROCESSOR = {
    True: """\
* **Time**: steps are timed with this library at the trained length, on one processor of the kind
  named below; longer sequences, GPUs and TPUs have other ratios. Intervals in equal time and of
  compute gains leave out the noise of the clock, up to five percent between two measurements, and
  of the curve from which gains are read.""",
    False: """\
* **Processor**: other kinds round otherwise, which grows most at high rates. Runs on several kinds
  are named below.""",
}
"""By whether times are compared."""

_HELD_OUT = """\
* **Held-out text**: {scored} KiB are scored, and intervals leave out the choice of this sample. A
  small difference that is not there on validation text, of other documents, may be one of the
  sample. The validation text chose the settings, by other seeds.
"""

_CRITERIA = {
    "resolved": "A difference is resolved if its interval excludes 0.",
    "time": """\
Nothing is concluded from time unless other programs had less than {busy:.0%} of the machine
   while steps were timed.""",
    "sizes": """\
A difference changes with size if its intervals at the first and the last size do not overlap;
   otherwise nothing is said about a trend.""",
    "corpora": """\
A difference holds in general if it is resolved with one sign on all corpora. If it is resolved on
   some, and with the other sign on none, these are named; with both signs, it depends on the
   corpus.""",
    "repetition": """\
No resolved statement changes: a difference to {baseline} that is resolved in `{repeats}` is not
   resolved with the other sign here. Differences that are resolved in one of the two alone are
   named.""",
}
"""Criteria by what a study has."""

_THREATS = """\
## Threats to validity

* **Corpus**: {corpus}; other text, and other kinds of sequences, may order the schemes otherwise.
{held_out}* **Scale**: {parameters} million parameters, {tokens} million bytes of training text per
  run.
* **Training**: scores after {steps} steps still fall. Longer training may change the order, which
  reflects the speed of learning as much as the final loss.
* **Tuning**: learning rates only; the initialisation, the weight decay and the settings of the
  schemes, RoPE's theta among them, are their defaults, or those in `{file}`. Equal tries are not
  equal chances: schemes with parameters try another rate for these alone, others try their rate.
* **Comparisons**: each interval has 95 %, and there are {comparisons}. A difference whose interval
  only just excludes 0 would not be resolved after a correction for their number.
{processor}
* **Selection**: {selection_seeds} seeds choose, so settings whose means are close may be taken for
  each other; the intervals include this.

## Add a scheme

    python -m experiments study {file} --run --also mypkg.mine:MyScheme --page mine.md

runs the scheme by the same protocol, and writes the page with one more row. `rope+alibi` names a
chain.
"""


def page(
    study: Study,
    results: Lookup,
    clock: Clock | None,
    file: str,
    folder: str,
    pictures: Mapping[str, str],
    earlier: Rows,
) -> str:
    """Returns the page.

    Args:
      study: the study.
      results: of its runs.
      clock: the times of steps, None before they are measured.
      file, folder: where the study and its results are.
      pictures: files of the plots of differences (""), of lengths (`length_suffix`), of places
        ("-maps") and of compute gains ("-gains"), as far as there are any.
      earlier: the rows of the study that this one repeats, if it does.
    """
    about, sizes = study.about, list(study.cells.values())
    cell = sizes[0][about.baseline]
    runs = list({run.name: run for run in study.runs(results, clock)}.values())
    known = [result for run in runs if (result := results(run))]
    tasks = [cells[about.baseline].task for cells in sizes]
    validated = [task.selection_view != task.views[0] for task in tasks]
    words = {
        "title": about.title,
        "file": file,
        "results": folder,
        "baseline": label(about.baseline),
        "selection_seeds": cell.about.selection_seeds,
        "unstable": cell.about.unstable,
        "tries": _TRIES[cell.about.tries],
        "chosen": _CHOSEN[0 if not any(validated) else 1 if all(validated) else 2],
        "busy": BUSY,
        "repeats": about.repeats,
    }
    has = {
        "resolved": True,
        "time": any(c.has_equal_time for cells in sizes for c in cells.values()),
        "sizes": is_ladder(study),
        "corpora": has_corpora(study),
        "repetition": bool(about.repeats),
    }
    lines = [_HEAD.format(**words) + (_TIMES.format(**words) if has["time"] else "")]
    criteria = [_CRITERIA[name].format(**words) for name in _CRITERIA if has[name]]
    lines += ["Criteria, written before the runs:", ""]
    lines += [f"{i + 1}. {text}" for i, text in enumerate(criteria)] + [""]
    lines += [about.remark.strip(), ""] if about.remark else []
    rows = {
        size: rows_of(cells, about.baseline, results, clock) for size, cells in study.cells.items()
    }
    if len(known) < len(runs):
        lines += [f"**{len(known)} of {len(runs)} runs known so far have ended.**", ""]
    lines += ["## Answer", ""] if any(rows.values()) else []
    if has["corpora"] and all(rows.values()):
        lines += over_corpora(study, rows)
    if has["sizes"] and all(rows.values()):
        lines += [*change_with_size(study, rows), ""]
    lines += answer(study, rows, clock)
    last = ", last size that has them" if len(sizes) > 1 else ""
    captions = {
        "": f"Differences to {label(about.baseline)} with their intervals",
        "-lengths": "Scores by length",
        "-maps": f"Scores by length and place in the row{last}; lines: where training ended",
        "-gains": "Compute gains in equal time with their intervals, against parameters",
    }
    for suffix, caption in captions.items():
        lines += [f"![{caption}]({pictures[suffix]})", ""] if suffix in pictures else []
    if sentences := list(trends(study, results, clock)):
        lines += [*sentences, ""]
    if has["repetition"] and any(rows.values()):
        lines += repetition(study, rows, earlier, len(criteria))
    for size, cells in study.cells.items():
        picture = pictures.get(length_suffix(study, size), "") if len(sizes) > 1 else ""
        lines += _size(size, cells, about, rows[size], results, clock, picture)
    counts = ordered(r.parameters / 1e6 for r in known if r.parameters)
    tokens = {
        c.task.train.steps * c.task.train.batch * c.task.train_length
        for s in sizes
        for c in s.values()
    }
    if counts:
        words["processor"] = _PROCESSOR[has["time"]]
        words["steps"] = _range([c.task.train.steps for s in sizes for c in s.values()], "d")
        words["comparisons"] = len(study.cells) * (len(about.schemes) - 1)
        words["parameters"] = _range(counts, ".2f")
        tasks = [c.task for s in sizes for c in s.values()]
        scored = [t.eval_bytes // 1024 for t in tasks if t.selection_view != t.views[0]]
        words["held_out"] = _HELD_OUT.format(scored=_range(scored, "d")) if scored else ""
        words["tokens"] = _range([n / 1e6 for n in tokens], ".2g")
        facts = [k for r in known for k in r.environment if k.startswith("corpus ")]
        words["corpus"] = (
            ", ".join(ordered(k.removeprefix("corpus ") for k in facts)) or "synthetic"
        )
        lines += [_THREATS.format(**words)]
    lines += provenance_of(known, clock)
    return "\n".join(lines).rstrip() + "\n"


def length_suffix(study: Study, size: str) -> str:
    """Returns how the file of the plot of lengths ends, with the size if there are several."""
    return "-lengths" + ("-" + re.sub(r"[^\w.]+", "-", size) if len(study.cells) > 1 else "")


def _range(numbers: Sequence[float], form: str) -> str:
    """Returns the least and the greatest number in words, one if they are the same."""
    low, high = format(min(numbers), form), format(max(numbers), form)
    return low if low == high else f"{low} to {high}"


def drawing(study: Study, results: Lookup, clock: Clock | None) -> str:
    """Returns the plot of differences to the baseline at the trained length, as <svg>.

    It has the sizes with the task of the first size, against parameters if they are a ladder.
    """
    baseline, name = study.about.baseline, label(study.about.baseline)
    task = next(iter(study.cells.values()))[baseline].task
    rows = {
        size: rows_of(cells, baseline, results, clock)
        for size, cells in study.cells.items()
        if cells[baseline].task.name == task.name
    }
    title = f"Differences to {name}"
    if is_ladder(study) and all(rows.values()):
        unit = f"{task.labels.unit}, difference to {name}"
        return plots.by_parameters(differences(study, rows), unit, title, "differences", 0.0)
    bounds: dict[str, dict[str, Bounds]] = {}
    for size, of_size in rows.items():
        for scheme, row in of_size.items():
            if scheme != baseline and not math.isnan(row.difference[0]):
                bounds.setdefault(scheme, {})[size] = row.difference
    if not bounds:
        return ""
    bounds = dict(sorted(bounds.items(), key=lambda row: next(iter(row[1].values()))[0]))
    unit = f"{task.labels.unit} at the trained length, difference to {name}"
    return plots.differences(bounds, unit, title)


def _size(
    size: str,
    cells: Mapping[str, Cell],
    about: Any,
    rows: Mapping[str, Row],
    results: Lookup,
    clock: Clock | None,
    picture: str,
) -> Iterator[str]:
    cell = cells[about.baseline]
    task = cell.task
    model, train = task.model, task.train
    counts = ordered(r.parameters for row in rows.values() for r in row.results if r.parameters)
    yield f"## {size.capitalize()}"
    yield ""
    if task.name != about.task:
        yield f"Task {task.name}: {task.labels.about}."
        yield ""
    if counts:
        yield f"{_range([n / 1e6 for n in counts], '.2f')} million parameters,"
    yield (
        f"{model.num_layers} layers of width {model.model_dim} with {model.num_heads} heads; "
        f"{train.steps} steps of {train.batch} x {task.train_length}; {cell.about.seeds} seeds."
    )
    yield ""
    if picture:
        yield f"![Scores by length, {size}]({picture})"
        yield ""
    if rows:
        yield from _scores(rows, about.baseline, results)
        yield from _budgets(rows[about.baseline], results)
    if clock and clock.busy(size):
        yield (
            "**Criterion 2 fails**: other programs ran while steps were timed, so nothing is "
            "concluded from time."
        )
        yield ""
    yield from choice_tables(cells, results)


def _scores(rows: Mapping[str, Row], baseline: str, results: Lookup) -> Iterator[str]:
    task = next(iter(rows.values())).cell.task
    main, trained = task.views[0], task.train_length
    columns = [
        (view, n)
        for view in task.views
        for n in task.test_lengths
        if (view, n) != (main, trained) and any(row.values(view, n) for row in rows.values())
    ]
    is_timed = any(row.timed for row in rows.values())
    heads = [f"{task.labels.unit}", f"difference to {label(baseline)}"]
    has_validation = any(row.on_validation for row in rows.values())
    heads += ["on validation text"] if has_validation else []
    heads += ["rate"]
    heads += ["step"] if any(row.step for row in rows.values()) else []
    heads += ["in equal time, difference"] if is_timed else []
    curve = curve_of(rows[baseline], results) if is_timed else {}
    heads += ["compute gain"] if curve else []
    lines = []
    for scheme, row in rows.items():
        lines.append(
            [
                label(scheme),
                in_words(row.at_trained_length, shifts=row.shifts),
                "" if scheme == baseline else row.difference_in_words(),
            ]
        )
        if has_validation:
            values = [] if scheme == baseline else row.on_validation
            shifts = row.shifts_against
            lines[-1].append(in_words(values, sign="+", shifts=shifts) if values else "")
        lines[-1].append(row.rate_in_words())
        if "step" in heads:
            lines[-1].append("" if row.step is None else f"{row.step:.2f}")
        if is_timed:
            lines[-1].append(row.difference_in_words(row.timed) if row.timed else "")
        if curve:
            lines[-1].append(_gain(row, curve) if row.timed else "")
    yield from table(["scheme", *heads], lines)
    if columns:
        yield "Other lengths and ways of evaluating, means over seeds:"
        yield ""
        lines = [
            [label(scheme), *(_mean(row.values(view, n)) for view, n in columns)]
            for scheme, row in rows.items()
        ]
        yield from table(["scheme", *(f"{view} {n}" for view, n in columns)], lines)
    unfitted = [label(s) for s, row in rows.items() if not any(r.fitted for r in row.results)]
    if unfitted:
        rule = next(iter(rows.values())).results[0].fit_rule
        names = ", ".join(f"`{name}`" for name in unfitted)
        yield f"Not learned by the rule of the task ({rule}): {names}."
        yield ""
    failed = {s: sum(r.status != "done" for r in row.results) for s, row in rows.items()}
    if any(failed.values()):
        words = (f"{label(s)} in {n} of {len(rows[s].results)}" for s, n in failed.items() if n)
        yield f"Seeds that diverged: {', '.join(words)}."
        yield ""
    yield from _spread(rows)


def _spread(rows: Mapping[str, Row]) -> Iterator[str]:
    """Yields a paragraph on settings that are unstable by the reported seeds."""
    cell = next(iter(rows.values())).cell
    limit, digits = cell.about.unstable, cell.task.labels.digits
    words = []
    for scheme, row in rows.items():
        scores = sorted(row.at_trained_length)
        if len(scores) > 1 and statistics.stdev(scores) > limit:
            words.append(
                f"{label(scheme)} ({', '.join(f'{score:.{digits}f}' for score in scores)})"
            )
    if words:
        yield (
            f"The reported seeds of some settings have a standard deviation above {limit:g}, with "
            f"which these would not have been chosen: {'; '.join(words)}."
        )
        yield ""


def _gain(row: Row, curve: Mapping[float, float]) -> str:
    """Returns in words the budgets at which a curve reaches the scores in equal time."""
    if (bounds := gain(row, curve)) is None:
        return "-"
    words = []
    for budget in bounds:
        beyond = {0.0: f"< {min(curve):g}", math.inf: f"> {max(curve):g}"}
        words.append(beyond.get(budget, f"{budget:.2f}"))
    middle, low, high = words
    return middle if low == high or len(row.timed) < 2 else f"{middle} [{low}, {high}]"


def _budgets(row: Row, results: Lookup) -> Iterator[str]:
    """The curve that compute gains are read off."""
    if curve := curve_of(row, results):
        name = label(row.run.scheme)
        shown = ", ".join(f"{budget:g} x: {value:.3f}" for budget, value in curve.items())
        yield f"Scores of {name} by training time, at the rate that is best for 1 x: {shown}."
        yield ""


def provenance_of(results: Sequence[Result], clock: Clock | None) -> Iterator[str]:
    """Yields the section on versions, processors, code, time and data."""
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
    if clock:
        for size, rounds in clock.rounds.items():
            others = clock.others[size]
            share = "an unknown part" if others is None else f"{others:.1%}"
            yield (
                f"* Steps of {size}: medians of {rounds} rounds on "
                f"{clock.environment['processor']}; other programs had {share} of the machine"
            )
    facts = ordered(f"{k}: {v}" for r in results for k, v in r.environment.items() if "corpus" in k)
    yield from (f"* {fact}" for fact in facts)


def _mean(values: Sequence[float]) -> str:
    return f"{mean(values):.3f}" if values else ""
