"""Errors are one line, of functions and of commands."""

import contextlib
import re

import pytest

from experiments.__main__ import main


@contextlib.contextmanager
def raises(error, message):
    """`pytest.raises` of an error whose text has a message."""
    with pytest.raises(error, match=re.escape(message)) as caught:
        yield
    assert "\n" not in str(caught.value)


def refusal(capsys, *words):
    """What a command writes that ends with status 2."""
    assert main([*map(str, words)]) == 2
    err = capsys.readouterr().err
    assert err.count("\n") == 1
    return err
