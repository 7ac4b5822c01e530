"""Queues of runs: every run without a result is carried out; failures and stops lose nothing."""

import argparse
import contextlib
import dataclasses
import math
import time
import traceback
from collections.abc import Callable, Generator, Iterable, Sequence
from pathlib import Path
from typing import Any

import jax

from experiments.errors import ConfigError, ExperimentError, ResultsError
from experiments.runs.checkpoints import Deadline, OutOfTime
from experiments.runs.results import PACK, VERSIONS, Result, pack
from experiments.runs.run import Run, RunFolder, commit, duration, here, load_data
from experiments.runs.workers import Workers, default_count
from experiments.settings.trust import add_trust, is_installed, is_project
from experiments.training import mesh as on_mesh


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Adds the flags that all commands with a queue have."""
    parser.add_argument("--shard", default="1/1", metavar="I/N", help="part of the runs to run")
    parser.add_argument("--minutes", type=_minutes, default=math.inf, help="time limit")
    parser.add_argument(
        "--workers",
        type=int,
        metavar="N",
        help="processes, each with a processor of its own (default: one per processor on CPUs)",
    )
    parser.add_argument(
        "--pack", action="store_true", help=f"then put the results of all runs in one file, {PACK}"
    )
    on_mesh.add_arguments(parser)
    add_trust(parser)


def _minutes(text: str) -> float:
    with contextlib.suppress(ValueError):
        if (minutes := float(text)) >= 0:
            return minutes
    raise argparse.ArgumentTypeError(f"must be a number from 0 on, got {text!r}")


def number_of_workers(options: argparse.Namespace) -> int:
    """Returns how many processes to use.

    Raises:
      ConfigError: if the number is below 1, or above 1 where processes would share devices.
    """
    if options.workers is None:
        return 1 if options.mesh else default_count()
    if options.workers < 1:
        raise ConfigError(f"--workers: must be at least 1, got {options.workers}")
    if options.workers > 1 and options.mesh:
        raise ConfigError("--workers: must be 1 with --mesh, which has all devices")
    if options.workers > 1 and (backend := jax.default_backend()) != "cpu":
        raise ConfigError(
            f"--workers: processes would share one {backend}; start a call per device that sees "
            "this device only (CUDA_VISIBLE_DEVICES), each with its --shard I/N"
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
    chosen = set(roots[part[0] - 1 :: part[1]])
    return [each for each in named.values() if each.root.name in chosen]


def differences(versions: set[tuple[str, ...]]) -> str:
    """Returns in words the entries in which versions differ.

    >>> differences({("jax 1", "numpy 2"), ("jax 3", "numpy 2")})
    'jax 1 and jax 3'
    """
    columns = zip(*sorted(versions), strict=True)
    return ", ".join(" and ".join(sorted(set(c))) for c in columns if len(set(c)) > 1)


def refuse_other_versions(
    runs: Iterable[Run], folder: Path, title: str, remedy: str = "remove these results"
) -> None:
    """Raises ResultsError if a run has a result of other versions, or of other code or text."""
    facts = here()
    now = tuple(f"{name} {facts.get(name)}" for name in VERSIONS)
    for each in runs:
        result = RunFolder(folder, each).result()
        if result and result.versions != now:
            raise ResultsError(
                f"{title}: has results of other versions: {differences({result.versions, now})}; "
                f"use the versions there, or {remedy}"
            )
        for name, digest in each.sources.items() if result else ():
            if result and result.environment.get(name, digest) != digest:
                raise ResultsError(f"{title}: {name} has changed since its results; {remedy}")


@dataclasses.dataclass(frozen=True)
class Step:
    """The progress of a run in training."""

    run: str
    step: int
    loss: float


@dataclasses.dataclass(frozen=True)
class Ended:
    """The end of a run.

    Attributes:
      run: its name.
      result: the result, None for a run that raised.
      error: of a run that raised, one line.
      seconds: from its start.
    """

    run: str
    result: Result | None
    error: str
    seconds: float


class Lines:
    """Prints a line for each run that has ended."""

    def __init__(self):
        self._count = self._ended = 0

    def start(self, runs: Sequence[Run]) -> None:
        """Begins with runs that have no result."""
        self._count, self._ended = len(runs), 0
        self._views = {each.name: each.task.views[0] for each in runs}

    def update(self, step: Step) -> None:
        """Shows nothing."""

    def finish(self, ended: Ended) -> None:
        """Prints the main scores of a run."""
        self._ended += 1
        words, result = f"failed: {ended.error}", ended.result
        if result and result.status == "done":
            scores = result.scores[self._views[ended.run]]
            words = ", ".join(f"{length}: {value}" for length, value in scores.items())
        elif result:
            words = f"{result.status}: {result.error}"
        took = duration(ended.seconds)
        say(f"[{self._ended}/{self._count}] {ended.run}: {words:.200}; {took}")

    def message(self, text: str) -> None:
        """Prints a line."""
        say(text)


class Queue:
    """Runs that are carried out one after the other, or in several processes.

    Attributes:
      status: 0, or 1 once a run failed.
      over: whether the time is over.
    """

    def __init__(
        self,
        folder: Path,
        minutes: float = math.inf,
        workers: int = 1,
        mesh: jax.sharding.Mesh | None = None,
        keep: bool = False,
        show: Any = None,
    ):
        """Starts the clock.

        Args:
          folder: of the folders of runs.
          minutes: after which it stops, with the states of unfinished runs written.
          workers: number of processes, each with a processor of its own.
          mesh: devices to train on; default: one.
          keep: whether to keep trained parameters.
          show: shows progress as `Lines` does, which is the default.
        """
        commit()  # Files may change while runs go on.
        self.folder, self.workers, self.mesh, self.keep = folder, workers, mesh, keep
        self.status, self.over = 0, False
        self.show = show or Lines()
        self.deadline = Deadline(minutes)
        self._ended = 0

    def work(self, runs: Sequence[Run]) -> None:
        """Carries out runs that have no result; one that raises does not stop the others.

        At the time limit, and on SIGTERM, the states of unfinished runs are written first.

        Raises:
          ResultsError: if another process works in a folder, or it cannot be written.
        """
        self.show.start(runs)
        units, self._ended = _units(runs), 0
        if self.workers == 1:
            with self.deadline.of_sigterm():
                for unit in units:
                    if not self.deadline.over():
                        self.carry_out(unit, self._handle)
        else:
            work = _in_worker, self.folder.absolute(), self.deadline.minutes(), self.keep
            with (
                Workers(min(self.workers, len(units)), *work) as workers,
                self.deadline.of_sigterm(workers.stop),
            ):
                for event in workers.answers(
                    units, lambda unit: unit[0].program, lambda: not self.deadline.over()
                ):
                    self._handle(event)
        if self._ended < len(runs):
            waiting = len(runs) - self._ended
            self.show.message(f"Time is over with {waiting} runs left; the same command continues.")
            self.over = True

    def _handle(self, event: Step | Ended | str) -> None:
        if isinstance(event, Step):
            self.show.update(event)
        elif isinstance(event, Ended):
            self._ended += 1
            self.status |= event.result is None
            self.show.finish(event)
        else:
            self.show.message(event)

    def carry_out(self, unit: list[Run], send: Callable[[Step | Ended | str], None]) -> None:
        """Carries out runs until the time is over, and sends their progress and their ends."""
        for each in unit:
            began, result, error = time.monotonic(), None, ""

            def report(step: int, loss: list[float], name: str = each.name) -> None:
                send(Step(name, step, sum(loss) / len(loss)))

            try:
                result = RunFolder(self.folder, each).carry_out(
                    send, self.deadline, self.keep, self.mesh, report
                )
            except OutOfTime:
                return
            except ExperimentError:
                raise
            except Exception as raised:
                error = _in_one_line(raised)
            send(Ended(each.name, result, error, time.monotonic() - began))


def _in_one_line(error: Exception) -> str:
    """Returns an exception, after the last line of the user's own code that it passed."""
    frames = reversed(traceback.extract_tb(error.__traceback__))
    users = (f for f in frames if not (is_project(f.filename) or is_installed(f.filename)))
    place = next((f"{Path(f.filename).name}:{f.lineno}, in {f.name}: " for f in users), "")
    return f"{place}{type(error).__name__}: {' '.join(str(error).split()):.300}"


