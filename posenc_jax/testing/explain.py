"""Explains exceptions of a scheme: the line in the user's file, the arguments there, the cause.

The line is the one of the innermost frame in the user's file. Where there is none, as when a hook
returned an array of a wrong shape which attention refuses, it is the line of the hook or rule that
returned last; to find it, the call is repeated under a profile function. The cause follows from
the exception and the arguments.
"""

import dataclasses
import inspect
import linecache
import os
import pathlib
import re
import sys
import sysconfig
import textwrap
import traceback
from collections.abc import Callable
from types import CodeType, FrameType
from typing import Any

import jax
import numpy as np

import posenc_jax
from posenc_jax.schemes.scheme import HOOKS, Scheme

_NOTHING = inspect.Signature.empty


@dataclasses.dataclass(frozen=True)
class Call:
    """A call of a function in the user's file: a hook, a rule, or a function that one calls.

    Attributes:
      code: of the function.
      line: the number of the line that was running.
      arguments: by name, without `self`.
      signature: the names of these arguments as attention calls it; None if it calls it not.
      is_hook: whether it is a hook, or else a function of a rule.
      result: its result, if it returned.
    """

    code: CodeType
    line: int
    arguments: dict[str, Any]
    signature: tuple[str, ...] | None = None
    is_hook: bool = False
    result: Any = _NOTHING

    @property
    def returned(self) -> bool:
        """Whether it returned."""
        return self.result is not _NOTHING

    def source(self) -> str:
        """Returns the text of the line; nothing where there is no file."""
        return linecache.getline(self.code.co_filename, self.line).strip()

    def got(self) -> str:
        """Returns the arguments, and the result if it returned."""
        arguments = ", ".join(f"{name}={describe(x)}" for name, x in self.arguments.items())
        returned = f", and returned {describe(self.result)}" if self.returned else ""
        text = f"{self.code.co_name} got {arguments}{returned}"
        return textwrap.shorten(text, 400, placeholder=" ...")


@dataclasses.dataclass(frozen=True)
class Raised:
    """An exception of a scheme, explained.

    Attributes:
      error: the exception.
      last: the innermost call of the user's functions that was running, or the last that returned.
      entry: the call of a hook or rule that it was in, or itself.
      scheme: the scheme that is checked.
      one_axis: whether coordinates [B, T] came to a scheme of several axes.
    """

    error: Exception
    last: Call | None
    entry: Call | None
    scheme: Scheme
    one_axis: bool = False

    @property
    def identity(self) -> tuple:
        """Equal for exceptions that come from the same line."""
        if self.last is None:
            return type(self.error), str(self.error)
        return type(self.error), self.last.code, self.last.line

    @property
    def cause(self) -> str | None:
        """The cause, if it can be told from the exception and the arguments."""
        return next(filter(None, (cause(self) for cause in _CAUSES)), None)

    def __str__(self) -> str:
        lines = [f"raised {type(self.error).__name__}: {_beginning(str(self.error))}"]
        if self.last is not None and self.entry is not None:
            when = "after " if self.last.returned else ""
            where = f"{place(self.last.code, self.last.line)}, in {self.last.code.co_name}"
            lines.append(f"{when}{where}: {self.last.source()}")
            if self.entry.arguments:
                lines.append(self.entry.got())
        if self.cause:
            lines.append(f"Cause: {self.cause}")
        return "\n".join(lines)


def explain(
    error: Exception, scheme: Scheme, again: Callable[[], Any], one_axis: bool = False
) -> Raised:
    """Returns an explanation of an exception of a scheme.

    Args:
      error: the exception, as it was caught.
      scheme: the scheme that is checked.
      again: repeats the call that raised.
      one_axis: whether coordinates [B, T] came to a scheme of several axes.
    """
    for is_users in (_is_users, _files_of(scheme).__contains__):
        last, entry = _running(error, is_users)
        if last is None or entry is None:
            last = entry = _returned_last(again, is_users) or _named(error, scheme, is_users)
        if last is not None:
            return Raised(error, last, entry, scheme, one_axis)
    return Raised(error, None, None, scheme, one_axis)


# The user's functions that were running.

_LIBRARIES = tuple(
    str(pathlib.Path(path).parent) + os.sep
    for path in (posenc_jax.__file__, jax.__file__, np.__file__)
)
_STANDARD = tuple(sysconfig.get_path(name) + os.sep for name in ("stdlib", "platstdlib"))


_TRACEBACKS = ("UnfilteredStackTrace", "JaxStackTraceBeforeTransformation", "SimplifiedTraceback")
"""Causes that JAX adds to its exceptions, whose frames are those of the caller."""


def _is_users(filename: str) -> bool:
    """Whether code is neither of this package nor of others that are installed, nor generated."""
    is_library = filename.startswith(_LIBRARIES + _STANDARD) or "-packages" + os.sep in filename
    return not (is_library or filename == "<string>" or filename.startswith("<frozen"))


def _files_of(scheme: Scheme) -> set[str]:
    """Returns the file of a scheme's class, for schemes of packages that are installed."""
    try:
        return {inspect.getfile(type(scheme))}
    except (TypeError, OSError):  # Written at a prompt.
        return set()


