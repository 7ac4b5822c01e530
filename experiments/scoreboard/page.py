"""docs/results.md and its numbers: claims and outcomes, made from result files."""

import dataclasses
import math
import os
import shlex
from collections.abc import Iterator, Sequence
from pathlib import Path

from experiments.claims import GATE_FAILED, NOT_RUN, Margin
from experiments.errors import ConfigError
from experiments.models.schemes import short
from experiments.pages.page import as_csv, table
from experiments.scoreboard.outcomes import Outcome
from experiments.stats import in_cell, in_words, ordered


@dataclasses.dataclass(frozen=True)
class Files:
    """The folders of claims and of their runs, and the page to write."""

    folder: Path
    results: Path
    page: Path

    @property
    def command(self) -> str:
        """The command that writes the page."""
        is_other = self.folder != LIBRARY.folder
        options = f" --folder {shlex.quote(str(self.folder))}" if is_other else ""
        return f"python -m experiments scoreboard{options}"


def of_folder(folder: Path) -> Files:
    """Returns the paths of a folder of own claims, with its page and its results."""
    return Files(folder, folder / "results", folder / "results.md")


LIBRARY = Files(Path("configs/scoreboard"), Path("results/scoreboard"), Path("docs/results.md"))
_UNDECIDED = GATE_FAILED, NOT_RUN
"""Outcomes that say nothing about the claim."""


def page(outcomes: Sequence[Outcome], files: Files = LIBRARY) -> str:
    """Returns the page for the outcomes of all claims of a folder, with its remark.md."""
    remark = files.folder / "remark.md"
    numbers = files.page.with_suffix(".csv").name
    methods = os.path.relpath("docs/methods.md", files.page.parent)
    usual = LIBRARY if files.folder == LIBRARY.folder else of_folder(files.folder)
    at = f" --results {shlex.quote(str(files.results))}" if files.results != usual.results else ""
    claims = [
        [_link(outcome, files), outcome.claim.claim.replace("|", "\\|"), outcome.word]
        for outcome in outcomes
        if outcome.word not in _UNDECIDED
    ]
    paragraphs = [
        "# Claims of the literature, tested",
        f"`{files.command}{at}` writes this page from `{files.folder}/` and `{files.results}/`. "
        "Models are tiny and train for minutes:\nan outcome holds for its protocol, at this scale. "
        f"[{numbers}]({numbers}) has all gates, criteria with\ntheir intervals, and scores; the "
        f"file behind a name has source, protocol and remarks;\n[methods]({methods}#claims) "
        "explains outcomes.",
        *([_text_of(remark)] if remark.exists() else []),
        *([table(["", "claim", "outcome"], claims, 3)] if claims else []),
        "\n".join(f"* {line}." for line in _remarks(outcomes, files)),
    ]
    return "\n\n".join(paragraphs) + "\n"


def _remarks(outcomes: Sequence[Outcome], files: Files) -> Iterator[str]:
    """Sentences on all outcomes."""
    for word in _UNDECIDED:
        if names := [_link(outcome, files) for outcome in outcomes if outcome.word == word]:
            yield f"{word.capitalize()}: {', '.join(names)}"
    if count := sum(len(outcome.criteria) for outcome in outcomes if outcome.seeds):
        yield (
            f"{count} {'criterion was' if count == 1 else 'criteria were'} tested. Without "
            "any effect, one that compares with 0 holds\n  once in 40 times"
        )
    for names in _shared(outcomes):
        yield f"Claims that share trained models are not independent: {', '.join(names)}"
    if diverged := [words for outcome in outcomes for words in _diverged(outcome)]:
        yield f"Diverged: {'; '.join(diverged)}"
    if results := [r for outcome in outcomes for row in outcome.results.values() for r in row]:
        versions = "; ".join(ordered(", ".join(result.versions) for result in results))
        python = ", ".join(ordered(str(result.environment.get("python")) for result in results))
        processors = "; ".join(ordered(result.processor for result in results))
        yield f"Versions: {versions}; Python {python}. Processors: {processors}"
    minutes = [outcome.protocol.about.minutes for outcome in outcomes]
    yield (
        f"`{files.command} NAME --run --results FOLDER` runs a claim again, "
        f"{min(minutes, default=0):g} to {max(minutes, default=0):g} minutes on two idle cores"
    )


def _text_of(file: Path) -> str:
    try:
        return file.read_text(encoding="utf-8").strip()
    except (OSError, UnicodeDecodeError) as error:
        raise ConfigError(f"{file}: cannot be read: {error}") from None


def _link(outcome: Outcome, files: Files) -> str:
    name = outcome.protocol.name
    return f"[{name}]({os.path.relpath(files.folder / f'{name}.toml', files.page.parent)})"


def _margin(margin: Margin) -> str:
    if not margin.values:
        return ""
    return "missing" if math.isnan(margin.bounds[0]) else in_words(margin.values, 3, "+")


def _shared(outcomes: Sequence[Outcome]) -> list[list[str]]:
    """Returns the names of claims with runs in common."""
    groups: list[tuple[set[str], list[str]]] = []  # Runs, claims.
    for outcome in (outcome for outcome in outcomes if outcome.seeds):
        protocol = outcome.protocol
        of_seeds = map(protocol.of_seed, outcome.seeds)
        runs, names = {run.name for of in of_seeds for run in of.values()}, [protocol.name]
        for group in [group for group in groups if group[0] & runs]:
            groups.remove(group)
            runs, names = runs | group[0], group[1] + names
        groups.append((runs, names))
    return [names for _, names in groups if len(names) > 1]


def _diverged(outcome: Outcome) -> Iterator[str]:
    for name, row in outcome.results.items():
        for seed, result in zip(outcome.seeds, row, strict=True):
            if result.status != "done":
                yield f"{outcome.protocol.name} {name}, seed {seed}: {result.error}"


def numbers(outcomes: Sequence[Outcome]) -> str:
    """Returns conditions and scores as CSV: means over seeds, least and greatest in brackets."""
    return as_csv([line for outcome in outcomes for line in _lines(outcome)])


def _lines(outcome: Outcome) -> Iterator[dict[str, str]]:
    protocol, count = outcome.protocol, len(outcome.seeds)
    about = {"claim": protocol.name, "outcome": outcome.word}
    for kind, checks in (("gate", outcome.gate), ("criterion", outcome.criteria)):
        for check in checks:
            held = f"{check.held} of {count}" if count else ""
            yield about | {
                "kind": kind,
                "name": check.condition.text,
                "left - right": _margin(check),
                "seeds": held,
            }
    checks = (*outcome.gate, *outcome.criteria)
    named = [(name, view) for check in checks for name, view, _ in check.condition.scores() if view]
    main = [(name, None) for name in outcome.results]
    rows = sorted(ordered([*main, *named]), key=lambda row: list(outcome.results).index(row[0]))
    for name, view in rows if count else ():
        run = protocol.runs[name]
        scores = [r.scores.get(view or run.task.views[0], {}) for r in outcome.results[name]]
        line = about | {"kind": "score", "name": f"{name}.{view}" if view else name}
        line |= {"scheme": short(run.scheme), "unit": run.task.labels.unit}
        for length in run.task.test_lengths:
            line[f"at {length}"] = _score([each.get(str(length)) for each in scores])
        yield line


def _score(values: list) -> str:
    if all(value is None for value in values):
        return ""
    text = in_cell(values)
    if None in values or len(values) == 1:
        return text
    return f"{text} [{min(values):.3f}, {max(values):.3f}]"
