"""Position encodings by name: sizes come from the model, options from tables.

    rope                a name of `posenc_jax.SCHEMES`
    rope+alibi          a chain of two
    mypkg.mine:Thing    an object of your own: a subclass of `posenc_jax.Scheme`, a scheme (such as
                        a chain), a tuple with a scheme or layer for each layer of the model (a
                        shorter one is repeated), or a function annotated to return one of these

Classes and functions are called with the sizes and options that their signatures name. Nothing else
is called, and nothing of installed packages is imported (`experiments.settings.trust`), since the
names may come from a file of somebody else.
"""

import dataclasses
import functools
import hashlib
import importlib
import inspect
import sys
import types
import typing
from collections.abc import Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import posenc_jax as pe
from experiments.errors import ConfigError
from experiments.models import methods
from experiments.models.model import Position
from experiments.settings.config_io import convert, near
from experiments.settings.trust import TRUSTED, check_module, is_own

SIZES = (
    *("num_heads", "num_kv_heads", "head_dim", "model_dim"),
    *("max_length", "trained_length", "num_layers"),
)
"""Parameters that are given by the model. `max_length` is the longest sequence of all, the number
of rows of a table; `trained_length` the longest in training."""


def parts_of(name: str) -> list[str]:
    return [part.strip() for part in name.split("+")]


def plain(name: str) -> str:
    """Returns a name without spaces.

    >>> plain("rope + alibi ")
    'rope+alibi'
    """
    return "+".join(parts_of(name))


def short(name: str) -> str:
    """Returns a name for tables, without the modules of objects of your own.

    >>> short("rope+mypkg.mine:MyScheme")
    'rope+MyScheme'
    """
    return "+".join(part.rpartition(":")[2] for part in parts_of(name))


def label(scheme: str, method: str = "") -> str:
    """Returns the label of a scheme, or of one that a method of `methods` changes.

    >>> label("rope"), label("rope", "ntk"), label("rope+mypkg.mine:MyScheme")
    ('rope', 'rope + NTK', 'rope+MyScheme')
    """
    return f"{short(scheme)} + {methods.words(method)}" if method else short(scheme)


def check_names(names: Sequence[str]) -> None:
    """Raises ConfigError unless there are names, each once, also as tables have them."""
    if not names or len(set(names)) != len(names):
        raise ConfigError(f"schemes: must name some, each once, got {[*names]}")
    shown: dict[str, str] = {}
    for name in names:
        other = shown.setdefault(short(name), name)
        if other != name:
            raise ConfigError(
                f"schemes: {other} and {name} would both be {short(name)!r} in tables; give one "
                f"another name in its module, such as {short(name.split('+')[-1])}2 = "
                f"{short(name.split('+')[-1])}"
            )


def code_of(modules: Iterable[str]) -> dict[str, str]:
    """Returns the digests of the files of modules of your own, under "code MODULE"."""
    ours = "posenc_jax.", "experiments."
    return {f"code {m}": _digest(m) for m in sorted({*modules}) if not f"{m}.".startswith(ours)}


@functools.cache
def _digest(module: str) -> str:
    """Returns the digest of the file of a module, as it is at the first call."""
    file = getattr(sys.modules.get(module), "__file__", None)
    try:
        text = Path(file or "").read_bytes()
    except OSError:
        return "without a file"
    return f"sha256 {hashlib.sha256(text).hexdigest()[:16]}"


def import_object(name: str, setting: str) -> Any:
    """Returns the object that `package.module:object` names; `setting` is for messages."""
    module_name, _, attribute = name.partition(":")
    try:
        check_module(name, setting)
        module = importlib.import_module(module_name)
    except ConfigError:
        raise
    except (Exception, SystemExit) as error:
        raise ConfigError(
            f"{setting}: cannot import {module_name!r}: {type(error).__name__}: {error}"
        ) from None
    _digest(module_name)  # Before somebody edits the file.
    if not hasattr(module, attribute):
        public = [n for n in vars(module) if not n.startswith("_")]
        raise ConfigError(
            f"{setting}: {module_name!r} has no {attribute!r}{near(attribute, public)}"
        )
    return getattr(module, attribute)


def find(name: str) -> Any:
    """Returns the class, function, scheme or tuple of layers behind a name without `+`."""
    if ":" not in name:
        if name not in pe.SCHEMES:
            raise ConfigError(f"schemes: unknown scheme {name!r}{near(name, pe.SCHEMES)}")
        return pe.SCHEMES[name]
    scheme = import_object(name, "schemes")
    if isinstance(scheme, pe.Scheme | tuple):
        return scheme
    make = scheme.func if isinstance(scheme, functools.partial) else scheme
    if inspect.isfunction(make) and name not in TRUSTED and not is_own(make):
        raise ConfigError(
            f"schemes: {name!r} is a function of an installed package or of Python's library, "
            f"which is not called unless you allow it: --trust {name}"
        )
    if not (_is_scheme_class(make) or _returns_schemes(make)):
        raise ConfigError(
            f"schemes: {name!r} must be a Scheme or a subclass of it, a tuple of layers, or a "
            f"function annotated to return one (-> pe.Scheme), got {scheme!r:.100}"
        )
    return scheme


def _is_scheme_class(hint: Any) -> bool:
    return inspect.isclass(hint) and issubclass(hint, pe.Scheme)


def _returns_schemes(make: Any) -> bool:
    if not inspect.isfunction(make):
        return False
    try:
        return _of_schemes(typing.get_type_hints(make).get("return"))
    except Exception:  # An annotation that cannot be evaluated says nothing.
        return False


