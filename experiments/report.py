"""report.html: the tables and plots of one comparison, on one self-contained page.

Captions are computed from the results. The page loads nothing, and its script only sorts and
filters; equal results give equal bytes.
"""

import math
from collections.abc import Iterator
from pathlib import Path

import jinja2
from markupsafe import Markup

from experiments import plots, tables
from experiments.config_io import Parser, flatten, near
from experiments.errors import ConfigError, ResultsError
from experiments.files import to_json, write_whole
from experiments.intervals import in_words, interval
from experiments.results_store import read_results


def main(arguments: list[str]) -> int:
    """Writes the report or one plot again; returns the exit status."""
    parser = Parser(
        prog="python -m experiments report",
        description="Writes report.html again from results.json, or one of its plots.",
    )
    parser.add_argument("folder", type=Path, help="such as results/compare")
    parser.add_argument("--plot", type=Path, metavar="FILE", help="write score against length: SVG")
    parser.add_argument("--task", help="of the plot (default: the last)")
    parser.add_argument("--baseline", help="scheme of the paired differences (default: rope)")
    options = parser.parse_args(arguments)
    if options.plot:
        print(f"Plot: {write_plot(options.folder, options.plot, options.task)}")
    else:
        print(f"Report: {write_report(options.folder, options.baseline)}")
    return 0


def write_report(folder: Path, baseline: str | None = None) -> Path:
    """Writes `report.html` beside `results.json`, and returns its path.

    Args:
      folder: of the results.
      baseline: the scheme that others are compared to; default: see `render`.

    Raises:
      ConfigError: where no run has the baseline.
      ResultsError: where there are no results, or the report cannot be written.
    """
    results = read_results(folder)
    if baseline and baseline not in tables.schemes(results):
        hint = near(baseline, tables.schemes(results))
        raise ConfigError(f"--baseline: {baseline!r} is not among the runs{hint}")
    write_whole(folder / "report.html", render(results, baseline))
    return folder / "report.html"


def write_plot(folder: Path, target: Path, task: str | None = None) -> Path:
    """Writes the plot of a task's score against length to a file.

    Args:
      folder: of the results.
      target: the SVG file.
      task: its name; default: the last in the results.

    Raises:
      ResultsError: where there are no results of the task, or the file cannot be written.
    """
    results = read_results(folder)
    task = task or next(reversed(tables.tasks(results)), "")
    svg = plots.lengths(results, task, next(iter(tables.modes(results, task)), "plain"))
    if not svg:
        raise ResultsError(f"{folder}: has no evaluation of {task or 'any task'} to draw")
    write_whole(target, plots.standalone(svg))
    return target


def render(results: dict, baseline: str | None = None) -> str:
    """Returns the page for the content of results.json.

    Args:
      results: the content.
      baseline: the scheme of the paired differences; default: rope, or else the first.
    """
    runs = results["runs"]
    schemes = tables.schemes(results)
    baseline = baseline or ("rope" if "rope" in schemes else next(iter(schemes), ""))
    failed = [run for run in runs if run.get("status") == "failed"]
    seeds = max((len(run.get("seeds") or [0]) for run in runs), default=1)
    fewest = min((len(run.get("seeds") or [0]) for run in runs if tables.done(run)), default=seeds)
    return fill(
        Path(__file__).with_name("report.html.jinja"),
        mark=tables.note_mark,
        name=results.get("name") or "comparison",
        created=results.get("created") or "",
        command=_command(results),
        done=sum(map(tables.done, runs)),
        failed=failed,
        seeds=seeds,
        fewest=fewest,
        baseline=tables.label(baseline),
        summaries=[
            summary
            for task in tables.tasks(results)
            if seeds > 1 and (summary := _summary(results, task, baseline))
        ],
        tasks=[_task(results, task) for task in tables.tasks(results)],
        curves=[
            (task, Markup(svg))
            for task in tables.tasks(results)
            if (svg := plots.curves(results, task))
        ],
        cost=[(t, Markup(svg)) for t in tables.tasks(results) if (svg := plots.cost(results, t))],
        costs=list(_costs(results)),
        processor=(results.get("environment") or {}).get("processor", "an unnamed processor"),
        footnotes=tables.footnotes(results),
        config=_rows(results.get("config") or {}),
        machine=_rows(results.get("environment") or {}),
        data=Markup(_json(results)),
    )


def fill(template: Path, **values: object) -> str:
    """Returns a page made from a template; undefined names are errors."""
    environment = jinja2.Environment(
        autoescape=True, trim_blocks=True, lstrip_blocks=True, undefined=jinja2.StrictUndefined
    )
    return environment.from_string(template.read_text(encoding="utf-8")).render(**values)


def _summary(results: dict, task: str, baseline: str) -> dict | None:
    """Scores and paired differences at the trained length and at the longest one."""
    mode = next(iter(tables.modes(results, task)), "")
    trained = tables.trained_length(results, task)
    runs = tables.runs_of(results, task).values()
    lengths = sorted({n for run in runs for n in tables.evaluations(run, mode)})
    if trained not in lengths:
        return None
    words = tables.labels(results, task)
    shown = tables.ordered([trained, lengths[-1]])
    columns = [tables.paired(results, task, mode, length, baseline) for length in shown]

    def order(scheme: str) -> float:
        return tables.mean(columns[0][scheme][0]) * (-1 if words.higher_is_better else 1)

    digits, schemes = max(words.digits, 3), sorted(columns[0], key=order)
    rows = []
    for scheme in schemes:
        cells = []
        for column in columns:
            values, against = column.get(scheme, ([], []))
            cells.append(in_words(values, digits) if values else "")
            own = not against or scheme == baseline
            cells.append("" if own else in_words(against, digits, "+"))
        cells = [(middle, rest) for middle, _, rest in (cell.partition(" ") for cell in cells)]
        rows.append(dict(label=tables.label(scheme), cells=cells))
    differences = {
        scheme: {"": interval(columns[0][scheme][1])}
        for scheme in schemes
        if columns[0][scheme][1] and scheme != baseline
    }
    unit = f"{words.unit} at {trained}, difference to {tables.label(baseline)}"
    svg = ""
    if differences:
        svg = plots.differences(differences, unit, f"{task}: {unit}", f"differences-{task}")
    return dict(
        name=task,
        unit=words.unit,
        better="higher" if words.higher_is_better else "lower",
        seeds=max((len(values) for values, _ in columns[0].values()), default=0),
        lengths=shown,
        rows=rows,
        svg=Markup(svg),
    )


