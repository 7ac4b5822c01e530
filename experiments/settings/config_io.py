"""Settings from TOML files and the command line, read by libraries.

`pydantic` turns tables into frozen dataclasses: it is strict (no "3" for 3), and its errors are
data (path, kind, value), from which one line can be made. (msgspec ignores unknown names of
dataclasses; cattrs needs a hook per type to be strict.) `argparse` reports errors to a method
(`Parser.error`), so that they end as one line too.
"""

import argparse
import dataclasses
import difflib
import functools
import itertools
import json
import math
import textwrap
import tomllib
import types
import typing
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path
from typing import Annotated, Any, NoReturn, TypeVar

import docstring_parser
import pydantic

from experiments.errors import ConfigError

T = TypeVar("T")
_STRICT = pydantic.ConfigDict(extra="forbid", strict=True, allow_inf_nan=False)


@typing.dataclass_transform(frozen_default=True, field_specifiers=(dataclasses.field,))
def strict(cls: type[T]) -> type[T]:
    """Makes a frozen dataclass that `convert` reads strictly; subclasses are read so too."""
    cls.__pydantic_config__ = _STRICT  # ty: ignore[missing-attribute]
    return dataclasses.dataclass(frozen=True)(cls)


def near(name: str, known: Iterable[str]) -> str:
    """Returns a hint for an unknown name: the closest known one, or all of them.

    >>> near("d_modle", ["model_dim", "num_heads"])
    "; did you mean 'model_dim'?"
    """
    known = list(known)
    match = difflib.get_close_matches(name.lower().replace("-", "_"), known, 1, 0.5)
    return f"; did you mean {match[0]!r}?" if match else f"; known: {', '.join(known) or 'none'}"


def read_toml(path: Path) -> dict[str, Any]:
    try:
        tables = tomllib.loads(path.read_text(encoding="utf-8"))
    except FileNotFoundError:
        hint = "; configs are in a clone of the repository" if path.parts[0] == "configs" else ""
        raise ConfigError(f"{path}: no such file{hint}") from None
    except (OSError, ValueError) as error:  # Not TOML, not UTF-8, a path with a NUL.
        raise ConfigError(f"{path}: cannot be read: {error}") from None
    except RecursionError:
        raise ConfigError(f"{path}: is nested too deeply") from None
    refuse_extremes(tables, f"{path}: ")
    return tables


def refuse_extremes(tables: Mapping[str, Any], prefix: str = "") -> None:
    """Raises ConfigError for numbers beyond int32 or not finite, and for too many levels."""
    level: list[tuple[str, Any]] = list(tables.items())
    for _ in range(20):
        inner: list[tuple[str, Any]] = []
        for path, value in level:
            if isinstance(value, Mapping):
                inner += [(f"{path}.{key}", each) for key, each in value.items()]
            elif isinstance(value, list):
                inner += [(f"{path}[{i}]", each) for i, each in enumerate(value)]
            elif isinstance(value, int) and abs(value) >= 2**31:
                words = f"{value}" if value.bit_length() < 64 else f"{value.bit_length()} bits"
                raise ConfigError(f"{prefix}{path}: must be below 2**31, got {words}")
            elif isinstance(value, float) and not math.isfinite(value):
                raise ConfigError(f"{prefix}{path}: must be a finite number, got {value}")
        level = inner
    if level:
        raise ConfigError(f"{prefix}{level[0][0]:.60}: is nested too deeply")


def to_tables(settings: Any) -> dict[str, Any]:
    """Returns a dataclass as nested tables of JSON's types (tuples become lists)."""
    return json.loads(json.dumps(dataclasses.asdict(settings)))


def from_tables(cls: type[T], tables: Any, path: str = "") -> T:
    """Returns `cls(**tables)`, with nested dataclasses and defaults for missing settings.

    The dataclass is `strict`; `path` is where the tables are, for messages.
    """
    if isinstance(tables, Mapping):
        tables = merge(to_tables(cls()), tables)
    return convert(cls, tables, path)


class Flag(str):
    """Text of the command line, which `convert` reads as the type of its setting says."""


def _read_flags(hint: Any, value: Any) -> Any:
    """Returns a value without flags, nested ones too."""
    while typing.get_origin(hint) is Annotated:
        hint = typing.get_args(hint)[0]
    origin, inner = typing.get_origin(hint), typing.get_args(hint)
    if isinstance(value, Mapping):
        hints = _hints(hint) if dataclasses.is_dataclass(hint) else {}
        other = inner[1] if origin is dict else Any
        return {key: _read_flags(hints.get(key, other), each) for key, each in value.items()}
    if not isinstance(value, Flag):
        return value
    if origin in (tuple, list):
        return [_read_flags(inner[0], Flag(part)) for part in names(value)]
    return str(value) if hint is str else literal(value)


_adapter, _hints = map(functools.cache, (pydantic.TypeAdapter, typing.get_type_hints))


