"""Executors of `concurrent.futures`: processes of this machine, or whatever a function returns.

Each process has a processor of its own: models of this size leave a second one half idle, and a run
rounds alike wherever it has one. On GPUs and TPUs it has a chip of its own: it is chosen before the
process imports JAX, which this module does not.
"""

import contextlib
import fcntl
import importlib
import multiprocessing
import os
import signal
import tempfile
from collections.abc import Sequence
from concurrent.futures import Executor, ProcessPoolExecutor
from typing import Any

from experiments.errors import ConfigError

EVENTS: Any = None
"""In a process of `processes`: the queue for its events."""


def processors() -> list[int]:
    """Returns the numbers of the processors that this process may use."""
    if hasattr(os, "sched_getaffinity"):
        return sorted(os.sched_getaffinity(0))
    return list(range(os.cpu_count() or 1))


def take_a_processor() -> None:
    """Gives this process a processor that none of its siblings has, as long as there are enough.

    Call it before JAX computes, which makes a thread per processor.
    """
    numbers = processors()
    if len(numbers) == 1 or not hasattr(os, "sched_setaffinity"):
        return
    name = os.path.join(tempfile.gettempdir(), f"posenc_jax-{os.getuid()}.lock")
    file = os.open(name, os.O_RDWR | os.O_CREAT | os.O_NOFOLLOW, 0o600)
    for number in numbers:
        with contextlib.suppress(BlockingIOError):  # A byte is held until the process ends.
            fcntl.lockf(file, fcntl.LOCK_EX | fcntl.LOCK_NB, 1, os.getppid() * 2**16 + number)
            break
    else:
        number = numbers[os.getpid() % len(numbers)]
    os.sched_setaffinity(0, {number})


def processes(
    count: int, events: Any = None, environments: Sequence[dict[str, str]] = ()
) -> ProcessPoolExecutor:
    """Returns an executor with processes of this machine, which Ctrl-C does not reach.

    Args:
      count: how many.
      events: a queue, which is `EVENTS` there.
      environments: variables for each process, such as a device's; with none it has a
        processor of its own.
    """
    spawn = multiprocessing.get_context("spawn")
    variables = spawn.SimpleQueue()
    for each in environments:
        variables.put(each)
    prepare = events, variables if environments else None
    return ProcessPoolExecutor(count, spawn, _prepare, prepare)


def _prepare(events: Any, variables: Any) -> None:
    global EVENTS
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    EVENTS = events
    if variables is None:
        take_a_processor()
    else:
        os.environ.update(variables.get())


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
