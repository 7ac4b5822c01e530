"""The page of a study and its plot of differences, made from result files."""

import math
import re
import statistics
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from experiments.models.schemes import label
from experiments.pages import plots
from experiments.pages.page import fill
from experiments.runs.results import Result, mixture
from experiments.runs.run import Lookup
from experiments.stats import Bounds, in_cell, ordered
from experiments.study import comparison
from experiments.study.cell import Cell
from experiments.study.clock import Clock
from experiments.study.plan import Study
from experiments.study.rows import Row, Rows, curve_of
from experiments.study.selection import score

_CRITERIA = {
    "sizes": """\
a difference changes with size if its intervals at the first and the last size do not overlap;
otherwise nothing is said of a trend.""",
    "corpora": """\
a difference holds in general if it is resolved with one sign on all corpora. If it is resolved on
some, and with the other sign on none, these are named; with both signs, it depends on the
corpus.""",
    "repetition": """\
no difference to {baseline} that is resolved in `{repeats}` is resolved with the other sign here.
Differences that are resolved in one of the two alone are named.""",
}
"""Criteria by what a study has."""
CAPTIONS = {
    "": "Differences to {baseline} with their intervals",
    "-lengths": "Scores by length",
    "-maps": "Scores by length and place in the row{last}",
}
"""Captions of plots by how their files end."""


def page(
    study: Study,
    rows: Rows,
    results: Lookup,
    clock: Clock | None,
    pictures: Mapping[str, str],
    earlier: Rows,
    **places: str,
) -> str:
    """Returns the page.

    Args:
      study: the study.
      rows: of `rows_of`, by size.
      results: of its runs.
      clock: the times of steps, None before they are measured.
      pictures: files of the plots of `CAPTIONS`, as far as there are any.
      earlier: the rows of the study that this one repeats, if it does.
      **places: the `file` of the study and, for links, the files `numbers` and `methods`.
    """
    about, name = study.about, label(study.about.baseline)
    known, expected = study.known(results, clock)
    sizes = [settings(study, size, rows[size], results, clock) for size in study.cells]
    has = {
        "sizes": comparison.is_ladder(study),
        "corpora": comparison.has_corpora(study),
        "repetition": bool(about.repeats),
        "beyond": any("beyond" in head for size in sizes for head in size.get("heads", ())),
    }
    words = {"baseline": name, "repeats": about.repeats}
    return fill(
        Path(__file__).with_name("study.md.jinja"),
        about=about,
        baseline=name,
        beyond=comparison.BEYOND,
        has=has,
        known=len(known),
        expected=expected,
        criteria=[text.format(**words) for key, text in _CRITERIA.items() if has[key]],
        differences=_differences(study, rows) if has["sizes"] or has["corpora"] else None,
        shared=shared(sizes),
        sizes=sizes,
        pictures=list(_captioned(study, pictures)),
        repetition=comparison.repetition(study, rows, earlier)
        if about.repeats and any(rows.values())
        else None,
        origin=origin(known, clock),
        **places,
    )


def _differences(study: Study, rows: Rows) -> dict[str, Any] | None:
    """The differences at all sizes, and which change from the first to the last."""
    if not all(rows.values()):
        return None
    changed, unchanged = comparison.change_with_size(study, rows)
    views, losses = comparison.losses_side_by_side(study, rows)
    return {
        "sizes": list(rows),
        "rows": comparison.side_by_side(study, rows),
        "changed": changed,
        "unchanged": unchanged,
        "views": views,
        "losses": losses,
    }


def settings(
    study: Study, size: str, rows: Mapping[str, Row], results: Lookup, clock: Clock | None
) -> dict[str, Any]:
    """Returns the answer at a size, its settings, and remarks on its runs."""
    about, cells = study.about, study.compared(size, results)
    cell = study.cells[size][about.baseline]
    task, labels, limit = cell.task, cell.task.labels, cell.about.unstable
    counts = [r.parameters / 1e6 for row in rows.values() for r in row.results if r.parameters]
    out: dict[str, Any] = {
        "name": size,
        "task": f"{task.name}, {labels.about}" if task.name != about.task else "",
        "parameters": f"{_range(counts, '.2f')} million parameters" if counts else "",
        "model": f"{task.model.num_layers} layers of width {task.model.model_dim} with "
        f"{task.model.num_heads} heads"
        + (f" and convolutions of {task.model.conv_size}" if task.model.conv_size else ""),
        "steps": f"{task.train.steps} steps of {task.train.batch} x {task.train_length}",
        "rates": "" if cell.about.rates_of else f"{len(cell.about.rates)} rates",
        "runs": _runs(cell),
        "settings_of": cell.about.rates_of,
        "rate": f"{cell.about.rate:g}" if cell.about.rate else "",
        "edges": [
            label(scheme)
            for scheme, each in cells.items()
            if each.source is None and each.selection(results).is_at_edge
        ],
        "busy": clock is not None and clock.busy(size),
        "rows": [],
        "unit": labels.unit,
        "so_far": list(_so_far(study, size, rows, results, clock)),
    }
    if not rows:
        return out
    baseline = rows[about.baseline]
    curve = curve_of(baseline, results)
    diverged = {s: sum(r.status != "done" for r in row.results) for s, row in rows.items()}
    spread = {s: sorted(filter(math.isfinite, x.at_trained_length)) for s, x in rows.items()}
    losses = {scheme: comparison.losses(row) for scheme, row in rows.items()}
    timed = any(row.timed for row in rows.values())
    heads = ["scheme", labels.unit, f"difference to {label(about.baseline)}"]
    heads += [*losses[about.baseline], *(["in equal time"] if timed else [])]
    heads += comparison.contexts(baseline)
    lines = []
    for scheme, row in rows.items():
        trained = in_cell(row.at_trained_length)
        difference = "" if scheme == about.baseline else row.difference_in_words()
        lines.append([label(scheme), trained, difference, *losses[scheme].values()])
        if timed:
            lines[-1].append(in_cell(row.against(row.timed), "+.3f") if row.timed else "")
        lines[-1] += comparison.contexts(row).values()
        varied = ([name, *cells] for name, cells in comparison.variant_cells(row).items())
        lines += ([*cells, *[""] * (len(heads) - len(cells))] for cells in varied)
    return out | {
        "heads": heads,
        "rows": lines,
        "curve": ", ".join(f"{budget:g} x: {value:.3f}" for budget, value in curve.items()),
        "unfitted": [
            f"`{label(s)}`" for s, row in rows.items() if not any(r.fitted for r in row.results)
        ],
        "diverged": [
            f"{label(s)} in {n} of {len(rows[s].results)}" for s, n in diverged.items() if n
        ],
        "unstable": f"{limit:g}",
        "spread": [
            f"{label(s)} ({', '.join(f'{x:.{labels.digits}f}' for x in scores)})"
            for s, scores in spread.items()
            if len(scores) > 1 and statistics.stdev(scores) > limit
        ],
    }


