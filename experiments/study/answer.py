"""The answer of a study in a few sentences, made from its results."""

from collections.abc import Iterator, Mapping, Sequence

from experiments.pages.scheme_results import mean
from experiments.pages.tables import label
from experiments.study.clock import Clock
from experiments.study.plan import Study
from experiments.study.rows import Row

FLAT = 0.05
"""The greatest change of a score beyond the trained length that counts as none."""


def answer(
    study: Study, rows: Mapping[str, Mapping[str, Row]], clock: Clock | None
) -> Iterator[str]:
    """Yields a section with a paragraph for each size whose baseline has ended."""
    if not any(rows.values()):
        return
    yield "## Answer"
    yield ""
    for size, of_size in rows.items():
        if of_size:
            sentences = _sentences(study.about.baseline, of_size, clock is not None)
            yield f"**{size.capitalize()}.** {' '.join(sentences)}"
            yield ""


def _sentences(baseline: str, rows: Mapping[str, Row], timed: bool) -> Iterator[str]:
    of_baseline = rows[baseline]
    labels, name = of_baseline.cell.task.labels, label(baseline)
    sign = -1 if labels.higher_is_better else 1
    ahead, level, behind = {}, {}, {}
    for scheme, row in rows.items():
        if scheme == baseline:
            continue
        middle, low, high = row.difference
        resolved = low * high > 0
        place = level if not resolved else ahead if sign * middle < 0 else behind
        place[scheme] = row
    score = mean(of_baseline.at_trained_length)
    yield f"{name} has {score:.{labels.digits}f} {labels.unit} at the trained length."
    if ahead:
        yield f"Ahead of it: {_list(ahead)}."
    if level:
        yield f"Not resolved against it: {_list(level)}."
    if behind:
        yield f"Behind it: {_list(behind)}."
    yield from _lengths(rows, of_baseline)
    if timed and any(row.timed for row in rows.values()):
        shown = {s: r for s, r in rows.items() if r.timed and s not in behind}
        words = (f"{label(s)} {r.difference_in_words(r.timed)}" for s, r in shown.items())
        yield f"In equal time, the differences are: {'; '.join(words)}."


def _list(rows: Mapping[str, Row]) -> str:
    return "; ".join(f"{label(s)} {row.difference_in_words()}" for s, row in rows.items())


def _lengths(rows: Mapping[str, Row], of_baseline: Row) -> Iterator[str]:
    """Yields the changes of the main score at the longest test length."""
    task = of_baseline.cell.task
    view, length = task.views[0], task.longest
    if length == task.train_length:
        return
    sign = -1 if task.labels.higher_is_better else 1
    changes = {
        scheme: sign * (mean(row.values(view, length)) - mean(row.at_trained_length))
        for scheme, row in rows.items()
        if row.values(view, length)
    }
    flat = [label(s) for s, change in changes.items() if change <= FLAT]
    worse = [f"{label(s)} by {change:.2f}" for s, change in changes.items() if change > FLAT]
    at = f"At {length / task.train_length:g} times the length"
    if flat:
        yield f"{at}, these lose at most {FLAT:g}: {_and(flat)}."
    if worse:
        yield f"{at}, these become worse: {_and(worse)}."


def _and(words: Sequence[str]) -> str:
    return ", ".join(words[:-1]) + " and " + words[-1] if len(words) > 1 else "".join(words)
