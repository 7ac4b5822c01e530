"""Checks the kernels of this package on the TPU or GPU that is there, step by step.

    python -m posenc_jax.kernels

Compilers and interpreters check the kernels of implementation="pallas" everywhere; whether a chip
computes them right, only the chip can show. Steps run attention and its gradients, against numbers
that are computed in another way, in a few minutes on an H100, mostly to compile. A step that fails
is one line, with its first wrong number. Steps that hang or crash cost themselves alone. The lines
are in --log as JSON; files of that name and an ending have the output of the processes.

If all steps that the kernels serve are right, the last line is the row of this chip for
posenc_jax/engine/chips.py, whose chips implementation=None trusts.

Exit status: 0 if all these ran and nothing failed, else 1; 2 for a wrong call, or without a chip
that there are kernels for. It needs jax and numpy alone.
"""

import argparse
import os
import platform
import shutil
import subprocess
import sys
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import jaxlib

from posenc_jax.engine.pallas import Pallas
from posenc_jax.kernels.checks.runner import (
    FAILED,
    FIT,
    LOST,
    DeviceError,
    Runner,
    chip_of,
    passed,
    table,
    write,
)
from posenc_jax.kernels.checks.steps import steps


def main(arguments: list[str] | None = None) -> int:
    """Runs all steps, or the steps of one process, and returns the exit status."""
    parser = argparse.ArgumentParser(
        prog="python -m posenc_jax.kernels",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    add, log = parser.add_argument, Path("kernels.jsonl")
    add("--log", type=Path, default=log, metavar="FILE", help=f"lines of JSON (default: {log})")
    add("--seconds", type=float, default=1200.0, help="for all steps (default: 1200)")
    for name in ("machine", "implementation", "family", "part", "first", "only", "ahead"):
        kind: dict[str, Any] = {"action": "store_true"} if name in ("machine", "ahead") else {}
        kind |= {"type": int, "default": 0} if name == "first" else {}
        kind |= {"default": "1/1"} if name == "part" else {}
        add(f"--{name}", help=argparse.SUPPRESS, **kind)
    options = parser.parse_args(arguments)
    if options.machine:
        write(options.log, {"machine": machine()})
        return 0
    if options.family:
        run_family(options)
        return 0
    runner = Runner(options.log, options.seconds)
    try:
        about = runner.machine()
        if about["kernels"] != FIT:
            raise DeviceError(about["kernels"])
        print(about["device"])
        rows = runner.run(about["device"].partition(":")[0])
    except (DeviceError, OSError) as error:
        print(f"error: {error}", file=sys.stderr)
        return 2
    except KeyboardInterrupt:
        print("Stopped.", file=sys.stderr)
        return 130
    print(*table(rows), sep="\n")
    dtypes = passed(rows)
    if not dtypes:
        print("Not all steps of the kernels ran and were right.")
    elif chip := chip_of(about, dtypes):
        print("With this row, None takes the kernels on such chips; send it in an issue:")
        print(f"posenc_jax/engine/chips.py: {chip}")
    return int(not dtypes or any(row["outcome"] in FAILED for row in rows))


def machine() -> dict[str, Any]:
    """Returns the device, its memory, versions down to the driver, and why it has no kernels."""
    device, driver = jax.devices()[0], ""
    if shutil.which("nvidia-smi"):
        command = ["nvidia-smi", "--query-gpu=driver_version", "--format=csv,noheader"]
        driver = subprocess.run(command, capture_output=True, text=True).stdout.strip()
    return {
        "python": platform.python_version(),
        "jax": jax.__version__,
        "jaxlib": jaxlib.__version__,
        "platform": f"{platform.system()} {platform.machine()}",
        "device": f"{device.platform}: {device.device_kind}",
        "runtime": " ".join(device.client.platform_version.split()),
        "driver": driver,
        "memory GB": (device.memory_stats() or {}).get("bytes_limit", 0) / 1e9,
        "kernels": Pallas(any_version=True).platform_refusal(jax.default_backend()) or FIT,
    }


def run_family(options: argparse.Namespace) -> None:
    """Runs the steps of a part of a family, a line in the log before and after each."""
    part, parts = map(int, options.part.split("/"))
    chosen = steps(options.implementation, family=options.family)[part - 1 :: parts]
    write(options.log, {"steps": [step.name for step in chosen]})
    if options.only:
        chosen = [step for step in chosen if step.name == options.only]
    chosen = chosen[options.first :]
    with ThreadPoolExecutor(min(8, os.cpu_count() or 1)) as pool:
        compiled: list[Any] = [None] * len(chosen)
        if options.ahead:
            compiled = [pool.submit(step.compile) for step in chosen]
        for step, ready in zip(chosen, compiled, strict=True):
            write(options.log, {"running": step.name})
            began, outcome = time.monotonic(), {"outcome": "ok"}
            try:
                step.compile() if ready is None else ready.result()
                write(options.log, {"compiled": step.name})
                place = step.run()
                if place is not None:
                    outcome = {"outcome": "wrong", "place": place}
            except Exception as error:
                outcome = _reason(error)
            about = {"step": step.name, "dtype": step.case.dtype}
            write(options.log, about | outcome | {"seconds": time.monotonic() - began})
            if outcome["outcome"] == "error" and not _answers():
                os._exit(LOST)  # Later steps would fail too.


def _answers() -> bool:
    """Returns whether the chip still computes; after an illegal access, a GPU does not."""
    try:
        return jax.device_get(jnp.ones(8)).sum() == 8
    except Exception:
        return False


def _reason(error: Exception) -> dict[str, str]:
    """Returns an error as an outcome; a refusal by an implementation is no failure."""
    text = " ".join(f"{error}".split())
    if isinstance(error, NotImplementedError) and text.startswith("attention: implementation="):
        return {"outcome": "refused", "place": text.split(": ", 2)[-1][:200]}
    return {"outcome": "error", "place": f"{type(error).__name__}: {text[:400]}"}


if __name__ == "__main__":
    raise SystemExit(main())
