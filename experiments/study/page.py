"""Pages of studies: the blocks that a study's file names, made from result files.

A block yields paragraphs of Markdown, and none while there is nothing to say; further ones are in
`catalogue` and `steps`. Pictures are drawn as blocks show them.
"""

import dataclasses
import functools
import math
from collections.abc import Callable, Iterator, Mapping, Sequence

from experiments.models.schemes import label
from experiments.pages import plots
from experiments.pages.page import table
from experiments.runs.results import mixture
from experiments.runs.run import Lookup, duration
from experiments.runs.scores import UNSTABLE
from experiments.stats import Bounds, in_cell, ordered
from experiments.study import comparison
from experiments.study.cell import Cell
from experiments.study.clock import Clock
from experiments.study.plan import Study
from experiments.study.rows import Row, Rows, curve_of
from experiments.study.selection import score


@dataclasses.dataclass(frozen=True)
class Context:
    """The inputs of a page and its pictures.

    Attributes:
      clock: the times of steps, None before they are measured.
      numbers, methods: files for links.
      name: of the files of pictures, without their ends; "" leaves these out.
      pictures: drawn by blocks, by file.
    """

    study: Study
    rows: Rows
    results: Lookup
    clock: Clock | None
    file: str
    command: str
    numbers: str
    methods: str
    name: str
    pictures: dict[str, str] = dataclasses.field(default_factory=dict)

    @property
    def baseline(self) -> str:
        return label(self.study.about.baseline)

    @property
    def reported(self) -> Rows:
        return {size: self.rows[size] for size in self.study.reported}

    def picture(self, suffix: str, caption: str, draw: Callable[[], str]) -> Iterator[str]:
        if self.name and (svg := draw()):
            file = f"{self.name}{suffix}.svg"
            self.pictures[file] = svg
            yield f"![{caption}]({file})"


Block = Callable[[Context], Iterator[str]]


def remark(page: Context) -> Iterator[str]:
    if page.study.about.remark:
        yield page.study.about.remark.strip()


def criterion(page: Context) -> Iterator[str]:
    if page.study.about.criterion:
        yield f"Criterion, written before the runs: {page.study.about.criterion.strip()}"


def progress(page: Context) -> Iterator[str]:
    """Yields how many runs have ended, unless all have."""
    known, expected = page.study.known(page.results, page.clock)
    if len(known) < expected:
        yield f"**{len(known)} of {expected} runs known so far have ended.**"


def differences(page: Context) -> Iterator[str]:
    """Yields the differences at all sizes, and which change from the first to the last."""
    study, rows, sizes = page.study, page.reported, [*page.reported]
    corpora = comparison.has_corpora(study)
    if not _side_by_side(page):
        return
    heads = ["scheme", "resolved", *sizes] if corpora else ["scheme", *sizes]
    yield f"Differences to {page.baseline} at the trained length, and its scores:"
    yield table(heads, comparison.side_by_side(study, rows), 1 + corpora)
    if comparison.is_ladder(study):
        words = "these change", "no change is resolved for"
        yield "\n".join(
            f"From {sizes[0]} to {sizes[-1]} {verb}: {', '.join(names)}."
            for verb, names in zip(words, comparison.change_with_size(study, rows), strict=True)
            if names
        )
    views, losses = comparison.losses_side_by_side(study, rows)
    if losses:
        yield f"{', and '.join(views).capitalize()}:"
        yield table(["scheme", *sizes], losses)


def _side_by_side(page: Context) -> bool:
    """Whether all differences are in one table."""
    comparable = comparison.is_ladder(page.study) or comparison.has_corpora(page.study)
    return comparable and all(page.reported.values())


def tables(page: Context) -> Iterator[str]:
    """Yields a table for each size, unless another block has its numbers, and notes on them."""
    study, tasks = page.study, [row.task for rows in page.rows.values() for row in rows.values()]
    shown = not _side_by_side(page) or any(map(comparison.is_of_context, tasks))
    for size, rows in page.reported.items():
        if rows and shown:
            if len(page.reported) > 1:
                yield f"**{size.capitalize()}:**"
            yield table(_heads(study, rows), _lines(study, rows))
    if study.about.variants_of_baseline:
        yield (
            f"Rows with + are the trained {page.baseline} changed without training; losses are "
            "relative to its score at the trained\nlength in the same runs."
        )
    of_sizes = [_heads(study, rows) for rows in page.reported.values() if rows]
    if any("copied" in head for heads in of_sizes for head in heads):
        yield (
            f"A column copied_a_b is of bytes that end {getattr(tasks[0], 'ngram', 0)} bytes which "
            "were last used between a and b bytes back:\nthe change of their score from sliding "
            "windows of a bytes to windows of b, which hold that use."
        )
    if any("beyond" in head for heads in of_sizes for head in heads):
        yield (
            "Beyond the trained length a scheme gains or loses if the longest sliding windows have "
            "less or more loss than windows\nof the trained length, in all seeds and by "
            f"{comparison.BEYOND} in the mean."
        )


