"""Claims of the literature, one TOML file each, written before anything is run.

`_File` has the entries, docs/experiments.md an example. Tables of tasks are settings for all runs,
as for `compare`; a table [runs.NAME] has the task and the scheme of a run, and settings for it
alone. Seeds are 0 to `seeds` - 1; `first_seed = 5` takes others than an earlier claim had.
"""

import dataclasses
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, ClassVar

from pydantic import NonNegativeInt, PositiveFloat

from experiments.errors import ConfigError
from experiments.runs.experiment import from_file, refuse_plan
from experiments.runs.run import Run
from experiments.scoreboard.criteria import Condition, parse
from experiments.settings.common import Seeds
from experiments.settings.config_io import STRICT, convert, merge, near, read_toml


@dataclasses.dataclass(frozen=True)
class _File:
    """The settings of a claim without settings of runs."""

    __pydantic_config__: ClassVar[Any] = STRICT

    claim: str
    """What is claimed, one sentence."""
    source: str
    """The paper with its link, and the table or figure."""
    protocol: str
    """What is trained and measured, and how that differs from the source."""
    criteria: tuple[str, ...]
    """What the claim predicts: conditions, all of which must hold."""
    minutes: PositiveFloat
    """Expected time of all seeds."""
    gate: tuple[str, ...] = ()
    """Conditions without which the outcome is "not fitted"."""
    seeds: Seeds = 5
    """How many seeds are run."""
    first_seed: NonNegativeInt = 0
    """The first of them."""
    remark: str = ""
    """What was seen; never the outcome."""


@dataclasses.dataclass(frozen=True)
class Claim:
    """A claim, with the name of its file, such as R08, and its runs by name, with seed 0."""

    name: str
    about: _File
    gate: tuple[Condition, ...]
    criteria: tuple[Condition, ...]
    runs: Mapping[str, Run]

    @property
    def seeds(self) -> range:
        """The seeds."""
        return range(self.about.first_seed, self.about.first_seed + self.about.seeds)

    def of_seed(self, seed: int) -> dict[str, Run]:
        """Returns the runs of a seed by name."""
        return {name: dataclasses.replace(run, seed=seed) for name, run in self.runs.items()}


def load(path: Path) -> Claim:
    """Returns the claim of a file."""
    tables = read_toml(path)
    fields = {f.name for f in dataclasses.fields(_File)}
    try:
        about = convert(_File, {k: v for k, v in tables.items() if k in fields}, "")
        if not about.criteria:
            raise ConfigError("criteria: must hold at least one condition")
        common = {k: v for k, v in tables.items() if k not in fields | {"runs"}}
        refuse_plan(common, "a claim")
        runs = _runs(convert(dict[str, dict[str, Any]], tables.get("runs", {}), "runs"), common)
        gate, criteria = (
            tuple(c for i, text in enumerate(texts) for c in parse(text, f"{name}[{i}]"))
            for name, texts in (("gate", about.gate), ("criteria", about.criteria))
        )
        _check_scores((*gate, *criteria), runs)
    except ConfigError as error:
        raise ConfigError(f"{path}: {error}") from None
    return Claim(path.stem, about, gate, criteria, runs)


def load_all(folder: Path) -> list[Claim]:
    """Returns the claims of a folder in alphabetical order."""
    files = sorted(folder.glob("*.toml"))
    if not files:
        raise ConfigError(f"{folder}: has no files of claims")
    return [load(path) for path in files]


def named(claims: Sequence[Claim], names: Sequence[str]) -> list[Claim]:
    """Returns the claims with these names, all for none; raises ConfigError for an unknown one."""
    known = {claim.name: claim for claim in claims}
    for name in names:
        if name not in known:
            raise ConfigError(f"unknown claim {name!r}{near(name, known)}")
    return [claim for claim in claims if not names or claim.name in names]


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


def _check_scores(conditions: tuple[Condition, ...], runs: Mapping[str, Run]) -> None:
    for condition in conditions:
        for name, view, length in condition.scores():
            if name not in runs:
                raise ConfigError(f"{condition.text!r}: no run is named {name}{near(name, runs)}")
            task = runs[name].task
            if view is not None and view not in task.views:
                raise ConfigError(f"{condition.text!r}: unknown view{near(view, task.views)}")
            if length not in task.test_lengths:
                raise ConfigError(
                    f"{condition.text!r}: length {length} is not among {list(task.test_lengths)}"
                )
