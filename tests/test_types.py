"""Type checkers know what the public functions return, with a cache and without."""

import pathlib
import re
import subprocess
import sys

import pages
import pytest

pytestmark = pytest.mark.needs("ty")

ROOT = pathlib.Path(__file__).parent.parent
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


@pytest.fixture(scope="module")
def checked(tmp_path_factory):
    """What the type checker says about each file, of one run."""
    folder = tmp_path_factory.mktemp("typed")
    wrong = "layer(x, positions='left')\npe.scheme_attention(pe.NoPE(), {}, q, q)\n"
    code = {
        "returned": RETURN_TYPES,
        "wrong": RETURN_TYPES + wrong,
        "readme": "\n".join(pages.code("README.md")),
    }
    for name, text in code.items():
        (folder / f"{name}.py").write_text(text)
    command = [sys.executable, "-m", "ty", "check", "--output-format", "concise"]
    command += ["--python", sys.prefix, "--extra-search-path", str(ROOT)]
    run = subprocess.run([*command, "."], cwd=folder, capture_output=True, text=True)
    lines = run.stdout.splitlines()
    assert "Found" in lines[-1], run.stdout + run.stderr
    return {name: [line for line in lines if line.startswith(f"{name}.py:")] for name in code}


def test_return_types(checked):
    assert checked["returned"] == []


def test_wrong_types_are_found(checked):
    rules = [re.search(r"\[([\w-]+)\]", line)[1] for line in checked["wrong"]]
    assert sorted(rules) == ["invalid-argument-type", "no-matching-overload"]


def test_the_readme_type_checks(checked):
    assert checked["readme"] == []
