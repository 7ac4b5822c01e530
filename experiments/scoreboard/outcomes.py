"""The outcomes of claims, computed from the results of their runs."""

import dataclasses
from collections.abc import Mapping
from pathlib import Path

from experiments import claims
from experiments.claims import GATE_FAILED, NOT_RUN, Claim, judge, paired
from experiments.runs.run import Result, known
from experiments.runs.run_queue import differences
from experiments.scoreboard.plan import Protocol
from experiments.stats import mean


@dataclasses.dataclass(frozen=True, kw_only=True)
class Outcome(claims.Outcome):
    """The outcome of a claim with its protocol, seeds and results.

    Attributes:
      protocol: the file of the claim.
      reason: of the word, a phrase.
      seeds: those for which all runs have ended.
      results: of these seeds, by the name of the run.
      mixed: whether the results are of several versions.
    """

    protocol: Protocol
    reason: str
    seeds: tuple[int, ...]
    results: Mapping[str, tuple[Result, ...]]
    mixed: bool


def outcomes(protocol: Protocol, folder: Path) -> list[Outcome]:
    """Returns the outcomes of the claims of a file.

    With fewer seeds than it states a claim is "not run"; where a run diverged, its gate has failed.
    """
    by_seed: dict[int, dict[str, Result]] = {}
    read = known(folder)
    for seed in protocol.seeds:
        runs = protocol.of_seed(seed)
        done = {name: result for name, run in runs.items() if (result := read(run))}
        if len(done) == len(runs):
            by_seed[seed] = done
    return [_outcome(protocol, claim, by_seed) for claim in protocol.about.claims]


def _outcome(protocol: Protocol, claim: Claim, by_seed: Mapping[int, dict[str, Result]]) -> Outcome:
    results = {name: tuple(x[name] for x in by_seed.values()) for name in protocol.runs}
    units = [_score(protocol, each) for each in by_seed.values()]
    judged = judge(claim, lambda condition: paired(condition, units))
    everything = [result for row in results.values() for result in row]
    versions = {result.versions for result in everything}
    columns = zip(*(margin.values for margin in judged.criteria), strict=True)
    held = sum(
        all(x.condition.holds_at(value) for x, value in zip(judged.criteria, column, strict=True))
        for column in columns
    )
    word, reason = judged.word, f"{held} of {len(units)} seeds"
    if any(result.status != "done" for result in everything):
        word = GATE_FAILED
    if word == GATE_FAILED:
        reason = "the task was not learned in every seed"
    if len(units) < protocol.about.seeds:
        word, reason = NOT_RUN, f"{len(units)} of {protocol.about.seeds} seeds"
    if mixed := len(versions) > 1:
        word, reason = NOT_RUN, f"results of mixed versions: {differences(versions)}"
    return Outcome(
        claim,
        word,
        judged.gate,
        judged.criteria,
        protocol=protocol,
        reason=reason,
        seeds=tuple(by_seed),
        results=results,
        mixed=mixed,
    )


def _score(protocol: Protocol, results: Mapping[str, Result]):
    def score(name: str, view: str | None, length: int) -> float:
        return mean([results[name].score(view or protocol.runs[name].task.views[0], length)])

    return score
