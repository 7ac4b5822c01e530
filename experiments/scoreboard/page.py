"""RESULTS.md: claims, outcomes and numbers, made from result files."""

import dataclasses
import math
import os
import shlex
from collections.abc import Iterator, Sequence
from pathlib import Path

from experiments.models.schemes import short
from experiments.pages.intervals import interval
from experiments.pages.markdown import provenance, table
from experiments.pages.scheme_results import mean
from experiments.pages.tables import ordered
from experiments.runs.run import duration
from experiments.scoreboard.outcomes import Check, Outcome

_HEAD = """\
# Claims of the literature, tested

This page is made by `{command}` from the files in `{folder}/` and
the results in `{results}/`; it is not edited by hand. Models are tiny and train for
minutes: an outcome holds for its protocol, at this scale.

* **reproduced**: in as many paired seeds as the claim asks for, the gate and all criteria hold, and
  the interval of each criterion excludes its threshold.
* **not reproduced**: the gate holds, and a criterion fails with its whole interval.
* **not resolved**: the gate holds, and an interval that decides contains its threshold.
* **not fitted**: the gate fails, so the criteria say nothing.
* **not run**: fewer seeds have ended than the claim states; numbers so far are shown.

Intervals are 95 % intervals of the mean over seeds, by Student's t, of paired differences.{history}
"""
_HISTORY = """ They
became a part of the outcomes after the runs.

Each file was written before the runs that it shows, unless its remark says otherwise. Not all were
predictions: where a remark says so, the same task had gone the same way in earlier experiments of
this repository, so that the claim repeats it with stated criteria and other seeds."""


@dataclasses.dataclass(frozen=True)
class Files:
    """Where claims are.

    Attributes:
      folder: of the files of claims.
      results: of the folders of runs.
      page: the file to write.
    """

    folder: Path
    results: Path
    page: Path

    @property
    def command(self) -> str:
        """The command that writes the page."""
        own = self.folder != LIBRARY.folder
        options = f" --folder {shlex.quote(str(self.folder))}" if own else ""
        return f"python -m experiments scoreboard{options}"


def of_folder(folder: Path) -> Files:
    """Returns the paths of a folder of own claims, with its page and its results."""
    return Files(folder, folder / "results", folder / "RESULTS.md")


LIBRARY = Files(Path("configs/scoreboard"), Path("results/scoreboard"), Path("RESULTS.md"))


def page(outcomes: Sequence[Outcome], files: Files = LIBRARY) -> str:
    """Returns the page for the outcomes of all claims of a folder."""
    counts: dict[str, int] = {}
    for outcome in outcomes:
        counts[outcome.word] = counts.get(outcome.word, 0) + 1
    total = ", ".join(f"{count} {word}" for word, count in sorted(counts.items()))
    rows = []
    for outcome in outcomes:
        name, about = outcome.claim.name, outcome.claim.about
        seeds = f"{len(outcome.seeds)} of {about.seeds}"
        claim = about.claim.replace("|", "\\|")
        rows.append([f"[{name}](#{name.lower()})", claim, outcome.word, seeds])
    head = _HEAD.format(
        command=files.command,
        folder=files.folder,
        results=files.results,
        history=_HISTORY if files.folder == LIBRARY.folder else "",
    )
    lines = [head, f"{len(outcomes)} claims: {total}.", "", *_chance(outcomes)]
    lines += table(["", "claim", "outcome at this scale", "seeds"], rows, words=4)
    for outcome in outcomes:
        lines += ["\n".join(_section(outcome, files)).rstrip(), ""]
    return "\n".join(lines).rstrip() + "\n"


def _chance(outcomes: Sequence[Outcome]) -> Iterator[str]:
    """Yields how many criteria there are, and which claims share runs."""
    criteria = [check for outcome in outcomes if outcome.seeds for check in outcome.criteria]
    if not criteria:
        return
    groups: list[tuple[set[str], list[str]]] = []  # Runs, claims.
    for outcome in (outcome for outcome in outcomes if outcome.seeds):
        runs, names = {run.name for run in outcome.claim.runs.values()}, [outcome.claim.name]
        for group in [group for group in groups if group[0] & runs]:
            groups.remove(group)
            runs, names = runs | group[0], group[1] + names
        groups.append((runs, names))
    shared = "; ".join(", ".join(names) for _, names in groups if len(names) > 1)
    looked = "1 criterion has" if len(criteria) == 1 else f"{len(criteria)} criteria have"
    yield (
        f"{looked} been looked at. Without any effect, one that compares with "
        "0 would hold in five of five seeds once in 32 times."
    )
    if shared:
        yield f"Claims that share trained models are not independent: {shared}."
    yield ""


