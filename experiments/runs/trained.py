"""Experiments of earlier calls."""

import dataclasses
from collections.abc import Collection
from pathlib import Path

from experiments.errors import ConfigError, ResultsError
from experiments.runs.experiment import Experiment, load, objects_in
from experiments.settings.config_io import read_toml


def refuse_earlier_versions(folder: Path) -> None:
    """Raises ResultsError if a folder of results was written before runs had folders."""
    if folder.exists() and not folder.is_dir():
        raise ResultsError(f"{folder}: is not a folder; choose another --name")
    if (folder / "results.json").exists():
        raise ResultsError(
            f"{folder / 'results.json'}: cannot be read: an earlier version wrote it; choose "
            "another --name, or run compare or train with --fresh to begin anew"
        )


def experiment_of(folder: Path, trusted: Collection[str] = ()) -> Experiment:
    """Returns the experiment whose results a folder holds.

    Args:
      folder: the folder, which may be of somebody else.
      trusted: objects, as `package.module:object`, that it may import and call.

    Raises:
      ConfigError: if it holds none, or names other objects.
      ResultsError: if an earlier version wrote them.
    """
    refuse_earlier_versions(folder)
    if not (folder / "config.toml").exists():
        raise ConfigError(
            f"{folder}: holds no results; make them with "
            "`python -m experiments train --tasks text --name mine`"
        )
    if others := objects_in(read_toml(folder / "config.toml")) - set(trusted):
        shown = ",".join(sorted(others))
        raise ConfigError(
            f"{folder / 'config.toml'}: names code, which is not called unless you allow it: "
            f"--trust {shown!r:.200}"
        )
    experiment = load(folder / "config.toml")
    return dataclasses.replace(experiment, results=str(folder.parent), name=folder.name)
