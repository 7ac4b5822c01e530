"""An experiment as a frozen dataclass: from a TOML file, with changes on the command line."""

import dataclasses
import typing
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from pydantic import NonNegativeInt

import posenc_jax as pe
from experiments.errors import ConfigError
from experiments.models.model import Position
from experiments.models.schemes import (
    build,
    check_names,
    find,
    import_object,
    parts_of,
    plain,
)
from experiments.runs.results import PACK
from experiments.runs.run import Run, reference
from experiments.settings.common import Seeds
from experiments.settings.config_io import (
    Flag,
    convert,
    from_tables,
    merge,
    near,
    read_toml,
    settings_help,
    to_tables,
)
from experiments.settings.trust import code_of_task
from experiments.tasks import TASKS, Task

DEFAULT_TASKS = ("kback", "kth", "text")
"""What a file without `tasks` runs."""


@dataclasses.dataclass(frozen=True)
class Experiment:
    """Every scheme on every task, with the same data and the same initial parameters."""

    name: str = "compare"
    """Name of the folder of results."""
    results: str = "results"
    """Where folders of results are."""
    seeds: Seeds = 1
    """Seeds per scheme, paired across schemes."""
    first_seed: NonNegativeInt = 0
    """The first seed."""
    schemes: tuple[str, ...] = ("none", "learned", "sinusoidal", "shaw", "t5", "alibi", "rope")
    """Schemes to compare: names, chains such as rope+alibi, or package.module:object for a class,
    a scheme, a tuple of layers or a function of your own."""
    options: dict[str, Any] = dataclasses.field(default_factory=dict)
    """Settings of schemes by scheme; on the command line --schemes.t5.num-buckets."""
    tasks: Mapping[str, Any] = dataclasses.field(
        default_factory=lambda: {name: TASKS[name]() for name in DEFAULT_TASKS}
    )
    """Tasks to run, with their settings: names, or package.module:object."""

    @property
    def folder(self) -> Path:
        return Path(self.results) / self.name

    def plan(self) -> list[tuple[str, str]]:
        """Returns all (task, scheme) pairs, in the order in which they run."""
        return [(task, scheme) for task in self.tasks for scheme in self.schemes]

    def run(self, task_name: str, scheme: str, seed: int) -> Run:
        task, options = self.tasks[task_name], self.options_of(task_name, scheme)
        if scheme in task.rates:
            task = task.at_rates_of(scheme)
        return Run(task, scheme, options, self.scheme(task_name, scheme), seed)

    def all_runs(self) -> list[Run]:
        seeds = range(self.first_seed, self.first_seed + self.seeds)
        return [self.run(task, scheme, s) for task, scheme in self.plan() for s in seeds]

    def options_of(self, task_name: str, scheme: str) -> dict[str, Any]:
        """Returns the settings of a scheme for a task, by name of each part of a chain."""
        task: Task = self.tasks[task_name]
        options = {p: self.options.get(p, {}) | task.schemes.get(p, {}) for p in parts_of(scheme)}
        return {part: table for part, table in options.items() if table}

    def scheme(self, task_name: str, scheme: str) -> Position:
        """Returns a scheme, or one layer each, for the model of a task.

        A default `max_distance` beyond the training length is reduced to it, since parameters of
        longer distances would stay as they were initialised.
        """
        task: Task = self.tasks[task_name]
        sizes = {
            "num_heads": task.model.num_heads,
            "num_kv_heads": task.model.num_heads,
            "head_dim": task.model.head_dim,
            "model_dim": task.model.model_dim,
            "num_layers": task.model.num_layers,
            "max_length": task.num_coordinates,
            "trained_length": task.train_length,
        }
        tables: dict[str, dict[str, Any]] = {}
        for name in parts_of(scheme):
            options = self.options.get(name, {}), task.schemes.get(name, {})
            tables |= {f"schemes.{name}": options[0], f"{task_name}.schemes.{name}": options[1]}
            both, cls = {**options[0], **options[1]}, find(name)
            max_distance = both.get("max_distance")
            if isinstance(max_distance, int) and max_distance > task.train_length:
                raise ConfigError(
                    f"schemes.{name}.max_distance: {max_distance} exceeds "
                    f"{task_name}.train_length = {task.train_length}, so its furthest distances "
                    f"would never be trained; set {task_name}.schemes.{name}.max_distance"
                )
            default = getattr(cls, "max_distance", None)
            if both.get("num_buckets", getattr(cls, "num_buckets", 0)) is None:
                default = None  # TUPE has no buckets by default.
            if max_distance is None and isinstance(default, int) and default > task.train_length:
                tables[f"schemes.{name}"] = {**options[0], "max_distance": task.train_length}
        return build(scheme, sizes, tables, f"task {task_name}")

    def check(self) -> None:
        """Raises ConfigError for invalid settings."""
        plain = self.name.isprintable() and len(self.name) <= 100
        if self.name in ("", "..") or Path(self.name).name != self.name or not plain:
            raise ConfigError(f"name: must be the name of a folder, got {self.name!r:.120}")
        if not self.results.isprintable():
            raise ConfigError(f"results: must be the name of a folder, got {self.results!r:.120}")
        check_names(self.schemes)
        for name in {part for scheme in self.schemes for part in parts_of(scheme)}:
            find(name)
        _check_options("schemes", self.options)
        for name, task in self.tasks.items():
            with code_of_task(name):
                task.check()
                hash(task)  # Data and programs are found by it.
            _check_options(f"{name}.schemes", task.schemes)
            for part in (part for text in task.rates for part in parts_of(text)):
                if ":" not in part and part not in pe.SCHEMES:
                    hint = near(part, pe.SCHEMES)
                    raise ConfigError(f"{name}.rates: there is no scheme {part!r}{hint}")
        for task, scheme in self.plan():
            self.scheme(task, scheme)

    def to_tables(self) -> dict[str, Any]:
        return {name: getattr(self, name) for name in _SETTINGS} | {
            "tasks": [reference(type(task)) for task in self.tasks.values()],
            "schemes": {"names": list(self.schemes), **self.options},
            **{name: to_tables(task) for name, task in self.tasks.items()},
        }


