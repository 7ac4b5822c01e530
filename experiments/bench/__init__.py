"""Benchmarks: times as ratios to a reference in the same process.

Each benchmark is one file with `add_arguments(parser)` and `run(options) -> dict`. The first line
of its docstring is its help. A new benchmark is a file, and its name in `BENCHMARKS`.

XLA on CPU allocates the output of every call anew. glibc maps allocations of 32 MB and more
from the system, with a page fault for every 4 KB: ten times the cost of adding one to such an
array. glibc reads its settings when a process starts, so the benchmark starts itself again.
"""

import importlib
import os
import platform
import sys
from pathlib import Path

from experiments.runs.environment import environment
from experiments.runs.files import to_json, write_whole

WARM_HEAP = {
    "glibc.malloc.hugetlb": 1,
    "glibc.malloc.mmap_max": 0,
    "glibc.malloc.trim_threshold": 1 << 34,
    "glibc.malloc.top_pad": 1 << 28,
    "glibc.malloc.arena_max": 1,
}
_STARTED = "POSENC_BENCH_WARM_HEAP"
BENCHMARKS = ("attention", "masks", "released")


def main(arguments: list[str]) -> int:
    """Runs the benchmark that the arguments name; returns the exit status."""
    # `accelerator` runs without the libraries that these import.
    from experiments.settings.config_io import Parser
    from experiments.settings.trust import add_trust

    parser = Parser(prog="python -m experiments bench", description=__doc__)
    commands = parser.add_subparsers(
        dest="benchmark", required=True, metavar="{" + ",".join(BENCHMARKS) + "}"
    )
    modules = {name: importlib.import_module(f"experiments.bench.{name}") for name in BENCHMARKS}
    for name, module in modules.items():
        words = (module.__doc__ or "").strip().splitlines()[0]
        command = commands.add_parser(name, help=words, description=module.__doc__)
        module.add_arguments(command)
        command.add_argument("--json", type=Path, metavar="FILE", help="write the numbers there")
        add_trust(command)
    options = parser.parse_args(arguments)
    use_warm_heap(arguments)
    machine = {**environment(), "heap": heap(), "load before": load()}
    for name, value in machine.items():
        print(f"{name}: {value}")
    module = modules[options.benchmark]
    numbers = module.run(options)
    machine["load after"] = load()
    print(f"\nload after: {machine['load after']}")
    result = {"benchmark": options.benchmark, "machine": machine, **numbers}
    if options.json:
        write_whole(options.json, to_json(result, indent=1) + "\n")
        print(f"written: {options.json}")
    return 0


def use_warm_heap(arguments: list[str]) -> None:
    """Starts this process again with an allocator that keeps its memory; returns in the new one."""
    if os.environ.get(_STARTED) or platform.libc_ver()[0] != "glibc":
        return
    tunables = ":".join(f"{name}={value}" for name, value in WARM_HEAP.items())
    before = os.environ.get("GLIBC_TUNABLES", "")
    environment = {
        **os.environ,
        # The time of compiling must not depend on earlier runs.
        "JAX_ENABLE_COMPILATION_CACHE": "false",
        _STARTED: "1",
        "GLIBC_TUNABLES": f"{before}:{tunables}" if before else tunables,
    }
    sys.stdout.flush()
    command = [sys.executable, "-m", "experiments", "bench", *arguments]
    os.execve(sys.executable, command, environment)


def heap() -> str:
    """Returns a description of the allocator of this process."""
    warm = "warm (kept by the allocator: started again with GLIBC_TUNABLES)"
    return warm if os.environ.get(_STARTED) else "as the system has it"


def load() -> str:
    """Returns the mean number of runnable processes in the last minute."""
    return f"{os.getloadavg()[0]:.2f}" if hasattr(os, "getloadavg") else "unknown"
