"""Queues of runs: every run without a result is carried out; failures and stops lose nothing.

The folder of results is the queue: any number of processes and machines may work on it. A run that
another holds is left out, and looked at again at the end.
"""

import argparse
import contextlib
import dataclasses
import math
import multiprocessing
import os
import signal
import threading
import time
from collections.abc import Callable, Iterable, Sequence
from concurrent.futures import FIRST_COMPLETED, Executor, Future, wait
from pathlib import Path
from typing import Any

import jax

from experiments.errors import ConfigError, ExperimentError, Locked, ResultsError
from experiments.runs import hosts
from experiments.runs.accelerators import look, variables
from experiments.runs.checkpoints import Deadline, OutOfTime
from experiments.runs.environment import device, set_device, usable_cores
from experiments.runs.executors import executor_of, processes
from experiments.runs.files import is_locked
from experiments.runs.results import PACK, RUNS, Kind, pack, versions_of
from experiments.runs.run import Work, commit, duration, here
from experiments.settings.trust import add_trust, in_one_line
from experiments.training.layout import Layout, layout_of


def add_arguments(parser: argparse.ArgumentParser, *, trains: bool = True) -> None:
    """Adds the flags of commands with a queue, and the flags of runs that train."""
    parser.add_argument("--minutes", type=minutes, default=math.inf, help="time limit")
    parser.add_argument(
        "--workers",
        type=int,
        metavar="N",
        help="processes, each with a processor, GPU or TPU chip of its own (default: "
        f"{'one for each' if trains else 'one, with all processors'})",
    )
    parser.add_argument(
        "--executor",
        metavar="MODULE:FUNCTION",
        help="a function that returns an executor with submit(), such as that of a cluster of "
        "dask, MPI or parsl, in place of processes of this machine",
    )
    parser.add_argument(
        "--pack", action="store_true", help=f"then put all results in one file, {PACK}"
    )
    if not trains:
        parser.set_defaults(devices=None, shard_parameters=False)
        return
    parser.add_argument(
        "--devices",
        type=int,
        metavar="N",
        help="train each model on N devices, those of all processes that srun, mpirun or a TPU "
        "pod started; the batch is divided",
    )
    parser.add_argument(
        "--shard-parameters",
        action="store_true",
        help="with --devices: each has a part of the parameters and of the optimiser's state",
    )
    add_trust(parser)


def minutes(text: str) -> float:
    """Returns the argument of `--minutes`."""
    with contextlib.suppress(ValueError):
        if (limit := float(text)) >= 0:
            return limit
    raise argparse.ArgumentTypeError(f"must be a number from 0 on, got {text!r}")


def default_count() -> int:
    """Returns how many processes make best use of this machine: one per processor, or device."""
    return len(variables(look())) or usable_cores()


def number_of_workers(options: argparse.Namespace) -> int:
    """Returns how many processes of this machine to use."""
    if options.shard_parameters and options.devices is None:
        raise ConfigError("--shard-parameters: needs --devices")
    ways = [x for x in ("workers", "executor", "devices") if getattr(options, x) is not None]
    if len(ways) > 1:
        raise ConfigError(f"--{ways[0]}: and --{ways[1]} exclude each other")
    if ways and ways != ["workers"]:
        return 1
    if options.workers is None:
        return default_count()
    if options.workers < 1:
        raise ConfigError(f"--workers: must be at least 1, got {options.workers}")
    if (devices := len(variables(look()))) and options.workers > devices:
        raise ConfigError(
            f"--workers: must be at most {devices}, one for each {look().platform}, got "
            f"{options.workers}"
        )
    return options.workers


def differences(versions: set[tuple[str, ...]]) -> str:
    """Returns in words the entries in which versions differ.

    >>> differences({("jax 1", "numpy 2"), ("jax 3", "numpy 2")})
    'jax 1 and jax 3'
    """
    columns = zip(*sorted(versions), strict=True)
    return ", ".join(" and ".join(sorted(set(c))) for c in columns if len(set(c)) > 1)


def refuse_other_versions(
    runs: Iterable[Work],
    results: Callable[[Any], Any],
    title: str,
    remedy: str = "take another --results",
) -> None:
    """Raises ResultsError if a run has a result of other versions, or of other code or text."""
    now = versions_of(here())
    known = [(run, result) for run in runs if (result := results(run))]
    for _, result in known:
        if (other := versions_of(result.environment)) != now:
            raise ResultsError(
                f"{title}: has results of other versions: {differences({other, now})}; "
                f"use the versions there, or {remedy}"
            )
    for run, result in known:
        if words := run.unlike(result):
            raise ResultsError(f"{title}: {run.name} {words}; {remedy}")
        for name, digest in run.sources.items():
            if result.environment.get(name, digest) != digest:
                raise ResultsError(f"{title}: {name} has changed since its results; {remedy}")


@dataclasses.dataclass(frozen=True)
class Ended:
    """The end of a run, by name: its result, or the error that it raised, in one line; its time."""

    run: str
    result: Any
    error: str
    seconds: float


@dataclasses.dataclass(frozen=True)
class Held:
    """The name of a run that another process holds."""

    run: str


