"""`python -m experiments study`: runs a study, and writes its page and plot."""

from collections.abc import Iterator
from pathlib import Path

import jax

from experiments.errors import ConfigError
from experiments.pages import plots
from experiments.pages.report import render
from experiments.pages.scheme_results import Lookup, SchemeResults, collect
from experiments.pages.tables import label
from experiments.runs.files import write_whole
from experiments.runs.run import Result, Run, RunFolder
from experiments.runs.run_queue import add_arguments, carry_out, refuse_other_versions, say
from experiments.settings.config_io import Parser, names
from experiments.study import clock
from experiments.study.catalogue_page import catalogue_page, catalogue_picture
from experiments.study.gains import gains_picture
from experiments.study.page import drawing, length_suffix, page
from experiments.study.plan import Study, forecast, load
from experiments.study.rows import Row, rows_of

_EPILOG = """\
python -m experiments study                          the page with what is known so far
python -m experiments study --clock                  time a step of each scheme, side by side
python -m experiments study --run                    run what has no result, in stages
python -m experiments study --run --minutes 9        stop in time; the next call continues

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
    study = load(options.file, options.also)
    folder = options.results or Path("results") / study.name
    target = options.page or Path("docs") / f"{study.name}.md"
    if target.suffix != ".md":
        raise ConfigError(f"--page: must be the name of a Markdown file, got {target}")
    status = 0
    if options.clock:
        clock.measure(study.timed_sizes, folder, say)
    if options.run:
        tasks = [cell.task for cells in study.cells.values() for cell in cells.values()]
        stages = _stages(study, folder)
        status = carry_out(options, folder, tasks, stages).status
    results, times = known(folder), clock.read(folder)
    rows = by_scheme(study, results)
    for path, text in pages(study, rows, results, times, options.file, folder, target).items():
        write_whole(path, text)
    say(f"Page: {target}")
    if options.run:
        command = f"python -m experiments study {options.file} --run"
        report = render(study.name, rows, command, missing=missing(study, results))
        write_whole(folder / "report.html", report)
        say(f"Report: {folder / 'report.html'}")
    return status


def pages(
    study: Study,
    rows: list[SchemeResults],
    results: Lookup,
    times: clock.Clock | None,
    file: Path,
    folder: Path,
    target: Path,
) -> dict[Path, str]:
    """Returns the texts of the page and of its pictures, by path.

    Args:
      study: the study.
      rows: of `by_scheme`.
      results: of its runs.
      times: of steps, None before they are measured.
      file, folder: where the study and its results are.
      target: of the page.
    """
    if study.about.layout == "catalogue":
        pictures = {"": catalogue_picture(study, results, times)}
    else:
        pictures = {
            "": drawing(study, results, times),
            **{length_suffix(study, size): lengths(study, rows, size) for size in study.cells},
            "-maps": maps(study, rows),
            "-gains": gains_picture(study, results, times),
        }
    files = {suffix: f"{target.stem}{suffix}.svg" for suffix, svg in pictures.items() if svg}
    places = str(file), str(folder)
    if study.about.layout == "catalogue":
        text = catalogue_page(study, results, times, *places, files.get("", ""))
    else:
        text = page(study, results, times, *places, files, earlier(study, folder.parent))
    return {target: text} | {
        target.with_name(name): plots.standalone(pictures[suffix]) for suffix, name in files.items()
    }


def _stages(study: Study, folder: Path) -> Iterator[list[Run]]:
    """Yields runs without a result, one size after the other, until the results require no more.

    Args:
      study: the study.
      folder: of the folders of runs.
    """
    failed: set[str] = set()
    times = clock.read(folder)
    if jax.default_backend() == "cpu":
        say(forecast(study, known(folder), times))
    while True:
        results = known(folder)
        runs = list(study.runs(results, times))
        refuse_other_versions(runs, folder, study.name)
        ended = sum(results(each) is not None for each in runs)
        for size in study.cells:
            of_size = {each.name: each for each in study.runs_of(size, results, times)}
            waiting = [
                each
                for name, each in of_size.items()
                if results(each) is None and name not in failed
            ]
            if waiting:
                break
        else:
            return
        say(f"{ended} runs have ended, {len(waiting)} of {size} are next.")
        yield waiting
        results = known(folder)
        failed |= {each.name for each in waiting if results(each) is None}


def by_scheme(study: Study, results: Lookup) -> list[SchemeResults]:
    """Returns the results of schemes whose seeds have all ended, each size as a section."""
    rows = [
        collect(size, runs, results)
        for size in study.cells
        for cell in study.compared(size, results).values()
        if (runs := cell.finals(results))
    ]
    return [row for row in rows if len(row.ended) == len(row.runs)]


def earlier(study: Study, folder: Path) -> dict[str, dict[str, Row]]:
    """Returns the rows of the study that a study repeats, by size; none if it repeats none.

    Args:
      study: the study.
      folder: of the folders of studies.
    """
    if (other := study.repeated) is None:
        return {}
    results = known(folder / other.name)
    return {
        size: rows_of(other.cells[size], other.about.baseline, results, None)
        for size in study.cells
    }


def missing(study: Study, results: Lookup) -> list[str]:
    """Returns a text per size: schemes that `by_scheme` leaves out, how many runs have ended."""
    texts = []
    for size in study.cells:
        parts = []
        for name, cell in study.compared(size, results).items():
            seeds = cell.finals(results)
            runs = seeds or cell.selection(results).runs
            kind = "seeds" if seeds else "runs to choose settings"
            ended = sum(results(run) is not None for run in runs)
            if not seeds or ended < len(runs):
                parts.append(f"{label(name)} ({ended} of {len(runs)} {kind})")
        texts += [f"{size}: {', '.join(parts)}"] if parts else []
    return texts


def lengths(study: Study, rows: list[SchemeResults], size: str) -> str:
    """Returns the plot of scores against length at a size, as <svg>, or nothing."""
    task = study.cells[size][study.about.baseline].task
    if len(task.test_lengths) == 1:
        return ""
    return plots.lengths(rows, size, task.views[0], split=True)


def maps(study: Study, rows: list[SchemeResults]) -> str:
    """Returns the maps of scores by length and place at the last size that has them, as <svg>."""
    drawn = (plots.maps(rows, size) for size in list(study.cells)[::-1])
    return next((svg for svg in drawn if svg), "")


def known(folder: Path) -> Lookup:
    """Returns a function that reads the result of a run once."""
    known: dict[str, Result] = {}

    def result(run: Run) -> Result | None:
        if run.name not in known and (read := RunFolder(folder, run).result()):
            known[run.name] = read
        return known.get(run.name)

    return result
