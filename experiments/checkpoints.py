"""The state of training in files, so that a run that was stopped continues with equal bits."""

import contextlib
import io
import json
import signal
import time
import zipfile
from collections.abc import Callable, Generator
from pathlib import Path
from typing import Any

import jax
import numpy as np

from experiments.files import write_whole


class OutOfTime(Exception):
    """The time is over; the state was written."""


class Deadline:
    """When to stop: after a time, or once the process is asked to by SIGTERM."""

    def __init__(self, minutes: float = float("inf")):
        """Starts the clock."""
        self._at = time.monotonic() + 60 * minutes

    def over(self) -> bool:
        """Returns whether the time is over."""
        return self.minutes() <= 0

    def minutes(self) -> float:
        """Returns the time that is left."""
        return (self._at - time.monotonic()) / 60

    @contextlib.contextmanager
    def of_sigterm(self, then: Callable[[], None] = lambda: None) -> Generator[None]:
        """Within it, SIGTERM ends the time in place of the process. For the main thread.

        Args:
          then: called next, by the handler of the signal.
        """

        def stop(*_):
            self._at = float("-inf")
            then()

        before = signal.signal(signal.SIGTERM, stop)
        try:
            yield
        finally:
            signal.signal(signal.SIGTERM, before)


class FileCheckpoint:
    """A `train.Checkpoint` in a file and the one before it.

    Args:
      path: of the file; `previous` is appended to the name of the one before it.
      deadline: when it is over, the state is written and OutOfTime raised.
      say: shows a line about a file that cannot be used.
      every: seconds between two writes.
    """

    def __init__(
        self, path: Path, deadline: Deadline, say: Callable[[str], None], every: float = 60.0
    ):
        self.path, self.deadline, self.say, self.every = path, deadline, say, every
        self.previous = path.with_name(f"{path.name}.previous")
        self.written = time.monotonic()

    def load(self, state):
        for path in (self.path, self.previous):
            arrays = read_arrays(path)
            if arrays is not None and fits(arrays[:-1], state):
                kept = json.loads(arrays[-1].tobytes())
                state = jax.tree.unflatten(jax.tree.structure(state), arrays[:-1])
                wall, cpu = kept["times"]
                return state, kept["curve"], (wall, cpu)
            if path.exists():
                self.say(f"{path}: cannot be used; continuing from what was written before it")
        return None

    def save(self, state, curve, times):
        now, over = time.monotonic(), self.deadline.over()
        if not over and now < self.written + self.every:
            return
        words = json.dumps({"curve": curve, "times": times}).encode()
        arrays = [*jax.tree.leaves(state), np.frombuffer(words, np.uint8)]
        if self.path.exists():
            self.path.replace(self.previous)
        write_arrays(self.path, arrays)
        self.written = now
        if over:
            raise OutOfTime

    def remove(self) -> None:
        """Removes both files."""
        self.path.unlink(missing_ok=True)
        self.previous.unlink(missing_ok=True)


def write_arrays(path: Path, arrays: list[Any]) -> None:
    """Writes arrays to a file in their order, atomically."""
    buffer = io.BytesIO()
    named: dict[str, Any] = {f"{i:04d}": np.asarray(x) for i, x in enumerate(arrays)}
    np.savez(buffer, **named)
    write_whole(path, buffer.getvalue())


def read_arrays(path: Path) -> list[np.ndarray] | None:
    """Returns the arrays of a file in their order; None if it is missing or damaged."""
    try:
        with np.load(io.BytesIO(path.read_bytes())) as file:
            return [file[name] for name in sorted(file.files)]
    except (OSError, ValueError, KeyError, EOFError, zipfile.BadZipFile):
        return None


def fits(arrays: list[np.ndarray], like: Any) -> bool:
    """Returns whether arrays have the shapes and dtypes of the leaves of a tree."""
    wanted = [(x.shape, x.dtype) for x in jax.tree.leaves(like)]
    return [(x.shape, x.dtype) for x in arrays] == wanted
