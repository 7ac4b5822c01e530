"""The folder of results of one experiment; files are replaced atomically.

config.toml        every setting of the experiment
environment.json   versions, device, command
metrics.jsonl      a line per curve point, appended
results.json       all runs, replaced after each
parameters/        trained parameters, by `train`
"""

import dataclasses
import datetime
import io
import json
import shutil
import sys
import zipfile
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import jax
import numpy as np
import tomli_w
from flax import nnx

from experiments.config import Experiment
from experiments.config_io import convert, flatten, merge, read_toml
from experiments.environment import environment
from experiments.errors import ResultsError
from experiments.files import to_json, write_whole
from experiments.tables import Labels

_ALWAYS = {"name", "results", "tasks", "schemes.names"}
"""Settings that may differ between calls for one folder: what to run, and the folder itself."""


@dataclasses.dataclass(frozen=True)
class _Evaluation:
    """What tables and plots read of an evaluation in results.json."""

    length: int
    values: list[float | None]
    mode: str | None = None
    variant: str | None = None
    note: str | None = None
    in_distribution: bool = False
    places: list[float | None] | None = None


@dataclasses.dataclass(frozen=True)
class _Run:
    """The same of a run."""

    task: str
    scheme: str
    status: str
    evaluations: list[_Evaluation] | None = None
    error: str | None = None
    seeds: list[int] | None = None
    steps: int | None = None
    train_seconds: float | None = None
    curve: dict[str, list[Any]] | None = None
    final_loss: list[float | None] | None = None
    fit_rule: str | None = None


@dataclasses.dataclass(frozen=True)
class _Results:
    """The same of results.json; other entries are not checked."""

    runs: list[_Run]
    tasks: dict[str, Labels] = dataclasses.field(default_factory=dict)
    config: dict[str, Any] = dataclasses.field(default_factory=dict)
    environment: dict[str, Any] = dataclasses.field(default_factory=dict)


