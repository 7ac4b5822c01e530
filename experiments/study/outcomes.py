"""The block of a study's claims, which have the one judge of `experiments.claims`."""

import math
from collections.abc import Callable, Iterator, Mapping
from typing import NamedTuple

from experiments.claims import (
    GATE_FAILED,
    NOT_RUN,
    Condition,
    Margin,
    estimated,
    judge,
    paired,
)
from experiments.models.schemes import short
from experiments.stats import signed
from experiments.study.page import Context
from experiments.study.rows import Row, Rows
from experiments.study.steps import leads


class Scores(NamedTuple):
    """Scores that claims name.

    Attributes:
      without: the outcome of a claim without one, from a name, a view and a length or a number of
        steps; "" where it is known.
      margin: of a condition whose scores are known.
    """

    without: Callable[[str, str | None, int], str]
    margin: Callable[[Condition], Margin]


def claims(page: Context) -> Iterator[str]:
    """Yields the claims with their outcomes, one for each size."""
    if not page.study.about.claims:
        return
    if reference := page.study.about.reference:
        scores = {"": of_leads(page.rows, {*reference.schemes})}
    else:
        scores = {f"{size}, ": of_seeds(rows) for size, rows in page.reported.items()}
        yield (
            "Claims, by seeds in pairs. Numbers are the left minus the right side of criteria in\n"
            f"`{page.file}`, and their intervals leave out the choice of settings:"
        )
    lines = []
    for claim in page.study.about.claims:
        keys = [key for condition in claim.gates + claim.conditions for key in condition.scores()]
        words = []
        for size, each in scores.items():
            if lacking := {each.without(*key) for key in keys} - {""}:
                words.append(f"{size}{NOT_RUN if NOT_RUN in lacking else GATE_FAILED}")
            else:
                judged = judge(claim, each.margin)
                margins = ", ".join(signed(x.bounds) for x in judged.criteria)
                words.append(f"{size}{judged.word}: {margins}")
        lines.append(f"* {claim.claim}: {'; '.join(words)}.")
    yield "\n".join(lines)


def of_leads(rows: Rows, references: set[str]) -> Scores:
    """Returns differences to the best reference after numbers of steps, as `scheme.lead[steps]`."""
    by_steps = {
        row.task.train.steps: leads(of_size, references)[1]
        for of_size in rows.values()
        for row in [*of_size.values()][:1]
    }
    return Scores(
        lambda name, _, steps: "" if name in by_steps.get(steps, {}) else NOT_RUN,
        lambda condition: estimated(condition, lambda name, _, steps: by_steps[steps][name]),
    )


def of_seeds(rows: Mapping[str, Row]) -> Scores:
    """Returns the scores of schemes at one size, as `scheme.view[length]`, paired by seed.

    A gate fails where a seed diverged.
    """
    by_name = {short(scheme): row for scheme, row in rows.items()}

    def values(name: str, view: str | None, length: int) -> list[float]:
        row = by_name[name]
        return row.values(view or row.task.views[0], length)

    def without(name: str, view: str | None, length: int) -> str:
        if name not in by_name:
            return NOT_RUN
        if by_name[name].error:
            return GATE_FAILED
        return "" if all(map(math.isfinite, values(name, view, length))) else NOT_RUN

    def margin(condition: Condition) -> Margin:
        seeds = range(len(next(iter(by_name.values())).results))
        return paired(condition, [lambda *key, i=i: values(*key)[i] for i in seeds])

    return Scores(without, margin)
