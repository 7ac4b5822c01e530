"""Correctness and times of attention on a GPU or a TPU, in nine minutes: `make gpu`, `make tpu`.

    python3 -m experiments.bench.accelerator --out FOLDER

It needs jax and numpy alone; parts that need more packages are left out without them. Everything is
in FOLDER, and is written as it is measured. Parts run one after the other, in processes of their
own, and end when their share of the time is over:

  steps     `posenc_jax.kernels`: both passes and decoding against float64, and tiles of the
            default size. steps.jsonl has their outcomes.
  times     attention with schemes by each implementation, `jax.nn`, and a bias per pair
            (`accelerator_times`): times.json
  torch     SDPA and FlexAttention of PyTorch on the same GPU (`accelerator_torch`): torch.json

page.md has the tables, log.txt the printed lines, and .txt files the output of the processes.
"""

import argparse
import importlib.util
import json
import os
import subprocess
import sys
import time
from pathlib import Path
from typing import Any, NoReturn

from experiments.errors import ConfigError, ExperimentError
from experiments.runs.environment import processor, usable_cores, versions
from experiments.runs.files import to_json, write_whole
from posenc_jax.kernels.checks.runner import FAILED, DeviceError, Runner, table

PARTS = {"steps": 0.5, "times": 0.36, "torch": 0.14}
"""Parts in their order, with their shares of the time; what one leaves is for those after it."""
LIBRARIES = ("numpy", "libtpu", "jax-cuda12-plugin", "jax-cuda13-plugin", "flax", "torch")
OURS = "pallas"
OTHERS = {
    "cudnn": '"cudnn"',
    "jax.nn cudnn": "`jax.nn`, cuDNN",
    "torch sdpa cudnn": "SDPA, cuDNN",
    "torch sdpa flash": "SDPA, flash",
    "torch flex": "FlexAttention",
    "xla": '"xla"',
    "jax.nn": "`jax.nn`",
    "default": "`None`",
}
"""Implementations and libraries, with their columns."""
ALONE = ("xla", "default")
"""Implementations whose times say nothing without others beside them."""


class _Parser(argparse.ArgumentParser):
    def error(self, message: str) -> NoReturn:
        raise ConfigError(message)