class ResultsStore:
    """One experiment's results on disk.

    Args:
      experiment: the experiment.
      fresh: whether to remove those of an earlier experiment of that name.
      measure: whether settings of evaluations may differ from those before.

    Raises:
      ResultsError: if the folder holds another experiment, or cannot be read or written.
    """

    def __init__(self, experiment: Experiment, *, fresh: bool = False, measure: bool = False):
        self.path = experiment.folder
        self._results: dict[str, Any] = {} if fresh else self._read()
        if self._results:
            free = [f"{n}.{s}" for n, t in experiment.tasks.items() for s in t.measure_settings]
            self._refuse_others(experiment, _ALWAYS | set(free if measure else ()))
        elif fresh:
            self._clear()
        if not self._results:
            now = datetime.datetime.now(datetime.UTC).isoformat(timespec="seconds")
            self._results = {"name": experiment.name, "created": now, "runs": []}
        self._results["config"] = self._joined(experiment)
        tasks = {name: vars(task.labels) for name, task in experiment.tasks.items()}
        self._results["tasks"] = self._results.get("tasks", {}) | tasks
        command = " ".join(["python -m experiments", *sys.argv[1:]])
        before = self._results.get("environment", {})
        self._results["environment"] = before | environment() | {"command": command}

    @property
    def runs(self) -> dict[tuple[str, str], dict[str, Any]]:
        """All runs by (task, scheme)."""
        return {(run["task"], run["scheme"]): run for run in self._results["runs"]}

    def finished(self, task: str, scheme: str, *, kept: bool = False) -> dict[str, Any] | None:
        """Returns the run of an earlier call; None if there is none.

        Args:
          task, scheme: names of the run.
          kept: whether its parameters must have been kept.
        """
        run = self.runs.get((task, scheme))
        if run is None or run["status"] != "done":
            return None
        return run if not kept or self._parameters(task, scheme).exists() else None

    def open(self, facts: Mapping[str, str]) -> None:
        """Writes the files that precede the first run, with `facts` in the environment."""
        self._results["environment"] |= facts
        write_whole(self.path / "config.toml", tomli_w.dumps(self._results["config"]))
        self._write_json("environment.json", self._results["environment"])
        self._write_json("results.json", self._results)

    def log(self, **entry: Any) -> None:
        """Appends a line to metrics.jsonl."""
        target = self.path / "metrics.jsonl"
        try:
            with target.open("a", encoding="utf-8") as stream:
                stream.write(to_json(entry) + "\n")
        except OSError as error:
            raise ResultsError(f"{target}: cannot be written: {error.strerror or error}") from None

    def add(self, run: Mapping[str, Any]) -> None:
        """Adds a run, in place of an earlier one of the same task and scheme."""
        runs = self.runs
        runs[run["task"], run["scheme"]] = dict(run)
        self._results["runs"] = list(runs.values())
        self._write_json("results.json", self._results)

    def save_parameters(self, task: str, scheme: str, params: nnx.State) -> None:
        """Keeps trained parameters, each under its path."""
        buffer = io.BytesIO()
        arrays: dict[str, Any] = {path: np.asarray(x) for path, x in _by_path(params).items()}
        np.savez(buffer, **arrays)
        write_whole(self._parameters(task, scheme), buffer.getvalue())

    def load_parameters(self, task: str, scheme: str, like: nnx.State) -> nnx.State:
        """Returns kept parameters in the structure of `like`, whose leaves they replace."""
        source = self._parameters(task, scheme)
        try:
            with np.load(io.BytesIO(source.read_bytes())) as file:
                found = {path: file[path] for path in file.files}
        except (OSError, ValueError, KeyError, EOFError, zipfile.BadZipFile) as error:
            raise ResultsError(
                f"{source}: cannot be read: {error}; make it with `python -m experiments train`"
            ) from None
        wanted = _by_path(like)
        for path in sorted(found.keys() | wanted.keys()):
            shapes = [x[path].shape if path in x else "nothing" for x in (found, wanted)]
            if shapes[0] != shapes[1]:
                raise ResultsError(
                    f"{source}: holds another model: {path} is {shapes[0]}, wanted {shapes[1]}"
                )
        arrays = jax.tree.map_with_path(lambda path, _: found[_name(path)], nnx.to_pure_dict(like))
        nnx.replace_by_pure_dict(like, arrays)
        return like

    def _parameters(self, task: str, scheme: str) -> Path:
        return self.path / "parameters" / f"{task}-{scheme.replace(':', '-')}.npz"

    def _read(self) -> dict[str, Any]:
        source = self.path / "results.json"
        if self.path.exists() and not self.path.is_dir():
            raise ResultsError(f"{self.path}: is not a folder; choose another --name")
        if not source.exists():
            return {}
        try:
            return read_results(self.path)
        except ResultsError as error:
            raise ResultsError(
                f"{error}; choose another --name, or --fresh to begin anew"
            ) from None

    def _refuse_others(self, experiment: Experiment, may_differ: set[str]) -> None:
        file = self.path / "config.toml"
        before = read_toml(file) if file.exists() else self._results.get("config", {})
        now = self._joined(experiment)
        # Tasks of one side only do not differ. All tables but `schemes` are tasks.
        tables = [{n for n, t in x.items() if isinstance(t, Mapping)} for x in (before, now)]
        alone = tables[0] ^ tables[1]
        old, new = flatten(before), flatten(now)
        unlike = [
            f"{k} ({old.get(k, 'default')} there, {new.get(k, 'default')} here)"
            for k in sorted(old.keys() | new.keys())
            if old.get(k) != new.get(k) and k not in may_differ and k.partition(".")[0] not in alone
        ]
        if unlike:
            more = f" and {len(unlike) - 4} more" if len(unlike) > 4 else ""
            raise ResultsError(
                f"{self.path}: holds results of another configuration: {'; '.join(unlike[:4])}"
                f"{more}. Choose another --name to keep them, or --fresh to begin anew"
            )

    def _joined(self, experiment: Experiment) -> dict[str, Any]:
        """The settings, with the tasks and schemes of earlier calls and of this one."""
        new = json.loads(json.dumps(experiment.to_tables()))
        old: dict[str, Any] = self._results.get("config", {}) if self._results["runs"] else {}
        tables = {k: v for k, v in old.items() if isinstance(v, dict) and k not in new}
        names = [*old.get("schemes", {}).get("names", []), *new["schemes"]["names"]]
        return merge(
            tables | new,
            {
                "tasks": list(dict.fromkeys([*old.get("tasks", []), *new["tasks"]])),
                "schemes": {"names": list(dict.fromkeys(names))},
            },
        )

    def _clear(self) -> None:
        """Removes the files of an experiment, and no others."""
        files = ("config.toml", "environment.json", "metrics.jsonl", "results.json", "report.html")
        try:
            for name in files:
                (self.path / name).unlink(missing_ok=True)
            if (self.path / "parameters").exists():
                shutil.rmtree(self.path / "parameters")
        except OSError as error:
            raise ResultsError(f"{error.filename}: cannot be removed: {error.strerror}") from None

    def _write_json(self, name: str, value: Any) -> None:
        write_whole(self.path / name, to_json(value, indent=1) + "\n")


def read_results(folder: Path) -> dict[str, Any]:
    """Returns the content of results.json in a folder.

    Raises:
      ResultsError: if there is none, or it was not written by an experiment of this version.
    """
    source = folder / "results.json"
    try:
        found = json.loads(source.read_text(encoding="utf-8"))
        known = convert(_Results, found, "")
    except (OSError, ValueError) as error:
        raise ResultsError(f"{source}: cannot be read: {error}") from None
    if not {run.task for run in known.runs} <= known.tasks.keys():
        raise ResultsError(f"{source}: cannot be read: an earlier version wrote it")
    return found


def _by_path(params: nnx.State) -> dict[str, Any]:
    leaves = jax.tree.leaves_with_path(nnx.to_pure_dict(params))
    return {_name(path): leaf for path, leaf in leaves}


def _name(path: Any) -> str:
    return jax.tree_util.keystr(path, simple=True, separator="/")
