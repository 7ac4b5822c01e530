"""Equality of functions: by code and constants where that is sound, else by identity.

`jax.jit` compares static functions by identity, and a lambda in a hook is another object in every
call: calls outside of `jit` would compile each time. `by_value` wraps such a function, so that it
equals another of the same place in the code if both close over equal constants. JAX does so for
functions of its own (`HashableFunction` in jax/_src/util.py, whose caller declares the closure),
and PyTorch's compiler guards functions by code and closure.

Constants are numbers, strings, types, modules, functions, and tuples and frozen dataclasses of
these, in closures, in defaults and in globals that the code names. Numbers of different types
differ: 1 is not 1.0. A function that reads anything else, such as an array, a list or a dict, whose
content may change, is compared by identity. Named functions, types and modules are taken to stay as
they are, as under `jax.jit`, but for functions of `__main__`: cells of a notebook define them anew.
"""

import dataclasses
import dis
import enum
import functools
import types
from collections.abc import Callable
from typing import Any

import jax
import numpy as np

_READS = "LOAD_GLOBAL", "LOAD_NAME"  # Other names in a code are attributes.


class _Varies(Exception):
    """Names a variable that is no constant."""


class _ByValue:
    """A function that equals others with the same constants."""

    def __init__(self, function: Callable, constants: Any):
        functools.update_wrapper(self, function, updated=())  # Sets `__wrapped__`, for `inspect`.
        self._constants = constants

    def __call__(self, *arguments: Any) -> Any:
        return self.__wrapped__(*arguments)  # ty: ignore[missing-attribute]

    def __eq__(self, other: object) -> bool:
        return isinstance(other, _ByValue) and self._constants == other._constants

    def __hash__(self) -> int:
        return hash(self._constants)


class _Same:
    """An object that is compared by identity."""

    def __init__(self, value: Any):
        self.value = value

    def __eq__(self, other: object) -> bool:
        return isinstance(other, _Same) and self.value is other.value

    def __hash__(self) -> int:
        return id(self.value)


def by_value(function: Callable) -> Callable:
    """Returns a function that compares by code and constants; the same one if it cannot.

    Constants are read now, and variables of a closure can be assigned later: call it right before
    the function is traced.
    """
    if not (_is_remade(function) or _is_of_main(function)):
        return function
    try:
        return _ByValue(function, _constants(function, "", ()))
    except _Varies:
        return function


def varying(function: Callable) -> str | None:
    """Names a variable of a function that is no constant; None if it compares by value."""
    if isinstance(function, _ByValue) or not _is_remade(function):
        return None
    try:
        _constants(function, "", ())
    except _Varies as varies:
        return str(varies)
    return None


def with_functions_by_value(rule: Any) -> Any:
    """Returns a rule whose static functions compare `by_value`."""
    changes = {}
    for name, function in static_functions(rule).items():
        comparable = by_value(function)
        if comparable is not function:
            changes[name] = comparable
    return dataclasses.replace(rule, **changes) if changes else rule


def static_functions(rule: Any) -> dict[str, Callable]:
    """Returns the functions of a rule by their fields."""
    if not dataclasses.is_dataclass(rule):
        return {}
    fields = (x.name for x in dataclasses.fields(rule) if x.metadata.get("static"))
    values = {name: getattr(rule, name) for name in fields}
    return {name: value for name, value in values.items() if callable(value)}


def _is_local(value: Any) -> bool:
    return isinstance(value, types.FunctionType) and "<locals>" in value.__qualname__


def _is_of_main(value: Any) -> bool:
    return isinstance(value, types.FunctionType) and value.__module__ == "__main__"


def _is_frozen(value: Any) -> bool:
    cls = type(value)
    return dataclasses.is_dataclass(cls) and cls.__dataclass_params__.frozen


def _is_remade(value: Any) -> bool:
    """Whether Python makes a function in each call, so that equal ones differ."""
    if _is_frozen(value):
        return any(_is_remade(getattr(value, x.name)) for x in dataclasses.fields(value))
    return _is_local(value) or isinstance(value, types.MethodType | functools.partial)


