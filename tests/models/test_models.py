"""Whole models against transformers: logits, and every token of greedy decoding.

`make_golden.py` writes the files. Weights are drawn again from names and shapes.
"""

import pathlib
import re

import numpy as np
import pytest

from examples.families import load
from tests.models.agreement import FOLDER, NAMES, agreement, read

PAGE = pathlib.Path(__file__).parents[2] / "docs" / "models.md"


@pytest.mark.parametrize("name", NAMES)
def test_models_agree_with_transformers(name):
    error, steps = agreement(name)
    assert error < 1e-4
    assert steps in (None, 64)


def test_weights_that_do_not_fit_are_refused():
    about, _, state = read("llama3")
    config, name = about["config"], "model.layers.1.mlp.up_proj.weight"
    with pytest.raises(ValueError, match=f"the state dict lacks '{name}'"):
        load(config, {n: x for n, x in state.items() if n != name})
    with pytest.raises(ValueError, match=r"no place for \['model.rotary_emb.inv_freq'\]"):
        load(config, state | {"model.rotary_emb.inv_freq": np.zeros(4)})
    with pytest.raises(ValueError, match=r"'up', 'kernel'\) must be \(36, 80\), got \(36, 79\)"):
        load(config, state | {name: state[name][:-1]})
    with pytest.raises(ValueError, match=r"model_type must be one of .*, got 'opt'"):
        load({"model_type": "opt"}, {})
    del config["intermediate_size"]
    with pytest.raises(ValueError, match="the llama config must have 'intermediate_size'"):
        load(config, state)
    with pytest.raises(ValueError, match="use_bidirectional_attention=True is not supported"):
        load(config | {"use_bidirectional_attention": True}, state)


def test_every_model_is_in_the_table():
    rows = re.findall(r"^\| (\w+) \| `[\w-]+` \| (\S+) \| (\S+) \|$", PAGE.read_text(), re.M)
    assert [name for name, _, _ in rows] == [*NAMES]
    assert sorted(path.stem for path in FOLDER.glob("*.npz")) == sorted(NAMES)
    assert all(float(error) < 1e-4 and steps in ("64", "-") for _, error, steps in rows)
