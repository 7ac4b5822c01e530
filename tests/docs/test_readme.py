"""Length, counts and lists of the README; its code runs in test_markdown.py."""

import json
import re

import posenc_jax as pe
from experiments.tasks import TASKS
from posenc_jax.hf.model_types import MODEL_TYPES
from posenc_jax.testing import PROPERTIES
from tests.docs import pages
from tests.makers import first_picture


def prose(page):
    return " ".join(pages.read(page).split())


def test_the_readme_is_short_and_begins_with_a_layer():
    assert len(pages.read("README.md").splitlines()) <= 150
    first = pages.blocks("README.md")[0]
    lines = [line for line in first.code.splitlines() if line and "import" not in line]
    assert len(lines) <= 8
    assert all(word in first.code for word in ("window", "segment_ids", "cache"))


def test_the_first_picture_is_of_the_results():
    assert first_picture.PICTURE.read_text() == first_picture.picture(), (
        "run python -m tests.makers first_picture"
    )
    memory = json.loads(first_picture.MEMORY.read_text())["MiB"]
    rule, array = memory["rule"][-1], memory["array"][-1]
    times = dict(first_picture.times())
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

    readme, models = prose("README.md"), prose("docs/models.md")
    compared = {golden(name)[0]["config"]["model_type"] for name in NAMES}
    compared |= {*KINDS, *TOWERS}
    assert set(NOT_RUN) <= compared
    assert f"{len(pe.SCHEMES)} schemes behind one interface" in readme
    assert f"a check of {len(PROPERTIES)} properties" in readme
    assert f"reads {len(MODEL_TYPES)} model types" in readme
    assert f"layers of {len(compared)} model types have been compared" in readme
    assert f"{len(TASKS)} tasks" in readme and f"There are {len(TASKS)} tasks" in prose(
        "docs/experiments.md"
    )
    assert f"model_types.csv) has {len(MODEL_TYPES)} model types" in models
    assert f"layers of {len(compared)} of them with numbers" in models
    faults = len(re.findall(r"(?m)^### [0-9]+[.]", pages.read("docs/faults.md")))
    assert f"[{faults} faults in public" in readme
    measured = json.loads((pages.ROOT / "results/memory.json").read_text())
    mib = [measured["MiB"]["rule"][measured["lengths"].index(t)] for t in (2048, 4096)]
    memory = f"this library with T5's bias {mib[0]:.0f} and {mib[1]:.0f}"
    assert memory in prose("docs/faults.md")
    claims = re.findall(r"(?m)^\| \[R\w+\].* \| ([\w ]+) \|$", pages.read("docs/results.md"))
    assert f"{len(claims)} claims of papers" in readme
    held = claims.count("holds")
    claims = f"[{len(claims)} claims of papers](results.md), {held} were reproduced"
    assert claims in prose("docs/evidence.md")
    rows = [b for b in pages.blocks("docs/cheat_sheet.md") if b.code.count("\n") == 0]
    assert len(rows) == 27 and "27 tasks in a line each" in prose("docs/cheat_sheet.md")
    assert "27 tasks in a line each" in readme
    assert "twenty messages" in readme
    errors = [b for b in pages.blocks("docs/errors.md") if b.text]
    assert len(errors) == 20 and "Twenty errors" in prose("docs/errors.md")


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
