"""The state of training in files, so that a run that was stopped continues with equal bits."""

import io
import json
import time
import zipfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import jax
import numpy as np

from experiments.files import write_whole


class OutOfTime(Exception):
    """The time limit is over; the state was written."""


class FileCheckpoint:
    """A `train.Checkpoint` in a file and the one before it.

    Args:
      path: of the file; `previous` is appended to the name of the one before it.
      deadline: of `time.monotonic`; then the state is written, and OutOfTime raised.
      say: shows a line about a file that cannot be used.
      every: seconds between two writes.
    """

    def __init__(
        self, path: Path, deadline: float, say: Callable[[str], None], every: float = 60.0
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
        now = time.monotonic()
        if now < min(self.written + self.every, self.deadline):
            return
        words = json.dumps({"curve": curve, "times": times}).encode()
        arrays = [*jax.tree.leaves(state), np.frombuffer(words, np.uint8)]
        if self.path.exists():
            self.path.replace(self.previous)
        write_arrays(self.path, arrays)
        self.written = now
        if now >= self.deadline:
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
