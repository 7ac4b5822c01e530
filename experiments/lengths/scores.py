"""Scores of methods on documents, from the results of cells, and the outcomes of claims."""

import dataclasses
import functools
import math
from collections.abc import Mapping

from experiments.lengths.plan import WIDTH, Cell, Claim, Document, Plan
from experiments.lengths.results import BIN, CellResult
from experiments.scoreboard.criteria import Condition
from experiments.stats import interval, mean

HOLDS, FAILS, OPEN, NOT_RUN, NO_GATE = "holds", "fails", "not resolved", "not run", "gate failed"
LEAST = 3
"""Documents without which nothing is said about a claim."""


@dataclasses.dataclass(frozen=True)
class Outcome:
    """The outcome of a claim.

    Attributes:
      claim: the claim.
      word: holds, fails, not resolved, gate failed or not run.
      count: documents that have all its scores.
      margins: for each condition, the mean of left minus right side and its interval.
    """

    claim: Claim
    word: str
    count: int
    margins: tuple[tuple[Condition, float, float, float], ...]


@dataclasses.dataclass(frozen=True)
class Table:
    """Scores of a plan, from the results of its cells by name."""

    plan: Plan
    results: Mapping[str, CellResult]

    @functools.cached_property
    def _cells(self) -> dict[tuple, Cell]:
        return {}

    def cell(self, task: str, document: Document, method: str, target: int) -> Cell:
        """Returns the cell of a method; see `Plan.cell`."""
        key = task, document, method, target
        if key not in self._cells:
            self._cells[key] = self.plan.cell(*key)
        return self._cells[key]

    def losses(self, document: Document, method: str, target: int) -> list[float]:
        """Returns means over `BIN` places up to a target; empty before the cell has run."""
        if target not in self.plan.targets(document):
            return []
        result = self.results.get(self.cell("losses", document, method, target).name)
        return [] if result is None else result.losses[: target // BIN]

    def score(self, document: Document, method: str, view: str, length: int) -> float:
        """Returns a score of `experiments.lengths.plan.VIEWS`; NaN before its cell has run."""
        plan = self.plan
        if view in ("at", "far", "within"):
            target = {"at": plan.shortest, "far": plan.longest, "within": length}[view]
            losses = self.losses(document, method, target)
            if view == "within":
                return mean(losses[: plan.checkpoint.trained // BIN])
            return mean(losses[(length - WIDTH) // BIN : length // BIN])
        cell = self.cell("probe", document, method, plan.probe.contexts[-1])
        result = self.results.get(cell.name)
        if result is None:
            return math.nan
        if view == "copied":
            return mean(second - first for d, first, second in result.copies if d == length)
        column = {"answer": 3, "found": 4}[view]
        return mean(row[column] for row in result.questions if row[0] == length)

    def values(self, method: str, view: str, length: int, base: str | None = None) -> list[float]:
        """Returns a score on all documents that have it, or its difference to `base`."""
        rows = []
        for document in self.plan.all_documents:
            value = self.score(document, method, view, length)
            rows.append(value - self.score(document, base, view, length) if base else value)
        return [x for x in rows if math.isfinite(x)]

    def judge(self, claim: Claim) -> Outcome:
        """Returns the outcome of a claim over the documents that have all its scores.

        It holds if the whole 95 % interval of each margin is on its side of the threshold, and
        fails if one interval is on the other side. The gate must hold on the mean.
        """

        def margins(condition: Condition) -> list[float]:
            return [
                condition.margin(lambda *key: self.score(document, key[0], key[1] or "", key[2]))  # noqa: B023
                for document in self.plan.all_documents
            ]

        conditions = claim.gates + claim.conditions
        columns = [margins(condition) for condition in conditions]
        whole = [row for row in zip(*columns, strict=True) if all(map(math.isfinite, row))]
        if len(whole) < LEAST:
            return Outcome(claim, NOT_RUN, len(whole), ())
        rows = [
            (condition, *interval(values))
            for condition, values in zip(conditions, zip(*whole, strict=True), strict=True)
        ]
        gates, criteria = rows[: len(claim.gates)], tuple(rows[len(claim.gates) :])
        sides = [{c.holds_at(low), c.holds_at(high)} for c, _, low, high in criteria]
        word = OPEN
        if not all(condition.holds_at(middle) for condition, middle, _, _ in gates):
            word = NO_GATE
        elif all(side == {True} for side in sides):
            word = HOLDS
        elif {False} in sides:
            word = FAILS
        return Outcome(claim, word, len(whole), criteria)

    def ratio(self, method: str) -> float:
        """Returns the processor time of a pass relative to RoPE's, of passes of one length."""
        ratios = {}  # One pass may serve several targets.
        for document in self.plan.all_documents:
            for target in self.plan.targets(document):
                cells = [self.cell("losses", document, x, target) for x in (method, "rope")]
                known = [self.results.get(cell.name) for cell in cells]
                if cells[0].count == cells[1].count and None not in known:
                    first, second = (x.cpu_seconds for x in known if x)
                    ratios[cells[0].name, cells[1].name] = first / second
        return mean(list(ratios.values()))

    def memory(self, method: str) -> float:
        """Returns the MiB that a pass to the shortest target takes, of the last one that ran."""
        cells = [
            self.cell("losses", document, method, self.plan.shortest)
            for document in self.plan.all_documents
        ]
        names = [cell.name for cell in cells if cell.count == self.plan.shortest]
        known = [self.results[name] for name in names if name in self.results]
        last = max(known, key=lambda result: result.finished, default=None)
        return math.nan if last is None else last.temporary_mib
