"""Benchmarks: times as ratios to a reference in the same process.

Each benchmark is one file with `add_arguments(parser)` and `run(options) -> dict`. The first line
of its docstring is its help. A new benchmark is a file, and its name in `BENCHMARKS`.
"""

import importlib
from pathlib import Path

from experiments.bench.heap import heap, load, use_warm_heap
from experiments.runs.environment import environment
from experiments.runs.files import to_json, write_whole

BENCHMARKS = ("attention", "rope", "decode")


def main(arguments: list[str]) -> int:
    """Runs the benchmark that the arguments name; returns the exit status.

    Raises:
      ConfigError: for wrong arguments.
    """
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
        command.add_argument(
            "--cold-heap",
            action="store_true",
            help="leave the allocator as it is; large outputs then cost page faults on every call",
        )
    options = parser.parse_args(arguments)
    if not options.cold_heap:
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
