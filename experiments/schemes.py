"""Schemes by name: sizes come from the model, options from tables, mistakes are explained."""

import dataclasses
import importlib
import inspect
import typing
from collections.abc import Mapping
from typing import Any

import posenc_jax as pe
from experiments.strict import ConfigError, convert, near
from experiments.tasks.base import Task

VOCABULARY = ("num_heads", "head_dim", "model_dim", "max_length")
"""Fields that the model supplies; every other field of a scheme has a default."""


def find_scheme(name: str) -> type[pe.Scheme]:
    """Returns a scheme class.

    Args:
      name: a key of `posenc_jax.SCHEMES`, or `package.module:Class`.

    Raises:
      ConfigError: if there is no such scheme.
    """
    if ":" not in name:
        if name not in pe.SCHEMES:
            raise ConfigError(f"schemes: unknown scheme {name!r}{near(name, pe.SCHEMES)}")
        return pe.SCHEMES[name]
    module_name, _, class_name = name.partition(":")
    try:
        module = importlib.import_module(module_name)
    except Exception as error:
        raise ConfigError(
            f"schemes: cannot import {module_name!r}: {type(error).__name__}: {error}"
        ) from None
    found = getattr(module, class_name, None)
    if found is None:
        classes = [n for n, c in vars(module).items() if inspect.isclass(c)]
        raise ConfigError(
            f"schemes: {module_name!r} has no {class_name!r}{near(class_name, classes)}"
        )
    if not (inspect.isclass(found) and issubclass(found, pe.Scheme)):
        raise ConfigError(f"schemes: {name!r} is no subclass of posenc_jax.Scheme")
    return found


def sized_scheme(
    name: str, sizes: Mapping[str, int], tables: Mapping[str, Mapping[str, Any]], whose: str
) -> pe.Scheme:
    """Returns a scheme for a model.

    Args:
      name: as for `find_scheme`.
      sizes: of the model, by the names in `VOCABULARY`.
      tables: options by where they were found, for messages; later ones win.
      whose: whose model it is, for messages.

    Raises:
      ConfigError: for options that the scheme does not have, or values that it refuses.
    """
    cls = find_scheme(name)
    hints = typing.get_type_hints(cls)
    fields = {f.name: f for f in dataclasses.fields(cls)}
    values: dict[str, Any] = {n: sizes[n] for n in fields if n in sizes}
    for path, table in tables.items():
        for option, value in table.items():
            at = f"{path}.{option}"
            if option not in fields:
                known = [n for n in fields if n not in sizes]
                raise ConfigError(f"{at}: unknown option of {cls.__name__}{near(option, known)}")
            value = convert(hints[option], value, at)
            if option in sizes and value != sizes[option]:
                raise ConfigError(f"{at}: {value}, but the model of {whose} has {sizes[option]}")
            values[option] = value
    try:
        return cls(**values)
    except (TypeError, ValueError) as error:
        raise ConfigError(f"schemes.{name}: {whose}: {error}") from None


def make_scheme(name: str, task: Task, options: Mapping[str, Mapping[str, Any]]) -> pe.Scheme:
    """Returns the scheme for a task's model.

    Tables that reach further than the task trains are made shorter, unless they were asked
    for: their far rows would stay as they were drawn.

    Args:
      name: as for `find_scheme`.
      task: supplies the sizes, and options that are for this task alone.
      options: options of schemes for all tasks, by scheme.

    Raises:
      ConfigError: for options that the scheme does not have, or values that it refuses.
    """
    sizes = {
        "num_heads": task.model.num_heads,
        "head_dim": task.model.head_dim,
        "model_dim": task.model.model_dim,
        "max_length": task.longest,
    }
    tables = {
        f"schemes.{name}": options.get(name, {}),
        f"{task.name}.schemes.{name}": task.schemes.get(name, {}),
    }
    given = {option for table in tables.values() for option in table}
    reach = {"max_distance": task.train_length, "span": task.train_length // 2}
    defaults: dict[str, Any] = {f.name: f.default for f in dataclasses.fields(find_scheme(name))}
    short = {
        option: most
        for option, most in reach.items()
        if option not in given and isinstance(defaults.get(option), int) and defaults[option] > most
    }
    scheme = sized_scheme(name, sizes, {"trained lengths": short, **tables}, f"task {task.name}")
    furthest = getattr(scheme, "max_distance", 0)
    if isinstance(furthest, int) and furthest > task.train_length:
        raise ConfigError(
            f"schemes.{name}.max_distance: {furthest} exceeds {task.name}.train_length = "
            f"{task.train_length}, so its furthest distances would never be trained; set "
            f"{task.name}.schemes.{name}.max_distance"
        )
    return scheme


def check_options(path: str, options: Mapping[str, Any], names: tuple[str, ...]) -> None:
    """Raises ConfigError for options of unknown schemes, or that are no tables."""
    for name, table in options.items():
        if not isinstance(table, Mapping):
            raise ConfigError(f"{path}.{name}: must be a table of options, got {table!r}")
        if name not in names:
            find_scheme(name)