def convert(hint: Any, value: Any, path: str, *, measured: bool = False) -> Any:
    """Returns a value from a table as the annotated type: lists as tuples, integers as floats.

    Integers of settings are below 2**31; `measured` ones, such as bytes of memory, may be greater.
    """
    value = _read_flags(hint, value)
    if not measured:
        refuse_extremes({path: value})
    try:
        # In JSON mode strict types match TOML; in Python mode lists are no tuples.
        return _adapter(hint).validate_json(json.dumps(value), strict=True)
    except pydantic.ValidationError as error:
        first = error.errors()[0]
    except (TypeError, pydantic.PydanticSchemaGenerationError) as error:
        words = " ".join(str(error).split())
        raise ConfigError(f"{path}: cannot be set to {value!r:.80}: {words:.200}") from None
    unknown = first["type"] == "unexpected_keyword_argument"
    *parts, name = first["loc"] if unknown else (*first["loc"], None)
    for key in parts:
        if isinstance(key, int):
            path += f"[{key}]"
            hint = next(iter(typing.get_args(hint)), hint)
        elif key in _names(hint):  # Names of the alternatives of a union are no part of the path.
            path += f".{key}" if path else key
            hint = typing.get_type_hints(hint)[key]
            if isinstance(hint, types.UnionType):
                hint = next(filter(_names, typing.get_args(hint)), hint)
        elif typing.get_origin(hint) is dict:
            path += f".{key}" if path else key
            hint = typing.get_args(hint)[1]
    if unknown:
        setting = f"{path}.{name}" if path else name
        raise ConfigError(
            f"{setting}: unknown setting of {hint.__name__}{near(str(name), _names(hint))}"
        )
    if first["type"] == "missing":
        raise ConfigError(f"{path}: is missing")
    rule = first["msg"].replace("Input should be", "must be")
    rule = rule.replace("an object", "a table").replace("array", "list")
    raise ConfigError(f"{path}: {rule}, got {first['input']!r:.80}")


def _names(hint: Any) -> list[str]:
    return [f.name for f in dataclasses.fields(hint)] if dataclasses.is_dataclass(hint) else []


def merge(table: Mapping[str, Any], over: Mapping[str, Any]) -> dict[str, Any]:
    """Returns `table` with the settings of `over` in their places.

    >>> merge({"a": 1, "b": {"c": 2, "d": 3}}, {"b": {"c": 4}})
    {'a': 1, 'b': {'c': 4, 'd': 3}}
    """
    out = dict(table)
    for key, value in over.items():
        inner = out.get(key)
        both = isinstance(inner, Mapping) and isinstance(value, Mapping)
        out[key] = merge(inner, value) if both else value
    return out


def flatten(tables: Mapping[str, Any], prefix: str = "") -> dict[str, Any]:
    """Returns nested tables as one, with dotted names.

    >>> flatten({"seeds": 1, "kback": {"train": {"steps": 300}}})
    {'seeds': 1, 'kback.train.steps': 300}
    """
    out: dict[str, Any] = {}
    for key, value in tables.items():
        inner = isinstance(value, Mapping)
        out |= flatten(value, f"{prefix}{key}.") if inner else {f"{prefix}{key}": value}
    return out


def literal(text: str) -> Any:
    """Returns a value written as in TOML; other text is a string.

    >>> literal("16"), literal("1e-3"), literal("false"), literal("[1, 2]"), literal("log_n")
    (16, 0.001, False, [1, 2], 'log_n')
    """
    try:
        return tomllib.loads(f"value = {text}")["value"]
    except (ValueError, RecursionError):
        return text


def names(text: str) -> list[str]:
    """Returns the parts between commas, stripped.

    >>> names("rope, alibi,")
    ['rope', 'alibi']
    """
    return [part.strip() for part in text.split(",") if part.strip()]


class Parser(argparse.ArgumentParser):
    """A command line without abbreviations, whose errors are `ConfigError`."""

    def __init__(self, **options: Any):
        options.setdefault("formatter_class", argparse.RawDescriptionHelpFormatter)
        super().__init__(allow_abbrev=False, **options)

    def error(self, message: str) -> NoReturn:
        raise ConfigError(message)


def settings_help(settings: Any, title: str, prefix: str = "") -> Iterator[str]:
    """Yields a line about each field of a dataclass, nested ones as `--<field>.<inner>`.

    Defaults are the values of the object; flags begin with `prefix`.
    """
    helps, inner = field_help(type(settings)), []
    yield f"\n{title}:"
    for name, hint in typing.get_type_hints(type(settings)).items():
        value = getattr(settings, name)
        if dataclasses.is_dataclass(hint):
            inner.append(settings_help(value, f"{title}.{name}", f"{prefix}{name}."))
        elif name in _names(settings) and typing.get_origin(hint) is not dict:
            shown = ",".join(map(str, value)) if isinstance(value, tuple | Mapping) else value
            flag = f"--{prefix}{name}".replace("_", "-")
            text = f"{helps.get(name, '')} (default: {shown})"
            yield textwrap.fill(f"  {flag:28} {text}", 96, subsequent_indent=31 * " ")
    yield from itertools.chain(*inner)


def field_help(cls: type) -> dict[str, str]:
    helps: dict[str, str] = {}
    for base in reversed([c for c in cls.__mro__ if dataclasses.is_dataclass(c)]):
        fields = docstring_parser.parse_from_object(base).params
        helps |= {f.arg_name: " ".join((f.description or "").split()) for f in fields}
    return helps
