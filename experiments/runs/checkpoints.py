"""The state of training in files, so that a run that was stopped continues with equal bits."""

import contextlib
import functools
import io
import logging
import shutil
import signal
import sys
import time
import zipfile
import zlib
from collections.abc import Callable, Generator, Iterable
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import orbax.checkpoint as ocp

from experiments.errors import ResultsError
from experiments.runs.files import write_whole


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


class OrbaxCheckpoint:
    """A `train.Checkpoint`: the two latest states in a folder, written while training goes on.

    A state is whole or not there. It can be read on another number of devices.

    Args:
      path: of the folder.
      deadline: when it is over, the state is written and OutOfTime raised.
      say: shows a line about a state that cannot be used.
      every: seconds between two states.
    """

    def __init__(
        self, path: Path, deadline: Deadline, say: Callable[[str], None], every: float = 60.0
    ):
        self.path, self.deadline, self.say, self.every = path, deadline, say, every
        self.written = time.monotonic()

    @functools.cached_property
    def _manager(self) -> ocp.CheckpointManager:
        if self.path.is_symlink():  # Orbax removes states that it cannot read, or needs no more.
            raise ResultsError(f"{self.path}: is a symbolic link, and states are removed there")
        options = ocp.CheckpointManagerOptions(max_to_keep=2, create=True)
        return ocp.CheckpointManager(self.path.absolute(), options=options)

    def load(self, state):
        if not self.path.exists():
            return None
        like = {
            k: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=x.sharding)
            for k, x in _named(state).items()
        }
        for step in sorted(self._manager.all_steps(), reverse=True):
            arguments = ocp.args.Composite(
                state=ocp.args.StandardRestore(like), facts=ocp.args.JsonRestore()
            )
            try:
                with _without_late_reads():
                    restored = self._manager.restore(step, args=arguments)
                wall, cpu = restored["facts"]["times"]
                curve = restored["facts"]["curve"]
                leaves = [restored["state"][name] for name in like]
                if _checksum(leaves) != restored["facts"]["checksum"]:
                    raise ValueError("the arrays are not those that were written")
            except Exception as error:  # Damaged files of arrays make Orbax raise Exception itself.
                reason = type(error).__name__
                self.say(
                    f"{self.path / str(step)}: cannot be used ({reason}); continuing from the "
                    "state before it"
                )
                self._manager.delete(step)
                continue
            return jax.tree.unflatten(jax.tree.structure(state), leaves), curve, (wall, cpu)
        return None

    def save(self, state, curve, times):
        now, over = time.monotonic(), self.deadline.over()
        if not over and now < self.written + self.every:
            return
        arguments = ocp.args.Composite(
            # Copies: the next steps are given the memory of `state`.
            state=ocp.args.StandardSave({k: jnp.copy(x) for k, x in _named(state).items()}),
            facts=ocp.args.JsonSave(
                {"curve": curve, "times": times, "checksum": _checksum(jax.tree.leaves(state))}
            ),
        )
        try:
            self._manager.save(curve["step"][-1], args=arguments)
            if over:
                self._manager.wait_until_finished()
        except Exception as error:  # A full disk raises other errors than OSError in threads.
            says = str(error).strip().partition("\n")[0]
            raise ResultsError(f"{self.path}: cannot be written: {says:.200}") from None
        self.written = now
        if over:
            raise OutOfTime

    def remove(self) -> None:
        """Removes the folder."""
        if "_manager" in vars(self):
            with contextlib.suppress(Exception):  # A write that failed is of no use any more.
                self._manager.close()
        shutil.rmtree(self.path, ignore_errors=True)


@contextlib.contextmanager
def _without_late_reads() -> Generator[None]:
    """Within it, and afterwards if it raises, reads that Orbax has left behind end without a word.

    At the first array that cannot be read Orbax closes its event loop. The reads of others end
    later, and Python would print a traceback for each.
    """
    hook, log = sys.unraisablehook, logging.getLogger("asyncio")

    def other_errors(unraisable: Any) -> None:
        says = str(unraisable.exc_value)
        if says != "Event loop is closed" and "was never awaited" not in says:
            hook(unraisable)

    def other_lines(record: logging.LogRecord) -> bool:
        return "exception was never retrieved" not in record.getMessage()

    sys.unraisablehook = other_errors
    log.addFilter(other_lines)
    yield
    sys.unraisablehook = hook
    log.removeFilter(other_lines)


def _named(state: Any) -> dict[str, jax.Array]:
    """Returns the leaves by number: Orbax stores names, and need not know the types of the tree."""
    return {f"{i:04d}": x for i, x in enumerate(jax.tree.leaves(state))}


def _checksum(leaves: Iterable[jax.Array]) -> int:
    """Returns a checksum of arrays: Orbax does not notice that a byte on disk has changed."""
    return functools.reduce(lambda crc, x: zlib.crc32(np.asarray(x).tobytes(), crc), leaves, 0)


def write_arrays(path: Path, arrays: dict[str, Any]) -> None:
    """Writes named arrays to a file, atomically."""
    buffer = io.BytesIO()
    np.savez(buffer, **arrays)
    write_whole(path, buffer.getvalue())


def read_arrays(path: Path) -> dict[str, np.ndarray] | None:
    """Returns the named arrays of a file; None if it is missing or damaged."""
    try:
        with np.load(io.BytesIO(path.read_bytes())) as file:
            return {name: file[name] for name in file.files}
    except (OSError, ValueError, KeyError, EOFError, zipfile.BadZipFile):
        return None
