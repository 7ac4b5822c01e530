"""The clock of the steps: runs each family in a process of `python -m posenc_jax.kernels`.

A process writes a line to the log before each step and one after it; this one has the clock. A step
that does not end within its time, or that takes its process with it, is one line of the table: the
next process goes on after it, as it does after an error that leaves a GPU without answers. Two
steps that hang, or four processes that are lost, end the steps of an implementation. At the end,
steps that failed run once more, on TPU with poisoned scratch memory and bounds checks, on GPU under
compute-sanitizer if it is on PATH.
"""

import dataclasses
import json
import os
import shutil
import signal
import subprocess
import sys
import time
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

SHARES = (
    ("pallas", "primitives", 0.08),
    ("library", "backward", 0.22),
    ("pallas", "forward", 0.38),
    ("pallas", "backward", 0.66),
    ("pallas", "decode", 0.75),
    ("pallas", "tiles", 0.94),
    ("xla", "backward", 1.0),
)
"""Implementations, families, and the part of the time after which each ends.

"library" is the default of the platform for calls without a rule on any chip: it comes early, so
that no other step takes its time. The backward pass has the forward pass in it.
"""
LIBRARIES = {"tpu": "splash", "gpu": "cudnn"}
CHECKS = "--xla_mosaic_on_device_checks=bounds --xla_jf_poison_vmem_allocations=true"
FAILED = ("wrong", "error", "hang", "died")
LOST = 75
"""The exit status of a process whose chip no longer answers."""
ENOUGH = {"hang": (2, "steps hung"), "lost": (4, "processes were lost")}
"""After how many of these an implementation has no more steps."""
_WAIT = 0.05  # Seconds between looks at the log.


class DeviceError(RuntimeError):
    """The device does not start."""


