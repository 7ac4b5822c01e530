"""Atomic writes, folders held by one process, and JSON without NaN."""

import contextlib
import errno
import fcntl
import json
import math
import os
import secrets
from collections.abc import Generator, Mapping
from pathlib import Path
from typing import Any

from experiments.errors import Locked, ResultsError

_LOCK = ".lock"


def write_whole(path: Path, content: str | bytes) -> None:
    """Writes a file atomically, and makes its folder; a failure leaves the old file."""
    # The folder may be of somebody else: no name can be guessed, and "x" follows no link.
    beside = path.with_name(f".{path.name}.{secrets.token_hex(8)}.part")
    if isinstance(content, str):
        content = content.encode(errors="backslashreplace")  # Names in it need not be UTF-8.
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        with beside.open("xb") as stream:
            stream.write(content)
            stream.flush()
            os.fsync(stream.fileno())
        os.replace(beside, path)
    except OSError as error:
        raise ResultsError(f"{path}: cannot be written: {error.strerror or error}") from None
    finally:  # After Ctrl-C too.
        with contextlib.suppress(OSError):
            beside.unlink(missing_ok=True)


@contextlib.contextmanager
def locked(folder: Path) -> Generator[None]:
    """Holds a folder, which is made if needed and is no link, against other processes.

    The lock is advisory and ends with the process, however that ends.

    Raises:
      Locked: where another process holds it.
    """
    with contextlib.ExitStack() as files:
        try:
            folder.mkdir(parents=True, exist_ok=True)
            directory = os.open(folder, os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW)
            files.callback(os.close, directory)
            while (lock := _lock(directory)) is None:
                pass
            files.callback(os.close, lock)
        except BlockingIOError:
            raise Locked(f"{folder}: another process works in this folder") from None
        except OSError as error:
            reason = f"cannot be written: {error.strerror or error}"
            if error.errno in (errno.ENOLCK, errno.ENOSYS, errno.EOPNOTSUPP, errno.EBADF):
                reason = "its file system has no locks (flock), which runs need"
            raise ResultsError(f"{folder}: {reason}") from None
        try:
            yield
        finally:
            with contextlib.suppress(OSError):
                os.unlink(_LOCK, dir_fd=directory)


def _lock(directory: int) -> int | None:
    """Returns the descriptor of the locked file of a directory; None if its holder removed it.

    It is a file: NFS locks only files that are open for writing, which no directory is.
    """
    file = os.open(_LOCK, os.O_RDWR | os.O_CREAT | os.O_NOFOLLOW, 0o666, dir_fd=directory)
    try:
        fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        with contextlib.suppress(FileNotFoundError):
            if os.path.samestat(os.fstat(file), os.stat(_LOCK, dir_fd=directory)):
                return file
    except BaseException:
        os.close(file)
        raise
    os.close(file)
    return None


def is_locked(folder: Path) -> bool:
    try:
        with locked(folder):
            return False
    except Locked:
        return True


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
