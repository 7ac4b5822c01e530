"""report.html: the tables and plots of a comparison, on one page.

Captions are computed from the results. The page loads nothing; equal results give equal bytes.
"""

import contextlib
import math
import tomllib
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from markupsafe import escape

from experiments.models.schemes import label
from experiments.pages import plots, tables
from experiments.pages.page import as_html, details, pair, picture, plain, table
from experiments.runs import scores
from experiments.runs.results import Result, mixture
from experiments.runs.scores import UNSTABLE, Results, SchemeResults
from experiments.settings.common import Rates
from experiments.settings.config_io import flatten
from experiments.stats import in_words, interval, mean, ordered

_CONFIGS = [Path(__file__).parents[2] / "configs" / f"{name}.toml" for name in ("compare", "study")]


def render(
    name: str,
    results: Results,
    command: str,
    settings: Mapping[str, Any] | None = None,
    baseline: str | None = None,
) -> str:
    """Returns the page.

    Args:
      name, command: of the comparison.
      results: a row per scheme and task, of runs that have ended and others.
      settings: of all runs, nested tables.
      baseline: the scheme of the paired differences; default: rope, or else the first.
    """
    missing = waiting(results)
    results = [row for row in results if not row.waiting]
    sections = scores.sections(results)
    baseline = baseline or _baseline(results)
    pictures: dict[str, str] = {}

    def draw(name: str, svg: str) -> str:
        """Adds a picture, and returns its file."""
        pictures[f"{name}.svg"] = svg
        return f"{name}.svg" if svg else ""

    tasks = [text for section in sections for text in _section(results, section, draw)]
    blocks = [
        f"# {name}: position encodings compared",
        *_head(results, missing, command, baseline),
        *_summaries(results, baseline, draw),
        *tasks,
        *_legend(tasks),
        *_curves(results, draw),
        *_failed(results),
        *_origin(results, settings or {}),
    ]
    return as_html("\n\n".join(filter(None, blocks)) + "\n", pictures)


def _ended(results: Results) -> list[Result]:
    return [result for row in results for result in row.results]


def _seeds(results: Results) -> int:
    return max((len(row.seeds) for row in results), default=1)


def _head(results: Results, missing: list[str], command: str, baseline: str) -> Iterator[str]:
    """The state of the runs, the command, and conclusions."""
    ended, failed = _ended(results), sum(bool(row.error) for row in results)
    done = sum(len(row.results) for row in results if row.done)
    state = f"{done} {'run' if done == 1 else 'runs'} done"
    state += f", **{failed} failed**" if failed else ""
    yield state + (f" · {plain(max(x.finished for x in ended))}" if ended else "")
    if missing:
        yield f"**Without a result so far:** {'; '.join(missing)}."
    if mixed := mixture(ended):
        yield f"**{plain(mixed)}**"
    yield f"    {command}"
    averaged = scores.seeds_in_words(results)
    yield (
        "Models of a task differ in the position encoding, and in learning rates where the "
        "settings name some."
    ) + (f"\nNumbers are means of {averaged}, with minimum and maximum." if averaged else "")
    yield "\n".join(f"* {plain(text)}" for text in conclusions(results, baseline))


def _legend(tasks: list[str]) -> Iterator[str]:
    """The words and marks of the tables."""
    untrained = any("†" in text for text in tasks)
    yield (
        "Bold is the best of a column, as printed. “Not fitted”: the scheme did not learn the task "
        "at the\ntrained length; the number is in the results of its runs."
        + (f"<br>\n{tables.UNTRAINED}." if untrained else "")
        if tasks
        else "No run has ended yet."
    )


def _curves(results: Results, draw: Any) -> Iterator[str]:
    """The learning curves."""
    drawn = {section: plots.curves(results, section) for section in scores.sections(results)}
    if curves := [picture(draw(f"curves-{s}", svg), s) for s, svg in drawn.items() if svg]:
        yield "## Learning curves"
        yield "All schemes see the same data in the same order."
        yield pair(*curves)


def _failed(results: Results) -> Iterator[str]:
    """The errors of runs."""
    if failed := [row for row in results if row.error]:
        yield "## Failed runs"
        for row in failed:
            yield f"### {row.section}, {label(row.scheme)}"
            yield f"<pre>{escape(row.error)}</pre>"


def _origin(results: Results, settings: Mapping[str, Any]) -> Iterator[str]:
    """The settings, the environment and the schemes."""
    yield "## How it was made"
    yield details("Configuration", _lines(settings))
    yield details("Environment", _lines(next((x.environment for x in _ended(results)), {})))
    definitions = [f"{x.section}: {x.first.scheme_repr}" for x in results if x.done and x.first]
    title = "Schemes; q . k has the factor 1/sqrt(H), unless layers have another scale"
    yield details(title, definitions)