def _heads(study: Study, rows: Mapping[str, Row]) -> list[str]:
    baseline = rows[study.about.baseline]
    heads = ["scheme", baseline.task.labels.unit]
    heads += [f"difference to {label(study.about.baseline)}", *comparison.losses(baseline)]
    heads += ["in equal time"] if any(row.timed for row in rows.values()) else []
    return [*heads, *comparison.contexts(baseline)]


def _lines(study: Study, rows: Mapping[str, Row]) -> Iterator[list[str]]:
    width, timed = len(_heads(study, rows)), any(row.timed for row in rows.values())
    for scheme, row in rows.items():
        difference = "" if scheme == study.about.baseline else row.difference_in_words()
        line = [label(scheme), in_cell(row.at_trained_length), difference]
        line += comparison.losses(row).values()
        if timed:
            line.append(in_cell(row.against(row.timed), "+.3f") if row.timed else "")
        yield [*line, *comparison.contexts(row).values()]
        for name, cells in comparison.variant_cells(row).items():
            yield [name, *cells, *[""] * (width - 1 - len(cells))]


def pictures(page: Context) -> Iterator[str]:
    """Yields pictures of differences to the baseline, and of the last size by length and place."""
    study, rows = page.study, page.reported
    caption = f"Differences to {page.baseline} with their intervals"
    yield from page.picture("", caption, lambda: drawing(study, rows))
    size, cells = list(study.reported.items())[-1]
    last, task = [rows[size][x] for x in cells if x in rows[size]], cells[study.about.baseline].task
    of = f", {size}" if len(rows) > 1 else ""
    if len(task.test_lengths) > 1:
        mode = "sliding" if comparison.is_of_context(task) else task.views[0]
        lengths = functools.partial(plots.lengths, last, size, mode, split=True)
        yield from page.picture("-lengths", f"Scores by length{of}", lengths)
    caption = f"Scores by length and place in the row{of}"
    if not comparison.is_of_context(task):
        yield from page.picture("-maps", caption, lambda: plots.maps(last, size))


def drawing(study: Study, rows: Rows) -> str:
    """Returns the plot of differences to the baseline at the trained length, as <svg>.

    It has the sizes with the task of the first size.
    """
    baseline, name = study.about.baseline, label(study.about.baseline)
    tasks = {size: cells[baseline].task for size, cells in study.cells.items()}
    task = next(iter(tasks.values()))
    rows = {size: rows[size] for size in rows if tasks[size].name == task.name}
    bounds: dict[str, dict[str, Bounds]] = {}
    for size, of_size in rows.items():
        for scheme, row in of_size.items():
            if scheme != baseline and not math.isnan(row.difference[0]):
                bounds.setdefault(scheme, {})[size] = row.difference
    if not bounds:
        return ""
    bounds = dict(sorted(bounds.items(), key=lambda row: next(iter(row[1].values()))[0]))
    unit = f"{task.labels.unit} at the trained length, difference to {name}"
    return plots.differences(bounds, unit, f"Differences to {name}")


def so_far(page: Context) -> Iterator[str]:
    """Yields scores with counts, and numbers of ended runs, of schemes without a row."""
    heads = ["scheme", "best rate, one selection seed", "reported seeds", "runs that have ended"]
    for size in page.study.cells:
        if lines := [*_so_far(page, size)]:
            unit = page.study.cells[size][page.study.about.baseline].task.labels.unit
            yield f"## {size.capitalize()}, so far"
            yield (
                "Schemes of which, or of the baseline, not all reported seeds have ended, in "
                f"{unit}:"
            )
            yield table(heads, lines)


def _so_far(page: Context, size: str) -> Iterator[list[str]]:
    study, results = page.study, page.results
    runs = {run.name: run for run in study.runs_of(size, results, page.clock)}.values()
    waiting = {s: x for s, x in study.compared(size, results).items() if s not in page.rows[size]}
    for scheme, cell in waiting.items() if any(map(results, runs)) else ():
        ended = [results(run) is not None for run in runs if run.scheme == scheme]
        selection, finals = cell.selection(results), cell.finals(results)
        grid = selection.first if cell.source is None else ()
        tried = {run: selection.score(run) for run in grid if results(run)}
        scores = [score(result) for run in finals if (result := results(run))]
        best = min(tried, key=lambda run: cell.task.labels.sign * tried[run], default=None)
        yield [
            label(scheme),
            f"{in_cell([tried[best]])} at {best.task.train.learning_rate:g}" if best else "",
            f"{in_cell(scores)} ({len(scores)} of {len(finals)} seeds)" if scores else "",
            f"{sum(ended)} of {len(ended)}",
        ]


