"""Atomic writes, and JSON without NaN."""

import contextlib
import json
import math
import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from experiments.errors import ResultsError


def write_whole(path: Path, content: str | bytes) -> None:
    """Writes a file atomically, and makes its folder; a failure leaves the old file.

    Raises:
      ResultsError: if it cannot be written.
    """
    beside = path.with_name(f".{path.name}.{os.getpid()}.part")
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        with beside.open("wb") as stream:
            stream.write(content.encode() if isinstance(content, str) else content)
            stream.flush()
            os.fsync(stream.fileno())
        os.replace(beside, path)
    except OSError as error:
        raise ResultsError(f"{path}: cannot be written: {error.strerror or error}") from None
    finally:  # After Ctrl-C too.
        with contextlib.suppress(OSError):
            beside.unlink(missing_ok=True)


def to_json(value: Any, **options: Any) -> str:
    """Returns JSON text; null replaces NaN and infinities.

    >>> to_json({"loss": [1.0, float("nan")]})
    '{"loss": [1.0, null]}'
    """
    return json.dumps(_finite(value), **options)


def _finite(value: Any) -> Any:
    if isinstance(value, Mapping):
        return {str(k): _finite(v) for k, v in value.items()}
    if isinstance(value, list | tuple):
        return [_finite(v) for v in value]
    return None if isinstance(value, float) and not math.isfinite(value) else value
