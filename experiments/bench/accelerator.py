"""Correctness and times of attention on a GPU or a TPU, in nine minutes: `make gpu`, `make tpu`.

    python3 -m experiments.bench.accelerator --out FOLDER

It needs jax and numpy alone; parts that need more packages are left out without them. Everything is
in FOLDER, and is written as it is measured. Parts run one after the other, in processes of their
own, and end when their share of the time is over:

  steps     `posenc_jax.kernels`: both passes against "reference" on the CPU, and tiles of the
            default size: steps.jsonl
  train     training steps of 25 million parameters with the kernels, rows whole and packed
            (`accelerator_train`, needs flax and optax): train.json
  times     attention with schemes by each implementation, `jax.nn`, a bias per pair, and the shape
            of a released model (`accelerator_times`): times.json
  torch     SDPA and FlexAttention of PyTorch on the same GPU (`accelerator_torch`): torch.json
  schemes   every scheme by every implementation, gradients and decode steps
            (`accelerator_schemes`): schemes_1.jsonl and so on

page.md has the tables, log.txt the printed lines, and .txt files the output of the processes. The
last line is the next command: finer times, or compute-sanitizer on the first step that failed. Of a
run that was cut, `python3 -m experiments.bench.accelerator_page FOLDER` writes page.md again.
"""

import argparse
import importlib.util
import json
import os
import signal
import subprocess
import sys
import time
from collections import Counter
from collections.abc import Sequence
from pathlib import Path
from typing import Any, NoReturn

from experiments.bench import accelerator_page
from experiments.bench.accelerator_times import SCHEMES, TIMED
from experiments.bench.cases import positives
from experiments.errors import ConfigError, ExperimentError
from experiments.runs.environment import processor, usable_cores, versions
from experiments.runs.files import to_json, write_whole
from posenc_jax.kernels.checks.runner import (
    FAILED,
    DeviceError,
    Runner,
    chip_of,
    passed,
    table,
)

PARTS = {"steps": 0.42, "train": 0.18, "times": 0.22, "torch": 0.08, "schemes": 0.10}
"""Parts in their order, with their shares of the time; what one leaves is for those after it."""
LIBRARIES = ("numpy", "libtpu", "jax-cuda12-plugin", "jax-cuda13-plugin", "flax", "torch")
TRAINING = ("flax", "optax")
"""Packages of the part `train`."""
FAST = {"XLA_FLAGS": f"{os.environ.get('XLA_FLAGS', '')} --xla_gpu_autotune_level=0".strip()}
"""The environment of comparisons: choosing the fastest products takes most of their time."""
SHARED = {"XLA_PYTHON_CLIENT_PREALLOCATE": "false"}
"""The environment of processes that share a GPU."""


class _Parser(argparse.ArgumentParser):
    def error(self, message: str) -> NoReturn:
        raise ConfigError(message)


def main(arguments: list[str]) -> int:
    """Runs the parts; returns 2 for errors of the user, 1 if a step or a scheme was wrong."""
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
    add("--lengths", type=positives, default=(4096, 16384), help="T (default: 4096,16384)")
    add("--schemes", nargs="+", choices=TIMED, default=SCHEMES, metavar="NAME", help="of the times")
    try:
        options = parser.parse_args(arguments)
        if not options.minutes > 0:
            parser.error(f"argument --minutes: must be above 0, got {options.minutes:g}")
        return Run(options).run()
    except (ExperimentError, DeviceError, OSError) as error:
        print(f"error: {error}", file=sys.stderr)
        return 2
    except KeyboardInterrupt:
        print("Stopped.", file=sys.stderr)
        return 130


