"""The code in the README runs and prints what it says."""

import pathlib
import re

import jax


def test_the_readme_runs(capsys):
    readme = pathlib.Path(__file__).parent.parent / "README.md"
    blocks = re.findall(r"```python\n(.*?)```", re.sub("(?m)^   ", "", readme.read_text()), re.S)
    assert len(blocks) == 4
    names = {"__name__": "readme"}
    with jax.numpy_dtype_promotion("standard"), jax.numpy_rank_promotion("allow"):
        for block in blocks:
            exec(block, names)
    assert capsys.readouterr().out == "True\n"
    scheme = names["LogDistance"](num_heads=8)
    assert scheme.rules(scheme.init(jax.random.key(0))).num_heads == 8
