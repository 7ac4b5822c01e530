"""Length, counts and lists of the README; its code runs in test_markdown.py."""

import json
import re

import pytest

import posenc_jax as pe
from experiments.tasks import TASKS
from posenc_jax.hf.model_types import MODEL_TYPES
from posenc_jax.testing import PROPERTIES
from tests.docs import pages
from tests.makers import pictures
from tests.support import slow_but


def prose(page):
    return " ".join(pages.read(page).split())


def test_the_readme_is_short_and_begins_with_a_layer():
    assert len(pages.read("README.md").splitlines()) <= 150
    first = pages.blocks("README.md")[0]
    lines = [line for line in first.code.splitlines() if line and "import" not in line]
    assert len(lines) <= 8
    assert all(word in first.code for word in ("window", "segment_ids", "cache"))


@pytest.mark.parametrize("name", slow_but(pictures.PICTURES, "attention"))
def test_pictures_follow_results_and_code(name):
    drawn = pictures.PICTURES[name]()
    assert pictures.path_of(name).read_text() == drawn, "run python -m tests.makers pictures"


def test_the_readme_has_the_numbers_of_the_first_picture():
    memory = json.loads(pictures.MEMORY.read_text())["MiB"]
    rule, array = memory["rule"][-1], memory["array"][-1]
    times = dict(pictures.times())
    readme = prose("README.md")
    assert f"{rule:.0f} MiB at 16,384 tokens, and to {array:,.0f} MiB" in readme
    assert f"{rule:.0f} MiB of memory in place of {array / 1024:.0f} GiB" in readme
    assert f"without a bias takes {times['no bias, FlexAttention']:.2f} times" in readme
    assert f"by cuDNN {times['ALiBi, array by cuDNN']:.1f} times" in readme
    assert f"T5 as an array {times['T5, array by cuDNN']:.1f} times" in readme


def test_pages_count_what_there_is():
    from tests.hf.test_golden import NAMES
    from tests.hf.test_golden import read as golden
    from tests.hf.test_layers import KINDS
    from tests.makers.hf_table import NOT_RUN, TOWERS

    compared = {golden(name)[0]["config"]["model_type"] for name in NAMES}
    compared |= {*KINDS, *TOWERS}
    assert set(NOT_RUN) <= compared
    faults = len(re.findall(r"(?m)^### [0-9]+[.]", pages.read("docs/faults.md")))
    measured = json.loads((pages.ROOT / "results/memory.json").read_text())
    mib = [measured["MiB"]["rule"][measured["lengths"].index(t)] for t in (2048, 4096)]
    claims = re.findall(r"(?m)^\| \[R\w+\].* \| ([\w ]+) \|$", pages.read("docs/results.md"))
    claims_text = f"[{len(claims)} claims of papers](results.md), {claims.count('holds')} were"
    lines = [b for b in pages.blocks("docs/cheat_sheet.md") if b.code.count("\n") == 0]
    assert len(lines) == 27
    assert len([b for b in pages.blocks("docs/errors.md") if b.text]) == 20
    for page, text in (
        ("README.md", f"{len(pe.SCHEMES)} schemes behind one interface"),
        ("README.md", f"a check of {len(PROPERTIES)} properties"),
        ("README.md", f"reads {len(MODEL_TYPES)} model types"),
        ("README.md", f"layers of {len(compared)} model types have been compared"),
        ("README.md", f"{len(TASKS)} tasks"),
        ("README.md", f"[{faults} faults in public"),
        ("README.md", f"{len(claims)} claims of papers"),
        ("README.md", "27 tasks in a line each"),
        ("README.md", "twenty messages"),
        ("docs/experiments.md", f"There are {len(TASKS)} tasks"),
        ("docs/models.md", f"model_types.csv) has {len(MODEL_TYPES)} model types"),
        ("docs/models.md", f"layers of {len(compared)} of them with numbers"),
        ("docs/faults.md", f"this library with T5's bias {mib[0]:.0f} and {mib[1]:.0f}"),
        ("docs/evidence.md", f"{claims_text} reproduced"),
        ("docs/cheat_sheet.md", "27 tasks in a line each"),
        ("docs/errors.md", "Twenty errors"),
    ):
        assert text in prose(page), (page, text)


def test_every_family_lists_its_classes():
    """README.md has each scheme and frequency map once, docs/schemes.md a row of each."""
    (lists,) = re.findall(
        r"(?s)\n## Schemes by family\n(.*?)\n\[Schemes\]", pages.read("README.md")
    )
    classes = [thing for thing in vars(pe).values() if isinstance(thing, type)]
    maps = [c for c in classes if issubclass(c, pe.FrequencyMap) and c is not pe.FrequencyMap]
    names = re.findall(r"`(\w+)`", lists)
    assert len(set(names)) == len(names)
    assert {c.__name__ for c in [*pe.SCHEMES.values(), *maps]} == {
        n for n in names if n[0].isupper()
    }
    assert all(hasattr(pe, name) or hasattr(pe.contrib, name) for name in names)
