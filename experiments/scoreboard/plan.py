"""Claims of the literature in TOML files with their runs, written before anything is run.

`_File` has the entries, docs/experiments.md an example. Tables of tasks are settings for all runs,
as for `compare`; a table [runs.NAME] has the task and the scheme of a run, and settings for it
alone. Seeds are 0 to `seeds` - 1; `first_seed = 5` takes others than an earlier claim had.
"""

import dataclasses
import functools
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from pydantic import NonNegativeInt, PositiveFloat

from experiments.claims import Claim, check
from experiments.errors import ConfigError
from experiments.runs.experiment import from_file, refuse_plan
from experiments.runs.run import Run
from experiments.settings.common import Seeds
from experiments.settings.config_io import convert, merge, near, read_toml, strict


@strict
class _File:
    """The settings of claims without settings of runs."""

    source: str
    """The paper with its link, and the table or figure."""
    protocol: str
    """What is trained and measured, and how that differs from the source."""
    claims: tuple[Claim, ...]
    """What is claimed, with conditions on the scores of the runs by their names."""
    minutes: PositiveFloat
    """Expected time of all seeds."""
    seeds: Seeds = 5
    """How many seeds are run."""
    first_seed: NonNegativeInt = 0
    """The first of them."""
    remark: str = ""
    """What was seen; never the outcome."""


@dataclasses.dataclass(frozen=True)
class Protocol:
    """Claims, with the name of their file, such as R08, and their runs by name, with seed 0."""

    name: str
    about: _File
    runs: Mapping[str, Run]

    @property
    def seeds(self) -> range:
        """The seeds."""
        return range(self.about.first_seed, self.about.first_seed + self.about.seeds)

    def of_seed(self, seed: int) -> dict[str, Run]:
        """Returns the runs of a seed by name."""
        return {name: dataclasses.replace(run, seed=seed) for name, run in self.runs.items()}


def load(path: Path) -> Protocol:
    """Returns the claims of a file."""
    tables = read_toml(path)
    fields = {f.name for f in dataclasses.fields(_File)}
    try:
        about = convert(_File, {k: v for k, v in tables.items() if k in fields}, "")
        if not about.claims:
            raise ConfigError("claims: must hold at least one")
        common = {k: v for k, v in tables.items() if k not in fields | {"runs"}}
        refuse_plan(common, "a claim")
        runs = _runs(convert(dict[str, dict[str, Any]], tables.get("runs", {}), "runs"), common)
        check(about.claims, functools.partial(_without_score, runs))
    except ConfigError as error:
        raise ConfigError(f"{path}: {error}") from None
    return Protocol(path.stem, about, runs)


def load_all(folder: Path) -> list[Protocol]:
    """Returns the files of a folder in alphabetical order."""
    files = sorted(folder.glob("*.toml"))
    if not files:
        raise ConfigError(f"{folder}: has no files of claims")
    return [load(path) for path in files]


def named(protocols: Sequence[Protocol], names: Sequence[str]) -> list[Protocol]:
    """Returns the files with these names, all for none; raises ConfigError for an unknown one."""
    known = {each.name: each for each in protocols}
    for name in names:
        if name not in known:
            raise ConfigError(f"unknown claim {name!r}{near(name, known)}")
    return [each for each in protocols if not names or each.name in names]


def _runs(tables: Mapping[str, dict[str, Any]], common: dict[str, Any]) -> dict[str, Run]:
    runs: dict[str, Run] = {}
    for name, table in tables.items():
        if not name.isidentifier():
            raise ConfigError(f"runs.{name}: must be a name as in Python, since conditions have it")
        table = dict(table)
        try:
            for key in ("task", "scheme"):
                if key not in table:
                    raise ConfigError(f"{key}: is missing")
            task, scheme = (convert(str, table.pop(key), key) for key in ("task", "scheme"))
            refuse_plan(table, "a run")
            chosen = {"tasks": [task], "schemes": {"names": [scheme]}}
            experiment = from_file(merge(merge(common, table), chosen))
            experiment.check()
            runs[name] = experiment.run(next(iter(experiment.tasks)), scheme, 0)
        except ConfigError as error:
            raise ConfigError(f"runs.{name}: {error}") from None
    if not runs:
        raise ConfigError("runs: must hold at least one")
    return runs


def _without_score(runs: Mapping[str, Run], name: str, view: str | None, length: int) -> str:
    """Returns why there is no score, or ""."""
    if name not in runs:
        return f"no run is named {name}{near(name, runs)}"
    return runs[name].task.without_score(view, length)
