"""Type checkers know what the public functions return, and refuse wrong arguments."""

import os
import pathlib
import re
import subprocess
import sys

import pytest

from tests.docs import pages
from tests.support import slow

ROOT = pathlib.Path(__file__).parents[2]
RETURN_TYPES = """
from typing import assert_type

import jax
import jax.numpy as jnp
from flax import nnx

import posenc_jax as pe
from posenc_jax import linen

x = jnp.ones((1, 2, 8))
q = x[:, :, None]
layer = pe.nnx.Attention(8, 2, rngs=nnx.Rngs(0))
cache = layer.new_cache(1, 4)
assert_type(layer(x, segment_ids=None), jax.Array)
assert_type(layer(x, cache=cache, positions=x), tuple[jax.Array, pe.KVCache])
module = linen.Attention(num_heads=2, head_dim=4)
assert_type(module(x, mask=x), jax.Array)
assert_type(module(x, cache=cache), tuple[jax.Array, pe.KVCache])
assert_type(pe.scheme_attention(pe.NoPE(), {}, q, q, q, is_causal=True), tuple[jax.Array, None])
assert_type(pe.scheme_attention(pe.NoPE(), {}, q, q, q, cache=cache), tuple[jax.Array, pe.KVCache])
assert_type(pe.attention(q, q, q), jax.Array)
assert_type(pe.attention(q, q, q, return_lse=True), tuple[jax.Array, jax.Array])
"""


WRONG = {
    "layer(x, positions='left')": "ty mypy",
    "pe.scheme_attention(pe.NoPE(), {}, q, q)": "ty mypy",
    "pe.attention(q, q, q, mask=3)": "ty mypy",
    # For ty a TypedDict may have other keys.
    "pe.attention(q, q, q, msak=q)": "mypy",
    "pe.scheme_attention(pe.NoPE(), {}, q, q, q, positoins=q)": "mypy",
}
CHECKERS = {
    "ty": ["check", "--output-format", "concise", "--python", sys.prefix],
    "mypy": ["--follow-imports", "silent", "--cache-dir", ".mypy_cache"],
}


@pytest.fixture(
    scope="module",
    params=[
        pytest.param("ty", marks=pytest.mark.needs("ty")),
        pytest.param("mypy", marks=[pytest.mark.needs("mypy"), slow]),
    ],
)
def checked(request, tmp_path_factory):
    """The lines of each file in which a type checker finds errors, of one run."""
    folder = tmp_path_factory.mktemp("typed")
    code = {
        "returned": RETURN_TYPES,
        "wrong": "\n".join([RETURN_TYPES, *WRONG]),
        "readme": "\n".join(pages.code("README.md")),
    }
    for name, text in code.items():
        (folder / f"{name}.py").write_text(text)
    command = [sys.executable, "-m", request.param, *CHECKERS[request.param]]
    if request.param == "ty":
        command += ["--extra-search-path", str(ROOT)]
    run = subprocess.run(
        [*command, "."],
        cwd=folder,
        env=os.environ | {"MYPYPATH": str(ROOT)},
        capture_output=True,
        text=True,
    )
    assert "Found" in run.stdout, run.stdout + run.stderr
    errors = re.findall(r"^(\w+)\.py:(\d+):(?:\d+:)? error", run.stdout, re.MULTILINE)
    lines = {name: text.splitlines() for name, text in code.items()}
    return request.param, {
        name: list(dict.fromkeys(lines[name][int(n) - 1] for file, n in errors if file == name))
        for name in code
    }


def test_return_types(checked):
    assert checked[1]["returned"] == []


def test_wrong_types_are_found(checked):
    name, errors = checked
    assert errors["wrong"] == [line for line, names in WRONG.items() if name in names.split()]


def test_the_readme_type_checks(checked):
    assert checked[1]["readme"] == []
