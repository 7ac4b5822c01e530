"""Type checkers know what the public functions return, with a cache and without."""

import pathlib
import re
import subprocess
import sys

import pytest

pytest.importorskip("ty")

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


def check_types(path, code):
    path.write_text(code)
    command = [sys.executable, "-m", "ty", "check", "--output-format", "concise"]
    command += ["--python", sys.prefix, "--extra-search-path", str(ROOT), str(path)]
    return subprocess.run(command, cwd=path.parent, capture_output=True, text=True).stdout


def test_return_types(tmp_path):
    assert "All checks passed" in check_types(tmp_path / "returned.py", RETURN_TYPES)


def test_wrong_types_are_found(tmp_path):
    wrong = RETURN_TYPES + "layer(x, positions='left')\npe.scheme_attention(pe.NoPE(), {}, q, q)\n"
    found = check_types(tmp_path / "wrong.py", wrong)
    assert "invalid-argument-type" in found and "no-matching-overload" in found, found


def test_the_readme_type_checks(tmp_path):
    readme = re.sub("(?m)^   ", "", (ROOT / "README.md").read_text())
    blocks = re.findall(r"```python\n(.*?)```", readme, re.S)
    assert len(blocks) == 7
    assert "All checks passed" in check_types(tmp_path / "readme.py", "\n".join(blocks))
