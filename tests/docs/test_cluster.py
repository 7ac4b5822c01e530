"""The scripts of docs/cluster.md: each is parsed, and so is each command of experiments."""

import re
import shlex
import subprocess

import pytest

from experiments.__main__ import main
from tests.docs import pages

PAGE = pages.read("docs/cluster.md")


def scripts(language):
    return re.findall(rf"(?ms)^```{language}\n(.*?)^```$", PAGE)


def commands():
    """The words after `experiments` of each command of the page."""
    text = "\n".join(scripts("bash") + scripts("yaml")).replace("\\\n", " ")
    for line in text.translate(str.maketrans("[],", "   ")).splitlines():
        words = shlex.split(line, comments=True)
        if "experiments" in words:
            yield words[len(words) - words[::-1].index("experiments") :]


@pytest.mark.parametrize("words", list(commands()), ids=" ".join)
def test_commands_are_parsed(words, monkeypatch, pytestconfig):
    def stop(*arguments, **_):
        raise StopIteration(arguments)

    monkeypatch.chdir(pytestconfig.rootpath)
    for name in ("commands.compare.compare", "study.command.carry_out"):
        monkeypatch.setattr(f"experiments.{name}", stop)
    monkeypatch.setattr("experiments.scoreboard.command.carry_out", stop)
    with pytest.raises(StopIteration) as parsed:
        main(words)
    if words[0] == "compare":
        experiment, options = parsed.value.args[0]
        for task in experiment.tasks.values():
            assert not options.devices or task.train.batch % options.devices == 0


@pytest.mark.parametrize("script", scripts("bash"))
def test_bash_parses_scripts(script):
    subprocess.run(["bash", "-n"], input=script, text=True, check=True)


def test_the_script_of_slurm_calls_the_command(tmp_path):
    """With `srun` and `python` that show how they are called."""
    show = {"srun": 'exec "$@"', "python": 'echo "$@" in "$JAX_COMPILATION_CACHE_DIR"'}
    for name, code in show.items():
        (tmp_path / name).write_text(f"#!/bin/sh\n{code}\n")
        (tmp_path / name).chmod(0o755)
    (script,) = (text for text in scripts("bash") if "#SBATCH" in text)
    here = {"PATH": f"{tmp_path}:/usr/bin:/bin", "HOME": "/h"}
    call = subprocess.run(["bash", "-e"], input=script, text=True, env=here, capture_output=True)
    words = "-m experiments compare configs/compare.toml --seeds 5 --name five-seeds"
    assert call.stdout == f"{words} in /h/.cache/jax\n" and call.returncode == 0


@pytest.mark.needs("PyYAML")
def test_yaml_parses_scripts():
    import yaml

    job, task = map(yaml.safe_load, scripts("yaml"))
    (container,) = job["spec"]["template"]["spec"]["containers"]
    assert container["command"][:3] == ["python", "-m", "experiments"]
    mounts = [each["name"] for each in container["volumeMounts"]]
    assert [each["name"] for each in job["spec"]["template"]["spec"]["volumes"]] == mounts
    assert task["run"].startswith("python -m experiments study --run") and task["num_nodes"] == 4
