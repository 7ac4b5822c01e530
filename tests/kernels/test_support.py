"""docs/kernels.md has the table that `make_support.py` prints."""

from kernels import make_support


def test_the_page_says_what_implementations_answer():
    assert make_support.table() in make_support.PAGE.read_text()
