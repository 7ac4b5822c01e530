"""`python -m experiments scoreboard`: carries out the runs of claims, and writes outcomes."""

import dataclasses
import os
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path

from experiments.errors import ConfigError, ResultsError
from experiments.runs.files import write_whole
from experiments.runs.run import Run, known
from experiments.runs.run_queue import (
    add_arguments,
    carry_out,
    refuse_other_versions,
    refuse_without_run,
    say,
)
from experiments.scoreboard.outcomes import outcomes
from experiments.scoreboard.page import LIBRARY, numbers, of_folder, page
from experiments.scoreboard.plan import Protocol, load_all, named
from experiments.settings.config_io import Parser

_EPILOG = """\
python -m experiments scoreboard                          outcomes of all claims
python -m experiments scoreboard R08 R10 --run            run these, with all their seeds
python -m experiments scoreboard R11 --run --minutes 9    stop in time; the next call continues
python -m experiments scoreboard --folder mine --run      claims of your own: mine/results.md

Folders of runs are named by the hash of their settings: what has a result is not run again. Claims
with equal runs share them.
"""


def main(arguments: list[str]) -> int:
    """Runs claims if asked to, prints outcomes and writes the page; returns the exit status."""
    parser = Parser(
        prog="python -m experiments scoreboard",
        description="Claims of the literature about position encodings, and their outcomes.",
        epilog=_EPILOG,
    )
    parser.add_argument("claims", nargs="*", metavar="R01", help="names of claims (default: all)")
    parser.add_argument("--run", action="store_true", help="run what has no result yet")
    add_arguments(parser)
    parser.add_argument("--seeds", type=int, help="seeds to run now (default: as the claim says)")
    parser.add_argument(
        "--folder", type=Path, default=LIBRARY.folder, help="claims (default: %(default)s)"
    )
    parser.add_argument(
        "--results",
        type=Path,
        help=f"(default: {LIBRARY.results}; FOLDER/results of another folder)",
    )
    options = parser.parse_args(arguments)
    refuse_without_run(options)
    if options.seeds is not None and options.seeds < 1:
        raise ConfigError(f"--seeds: must be at least 1, got {options.seeds}")
    folder = Path(os.path.relpath(options.folder))
    files = LIBRARY if folder == LIBRARY.folder else of_folder(folder)
    files = dataclasses.replace(files, results=options.results or files.results)
    everything = load_all(folder)
    chosen = named(everything, options.claims)
    most = max(protocol.about.seeds for protocol in chosen)
    if options.seeds is not None and options.seeds > most:
        raise ConfigError(f"--seeds: must be at most {most}, as in the claims, got {options.seeds}")
    status = 0
    if options.run:
        stages = _stages(chosen, files.results, options.seeds)
        status, held = carry_out(options, files.results, stages)
        if held:
            return status
    decided = [each for protocol in everything for each in outcomes(protocol, files.results)]
    if mixed := [outcome for outcome in decided if outcome.mixed]:
        raise ResultsError("; ".join(f"{o.protocol.name}: {o.reason}" for o in mixed))
    write_whole(files.page, page(decided, files))
    write_whole(files.page.with_suffix(".csv"), numbers(decided))
    for outcome in (outcome for outcome in decided if outcome.protocol in chosen):
        summary = f"{outcome.word} ({outcome.reason})"
        print(f"{outcome.protocol.name:5} {summary:50} {outcome.claim.claim}")
    print(f"Page: {files.page}")
    return status


def _stages(protocols: Sequence[Protocol], folder: Path, seeds: int | None) -> Iterator[list[Run]]:
    """Yields the runs that claims need, each once."""
    runs = (run for protocol in protocols for run in _all(protocol, protocol.seeds[:seeds]))
    plan = list({run.name: run for run in runs}.values())
    results = known(folder)
    for protocol in protocols:
        refuse_other_versions(_all(protocol, protocol.seeds), results, protocol.name)
    ended = sum(results(each) is not None for each in plan)
    say(f"{len(plan)} runs, {ended} with a result.")
    yield plan


def _all(protocol: Protocol, seeds: Iterable[int]) -> Iterator[Run]:
    for seed in seeds:
        yield from protocol.of_seed(seed).values()