Event = Ended | Held | ExperimentError | None
"""What becomes of a run; an error ends the queue, None is a run that was not begun or not ended."""

_POLL = 2.0
"""Seconds between two looks at runs that other processes hold."""


class Queue:
    """Runs that are carried out in this process or in others; each end is printed.

    Attributes:
      errors: of runs that raised, by name.
      held: names of the runs of the last call that other processes hold.
      over: whether the time is over.
    """

    def __init__(
        self,
        folder: Path,
        minutes: float = math.inf,
        workers: int = 1,
        errors: dict[str, str] | None = None,
        again: str = "the same command",
        wait: bool = False,
        executor: Executor | None = None,
        layout: Layout | None = None,
    ):
        """Starts the clock.

        Args:
          folder: of the folders of runs.
          minutes: after which it stops, with the states of unfinished runs written.
          workers: number of processes; 1: this one, with all its processors.
          errors: a dict for the errors of runs, by name.
          again: how the command that continues is called.
          wait: whether to wait for the runs that other processes hold.
          executor: carries out runs in place of processes.
          layout: of models on several devices, in this process.
        """
        commit()  # Files may change while runs go on.
        self.folder, self.workers = folder.absolute(), workers
        self.errors, self.over = {} if errors is None else errors, False
        self.held: set[str] = set()
        self.executor, self.layout = executor, layout
        self.deadline, self._again, self._wait = Deadline(minutes), again, wait

    def work(self, runs: Sequence[Work]) -> None:
        """Carries out runs that have no result; one that raises does not stop the others.

        At the time limit, and on SIGTERM, the states of unfinished runs are written first.
        """
        self._titles = {each.name: each.title for each in runs}
        self._count, self._ended, self._began = len(runs), 0, time.monotonic()
        self.held, free, shown = set(), list(runs), False
        with self.deadline.of_sigterm():
            while free and not self.deadline.over():
                self.held -= {each.name for each in free}
                self._carry_out(free)
                free = self._released(runs)
                while self._wait and self.held and not (free or self.deadline.over()):
                    if not shown:
                        say(f"Waiting for {len(self.held)} runs of other processes.")
                    shown = True
                    time.sleep(_POLL)
                    free = self._released(runs)
        waiting = self._count - self._ended
        self.over = bool(waiting) and self.deadline.over()
        if self.over:
            say(f"Time is over with {waiting} runs left; {self._again} continues.")

    def _released(self, runs: Iterable[Work]) -> list[Work]:
        """Returns the runs that other processes held, and hold no longer."""
        held = (each for each in runs if each.name in self.held)
        return [each for each in held if not is_locked(self.folder / each.name)]

    def _carry_out(self, runs: Sequence[Work]) -> None:
        """Tries each run once."""
        if self.executor:  # It writes states on its own: a queue that is asked to stop leaves it.
            self._submit(self.executor, runs)
        elif self.workers > 1:
            pool = processes(min(self.workers, len(runs)), variables(look()))
            with pool, self.deadline.of_sigterm(_stop_processes):
                try:
                    self._submit(pool, runs)
                except BaseException:
                    _stop_processes()
                    raise
        else:
            for run in runs:
                self._handle(carry_out_run(run, self.folder, self.deadline, self.layout))

    def _submit(self, pool: Executor, runs: Iterable[Work]) -> None:
        """Has runs carried out by an executor."""
        waiting = {pool.submit(_work, run, self.folder, self.deadline) for run in runs}
        try:
            while waiting and not (self.executor and self.deadline.asked):
                done, waiting = wait(waiting, 0.1, FIRST_COMPLETED)
                for future in done:
                    self._handle(self._event(future))
        finally:
            for future in waiting:
                future.cancel()

    def finish(self, ended: Ended) -> None:
        """Prints the main scores of a run, and the time left."""
        words = ended.result.summary if ended.result else f"failed: {ended.error}"
        took = duration(ended.seconds)
        if waiting := self._count - self._ended:
            passed = time.monotonic() - self._began
            remaining = time_left(passed, self._ended, waiting, self.workers)
            took += f" (about {duration(remaining)} left)"
        say(f"[{self._ended}/{self._count}] {self._titles[ended.run]}: {words:.200}; {took}")

    def _event(self, future: Future) -> Event:
        """Returns the event of a call; an error ended its process before its time."""
        try:
            return future.result()
        except Exception as error:  # Of a process that has ended.
            if self.deadline.over():
                return None
            raise ResultsError(
                f"a process that carried out runs ended ({in_one_line(error)}); {self._again} "
                "continues"
            ) from None

    def _handle(self, event: Event) -> None:
        if isinstance(event, ExperimentError):
            raise event
        if isinstance(event, Held):
            self.held.add(event.run)
        if isinstance(event, Ended):
            self._ended += 1
            if event.result is None:
                self.errors[event.run] = event.error
            self.finish(event)


