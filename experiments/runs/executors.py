"""Executors of `concurrent.futures`: processes of this machine, or tasks of a Ray cluster.

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
from concurrent.futures import Executor, Future, ProcessPoolExecutor
from typing import Any

from experiments.errors import ConfigError


def processors() -> list[int]:
    """Returns the numbers of the processors that this process may use."""
    if hasattr(os, "sched_getaffinity"):
        return sorted(os.sched_getaffinity(0))
    return list(range(os.cpu_count() or 1))


def default_count() -> int:
    """Returns how many processes make best use of this machine: one per processor, or one."""
    import jax

    return len(processors()) if jax.default_backend() == "cpu" else 1


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

    Args:
      count: how many.
      prepare: a function that each calls first, and its arguments.
    """
    spawn = multiprocessing.get_context("spawn")
    return ProcessPoolExecutor(count, spawn, _prepare, prepare)


def _prepare(function: Callable[..., None] | None = None, *arguments: Any) -> None:
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    take_a_processor()
    if function:
        function(*arguments)


def _call(function: Any, *arguments: Any, **options: Any) -> Any:
    return function(*arguments, **options)


class RayExecutor(Executor):
    """Tasks of a Ray cluster, each with a processor, and a GPU where the cluster has them.

    Ray runs the tasks of a node that is lost again, on another one.

    Args:
      address: of the cluster; "auto" for the one that this machine is a part of.

    Raises:
      ConfigError: if Ray is not installed, or the cluster is not reached.
    """

    def __init__(self, address: str):
        try:
            import ray
        except ModuleNotFoundError:
            raise ConfigError('--ray: needs Ray; pip install -e ".[ray]"') from None
        # Programs are compiled as they would be here.
        variables = {k: v for k, v in os.environ.items() if k.startswith(("JAX_", "XLA_"))}
        try:
            ray.init(address, runtime_env={"env_vars": variables}, logging_level="ERROR")
        except (ConnectionError, ValueError, RuntimeError) as error:
            words = " ".join(str(error).split())
            raise ConfigError(f"--ray: {address} is not reached: {words:.200}") from None
        self._ray, resources = ray, ray.cluster_resources()
        gpus = 1 if resources.get("GPU") else 0
        self._options = {"num_cpus": 1, "num_gpus": gpus}
        self.count = int(resources.get("GPU" if gpus else "CPU", 0))
        if not self.count:
            ray.shutdown()
            raise ConfigError(f"--ray: {address} has no processors")

    def submit(self, function: Any, /, *arguments: Any, **options: Any) -> Future:
        """Returns the future of a call on some node."""
        task = self._ray.remote(_call).options(**self._options)
        return task.remote(function, *arguments, **options).future()

    def shutdown(self, wait: bool = True, *, cancel_futures: bool = False) -> None:
        """Leaves the cluster; tasks that have not ended are cancelled."""
        self._ray.shutdown()
