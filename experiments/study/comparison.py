"""Differences of a study side by side: at its sizes, on its corpora, and in a repeated study."""

import math
from collections.abc import Iterator, Mapping

from experiments.pages.markdown import table
from experiments.pages.scheme_results import mean
from experiments.pages.tables import label
from experiments.study.plan import Study
from experiments.study.rows import Bounds, Row

Rows = Mapping[str, Mapping[str, Row]]
"""Rows by size, then by scheme."""


def is_ladder(study: Study) -> bool:
    """Returns whether three or more models of growing size have one task and one corpus."""
    tasks = [cells[study.about.baseline].task for cells in study.cells.values()]
    models = [task.model.num_layers * task.model.model_dim**2 for task in tasks]
    same = {(task.name, getattr(task, "corpus", None)) for task in tasks}
    return len(tasks) > 2 and len(same) == 1 and models == sorted(set(models))


def differences(study: Study, rows: Rows) -> dict[str, list[tuple[float, Bounds]]]:
    """Returns the baseline's parameters in millions and differences to it, by scheme."""
    points: dict[str, list[tuple[float, Bounds]]] = {}
    for of_size in rows.values():
        for scheme, row in of_size.items():
            parameters = mean(result.parameters for result in row.baseline) / 1e6
            if scheme != study.about.baseline and not math.isnan(row.difference[1]):
                points.setdefault(scheme, []).append((parameters, row.difference))
    return points


def change_with_size(study: Study, rows: Rows) -> Iterator[str]:
    """Yields in words which differences change from the first to the last size."""
    (first_name, first), *_, (last_name, last) = rows.items()
    changed, others = [], []
    for scheme in study.about.schemes:
        if scheme == study.about.baseline or scheme not in first or scheme not in last:
            continue
        (_, low, high), (_, low_last, high_last) = first[scheme].difference, last[scheme].difference
        place = changed if low_last > high or high_last < low else others
        words = (each[scheme].difference_in_words() for each in (first, last))
        place.append(f"{label(scheme)} {' to '.join(words)}")
    if changed:
        yield f"From {first_name} to {last_name} these change: {'; '.join(changed)}."
    if others:
        yield f"From {first_name} to {last_name} no change is resolved for: {'; '.join(others)}."


def has_corpora(study: Study) -> bool:
    """Returns whether the sizes have the same task on more than one corpus."""
    tasks = [cells[study.about.baseline].task for cells in study.cells.values()]
    corpora = {getattr(task, "corpus", None) for task in tasks}
    return len({task.name for task in tasks}) == 1 and len(corpora) > 1


def over_corpora(study: Study, rows: Rows) -> Iterator[str]:
    """Yields the table of the differences on all corpora, and where they are resolved."""
    lines = []
    for scheme in study.about.schemes:
        of_scheme = {name: of_size[scheme] for name, of_size in rows.items() if scheme in of_size}
        if scheme == study.about.baseline or len(of_scheme) < len(rows):
            continue
        signs = {name: _sign(row.difference) for name, row in of_scheme.items()}
        resolved = [name for name, sign in signs.items() if sign]
        verdict = f"on {', '.join(resolved)}" if resolved else "not resolved"
        if len({signs[name] for name in resolved}) > 1:
            verdict = "depends on the corpus"
        elif len(resolved) == len(signs):
            verdict = "in general"
        differences = [row.difference_in_words() for row in of_scheme.values()]
        lines.append([label(scheme), verdict, *differences])
    heads = ["scheme", "resolved", *(f"difference on {name}" for name in rows)]
    yield from table(heads, lines, words=2)


def repetition(study: Study, rows: Rows, earlier: Rows, criterion: int) -> Iterator[str]:
    """Yields the section on the study that this one repeats.

    Args:
      study: the study.
      rows: of the study.
      earlier: of the study that it repeats.
      criterion: its number on the page.
    """
    baseline, other = study.about.baseline, study.about.repeats
    heads = ["scheme", "rate here", "difference here", f"rate in {other}", f"difference in {other}"]
    both: list[str] = []
    here: list[str] = []
    there: list[str] = []
    same: list[str] = []
    yield f"## Beside {other}"
    yield ""
    for size, of_size in rows.items():
        pairs = {s: (row, earlier[size][s]) for s, row in of_size.items() if s in earlier[size]}
        lines = []
        for scheme, pair in pairs.items():
            name = label(scheme) + (f" ({size})" if len(rows) > 1 else "")
            if pair[0].run == pair[1].run:
                same.append(name)
            lines.append([label(scheme)])
            for row in pair:
                difference = "" if scheme == baseline else row.difference_in_words()
                lines[-1] += [row.rate_in_words(), difference]
            signs = [0 if scheme == baseline else _sign(row.difference) for row in pair]
            if signs[0] != signs[1]:
                (both if all(signs) else here if signs[0] else there).append(name)
        yield from table(heads, lines)
    if not any(earlier.values()):
        yield f"There are no results of {other}."
    elif both:
        yield f"**Criterion {criterion} fails**: resolved with both signs: {', '.join(both)}."
    else:
        yield f"Criterion {criterion} holds: no difference is resolved with both signs."
    if here:
        yield f"Resolved here alone: {', '.join(here)}."
    if there:
        yield f"Resolved in {other} alone: {', '.join(there)}."
    if same:
        yield f"Settings are the same, and so are the reported runs, for {', '.join(same)}."
    yield ""


def _sign(difference: Bounds) -> int:
    """Returns the sign of a resolved difference, 0 of one whose interval holds 0."""
    _, low, high = difference
    return (low > 0) - (high < 0)
