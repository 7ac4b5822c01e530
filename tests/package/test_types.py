"""Type checkers know what the public functions return, and refuse wrong arguments."""

import os
import re
import subprocess
import sys

import pytest

from tests.docs import pages
from tests.support import slow

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
COMMANDS = {
    "ty": f"check --output-format concise --python {sys.prefix} --extra-search-path {pages.ROOT}",
    "mypy": "--follow-imports silent --cache-dir .mypy_cache",
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
    folder, checker = tmp_path_factory.mktemp("typed"), request.param
    code = {
        "returned": RETURN_TYPES,
        "wrong": "\n".join([RETURN_TYPES, *WRONG]),
        "readme": "\n".join(pages.code("README.md")),
    }
    for name, text in code.items():
        (folder / f"{name}.py").write_text(text)
    run = subprocess.run(
        [sys.executable, "-m", checker, *COMMANDS[checker].split(), "."],
        cwd=folder,
        env=os.environ | {"MYPYPATH": str(pages.ROOT)},
        capture_output=True,
        text=True,
    )
    assert "Found" in run.stdout, run.stdout + run.stderr
    errors = {name: {} for name in code}  # The keys, in order.
    for name, number in re.findall(r"(?m)^(\w+)\.py:(\d+):(?:\d+:)? error", run.stdout):
        errors[name][code[name].splitlines()[int(number) - 1]] = None
    return checker, {name: [*lines] for name, lines in errors.items()}


def test_return_types_and_the_readme_have_no_errors(checked):
    assert checked[1]["returned"] == checked[1]["readme"] == []


def test_wrong_types_are_found(checked):
    checker, errors = checked
    assert errors["wrong"] == [line for line, names in WRONG.items() if checker in names.split()]
