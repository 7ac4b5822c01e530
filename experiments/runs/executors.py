"""Executors of `concurrent.futures`: processes of this machine, or whatever a function returns.

Each process has a processor of its own: models of this size leave a second one half idle, and a run
rounds alike wherever it has one. On GPUs and TPUs it has a chip of its own: it is chosen before the
process imports JAX, which this module does not.
"""

import importlib
import multiprocessing
import os
import signal
import threading
from collections.abc import Sequence
from concurrent.futures import Executor, ProcessPoolExecutor
from typing import Any

from experiments.errors import ConfigError


def processors() -> list[int]:
    """Returns the numbers of the processors that this process may use."""
    if hasattr(os, "sched_getaffinity"):
        return sorted(os.sched_getaffinity(0))
    return list(range(os.cpu_count() or 1))


def processes(count: int, environments: Sequence[dict[str, str]] = ()) -> ProcessPoolExecutor:
    """Returns an executor with processes of this machine, which Ctrl-C does not reach.

    `environments` has variables for each process, such as a device's; with none it has a processor
    of its own, as long as there are enough.
    """
    spawn = multiprocessing.get_context("spawn")
    places, numbers = spawn.SimpleQueue(), processors()
    for i in range(count):
        places.put(environments[i] if environments else numbers[i % len(numbers)])
    return ProcessPoolExecutor(count, spawn, _prepare, (places,))


def _prepare(places: Any) -> None:
    """Takes a device or a processor, before JAX makes a thread per processor."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    place = places.get()
    if isinstance(place, dict):
        os.environ.update(place)
    elif hasattr(os, "sched_setaffinity"):
        os.sched_setaffinity(0, {place})
    threading.Thread(target=_end_with_parent, daemon=True).start()


def _end_with_parent() -> None:
    """Sends SIGTERM to this process once its parent has ended, however that ended."""
    parent = multiprocessing.parent_process()
    assert parent
    parent.join()
    os.kill(os.getpid(), signal.SIGTERM)


def executor_of(name: str) -> Executor:
    """Returns the executor that a function returns, `module:function` of --executor.

    Anything with `submit` and `shutdown` of `concurrent.futures.Executor` serves.
    """
    module, _, function = name.partition(":")
    try:
        executor = getattr(importlib.import_module(module), function)()
    except (Exception, SystemExit) as error:
        raise ConfigError(f"--executor: {name}: {type(error).__name__}: {error!s:.300}") from None
    if not (hasattr(executor, "submit") and hasattr(executor, "shutdown")):
        raise ConfigError(f"--executor: {name} returns no Executor, but {executor!r:.100}")
    return executor