@dataclasses.dataclass(frozen=True)
class Contact:
    """The settings of a run.

    Attributes:
      log: the file of lines.
      seconds: for all steps, without the starts of processes and steps that hang; 0 runs none.
      timeout: seconds for one step after its program is compiled.
      patience: seconds for a process to start, with libraries on a cold disk, and for a program to
        compile while others do.
      pause: seconds before a second start of a process that ended before its first step; after one
        that was killed, a chip may be busy for a while.
      again: seconds for the second runs of steps that failed.
      shares: implementations, families, and the part of the time after which each ends; default:
        `SHARES`.
      arguments: more arguments of the processes, for tests.
      command: the program of the processes.
      show: prints a line.
    """

    log: Path
    seconds: float = 240.0
    timeout: float = 40.0
    patience: float = 120.0
    pause: float = 5.0
    again: float = 60.0
    shares: Sequence[tuple[str, str, float]] = ()
    arguments: tuple[str, ...] = ()
    command: tuple[str, ...] = (sys.executable, "-m", "posenc_jax.kernels")
    show: Callable[[str], None] = lambda text: print(text, flush=True)

    @property
    def errors(self) -> Path:
        """The file with the output of the processes."""
        return self.log.with_suffix(".txt")

    def machine(self) -> dict[str, Any]:
        """Returns the machine as a process of its own sees it.

        Raises:
          DeviceError: if the device does not start.
        """
        self.log.parent.mkdir(parents=True, exist_ok=True)
        self.log.write_text("")
        self.errors.write_text("")
        rows, reason, _ = self._watch(["--machine"], self.patience)
        for row in rows:
            if "machine" in row:
                return row["machine"]
        words = ": ".join(filter(None, reason)) or self._last_words()
        raise DeviceError(f"the device does not start: {words}")

    def run(self, platform: str) -> list[dict[str, Any]]:
        """Runs all steps of a platform, and returns a row for each."""
        used, rows = 0.0, []
        lost: dict[str, Counter[str]] = {}
        if self.seconds <= 0:
            return []
        for implementation, family, share in self.shares or SHARES:
            if implementation == "pallas" and platform not in LIBRARIES and not self.arguments:
                continue  # There are no kernels, but for the interpreter.
            name = LIBRARIES.get(platform) if implementation == "library" else implementation
            if name is not None:
                allowed, count = share * self.seconds - used, lost.setdefault(name, Counter())
                more, seconds = self._family(name, family, allowed, count)
                rows, used = rows + more, used + seconds
        end = time.monotonic() + self.again
        for row in rows:
            if row["outcome"] in FAILED and time.monotonic() < end:
                row["second run"] = self._once_more(platform, row, end - time.monotonic())
        return rows

    def _family(
        self, implementation: str, family: str, allowed: float, lost: Counter[str]
    ) -> tuple[list[dict[str, Any]], float]:
        """Returns a row for each step of a family, and the seconds that they took.

        Args:
          implementation, family: whose steps.
          allowed: seconds for them.
          lost: how many steps of the implementation hung, and how many processes were lost.
        """
        used = 0.0
        rows: list[dict[str, Any]] = []
        names: list[str] | None = None
        same = {"implementation": implementation, "family": family}
        arguments = [f"--implementation={implementation}", f"--family={family}"]
        ahead, started = ["--ahead"], True
        if end := _end(lost):
            self.show(f"{implementation} {family}: left out, {end}")
            return [], 0.0
        while names is None or len(rows) < len(names):
            command = [*arguments, f"--first={len(rows)}", *ahead]
            events, (outcome, place), seconds = self._watch(command, allowed - used, same)
            used += seconds
            listed = (row["steps"] for row in events if "steps" in row)
            names = next(listed, names or [f"{family}: start of the process"])
            rows += [row for row in events if "outcome" in row]
            if outcome == "died" and started and not events:
                started = False
                time.sleep(self.pause)
                continue
            if outcome == "died" and ahead and any("steps" in row for row in events):
                ahead = []  # The step that it ran, or one that was compiled ahead?
                continue
            ahead, started = ["--ahead"], True
            if outcome != "out of time":
                lost["hang" if outcome == "hang" else "lost"] += len(rows) < len(names)
            for name in names[len(rows) :] if outcome != "lost" else ():
                late = outcome == "out of time"
                row = {"step": name, "outcome": "skipped" if late else outcome or "died"}
                row = row | same | {"place": place or "the process ended"}
                write(self.log, row)
                rows.append(row)
                if not late:
                    self.show(line(row))
                    break
            if end := _end(lost):
                skipped = {"outcome": "skipped", "place": end}
                rows += [{"step": name} | same | skipped for name in names[len(rows) :]]
        return rows, used

    def _once_more(self, platform: str, row: dict[str, Any], allowed: float) -> str:
        """Returns the outcome of a step with all checks that the platform has."""
        environment, command = {}, []
        if platform == "tpu":
            flags = f"{os.environ.get('LIBTPU_INIT_ARGS', '')} {CHECKS}".strip()
            environment = {"JAX_PALLAS_POISON_BUFFERS": "true", "LIBTPU_INIT_ARGS": flags}
        elif platform == "gpu":
            environment = {"CUDA_LAUNCH_BLOCKING": "1"}
            command = ["compute-sanitizer"] if shutil.which("compute-sanitizer") else []
        arguments = [f"--implementation={row['implementation']}", f"--family={row['family']}"]
        arguments.append(f"--only={row['step']}")
        events, reason, _ = self._watch(arguments, allowed, None, environment, command)
        for event in events:
            if "outcome" in event:
                return said(event)
        return ": ".join(filter(None, reason)) or "not run"

    def _watch(
        self,
        arguments: Sequence[str],
        allowed: float,
        same: dict[str, str] | None = None,
        environment: dict[str, str] | None = None,
        before: Sequence[str] = (),
    ) -> tuple[list[dict[str, Any]], tuple[str, str], float]:
        """Runs a process until it ends, is late, or the time is over.

        Args:
          arguments: of the process.
          allowed: seconds for its steps.
          same: entries for all rows, which are shown as they come; or None to show none.
          environment: more variables.
          before: a program that runs the process.

        Returns:
          The lines that it wrote; how it ended if not by itself, an outcome and a reason; and the
          seconds of its steps, without one that hung.
        """
        events: list[dict[str, Any]] = []
        place = self.log.stat().st_size

        def read():
            nonlocal place
            text = _after(self.log, place)
            place += len(text)
            for row in map(json.loads, text.splitlines()):
                events.append(row | (same or {}))
                if same is not None and "outcome" in row:
                    self.show(line(events[-1]))
            return bool(text)

        command = [*before, *self.command, f"--log={self.log}", *arguments, *self.arguments]
        # All devices' memory is for one process at a time, which frees it at its end.
        variables = os.environ | {"XLA_PYTHON_CLIENT_PREALLOCATE": "false"} | (environment or {})
        with self.errors.open("ab") as errors:
            process = subprocess.Popen(
                command, stdout=errors, stderr=errors, env=variables, process_group=0
            )
        since, reason, began = time.monotonic(), ("", ""), None
        try:
            while process.poll() is None and not reason[0]:
                time.sleep(_WAIT)
                now = time.monotonic()
                if read():
                    began, since = began or now, now
                limit = self.timeout if events and "compiled" in events[-1] else self.patience
                limit = allowed if before else limit  # A checker is slow.
                if now - since > limit:
                    reason = "hang", f"no end within {limit:g} s"
                elif began is not None and now - began > allowed:
                    reason = "out of time", "out of time"
        finally:
            if process.poll() is None:
                os.killpg(process.pid, signal.SIGKILL)
                process.wait()
        read()
        if not reason[0] and process.returncode:
            code = process.returncode
            if code == LOST and any("outcome" in row for row in events):
                return events, ("lost", ""), time.monotonic() - (began or since)
            status = f"exit status {code}" if code > 0 else signal.Signals(-code).name
            reason = "died", f"{status}: {self._last_words()}"
        ended = since if reason[0] == "hang" else time.monotonic()
        return events, reason, ended - began if began is not None else 0.0

    def _last_words(self) -> str:
        """Returns the last line that a process printed."""
        with self.errors.open("rb") as stream:
            stream.seek(max(0, self.errors.stat().st_size - 4000))
            lines = stream.read().decode(errors="replace").split("\n")
        return next((x.strip()[-300:] for x in reversed(lines) if x.strip()), "no message")


