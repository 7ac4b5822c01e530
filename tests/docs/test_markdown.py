"""The Python blocks of every Markdown page run, and links lead somewhere.

`pages.py` describes how pages mark blocks; `page_checks.py` tests their arrays further.
"""

import re

import jax
import pytest

from tests.docs import page_checks, pages
from tests.docs.pages import ROOT, Block
from tests.support import slow

OTHER_WORDS = r"^\{?(py(thon3?|con)?|ipython\w*|code-cell|doctest|testcode)\b(?!:)|code-block\} py"
BUILT = {"docs/explorer.html"}  # By `make docs`.
WITH_CODE = [p for p in pages.all_pages() if pages.blocks(p) or p in page_checks.CHECKS]
# README.md, concepts and errors call the same functions.
SLOW = """
recipes/ coming_from/ flax functions cheat_sheet drawn masks models checkpoints getting serving
beyond
""".split()
SLOW = tuple(f"docs/{name}" for name in SLOW)


@pytest.mark.parametrize(
    "page", [pytest.param(page, marks=slow if page.startswith(SLOW) else ()) for page in WITH_CODE]
)
def test_the_code_of_a_page_runs_and_prints_what_the_page_says(page):
    names = page_checks.setup(page) | {"__name__": "page"}
    with jax.numpy_dtype_promotion("standard"), jax.numpy_rank_promotion("allow"):
        for block in pages.blocks(page):
            if block.runs:
                block.run(names)
        page_checks.CHECKS.get(page, lambda names: None)(names)


def anchors(path):
    """The anchors of a page's headings, as GitHub makes them."""
    headings = re.findall(r"(?m)^#+ (.*)$", path.read_text())
    return {re.sub(r"[^\w -]", "", heading.lower()).replace(" ", "-") for heading in headings}


@pytest.mark.parametrize("page", pages.all_pages())
def test_links_and_paths_exist(page):
    text, folder = pages.read(page), (ROOT / page).parent
    prose = re.sub(r"(?s)```.*?```", "", text)
    for link, heading in re.findall(r"\]\(([^)#\s]*)#?([^)\s]*)[^)]*\)", prose):
        if not link.startswith("https://"):
            target = folder / link if link else ROOT / page
            assert target.exists() or str(target.relative_to(ROOT)) in BUILT, link
            assert not heading or heading in anchors(target), f"{link}#{heading}"
    for path in re.findall(r"`((?:tests|experiments|posenc_jax|docs)/[\w./]+)`", text):
        assert (ROOT / path).exists(), path


@pytest.mark.parametrize("page", pages.all_pages())
def test_no_block_is_overlooked(page):
    """Blocks in Python are marked as Python, and a block that does not run says why."""
    text = pages.read(page)
    fences = re.findall(r"(?m)^ *(?:```|~~~)(\S.*)$", text)
    others = [f for f in fences if f != "python" and re.search(OTHER_WORDS, f)]
    assert not others, f"write ```python for {others}"
    assert fences.count("python") == sum(bool(m["code"]) for m in pages.BLOCK.finditer(text))
    markers = re.findall(r"(?m)^ *<!-- not run", text)
    excused = re.findall(r"(?m)^ *<!-- not run(?:: | without )[^>]+ -->\n+ *```python", text)
    assert len(markers) == len(excused)
    # A fence after other words is text, and Sphinx says nothing.
    assert not re.search(r"\S +:::", text)


def test_checks_are_of_pages():
    assert page_checks.CHECKS.keys() <= set(pages.all_pages())


def test_a_block_that_differs_from_its_page_fails():
    with pytest.raises(AssertionError, match=r"x.md:7 printed\n2\nnot\n3"):
        Block("x.md", 7, "print(1 + 1)  # 3", None).run({})
    with pytest.raises(AssertionError, match=r"ValueError: a"):
        Block("x.md", 1, "raise ValueError('a')", "ValueError: b\n").run({})
    with pytest.raises(AssertionError, match="not\nValueError: b"):
        Block("x.md", 1, "1", "ValueError: b\n").run({})
    with pytest.raises(ZeroDivisionError):
        Block("x.md", 1, "1 / 0", None).run({})
