"""An experiment as a frozen dataclass: from a TOML file, with changes on the command line."""

import contextlib
import dataclasses
import io
import typing
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Annotated, Any

import tyro

import posenc_jax as pe
from experiments.schemes import check_options, find_scheme, make_scheme
from experiments.strict import ConfigError, build, merge, near, need, read_toml
from experiments.tasks import TASKS, KBack, Kth, Task, Text
from experiments.tasks.base import Names, Options


@dataclasses.dataclass(frozen=True)
class Experiment:
    """Tasks, schemes and seeds: every scheme on every task, with the same data and start."""

    name: str = "compare"
    """Name of the folder of results."""
    results: str = "results"
    """Where folders of results are."""
    tasks: Names = ("kback", "kth", "text")
    """Tasks to run: kback, kth, text."""
    schemes: Names = ("none", "learned", "sinusoidal", "shaw", "t5", "alibi", "rope")
    """Schemes to compare: names, or package.module:Class for one of your own."""
    seeds: int = 1
    """Seeds per run; they train side by side, paired across schemes."""
    first_seed: int = 0
    """The first seed."""
    options: Annotated[Options, tyro.conf.Suppress] = dataclasses.field(default_factory=dict)
    kback: KBack = dataclasses.field(default_factory=KBack)
    """Task kback."""
    kth: Kth = dataclasses.field(default_factory=Kth)
    """Task kth."""
    text: Text = dataclasses.field(default_factory=Text)
    """Task text."""

    @property
    def folder(self) -> Path:
        """Where the results go."""
        return Path(self.results) / self.name

    @property
    def seed_list(self) -> list[int]:
        """The seeds of each run."""
        return list(range(self.first_seed, self.first_seed + self.seeds))

    def task(self, name: str) -> Task:
        """Returns the settings of a task."""
        return getattr(self, name)

    def scheme(self, task: str, scheme: str) -> pe.Scheme:
        """Returns a scheme for the model of a task."""
        return make_scheme(scheme, self.task(task), self.options)

    def plan(self) -> list[tuple[str, str]]:
        """Returns all (task, scheme) pairs, in the order in which they run."""
        return [(task, scheme) for task in self.tasks for scheme in self.schemes]

    def check(self) -> None:
        """Raises ConfigError for anything that cannot work."""
        need(self.seeds >= 1, "seeds", "must be at least 1", self)
        need(self.first_seed >= 0, "first_seed", "must not be negative", self)
        if not self.name or Path(self.name).name != self.name:
            raise ConfigError(f"name: must be the name of a folder, got {self.name!r}")
        for what in ("tasks", "schemes"):
            names = getattr(self, what)
            if not names or len(set(names)) != len(names):
                raise ConfigError(f"{what}: must name some, each once, got {list(names)}")
        for task in self.tasks:
            if task not in TASKS:
                raise ConfigError(f"tasks: unknown task {task!r}{near(task, TASKS)}")
        for scheme in self.schemes:
            find_scheme(scheme)
        check_options("schemes", self.options, self.schemes)
        for name in self.tasks:
            self.task(name).check()
            check_options(f"{name}.schemes", self.task(name).schemes, self.schemes)
        for task, scheme in self.plan():
            self.scheme(task, scheme)

    def to_tables(self) -> dict[str, Any]:
        """Returns the settings as they stand in a file."""
        out = dataclasses.asdict(self)
        out["schemes"] = {"names": list(self.schemes), **out.pop("options")}
        for task in set(TASKS) - set(self.tasks):
            del out[task]
        return _listed(out)


def _listed(value: Any) -> Any:
    """Tuples as lists, as JSON and TOML have them."""
    if isinstance(value, Mapping):
        return {k: _listed(v) for k, v in value.items()}
    return [_listed(v) for v in value] if isinstance(value, list | tuple) else value


