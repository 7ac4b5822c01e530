"""The tables of docs/kernels.md are those that the programs print."""

from engine import make_support


def test_the_page_says_what_implementations_answer():
    assert make_support.table() in make_support.PAGE.read_text()
