"""Differences of a study side by side: at its sizes, and on its corpora."""

import math
from collections.abc import Mapping

from experiments.models.schemes import label
from experiments.stats import in_cell, in_words, mean, sign
from experiments.study.plan import Study
from experiments.study.rows import Row, Rows
from experiments.study.selection import score
from experiments.tasks.base import Task

FLAT = 0.05
"""The greatest loss beyond the trained length that is called flat: a choice, not a criterion."""

BEYOND = 0.01
"""The least change of sliding windows beyond the trained length that counts, alike in all seeds."""


def is_ladder(study: Study) -> bool:
    """Returns whether three or more models of growing size have one task and one corpus."""
    tasks = [cells[study.about.baseline].task for cells in study.reported.values()]
    models = [task.model.num_layers * task.model.model_dim**2 for task in tasks]
    same = {(task.name, getattr(task, "corpus", None)) for task in tasks}
    return len(tasks) > 2 and len(same) == 1 and models == sorted(set(models))


def has_corpora(study: Study) -> bool:
    """Returns whether the sizes have the same task on more than one corpus."""
    tasks = [cells[study.about.baseline].task for cells in study.reported.values()]
    corpora = {getattr(task, "corpus", None) for task in tasks}
    return len({task.name for task in tasks}) == 1 and len(corpora) > 1


def losses(row: Row) -> dict[str, str]:
    """Returns the loss from the trained length to the longest; nothing if they are the same."""
    task = row.task
    if task.longest == task.train_length:
        return {}
    loss = task.labels.sign * mean(_changes(row, task.views[0], task.longest))
    return {f"loss at {task.longest}": "" if math.isnan(loss) else f"{loss:+.2f}"}


def _changes(row: Row, view: str, length: int) -> list[float]:
    """Returns the changes of scores from the trained length to another one.

    One per seed, NaN where a score is missing.
    """
    trained = row.values(view, row.task.train_length)
    return [b - a for a, b in zip(trained, row.values(view, length), strict=True)]


def is_of_context(task: Task) -> bool:
    """Returns whether a task has sliding windows that are shorter than the trained length."""
    return any(n < task.train_length for n in getattr(task, "sliding_lengths", ()))


def contexts(row: Row) -> dict[str, str]:
    """Returns the scores in sliding windows, if some are shorter than the trained length.

    Copies have the change by windows that hold the earlier use. The last cell says whether windows
    beyond the trained length gain, lose or are flat.
    """
    task = row.task
    if not is_of_context(task):
        return {}
    lengths = sorted(getattr(task, "sliding_lengths", ()))
    cells = {f"sliding {n}": in_cell(row.values("sliding", n)) for n in lengths}
    for name, ends in getattr(task, "copies", {}).items():
        unseen, seen = (row.values(name, length) for length in ends)
        gains = [b - a for a, b in zip(unseen, seen, strict=True)]
        cells[name] = "" if math.isnan(mean(gains)) else in_cell(gains, "+.3f")
    if lengths[-1] <= task.train_length:
        return cells
    changes = _changes(row, "sliding", lengths[-1])
    if math.isnan(mean(changes)):
        return cells | {f"beyond {task.train_length}": ""}
    alike = len({change > 0 for change in changes}) == 1 and abs(mean(changes)) >= BEYOND
    words = ("loses" if changes[0] > 0 else "gains") if alike else "flat"
    return cells | {f"beyond {task.train_length}": words}


def variant_cells(row: Row) -> dict[str, tuple[str, str, str]]:
    """Returns the cells of variants, relative to the same runs' scores at the trained length.

    By name: the score at the trained length and its difference, if it has one, and the loss at
    the longest length.
    """
    task, cells = row.task, {}
    unchanged = mean(map(score, row.varied))
    for name, by_length in row.variants.items():
        trained = by_length.get(task.train_length, [])
        loss = task.labels.sign * mean(by_length.get(task.longest, []))
        cells[row.label(name)] = (
            f"{unchanged + mean(trained):.3f}" if any(trained) else "",
            in_words(trained, sign="+") if any(trained) else "",
            "" if math.isnan(loss) else f"{loss:+.2f}",
        )
    return cells


def _variants_side_by_side(rows: Rows, scheme: str) -> dict[str, list[tuple[str, str, str]]]:
    varied = [variant_cells(of_size[scheme]) for of_size in rows.values()]
    names = dict.fromkeys(name for cells in varied for name in cells)
    return {name: [cells.get(name, ("", "", "")) for cells in varied] for name in names}


def change_with_size(study: Study, rows: Rows) -> tuple[list[str], list[str]]:
    """Returns the schemes whose difference changes from the first to the last size, and others."""
    first, *_, last = rows.values()
    changed: dict[bool, list[str]] = {True: [], False: []}
    for scheme in study.about.schemes:
        if scheme != study.about.baseline and scheme in first and scheme in last:
            (_, low, high), (_, low_last, high_last) = (
                each[scheme].difference for each in (first, last)
            )
            changed[low_last > high or high_last < low].append(label(scheme))
    return changed[True], changed[False]


def side_by_side(study: Study, rows: Rows) -> list[list[str]]:
    """Returns the baseline's scores, and differences to it, at all sizes.

    On several corpora, the second cell says where a difference is resolved.
    """
    baseline, corpora = study.about.baseline, has_corpora(study)
    scores = [in_cell(row[baseline].at_trained_length) for row in rows.values()]
    lines = [[label(baseline), *([""] if corpora else []), *scores]]
    for name, cells in _variants_side_by_side(rows, baseline).items():
        if any(differences := [difference for _, difference, _ in cells]):
            lines.append([name, *([""] if corpora else []), *differences])
    for scheme in study.about.schemes:
        of_scheme = {name: of_size[scheme] for name, of_size in rows.items() if scheme in of_size}
        if scheme == baseline or len(of_scheme) < len(rows):
            continue
        verdict = [_verdict(of_scheme)] if corpora else []
        differences = [row.difference_in_words() for row in of_scheme.values()]
        lines.append([label(scheme), *verdict, *differences])
    return lines


def losses_side_by_side(study: Study, rows: Rows) -> tuple[list[str], list[list[str]]]:
    """Returns the lengths of `losses`, and these by scheme at all sizes; none without lengths."""
    first, *_ = rows.values()
    views, lines = list(losses(first[study.about.baseline])), []
    for scheme in study.about.schemes if views else ():
        if all(scheme in of_size for of_size in rows.values()):
            cells = [", ".join(losses(of_size[scheme]).values()) for of_size in rows.values()]
            lines.append([label(scheme), *cells])
            for name, of_sizes in _variants_side_by_side(rows, scheme).items():
                lines.append([name, *(loss for *_, loss in of_sizes)])
    return views, lines


def _verdict(rows: Mapping[str, Row]) -> str:
    signs = {name: sign(row.difference) for name, row in rows.items()}
    names = [name for name, each in signs.items() if each]
    if not names:
        return "not resolved"
    if len({signs[name] for name in names}) > 1:
        return "depends on the corpus"
    return "in general" if len(names) == len(signs) else f"on {', '.join(names)}"
