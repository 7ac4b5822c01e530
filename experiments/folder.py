"""The folder of results: nothing in it is ever half-written or of two experiments.

config.toml        the experiment, with every setting
environment.json   versions, device, command
metrics.jsonl      a line per curve point, appended
results.json       all runs, replaced whole after each
parameters/        trained parameters, where they are kept
"""

import datetime
import importlib.metadata
import json
import math
import os
import platform
import shutil
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import jax
import numpy as np
from flax import nnx

from experiments.config import Experiment
from experiments.strict import read_toml, write_toml

_ANY = frozenset({"name", "results", "tasks", "schemes.names"})
"""Settings that may differ between calls for one folder: what to run and where it lies."""
MEASURES = _ANY | {
    *(f"{task}.{name}" for task in ("kback", "kth") for name in ("eval_batch", "eval_batches")),
    *(f"text.{name}" for name in ("eval_bytes", "stride", "sliding_lengths", "variants")),
}
"""Settings that trained parameters do not depend on, besides."""


class ResultsError(RuntimeError):
    """A folder that cannot be used; the message is one line."""


def environment() -> dict[str, Any]:
    """Returns versions, device and command."""
    packages = ("jax", "jaxlib", "flax", "optax", "numpy")
    device = jax.devices()[0]
    return {
        "python": platform.python_version(),
        **{name: importlib.metadata.version(name) for name in packages},
        "platform": platform.platform(),
        "device": f"{device.platform}: {device.device_kind}",
        "cores": os.cpu_count(),
        "command": " ".join(["python -m experiments", *sys.argv[1:]]),
    }


def write_whole(path: Path, content: str | bytes) -> None:
    """Writes a file so that it is there whole, or as it was before.

    Raises:
      ResultsError: if it cannot be written.
    """
    beside = path.with_name(f".{path.name}.{os.getpid()}.part")
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        data = content.encode() if isinstance(content, str) else content
        with beside.open("wb") as stream:
            stream.write(data)
            stream.flush()
            os.fsync(stream.fileno())
        beside.replace(path)
    except OSError as error:
        beside.unlink(missing_ok=True) if beside.parent.is_dir() else None
        raise ResultsError(f"{path}: cannot be written: {error.strerror or error}") from None


