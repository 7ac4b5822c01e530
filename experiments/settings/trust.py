"""Whose code a file of settings may name: it may be of somebody else, and imports run code.

Modules of this project, of the working folder and of other folders of your own may be imported.
Modules of the standard library and of installed packages may not, unless --trust names the object.
"""

import argparse
import contextlib
import importlib.util
import inspect
import os
import sys
import sysconfig
import traceback
from collections.abc import Generator
from pathlib import Path
from typing import Any

import experiments
import posenc_jax
from experiments.errors import ConfigError, ExperimentError
from experiments.settings.config_io import names

TRUSTED: set[str] = set()
"""Objects, as `package.module:object`, that --trust names."""
_PROJECT = posenc_jax.__name__, experiments.__name__
_PROJECT_FOLDERS = [os.path.dirname(inspect.getfile(x)) for x in (posenc_jax, experiments)]
_KINDS = "stdlib", "platstdlib", "purelib", "platlib"
_LIBRARIES = {f(sysconfig.get_path(x)) for f in (os.path.abspath, os.path.realpath) for x in _KINDS}


def _trusted(text: str) -> list[str]:
    """Returns the names of objects, which are allowed from now on."""
    TRUSTED.update(names(text))
    return names(text)


def add_trust(parser: argparse.ArgumentParser) -> None:
    """Adds the flag that allows objects of others; it holds for this process."""
    parser.add_argument(
        "--trust",
        type=_trusted,
        default=[],
        metavar="A,B",
        help="schemes and tasks, package.module:object, that may be imported and called though "
        "they are of an installed package, or named by a folder of results",
    )


def is_project(file: str) -> bool:
    return any(Path(file).is_relative_to(folder) for folder in _PROJECT_FOLDERS)


def is_installed(file: str) -> bool:
    """Returns whether a file is of the standard library or of an installed package."""
    return any(
        {"site-packages", "dist-packages"} & set(path.parts)
        or any(path.is_relative_to(folder) for folder in _LIBRARIES)
        for path in (Path(os.path.abspath(file)), Path(os.path.realpath(file)))
    )


def check_module(name: str, setting: str) -> None:
    """Raises ConfigError unless the module of an object may be imported, before it is.

    Packages around it are imported, once they have passed. `name` is `package.module:object`,
    `setting` the setting that holds it.
    """
    module = name.partition(":")[0]
    parts = module.split(".")
    if name in TRUSTED or parts[0] in _PROJECT:
        return
    for count in range(1, len(parts) + 1):
        spec = importlib.util.find_spec(".".join(parts[:count]))
        if spec is None:
            return  # Its import will say so.
        files = [spec.origin] if spec.has_location else []
        files += spec.submodule_search_locations or []
        if not files or any(is_installed(str(file)) for file in files):
            raise ConfigError(
                f"{setting}: {module!r} is of an installed package or of Python's library, whose "
                f"code is not run unless you allow it: --trust {name}"
            )


def is_own(function: Any) -> bool:
    """Returns whether a function is defined in this project or in a file of your own.

    The module or the file of a function may be another than the one that names it, and a decorator
    may be of an installed package.
    """
    inner = inspect.unwrap(function)
    module, code = sys.modules.get(inner.__module__), getattr(inner, "__code__", None)
    files = getattr(module, "__file__", None), getattr(code, "co_filename", None)
    return all(file and (is_project(file) or not is_installed(file)) for file in files)


def in_one_line(error: BaseException) -> str:
    """Returns an exception, after the last line of the user's own code that it passed."""
    frames = reversed(traceback.extract_tb(error.__traceback__))
    users = (f for f in frames if not (is_project(f.filename) or is_installed(f.filename)))
    place = next((f"{Path(f.filename).name}:{f.lineno}, in {f.name}: " for f in users), "")
    return f"{place}{type(error).__name__}: {' '.join(str(error).split()):.300}"


@contextlib.contextmanager
def code_of_task(name: str) -> Generator[None]:
    """Turns an error of the code of a task, for its settings or data, into `ConfigError`."""
    try:
        yield
    except ExperimentError:
        raise
    except (OSError, TypeError, ValueError) as error:
        raise ConfigError(f"{name}: {in_one_line(error)}") from None