_EPILOG = """\
Defaults are those of the file. --quick applies its table [quick]. Settings of schemes:
--schemes.t5.num-buckets 16, and for one task --text.schemes.t5.num-buckets 16.

--fresh removes the results of an earlier experiment of that name. --workers N runs at a time,
--minutes M as a limit. --trust A,B allows package.module:object of installed packages.
"""
_SETTINGS = ("name", "results", "seeds", "first_seed", "schemes")
_NO_TASKS = {*_SETTINGS, "task", "tasks", "scheme", "options", "seed", "quick"}
"""Names of other settings, beside which the table of a task stands."""


def refuse_plan(tables: Mapping[str, Any], plan: str) -> None:
    """Raises ConfigError for settings of `compare` alone, in a table of a study or a claim."""
    schemes = tables.get("schemes", {})
    if not isinstance(schemes, Mapping) or "names" in schemes:
        raise ConfigError(f"schemes: must be tables of options in {plan}, got {schemes!r:.80}")
    for name in ("tasks", *_SETTINGS):
        if name in tables and name != "schemes":
            raise ConfigError(f"{name}: is a setting of compare, not of {plan}")


def _check_options(path: str, options: Mapping[str, Any]) -> None:
    for name, table in options.items():
        if not isinstance(table, Mapping):
            raise ConfigError(f"{path}.{name}: must be a table of options, got {table!r}")
        find(name)


def find_task(name: str) -> type[Task]:
    """Returns the class of a key of `experiments.tasks.TASKS`, or of `package.module:Class`."""
    if ":" not in name:
        if name not in TASKS:
            raise ConfigError(f"tasks: unknown task {name!r}{near(name, TASKS)}")
        return TASKS[name]
    task = import_object(name, "tasks")
    if not (isinstance(task, type) and issubclass(task, Task) and task.name):
        raise ConfigError(f"tasks: {name!r} is no subclass of Task with a name")
    if not task.name.isidentifier() or task.name in _NO_TASKS:
        words = "must have a name that is a word, and no setting"
        raise ConfigError(f"tasks: {name!r} {words}, got {task.name!r}")
    if lacking := sorted(task.__abstractmethods__):
        raise ConfigError(f"tasks: {name!r} must define {', '.join(lacking)}")
    return task


def objects_in(tables: Mapping[str, Any]) -> set[str]:
    """Returns the names `package.module:object` of schemes and tasks in the tables of a file."""
    schemes = tables.get("schemes")
    places = [schemes, tables.get("tasks")]
    places += [schemes.get("names")] if isinstance(schemes, Mapping) else []
    places += [table.get("schemes") for table in tables.values() if isinstance(table, Mapping)]
    texts = [x for each in places if isinstance(each, Mapping | Sequence) for x in each]
    parts = [part for text in texts if isinstance(text, str) for part in parts_of(text)]
    return {part for part in parts if ":" in part}


