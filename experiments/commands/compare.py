"""Commands on experiments: `compare` carries out a plan, `report` writes its report again.

The folder results/<name>/ has

config.toml        every setting of the last call
<run>/             a folder per task, scheme and seed (`experiments.runs.run`)
report.html        tables and plots of the results with these settings
"""

import argparse
import json
import re
import shlex
import shutil
import sys
from collections.abc import Collection, Iterator
from pathlib import Path
from typing import Any

import tomli_w

from experiments.errors import ConfigError, ResultsError
from experiments.pages import tables
from experiments.pages.report import conclusions, render
from experiments.runs import scores
from experiments.runs.experiment import Experiment, experiment_of, load, objects_in
from experiments.runs.files import locked, write_whole
from experiments.runs.results import PACK, mixture
from experiments.runs.run import Run, commit, known, load_data
from experiments.runs.run_queue import (
    add_arguments,
    carry_out,
    continuing,
    refuse_other_versions,
    say,
)
from experiments.settings.config_io import Parser, near, read_toml
from experiments.settings.trust import add_trust
from experiments.training.layout import check_batch


def main(arguments: list[str]) -> int:
    parser = Parser(add_help=False)
    parser.add_argument("--quick", action="store_true")
    parser.add_argument("--fresh", action="store_true")
    add_arguments(parser)
    options, arguments = parser.parse_known_args(arguments)
    file = "configs/compare.toml"
    if arguments and not arguments[0].startswith("-"):
        file = arguments.pop(0)
    program = f"python -m experiments compare [{file}]"
    return compare(load(Path(file), arguments, quick=options.quick, program=program), options)


def compare(experiment: Experiment, options: argparse.Namespace) -> int:
    """Carries out the plan of an experiment; returns the exit status.

    Finished runs are skipped. Runs that other processes hold are looked at again at the end. A run
    that raises does not stop the others. The process that ends last writes the report.

    `options` are of `run_queue.add_arguments`, and `fresh`: whether to remove the results of an
    earlier experiment of that name.
    """
    folder, runs, errors = experiment.folder, experiment.all_runs(), {}

    def stages() -> Iterator[list[Run]]:
        results = known(folder)
        if options.devices is not None:
            for task in experiment.tasks.values():
                check_batch(task, options.devices)  # Before anything is removed or written.
        if not options.fresh:
            remedy = "choose another --name, or --fresh"
            refuse_other_versions(runs, results, str(folder), remedy)
        waiting = [r for r in runs if options.fresh or results(r) is None]
        tasks = dict.fromkeys(run.task for run in waiting)
        facts = {name: v for task in tasks for name, v in load_data(task).facts.items()}
        if options.fresh:
            _clear(folder)
        write_config(experiment)
        for name, text in facts.items():
            say(f"{name}: {text}")
        if before := len(runs) - len(waiting):
            commits = {result.commit for run in runs if (result := results(run))}
            code = f", at commit {', '.join(sorted(commits))}; the others run at {commit()}"
            mixed = waiting and commits != {commit()}
            say(f"{before} of {len(runs)} runs were done before{code if mixed else ''}.")
        yield runs

    try:
        status, held = carry_out(options, folder, stages(), errors)
        if held:
            return status
    except KeyboardInterrupt:
        if not (folder / "config.toml").exists():
            raise
        status = 130
    results = scores.by_scheme(runs, known(folder), errors)
    print(f"\n{tables.as_text(results)}\n", *conclusions(results), "", sep="\n")
    trusted = objects_in(experiment.to_tables())
    print(f"Report: {write_report(folder, errors=errors, trusted=trusted)}")
    if status == 130:
        print(
            f"Stopped; finished runs are kept, and {continuing(options)} continues with the others."
        )
    return status


def report(arguments: list[str]) -> int:
    parser = Parser(
        prog="python -m experiments report",
        description="Writes report.html again from the results of runs.",
    )
    parser.add_argument("folder", type=Path, help="such as results/compare")
    parser.add_argument("--baseline", help="scheme of the paired differences (default: rope)")
    add_trust(parser)
    options = parser.parse_args(arguments)
    folder = options.folder if options.folder.name else options.folder.absolute()
    print(f"Report: {write_report(folder, options.baseline, trusted=options.trust)}")
    return 0


def write_report(
    folder: Path,
    baseline: str | None = None,
    errors: dict[str, str] | None = None,
    trusted: Collection[str] = (),
) -> Path:
    """Writes `report.html` in a folder of results, and returns its path.

    Others are compared to `baseline`, by default rope or else the first scheme. `errors` are by
    names of runs, `trusted` is as for `experiment_of`.
    """
    experiment = experiment_of(folder, trusted)
    results = scores.by_scheme(experiment.all_runs(), known(folder), errors or {})
    schemes = scores.schemes([row for row in results if not row.waiting])
    if baseline and baseline not in schemes:
        hint = near(baseline, schemes)
        raise ConfigError(f"--baseline: {baseline!r} is not among the runs{hint}")
    words = ["python", "-m", "experiments", "compare", str(folder / "config.toml")]
    stored = read_toml(folder / "config.toml")
    if Path(stored.get("results", "results"), stored.get("name", "compare")) != folder:  # Moved.
        words += ["--results", str(folder.parent), "--name", folder.name]
    settings = experiment.to_tables()
    page = render(experiment.name, results, shlex.join(words), settings, baseline)
    if mixed := mixture([result for row in results for result in row.results]):
        print(mixed, file=sys.stderr)
    write_whole(folder / "report.html", page)
    return folder / "report.html"


def write_config(experiment: Experiment) -> None:
    text = tomli_w.dumps(_without_none(json.loads(json.dumps(experiment.to_tables()))))
    write_whole(experiment.folder / "config.toml", text)


def _without_none(tables: Any) -> Any:
    """Returns tables without settings of None, which TOML cannot say: they are defaults.

    >>> _without_none({"text": {"limit": None, "steps": 4}})
    {'text': {'steps': 4}}
    """
    if not isinstance(tables, dict):
        return tables
    return {key: _without_none(value) for key, value in tables.items() if value is not None}


def _clear(folder: Path) -> None:
    """Removes the files of an experiment, and no others."""
    try:
        for path in list(folder.iterdir()) if folder.exists() else ():
            if re.fullmatch(r".+-s\d+-[0-9a-f]{12}", path.name):
                with locked(path):
                    shutil.rmtree(path)
            elif path.name in ("config.toml", "report.html", PACK):
                path.unlink()
    except OSError as error:
        raise ResultsError(f"{error.filename}: cannot be removed: {error.strerror}") from None
