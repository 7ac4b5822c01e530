"""Errors name the argument, what was wanted and the value.

The errors are declared in the test files: `ERRORS` at their top level has entries (what is called,
its arguments by name, what the message says) of calls that raise `ValueError`, or the type that is
the fourth of an entry. Schemes are built by `support.build`, and their messages begin with their
names, unless the entry has another word before a colon.
"""

import pytest

import posenc_jax as pe
from tests.support import build, declared

NAMES = {cls: name for name, cls in pe.SCHEMES.items()}
CASES = [
    pytest.param(*entry, id=f"{path.stem.removeprefix('test_')}-{n}")
    for path, entries in declared("ERRORS")
    for n, entry in enumerate((*e, ValueError)[:4] for e in entries)
]


@pytest.mark.parametrize(("call", "arguments", "message", "error"), CASES)
def test_error(call, arguments, message, error):
    name = NAMES.get(call)
    if name and ": " not in message:
        message = f"^{name}: .*{message}"
    with pytest.raises(error, match=message):
        build(call, **arguments) if name else call(**arguments)
