"""Whole models against transformers: logits, and every token of greedy decoding.

`make_golden.py` writes the files. Weights are drawn again from names and shapes.
"""

import pathlib
import re

import pytest

from tests.models.agreement import FOLDER, NAMES, agreement

PAGE = pathlib.Path(__file__).parents[2] / "docs" / "models.md"


@pytest.mark.parametrize("name", NAMES)
def test_models_agree_with_transformers(name):
    error, steps = agreement(name)
    assert error < 1e-4
    assert steps in (None, 64)


def test_every_model_is_in_the_table():
    rows = re.findall(r"^\| (\w+) \| `[\w-]+` \| (\S+) \| (\S+) \|$", PAGE.read_text(), re.M)
    assert [name for name, _, _ in rows] == [*NAMES]
    assert sorted(path.stem for path in FOLDER.glob("*.npz")) == sorted(NAMES)
    assert all(float(error) < 1e-4 and steps in ("64", "-") for _, error, steps in rows)
