"""Tables from TOML files into frozen dataclasses: unknown names and wrong types are errors."""

import dataclasses
import difflib
import json
import tomllib
import types
import typing
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar

if TYPE_CHECKING:
    from _typeshed import DataclassInstance

T = TypeVar("T", bound="DataclassInstance")


class ConfigError(ValueError):
    """A setting that cannot be; the message is one line that begins with its path."""


def need(holds: bool, path: str, rule: str, settings: Any) -> None:
    """Raises `ConfigError("<path>: <rule>, got <value>")` unless `holds`."""
    if not holds:
        raise ConfigError(f"{path}: {rule}, got {getattr(settings, path.rpartition('.')[2])!r}")


def near(name: str, known: Iterable[str]) -> str:
    """Returns what to tell about an unknown name: the closest known one, or all of them.

    >>> near("d_modle", ["model_dim", "num_heads"])
    "; did you mean 'model_dim'?"
    """
    known = list(known)
    folded = {_letters(k): k for k in known}
    match = difflib.get_close_matches(name, known, 1)
    match = match or [folded[m] for m in difflib.get_close_matches(_letters(name), folded, 1, 0.5)]
    return f"; did you mean {match[0]!r}?" if match else f"; known: {', '.join(known) or 'none'}"


def _letters(name: str) -> str:
    """The words of a name in alphabetical order, so that d_model is near model_dim."""
    return "_".join(sorted(name.lower().replace("-", "_").split("_")))


def read_toml(path: Path) -> dict[str, Any]:
    """Returns the tables of a TOML file.

    Raises:
      ConfigError: if the file is missing, unreadable or not TOML.
    """
    try:
        return tomllib.loads(path.read_text(encoding="utf-8"))
    except FileNotFoundError:
        raise ConfigError(f"{path}: no such file") from None
    except (OSError, UnicodeDecodeError, tomllib.TOMLDecodeError) as error:
        raise ConfigError(f"{path}: cannot be read: {error}") from None


def write_toml(tables: Mapping[str, Any]) -> str:
    """Returns nested settings as TOML.

    >>> print(write_toml({"seeds": 1, "text": {"corpus": "sotu"}}), end="")
    seeds = 1
    <BLANKLINE>
    [text]
    corpus = "sotu"
    """
    lines: list[str] = []

    def walk(table: Mapping[str, Any], path: tuple[str, ...]) -> None:
        plain = {k: v for k, v in table.items() if not isinstance(v, Mapping)}
        if path and plain:
            lines.extend(([""] if lines else []) + [f"[{'.'.join(map(_key, path))}]"])
        lines.extend(f"{_key(k)} = {_value(v)}" for k, v in plain.items())
        for name, inner in table.items():
            if isinstance(inner, Mapping):
                walk(inner, (*path, name))

    walk(tables, ())
    return "\n".join(lines) + "\n"


def _key(key: str) -> str:
    bare = key.replace("_", "").replace("-", "")
    return key if bare.isascii() and bare.isalnum() else json.dumps(key)


def _value(value: Any) -> str:
    if isinstance(value, list | tuple):
        return f"[{', '.join(map(_value, value))}]"
    return repr(value) if isinstance(value, float) else json.dumps(value)


def merge(table: Mapping[str, Any], over: Mapping[str, Any]) -> dict[str, Any]:
    """Returns `table` with the settings of `over` in their places."""
    out = dict(table)
    for key, value in over.items():
        inner = out.get(key)
        both = isinstance(inner, Mapping) and isinstance(value, Mapping)
        out[key] = merge(inner, value) if both else value
    return out


def build(cls: type[T], table: Mapping[str, Any], path: str = "", default: T | None = None) -> T:
    """Returns `cls(**table)`, with nested dataclasses built from nested tables.

    Args:
      cls: a dataclass.
      table: its settings; those left out come from `default`, or from the class.
      path: where the table is, for messages.
      default: an instance of `cls`.

    Raises:
      ConfigError: for an unknown name or a wrong type, or if `cls` refuses the values.
    """
    hints = typing.get_type_hints(cls)
    fields = {f.name: f for f in dataclasses.fields(cls) if f.init}
    values = {}
    for name, value in table.items():
        at = f"{path}.{name}" if path else name
        if name not in fields:
            raise ConfigError(f"{at}: unknown setting of {cls.__name__}{near(name, fields)}")
        if dataclasses.is_dataclass(hints[name]):
            if not isinstance(value, Mapping):
                raise ConfigError(f"{at}: must be a table, got {value!r}")
            inner = getattr(default, name, None) or _default(fields[name])
            values[name] = build(hints[name], value, at, inner)
        else:
            values[name] = convert(hints[name], value, at)
    try:
        return cls(**values) if default is None else dataclasses.replace(default, **values)
    except (TypeError, ValueError) as error:
        raise ConfigError(f"{path or cls.__name__}: {error}") from None


def _default(field: dataclasses.Field) -> Any:
    missing = dataclasses.MISSING
    if field.default_factory is not missing:
        return field.default_factory()
    return None if field.default is missing else field.default


def convert(hint: Any, value: Any, path: str) -> Any:
    """Returns `value` as the annotated type: lists become tuples, integers become floats.

    Raises:
      ConfigError: for a value of another type.
    """
    origin = typing.get_origin(hint)
    if origin in (types.UnionType, typing.Union):
        for option in typing.get_args(hint):
            try:
                return convert(option, value, path)
            except ConfigError:
                continue
    elif origin is tuple and isinstance(value, list | tuple):
        item = typing.get_args(hint)[0]
        return tuple(convert(item, v, f"{path}[{i}]") for i, v in enumerate(value))
    elif origin is dict and isinstance(value, Mapping):
        inner = typing.get_args(hint)[1]
        return {k: convert(inner, v, f"{path}.{k}") for k, v in value.items()}
    elif hint is Any:
        return value
    elif hint is float and type(value) is int:
        return float(value)
    elif isinstance(hint, type) and type(value) is hint:
        return value
    raise ConfigError(f"{path}: must be {_say(hint)}, got {value!r}")


def _say(hint: Any) -> str:
    words = {int: "an integer", float: "a number", bool: "true or false", str: "a string"}
    if typing.get_origin(hint) is tuple:
        return f"a list, each item {_say(typing.get_args(hint)[0])}"
    if typing.get_origin(hint) is dict:
        return "a table"
    if typing.get_origin(hint) in (types.UnionType, typing.Union):
        return " or ".join(map(_say, typing.get_args(hint)))
    return words.get(hint, getattr(hint, "__name__", str(hint)))