def carry_out(
    options: argparse.Namespace,
    folder: Path,
    tasks: Iterable[Any],
    stages: Iterable[Iterable[Run]],
    keep: bool = False,
    show: Any = None,
) -> Queue:
    """Carries out the runs of a command, and returns their queue.

    Processes other than the first compute with it, and end here.

    Args:
      options: of `add_arguments`.
      folder: of the folders of runs.
      tasks: all tasks of the runs.
      stages: runs whose results are needed; later stages may depend on results of earlier ones.
      keep: whether to keep trained parameters.
      show: shows progress as `Lines` does, which is the default.

    Raises:
      ConfigError: for flags that do not fit the tasks or the machine.
      ResultsError: if another process works in a folder, or it cannot be written.
    """
    workers, mesh = number_of_workers(options), None
    if options.mesh:
        sizes = [size for task in tasks for size in sharded(task)]
        mesh = on_mesh.make(options.mesh, sizes)
    if jax.process_index() > 0:
        raise SystemExit(_follow(mesh))
    try:
        queue = Queue(folder, options.minutes, workers, mesh, keep, show)
        for runs in stages:
            waiting = [each for each in runs if RunFolder(folder, each).missing(keep)]
            queue.work(waiting)
            if queue.over:
                break
    except ExperimentError:
        on_mesh.tell_others(None)
        raise
    on_mesh.tell_others(None)
    if options.pack:
        say(f"Pack: {pack(folder)} results in {folder / PACK}")
    return queue


def sharded(task: Any) -> list[tuple[str, str, int]]:
    """Returns the sizes that a mesh has to divide."""
    return [
        ("data", f"{task.name}.train.batch", task.train.batch),
        ("tensor", f"{task.name}.model.num_heads", task.model.num_heads),
        ("sequence", f"{task.name}.train_length", task.train_length),
    ]


def _follow(mesh: jax.sharding.Mesh | None) -> int:
    """Trains with process 0 until it has ended; returns the exit status."""
    status = 0
    while (message := on_mesh.heard()) is not None:
        run, params = message
        try:
            run.train(load_data(run.task), params=params, mesh=mesh)
        except Exception:  # Process 0 reports it.
            status = 1
    return status


def _units(runs: Sequence[Run]) -> list[list[Run]]:
    """Returns runs in groups that begin with the same run, so that one process has them."""
    units: dict[str, list[Run]] = {}
    for each in runs:
        units.setdefault(each.root.name, []).append(each)
    return list(units.values())


@contextlib.contextmanager
def _in_worker(folder: Path, minutes: float, keep: bool) -> Generator[Callable[..., None]]:
    """Yields the function that a process calls with each unit."""
    queue = Queue(folder, minutes, keep=keep)
    with queue.deadline.of_sigterm():
        yield queue.carry_out


def say(line: str) -> None:
    """Prints a line at once."""
    print(line, flush=True)
