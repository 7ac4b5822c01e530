"""Models that `python -m experiments train` has kept."""

import dataclasses
from pathlib import Path

import jax
import jax.numpy as jnp
from flax import nnx

from experiments.config import Experiment, load
from experiments.config_io import near
from experiments.errors import ConfigError
from experiments.model import LanguageModel, Position, initialize, seed_keys, structure
from experiments.results_store import ResultsStore
from experiments.tasks import Task


def experiment_of(folder: Path) -> Experiment:
    """Returns the experiment whose results a folder holds.

    Raises:
      ConfigError: if it holds none.
    """
    if not (folder / "results.json").exists():
        raise ConfigError(
            f"{folder}: holds no results; make them with "
            "`python -m experiments train --tasks text --name mine`"
        )
    found = load(folder / "config.toml")
    return dataclasses.replace(found, results=str(folder.parent), name=folder.name)


def parameters(experiment: Experiment, task: Task, scheme: str) -> nnx.State:
    """Returns the kept parameters of the first seed.

    Raises:
      ConfigError: if the scheme is not one of the experiment's.
      ResultsError: if its parameters were not kept.
    """
    if scheme not in experiment.schemes:
        raise ConfigError(f"scheme: {scheme!r} is not there{near(scheme, experiment.schemes)}")
    position = experiment.scheme(task.name, scheme)
    like = jax.eval_shape(
        lambda k: initialize(task.model, position, task.vocab_size, k),
        seed_keys(experiment.seed_list, "parameters"),
    )
    params = ResultsStore(experiment, measure=True).load_parameters(task.name, scheme, like)
    return jax.tree.map(lambda x: jnp.asarray(x[0]), params)


def model(task: Task, position: Position, params: nnx.State) -> LanguageModel:
    """Returns a model with parameters and any scheme that these fit."""
    return nnx.merge(structure(task.model, position, task.vocab_size), params)
