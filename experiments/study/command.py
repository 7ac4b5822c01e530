"""`python -m experiments study`: runs a study, and writes its page and plot."""

from pathlib import Path

from experiments import plots
from experiments.config_io import Parser
from experiments.errors import ConfigError
from experiments.files import write_whole
from experiments.queue import (
    Queue,
    add_arguments,
    of_shard,
    refuse_other_versions,
    say,
    shard,
    workers,
)
from experiments.runs import Result, Run, RunFolder
from experiments.study.page import drawing, page
from experiments.study.plan import Study, load
from experiments.study.report import lengths, maps, report

_EPILOG = """\
python -m experiments study                          the page with what is known so far
python -m experiments study --run                    run what has no result, in stages
python -m experiments study --run --minutes 9        stop in time; the next call continues
python -m experiments study --run --shard 1/2        half of the schemes; another call has the rest

Folders of runs are named by the hash of their settings: what has a result is not run again.
"""


def main(arguments: list[str]) -> int:
    """Runs a study if asked to, and writes its page; returns the exit status."""
    parser = Parser(
        prog="python -m experiments study",
        description="Schemes of position encoding, each at its best learning rate.",
        epilog=_EPILOG,
    )
    parser.add_argument("file", nargs="?", type=Path, default=Path("configs/study.toml"))
    add_arguments(parser)
    parser.add_argument("--results", type=Path, help="folder (default: results/<name of the file>)")
    parser.add_argument("--page", type=Path, help="file to write (default: docs/<name>.md)")
    options = parser.parse_args(arguments)
    part = shard(options.shard)
    study = load(options.file)
    folder = options.results or Path("results") / study.name
    target = options.page or Path("docs") / f"{study.name}.md"
    if target.suffix != ".md":
        raise ConfigError(f"--page: must be the name of a Markdown file, got {target}")
    status = 0
    if options.run:
        status = run(study, folder, part, options.minutes, workers(options))
    results = known(folder)
    pictures = {
        "": drawing(study, results),
        "-lengths": lengths(study, results),
        "-maps": maps(study, results),
    }
    files = {what: f"{target.stem}{what}.svg" for what, svg in pictures.items() if svg}
    for what, file in files.items():
        write_whole(target.with_name(file), plots.standalone(pictures[what]))
    write_whole(target, page(study, results, str(options.file), str(folder), files))
    say(f"Page: {target}")
    if options.run:
        command = f"python -m experiments study {options.file} --run"
        write_whole(folder / "report.html", report(study, results, command))
        say(f"Report: {folder / 'report.html'}")
    return status


def run(
    study: Study,
    folder: Path,
    part: tuple[int, int] = (1, 1),
    minutes: float = float("inf"),
    workers: int | str = 1,
) -> int:
    """Runs what has no result, one size after the other, until no more follows from the results.

    Args:
      study: the study.
      folder: of the folders of runs.
      part: (i, n): the i-th of n parts of the schemes, from 1.
      minutes: after which it stops, with the state of the current run written.
      workers: how many runs at a time, or the address of a Ray cluster.

    Returns:
      0, or 1 if a run failed.

    Raises:
      ResultsError: where results of other versions are in the folder, or another process.
    """
    queue, failed = Queue(folder, minutes, workers), set()
    while not queue.over:
        results = known(folder)
        runs = list(study.runs(results))
        refuse_other_versions(runs, folder, study.name)
        ended = sum(results(each) is not None for each in runs)
        schemes = study.about.schemes[part[0] - 1 :: part[1]]
        for size in study.cells:
            mine = (each for each in study.runs_of(size, results) if each.scheme in schemes)
            mine = of_shard(mine, (1, 1))
            waiting = [e for e in mine if results(e) is None and e.name not in failed]
            if waiting:
                break
        else:
            break
        say(f"{ended} of {study.count} runs have ended, {len(waiting)} of {size} are next.")
        queue.work(waiting)
        results = known(folder)
        failed |= {each.name for each in waiting if results(each) is None}
    return queue.status


def known(folder: Path):
    """Returns a function that reads the result of a run once."""
    found: dict[str, Result] = {}

    def result(run: Run) -> Result | None:
        if run.name not in found and (read := RunFolder(folder, run).result()):
            found[run.name] = read
        return found.get(run.name)

    return result
