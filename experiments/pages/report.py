"""report.html: the tables and plots of a comparison or a study, on one self-contained page.

Captions are computed from the results. The page loads nothing, and its script only sorts and
filters; equal results give equal bytes.
"""

import dataclasses
import math
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import jinja2
from markupsafe import Markup

from experiments.pages import plots, tables
from experiments.pages.intervals import in_words, interval
from experiments.pages.scheme_results import SchemeResults, mean
from experiments.pages.tables import Results
from experiments.runs.files import to_json
from experiments.settings.config_io import flatten


def render(
    name: str,
    results: Results,
    command: str,
    settings: Mapping[str, Any] | None = None,
    baseline: str | None = None,
    missing: Sequence[str] = (),
) -> str:
    """Returns the page.

    Args:
      name: of the comparison.
      results: a row per scheme and section.
      command: that makes the results.
      settings: of all runs, nested tables.
      baseline: the scheme of the paired differences; default: rope, or else the first.
      missing: runs that have not ended, in words.
    """
    schemes, sections = tables.schemes(results), tables.sections(results)
    baseline = baseline or ("rope" if "rope" in schemes else next(iter(schemes), ""))
    seeds = max((len(row.seeds) for row in results), default=1)
    everything = [result for row in results for _, result in row.ended]
    environment = everything[0].environment if everything else {}
    return fill(
        Path(__file__).with_name("report.html.jinja"),
        mark=tables.note_mark,
        name=name,
        created=max((result.finished for result in everything), default=""),
        command=command,
        done=sum(len(row.ended) for row in results if row.done),
        missing=missing,
        failed=[row for row in results if row.error],
        seeds=seeds,
        fewest=min((len(row.seeds) for row in results if row.done), default=seeds),
        baseline=tables.label(baseline),
        untuned=_untuned(results),
        overview=_overview(results) if seeds == 1 else None,
        summaries=[
            summary
            for section in sections
            if seeds > 1 and (summary := _summary(results, section, baseline))
        ],
        tasks=[_section(results, section) for section in sections],
        curves=[(s, Markup(svg)) for s in sections if (svg := plots.curves(results, s))],
        cost=[(s, Markup(svg)) for s in sections if (svg := plots.cost(results, s))],
        costs=list(_costs(results)),
        processor=environment.get("processor", "an unnamed processor"),
        footnotes=tables.footnotes(results),
        config=_rows(settings or {}),
        machine=_rows(environment),
        data=Markup(_json([dataclasses.asdict(result) for result in everything])),
    )


def fill(template: Path, **values: object) -> str:
    """Returns a page made from a template; undefined names are errors."""
    environment = jinja2.Environment(
        autoescape=True, trim_blocks=True, lstrip_blocks=True, undefined=jinja2.StrictUndefined
    )
    return environment.from_string(template.read_text(encoding="utf-8")).render(**values)


def waiting(results: Results) -> list[str]:
    """Returns the schemes with runs that have not ended, in words, a text per section.

    >>> waiting([])
    []
    """
    texts = []
    for section in tables.sections(results):
        rows = tables.of_section(results, section).values()
        parts = [
            tables.label(row.scheme)
            + (f" ({len(row.ended)} of {len(row.runs)} seeds)" if len(row.runs) > 1 else "")
            for row in rows
            if len(row.ended) < len(row.runs) and not row.raised
        ]
        texts += [f"{section}: {', '.join(parts)}"] if parts else []
    return texts


def _overview(results: Results) -> dict | None:
    """Scores at the trained and at the longest length of every section, in one table."""
    grids = [grid for s in tables.sections(results) if (grid := tables.grid(results, s))]
    if len(grids) < 2:
        return None  # The table of the section says it.
    columns: list[tuple[tables.Grid, int]] = []
    units = {}
    for grid in grids:
        trained = [i for i, column in enumerate(grid.columns) if column.trained][-1:]
        columns += [(grid, i) for i in tables.ordered([*trained, len(grid.columns) - 1])]
        better = "higher" if grid.labels.higher_is_better else "lower"
        units.setdefault(f"{grid.labels.unit} ({better} is better)", []).append(grid.section)
    by_scheme = [{row.scheme: row for row in grid.rows if not row.variant} for grid, _ in columns]
    rows = [
        dict(
            label=tables.label(scheme),
            cells=[
                rows[scheme].cells[i] if scheme in rows else tables.Cell()
                for rows, (_, i) in zip(by_scheme, columns, strict=True)
            ],
        )
        for scheme in tables.schemes(results)
    ]
    heads = [
        dict(section=grid.section, length=column.length, trained=column.trained)
        for grid, i in columns
        for column in [grid.columns[i]]
    ]
    texts = [f"{', '.join(names)}: {unit}" for unit, names in units.items()]
    return dict(columns=heads, rows=rows, units=texts)


