"""report.html: the tables and plots of one comparison, on one page that needs nothing else.

What the captions say about results is computed from them. The page holds no script and loads
nothing; equal results give equal bytes.
"""

import json
import math
import os
import tempfile
from collections.abc import Iterator
from pathlib import Path

import jinja2
from markupsafe import Markup

from experiments import plots, tables

MODES = {
    "plain": "",
    "nonoverlapping": "Non-overlapping: the text is cut into pieces of the given length, so bytes "
    "early in a piece see little context. A longer piece helps these even where a scheme has "
    "learned nothing about longer distances.",
    "sliding": "Sliding: each scored byte sees a nearly full context of the given length, so what "
    "changes with length is what the scheme makes of bytes farther away.",
}


def write_report(folder: Path) -> Path:
    """Writes `report.html` beside `results.json`, whole or not at all, and returns its path.

    Raises:
      FileNotFoundError: where there is no results.json.
      ValueError: where it is not JSON, or not a comparison's.
    """
    source, target = Path(folder) / "results.json", Path(folder) / "report.html"
    try:
        results = json.loads(source.read_text(encoding="utf-8"))
    except ValueError as error:
        raise ValueError(f"{source} is not valid JSON: {error}") from error
    if not isinstance(results, dict) or not isinstance(results.get("runs"), list):
        raise ValueError(f"{source} holds no runs: it was not written by a comparison.")
    _write_whole(target, render(results))
    return target


def write_plot(folder: Path, target: Path) -> Path:
    """Writes the plot of loss against length as a picture of its own, whole or not at all.

    Raises:
      FileNotFoundError: where there is no results.json.
      ValueError: where it has no evaluation of text.
    """
    results = json.loads((Path(folder) / "results.json").read_text(encoding="utf-8"))
    svg = plots.lengths(results, "text", "nonoverlapping")
    if not svg:
        raise ValueError(f"{folder} has no evaluation of text to draw.")
    target.parent.mkdir(parents=True, exist_ok=True)
    _write_whole(target, plots.standalone(svg))
    return target


def render(results: dict) -> str:
    """Returns the page for what results.json holds."""
    environment = jinja2.Environment(
        autoescape=True, trim_blocks=True, lstrip_blocks=True, undefined=jinja2.StrictUndefined
    )
    template = environment.from_string(
        Path(__file__).with_name("report.html.jinja").read_text(encoding="utf-8")
    )
    runs = results["runs"]
    failed = [run for run in runs if run.get("status") == "failed"]
    seeds = max((len(run.get("seeds") or [0]) for run in runs), default=1)
    return template.render(
        mark=tables.note_mark,
        name=results.get("name") or "comparison",
        created=results.get("created") or "",
        command=_command(results),
        done=sum(map(tables.done, runs)),
        failed=failed,
        seeds=seeds,
        tasks=[_task(results, task) for task in tables.tasks(results)],
        curves=[
            (task, Markup(svg))
            for task in tables.tasks(results)
            if (svg := plots.curves(results, task))
        ],
        cost=Markup(plots.cost(results)),
        costs=list(_costs(results)),
        footnotes=tables.footnotes(results),
        config=list(_flat(results.get("config") or {})),
        machine=list(_flat(results.get("environment") or {})),
        data=Markup(_json(results)),
    )


def _task(results: dict, task: str) -> dict:
    """What the page says about one task."""
    runs = [run for run in tables.runs_of(results, task).values() if tables.done(run)]
    views = [
        dict(
            mode=mode,
            grid=tables.grid(results, task, mode),
            svg=Markup(plots.lengths(results, task, mode)),
            explains=MODES.get(mode, ""),
            says=" ".join(_findings(results, task, mode)),
        )
        for mode in sorted(tables.modes(results, task))
    ]
    return dict(
        name=task,
        about=_sentence(tables.TASKS.get(task, "")),
        views=views,
        says=" ".join(_fits(runs)),
        setting=_setting(runs),
    )


def _setting(runs: list[dict]) -> str:
    """How the runs of a task were trained, where all were trained alike."""
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
    yield f"Not fitted: {', '.join(others)}; drawn dashed, and not to be read beyond the training"
    yield "length, since what was not learned there says nothing about longer sequences."


def _findings(results: dict, task: str, mode: str) -> Iterator[str]:
    """What the numbers of a grid say beyond the training length, in words."""
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
    unit = tables.UNITS.get(grid.metric, grid.metric)
    digits = tables.DIGITS.get(grid.metric, 3)
    changes.sort(reverse=grid.metric == "accuracy")
    listed = ", ".join(f"{name} {change:+.{digits}f}" for change, name in changes)
    better = "higher is better" if grid.metric == "accuracy" else "lower is better"
    span = f"{grid.columns[near].length} to {grid.columns[far].length}"
    yield f"Change in {unit} ({better}) from {span}: {listed}."


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
                rate=_number(run.get("steps_per_second"), ".1f"),
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
    """The command that made the results, where they say it."""
    for place in (results, results.get("environment") or {}):
        command = place.get("command")
        if command:
            return command if isinstance(command, str) else " ".join(map(str, command))
    return ""


def _flat(settings: dict, prefix: str = "") -> Iterator[tuple[str, str]]:
    """Nested settings as (dotted name, value)."""
    for key, value in settings.items():
        name = f"{prefix}{key}"
        if isinstance(value, dict) and value:
            yield from _flat(value, name + ".")
        elif isinstance(value, list):
            yield name, ", ".join(map(str, value))
        else:
            yield name, str(value)


def _json(value) -> str:
    """JSON that any parser reads and that cannot end its script element."""

    def plain(value):
        if isinstance(value, dict):
            return {str(key): plain(item) for key, item in value.items()}
        if isinstance(value, list):
            return [plain(item) for item in value]
        return None if isinstance(value, float) and not math.isfinite(value) else value

    text = json.dumps(plain(value), ensure_ascii=False, separators=(",", ":"))
    return text.replace("<", "\\u003c").replace(">", "\\u003e").replace("&", "\\u0026")


def _write_whole(path: Path, text: str):
    """Writes a file so that it is there whole or as it was before."""
    handle, name = tempfile.mkstemp(dir=path.parent, prefix=".report-", suffix=".tmp")
    try:
        with os.fdopen(handle, "w", encoding="utf-8") as file:
            file.write(text)
        Path(name).chmod(0o644)
        os.replace(name, path)
    except BaseException:
        Path(name).unlink(missing_ok=True)
        raise
