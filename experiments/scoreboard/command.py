"""`python -m experiments scoreboard`: runs what claims need, and writes their outcomes."""

import time
from collections.abc import Sequence
from pathlib import Path

import jax

from experiments.checkpoints import OutOfTime
from experiments.config_io import Parser
from experiments.errors import ConfigError, ExperimentError, ResultsError
from experiments.files import write_whole
from experiments.progress import duration
from experiments.runs import VERSIONS, Result, Run, RunFolder, commit, here
from experiments.scoreboard.claims import Claim, load_all
from experiments.scoreboard.outcomes import Outcome, differences, judge
from experiments.scoreboard.page import page
from experiments.tasks import Task
from experiments.tasks.base import Data

_EPILOG = """\
python -m experiments scoreboard                          outcomes of all claims
python -m experiments scoreboard R08 R10 --run            run these, with all their seeds
python -m experiments scoreboard --run --shard 1/2        half of what this machine can run
python -m experiments scoreboard R12 --run --minutes 9    stop in time; the next call continues

Folders of runs are named by the hash of their settings: what has a result is not run again. Claims
with equal runs share them.
"""


def main(arguments: list[str]) -> int:
    """Runs claims if asked to, prints outcomes and writes the page; returns the exit status."""
    parser = Parser(
        prog="python -m experiments scoreboard",
        description="Claims of the literature about position encodings, and their outcomes.",
        epilog=_EPILOG,
    )
    parser.add_argument("claims", nargs="*", metavar="R01", help="names of claims (default: all)")
    parser.add_argument("--run", action="store_true", help="run what has no result yet")
    parser.add_argument("--seeds", type=int, help="seeds to run now (default: as the claim says)")
    parser.add_argument("--shard", default="1/1", metavar="I/N", help="part of the runs to run")
    parser.add_argument("--minutes", type=float, default=float("inf"), help="time limit")
    parser.add_argument("--fresh", action="store_true", help="remove earlier results of the claims")
    parser.add_argument("--folder", type=Path, default=Path("configs/scoreboard"))
    parser.add_argument("--results", type=Path, default=Path("results/scoreboard"))
    parser.add_argument("--page", type=Path, default=Path("RESULTS.md"), help="file to write")
    options = parser.parse_args(arguments)
    shard = _shard(options.shard)
    if options.seeds is not None and options.seeds < 1:
        raise ConfigError(f"--seeds: must be at least 1, got {options.seeds}")
    if options.fresh and not (options.run and options.claims):
        raise ConfigError("--fresh: needs --run and the names of claims")
    everything = load_all(options.folder, [])
    load_all(options.folder, options.claims)  # Raises for unknown names.
    chosen = [c for c in everything if not options.claims or c.name in options.claims]
    status = 0
    if options.run:
        if not options.claims:
            device = "cpu" if jax.default_backend() == "cpu" else "gpu"
            chosen = [claim for claim in chosen if claim.about.device == device]
        status = run(chosen, options.results, options.seeds, shard, options.minutes, options.fresh)
    outcomes = [judge(claim, options.results) for claim in everything]
    write_whole(options.page, page(outcomes))
    _show([outcome for outcome in outcomes if outcome.claim in chosen])
    print(f"Page: {options.page}")
    mixed = [o for o in outcomes if o.mixed]
    if mixed:
        raise ResultsError("; ".join(f"{o.claim.name}: {o.reason}" for o in mixed))
    return status


def run(
    claims: Sequence[Claim],
    folder: Path,
    seeds: int | None = None,
    shard: tuple[int, int] = (1, 1),
    minutes: float = float("inf"),
    fresh: bool = False,
) -> int:
    """Runs what claims need and has no result; a run that raises does not stop the others.

    Args:
      claims: to run.
      folder: of the folders of runs.
      seeds: how many; None: as each claim states.
      shard: (i, n): the i-th of n parts, from 1.
      minutes: after which it stops, with the state of the current run written.
      fresh: whether to remove earlier results first.

    Returns:
      0, or 1 if a run failed.

    Raises:
      ResultsError: where results of other versions are in the folder, or another process.
    """
    commit()  # Files may change while runs go on.
    plan = _plan(claims, seeds, shard)
    if fresh:
        for each in plan:
            RunFolder(folder, each).forget()
    _refuse_other_versions(claims, folder)
    waiting = [each for each in plan if RunFolder(folder, each).result() is None]
    print(f"{len(plan)} runs, {len(plan) - len(waiting)} with a result.", flush=True)
    loaded: dict[Task, Data] = {}

    def data(task: Task) -> Data:
        if task not in loaded:
            loaded[task] = task.load()
        return loaded[task]

    deadline, status = time.monotonic() + 60 * minutes, 0
    for i, each in enumerate(waiting, 1):
        began = time.monotonic()
        try:
            result = RunFolder(folder, each).carry_out(data, _say, deadline)
            words = _words(each, result)
        except OutOfTime:
            left = len(waiting) - i + 1
            print(f"Time is over with {left} runs left; the same command continues.", flush=True)
            break
        except ExperimentError:
            raise
        except Exception as error:
            words, status = f"failed: {type(error).__name__}: {' '.join(str(error).split())}", 1
        took = duration(time.monotonic() - began)
        _say(f"[{i}/{len(waiting)}] {each.name}: {words:.200}; {took}")
    return status


def _plan(claims: Sequence[Claim], seeds: int | None, shard: tuple[int, int]) -> list[Run]:
    """Returns the runs of a shard, each once; runs that begin with another are in its shard."""
    runs: dict[str, Run] = {}
    for claim in claims:
        for seed in range(min(seeds or claim.about.seeds, claim.about.seeds)):
            runs |= {each.name: each for each in claim.of_seed(seed).values()}
    roots = list(dict.fromkeys(each.root.name for each in runs.values()))
    part, parts = shard
    mine = set(roots[part - 1 :: parts])
    return [each for each in runs.values() if each.root.name in mine]


def _refuse_other_versions(claims: Sequence[Claim], folder: Path) -> None:
    facts = here()
    now = tuple(f"{name} {facts.get(name)}" for name in VERSIONS)
    for claim in claims:
        for seed in range(claim.about.seeds):
            for each in claim.of_seed(seed).values():
                found = RunFolder(folder, each).result()
                if found and found.versions != now:
                    raise ResultsError(
                        f"{claim.name}: has results of other versions: "
                        f"{differences({found.versions, now})}; use the versions there, or --fresh "
                        "to run the claim again"
                    )


def _shard(text: str) -> tuple[int, int]:
    try:
        part, parts = (int(x) for x in text.split("/"))
    except ValueError:
        part, parts = 0, 0
    if not 1 <= part <= parts:
        raise ConfigError(f"--shard: must be such as 1/2 or 2/2, got {text!r}")
    return part, parts


def _say(line: str) -> None:
    print(line, flush=True)


def _words(run: Run, result: Result) -> str:
    """The main scores of a run."""
    if result.status != "done":
        return f"{result.status}: {result.error}"
    scores = result.scores[run.task.views[0]]
    return ", ".join(f"{length}: {value}" for length, value in scores.items())


def _show(outcomes: Sequence[Outcome]) -> None:
    for outcome in outcomes:
        what = f"{outcome.word} ({outcome.reason})"
        print(f"{outcome.claim.name:5} {what:36} {outcome.claim.about.claim}")
