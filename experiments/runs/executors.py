"""Processes of this machine for `concurrent.futures`.

Each process has a processor of its own: models of this size leave a second one half idle, and a run
rounds alike wherever it has one.
"""

import contextlib
import fcntl
import multiprocessing
import os
import signal
import tempfile
from collections.abc import Callable
from concurrent.futures import ProcessPoolExecutor
from typing import Any

from experiments.runs.environment import processors


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


def processes(count: int, *prepare: Any) -> ProcessPoolExecutor:
    """Returns an executor with processes of this machine, which Ctrl-C does not reach.

    Each first calls `prepare`: a function and its arguments.
    """
    spawn = multiprocessing.get_context("spawn")
    return ProcessPoolExecutor(count, spawn, _prepare, prepare)


def _prepare(function: Callable[..., None] | None = None, *arguments: Any) -> None:
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    take_a_processor()
    if function:
        function(*arguments)