def waiting(results: Results) -> list[str]:
    """Returns the schemes with runs that have not ended, in words, a text per section."""
    texts = []
    for section in scores.sections(results):
        rows = scores.of_section(results, section).values()
        parts = [
            label(row.scheme)
            + (f" ({len(row.results)} of {len(row.runs)} seeds)" if len(row.runs) > 1 else "")
            for row in rows
            if len(row.results) < len(row.runs) and not row.raised
        ]
        texts += [f"{section}: {', '.join(parts)}"] if parts else []
    return texts


def _baseline(results: Results) -> str:
    schemes = scores.schemes(results)
    return "rope" if "rope" in schemes else next(iter(schemes), "")


def _cell(cell: tables.Cell) -> str:
    """Returns a cell as Markdown."""
    if cell.kind != "value":
        return {"unfitted": "*not fitted*"}.get(cell.kind, cell.text)
    text = f"**{cell.text}**" if cell.best else cell.text
    spread = f"<br><small>{cell.spread}</small>" if cell.spread else ""
    return text + "†" * cell.untrained + spread


def _summaries(results: Results, baseline: str, draw: Any) -> Iterator[str]:
    """Scores and paired differences at the trained length and at the longest one."""
    sections = scores.sections(results) if _seeds(results) > 1 else []
    if parts := [text for x in sections for text in _summary(results, x, baseline, draw)]:
        yield "## Summary"
        yield (
            "Means over seeds with 95 % intervals by Student's t, and differences to "
            f"{label(baseline)}, seed by seed,\nwith theirs. A difference whose interval holds 0 "
            "is not resolved."
        )
        yield from parts


def _summary(results: Results, section: str, baseline: str, draw: Any) -> Iterator[str]:
    """The summary of a section."""
    mode = next(iter(scores.modes(results, section)), "")
    rows = list(scores.of_section(results, section).values())
    labels, trained = rows[0].labels, rows[0].task.train_length
    lengths = sorted({n for row in rows for n in row.scores(mode)})
    if trained not in lengths:
        return
    shown = ordered([trained, lengths[-1]])
    columns = [scores.paired(results, section, mode, length, baseline) for length in shown]

    def order(scheme: str) -> tuple[bool, float]:
        value = mean(columns[0][scheme][0]) * labels.sign
        return math.isnan(value), value  # Numbers are not in order among NaN.

    def cell(values: Sequence[float], sign: str = "") -> str:
        middle, _, bounds = in_words(values, max(labels.digits, 3), sign).partition(" [")
        return f"{middle}<br><small>[{bounds}</small>" if bounds else middle

    lines, differences = [], {}
    for scheme in sorted(columns[0], key=order):
        lines.append([label(scheme)])
        for column in columns:
            values, against = column.get(scheme, ([], []))
            paired = against and scheme != baseline
            lines[-1] += [cell(values) if values else "", cell(against, "+") if paired else ""]
        if columns[0][scheme][1] and scheme != baseline:
            differences[scheme] = {"": interval(columns[0][scheme][1])}
    name = label(baseline)
    unit = f"{labels.unit} at {trained}, difference to {name}"
    drawn = ""
    if differences:
        file = f"differences-{section}"
        drawn = draw(file, plots.differences(differences, unit, f"{section}: {unit}", file))
    title = f"{section}: {labels.unit}, {labels.better} is better"
    yield f"### {', '.join(filter(None, (title, scores.seeds_in_words(rows))))}"
    heads = ["scheme", *(text for n in shown for text in (str(n), f"minus {name}"))]
    yield pair(table(heads, lines), picture(drawn))


def _section(results: Results, section: str, draw: Any) -> Iterator[str]:
    """The section on one task."""
    rows = list(scores.of_section(results, section).values())
    labels, done = rows[0].labels, [row for row in rows if row.done]
    modes, fitted = scores.modes(results, section), not done or any(row.fitted for row in done)
    yield f"## {section}"
    about = f"{labels.about[:1].upper()}{labels.about[1:]}." if labels.about else ""
    bands = "Lines are means over seeds, bands go from the least to the greatest."
    texts = [about, *_not_tuned(section, rows), *_fits(done), bands * (_seeds(results) > 1)]
    yield " ".join(filter(None, texts))
    yield "" if modes else "Nothing was evaluated."
    yield "" if fitted else "<details><summary>Its scores</summary>"
    for mode in modes:
        grid = tables.grid(results, section, mode)
        marks = {n: " (trained)" if n in grid.trained else "" for n in grid.lengths}
        cells = [[row.label, *map(_cell, row.cells)] for row in grid.rows]
        drawn = draw(f"lengths-{section}-{mode}", plots.lengths(results, section, mode))
        yield f"### {mode}" if len(modes) > 1 else ""
        yield pair(
            picture(drawn, labels.modes.get(mode, "")),
            table(["scheme", *(f"{n}{mark}" for n, mark in marks.items())], cells),
        )
    yield picture(
        draw(f"maps-{section}", plots.maps(results, section)),
        "By place in the row, from 0 to 1, and length: mean over seeds, of the schemes that "
        "fitted. Orange lines: where rows ended in training.",
    )
    yield "" if fitted else "</details>"


