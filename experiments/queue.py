"""Queues of runs: what has no result is run; a failure or a time limit loses nothing."""

import argparse
import time
from collections.abc import Iterable, Sequence
from pathlib import Path

from experiments.checkpoints import Deadline, OutOfTime
from experiments.errors import ConfigError, ExperimentError, ResultsError
from experiments.progress import duration
from experiments.runs import VERSIONS, Result, Run, RunFolder, commit, here
from experiments.tasks import Task
from experiments.tasks.base import Data


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Adds the flags that queues have in common."""
    parser.add_argument("--run", action="store_true", help="run what has no result yet")
    parser.add_argument("--shard", default="1/1", metavar="I/N", help="part of the runs to run")
    parser.add_argument("--minutes", type=float, default=float("inf"), help="time limit")


def shard(text: str) -> tuple[int, int]:
    """Returns (I, N) of I/N.

    Raises:
      ConfigError: unless 1 <= I <= N.
    """
    try:
        part, parts = (int(x) for x in text.split("/"))
    except ValueError:
        part, parts = 0, 0
    if not 1 <= part <= parts:
        raise ConfigError(f"--shard: must be such as 1/2 or 2/2, got {text!r}")
    return part, parts


def of_shard(runs: Iterable[Run], part: tuple[int, int]) -> list[Run]:
    """Returns the runs of a shard, each once; runs that begin with another are in its shard."""
    named = {each.name: each for each in runs}
    roots = list(dict.fromkeys(each.root.name for each in named.values()))
    mine = set(roots[part[0] - 1 :: part[1]])
    return [each for each in named.values() if each.root.name in mine]


def differences(versions: set[tuple[str, ...]]) -> str:
    """Returns in words where versions differ.

    >>> differences({("jax 1", "numpy 2"), ("jax 3", "numpy 2")})
    'jax 1 and jax 3'
    """
    columns = zip(*sorted(versions), strict=True)
    return ", ".join(" and ".join(sorted(set(c))) for c in columns if len(set(c)) > 1)


def refuse_other_versions(runs: Iterable[Run], folder: Path, what: str) -> None:
    """Raises ResultsError where a run has a result of other versions than these."""
    facts = here()
    now = tuple(f"{name} {facts.get(name)}" for name in VERSIONS)
    for each in runs:
        found = RunFolder(folder, each).result()
        if found and found.versions != now:
            raise ResultsError(
                f"{what}: has results of other versions: {differences({found.versions, now})}; "
                "use the versions there, or remove these results"
            )


class Queue:
    """Runs one after the other.

    Attributes:
      status: 0, or 1 once a run failed.
      over: whether the time is over.
    """

    def __init__(self, folder: Path, minutes: float = float("inf")):
        """Starts the clock.

        Args:
          folder: of the folders of runs.
          minutes: after which it stops, with the state of the current run written.
        """
        commit()  # Files may change while runs go on.
        self.folder, self.status, self.over = folder, 0, False
        self.deadline = Deadline(minutes)
        self._loaded: dict[Task, Data] = {}

    def work(self, runs: Sequence[Run]) -> None:
        """Carries out runs that have no result; one that raises does not stop the others.

        At the time limit, and on SIGTERM, the state of the current run is written first.

        Raises:
          ResultsError: if another process works in a folder, or it cannot be written.
        """
        with self.deadline.of_sigterm():
            self._work(runs)

    def _work(self, runs: Sequence[Run]) -> None:
        for i, each in enumerate(runs, 1):
            began = time.monotonic()
            try:
                result = RunFolder(self.folder, each).carry_out(self._data, say, self.deadline)
                words = _words(each, result)
            except OutOfTime:
                left = len(runs) - i + 1
                say(f"Time is over with {left} runs left; the same command continues.")
                self.over = True
                return
            except ExperimentError:
                raise
            except Exception as error:
                words = f"failed: {type(error).__name__}: {' '.join(str(error).split())}"
                self.status = 1
            took = duration(time.monotonic() - began)
            say(f"[{i}/{len(runs)}] {each.name}: {words:.200}; {took}")

    def _data(self, task: Task) -> Data:
        if task not in self._loaded:
            self._loaded[task] = task.load()
        return self._loaded[task]


def say(line: str) -> None:
    """Shows a line at once."""
    print(line, flush=True)


def _words(run: Run, result: Result) -> str:
    """The main scores of a run."""
    if result.status != "done":
        return f"{result.status}: {result.error}"
    scores = result.scores[run.task.views[0]]
    return ", ".join(f"{length}: {value}" for length, value in scores.items())
