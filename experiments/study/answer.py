"""The answer of a study in a few sentences, made from its results."""

import math
from collections.abc import Iterator, Mapping, Sequence

from experiments.pages.intervals import interval
from experiments.pages.scheme_results import mean
from experiments.pages.tables import label
from experiments.study.clock import Clock
from experiments.study.plan import Study
from experiments.study.rows import Row

FLAT = 0.05
"""The greatest loss beyond the trained length that is called flat: a choice, not a criterion."""


def answer(
    study: Study, rows: Mapping[str, Mapping[str, Row]], clock: Clock | None
) -> Iterator[str]:
    """Yields a list for each size whose baseline has ended."""
    for size, of_size in rows.items():
        if of_size:
            first, *others = _sentences(study.about.baseline, of_size, clock is not None)
            yield f"**{size.capitalize()}.** {first}"
            yield ""
            yield from (f"* {sentence}" for sentence in others)
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
    """Yields how scores change beyond the trained length, in windows and with full contexts."""
    task = of_baseline.cell.task
    for view in [task.views[0], *(["sliding"] if "sliding" in task.views[1:] else [])]:
        scores = of_baseline.results[0].scores.get(view, {})
        longest = max(map(int, scores), default=0)
        if longest > task.train_length:
            context = " with full contexts (sliding)" if view == "sliding" else ""
            at = f"At {longest / task.train_length:g} times the length{context}"
            yield from _changes(rows, view, longest, at)


def _changes(rows: Mapping[str, Row], view: str, length: int, at: str) -> Iterator[str]:
    """Yields a sentence on the losses from the trained length to another; `at` begins it."""
    flat, others = [], []
    for scheme, row in rows.items():
        task = row.cell.task
        sign = -1 if task.labels.higher_is_better else 1
        scores = [result.scores.get(view, {}) for result in row.results]
        ends = [(x.get(str(task.train_length)), x.get(str(length))) for x in scores]
        rises = [sign * (b - a) for a, b in ends if a is not None and b is not None]
        if rises:
            rise, _, high = interval(rises)
            is_flat = (rise if math.isnan(high) else high) <= FLAT
            (flat if is_flat else others).append((label(scheme), rise))
    parts = [f"these lose at most {FLAT:g} by their intervals: {_signed(flat)}"] if flat else []
    parts += [f"{'the others' if flat else 'all'} lose: {_signed(others)}"] if others else []
    if parts:
        yield f"{at}, {'; '.join(parts)}."


def _signed(changes: Sequence[tuple[str, float]]) -> str:
    return ", ".join(f"{name} {change:+.2f}" for name, change in changes)