def time_left(passed: float, ended: int, waiting: int, workers: int) -> float:
    """Returns the seconds that a queue still takes when a run ends.

    The other workers are, in the mean, half through theirs.

    >>> time_left(60.0, 1, 9, workers=1), time_left(60.0, 1, 9, workers=2)
    (540.0, 340.0)
    """
    half = min(workers - 1, waiting) / 2
    return passed / (ended + half) * (waiting - half)


def carry_out_run(
    run: Work, folder: Path, deadline: Deadline, layout: Layout | None = None
) -> Event:
    """Carries out a run, unless the time is over, and returns its event."""
    if deadline.over():
        return None
    began, result, error = time.monotonic(), None, ""
    try:
        result = run.carry_out(folder, say, deadline, layout)
    except OutOfTime:
        return None
    except Locked:
        return Held(run.name)
    except ExperimentError as raised:
        return raised
    except Exception as raised:
        error = in_one_line(raised)
    return Ended(run.name, result, error, time.monotonic() - began)


def _work(run: Work, folder: Path, deadline: Deadline) -> Event:
    """Carries out a run in another process, which ends with its state written after SIGTERM."""
    commit()  # Of the code that this process has just imported.
    is_main = threading.current_thread() is threading.main_thread()
    with deadline.of_sigterm() if is_main else contextlib.nullcontext():
        event = carry_out_run(run, folder, deadline)
    if is_main and deadline.asked:
        os.kill(os.getpid(), signal.SIGTERM)
    return event


def _stop_processes() -> None:
    for process in multiprocessing.active_children():
        process.terminate()


def refuse_without_run(options: argparse.Namespace) -> None:
    """Raises `ConfigError` for flags of a queue in a call without --run, which carries out none."""
    names = [
        n for n in ("workers", "executor", "devices", "pack", "seeds", "checkpoint") if n in options
    ]
    set_flags = [n for n in names if getattr(options, n) not in (None, False)]
    set_flags += ["minutes"] if options.minutes < math.inf else []
    if set_flags and not options.run:
        raise ConfigError(f"--{set_flags[0]}: needs --run")


def carry_out(
    options: argparse.Namespace,
    folder: Path,
    stages: Iterable[Iterable[Work]],
    errors: dict[str, str] | None = None,
    wait: bool = False,
    kind: Kind = RUNS,
) -> tuple[int, bool]:
    """Carries out the runs of a command.

    The command is called on several machines at a time: the one that ends last has all results.

    Args:
      options: of `add_arguments`.
      folder: of the folders of runs.
      stages: runs whose results are needed; later stages may depend on results of earlier ones.
      errors: as for `Queue`.
      wait: whether stages wait for the runs of other processes: later ones depend on them.
      kind: of results, for --pack.

    Returns:
      The exit status, 3 if the time is over with runs left, and whether other processes still
      hold runs, and will show all results.
    """
    if jax.config.jax_enable_x64:
        raise ConfigError("JAX_ENABLE_X64: models and tasks are of 32 bits; unset it")
    again, workers = continuing(options), number_of_workers(options)
    executor = executor_of(options.executor) if options.executor else None
    layout = None
    if options.devices is not None:
        hosts.join()
        layout = layout_of(options.devices, options.shard_parameters)
        if not hosts.leads():
            _follow(folder, layout)
            return 0, True
    try:
        if not layout:
            _take_devices(workers, executor)
        queue = Queue(folder, options.minutes, workers, errors, again, wait, executor, layout)
        for runs in stages:
            queue.work([each for each in runs if each.result(folder) is None])
            if queue.over:
                break
    except KeyboardInterrupt:
        layout = None  # The others are in the middle of a step, and end with this process.
        raise
    finally:
        if layout:
            hosts.agreed(None)  # There are no more runs.
        if executor:
            executor.shutdown(wait=False)
    if held := queue.held if not queue.over else ():
        names = ", ".join(sorted(held))
        say(f"Other processes hold {len(held)} runs, and show the results: {names:.300}")
    elif options.pack:
        try:
            say(f"Pack: {pack(folder, kind)} results in {folder / PACK}")
        except Locked:
            say("Pack: another process packs the results.")
    return 3 if queue.over else int(bool(queue.errors)), bool(held)


def _follow(folder: Path, layout: Layout) -> None:
    """Trains the runs of the first process along with it, as long as it has some."""
    with Deadline().of_sigterm():  # The first process stops all.
        while run := hosts.agreed():
            with contextlib.suppress(Exception):  # It is raised there too.
                run.follow(folder, layout)


def _take_devices(workers: int, executor: Executor | None) -> None:
    """Leaves devices to the processes that carry out runs, or takes one for this process."""
    if executor:
        say("Waiting for a process of --executor.")
        set_device(executor.submit(device).result())
    elif (devices := variables(look())) and workers > 1:
        set_device(f"{look().platform}: {look().kind}")
        jax.config.update("jax_platforms", "cpu")
    elif devices:
        os.environ.update(devices[0])


def continuing(options: argparse.Namespace) -> str:
    """Returns the name of the command that continues: --fresh would remove finished runs."""
    return f"the same command{' without --fresh' if getattr(options, 'fresh', False) else ''}"


def say(line: str) -> None:
    """Prints a line at once."""
    print(line, flush=True)