def _summary(results: Results, section: str, baseline: str) -> dict | None:
    """Scores and paired differences at the trained length and at the longest one."""
    mode = next(iter(tables.modes(results, section)), "")
    rows = list(tables.of_section(results, section).values())
    labels, trained = rows[0].labels, rows[0].runs[0].task.train_length
    lengths = sorted({n for row in rows for n in row.scores(mode)})
    if trained not in lengths:
        return None
    shown = tables.ordered([trained, lengths[-1]])
    columns = [tables.paired(results, section, mode, length, baseline) for length in shown]

    def order(scheme: str) -> float:
        return mean(columns[0][scheme][0]) * (-1 if labels.higher_is_better else 1)

    digits, schemes = max(labels.digits, 3), sorted(columns[0], key=order)
    lines = []
    for scheme in schemes:
        cells = []
        for column in columns:
            values, against = column.get(scheme, ([], []))
            cells.append(in_words(values, digits) if values else "")
            paired = against and scheme != baseline
            cells.append(in_words(against, digits, "+") if paired else "")
        cells = [(middle, bounds) for middle, _, bounds in (cell.partition(" ") for cell in cells)]
        lines.append(dict(label=tables.label(scheme), cells=cells))
    differences = {
        scheme: {"": interval(columns[0][scheme][1])}
        for scheme in schemes
        if columns[0][scheme][1] and scheme != baseline
    }
    unit = f"{labels.unit} at {trained}, difference to {tables.label(baseline)}"
    svg = ""
    if differences:
        svg = plots.differences(differences, unit, f"{section}: {unit}", f"differences-{section}")
    return dict(
        name=section,
        unit=labels.unit,
        better="higher" if labels.higher_is_better else "lower",
        seeds=max((len(values) for values, _ in columns[0].values()), default=0),
        lengths=shown,
        rows=lines,
        svg=Markup(svg),
    )


def _section(results: Results, section: str) -> dict:
    """The section on one task."""
    rows = list(tables.of_section(results, section).values())
    labels, done = rows[0].labels, [row for row in rows if row.done]
    views = [
        dict(
            mode=mode,
            grid=tables.grid(results, section, mode),
            svg=Markup(plots.lengths(results, section, mode)),
            explanation=labels.modes.get(mode, ""),
            findings=" ".join(_findings(results, section, mode)),
        )
        for mode in tables.modes(results, section)
    ]
    return dict(
        name=section,
        about=_sentence(labels.about),
        views=views,
        map=Markup(plots.maps(results, section)),
        places=labels.places,
        fits=" ".join(_fits(done)),
        fitted=not done or any(row.fitted for row in done),
        setting=_setting(done),
    )


def _setting(rows: list[SchemeResults]) -> str:
    """The training settings that all runs of a section share."""
    tasks, parts = [row.runs[0].task for row in rows], []
    rates = _rates(rows)
    for text, values in (
        ("trained at length {}", {task.train_length for task in tasks}),
        ("{} steps", {task.train.steps for task in tasks}),
        ("learning rate {}", {task.train.learning_rate for task in tasks if not rates}),
    ):
        if len(values) == 1:
            parts.append(text.format(values.pop()))
    return " ".join(filter(None, (_sentence(", ".join(parts)), _sentence(rates))))


def _rates(rows: list[SchemeResults]) -> str:
    """The learning rates where the task names some for schemes, and the schemes without one."""
    groups: dict[str, list[str]] = {}
    for row in rows:
        task = row.runs[0].task
        if task.rates:
            train, default = task.train, "" if row.scheme in task.rates else ", not tuned"
            relative = f" x {train.scheme_rate:g} for its own parameters"
            times = relative if train.scheme_rate != 1 else ""
            text = f"{train.learning_rate:g}{times}{default}"
            groups.setdefault(text, []).append(tables.label(row.scheme))
    parts = [f"{text} ({', '.join(names)})" for text, names in groups.items()]
    return f"learning rates: {'; '.join(parts)}" if parts else ""


