"""Kills a run at random times, again and again, and compares its end with that of a whole run.

    python -m tests.experiments.kills               20 kills, about 4 minutes
    python -m tests.experiments.kills --kills 5

Half of the kills are SIGKILL, the others SIGTERM. States are written 5 times a second, so that
many kills fall into a write. Exits with 1 unless the results are equal bit by bit.
"""

import argparse
import contextlib
import json
import os
import random
import signal
import subprocess
import sys
import tempfile
import time
from pathlib import Path

CLAIM = """
claim = "A run that is killed ends as one that is not"
source = "a test"
protocol = "tiny"
criteria = ["t5[32] >= 0"]
seeds = 1
minutes = 1

[kback]
test_lengths = [32, 48]
eval_batch = 4
eval_batches = 1
schemes.t5.max_distance = 32
[kback.model]
model_dim = 32
num_layers = 1
num_heads = 2
[kback.train]
steps = 20000
steps_per_call = 10
batch = 8

[runs.t5]
task = "kback"
scheme = "t5"
"""
RUN = """
import sys
from experiments.runs.checkpoints import Checkpoints
from experiments.__main__ import main
Checkpoints.__init__.__defaults__ = (0.2,)
raise SystemExit(main(sys.argv[1:]))
"""


def start(folder: Path) -> subprocess.Popen:
    """Starts the claim, or continues it."""
    words = ["scoreboard", "--run", "--folder", "claims", "--results", "results", "--page", "p.md"]
    words += ["--workers", "1"]  # In this process, where states are written 5 times a second.
    root = Path(__file__).parents[2]
    environment = os.environ | {"PYTHONPATH": str(root), "JAX_COMPILATION_CACHE_DIR": "cache"}
    return subprocess.Popen(
        [sys.executable, "-c", RUN, *words], cwd=folder, env=environment, stdout=subprocess.DEVNULL
    )


def result(folder: Path) -> dict | None:
    """Returns the result of the run without times and the commit."""
    found = list(folder.glob("results/*/result.json"))
    if not found:
        return None
    times = ("finished", "commit", "compile_seconds", "train_seconds", "cpu_seconds")
    return {k: v for k, v in json.loads(found[0].read_text()).items() if k not in times}


def wait(process: subprocess.Popen, seconds: float) -> None:
    """Waits for some seconds, or until the process ends."""
    with contextlib.suppress(subprocess.TimeoutExpired):
        process.wait(seconds)


def states(folder: Path) -> set[str]:
    """Returns the names of the states that are there."""
    return {path.name for path in folder.glob("results/*/checkpoints/*")}


def main() -> int:
    """Returns 0 if the results are equal."""
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--kills", type=int, default=20)
    parser.add_argument("--seed", type=int, default=0)
    options = parser.parse_args()
    chance = random.Random(options.seed)
    with tempfile.TemporaryDirectory() as place:
        whole, parts = (Path(place) / name for name in ("whole", "parts"))
        for folder in (whole, parts):
            (folder / "claims").mkdir(parents=True)
            (folder / "claims" / "K1.toml").write_text(CLAIM)
        if start(whole).wait():
            print("The run fails without kills.")
            return 1
        kills, starts, seen = [], 0, set()
        while result(parts) is None:
            process, starts = start(parts), starts + 1
            if len(kills) == options.kills:
                process.wait()
                continue
            if chance.random() < 0.2:  # In imports, compilation or the reading of a state.
                wait(process, chance.uniform(1.0, 6.0))
            else:
                while process.poll() is None and states(parts) <= seen:
                    time.sleep(0.01)
                wait(process, chance.uniform(0.0, 0.4))
            seen |= states(parts)
            if process.poll() is None:
                kills.append(chance.choice([signal.SIGKILL, signal.SIGTERM]))
                process.send_signal(kills[-1])
                process.wait()
        a, b = result(whole) or {}, result(parts) or {}
        differing = [name for name in a if a[name] != b.get(name)]
        words = f"DIFFERENT in {', '.join(differing)}" if differing else "equal"
        killed = sum(kill == signal.SIGKILL for kill in kills)
        print(f"{len(kills)} kills ({killed} by SIGKILL) in {starts} starts: results are {words}.")
    return 1 if differing else 0


if __name__ == "__main__":
    raise SystemExit(main())