def _running(
    error: BaseException | None, is_users: Callable[[str], bool]
) -> tuple[Call | None, Call | None]:
    """Returns the innermost call that was running, and the hook or rule that it was in."""
    if error is None or type(error).__name__ in _TRACEBACKS:
        return None, None
    last, entry = _running(error.__cause__, is_users)
    if last is not None:
        return last, entry
    frames = list(traceback.walk_tb(error.__traceback__))
    users = [i for i, (x, _) in enumerate(frames) if is_users(x.f_code.co_filename)]
    if not users:
        return None, None
    first = last_index = users[-1]
    while first > 0 and not frames[first - 1][0].f_code.co_filename.startswith(_LIBRARIES[0]):
        first -= 1
    first = next(i for i in users if i >= first)
    outer = [frame for frame, _ in frames[:first]][::-1]
    entry = _call(*frames[first], outer)
    return (entry if first == last_index else _call(*frames[last_index], [])), entry


def _returned_last(again: Callable[[], Any], is_users: Callable[[str], bool]) -> Call | None:
    """Repeats a call that raises, and returns the hook or rule that returned last."""
    last = None

    def record(frame: FrameType, event: str, result: Any) -> None:
        nonlocal last
        caller = frame.f_back
        if event != "return" or caller is None or not is_users(frame.f_code.co_filename):
            return
        if is_users(caller.f_code.co_filename) or frame.f_code.co_name == "<module>":
            return
        call = _call(frame, frame.f_lineno, _callers(frame), result)
        if call.signature is not None:
            last = call

    before = sys.getprofile()
    sys.setprofile(record)
    try:
        again()
    except Exception:
        return last
    finally:
        sys.setprofile(before)
    return None


def _named(error: Exception, scheme: Scheme, is_users: Callable[[str], bool]) -> Call | None:
    """Returns the hook that a message begins with, such as "Mine.query must ...", not called."""
    name = re.match(r"\w+\.(\w+)", str(error))
    code = getattr(getattr(type(scheme), name[1], None), "__code__", None) if name else None
    if code is None or not is_users(code.co_filename):
        return None
    return Call(code, code.co_firstlineno, {})


def _callers(frame: FrameType) -> list[FrameType]:
    """Returns the callers of a function, the nearest first."""
    frames = []
    while (caller := frame.f_back) is not None:
        frames.append(frame := caller)
    return frames


def _call(frame: FrameType, line: int, outer: list[FrameType], result: Any = _NOTHING) -> Call:
    """Returns the call of a frame; `outer` are its callers, the nearest first."""
    code = frame.f_code
    names = code.co_varnames[: code.co_argcount + code.co_kwonlyargcount]
    arguments = {name: frame.f_locals[name] for name in names if name in frame.f_locals}
    signature, owner = None, arguments.pop("self", None)
    if isinstance(owner, Scheme):
        if code.co_name in (*HOOKS, "init"):
            signature = tuple(inspect.signature(getattr(Scheme, code.co_name)).parameters)[1:]
        return Call(code, line, arguments, signature, True, result)
    for caller in outer:
        if caller.f_code.co_name == "_check_function":
            text = caller.f_locals["signature"].partition(")")[0]
            signature = tuple(re.findall(r"\w+", text))
        if not _is_users(caller.f_code.co_filename) and signature is None:
            continue
        break
    return Call(code, line, arguments, signature, False, result)


# Texts.


def place(code: CodeType, line: int) -> str:
    """Returns the file and the line, the file from the current directory if it is inside."""
    path = pathlib.Path(code.co_filename)
    if path.is_relative_to(pathlib.Path.cwd()):
        path = path.relative_to(pathlib.Path.cwd())
    return f"{path}:{line}"


def describe(value: Any) -> str:
    """Returns dtype and shape of an array, and other values in short."""
    if hasattr(value, "shape") and hasattr(value, "dtype"):
        return f"{value.dtype}[{', '.join(map(str, value.shape))}]"
    if isinstance(value, dict):
        return f"{{{', '.join(f'{name!r}: {describe(x)}' for name, x in value.items())}}}"
    if isinstance(value, tuple | list):
        brackets = "()" if isinstance(value, tuple) else "[]"
        return f"{brackets[0]}{', '.join(map(describe, value))}{brackets[1]}"
    if dataclasses.is_dataclass(value):
        return f"{type(value).__name__}(...)"
    return textwrap.shorten(repr(value), 60, placeholder=" ...")


def _beginning(message: str) -> str:
    """Returns the first sentences of a message; JAX's have pages about tracing."""
    lines = message.splitlines() or [""]
    stop = (
        i for i, x in enumerate(lines) if x.startswith(("The error occurred", "See https", "---"))
    )
    return textwrap.shorten(" ".join(lines[: next(stop, None)]), 300, placeholder=" ...")


# Causes.