def _untuned(results: Results) -> list[str]:
    """The sections in which several schemes share one learning rate."""

    def shares(section: str) -> bool:
        tasks = [row.runs[0].task for row in tables.of_section(results, section).values()]
        rates = {(task.train.learning_rate, task.train.scheme_rate) for task in tasks}
        return len(tasks) > 1 and len(rates) == 1

    return [section for section in tables.sections(results) if shares(section)]


def _sentence(text: str) -> str:
    return f"{text[0].upper()}{text[1:]}." if text else ""


def _fits(rows: list[SchemeResults]) -> Iterator[str]:
    """Which schemes learned the task, by the rule of the runs."""
    rules = tables.ordered(row.first.fit_rule for row in rows if row.first and row.first.fit_rule)
    fitted = [tables.label(row.scheme) for row in rows if row.fitted]
    others = [tables.label(row.scheme) for row in rows if not row.fitted]
    if not others:
        return
    rule = f" ({'; '.join(rules)})" if rules else ""
    yield f"Fitted{rule}: {', '.join(fitted) or 'no scheme'}."
    yield f"Not fitted: {', '.join(others)}; drawn dashed. Their numbers beyond the training length"
    yield "say nothing, since the task was not learned there."


def _findings(results: Results, section: str, mode: str) -> Iterator[str]:
    """The change of each score beyond the training length, in words."""
    grid = tables.grid(results, section, mode)
    trained = [i for i, column in enumerate(grid.columns) if column.trained] if grid else []
    if not grid or not trained or trained[-1] == len(grid.columns) - 1:
        return
    near, far = trained[-1], len(grid.columns) - 1
    changes = []
    for row in grid.rows:
        a, b = (row.cells[i] for i in (near, far))
        if a.kind == b.kind == "value" and "nan" not in (a.text, b.text) and not row.variant:
            changes.append((float(b.text) - float(a.text), row.label))
    if not changes:
        return
    labels = grid.labels
    changes.sort(reverse=labels.higher_is_better)
    listed = ", ".join(f"{name} {change:+.{labels.digits}f}" for change, name in changes)
    better = "higher is better" if labels.higher_is_better else "lower is better"
    span = f"{grid.columns[near].length} to {grid.columns[far].length}"
    yield f"Change in {labels.unit} ({better}) from {span}: {listed}."


def _costs(results: Results) -> Iterator[dict]:
    """The rows of the table of costs."""
    for section in tables.sections(results):
        times = tables.step_times(results, section)
        for scheme, row in tables.of_section(results, section).items():
            if not row.done or row.first is None:
                continue
            ms, base = times.get(scheme), times.get("none")
            yield dict(
                task=section,
                scheme=tables.label(scheme),
                definition=row.first.scheme_repr,
                parameters=_number(row.first.parameters, ",d"),
                ms=_number(ms, ".1f"),
                relative=_number(ms / base if ms and base else None, ".2f"),
                memory=_number((row.first.memory_bytes or math.nan) / 2**20, ".1f"),
                compile=_number(row.mean_of("compile_seconds"), ".1f"),
                train=_number(row.mean_of("train_seconds"), ".1f"),
                cpu=_number(row.mean_of("cpu_seconds"), ".1f"),
                loss=_number(row.final_loss, ".3f"),
            )


def _number(value, form: str) -> str:
    if not isinstance(value, int | float) or not math.isfinite(value):
        return "-"
    return format(int(value) if form.endswith("d") else value, form)


def _rows(settings: Mapping[str, Any]) -> list[tuple[str, str]]:
    """Nested settings as (dotted name, value)."""
    rows = flatten(settings).items()
    return [(k, ", ".join(map(str, v)) if isinstance(v, list) else str(v)) for k, v in rows]


def _json(value) -> str:
    """JSON that any parser reads and that cannot end its script element."""
    text = to_json(value, ensure_ascii=False, separators=(",", ":"))
    return text.replace("<", "\\u003c").replace(">", "\\u003e").replace("&", "\\u0026")
