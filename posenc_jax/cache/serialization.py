"""Static fields of a cache as JSON, for `jax.export` of decode steps.

A settings object is written as the name of its class and its fields. Reading imports nothing, and
makes frozen dataclasses alone: the module of a class must have been imported before.
"""

import dataclasses
import json
import sys
from typing import Any

import numpy as np


def to_bytes(settings: Any) -> bytes:
    """Returns nested tuples of numbers, strings and frozen dataclasses as bytes.

    Raises:
      TypeError: for anything else, such as a function.
    """
    return json.dumps(_encode(settings)).encode()


def from_bytes(data: bytes) -> Any:
    """Returns the settings of `to_bytes`.

    Raises:
      ValueError: if a class is no frozen dataclass of an imported module.
    """
    return _decode(json.loads(data))


def _encode(x: Any) -> Any:
    if isinstance(x, np.generic):
        x = x.item()
    if x is None or isinstance(x, bool | int | float | str):
        return x
    if type(x) is tuple:
        return [_encode(y) for y in x]
    if _is_frozen(type(x)):
        fields = {f.name: _encode(getattr(x, f.name)) for f in dataclasses.fields(x) if f.init}
        return {"class": f"{type(x).__module__}:{type(x).__qualname__}", "fields": fields}
    raise TypeError(  # JSON would make a plain list of a named tuple.
        f"KVCache: {x!r} in the settings of a scheme cannot be written by jax.export; numbers, "
        "strings, tuples and frozen dataclasses can."
    )


def _decode(x: Any) -> Any:
    if isinstance(x, list):
        return tuple(map(_decode, x))
    if not isinstance(x, dict):
        return x
    module, name = x["class"].split(":")
    cls: Any = sys.modules.get(module)
    for part in name.split("."):
        cls = getattr(cls, part, None)
    if not (isinstance(cls, type) and _is_frozen(cls)):
        raise ValueError(f"KVCache: import {module}, which has {name}, before reading this file.")
    return cls(**{n: _decode(y) for n, y in x["fields"].items()})


def _is_frozen(cls: Any) -> bool:
    params = getattr(cls, "__dataclass_params__", None)
    return params is not None and params.frozen
