"""The exported names of the package, modules imported on first use, and the version in files."""

import pathlib
import re
import subprocess
import sys

import jax
import pytest

import posenc_jax as pe
from posenc_jax.__main__ import main

ROOT = pathlib.Path(__file__).parents[2]
MODULES = {"contrib", "positions", "sharding"}


def test_all_is_what_the_package_defines():
    inside = {
        name
        for name, thing in vars(pe).items()
        if not name.startswith("_") and getattr(thing, "__module__", "").startswith("posenc_jax.")
    }
    assert set(pe.__all__) == inside | MODULES | {"SCHEMES"}


def test_help_lists_what_there_is():
    assert set(pe.__all__) <= set(re.findall(r"\w+", pe.__doc__))
    assert set(dir(pe)) == {*pe.__all__, "nnx", "linen", "testing"}


def test_large_modules_are_imported_on_first_use():
    code = """
import sys
import posenc_jax as pe
from posenc_jax import *
large = {"flax", "optax", "chex", "transformers", "torch", "matplotlib"}
assert not large & {name.split(".")[0] for name in sys.modules}
assert not {"jax.experimental.pallas", "posenc_jax.testing"} & set(sys.modules)
assert RoPE is pe.RoPE and pe.positions.count_up and pe.sharding.zigzag
"""
    subprocess.run([sys.executable, "-c", code], check=True)


def test_versions_devices_and_implementations_are_printed(capsys):
    with jax.numpy_dtype_promotion("standard"):
        main()
    facts = dict(re.split("  +", line, maxsplit=1) for line in capsys.readouterr().out.splitlines())
    assert facts["posenc_jax"] == pe.__version__ and facts["devices"] == "8 x cpu"
    assert facts['implementation="xla"'] == facts['implementation="jax"'] == "runs"
    assert facts['implementation="pallas"'].startswith("there are kernels for TPUs and NVIDIA GPUs")


def test_unknown_names():
    with pytest.raises(AttributeError, match="module 'posenc_jax' has no attribute 'RoPEE'") as e:
        _ = pe.RoPEE
    assert (e.value.name, e.value.obj) == ("RoPEE", pe)  # Python's own hint is made of these.
    with pytest.raises(AttributeError, match=r"'DAPE'; it is in posenc_jax\.contrib"):
        _ = pe.DAPE
    with pytest.raises(KeyError, match="unknown scheme 'roep'; did you mean 'rope'"):
        pe.SCHEMES["roep"]
    with pytest.raises(KeyError, match="unknown scheme 'zzz'; there are learned, none"):
        pe.SCHEMES["zzz"]
    assert "roep" not in pe.SCHEMES and pe.SCHEMES.get("roep") is None


def test_files_name_the_version():
    assert f"\nversion: {pe.__version__}\n" in (ROOT / "CITATION.cff").read_text()
    readme = (ROOT / "README.md").read_text()
    assert set(re.findall(r"(?i)version\W* v?([0-9]+[.][0-9]+[.]\w+)", readme)) <= {pe.__version__}
    headings = re.findall(r"(?m)^## (\S+)", (ROOT / "CHANGELOG.md").read_text())
    assert pe.__version__ in headings[:2]  # The first may be "Unreleased".


def test_the_address_stands_in_one_file():
    assert "OWNER_" in (ROOT / "pyproject.toml").read_text()
    for folder, pattern in ((".", "*.*"), (".github", "**/*.*"), ("docs", "**/*.*")):
        for path in (ROOT / folder).glob(pattern):
            if path.suffix in (".md", ".cff", ".yml", ".py"):
                assert "OWNER_" not in path.read_text(), path
