"""docs/kernels.md has the table that `makers/kernels_support.py` prints."""

from tests.makers import kernels_support
from tests.support import slow


@slow
def test_the_page_says_what_implementations_answer():
    assert kernels_support.table() in kernels_support.PAGE.read_text()