def _so_far(
    study: Study, size: str, rows: Mapping[str, Row], results: Lookup, clock: Clock | None
) -> Iterator[list[str]]:
    """Yields scores with counts, and numbers of ended runs, of schemes without a row."""
    runs = {run.name: run for run in study.runs_of(size, results, clock)}.values()
    waiting = {s: x for s, x in study.compared(size, results).items() if s not in rows}
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


def _runs(cell: Cell) -> str:
    """Returns how many runs choose the settings, and how many are reported."""
    about = cell.about
    counts = [(about.seeds, "seed", "seeds")]
    if not about.rates_of:
        counts[:0] = [
            (about.tries, "try", "tries"),
            (about.selection_seeds, "selection seed", "selection seeds"),
        ]
    return ", ".join(f"{n} {singular if n == 1 else plural}" for n, singular, plural in counts)


def shared(sizes: Sequence[dict[str, Any]]) -> str:
    """Returns the settings that all sizes have in common, and leaves them out of these."""
    names = "model", "steps", "rates", "runs"
    keys = [key for key in names if len({size[key] for size in sizes}) == 1]
    words = ", ".join(sizes[0][key] for key in keys if sizes[0][key])
    for size in sizes:
        size |= dict.fromkeys(keys, "")
    return words


def _captioned(study: Study, pictures: Mapping[str, str]) -> Iterator[tuple[str, str]]:
    """Yields captions with the files of plots."""
    several = len(study.cells) > 1
    words = {
        "baseline": label(study.about.baseline),
        "last": ", of the last size" if several else "",
    }
    suffixes = {length_suffix(study, size): f"Scores by length, {size}" for size in study.cells}
    captions = {suffix: text.format(**words) for suffix, text in CAPTIONS.items()}
    for suffix, caption in (captions | (suffixes if several else {})).items():
        if suffix in pictures:
            yield caption, pictures[suffix]


def length_suffix(study: Study, size: str) -> str:
    """Returns how the file of the plot of lengths ends, with the size if there are several."""
    return "-lengths" + ("-" + re.sub(r"[^\w.]+", "-", size) if len(study.cells) > 1 else "")


def _range(numbers: Sequence[float], form: str) -> str:
    """Returns the least and the greatest number in words, one if they are the same."""
    low, high = format(min(numbers), form), format(max(numbers), form)
    return low if low == high else f"{low} to {high}"


def drawing(study: Study, rows: Rows) -> str:
    """Returns the plot of differences to the baseline at the trained length, as <svg>.

    It has the sizes with the task of the first size.
    """
    baseline, name = study.about.baseline, label(study.about.baseline)
    tasks = {size: cells[baseline].task for size, cells in study.cells.items()}
    task = next(iter(tasks.values()))
    rows = {size: rows[size] for size in rows if tasks[size].name == task.name}
    title = f"Differences to {name}"
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


def origin(results: Sequence[Result], clock: Clock | None) -> dict[str, Any] | None:
    """Returns the processors, the number of runs and their times; None without results."""
    if not results:
        return None
    clocks = []
    if clock is not None:
        device, cpu = clock.environment["device"], clock.environment["processor"]
        machine = cpu if device.startswith("cpu") else device
        for size, rounds in clock.rounds.items():
            share = clock.others[size]
            others = "an unknown part" if share is None else f"{share:.1%}"
            clocks.append(dict(size=size, rounds=rounds, others=others, machine=machine))
    return {
        "processors": "; ".join(ordered(result.processor for result in results)),
        "mixed": mixture(results, commits=False),
        "runs": len(results),
        "wall": sum(result.train_seconds + result.compile_seconds for result in results),
        "clock": clocks,
    }