def _task(results: dict, task: str) -> dict:
    """The section on one task."""
    runs = [run for run in tables.runs_of(results, task).values() if tables.done(run)]
    words = tables.labels(results, task)
    views = [
        dict(
            mode=mode,
            grid=tables.grid(results, task, mode),
            svg=Markup(plots.lengths(results, task, mode)),
            explanation=words.modes.get(mode, ""),
            findings=" ".join(_findings(results, task, mode)),
        )
        for mode in tables.modes(results, task)
    ]
    return dict(
        name=task,
        about=_sentence(words.about),
        views=views,
        map=Markup(plots.maps(results, task)),
        places=words.places,
        fits=" ".join(_fits(runs)),
        setting=_setting(runs),
    )


def _setting(runs: list[dict]) -> str:
    """The training settings that all runs of a task share."""
    parts = []
    for key, words in (
        ("train_length", "trained at length {}"),
        ("steps", "{} steps"),
        ("learning_rate", "learning rate {}"),
    ):
        values = {run[key] for run in runs if run.get(key) is not None}
        if len(values) == 1:
            parts.append(words.format(values.pop()))
    return _sentence(", ".join(parts))


def _sentence(text: str) -> str:
    return f"{text[0].upper()}{text[1:]}." if text else ""


def _fits(runs: list[dict]) -> Iterator[str]:
    """Which schemes learned the task, by the rule of the runs."""
    rules = tables.ordered(run["fit_rule"] for run in runs if run.get("fit_rule"))
    fitted = [tables.label(run["scheme"]) for run in runs if run.get("fitted")]
    others = [tables.label(run["scheme"]) for run in runs if not run.get("fitted")]
    if not others:
        return
    rule = f" ({'; '.join(rules)})" if rules else ""
    yield f"Fitted{rule}: {', '.join(fitted) or 'no scheme'}."
    yield f"Not fitted: {', '.join(others)}; drawn dashed. Their numbers beyond the training length"
    yield "say nothing, since the task was not learned there."


def _findings(results: dict, task: str, mode: str) -> Iterator[str]:
    """The change of each score beyond the training length, in words."""
    grid = tables.grid(results, task, mode)
    trained = [at for at, column in enumerate(grid.columns) if column.trained] if grid else []
    if not grid or not trained or trained[-1] == len(grid.columns) - 1:
        return
    near, far = trained[-1], len(grid.columns) - 1
    changes = []
    for row in grid.rows:
        a, b = row.cells[near], row.cells[far]
        if a.kind == b.kind == "value" and "nan" not in (a.text, b.text) and not row.variant:
            changes.append((float(b.text) - float(a.text), row.label))
    if not changes:
        return
    words = grid.labels
    changes.sort(reverse=words.higher_is_better)
    listed = ", ".join(f"{name} {change:+.{words.digits}f}" for change, name in changes)
    better = "higher is better" if words.higher_is_better else "lower is better"
    span = f"{grid.columns[near].length} to {grid.columns[far].length}"
    yield f"Change in {words.unit} ({better}) from {span}: {listed}."


def _costs(results: dict) -> Iterator[dict]:
    """The rows of the table of costs."""
    for task in tables.tasks(results):
        times = tables.step_times(results, task)
        for scheme, run in tables.runs_of(results, task).items():
            if not tables.done(run):
                continue
            ms, base = times.get(scheme), times.get("none")
            yield dict(
                task=task,
                scheme=tables.label(scheme),
                definition=run.get("scheme_repr") or "",
                parameters=_number(run.get("parameters"), ",d"),
                ms=_number(ms, ".1f"),
                relative=_number(ms / base if ms and base else None, ".2f"),
                memory=_number((run.get("memory_bytes") or math.nan) / 2**20, ".1f"),
                compile=_number(run.get("compile_seconds"), ".1f"),
                train=_number(run.get("train_seconds"), ".1f"),
                cpu=_number(run.get("cpu_seconds"), ".1f"),
                loss=_number(tables.mean(run.get("final_loss") or []), ".3f"),
            )


def _number(value, form: str) -> str:
    if not isinstance(value, int | float) or not math.isfinite(value):
        return "-"
    return format(int(value) if form.endswith("d") else value, form)


def _command(results: dict) -> str:
    """The command that made the results, if they hold it."""
    for place in (results, results.get("environment") or {}):
        command = place.get("command")
        if command:
            return command if isinstance(command, str) else " ".join(map(str, command))
    return ""


def _rows(settings: dict) -> list[tuple[str, str]]:
    """Nested settings as (dotted name, value)."""
    rows = flatten(settings).items()
    return [(k, ", ".join(map(str, v)) if isinstance(v, list) else str(v)) for k, v in rows]


def _json(value) -> str:
    """JSON that any parser reads and that cannot end its script element."""
    text = to_json(value, ensure_ascii=False, separators=(",", ":"))
    return text.replace("<", "\\u003c").replace(">", "\\u003e").replace("&", "\\u0026")
