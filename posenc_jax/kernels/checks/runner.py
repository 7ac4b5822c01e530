"""The clock of the steps: runs each family in processes of `python -m posenc_jax.kernels`.

A process writes a line to its log before each step and one after it; this one has the clock. A step
that does not end within its time, or that takes its process with it, is one line of the table: the
next process goes on after it, as it does after an error that leaves a GPU without answers.
"""

import dataclasses
import datetime
import json
import os
import re
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

from posenc_jax.engine.chips import Chip
from posenc_jax.kernels.checks.steps import FAMILIES

RUNS = (
    ("pallas", "forward", 2),
    ("pallas", "backward", 4),
    ("pallas", "tiles", 1),
    ("library", "backward", 1),
    ("xla", "backward", 2),
)
"""Implementations, families, and processes of each on GPUs: one traces and lowers in one thread.

"library" is the default for calls without a rule.
"""
LIBRARIES = {"tpu": "splash", "gpu": "cudnn"}
FAILED = ("wrong", "error", "hang", "died")
FIT = "for this chip"
"""What the machine says of the kernels where there are any."""
LOST = 75
"""The exit status of a process whose chip no longer answers."""
_MOST_LOSSES = 4  # Processes that a family may lose.
_WAIT = 0.05  # Seconds between looks at a log.


class DeviceError(RuntimeError):
    """The device does not start."""


