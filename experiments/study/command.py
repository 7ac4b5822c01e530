"""`python -m experiments study`: runs a study, and writes its page and plot."""

import os
from collections.abc import Iterator, Sequence
from pathlib import Path

from experiments.pages.page import command_of, files_of, target_of
from experiments.runs.files import write_whole
from experiments.runs.run import Lookup, Run, known
from experiments.runs.run_queue import (
    add_arguments,
    carry_out,
    refuse_other_versions,
    refuse_without_run,
    say,
)
from experiments.settings.config_io import Parser, names
from experiments.study import catalogue, clock, outcomes, page, steps
from experiments.study.catalogue import screen_numbers
from experiments.study.numbers import numbers
from experiments.study.page import Block, Context
from experiments.study.plan import Study, load
from experiments.study.rows import Row, rows_of

_EPILOG = """\
python -m experiments study                          the page with what is known so far
python -m experiments study --clock                  time a step of each scheme, side by side
python -m experiments study --run                    run what has no result, in stages
python -m experiments study --run --minutes 9        stop in time; the next call continues

Folders of runs are named by the hash of their settings: what has a result is not run again.
"""


def main(arguments: list[str]) -> int:
    parser = Parser(
        prog="python -m experiments study",
        description="Schemes of position encoding, each at its best learning rate.",
        epilog=_EPILOG,
    )
    parser.add_argument("file", nargs="?", type=Path, default=Path("configs/study.toml"))
    parser.add_argument("--run", action="store_true", help="run what has no result yet")
    parser.add_argument(
        "--clock",
        action="store_true",
        help="first measure a step of each scheme, in a minute or two; needs an idle machine",
    )
    add_arguments(parser)
    parser.add_argument(
        "--also",
        type=names,
        default=[],
        metavar="A,B",
        help="further schemes: names, chains such as rope+alibi, or mypkg.mine:MyScheme",
    )
    parser.add_argument("--results", type=Path, help="folder (default: results/<name of the file>)")
    parser.add_argument("--page", type=Path, help="file to write (default: docs/<name>.md)")
    options = parser.parse_args(arguments)
    refuse_without_run(options)
    study = load(options.file, options.also)
    folder = options.results or Path("results") / study.name
    target = target_of(options.page, study.name)
    status = 0
    if options.clock:
        clock.measure(study.timed_sizes, folder, say)
    if options.run:
        status, _ = carry_out(options, folder, _stages(study, folder), wait=True)
    for path, text in pages(study, options.file, folder, target, options.also).items():
        write_whole(path, text)
    say(f"Page: {target}")
    return status


BLOCKS: dict[str, Block] = {
    "remark": page.remark,
    "progress": page.progress,
    "criterion": page.criterion,
    "differences": page.differences,
    "tables": page.tables,
    "pictures": page.pictures,
    "so_far": page.so_far,
    "settings": page.settings,
    "screen": catalogue.screen,
    "summary": catalogue.summary,
    "finalists": catalogue.finalists,
    "origin": page.origin,
    "steps_picture": steps.picture,
    "steps": steps.differences,
    "claims": outcomes.claims,
}
"""Blocks by their names in files of studies, `experiments.study.plan.BlockName`."""


def pages(
    study: Study, file: Path, folder: Path, target: Path, also: Sequence[str] = ()
) -> dict[Path, str]:
    """Returns the texts of the page, of its numbers and of its pictures, by path.

    `file` is of the study, and `also` has the schemes that it leaves out.
    """
    results, times = known(folder), clock.read(folder, study.cells)
    rows = {size: _rows(study, size, results, times) for size in study.cells}
    context = Context(
        study=study,
        rows=rows,
        results=results,
        clock=times,
        file=str(file),
        command=command_of("study", file, folder, target, also),
        numbers=f"{target.stem}.csv",
        methods=os.path.relpath("docs/methods.md", target.parent),
        name=target.stem,
    )
    text, inside = text_of(context), context.pictures
    is_screen = "screen" in study.about.blocks
    table = (
        screen_numbers(next(iter(rows.values()))) if is_screen else numbers(study, rows, results)
    )
    return files_of(target, folder, text, table, inside)


def text_of(page: Context) -> str:
    about, numbers = page.study.about, f" Numbers: [{page.numbers}]({page.numbers})"
    command = f"From `{page.command}`"
    command += (
        f"; protocol: [methods]({page.methods})."
        if "screen" in about.blocks
        else (f".{numbers}; protocol: [methods]({page.methods}).")
    )
    sizes = {size: next(iter(cells.values())).about for size, cells in page.study.reported.items()}
    if alone := [size for size, of_size in sizes.items() if of_size.seeds == 1]:
        command += f" One seed gives no interval, and resolves nothing: {', '.join(alone)}."
    blocks = [paragraph for name in about.blocks for paragraph in BLOCKS[name](page)]
    return "\n\n".join([f"# {about.title}", command, *blocks]) + "\n"


def _rows(study: Study, size: str, results: Lookup, times: clock.Clock | None) -> dict[str, Row]:
    compared = study.compared(size, results)
    return rows_of(compared, study.about.baseline, results, times) if compared else {}


def _stages(study: Study, folder: Path) -> Iterator[list[Run]]:
    """Yields runs without a result, one size after the other, until the results require no more."""
    failed: set[str] = set()
    times, results = clock.read(folder, study.cells), known(folder)
    while True:
        by_size = {
            size: {run.name: run for run in study.runs_of(size, results, times)}
            for size in study.cells
        }
        runs = [run for of_size in by_size.values() for run in of_size.values()]
        refuse_other_versions(runs, results, study.name)
        ended = {run.name for run in runs if results(run)}
        waiting = {
            size: [run for name, run in of_size.items() if name not in ended | failed]
            for size, of_size in by_size.items()
        }
        size, stage = next(((size, runs) for size, runs in waiting.items() if runs), ("", []))
        if not stage:
            return
        say(f"{len(ended)} runs have ended, {len(stage)} of {size} are next.")
        # A study that is stopped has all schemes, with fewer seeds.
        yield sorted(stage, key=lambda run: run.seed)
        failed |= {run.name for run in stage if not results(run)}
