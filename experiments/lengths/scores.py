"""Scores of methods on documents, from the results of cells, and the outcomes of claims."""

import dataclasses
import functools
import math
from collections.abc import Iterable, Mapping, Sequence

from experiments.claims import NOT_RUN, Claim, Condition, Outcome, Score, judge, paired
from experiments.lengths.plan import WIDTH, Cell, Document, Plan
from experiments.lengths.results import BIN, CellResult
from experiments.stats import mean

LEAST = 3
"""Documents without which nothing is said about a claim."""


@dataclasses.dataclass(frozen=True)
class Table:
    """Scores of a plan, from the results of its cells by name."""

    plan: Plan
    results: Mapping[str, CellResult]

    @functools.cached_property
    def _cells(self) -> dict[tuple, Cell]:
        return {}

    def cell(self, task: str, document: Document, method: str, target: int) -> Cell:
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
        task = "probe_within" if view == "copied_within" else "probe"
        if (result := self.probed(task, document, method)) is None:
            return math.nan
        if view.startswith("copied"):
            return mean(second - first for d, first, second in result.copies if d == length)
        column = {"answer": 3, "found": 4}[view]
        return mean(row[column] for row in result.questions if row[0] == length)

    def probed(self, task: str, document: Document, method: str) -> CellResult | None:
        """Returns the result of a probe, None before its cell has run."""
        context = getattr(self.plan, task).contexts[-1]
        return self.results.get(self.cell(task, document, method, context).name)

    def probed_by(self, methods: Sequence[str]) -> list[dict[str, CellResult]]:
        """Returns the results of probes by method, of each document in which all methods ran."""
        of_documents = (
            {name: x for name in methods if (x := self.probed("probe", document, name))}
            for document in self.plan.all_documents
        )
        return [results for results in of_documents if len(results) == len({*methods})]

    def answers(self, methods: Sequence[str]) -> dict[str, list[tuple[float, float]]]:
        """Returns the distance of facts and the loss of answers by depth in the longest context.

        Both are means over the documents in which all methods were probed; nothing without any.
        """
        rows: dict[str, dict[float, list[tuple[float, float]]]] = {name: {} for name in methods}
        for results in self.probed_by(methods):
            for name, result in results.items():
                for context, depth, distance, loss, _ in result.questions:
                    if context == self.plan.probe.contexts[-1]:
                        rows[name].setdefault(depth, []).append((distance, loss))
        answers = {}
        for name, of_depth in rows.items():
            columns = [zip(*of_depth[depth], strict=True) for depth in sorted(of_depth)]
            if columns:
                answers[name] = [(mean(distances), mean(losses)) for distances, losses in columns]
        return answers

    def values(self, method: str, view: str, length: int, base: str | None = None) -> list[float]:
        """Returns a score on all documents that have it, or its difference to `base`."""
        rows = []
        for document in self.plan.all_documents:
            value = self.score(document, method, view, length)
            rows.append(value - self.score(document, base, view, length) if base else value)
        return [x for x in rows if math.isfinite(x)]

    def units(self, conditions: Iterable[Condition]) -> list[Score]:
        """Returns the scores of each document that has all scores of conditions."""
        units: list[Score] = []
        for document in self.plan.all_documents:
            score = functools.partial(self._scored, document)
            if all(math.isfinite(condition.margin(score)) for condition in conditions):
                units.append(score)
        return units

    def judge(self, claim: Claim) -> Outcome:
        units = self.units([*claim.gates, *claim.conditions])
        if len(units) < LEAST:
            return Outcome(claim, NOT_RUN)
        return judge(claim, lambda condition: paired(condition, units))

    def _scored(self, document: Document, name: str, view: str | None, length: int) -> float:
        return self.score(document, name, view or "", length)

    def ratio(self, method: str) -> float:
        """Returns the processor time of a pass relative to RoPE's, NaN before both have run.

        Passes of one length on one kind of processor are compared.
        """
        ratios = {}  # One pass may serve several targets.
        for document in self.plan.all_documents:
            for target in self.plan.targets(document):
                cells = [self.cell("losses", document, x, target) for x in (method, "rope")]
                known = [self.results.get(cell.name) for cell in cells]
                first, second = known
                if first and second and cells[0].count == cells[1].count:
                    if first.environment.get("processor") == second.environment.get("processor"):
                        ratio = first.cpu_seconds / second.cpu_seconds
                        ratios[cells[0].name, cells[1].name] = ratio
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