def main(arguments: list[str]) -> int:
    """Runs the parts; returns 2 for errors of the user, 1 if a step was wrong."""
    parser = _Parser(
        prog="python -m experiments.bench.accelerator",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    add = parser.add_argument
    add("--out", type=Path, required=True, metavar="FOLDER", help="for all results")
    add("--on", choices=("cpu", "gpu", "tpu"), help="an error where JAX runs on another platform")
    add("--minutes", type=float, default=9.0, help="time in all (default: 9)")
    add(
        "--parts", nargs="+", choices=PARTS, default=[*PARTS], metavar="PART", help="(default: all)"
    )
    try:
        options = parser.parse_args(arguments)
        return Run(options).run()
    except (ExperimentError, DeviceError) as error:
        print(f"error: {error}", file=sys.stderr)
        return 2
    except KeyboardInterrupt:
        print("Stopped.", file=sys.stderr)
        return 130


class Run:
    """One run of the parts."""

    def __init__(self, options: argparse.Namespace):
        self.options, self.out = options, options.out
        self.began, self.platform = time.monotonic(), ""
        self.steps: list[dict[str, Any]] = []

    def run(self) -> int:
        """Runs the parts, and returns the exit status."""
        about = Runner(self.out / "steps.jsonl").machine() | versions(LIBRARIES)
        about |= {"processor": processor(), "cores": usable_cores()}
        self.platform = about["device"].partition(":")[0]
        if self.options.on not in (None, self.platform):
            raise ConfigError(f"--on {self.options.on}: JAX runs on {self.platform} here")
        write_whole(self.out / "machine.json", to_json(about, indent=1) + "\n")
        self.say(*(f"{name}: {value}" for name, value in about.items()))
        chosen = {name: share for name, share in PARTS.items() if name in self.options.parts}
        start, used = time.monotonic(), 0.0
        total = self.began + 60 * self.options.minutes - start
        for name, share in chosen.items():
            used += share / sum(chosen.values())
            seconds = start + used * total - time.monotonic()
            self.say(f"== {time.monotonic() - self.began:.0f} s: {name}, at most {seconds:.0f} s")
            getattr(self, f"run_{name}")(seconds)
        page = tables(self.out)
        write_whole(self.out / "page.md", page + "\n")
        self.say(f"== {time.monotonic() - self.began:.0f} s", page)
        return int(any(row["outcome"] in FAILED for row in self.steps))

    def say(self, *lines: str) -> None:
        """Prints lines, and keeps them."""
        print(*lines, sep="\n", flush=True)
        with (self.out / "log.txt").open("a", encoding="utf-8") as stream:
            print(*lines, sep="\n", file=stream)

    def run_steps(self, seconds: float) -> None:
        """Runs the steps of the kernels."""
        # A program may compile for as long, while all families do; processes start, too.
        allowed = max(0.0, seconds - 40)
        log = self.out / "steps.jsonl"
        runner = Runner(log, allowed, patience=max(120.0, allowed), show=self.say)
        self.steps = runner.run(self.platform)
        self.say(*table(self.steps))

    def run_times(self, seconds: float) -> None:
        """Times attention."""
        file = self.out / "times.json"
        self.child("times", [f"--json={file}", f"--seconds={seconds - 20}"], seconds)

    def run_torch(self, seconds: float) -> None:
        """Times PyTorch."""
        if self.platform != "gpu" or importlib.util.find_spec("torch") is None:
            return self.say("torch: not installed, or no GPU")
        arguments = [f"--json={self.out / 'torch.json'}", f"--seconds={seconds - 15}"]
        self.child("torch", arguments, seconds, JAX_PLATFORMS="cpu")
        self.say(_tail(self.out / "torch.txt", 12))

    def child(self, name: str, arguments: list[str], seconds: float, **environment: str) -> None:
        """Runs a part in a process, and ends it when its time is over."""
        command = [sys.executable, "-m", f"experiments.bench.accelerator_{name}", *arguments]
        options: dict[str, Any] = {"env": os.environ | environment, "timeout": max(0.0, seconds)}
        try:
            with (self.out / f"{name}.txt").open("ab") as out:
                status = subprocess.run(command, stdout=out, stderr=out, **options).returncode
        except subprocess.TimeoutExpired:
            status = f"ended after {seconds:.0f} s"
        if status:
            self.say(f"{name}: {status}", _tail(self.out / f"{name}.txt", 3))


def _tail(path: Path, count: int) -> str:
    lines = path.read_text(encoding="utf-8", errors="replace").splitlines()
    return "\n".join(x[:300] for x in lines[-count:])


def tables(folder: Path) -> str:
    """Returns our milliseconds, and those of others as multiples of them, in Markdown."""
    paths = [folder / f"{name}.json" for name in ("times", "torch")]
    files = [json.loads(x.read_text(encoding="utf-8")) for x in paths if x.exists()]
    measured = [x for file in files for x in file.get("times", file.get("rows", ())) if "ms" in x]
    rows = {(x["name"], x["by"], x["what"], x["T"]): x for x in measured}
    columns = [by for by in OTHERS if any(by == key[1] for key in rows)]
    heads = f'"pallas", ms | TFLOP/s | {" | ".join(OTHERS[by] for by in columns)}'
    lines = [f"| | {heads} |", f"|---|{'---|' * (len(columns) + 2)}"]
    for name, what, length in dict.fromkeys((key[0], *key[2:]) for key in rows):
        ours = rows.get((name, OURS, what, length), {})
        ms = ours.get("ms")
        cells = [f"{ms:.3g}" if ms else "", f"{ours['TFLOP/s']:.0f}" if "TFLOP/s" in ours else ""]
        for by in columns:
            other = rows.get((name, by, what, length), {}).get("ms")
            text = f"{other / ms:.2f}" if ms and other else f"{other:.3g} ms" if other else ""
            cells.append(text)
        if any(text for text, by in zip(cells, ["", "", *columns], strict=True) if by not in ALONE):
            lines.append(f"| {name}, {what}, {length:,} | {' | '.join(cells)} |")
    return "\n".join(lines)


if __name__ == "__main__":
    raise SystemExit(main(sys.argv[1:]))
