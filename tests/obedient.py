"""What the processes of tests of workers do. It does not import JAX, which takes seconds."""

import contextlib
import os
import signal
import time

from experiments.errors import ResultsError


@contextlib.contextmanager
def prepare(offset):
    """Yields what workers call: a string is obeyed, a number is answered by a larger one."""
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
