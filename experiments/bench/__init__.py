"""Benchmarks: ratios to a reference in the same process, never times alone.

One file per benchmark, each with `add_arguments(parser)` and `run(options) -> dict`, and with
`plot(numbers) -> svg` where something grows; its first line of documentation is its help. A new
one is that file and its name in `BENCHMARKS`.
"""

import argparse
import importlib
import json
import sys
from pathlib import Path

from experiments.bench.machine import describe, load, use_devices, use_warm_heap
from experiments.strict import ConfigError

BENCHMARKS = ("attention", "rope", "decode", "memory", "step")


def main(argv: list[str] | None = None) -> int:
    """Runs the benchmark that the arguments name; returns the exit status."""
    parser = argparse.ArgumentParser(prog="python -m experiments bench", description=__doc__)
    which = parser.add_subparsers(
        dest="benchmark", required=True, metavar="{" + ",".join(BENCHMARKS) + "}"
    )
    for name in BENCHMARKS:
        module = importlib.import_module(f"experiments.bench.{name}")
        words = (module.__doc__ or "").strip().splitlines()[0]
        one = which.add_parser(name, help=words, description=module.__doc__)
        module.add_arguments(one)
        one.add_argument("--json", type=Path, metavar="FILE", help="write the numbers there too")
        if hasattr(module, "plot"):
            one.add_argument("--plot", type=Path, metavar="FILE", help="draw them there as SVG")
        one.add_argument(
            "--cold-heap",
            action="store_true",
            help="leave the allocator as it is; large outputs then cost page faults on every call",
        )
    options = parser.parse_args(argv)
    if not options.cold_heap:
        use_warm_heap(sys.argv[1:] if argv is None else list(argv))
    use_devices(getattr(options, "devices", 1))
    machine = describe(getattr(options, "peers", False))
    for name, value in machine.items():
        print(f"{name}: {value}")
    module = importlib.import_module(f"experiments.bench.{options.benchmark}")
    try:
        numbers = module.run(options)
    except ConfigError as error:
        print(f"error: {error}", file=sys.stderr)
        return 2
    machine["load after"] = load()
    print(f"\nload after: {machine['load after']}")
    result = {"benchmark": options.benchmark, "machine": machine, **numbers}
    if options.json:
        options.json.write_text(json.dumps(result, indent=1) + "\n", encoding="utf-8")
        print(f"written: {options.json}")
    if getattr(options, "plot", None):
        options.plot.write_text(module.plot(result), encoding="utf-8")
        print(f"written: {options.plot}")
    return 0