class Run:
    """One run of the parts."""

    def __init__(self, options: argparse.Namespace):
        self.options, self.out = options, options.out
        self.lengths = f"--lengths={','.join(map(str, options.lengths))}"
        self.began, self.platform = time.monotonic(), ""
        self.about: dict[str, Any] = {}
        self.steps: list[dict[str, Any]] = []
        self.schemes: list[dict[str, Any]] = []

    def run(self) -> int:
        """Runs the parts, and returns the exit status."""
        self.about = Runner(self.out / "steps.jsonl").machine()
        about = self.about | versions(LIBRARIES)
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
            page = accelerator_page.write(self.out)
        failed = [row for row in self.steps if row["outcome"] in FAILED]
        self.say(f"== {time.monotonic() - self.began:.0f} s", page, self.second(failed))
        return int(bool(failed) or any(x["outcome"] in ("wrong", "error") for x in self.schemes))

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
        dtypes = passed(self.steps)
        if dtypes and (chip := chip_of(self.about, dtypes)):
            self.say(f"posenc_jax/engine/chips.py: {chip}")

    def run_times(self, seconds: float) -> None:
        """Times attention; implementations that lost the device in a step are left out."""
        lost = {row["implementation"] for row in self.steps if lost_the_chip(row)}
        for word in sorted(lost):
            self.say(f"{word} is not timed: a step of it did not end")
        more = [self.lengths, "--schemes", *self.options.schemes]
        more += ["--without", *lost] if lost else []
        file, end = self.cleared("times.json"), time.monotonic() + seconds
        # A program that ends its process costs its group: the next process goes on after that.
        while (left := end - time.monotonic()) > 30:
            arguments = [f"--json={file}", f"--seconds={left - 20}", *more]
            if not any(self.children("times", [arguments], left)):
                break

    def run_torch(self, seconds: float) -> None:
        """Times PyTorch."""
        if self.platform != "gpu" or importlib.util.find_spec("torch") is None:
            return self.say("torch: not installed, or no GPU")
        arguments = [f"--json={self.cleared('torch.json')}", self.lengths]
        arguments.append(f"--seconds={seconds - 15}")
        self.children("torch", [arguments], seconds, {"JAX_PLATFORMS": "cpu"})
        self.say(_tail(self.out / "torch.txt", 12))

    def run_schemes(self, seconds: float) -> None:
        """Compares all schemes, in processes of their own."""
        parts = max(1, min(12, usable_cores() - 2))
        logs = [self.cleared(f"schemes_{i + 1}.jsonl") for i in range(parts)]
        each = [
            [f"--log={log}", f"--part={i + 1}/{parts}", f"--seconds={seconds - 20}"]
            for i, log in enumerate(logs)
        ]
        self.children("schemes", each, seconds, FAST | SHARED)
        lines = [x for log in logs if log.exists() for x in log.read_text().splitlines()]
        self.schemes = [json.loads(x) for x in lines if x.endswith("}")]
        self.say(*(json.dumps(x) for x in self.schemes if x["outcome"] in ("wrong", "error")))
        self.say(f"schemes: {dict(Counter(row['outcome'] for row in self.schemes))}")

    def run_train(self, seconds: float) -> None:
        """Times training steps."""
        missing = [name for name in TRAINING if importlib.util.find_spec(name) is None]
        if missing:
            return self.say(f"train: not installed: {', '.join(missing)}")
        arguments = [f"--json={self.cleared('train.json')}", f"--seconds={seconds - 15}"]
        self.children("train", [arguments], seconds)

    def cleared(self, name: str) -> Path:
        """Returns the path of a result, and removes the file of an earlier run."""
        path = self.out / name
        path.unlink(missing_ok=True)
        return path

    def children(
        self,
        name: str,
        arguments: Sequence[Sequence[str]],
        seconds: float,
        environment: dict[str, str] | None = None,
    ) -> list[int | str]:
        """Runs processes of a part at once, and ends them when its time is over.

        Returns:
          Their exit statuses, or a text for each one that was ended.
        """
        command = [sys.executable, "-m", f"experiments.bench.accelerator_{name}"]
        variables, end = os.environ | (environment or {}), time.monotonic() + seconds
        processes, statuses = [], []
        try:
            with (self.out / f"{name}.txt").open("ab") as out:
                for words in arguments:
                    process = subprocess.Popen(
                        [*command, *words], stdout=out, stderr=out, env=variables, process_group=0
                    )
                    processes.append(process)
            for process in processes:
                try:
                    statuses.append(process.wait(max(0.0, end - time.monotonic())))
                except subprocess.TimeoutExpired:
                    statuses.append(f"ended after {seconds:.0f} s")
        finally:
            for process in processes:
                if process.poll() is None:
                    os.killpg(process.pid, signal.SIGKILL)
                    process.wait()
        for status in filter(None, statuses):
            self.say(f"{name}: {status}", _tail(self.out / f"{name}.txt", 3))
        return statuses

    def second(self, failed: list[dict[str, Any]]) -> str:
        """Returns the command with which to go on, for about three minutes."""
        if failed:
            family, step = (failed[0][x] for x in ("family", "step"))
            steps = " ".join(Runner.command)
            command = f"compute-sanitizer --tool memcheck {steps} --log={self.out / 'one.jsonl'}"
            of = f"--implementation={failed[0]['implementation']} --family={family}"
            return f'Go on: {command} {of} "--only={step}"'
        command = f"{sys.executable} -m experiments.bench.accelerator --out {self.out / 'more'}"
        schemes = "none kerple shaw_keys transformer_xl deberta"
        return f"Go on: {command} --parts times --minutes 3 --lengths 8192 --schemes {schemes}"


def lost_the_chip(row: dict[str, Any]) -> bool:
    """Returns whether a step ended in a way that may lose the numbers of its process too."""
    return row["outcome"] in ("hang", "died") or "CUDA_ERROR" in row.get("place", "")


def _tail(path: Path, count: int) -> str:
    lines = path.read_text(encoding="utf-8", errors="replace").splitlines()
    return "\n".join(x[:300] for x in lines[-count:])


if __name__ == "__main__":
    signal.signal(signal.SIGTERM, signal.default_int_handler)  # The processes end, too.
    raise SystemExit(main(sys.argv[1:]))
