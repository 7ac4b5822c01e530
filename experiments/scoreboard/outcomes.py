"""The outcome of a claim, computed from the results of its runs."""

import dataclasses
import math
from collections.abc import Mapping, Sequence
from pathlib import Path

from experiments.runs.run import Result, known
from experiments.runs.run_queue import differences
from experiments.scoreboard.claims import Claim
from experiments.scoreboard.criteria import Condition
from experiments.stats import interval

REPRODUCED, NOT_REPRODUCED = "reproduced", "not reproduced"
NOT_RESOLVED, NOT_FITTED, NOT_RUN = "not resolved", "not fitted", "not run"


@dataclasses.dataclass(frozen=True)
class Check:
    """A condition, its margins, one per seed, and the number of seeds in which it held."""

    condition: Condition
    margins: tuple[float, ...]
    held: int


@dataclasses.dataclass(frozen=True)
class Outcome:
    """The outcome of a claim.

    Attributes:
      claim: the claim.
      word: reproduced, not reproduced, not resolved, not fitted or not run.
      reason: why, a phrase.
      seeds: those for which all runs have ended.
      gate, criteria: every condition with measurements in these seeds.
      results: of these seeds, by the name of the run.
      mixed: whether the results are of several versions.
    """

    claim: Claim
    word: str
    reason: str
    seeds: tuple[int, ...]
    gate: tuple[Check, ...]
    criteria: tuple[Check, ...]
    results: Mapping[str, tuple[Result, ...]]
    mixed: bool = False


def judge(claim: Claim, folder: Path) -> Outcome:
    """Returns the outcome of a claim.

    With fewer seeds than the claim states, or without a score that a condition names, it is "not
    run". A seed in which a run diverged counts as not fitted. With several seeds, it is "not
    resolved" if the criteria hold in all but the interval of one contains its threshold, or if they
    do not but no interval lies on the other side of its threshold.
    """
    by_seed: dict[int, dict[str, Result]] = {}
    read = known(folder)
    for seed in claim.seeds:
        runs = claim.of_seed(seed)
        done = {name: result for name, run in runs.items() if (result := read(run))}
        if len(done) == len(runs):
            by_seed[seed] = done
    seeds = tuple(by_seed)
    results = {name: tuple(by_seed[s][name] for s in seeds) for name in claim.runs}
    gate, criteria = (
        tuple(_check(condition, claim, by_seed) for condition in conditions)
        for conditions in (claim.gate, claim.criteria)
    )
    versions = {result.versions for row in results.values() for result in row}

    def outcome(word: str, reason: str, mixed: bool = False) -> Outcome:
        return Outcome(claim, word, reason, seeds, gate, criteria, results, mixed)

    if len(versions) > 1:
        return outcome(NOT_RUN, f"results of mixed versions: {differences(versions)}", True)
    missing = _missing(claim, results)
    if missing:
        return outcome(NOT_RUN, f"runs have no score {missing}")
    if len(seeds) < claim.about.seeds:
        return outcome(NOT_RUN, f"{len(seeds)} of {claim.about.seeds} seeds")
    paired = [by_seed[s] for s in seeds]
    fitted = sum(_fitted(claim, each) for each in paired)
    if fitted < len(seeds):
        return outcome(NOT_FITTED, f"the gate holds in {fitted} of {len(seeds)} seeds")
    held = sum(all(c.holds(_score(claim, each)) for c in claim.criteria) for each in paired)
    count = f"{held} of {len(seeds)} seeds"
    sides = [_side(claim, condition, paired) for condition in claim.criteria]
    if held == len(seeds):
        clear, word = all(sides), REPRODUCED
    else:
        clear, word = False in sides, NOT_REPRODUCED
    if clear or len(seeds) < 2:
        return outcome(word, count)
    return outcome(NOT_RESOLVED, f"the criteria hold in {count}")


def _score(claim: Claim, results: Mapping[str, Result]):
    def score(name: str, view: str | None, length: int) -> float:
        view = view or claim.runs[name].task.views[0]
        value = results[name].scores.get(view, {}).get(str(length))
        return math.nan if value is None else value

    return score


def _missing(claim: Claim, results: Mapping[str, tuple[Result, ...]]) -> str | None:
    """Returns a score that a condition names and a run does not have, or None."""
    for condition in (*claim.gate, *claim.criteria):
        for name, view, length in condition.scores():
            key = view or claim.runs[name].task.views[0]
            for result in results[name]:
                if result.status == "done" and str(length) not in result.scores.get(key, {}):
                    return f"{name}.{key}[{length}]"
    return None


def _fitted(claim: Claim, results: Mapping[str, Result]) -> bool:
    finite = all(result.status == "done" for result in results.values())
    return finite and all(c.holds(_score(claim, results)) for c in claim.gate)


def _side(claim: Claim, condition: Condition, by_seed: Sequence[Mapping]) -> bool | None:
    """Returns whether a condition holds, or fails, in the whole interval of its margins.

    None if it does neither.
    """
    _, low, high = interval([condition.margin(_score(claim, results)) for results in by_seed])
    if math.isnan(low):
        return None
    ends = {condition.holds_at(low), condition.holds_at(high)}
    return ends.pop() if len(ends) == 1 else None


def _check(condition: Condition, claim: Claim, by_seed: Mapping[int, Mapping]) -> Check:
    scores = [_score(claim, results) for results in by_seed.values()]
    margins = tuple(condition.margin(score) for score in scores)
    return Check(condition, margins, sum(condition.holds(score) for score in scores))