def settings(page: Context) -> Iterator[str]:
    """Yields the settings of sizes with remarks on their runs, and where these ran."""
    cells = {size: of_size[page.study.about.baseline] for size, of_size in page.study.cells.items()}
    entries = {size: _entries(cell) for size, cell in cells.items()}
    keys = [*next(iter(entries.values()))]
    shared = [key for key in keys if len({each[key] for each in entries.values()}) == 1]
    common = [text for key in shared if (text := next(iter(entries.values()))[key])]
    lines = [f"* {', '.join(common)}."] if common else []
    for size, cell in cells.items():
        counts = [
            r.parameters / 1e6 for x in page.rows[size].values() for r in x.results if r.parameters
        ]
        words = [f"{_range(counts, '.2f')} million parameters"] if counts else []
        words += [text for key, text in entries[size].items() if text and key not in shared]
        task = cell.task.name != page.study.about.task
        about = f"task {cell.task.name}, {cell.task.labels.about}; " if task else ""
        remarks = " ".join([f"{', '.join(words) or 'as above'}.", *_remarks(page, size)])
        lines.append(f"* **{size.capitalize()}**: {about}{remarks}")
    yield "## Settings"
    yield "\n".join([*lines, *origin_lines(page)])


def _entries(cell: Cell) -> dict[str, str]:
    """The settings of a size that others may share, in words."""
    task, about = cell.task, cell.about
    model, counts = task.model, [(about.seeds, "seed", "seeds")]
    convolutions = f" and convolutions of {model.conv_size}" if model.conv_size else ""
    if not about.rates_of:
        counts[:0] = [
            (about.tries, "try", "tries"),
            (about.selection_seeds, "selection seed", "selection seeds"),
        ]
    return {
        "model": f"{model.num_layers} layers of width {model.model_dim} with "
        f"{model.num_heads} heads{convolutions}",
        "steps": f"{task.train.steps} steps of {task.train.batch} x {task.train_length}",
        "rates": "" if about.rates_of else f"{len(about.rates)} rates",
        "runs": ", ".join(f"{n} {one if n == 1 else several}" for n, one, several in counts),
    }


def _remarks(page: Context, size: str) -> Iterator[str]:
    rows, results, baseline = page.rows[size], page.results, page.study.about.baseline
    about = page.study.cells[size][baseline].about
    if rows and (curve := curve_of(rows[baseline], results)):
        scores = ", ".join(f"{budget:g} x: {value:.3f}" for budget, value in curve.items())
        yield (
            f"Scores of {page.baseline} by training time, at the rate that is best for 1 x: "
            f"{scores}."
        )
    unfitted = [s for s, row in rows.items() if not any(r.fitted for r in row.results)]
    if unfitted:
        yield f"Not learned: {', '.join(f'`{label(s)}`' for s in unfitted)}."
    failed = {s: sum(r.status != "done" for r in row.results) for s, row in rows.items()}
    diverged = [f"{label(s)} in {n} of {len(rows[s].results)}" for s, n in failed.items() if n]
    if diverged:
        yield f"Seeds that diverged: {', '.join(diverged)}."
    spread = [row for row in rows.values() if row.spread > UNSTABLE]
    if words := [f"{label(row.scheme)} ({_values(row)})" for row in spread]:
        yield f"Seeds with a standard deviation above {UNSTABLE:g}: {'; '.join(words)}."
    edges = [
        label(scheme)
        for scheme, cell in page.study.compared(size, results).items()
        if cell.source is None and cell.selection(results).is_at_edge
    ]
    if edges:
        yield f"The best rate lies at the edge of the grid for {', '.join(edges)}."
    if about.rates_of:
        rate = f", at the rate {about.rate:g}" if about.rate else ""
        yield f"It has the settings of the size {about.rates_of}{rate}."
    if page.clock is not None and page.clock.busy(size):
        yield "**Other programs ran** while steps were timed, so nothing is concluded from time."


def _values(row: Row) -> str:
    scores = sorted(filter(math.isfinite, row.at_trained_length))
    return ", ".join(f"{x:.{row.labels.digits}f}" for x in scores)


def _range(numbers: Sequence[float], form: str) -> str:
    low, high = format(min(numbers), form), format(max(numbers), form)
    return low if low == high else f"{low} to {high}"


def origin(page: Context) -> Iterator[str]:
    if lines := origin_lines(page):
        yield "\n".join(lines)


def origin_lines(page: Context) -> list[str]:
    """Returns the processors, the number of runs and their times; nothing without results."""
    results, _ = page.study.known(page.results, page.clock)
    if not results:
        return []
    wall = duration(sum(result.train_seconds + result.compile_seconds for result in results))
    processors = "; ".join(ordered(result.processor for result in results))
    lines = [f"* {len(results)} runs, {wall} in all; {processors}"]
    if mixed := mixture(results, commits=False):
        lines.append(f"* **{mixed}**")
    if page.clock is None:
        return lines
    device, cpu = page.clock.environment["device"], page.clock.environment["processor"]
    for size, rounds in page.clock.rounds.items():
        share = page.clock.others[size]
        lines.append(
            f"* Steps of {size}: medians of {rounds} rounds on "
            f"{cpu if device.startswith('cpu') else device}; other programs had "
            f"{'an unknown part' if share is None else f'{share:.1%}'} of it"
        )
    return lines