def from_tables(tables: Mapping[str, Any], default: Experiment | None = None) -> Experiment:
    """Returns the experiment that a file describes, unchecked.

    Raises:
      ConfigError: for unknown settings and wrong types.
    """
    tables = dict(tables)
    schemes = tables.pop("schemes", None)
    if schemes is not None:
        if not isinstance(schemes, Mapping):
            raise ConfigError(f"schemes: must be a table with `names`, got {schemes!r}")
        schemes = dict(schemes)
        if "names" in schemes:
            tables["schemes"] = schemes.pop("names")
        check_options("schemes", schemes, ())
        tables["options"] = schemes
    return build(Experiment, tables, default=default)


def load(path: Path, arguments: Sequence[str] = (), *, quick: bool = False, program: str = ""):
    """Returns the checked experiment of a file with changes from the command line.

    Args:
      path: a TOML file.
      arguments: such as `--seeds 3 --text.train.steps 800 --schemes.t5.num-buckets 16`.
      quick: whether to apply the table [quick] of the file.
      program: how the program was called, for its help.

    Raises:
      ConfigError: with one line that says what is wrong.
      SystemExit: after printing help, if that was asked for.
    """
    tables = read_toml(path)
    overlay = tables.pop("quick", None)
    if quick:
        if overlay is None:
            raise ConfigError(f"{path}: has no table [quick], which --quick needs")
        tables = merge(tables, overlay)
    rest, options = _split_options(list(arguments))
    experiment = _override(from_tables(merge(tables, options)), rest, program)
    experiment.check()
    return experiment


def _split_options(arguments: list[str]) -> tuple[list[str], dict[str, Any]]:
    """Takes `--schemes.<scheme>.<option> <value>` (or `--<task>.schemes. ...`) out of a list."""
    rest: list[str] = []
    found: dict[str, Any] = {}
    while arguments:
        argument = arguments.pop(0)
        head, middle, tail = argument.partition("schemes.")
        task = head.removeprefix("--").rstrip(".")
        if not middle or not head.startswith("--") or (task and task not in TASKS):
            rest.append(argument)
            continue
        flag, equals, text = tail.partition("=")
        scheme, _, option = flag.rpartition(".")
        if not scheme:
            raise ConfigError(f"{argument}: write --schemes.<scheme>.<option> <value>")
        if not equals:
            if not arguments:
                raise ConfigError(f"{argument}: a value is missing")
            text = arguments.pop(0)
        table = {"schemes": {scheme: {option.replace("-", "_"): _literal(text)}}}
        found = merge(found, {task: table} if task else table)
    return rest, found


def _literal(text: str) -> Any:
    """A value as TOML writes it: number, true, false; anything else is a string."""
    for kind in (int, float):
        try:
            return kind(text)
        except ValueError:
            continue
    return {"true": True, "false": False}.get(text.lower(), text)


def _override(experiment: Experiment, arguments: list[str], program: str) -> Experiment:
    """Returns the experiment with the flags of the command line, read by tyro."""
    for argument in arguments:
        if argument.startswith("--") and argument not in ("--help",):
            _check_flag(argument.partition("=")[0])
    say = io.StringIO()
    try:
        with contextlib.redirect_stderr(say):
            return tyro.cli(
                Experiment,
                prog=program,
                description=Experiment.__doc__,
                default=experiment,
                args=arguments,
                config=(tyro.conf.FlagConversionOff,),
            )
    except SystemExit as stop:
        if stop.code in (0, None):
            raise
        words = " ".join("".join(c for c in say.getvalue() if c not in "╭╮╰╯│─").split())
        for title in ("Value error", "Missing argument", "Unrecognized options"):
            words = words.removeprefix(title).strip()
        for rest in ("Argument helptext:", "For full helptext"):
            words = words.partition(rest)[0].strip()
        raise ConfigError(f"command line: {words}") from None


def _check_flag(flag: str) -> None:
    """Raises ConfigError for a flag that is no setting."""
    cls: Any = Experiment
    path = ""
    for part in flag.removeprefix("--").split("."):
        name = part.replace("-", "_")
        path = f"{path}.{name}" if path else name
        fields = {f.name for f in dataclasses.fields(cls)} if dataclasses.is_dataclass(cls) else {}
        if name not in fields or name == "options":
            owner = getattr(cls, "__name__", "a setting")
            raise ConfigError(f"{path}: unknown setting of {owner}{near(name, fields)}")
        cls = typing.get_type_hints(cls)[name]