def conclusions(results: Results, baseline: str = "") -> list[str]:
    """Returns sentences on the results: a verdict for each section, and untuned rates."""
    results = [row for row in results if not row.waiting]
    baseline = baseline or _baseline(results)
    one_seed = max((len(row.seeds) for row in results), default=0) == 1
    texts = ["One seed: no ranking follows, the spread between seeds is unknown."] * one_seed
    shared = []
    for section in scores.sections(results):
        rows = scores.of_section(results, section)
        tasks = [row.task for row in rows.values()]
        rates = {(task.train.learning_rate, task.train.scheme_rate) for task in tasks}
        shared += [section] * (len(tasks) > 1 and len(rates) == 1)
        ended = [result for row in rows.values() if row.done for result in row.results]
        if ended and not any(result.fitted for result in ended):
            texts.append(
                f"On {section} no scheme learned the task in {tasks[0].train.steps} steps, so its "
                "scores say nothing: train longer."
            )
        else:
            texts += filter(None, [_verdict(results, section, baseline), _spread(section, rows)])
        texts += _not_tuned(section, list(rows.values()))
    if shared:
        texts.append(
            f"All schemes have one learning rate on {', '.join(shared)}: another rate could change "
            "their order there."
        )
    return texts


def _verdict(results: Results, section: str, baseline: str) -> str:
    """Which schemes differ from the baseline at the trained length, by their intervals."""
    rows = scores.of_section(results, section)
    labels, task = next(iter(rows.values())).labels, next(iter(rows.values())).task
    mode = next(iter(scores.modes(results, section)), "")
    groups: dict[str, list[str]] = {"ahead": [], "behind": [], "not resolved": []}
    pairs = scores.paired(results, section, mode, task.train_length, baseline)
    for scheme, (_, differences) in pairs.items():
        if scheme != baseline and len(differences) > 1:
            low, high = sorted(labels.sign * bound for bound in interval(differences)[1:])
            group = "ahead" if high < 0 else "behind" if low > 0 else "not resolved"
            groups[group].append(label(scheme))
    words = "; ".join(f"{group}: {', '.join(names)}" for group, names in groups.items() if names)
    return words and f"On {section} at {task.train_length}, against {label(baseline)}: {words}."


def _spread(section: str, rows: Mapping[str, SchemeResults]) -> str:
    """Which schemes have seeds whose mean says little."""
    names = []
    for row in rows.values():
        if row.done and row.spread > UNSTABLE:
            values = [x for x in row.at_trained_length if math.isfinite(x)]
            names.append(f"{label(row.scheme)} ({min(values):.3f} to {max(values):.3f})")
    return (
        f"On {section} seeds have a standard deviation above {UNSTABLE:g}, which a lower learning "
        f"rate may mend: {', '.join(names)}."
        if names
        else ""
    )


def _not_tuned(section: str, rows: Sequence[SchemeResults]) -> Iterator[str]:
    """Sentences on schemes without a rate, and on rates that the study chose for another text."""
    task = rows[0].task
    others, rope = [row for row in rows if row.scheme not in task.rates], task.rates.get("rope")
    if others and rope and rope.learning_rate == others[0].task.train.learning_rate:
        names = ", ".join(label(row.scheme) for row in others)
        yield f"On {section} no rate was tuned for {names}: RoPE's was taken."
    rates, tuned, here = None, None, (getattr(task, "corpus", task.name), task.train.steps)
    with contextlib.suppress(KeyError):  # Somebody may have edited these files.
        compare, study = (tomllib.loads(file.read_text()) for file in _CONFIGS)
        rates = {name: Rates(**table) for name, table in compare["text"]["rates"].items()}
        tuned = study["text"]["corpus"], study["sizes"]["small"]["text"]["train"]["steps"]
    if tuned and tuned != here and task.rates == rates:
        yield (
            f"The rates on {section} are the study's, chosen with {tuned[1]} steps on {tuned[0]}: "
            f"with {here[1]} steps on {here[0]} none is tuned."
        )


def _fits(rows: list[SchemeResults]) -> Iterator[str]:
    """Which schemes learned the task, by the rule of the runs."""
    rules = ordered(row.first.fit_rule for row in rows if row.first and row.first.fit_rule)
    fitted = [label(row.scheme) for row in rows if row.fitted]
    others = [label(row.scheme) for row in rows if not row.fitted]
    if not others:
        return
    rule = f" ({plain('; '.join(rules))})" if rules else ""
    yield f"Fitted{rule}: {', '.join(fitted) or 'no scheme'}."
    yield f"Not fitted: {', '.join(others)}; drawn dashed. Their numbers beyond the training length"
    yield "say nothing, since the task was not learned there."


def _lines(settings: Mapping[str, Any]) -> list[str]:
    """Nested settings as lines with a dotted name and its value."""
    rows = flatten(settings).items()
    return [f"{k} = {', '.join(map(str, v)) if isinstance(v, list) else v}" for k, v in rows]
