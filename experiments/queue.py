"""Queues of runs: what has no result is run; a failure or a time limit loses nothing."""

import argparse
import contextlib
import dataclasses
import time
from collections.abc import Callable, Generator, Iterable, Iterator, Sequence
from pathlib import Path

import jax

from experiments.checkpoints import Deadline, OutOfTime
from experiments.errors import ConfigError, ExperimentError, ResultsError
from experiments.progress import duration
from experiments.runs import VERSIONS, Result, Run, RunFolder, commit, here
from experiments.tasks import Task
from experiments.tasks.base import Data
from experiments.workers import RayWorkers, Workers, default_count


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Adds the flags that queues have in common."""
    parser.add_argument("--run", action="store_true", help="run what has no result yet")
    parser.add_argument("--shard", default="1/1", metavar="I/N", help="part of the runs to run")
    parser.add_argument("--minutes", type=float, default=float("inf"), help="time limit")
    parser.add_argument(
        "--workers",
        type=int,
        metavar="N",
        help="processes, each with a processor of its own (default: one per processor on CPUs)",
    )
    parser.add_argument(
        "--ray",
        metavar="ADDRESS",
        help="run on a Ray cluster, such as auto; local starts one on this machine",
    )


def workers(options: argparse.Namespace) -> int | str:
    """Returns the address of a Ray cluster if one was given, otherwise how many processes to use.

    Raises:
      ConfigError: if the number is below 1, or above 1 on a machine with accelerators.
    """
    if options.ray is not None:
        return options.ray
    if options.workers is None:
        return default_count()
    if options.workers < 1:
        raise ConfigError(f"--workers: must be at least 1, got {options.workers}")
    if options.workers > 1 and (backend := jax.default_backend()) != "cpu":
        raise ConfigError(
            f"--workers: processes would share one {backend}; start a call per device that sees "
            f"this device only (CUDA_VISIBLE_DEVICES), each with its --shard I/N, or use --ray"
        )
    return options.workers


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


@dataclasses.dataclass(frozen=True)
class _Ended:
    """What came of a run in words, and whether it raised."""

    words: str
    failed: bool


class Queue:
    """Runs that are carried out one after the other, or some at a time in processes of their own.

    Attributes:
      status: 0, or 1 once a run failed.
      over: whether the time is over.
    """

    def __init__(self, folder: Path, minutes: float = float("inf"), workers: int | str = 1):
        """Starts the clock.

        Args:
          folder: of the folders of runs.
          minutes: after which it stops, with the states of unfinished runs written.
          workers: how many runs at a time, each in a process with a processor of its own; or the
            address of a Ray cluster, "local" for a new one.
        """
        commit()  # Files may change while runs go on.
        self.folder, self.workers, self.status, self.over = folder, workers, 0, False
        self.deadline = Deadline(minutes)
        self._loaded: dict[Task, Data] = {}

    def work(self, runs: Sequence[Run]) -> None:
        """Carries out runs that have no result; one that raises does not stop the others.

        At the time limit, and on SIGTERM, the states of unfinished runs are written first.

        Raises:
          ResultsError: if another process works in a folder, or it cannot be written.
        """
        done, units = 0, _units(runs)
        alone = len(units) == 1 or self.workers == 1
        for unit in self._here(units) if alone else self._beside(units):
            for ended in unit:
                done += 1
                self.status |= ended.failed
                say(f"[{done}/{len(runs)}] {ended.words}")
        if done < len(runs):
            say(f"Time is over with {len(runs) - done} runs left; the same command continues.")
            self.over = True

    def _here(self, units: Sequence[list[Run]]) -> Iterator[list[_Ended]]:
        with self.deadline.of_sigterm():
            for unit in units:
                if self.deadline.over():
                    return
                yield self.carry_out(unit)

    def _beside(self, units: Sequence[list[Run]]) -> Iterator[list[_Ended]]:
        work = _in_worker, self.folder.absolute(), self.deadline.minutes()
        if isinstance(self.workers, str):
            address = None if self.workers == "local" else self.workers
            started = RayWorkers(address, len(units), *work)
        else:
            started = Workers(min(self.workers, len(units)), *work)
        with started as workers, self.deadline.of_sigterm(workers.stop):
            yield from workers.answers(
                units, lambda unit: unit[0].program, lambda: not self.deadline.over()
            )

    def carry_out(self, unit: list[Run]) -> list[_Ended]:
        """Returns what came of runs, without those for which there was no time."""
        found = []
        for each in unit:
            began, failed = time.monotonic(), False
            try:
                result = RunFolder(self.folder, each).carry_out(self._data, say, self.deadline)
                words = _words(each, result)
            except OutOfTime:
                break
            except ExperimentError:
                raise
            except Exception as error:
                words = f"failed: {type(error).__name__}: {' '.join(str(error).split())}"
                failed = True
            took = duration(time.monotonic() - began)
            found.append(_Ended(f"{each.name}: {words:.200}; {took}", failed))
        return found

    def _data(self, task: Task) -> Data:
        if task not in self._loaded:
            self._loaded[task] = task.load()
        return self._loaded[task]


def _units(runs: Sequence[Run]) -> list[list[Run]]:
    """Returns runs in groups that begin with the same run, so that one process has them."""
    found: dict[str, list[Run]] = {}
    for each in runs:
        found.setdefault(each.root.name, []).append(each)
    return list(found.values())


@contextlib.contextmanager
def _in_worker(folder: Path, minutes: float) -> Generator[Callable[[list[Run]], list[_Ended]]]:
    """Yields what a process calls with each unit."""
    queue = Queue(folder, minutes)
    with queue.deadline.of_sigterm():
        yield queue.carry_out


def say(line: str) -> None:
    """Shows a line at once."""
    print(line, flush=True)


def _words(run: Run, result: Result) -> str:
    """The main scores of a run."""
    if result.status != "done":
        return f"{result.status}: {result.error}"
    scores = result.scores[run.task.views[0]]
    return ", ".join(f"{length}: {value}" for length, value in scores.items())
