"""Processes that work side by side, each on a processor of its own.

Models of this size leave a second processor half idle: two runs side by side take less time than
one after the other.
"""

import contextlib
import itertools
import multiprocessing
import os
import signal
import sys
from collections.abc import Callable, Hashable, Iterator, Mapping, Sequence
from multiprocessing.connection import Connection, wait
from typing import Any

from experiments.errors import ConfigError, ResultsError


def processors() -> list[int]:
    """Returns the numbers of the processors that this process may use, as far as they are known."""
    if hasattr(os, "sched_getaffinity"):
        return sorted(os.sched_getaffinity(0))
    return list(range(os.cpu_count() or 1))


def default_count() -> int:
    """Returns how many processes make best use of this machine: one per processor, or one."""
    import jax

    return len(processors()) if jax.default_backend() == "cpu" else 1


class Workers:
    """Processes that carry out units of work.

    Args:
      count: of processes.
      prepare: called once in each process, with `arguments`; returns a context of what is called
        with each unit. Ctrl-C does not reach it; `stop` sends it SIGTERM.
      arguments: of `prepare`.
    """

    def __init__(
        self,
        count: int,
        prepare: Callable[..., contextlib.AbstractContextManager[Callable[[Any], Any]]],
        *arguments: Any,
    ):
        spawn = multiprocessing.get_context("spawn")
        self._processes = {}
        for number in itertools.islice(itertools.cycle(processors()), count):
            pipe, other = spawn.Pipe()
            words = other, number, prepare, arguments
            process = spawn.Process(target=_serve, args=words, daemon=True)
            process.start()
            other.close()
            self._processes[pipe] = process

    def __enter__(self):
        return self

    def __exit__(self, *error: object) -> None:
        """Stops the processes, and waits until they have written what they have."""
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
        """Yields answers in the order in which they come.

        Args:
          units: the work.
          kind: of a unit; a process prefers units of the kind that it had before.
          go_on: whether to begin with more units.

        Raises:
          ResultsError: if a process ends.
          Exception: what a process raised.
        """
        left, idle = list(units), set(self._processes)
        kinds: dict[Connection, Hashable] = dict.fromkeys(self._processes)
        while True:
            for pipe in list(idle) if go_on() else ():
                if left:
                    unit = min(left, key=lambda u: _rank(kind(u), pipe, kinds))
                    left.remove(unit)
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
                idle.add(pipe)
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
                pipe.send(work(unit))
    except EOFError:
        pass
    except Exception as error:
        pipe.send(error)


class RayWorkers:
    """Actors of a Ray cluster in place of processes, up to one per processor of the cluster.

    On a cluster with GPUs there is up to one per GPU, which sees this GPU only. Nodes need the same
    environment and the same folders. An actor that ends is not replaced.

    Args:
      address: of the cluster, such as "auto"; None starts one on this machine.
      most: actors.
      prepare, arguments: as for `Workers`.
    """

    def __init__(
        self,
        address: str | None,
        most: int,
        prepare: Callable[..., contextlib.AbstractContextManager[Callable[[Any], Any]]],
        *arguments: Any,
    ):
        try:
            import ray
        except ModuleNotFoundError:
            raise ConfigError('--ray: needs pip install "posenc_jax[ray]"') from None
        self._ray, environment = ray, {"PYTHONPATH": os.pathsep.join(filter(None, sys.path))}
        ray.init(
            address=address,
            include_dashboard=False,
            log_to_driver=False,
            runtime_env={"env_vars": environment},
        )
        found = ray.cluster_resources()
        gpus = int(found.get("GPU", 0))
        count = min(most, gpus or int(found["CPU"]))
        actor = ray.remote(num_cpus=1, num_gpus=min(gpus, 1))(_Actor)
        self._actors: list[Any] = [actor.remote(prepare, *arguments) for _ in range(count)]

    def __enter__(self):
        return self

    def __exit__(self, *error: object) -> None:
        self._ray.shutdown()

    def stop(self) -> None:
        """Stops the actors; what they wrote last is kept."""
        for actor in self._actors:
            self._ray.kill(actor)

    def answers(
        self, units: Sequence[Any], kind: Callable[[Any], Hashable], go_on: Callable[[], bool]
    ) -> Iterator[Any]:
        """Yields answers as `Workers.answers` does."""
        from ray.exceptions import RayActorError, RayTaskError

        left, busy = list(units), {}
        kinds: dict[Any, Hashable] = dict.fromkeys(self._actors)
        while True:
            for actor in self._actors:
                if left and go_on() and actor not in busy.values():
                    unit = min(left, key=lambda u: _rank(kind(u), actor, kinds))
                    left.remove(unit)
                    kinds[actor] = kind(unit)
                    busy[actor.work.remote(unit)] = actor
            if not busy:
                return
            (ready, *_), _ = self._ray.wait(list(busy))
            del busy[ready]
            try:
                yield self._ray.get(ready)
            except RayTaskError as error:
                raise error.cause from None
            except RayActorError as error:
                what = str(error).partition("\n")[0]
                raise ResultsError(f"{what}; the same command continues") from None


class _Actor:
    def __init__(self, prepare: Any, *arguments: Any):
        self._context = prepare(*arguments)
        self._work = self._context.__enter__()

    def work(self, unit: Any) -> Any:
        return self._work(unit)