def _constants(value: Any, name: str, within: tuple[int, ...]) -> Any:
    """Returns a hashable key that is equal for equal constants; raises `_Varies` for others.

    Args:
      value: the constant.
      name: its name in the code.
      within: ids of the values that this one is in.
    """
    if id(value) in within:
        raise _Varies(f"`{name}`, which holds itself")
    within = (*within, id(value))
    kind = type(value)
    if value is None or kind in (bool, int, str, bytes, type(...)) or isinstance(value, enum.Enum):
        return kind, value
    if kind in (float, complex) or isinstance(value, np.number | np.bool_):
        return kind, np.asarray(value).tobytes()  # -0.0 is not 0.0, and NaN is itself.
    if kind is tuple:
        return kind, *(_constants(x, name, within) for x in value)
    if isinstance(value, _ByValue):
        return kind, value
    if kind is functools.partial and not vars(value):
        parts = value.func, value.args, tuple(value.keywords), tuple(value.keywords.values())
        return kind, _constants(parts, name, within)
    if kind is types.MethodType:
        return kind, _constants((value.__func__, value.__self__), name or "self", within)
    if _is_local(value) or _is_of_main(value):
        return _of_function(value, name, within)
    if _is_unchanging(value):
        return kind, _Same(value)
    if _is_frozen(value) and all(_is_derived(kind, x) for x in _others(value)):
        fields = {x.name: getattr(value, x.name) for x in dataclasses.fields(value)}
        return kind, *(_constants(x, field, within) for field, x in fields.items())
    raise _Varies(f"`{name}`, {described(value)}")


def _is_unchanging(value: Any) -> bool:
    """Whether an object is a type, a module or a function that is made once."""
    if isinstance(value, types.BuiltinFunctionType):
        return isinstance(value.__self__, types.ModuleType | type | None)
    of_jax = type(value).__module__.partition(".")[0] in ("jax", "jaxlib")
    if of_jax and callable(value) and not isinstance(value, functools.partial):
        return True  # Results of jax.jit, jax.custom_jvp and the like.
    return isinstance(value, types.FunctionType | type | types.ModuleType | np.dtype | np.ufunc)


def _is_derived(cls: type, name: str) -> bool:
    return isinstance(getattr(cls, name, None), functools.cached_property)


def _others(value: Any) -> list[str]:
    """Returns the attributes of a dataclass that are no fields."""
    fields = {x.name for x in dataclasses.fields(value)}
    return [name for name in getattr(value, "__dict__", {}) if name not in fields]


def described(value: Any) -> str:
    """Returns the kind of a value, with an article."""
    if isinstance(value, jax.Array | np.ndarray):
        return "an array"
    article = "an" if type(value).__name__[0].lower() in "aeiou" else "a"
    return f"{article} {type(value).__name__}"


def _of_function(function: types.FunctionType, name: str, within: tuple[int, ...]) -> Any:
    """Returns the constants of a local function: its code, defaults, closure and globals."""
    code, namespace = function.__code__, function.__globals__
    if vars(function):
        raise _Varies(f"`{name or function.__name__}`, which has attributes")
    try:
        cells = [cell.cell_contents for cell in function.__closure__ or ()]
    except ValueError:
        raise _Varies("a variable without a value") from None
    read = dict(zip(code.co_freevars, cells, strict=True))
    read |= {x: namespace[x] for x in sorted(_names(code)) if x in namespace}
    defaults = function.__defaults__ or (), tuple((function.__kwdefaults__ or {}).items())
    return (
        types.FunctionType,
        _Same(code),  # Codes of equal text at one line of two files are equal.
        _Same(namespace),
        _constants(defaults, "a default", within),
        *((x, _constants(value, x, within)) for x, value in read.items()),
    )


def _names(code: types.CodeType) -> set[str]:
    """Returns the names of globals that a function and the functions inside it read."""
    inner = (_names(x) for x in code.co_consts if isinstance(x, types.CodeType))
    reads = (x.argval for x in dis.get_instructions(code) if x.opname in _READS)
    return {*reads}.union(*inner)
