"""The work of processes in tests of workers, without the import of JAX, which takes seconds."""

import contextlib
import os
import signal
import time

from experiments.errors import ResultsError


@contextlib.contextmanager
def prepare(offset):
    """Yields the function of workers: it obeys strings, and returns larger numbers."""
    stopped = []
    before = signal.signal(signal.SIGTERM, lambda *_: stopped.append(1))

    def work(unit, send):
        if unit == "raise":
            raise ResultsError("no")
        if unit == "die":
            os.kill(os.getpid(), signal.SIGKILL)
        while unit == "wait" and not stopped:
            time.sleep(0.01)
        send("stopped" if unit == "wait" else (unit + offset, os.getpid()))

    yield work
    signal.signal(signal.SIGTERM, before)
