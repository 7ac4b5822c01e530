"""The state of training in files, so that a run that was stopped continues with equal bits."""

import contextlib
import io
import json
import signal
import time
from collections.abc import Callable, Generator
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from experiments.errors import ResultsError
from experiments.runs import hosts
from experiments.runs.environment import environment
from experiments.runs.files import write_whole
from experiments.runs.results import versions_of
from experiments.training.layout import gathered


class OutOfTime(Exception):
    """The time is over; the state was written."""


class Deadline:
    """When to stop: after a time, or once the process is asked to by SIGTERM."""

    def __init__(self, minutes: float = float("inf")):
        """Starts the clock, which other processes can read."""
        self._at, self.asked = time.time() + 60 * minutes, False

    def over(self) -> bool:
        return self.asked or time.time() >= self._at

    @contextlib.contextmanager
    def of_sigterm(self, then: Callable[[], None] = lambda: None) -> Generator[None]:
        """Lets SIGTERM end the time, not the process, and call `then`. For the main thread."""

        def stop(*_):
            self.asked = True
            then()

        before = signal.signal(signal.SIGTERM, stop)
        try:
            yield
        finally:
            signal.signal(signal.SIGTERM, before)


class Checkpoints:
    """The two latest states of training in a folder, a file each, named by the step.

    A state is whole or not there.

    Args:
      deadline: when it is over, the state is written and OutOfTime raised.
      say: shows a line: of the progress, or about a state that cannot be used.
      every: seconds between two states.
      lines: seconds between two lines of the progress.
    """

    def __init__(
        self,
        path: Path,
        deadline: Deadline,
        say: Callable[[str], None],
        every: float = 60.0,
        lines: float = 20.0,
    ):
        self.path, self.deadline, self.say = path, deadline, say
        self.every, self.lines = every, lines
        self.written = self.printed = time.monotonic()

    def load(self, state: Any) -> tuple[Any, dict[str, list], tuple[float, float]] | None:
        """Returns a state like `state`, its curve and its times; None if there is none.

        The last step of the curve belongs to the state. Times are seconds of the clock and of the
        processors.
        """
        leaves, tree = jax.tree.flatten(state)
        stored = hosts.agreed(self._read(leaves) if hosts.leads() else None)
        if stored is None:
            return None
        read, facts = stored
        return jax.tree.unflatten(tree, map(jnp.asarray, read)), facts["curve"], facts["times"]

    def _read(self, leaves: list[Any]) -> tuple[list[np.ndarray], dict[str, Any]] | None:
        if self.path.is_symlink():  # States that cannot be read, or are old, are removed.
            raise ResultsError(f"{self.path}: is a symbolic link, and states are removed there")
        for file in reversed(self._files()):
            arrays = read_arrays(file) or {}
            read = [arrays.get(str(i), np.zeros(0)) for i in range(len(leaves))]
            facts = json.loads(str(arrays.get("facts", "{}")))
            known = facts.get("versions") == _versions()
            if known and all(a.shape == b.shape for a, b in zip(read, leaves, strict=True)):
                return read, facts
            reason = "cannot be used" if known or not facts else "is of other versions"
            self.say(f"{file}: {reason}; continuing from the state before it")
            file.unlink()
        return None

    def save(
        self, state: Any, curve: dict[str, list], times: tuple[float, float], total: int
    ) -> None:
        """Is called after each compiled call; may show the progress, and write the state.

        The curve and the times are as in `load`, `total` is the number of steps of training.
        """
        now, over = time.monotonic(), self.deadline.over()
        if now >= self.printed + self.lines:
            step, loss = curve["step"][-1], curve["loss"][-1]
            self.say(f"{self.path.parent.name}: step {step:,} of {total:,}, loss {loss:.3f}")
            self.printed = now
        over, due = hosts.agreed((over, over or now >= self.written + self.every))
        if not due:
            return
        arrays = {str(i): gathered(x) for i, x in enumerate(jax.tree.leaves(state))}
        facts = json.dumps({"curve": curve, "times": times, "versions": _versions()})
        if hosts.leads():
            file = self.path / f"{curve['step'][-1]}.npz"
            write_arrays(file, arrays | {"facts": np.array(facts)})
            for file in self._files()[:-2]:
                file.unlink()
        self.written = now
        if over:
            raise OutOfTime

    def _files(self) -> list[Path]:
        files = (file for file in self.path.glob("*.npz") if file.stem.isdecimal())
        return sorted(files, key=lambda file: int(file.stem))


def _versions() -> list[str]:
    return list(versions_of(environment()))


def write_arrays(path: Path, arrays: dict[str, Any]) -> None:
    """Writes named arrays to a file, atomically."""
    buffer = io.BytesIO()
    np.savez(buffer, **arrays)
    write_whole(path, buffer.getvalue())


def read_arrays(path: Path) -> dict[str, np.ndarray] | None:
    """Returns the named arrays of a file; None if it is missing or damaged."""
    try:  # A zip file has a checksum of each array.
        with np.load(io.BytesIO(path.read_bytes())) as file:
            return {name: file[name] for name in file.files}
    except Exception:  # NumPy evaluates the head of an array: damage raises nearly anything.
        return None
