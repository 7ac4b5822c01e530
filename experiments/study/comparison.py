"""Differences of a study side by side: at its sizes, on its corpora, and in a repeated study."""

import math
from collections.abc import Iterator, Mapping
from typing import Any

from experiments.pages.tables import interval, label
from experiments.study.plan import Study
from experiments.study.rows import Bounds, Row, Rows

FLAT = 0.05
"""The greatest loss beyond the trained length that is called flat: a choice, not a criterion."""


def is_ladder(study: Study) -> bool:
    """Returns whether three or more models of growing size have one task and one corpus."""
    tasks = [cells[study.about.baseline].task for cells in study.cells.values()]
    models = [task.model.num_layers * task.model.model_dim**2 for task in tasks]
    same = {(task.name, getattr(task, "corpus", None)) for task in tasks}
    return len(tasks) > 2 and len(same) == 1 and models == sorted(set(models))


def has_corpora(study: Study) -> bool:
    """Returns whether the sizes have the same task on more than one corpus."""
    tasks = [cells[study.about.baseline].task for cells in study.cells.values()]
    corpora = {getattr(task, "corpus", None) for task in tasks}
    return len({task.name for task in tasks}) == 1 and len(corpora) > 1


def resolved(rows: Mapping[str, Row], baseline: str) -> dict[str, list[str]]:
    """Returns schemes with their differences: `ahead` of the baseline, `level` or `behind`."""
    groups: dict[str, list[str]] = {"ahead": [], "level": [], "behind": []}
    for scheme, row in rows.items():
        if scheme != baseline:
            place = sign(row.difference) * row.cell.task.labels.sign
            group = ("ahead", "level", "behind")[place + 1]
            groups[group].append(f"{label(scheme)} {row.difference_in_words()}")
    return groups


def losses(rows: Mapping[str, Row], baseline: Row) -> Iterator[dict[str, Any]]:
    """Yields how scores change from the trained length to the longest, in windows and sliding.

    Each has `times` the length, the `view`, and schemes with their mean losses: the `flat` ones,
    with an interval up to FLAT, and `others`.
    """
    task = baseline.cell.task
    for view in [task.views[0], *(["sliding"] if "sliding" in task.views[1:] else [])]:
        longest = max(map(int, baseline.results[0].scores.get(view, {})), default=0)
        if longest <= task.train_length:
            continue
        groups: dict[bool, list[str]] = {True: [], False: []}
        for scheme, row in rows.items():
            scores = [result.scores.get(view, {}) for result in row.results]
            ends = [(x.get(str(task.train_length)), x.get(str(longest))) for x in scores]
            rises = [task.labels.sign * (b - a) for a, b in ends if a is not None and b is not None]
            if rises:
                rise, _, high = interval(rises)
                is_flat = (rise if math.isnan(high) else high) <= FLAT
                groups[is_flat].append(f"{label(scheme)} {rise:+.2f}")
        if any(groups.values()):
            times = longest / task.train_length
            yield {"times": times, "view": view, "flat": groups[True], "others": groups[False]}


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
    """Returns differences by scheme, at all sizes; on several corpora, where they are resolved."""
    lines = []
    for scheme in study.about.schemes:
        of_scheme = {name: of_size[scheme] for name, of_size in rows.items() if scheme in of_size}
        if scheme == study.about.baseline or len(of_scheme) < len(rows):
            continue
        verdict = [_verdict(of_scheme)] if has_corpora(study) else []
        differences = [row.difference_in_words() for row in of_scheme.values()]
        lines.append([label(scheme), *verdict, *differences])
    return lines


def _verdict(rows: Mapping[str, Row]) -> str:
    signs = {name: sign(row.difference) for name, row in rows.items()}
    names = [name for name, each in signs.items() if each]
    if not names:
        return "not resolved"
    if len({signs[name] for name in names}) > 1:
        return "depends on the corpus"
    return "in general" if len(names) == len(signs) else f"on {', '.join(names)}"


def repetition(study: Study, rows: Rows, earlier: Rows) -> dict[str, Any]:
    """Returns the differences next to the earlier ones of the study that this one repeats.

    Args:
      study: the study.
      rows: of the study.
      earlier: of the study that it repeats.

    Returns:
      `tables` of scheme, rate and difference here, and there; schemes that are resolved with both
      signs (`both`), `here` or `there` alone; those whose settings are the `same`.
    """
    out: dict[str, Any] = {"tables": [], "both": [], "here": [], "there": [], "same": []}
    for size, of_size in rows.items():
        lines = []
        for scheme, row in of_size.items():
            if (other := earlier.get(size, {}).get(scheme)) is None:
                continue
            name = label(scheme) + (f" ({size})" if len(rows) > 1 else "")
            if row.run == other.run:
                out["same"].append(name)
            is_baseline = scheme == study.about.baseline
            lines.append([label(scheme)])
            for each in (row, other):
                difference = "" if is_baseline else each.difference_in_words()
                lines[-1] += [each.rate_in_words(), difference]
            signs = [0 if is_baseline else sign(each.difference) for each in (row, other)]
            if signs[0] != signs[1]:
                out["both" if all(signs) else "here" if signs[0] else "there"].append(name)
        out["tables"].append(lines)
    return out


def sign(difference: Bounds) -> int:
    """Returns the sign of a resolved difference, 0 of one whose interval holds 0."""
    _, low, high = difference
    return (low > 0) - (high < 0)