def from_file(tables: Mapping[str, Any], others: Iterable[str] = ()) -> Experiment:
    """Returns the experiment that a file describes, unchecked.

    Args:
      tables: `tasks` names those to run, and a table of a task's name has its settings; the table
        `schemes` has `names`, and a table of options for each scheme.
      others: tasks that may have a table though they do not run.
    """
    tables = dict(tables)
    run = convert(list[str], tables.pop("tasks", list(DEFAULT_TASKS)), "tasks")
    if not run or len(set(run)) != len(run):
        raise ConfigError(f"tasks: must name some, each once, got {run}")
    known = TASKS | {task.name: task for task in map(find_task, [*others, *run])}
    running = [find_task(name).name for name in run]
    if len(set(running)) != len(running):
        raise ConfigError(f"tasks: two have one name, got {run}")
    tasks = {}
    for name, task in known.items():
        with code_of_task(name):
            tasks[name] = from_tables(task, tables.pop(name, {}), name)
    schemes = tables.pop("schemes", {})
    if isinstance(schemes, Mapping) and "names" in schemes:
        schemes = dict(schemes)
        tables["schemes"] = schemes.pop("names")
    schemes = convert(dict[str, Any], schemes, "schemes")
    _check_options("schemes", schemes)
    hints = typing.get_type_hints(Experiment, include_extras=True)
    for name in tables:
        if name not in _SETTINGS:
            hint = near(name, [*_SETTINGS, *known])
            raise ConfigError(f"{name}: unknown setting of Experiment{hint}")
    settings = {name: convert(hints[name], value, name) for name, value in tables.items()}
    if "schemes" in settings:
        settings["schemes"] = tuple(map(plain, settings["schemes"]))
    tasks = {
        name: dataclasses.replace(
            tasks[name], rates={plain(scheme): x for scheme, x in tasks[name].rates.items()}
        )
        for name in running
    }
    return Experiment(**settings, options=schemes, tasks=tasks)


def load(
    path: Path, arguments: Sequence[str] = (), *, quick: bool = False, program: str = ""
) -> Experiment:
    """Returns the checked experiment of a file with changes from the command line.

    Args:
      arguments: such as `--seeds 3 --text.train.steps 800 --schemes.t5.num-buckets 16`.
      quick: whether to apply the table [quick] of the file.
      program: how the program was called, for its help.

    Raises:
      SystemExit: after printing help, if that was asked for.
    """
    tables = read_toml(path)
    overlay = tables.pop("quick", None)
    others = convert(list[str], tables.get("tasks", []), "tasks")
    if quick:
        if overlay is None:
            raise ConfigError(f"{path}: has no table [quick], which --quick needs")
        tables = merge(tables, convert(dict[str, Any], overlay, "quick"))
    flags = [argument for argument in arguments if argument not in ("-h", "--help")]
    experiment = from_file(merge(tables, _of_flags(flags)), others)
    if len(flags) < len(arguments):
        print("\n".join(_help(experiment, program)))
        raise SystemExit(0)
    experiment.check()
    return experiment


def experiment_of(folder: Path, trusted: Collection[str] = ()) -> Experiment:
    """Returns the experiment whose results a folder holds, which may be of somebody else.

    `trusted` are objects, as `package.module:object`, that it may import and call.
    """
    if not (folder / "config.toml").exists():
        if (folder / PACK).exists() or any(folder.glob("*/result.json")):
            raise ConfigError(
                f"{folder}: has results of a study or of claims; `python -m experiments study FILE "
                "--results FOLDER` and `scoreboard` write their pages"
            )
        raise ConfigError(
            f"{folder}: holds no results; make them with "
            "`python -m experiments compare --tasks text --name mine`"
        )
    if others := objects_in(read_toml(folder / "config.toml")) - set(trusted):
        shown = ",".join(sorted(others))
        raise ConfigError(
            f"{folder / 'config.toml'}: names code, which is not called unless you allow it: "
            f"--trust {shown!r:.200}"
        )
    experiment = load(folder / "config.toml")
    return dataclasses.replace(experiment, results=str(folder.parent), name=folder.name)


def _help(experiment: Experiment, program: str) -> Iterator[str]:
    yield f"usage: {program} [settings]\n\n{Experiment.__doc__}"
    yield from settings_help(experiment, "experiment")
    for name, task in experiment.tasks.items():
        yield from settings_help(task, f"task {name}", f"{name}.")
    yield f"\n{_EPILOG}"


def _of_flags(arguments: Sequence[str]) -> dict[str, Any]:
    out: dict[str, Any] = {}
    words = iter(arguments)
    for word in words:
        flag, equals, value = word.partition("=")
        if not flag.startswith("--"):
            raise ConfigError(f"{word:.60}: is no flag")
        path = _path(flag.removeprefix("--"))
        if len(path) > 10:
            raise ConfigError(f"{flag:.60}: is nested too deeply")
        value = value if equals else next(words, None)
        if value is None or (not equals and value.startswith("--")):
            raise ConfigError(f"{flag:.60}: expected a value")
        table: Any = Flag(value)
        for key in reversed(path):
            table = {key: table}
        out = merge(out, table)
    return out


def _path(flag: str) -> list[str]:
    """Returns the path of a flag in the tables.

    >>> _path("text.train.batch"), _path("text.schemes.mypkg.mine:My.rate-of-x")
    (['text', 'train', 'batch'], ['text', 'schemes', 'mypkg.mine:My', 'rate_of_x'])
    """
    if flag == "schemes":
        return ["schemes", "names"]
    head, schemes, tail = flag.partition("schemes.")
    if not schemes:
        return flag.replace("-", "_").split(".")
    scheme, _, option = tail.rpartition(".")
    if not scheme:
        raise ConfigError(f"--{flag}: write --schemes.<scheme>.<option> <value>")
    return [*head.split(".")[:-1], "schemes", scheme, option.replace("-", "_")]