def _section(outcome: Outcome, files: Files) -> Iterator[str]:
    claim, about = outcome.claim, outcome.claim.about
    yield f"## {claim.name}"
    yield ""
    yield f"{about.claim}."
    yield ""
    yield f"**{outcome.word}**: {outcome.reason}"
    if about.remark:
        yield ""
        yield about.remark
    yield ""
    yield f"* Source: {about.source}"
    yield f"* Protocol: {about.protocol}"
    file = files.folder / f"{claim.name}.toml"
    yield f"* Settings: [{file}]({os.path.relpath(file, files.page.parent)})"
    limit, machine = (" --minutes 9", "a GPU") if about.device == "gpu" else ("", "two idle cores")
    minutes = "1 minute" if about.minutes == 1 else f"{about.minutes:g} minutes"
    yield (f"* Command: `{files.command} {claim.name} --run{limit}`, about {minutes} on {machine}")
    if about.needed:
        yield f"* Seeds that must hold: {about.needed} of {about.seeds}"
    yield from _provenance(outcome)
    yield ""
    count = len(outcome.seeds)
    rows = []
    for kind, checks in (("gate", outcome.gate), ("criterion", outcome.criteria)):
        for check in checks:
            held = f"{check.held} of {count}" if count else ""
            rows.append([kind, f"`{check.condition.text}`", _margin(check), held])
    yield from table(["", "condition", "left side - right side", "seeds"], rows, words=4)
    if count:
        yield from _scores(outcome)


def _provenance(outcome: Outcome) -> Iterator[str]:
    results = [result for row in outcome.results.values() for result in row]
    if not results:
        return
    seconds = sum(r.seconds for r in results)
    kind = "CPU" if all(r.on_cpu for r in results) else "wall"
    diverged = [
        f"{name}, seed {seed}: {result.error}"
        for name, row in outcome.results.items()
        for seed, result in zip(outcome.seeds, row, strict=True)
        if result.status != "done"
    ]
    origin = provenance(results)
    yield f"* Versions: {origin.versions}; Python {origin.python}"
    yield f"* Processor: {origin.processors}"
    yield f"* Code: {origin.commits}; {duration(seconds)} of {kind} time in training"
    if diverged:
        yield f"* Diverged: {'; '.join(diverged)}"


def _margin(check: Check) -> str:
    if not check.margins:
        return ""
    middle, low, high = interval(check.margins)
    if math.isnan(middle):
        return "missing"
    text = f"{middle:+.3f}"
    return text if math.isnan(low) else f"{text} [{low:+.3f}, {high:+.3f}]"


def _scores(outcome: Outcome) -> Iterator[str]:
    """A table of mean scores: the main view of each run, and the views that conditions name."""
    named = [
        (name, view)
        for check in (*outcome.gate, *outcome.criteria)
        for name, view, _ in check.condition.scores()
        if view
    ]
    main = [(name, None) for name in outcome.results]
    rows = sorted(ordered([*main, *named]), key=lambda row: list(outcome.results).index(row[0]))
    lengths = sorted({n for run in outcome.claim.runs.values() for n in run.task.test_lengths})
    lines = []
    for name, view in rows:
        run = outcome.claim.runs[name]
        by_seed = [r.scores.get(view or run.task.views[0], {}) for r in outcome.results[name]]
        cells = [_score([scores.get(str(n)) for scores in by_seed]) for n in lengths]
        label = f"{name}.{view}" if view else name
        lines.append([label, short(run.scheme), *cells])
    yield from table(["run", "scheme", *map(str, lengths)], lines, words=2)
    units = ordered(run.task.labels.unit for run in outcome.claim.runs.values())
    spread = " (least to greatest)" if len(outcome.seeds) > 1 else ""
    yield f"Mean {' and '.join(units)} at each length{spread}."


def _score(values: list) -> str:
    known = [v for v in values if v is not None]
    if not known:
        return ""
    text = f"{mean(known):.3f}"
    return text if len(known) == 1 else f"{text} ({min(known):.3f} to {max(known):.3f})"