_TRACED = {
    "TracerArrayConversionError": """NumPy reads an array that is traced. Parameters, q, k and
        coordinates have no numbers while JAX traces a program: use jax.numpy in place of NumPy.""",
    "TracerBoolConversionError": """`if`, `while`, `and`, `or`, min() or max() of an array that is
        traced: use jnp.where, jnp.minimum, & and |, or a setting of the scheme.""",
    "TracerIntegerConversionError": """an array that is traced as an index of a list, as a shape or
        in range(): use jnp.take, or a setting of the scheme.""",
    "NonConcreteBooleanIndexError": "x[mask] has no known shape under `jit`: use jnp.where.",
    "ConcretizationTypeError": """float(), int(), .item() or a shape of an array that is traced: use
        jnp functions, or a setting of the scheme.""",
    "UnexpectedTracerError": """an array of an earlier call that was kept outside of the arguments:
        hooks keep nothing; return it from `tables`, or from `features` as features or state.""",
    "FrozenInstanceError": """hooks keep nothing in the scheme: return arrays from `tables`, or from
        `features` as features or state.""",
    "CustomVJPException": """the function of a rule closes over an array. Give it to the rule as
        heads= or shared=, and it has a gradient.""",
}

_IF_NONE = {
    "head": "the rule has no heads=",
    "heads": "the rule has no heads=",
    "shared": "the rule has no shared=",
    "q_feature": "the rule has no q_features=",
    "k_feature": "the rule has no k_features=",
    "k_features": "`features` returns none for the keys",
    "q_features": "`features` returns none for the queries",
    "features": "`features` returns none for these tokens",
    "tables": "`tables` returns none, or the caller computed none: call self.tables then",
    "segment_ids": "None stands for one segment without padding",
    "state": "None stands for the start of a sequence",
    "x": "calls without a layer have no x",
}

_SHAPES = {
    "x": "[B, T, D]",
    "q": "[B, T, N, H]",
    "k": "[B, S, K, H]",
    "v": "[B, S, K, V]",
    "out": "[B, T, N, V]",
    "coordinates": "[B, T] or [A, B, T]",
    "segment_ids": "[B, T] or None",
}


def _of_tracing(raised: Raised) -> str | None:
    names = [cls.__name__ for cls in type(raised.error).__mro__]
    return next((" ".join(_TRACED[name].split()) for name in names if name in _TRACED), None)


def _of_order(raised: Raised) -> str | None:
    """A function whose parameters have the right names in another order."""
    call = raised.entry
    if call is None or call.signature is None or call.returned:
        return None
    names = list(call.arguments)
    if all(call.signature[i : i + 1] == (x,) for i, x in enumerate(names) if x in call.signature):
        return None
    return (
        f"arguments come in the order ({', '.join(call.signature)}), and {call.code.co_name} takes "
        f"({', '.join(names)})."
    )


def _of_none(raised: Raised) -> str | None:
    """An argument that is None, in the line that raised if one can be found there."""
    call = raised.entry
    if call is None or call.signature is None or call.returned:
        return None
    if "NoneType" not in str(raised.error):
        return None
    names = zip(call.arguments, call.signature, strict=False)
    causes = {x: _IF_NONE.get(known) for x, known in names if call.arguments[x] is None}
    in_line = [x for x in causes if raised.last and re.search(rf"\b{x}\b", raised.last.source())]
    texts = [f"`{x}` is None: {causes[x]}." for x in in_line or causes if causes[x]]
    return " ".join(texts)


def _of_axes(raised: Raised) -> str | None:
    """Coordinates [B, T] for a scheme of several axes, which took [A, B, T] before."""
    if not raised.one_axis:
        return None
    axes = raised.scheme.traits.num_axes
    return (
        f"coordinates [B, T] came, as text has them, not [{axes}, B, T]; a scheme with "
        f"num_axes={axes} must accept both. In a rule q and k are then numbers, not [{axes}]: "
        "`q, k = (jnp.broadcast_to(x, (A,)) for x in (q, k))` takes all axes to be equal."
    ).replace("(A,)", f"({axes},)")


def _of_params(raised: Raised) -> str | None:
    """A parameter of another name than in `init`."""
    call = raised.entry
    params = call.arguments.get("params") if call else None
    if not isinstance(raised.error, KeyError) or not isinstance(params, dict):
        return None
    return f"`params` are what `init` returns; it has {', '.join(map(repr, params)) or 'no entry'}."


def _of_shapes(raised: Raised) -> str | None:
    """Any other error about shapes in a function: the arrays that it is written for."""
    call = raised.entry
    about_shapes = r"shape|dimension|indices|index|axis|axes|rank|broadcast|unpack|einsum|operand"
    if call is None or call.returned or not re.search(about_shapes, str(raised.error), re.I):
        return None
    if call.is_hook:
        shapes = [f"{x} {_SHAPES[x]}" for x in call.arguments if x in _SHAPES]
        return f"`{call.code.co_name}` gets {', '.join(shapes)}." if shapes else None
    if call.signature is None:
        return None
    return (
        "the function of a rule is written for one query and one key; attention maps it over all "
        f"heads and tokens. It gets ({', '.join(call.signature)})."
    )


_CAUSES = (_of_tracing, _of_order, _of_none, _of_axes, _of_params, _of_shapes)