@dataclasses.dataclass(frozen=True)
class Runner:
    """The settings of a run.

    Attributes:
      log: the file of all outcomes. Each process has a log in the same folder, named by its
        implementation, family and part, and a .txt file with its output.
      seconds: for all steps.
      timeout: seconds for one step after its program is compiled.
      patience: seconds for a process to start, and for a program to compile while others do.
      command: the program of the processes.
      show: prints a line.
      stopped: ends all processes once it is set.
    """

    log: Path
    seconds: float = 1200.0
    timeout: float = 40.0
    patience: float = 300.0
    command: tuple[str, ...] = (sys.executable, "-m", "posenc_jax.kernels")
    show: Callable[[str], None] = lambda text: print(text, flush=True)
    stopped: threading.Event = dataclasses.field(default_factory=threading.Event)

    def machine(self) -> dict[str, Any]:
        """Returns the machine as a process of its own sees it.

        Raises:
          DeviceError: if the device does not start.
        """
        self.log.parent.mkdir(parents=True, exist_ok=True)
        log = self.log.with_suffix(".machine")
        events, reason = self._watch(["--machine"], log, time.monotonic() + self.patience, {})
        if not events:
            raise DeviceError(f"the device does not start: {': '.join(reason or ())}")
        return events[0]["machine"]

    def run(self, platform: str) -> list[dict[str, Any]]:
        """Runs all steps of a platform, and returns a row for each.

        Processes run at once on GPUs, whose memory they can share.
        """
        end, runs = time.monotonic() + self.seconds, []
        most = max(1, (os.cpu_count() or 1) // 4) if platform == "gpu" else 1
        for word, family, count in RUNS:
            name = LIBRARIES.get(platform) if word == "library" else word
            count = min(count, most)
            runs += [(name, family, f"{i + 1}/{count}") for i in range(count) if name]
        with ThreadPoolExecutor(len(runs) if platform == "gpu" else 1) as pool:
            try:
                each = pool.map(lambda run: self._part(*run, end), runs)
                rows = judged([row for rows in each for row in rows])
            except BaseException:  # Ctrl-C: the pool waits for its threads.
                self.stopped.set()
                raise
        self.log.write_text("".join(json.dumps(row) + "\n" for row in rows))
        return rows

    def _part(
        self, implementation: str, family: str, part: str, end: float
    ) -> list[dict[str, Any]]:
        """Returns a row for each step of a part of a family, until the time `end`."""
        rows: list[dict[str, Any]] = []
        names: list[str] = []
        same = {"implementation": implementation, "family": family}
        log = self.log.with_suffix(f".{implementation}-{family}-{part[0]}")
        ahead, losses = ["--ahead"], 0
        while not names or len(rows) < len(names):
            arguments = [f"--{name}={word}" for name, word in same.items()]
            arguments += [f"--part={part}", f"--first={len(rows)}", *ahead]
            events, reason = self._watch(arguments, log, end, same)
            listed = (event["steps"] for event in events if "steps" in event)
            names = names or next(listed, [f"{family}: start of the process"])
            rows += [event for event in events if "outcome" in event]
            if len(rows) >= len(names):
                break
            if reason is not None and reason[0] == "died" and ahead and events:
                ahead = []  # The step that it ran, or one that was compiled ahead?
                continue
            ahead, losses = ["--ahead"], losses + 1
            if reason is not None and reason[0] != "skipped":
                place = {"outcome": reason[0], "place": reason[1]}
                rows.append({"step": names[len(rows)]} | same | place)
                self.show(line(rows[-1]))
            if losses == _MOST_LOSSES or (reason is not None and reason[0] == "skipped"):
                why = f"{losses} processes were lost" if losses == _MOST_LOSSES else "out of time"
                skipped = same | {"outcome": "skipped", "place": why}
                rows += [{"step": name} | skipped for name in names[len(rows) :]]
        return rows

    def _watch(
        self, arguments: Sequence[str], log: Path, end: float, same: dict[str, str]
    ) -> tuple[list[dict[str, Any]], tuple[str, str] | None]:
        """Runs a process until it ends, is late, or the time is over.

        Args:
          arguments: of the process.
          log: its file, which is emptied.
          end: when the time is over.
          same: entries of all rows.

        Returns:
          The lines that it wrote; and why it did not end well, as an outcome and a place, or None.
        """
        log.write_text("")
        events: list[dict[str, Any]] = []

        def read() -> bool:
            lines = log.read_text(encoding="utf-8").splitlines(keepends=True)
            new = [json.loads(x) for x in lines[len(events) :] if x.endswith("\n")]
            events.extend(event | same for event in new)
            for event in events[len(events) - len(new) :]:
                if "outcome" in event:
                    self.show(line(event))
            return bool(new)

        command = [*self.command, f"--log={log}", *arguments]
        # Choosing the fastest products of XLA takes most of the time of a step.
        flags = f"{os.environ.get('XLA_FLAGS', '')} --xla_gpu_autotune_level=0".strip()
        variables = {"XLA_PYTHON_CLIENT_PREALLOCATE": "false", "XLA_FLAGS": flags}
        if platforms := os.environ.get("JAX_PLATFORMS"):  # Expected numbers need the CPU.
            variables["JAX_PLATFORMS"] = ",".join(dict.fromkeys([*platforms.split(","), "cpu"]))
        text = log.with_name(f"{log.name}.txt")
        with text.open("ab") as out:
            process = subprocess.Popen(
                command, stdout=out, stderr=out, env=os.environ | variables, process_group=0
            )
        since, reason = time.monotonic(), None
        try:
            while process.poll() is None and reason is None:
                time.sleep(_WAIT)
                since = time.monotonic() if read() else since
                limit = self.timeout if events and "compiled" in events[-1] else self.patience
                if time.monotonic() > end or self.stopped.is_set():
                    reason = "skipped", "out of time"
                elif time.monotonic() - since > limit:
                    reason = "hang", f"no end within {limit:g} s"
        finally:
            if process.poll() is None:
                os.killpg(process.pid, signal.SIGKILL)
                process.wait()
        read()
        if reason is None and process.returncode not in (0, LOST):
            code = process.returncode
            status = f"exit status {code}" if code > 0 else signal.Signals(-code).name
            printed = text.read_text(encoding="utf-8", errors="replace").split("\n")
            last = next((x.strip()[-300:] for x in reversed(printed) if x.strip()), "no message")
            reason = "died", f"{status}: {last}"
        return events, reason


def write(log: Path, row: dict[str, Any]) -> None:
    """Appends a line to a log; it is on disk when this returns."""
    with log.open("ab") as stream:
        stream.write((json.dumps(row) + "\n").encode())
        stream.flush()
        os.fsync(stream.fileno())


def judged(rows: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """Returns rows whose outcome is "inconclusive" where another implementation is as wrong.

    Bounds of rounding errors were set without a chip. So where an array is wrong by a factor, an
    implementation is not at fault if another one has a third of its error, or more.
    """
    errors: dict[Any, dict[str, float]] = {}
    wrong = [_wrong_factor(row) for row in rows]
    for row, (array, error) in zip(rows, wrong, strict=True):
        errors.setdefault(array, {})[row["implementation"]] = error
    out = []
    for row, (array, error) in zip(rows, wrong, strict=True):
        others = (x for word, x in errors[array].items() if word != row["implementation"])
        unclear = array is not None and any(3 * x >= error for x in others)
        out.append(row | {"outcome": "inconclusive"} if unclear else row)
    return out


def _wrong_factor(row: dict[str, Any]) -> tuple[tuple[str, str] | None, float]:
    """Returns the case and the array that is wrong by a factor, or None, and its error."""
    match = re.match(r"([^:]+): .*?(-?[\d.]+) times what is expected$", row.get("place") or "")
    if row["outcome"] != "wrong" or not match:
        return None, 0.0
    # Backward steps have outputs, too.
    return (row["step"].replace("forward: ", "backward: "), match[1]), abs(float(match[2]) - 1)


def passed(rows: list[dict[str, Any]]) -> tuple[str, ...]:
    """Returns the dtypes in which all steps of the kernels passed; none if one did not.

    Args:
      rows: the outcomes of all steps; refusals say nothing.
    """
    ran = [x for x in rows if x["implementation"] == "pallas" and x["outcome"] != "refused"]
    wrong = any(x["outcome"] != "ok" for x in ran)
    if wrong or not {*FAMILIES} <= {x["family"] for x in ran}:
        return ()
    return tuple(sorted({x["dtype"] for x in ran if x["family"] == "backward"}))


def chip_of(about: dict[str, Any], dtypes: tuple[str, ...]) -> Chip | None:
    """Returns the row for the result of `machine`; None without a chip for kernels."""
    if about["kernels"] != FIT or about["jax"] != about["jaxlib"]:
        return None
    kind = about["device"].partition(": ")[2]
    today = datetime.date.today().isoformat()
    return Chip(kind, about["jax"], about["runtime"], dtypes, today, _commit())


def _commit() -> str:
    """Returns the commit of the sources, marked if they have changed since; "" without git."""
    describe = ["git", "describe", "--always", "--dirty", "--abbrev=8"]
    try:
        done = subprocess.run(describe, cwd=Path(__file__).parent, capture_output=True, text=True)
    except FileNotFoundError:
        return ""
    return done.stdout.strip()


def line(row: dict[str, Any]) -> str:
    """Returns a row of the table."""
    seconds = f"{row['seconds']:5.1f} s" if "seconds" in row else " " * 7
    outcome = f"{row['outcome']}: {row['place']}" if row.get("place") else row["outcome"]
    return f"{row['implementation']:7s} {row['step']:50s} {seconds}  {outcome}"


def table(rows: list[dict[str, Any]]) -> list[str]:
    """Returns the table of steps: every failure, and counts of the others."""
    lines = [line(row) for row in rows if row["outcome"] in (*FAILED, "inconclusive")]
    groups: dict[tuple[str, str], list[str]] = {}
    for row in rows:
        groups.setdefault((row["implementation"], row["family"]), []).append(row["outcome"])
    for (implementation, family), outcomes in groups.items():
        counts = ", ".join(f"{outcomes.count(x)} {x}" for x in dict.fromkeys(outcomes))
        lines.append(f"{implementation:7s} {family:12s} {counts}")
    return lines
