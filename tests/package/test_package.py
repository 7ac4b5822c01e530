"""The files around the package agree with it."""

import pathlib
import re

import posenc_jax as pe

ROOT = pathlib.Path(__file__).parents[2]


def test_files_name_the_version():
    assert f"\nversion: {pe.__version__}\n" in (ROOT / "CITATION.cff").read_text()
    readme = (ROOT / "README.md").read_text()
    assert set(re.findall(r"(?i)version v?([0-9]+[.][0-9]+[.][0-9]+)", readme)) <= {pe.__version__}
    headings = re.findall(r"(?m)^## (\S+)", (ROOT / "CHANGELOG.md").read_text())
    assert pe.__version__ in headings[:2]  # The first may be "Unreleased".


def test_the_address_stands_in_one_file():
    assert "OWNER_" in (ROOT / "pyproject.toml").read_text()
    for folder, pattern in ((".", "*.*"), (".github", "**/*.*"), ("docs", "**/*.*")):
        for path in (ROOT / folder).glob(pattern):
            if path.suffix in (".md", ".cff", ".yml", ".py"):
                assert "OWNER_" not in path.read_text(), path
