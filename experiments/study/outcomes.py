"""The block of a study's claims, which have the one judge of `experiments.claims`."""

import math
from collections.abc import Callable, Iterator, Mapping
from typing import NamedTuple

from experiments.claims import NOT_RUN, Condition, Margin, estimated, judge, paired
from experiments.models.schemes import short
from experiments.stats import signed
from experiments.study.page import Context
from experiments.study.rows import Row, Rows
from experiments.study.steps import leads


class Scores(NamedTuple):
    """Scores that claims name.

    Attributes:
      known: whether there is one, from a name, a view and a length or a number of steps.
      margin: of a condition whose scores are known.
    """

    known: Callable[[str, str | None, int], bool]
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
            if all(each.known(*key) for key in keys):
                judged = judge(claim, each.margin)
                margins = ", ".join(signed(x.bounds) for x in judged.criteria)
                words.append(f"{size}{judged.word}: {margins}")
            else:
                words.append(f"{size}{NOT_RUN}")
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
        lambda name, _, steps: name in by_steps.get(steps, {}),
        lambda condition: estimated(condition, lambda name, _, steps: by_steps[steps][name]),
    )


def of_seeds(rows: Mapping[str, Row]) -> Scores:
    """Returns the scores of schemes at one size, as `scheme.view[length]`, paired by seed.

    None are known of one seed, which has no interval.
    """
    by_name = {short(scheme): row for scheme, row in rows.items()}

    def values(name: str, view: str | None, length: int) -> list[float]:
        row = by_name[name]
        return row.values(view or row.task.views[0], length)

    def known(name: str, view: str | None, length: int) -> bool:
        scores = values(name, view, length) if name in by_name else []
        return len(scores) > 1 and all(map(math.isfinite, scores))

    def margin(condition: Condition) -> Margin:
        seeds = range(len(next(iter(by_name.values())).results))
        return paired(condition, [lambda *key, i=i: values(*key)[i] for i in seeds])

    return Scores(known, margin)
