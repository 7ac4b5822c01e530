"""The code in the README runs, and its output and counts are right."""

import pathlib
import re

import jax
import jax.numpy as jnp
import numpy as np

import posenc_jax as pe
from experiments.scoreboard import claims
from experiments.study import plan
from experiments.tasks import TASKS
from posenc_jax.hf.model_types import MODEL_TYPES

ROOT = pathlib.Path(__file__).parent.parent
FAULTS = "docs/faults.md"


def test_the_readme_runs(capsys):
    readme = (ROOT / "README.md").read_text()
    blocks = re.findall(r"```python\n(.*?)```", re.sub("(?m)^   ", "", readme), re.S)
    assert len(blocks) == 7
    names = {"__name__": "readme"}
    with jax.numpy_dtype_promotion("standard"), jax.numpy_rank_promotion("allow"):
        for block in blocks:
            exec(block, names)
            if "from_padding_mask" in block:
                assert names["cache"].next_positions.tolist() == [2, 4]
    assert capsys.readouterr().out == "True\n"
    rotated = names["rope"].query({}, names["q"], jnp.arange(300)[None])
    np.testing.assert_array_equal(names["q_rotated"], rotated)
    assert names["bias"].shape == (8, 300, 300)
    rope, nope = names["layers"][2:4]
    assert (rope.scheme.layout, rope.window) == ("interleaved", 4096)
    assert nope == pe.LayerSpec(pe.NoPE())
    scheme = names["LogDistance"](num_heads=8)
    assert scheme.rules(scheme.init(jax.random.key(0))).num_heads == 8


def test_the_readme_counts_what_there_is():
    from hf.model_types_table import NOT_FUZZED
    from hf.test_golden import NAMES
    from hf.test_golden import read as golden

    readme, faults = (" ".join((ROOT / p).read_text().split()) for p in ("README.md", FAULTS))
    compared = {golden(name)[0]["config"]["model_type"] for name in NAMES}
    assert set(NOT_FUZZED) <= compared
    assert f"{len(pe.SCHEMES)} schemes behind one interface" in readme
    assert f"for {len(MODEL_TYPES)} model types." in readme
    assert f"layers of {len(compared)} model types with numbers" in readme
    assert f"random configs of {len(MODEL_TYPES) - len(NOT_FUZZED)} model types" in readme
    assert f"[{len(re.findall(r'### [0-9]+[.]', faults))} faults in released" in readme


def test_the_page_on_experiments_has_all_tasks_and_files_that_are_read(tmp_path):
    text = (ROOT / "docs" / "experiments.md").read_text()
    table = re.search(r"\| task \|.*?\n\n", text, re.S)[0]
    first = "".join(re.findall(r"(?m)^\| (.*?) \|", table))
    assert set(re.findall(r"`(\w+)`", first)) == set(TASKS)
    assert f"the {len(TASKS)} tasks" in " ".join((ROOT / "README.md").read_text().split())
    study, claim = re.findall(r"```toml\n(.*?)```", text, re.S)
    (tmp_path / "mine.toml").write_text(study)
    sizes = plan.load(tmp_path / "mine.toml").cells
    assert [cells["rope"].grid[0].task.name for cells in sizes.values()] == ["text", "kback"]
    (tmp_path / "R99.toml").write_text(claim)
    assert claims.load(tmp_path / "R99.toml").runs.keys() == {"rope", "none"}


def test_the_own_scheme_runs_as_pasted():
    readme = (ROOT / "README.md").read_text()
    block = re.search(r"   ```python\n(.*?)   ```", readme, re.S)[1]
    names = {"__name__": "mine"}
    exec(re.sub("(?m)^   ", "", block), names)
    assert str(names["LogDistance"](num_heads=8).acts) == "logits"


def test_links_lead_to_files():
    for page in (ROOT / "README.md", *ROOT.glob("docs/**/*.md")):
        prose = re.sub(r"```.*?```", "", page.read_text(), flags=re.S)
        for link in re.findall(r"\]\(([^)#\s]+)[^)]*\)", prose):
            assert "://" in link or (page.parent / link).exists(), f"{page.name}: {link}"
            assert "://" not in link or link.startswith("https://"), f"{page.name}: {link}"


def test_pages_name_files_that_exist():
    for page in (ROOT / "README.md", *ROOT.glob("docs/**/*.md")):
        for path in re.findall(
            r"`((?:tests|experiments|posenc_jax|docs)/[\w./]+)`", page.read_text()
        ):
            assert (ROOT / path).exists(), f"{page.name}: {path}"
