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
    """A `train.Checkpoint` in a file, written about once a minute and at the deadline."""

    def __init__(self, path: Path, deadline: float, say: Callable[[str], None], every=60.0):
        self.path, self.deadline, self.say, self.every = path, deadline, say, every
        self.written = time.monotonic()

    def load(self, state):
        arrays = read_arrays(self.path)
        if arrays is None:
            if self.path.exists():
                self.say(f"{self.path}: cannot be read; the run begins anew")
            return None
        *leaves, curve = arrays
        if not fits(leaves, state):
            self.say(f"{self.path}: is of another model; the run begins anew")
            return None
        kept = json.loads(curve.tobytes())
        state = jax.tree.unflatten(jax.tree.structure(state), leaves)
        return state, kept["curve"], kept["seconds"]

    def save(self, state, curve, seconds):
        now = time.monotonic()
        if now < min(self.written + self.every, self.deadline):
            return
        words = json.dumps({"curve": curve, "seconds": seconds}).encode()
        arrays = [*jax.tree.leaves(state), np.frombuffer(words, np.uint8)]
        write_arrays(self.path, arrays)
        self.written = now
        if now >= self.deadline:
            raise OutOfTime


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