def _end(lost: Mapping[str, int]) -> str:
    """Returns why an implementation has no more steps, in words; nothing if it has."""
    words = (f"{lost[x]} {what}" for x, (count, what) in ENOUGH.items() if lost[x] >= count)
    return next(words, "")


def write(log: Path, row: dict[str, Any]) -> None:
    """Appends a line to a log; it is on disk when this returns."""
    with log.open("ab") as stream:
        stream.write((json.dumps(row) + "\n").encode())
        stream.flush()
        os.fsync(stream.fileno())


def _after(log: Path, start: int) -> bytes:
    """Returns the whole lines of a log from a place on."""
    with log.open("rb") as stream:
        stream.seek(start)
        text = stream.read()
    return text[: text.rfind(b"\n") + 1]


def said(row: dict[str, Any]) -> str:
    """Returns the outcome of a row in words."""
    return f"{row['outcome']}: {row['place']}" if row.get("place") else row["outcome"]


def line(row: dict[str, Any]) -> str:
    """Returns a row of the table."""
    seconds = f"{row['seconds']:5.1f} s" if "seconds" in row else " " * 7
    return f"{row['implementation']:7s} {row['step']:50s} {seconds}  {said(row)}"


def table(rows: list[dict[str, Any]]) -> list[str]:
    """Returns the table of steps: every failure with its second run, and counts of the others."""
    lines = []
    for row in rows:
        if row["outcome"] in FAILED:
            lines.append(line(row))
            lines.append(f"        once more, with checks: {row.get('second run', 'out of time')}")
    groups: dict[tuple[str, str], list[str]] = {}
    for row in rows:
        groups.setdefault((row["implementation"], row["family"]), []).append(row["outcome"])
    for (implementation, family), outcomes in groups.items():
        counts = ", ".join(f"{outcomes.count(x)} {x}" for x in dict.fromkeys(outcomes))
        lines.append(f"{implementation:7s} {family:12s} {counts}")
    return lines
