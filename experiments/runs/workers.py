"""Worker processes, each on a processor of its own.

Models of this size leave a second processor half idle: two runs side by side take less time than
one after the other.
"""

import contextlib
import itertools
import multiprocessing
import os
import signal
from collections.abc import Callable, Hashable, Iterator, Mapping, Sequence
from multiprocessing.connection import Connection, wait
from typing import Any

from experiments.errors import ResultsError


def processors() -> list[int]:
    """Returns the numbers of the processors that this process may use."""
    if hasattr(os, "sched_getaffinity"):
        return sorted(os.sched_getaffinity(0))
    return list(range(os.cpu_count() or 1))


def default_count() -> int:
    """Returns how many processes make best use of this machine: one per processor, or one."""
    import jax

    return len(processors()) if jax.default_backend() == "cpu" else 1


_DONE = "done"  # A worker sends it after the answers to a unit.


class Workers:
    """Processes that carry out units of work.

    Args:
      count: number of processes.
      prepare: called once in each process, with `arguments`; returns a context of the function that
        is called with each unit and a function that sends an answer. Ctrl-C does not reach it;
        `stop` sends it SIGTERM.
      arguments: of `prepare`.
    """

    def __init__(
        self,
        count: int,
        prepare: Callable[..., contextlib.AbstractContextManager[Callable[..., None]]],
        *arguments: Any,
    ):
        spawn = multiprocessing.get_context("spawn")
        self._processes = {}
        for number in itertools.islice(itertools.cycle(processors()), count):
            pipe, other = spawn.Pipe()
            process = spawn.Process(
                target=_serve, args=(other, number, prepare, arguments), daemon=True
            )
            process.start()
            other.close()
            self._processes[pipe] = process

    def __enter__(self):
        return self

    def __exit__(self, *error: object) -> None:
        """Stops the processes, and waits until they have written their states."""
        if any(error):
            self.stop()
        for pipe, process in self._processes.items():
            with contextlib.suppress(OSError):
                pipe.send(None)
            process.join()
            pipe.close()

    def stop(self) -> None:
        """Sends SIGTERM to the processes."""
        for process in self._processes.values():
            process.terminate()

    def answers(
        self, units: Sequence[Any], kind: Callable[[Any], Hashable], go_on: Callable[[], bool]
    ) -> Iterator[Any]:
        """Yields answers in the order in which they come, any number per unit.

        Args:
          units: the work.
          kind: returns the kind of a unit; a process prefers units of the kind that it had before.
          go_on: returns whether to begin with more units.

        Raises:
          ResultsError: if a process ends.
          Exception: that a process raised.
        """
        waiting, idle = list(units), set(self._processes)
        kinds: dict[Connection, Hashable] = dict.fromkeys(self._processes)
        while True:
            for pipe in list(idle) if go_on() else ():
                if waiting:
                    unit = min(waiting, key=lambda u: _rank(kind(u), pipe, kinds))
                    waiting.remove(unit)
                    kinds[pipe] = kind(unit)
                    with contextlib.suppress(OSError):  # If it has ended, `recv` says so.
                        pipe.send(unit)
                    idle.remove(pipe)
            if len(idle) == len(self._processes):
                return
            for pipe in wait([p for p in self._processes if p not in idle]):
                assert isinstance(pipe, Connection)
                try:
                    answer = pipe.recv()
                except (EOFError, OSError):
                    if not go_on():  # `stop` reached it before it could listen.
                        idle.add(pipe)
                        continue
                    process = self._processes[pipe]
                    process.join()
                    raise ResultsError(
                        f"a process that carried out runs ended with status {process.exitcode}; "
                        "the same command continues"
                    ) from None
                if isinstance(answer, Exception):
                    raise answer
                if answer == _DONE:
                    idle.add(pipe)
                else:
                    yield answer


def _rank(kind: Hashable, pipe: Any, kinds: Mapping[Any, Hashable]) -> int:
    return 0 if kinds[pipe] == kind else 1 if kind not in kinds.values() else 2


def _serve(pipe: Connection, processor: int, prepare: Any, arguments: tuple) -> None:
    if hasattr(os, "sched_setaffinity"):
        os.sched_setaffinity(0, {processor})
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    try:
        with prepare(*arguments) as work:
            for unit in iter(pipe.recv, None):
                work(unit, pipe.send)
                pipe.send(_DONE)
    except EOFError:
        pass
    except Exception as error:
        pipe.send(error)