class Folder:
    """One experiment's results on disk.

    Raises:
      ResultsError: if the folder holds another experiment, or cannot be read or written.
    """

    def __init__(
        self, experiment: Experiment, *, fresh: bool = False, may_differ: frozenset[str] = _ANY
    ):
        self.path = experiment.folder
        self.experiment = experiment
        self._results: dict[str, Any] = self._read()
        if self._results and not fresh:
            self._refuse_others(may_differ)
        elif self._results or fresh:
            self._clear()
        if not self._results:
            self._results = {
                "name": experiment.name,
                "created": datetime.datetime.now(datetime.UTC).isoformat(timespec="seconds"),
                "runs": [],
            }
        self._results["config"] = self._tables()
        before = self._results.get("environment", {})
        self._results["environment"] = before | environment()

    @property
    def runs(self) -> dict[tuple[str, str], dict[str, Any]]:
        """All runs by (task, scheme)."""
        return {(run["task"], run["scheme"]): run for run in self._results["runs"]}

    def finished(self, task: str, scheme: str) -> dict[str, Any] | None:
        """Returns the run if it was done before."""
        run = self.runs.get((task, scheme))
        return run if run and run["status"] == "done" else None

    def open(self, **facts: Any) -> None:
        """Writes what is known before the first run; `facts` join the environment."""
        self._results["environment"] |= facts
        write_whole(self.path / "config.toml", write_toml(self._results["config"]))
        self._write_json("environment.json", self._results["environment"])
        self._write_json("results.json", self._results)

    def log(self, **entry: Any) -> None:
        """Appends a line to metrics.jsonl."""
        try:
            with (self.path / "metrics.jsonl").open("a", encoding="utf-8") as stream:
                stream.write(json.dumps(_finite(entry)) + "\n")
        except OSError as error:
            raise ResultsError(
                f"{self.path / 'metrics.jsonl'}: cannot be written: {error.strerror or error}"
            ) from None

    def add(self, run: Mapping[str, Any]) -> None:
        """Adds a run, in place of an earlier one of the same task and scheme."""
        runs = self.runs
        runs[run["task"], run["scheme"]] = dict(run)
        self._results["runs"] = list(runs.values())
        self._write_json("results.json", self._results)

    def save_parameters(self, task: str, scheme: str, params: nnx.State) -> None:
        """Keeps trained parameters."""
        target = self._parameters(task, scheme)
        leaves = [np.asarray(x) for x in jax.tree.leaves(params)]
        try:
            target.parent.mkdir(parents=True, exist_ok=True)
            beside = target.with_suffix(".part.npz")
            np.savez(beside, *leaves)
            beside.replace(target)
        except OSError as error:
            raise ResultsError(f"{target}: cannot be written: {error.strerror or error}") from None

    def load_parameters(self, task: str, scheme: str, like: nnx.State) -> nnx.State:
        """Returns kept parameters in the structure of `like`."""
        source = self._parameters(task, scheme)
        try:
            with np.load(source) as file:
                leaves = [file[f"arr_{i}"] for i in range(len(file.files))]
        except (OSError, ValueError, KeyError) as error:
            raise ResultsError(
                f"{source}: cannot be read: {error}; make it with `python -m experiments train`"
            ) from None
        wanted = jax.tree.leaves(like)
        if [x.shape for x in leaves] != [x.shape for x in wanted]:
            raise ResultsError(f"{source}: holds another model")
        return jax.tree.unflatten(jax.tree.structure(like), leaves)

    def _parameters(self, task: str, scheme: str) -> Path:
        return self.path / "parameters" / f"{task}-{scheme.replace(':', '-')}.npz"

    def _read(self) -> dict[str, Any]:
        source = self.path / "results.json"
        try:
            if self.path.exists() and not self.path.is_dir():
                raise ResultsError(f"{self.path}: is no folder; choose another --name")
            if not source.exists():
                return {}
            found = json.loads(source.read_text(encoding="utf-8"))
            if not isinstance(found, dict) or not isinstance(found.get("runs"), list):
                raise ValueError("it holds no runs")
            return found
        except (OSError, ValueError) as error:
            raise ResultsError(
                f"{source}: cannot be read: {error}; choose another --name, or --fresh to begin "
                "anew"
            ) from None

    def _refuse_others(self, may_differ: frozenset[str]) -> None:
        file = self.path / "config.toml"
        before = read_toml(file) if file.exists() else self._results.get("config", {})
        old, new = _flat(before), _flat(self._tables())
        tasks = {t for t in self.experiment.tasks if t in before}
        unlike = [
            f"{k} ({old.get(k, 'default')} there, {new.get(k, 'default')} here)"
            for k in sorted(old.keys() | new.keys())
            if old.get(k) != new.get(k) and k not in may_differ and _concerns(k, tasks)
        ]
        if unlike:
            more = f" and {len(unlike) - 4} more" if len(unlike) > 4 else ""
            raise ResultsError(
                f"{self.path}: holds results of another configuration: {'; '.join(unlike[:4])}"
                f"{more}. Choose another --name to keep them, or --fresh to begin anew"
            )

    def _tables(self) -> dict[str, Any]:
        """The settings, with tasks and schemes of earlier calls beside those of this one."""
        new = self.experiment.to_tables()
        old: dict[str, Any] = self._results["config"] if self._results.get("runs") else {}
        out = {**{k: v for k, v in old.items() if isinstance(v, dict)}, **new}
        for group, key in ((out, "tasks"), (out["schemes"], "names")):
            before = old if key == "tasks" else old.get("schemes", {})
            group[key] = list(dict.fromkeys([*before.get(key, []), *group[key]]))
        return out

    def _clear(self) -> None:
        """Removes what an experiment wrote, and nothing else."""
        self._results = {}
        try:
            for name in ("config.toml", "environment.json", "metrics.jsonl", "results.json"):
                (self.path / name).unlink(missing_ok=True)
            (self.path / "report.html").unlink(missing_ok=True)
            shutil.rmtree(self.path / "parameters", ignore_errors=True)
        except OSError as error:
            raise ResultsError(f"{self.path}: cannot be cleared: {error.strerror}") from None

    def _write_json(self, name: str, value: Any) -> None:
        write_whole(self.path / name, json.dumps(_finite(value), indent=1) + "\n")


def _concerns(key: str, tasks: set[str]) -> bool:
    """Whether a differing setting matters: those of tasks that only one side has do not."""
    head = key.partition(".")[0]
    return head in tasks or head not in ("kback", "kth", "text")


def _flat(tables: Mapping[str, Any], prefix: str = "") -> dict[str, Any]:
    out: dict[str, Any] = {}
    for key, value in tables.items():
        if isinstance(value, Mapping):
            out |= _flat(value, f"{prefix}{key}.")
        else:
            out[f"{prefix}{key}"] = value
    return out


def _finite(value: Any) -> Any:
    """JSON has no NaN; null stands for it."""
    if isinstance(value, Mapping):
        return {k: _finite(v) for k, v in value.items()}
    if isinstance(value, list | tuple):
        return [_finite(v) for v in value]
    return None if isinstance(value, float) and not math.isfinite(value) else value