def _of_schemes(hint: Any) -> bool:
    """Returns whether a type is of schemes and layers, or of tuples and unions of these alone."""
    origin, inner = typing.get_origin(hint), typing.get_args(hint)
    if origin in (tuple, types.UnionType, typing.Union):
        return bool(inner) and all(_of_schemes(x) for x in inner if x is not ...)
    return _is_scheme_class(hint) or hint is pe.LayerSpec


def with_sizes(make: Any, sizes: Mapping[str, int]) -> Any:
    """Returns `make` called with the sizes that it requires.

    >>> with_sizes(pe.ALiBi, {"num_heads": 4, "head_dim": 16}).num_heads
    4
    """
    return make(**{n: sizes[n] for n in inspect.signature(make).parameters if n in sizes})


def build(
    name: str, sizes: Mapping[str, int], tables: Mapping[str, Mapping[str, Any]], whose: str
) -> Position:
    """Returns the scheme, or the layers, that a name stands for.

    Args:
      name: as at the top of this file.
      sizes: of the model, by the names in `SIZES`. Without `num_layers`, layers are refused.
      tables: options of schemes, by path and scheme such as "schemes.t5"; later ones win. A chain
        has the options of its parts.
      whose: whose model it is, for messages.
    """
    parts = [_make(part, sizes, tables, whose) for part in parts_of(name)]
    position = parts[0] if len(parts) == 1 else called(pe.chain, parts, {}, name)
    if isinstance(position, pe.Scheme):
        called(hash, [position], {}, name)  # Runs and programs are found by it.
        called(lambda: position.acts, [], {}, name)  # Raises for a misspelt hook.
        return position
    layers = isinstance(position, tuple) and all(
        isinstance(x, pe.Scheme | pe.LayerSpec) for x in position
    )
    if not layers or "num_layers" not in sizes:
        expected = "a Scheme or a tuple of layers" if "num_layers" in sizes else "one Scheme"
        raise ConfigError(f"schemes.{name}: {whose} needs {expected}, got {position!r}")
    return called(pe.layer_pattern, [sizes["num_layers"], *position], {}, name)


def _make(name: str, sizes: Mapping[str, int], tables: Mapping, whose: str) -> Any:
    make = find(name)
    options_by_path = {p: t for p, t in tables.items() if p.endswith(f"schemes.{name}")}
    if isinstance(make, pe.Scheme | tuple):
        for path in (
            f"{path}.{option}" for path, table in options_by_path.items() for option in table
        ):
            raise ConfigError(f"{path}: {name} is an object, options are for classes and functions")
        return make
    # Partials and other callables have no annotations to look up.
    annotated = inspect.isclass(make) or inspect.isfunction(make)
    hints = typing.get_type_hints(make) if annotated else {}
    known = list(inspect.signature(make).parameters)
    values: dict[str, Any] = {n: sizes[n] for n in known if n in sizes}
    for path, table in options_by_path.items():
        for option, value in table.items():
            option_path = f"{path}.{option}"
            if option not in known:
                title = make.__name__ if annotated else name
                options = [n for n in known if n not in sizes]
                raise ConfigError(
                    f"{option_path}: unknown option of {title}{near(option, options)}"
                )
            values[option] = convert(hints.get(option, Any), value, option_path)
            if option in sizes and values[option] != sizes[option]:
                raise ConfigError(
                    f"{option_path}: {value}, but the model of {whose} has {sizes[option]}"
                )
    return called(make, [], values, f"{name}: {whose}")


def called(make: Any, arguments: list, values: Mapping[str, Any], title: str) -> Any:
    """Calls a function; errors of your own code are `ConfigError` with a title."""
    try:
        return make(*arguments, **values)
    except (TypeError, ValueError) as error:
        raise ConfigError(f"schemes.{title}: {error}") from None
    except (Exception, SystemExit) as error:
        words = " ".join(str(error).split())
        raise ConfigError(f"schemes.{title}: {type(error).__name__}: {words:.300}") from None


def schemes_in(position: Any) -> Iterator[pe.Scheme]:
    """Yields a scheme, or the schemes of layers, and all their inner schemes."""
    if isinstance(position, pe.Scheme):
        yield position
    if isinstance(position, tuple):
        for item in position:
            yield from schemes_in(item)
    elif isinstance(position, pe.Scheme | pe.LayerSpec):
        for field in dataclasses.fields(position):
            yield from schemes_in(getattr(position, field.name))


def has_table(position: Position) -> bool:
    """Returns whether a scheme has a table with one row per position."""
    fields = (f.name for s in schemes_in(position) for f in dataclasses.fields(s))
    return "max_length" in fields


def as_code(value: Any) -> str:
    """Returns the call that makes a scheme, without defaults.

    >>> as_code(pe.streaming(pe.RoPE(64, scaling=pe.NTK(1.5)), 4))
    'streaming(RoPE(head_dim=64, scaling=NTK(factor=1.5)), 4)'
    """
    if not dataclasses.is_dataclass(value):
        return repr(value)
    values = {f.name: (getattr(value, f.name), f.default) for f in dataclasses.fields(value)}
    name = type(value).__name__
    if name.startswith("_"):  # A function of this name makes it from its fields.
        return f"{name.strip('_').lower()}({', '.join(as_code(x) for x, _ in values.values())})"
    shown = (f"{name}={as_code(x)}" for name, (x, default) in values.items() if x != default)
    return f"{name}({', '.join(shown)})"
