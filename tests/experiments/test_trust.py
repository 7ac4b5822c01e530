"""A file of settings, or a folder of results, of somebody else runs no code and follows no link."""

import os
import pickle
import sys

import jax.numpy as jnp
import pytest

import posenc_jax as pe
from experiments.__main__ import main
from experiments.errors import ConfigError, ResultsError
from experiments.models.schemes import build, find
from experiments.runs.checkpoints import Checkpoints, Deadline
from experiments.runs.experiment import Experiment, find_task
from experiments.runs.files import locked, write_whole
from experiments.settings import trust
from tests.experiments.one_line import raises, refusal

THEIRS = """
import posenc_jax as pe
from experiments.tasks import KBack

def make(head_dim) -> pe.Scheme:
    return pe.RoPE(head_dim)

def decorated(function):
    import functools
    return functools.wraps(function)(lambda *arguments, **options: function(*arguments, **options))

class Task(KBack):
    name = "theirs"
"""
OWN = """
import functools
import posenc_jax as pe
from theirs import decorated, make
from theirs import make as renamed
from functools import partial as part

wrapped = functools.wraps(make)(lambda *arguments, **options: make(*arguments, **options))
bound = part(make, head_dim=8)

@decorated
def right() -> pe.Scheme | tuple[pe.LayerSpec | pe.RoPE, ...]:
    return pe.NoPE()

def called(result):
    def function():
        open("called", "w").close()
    function.__annotations__["return"] = result
    return function

bare, numbers, mixed = called(tuple), called(tuple[str, ...]), called(tuple[pe.Scheme, int])
optional, text, empty = called(pe.Scheme | None), called("tuple"), called(tuple[()])
"""


@pytest.fixture(autouse=True)
def folder(tmp_path, monkeypatch):
    """A working folder with own.py, and theirs.py in an environment within it."""
    site = tmp_path / ".venv/lib/python3/site-packages"
    site.mkdir(parents=True)
    (site / "theirs.py").write_text(THEIRS)
    (site / "their_package").mkdir()
    (site / "their_package" / "inner.py").write_text(THEIRS)
    (tmp_path / "own.py").write_text(OWN)
    (tmp_path / "a.toml").write_text("")
    (tmp_path / "linked.py").symlink_to(site / "theirs.py")
    (tmp_path / "outer").mkdir()
    (tmp_path / "outer" / "__init__.py").write_text("")
    (tmp_path / "outer" / "linked").symlink_to(site)
    (site / "elsewhere.py").symlink_to(tmp_path / "own.py")
    monkeypatch.syspath_prepend(site)
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.chdir(tmp_path)
    names = "own", "theirs", "their_package", "linked", "outer", "elsewhere", "this"
    yield tmp_path
    trust.TRUSTED.clear()
    for name in list(sys.modules):
        if name.partition(".")[0] in names:
            del sys.modules[name]


MODULES = "this os sys builtins theirs their_package.inner linked outer.linked.theirs elsewhere"
PLACES = (
    "[schemes]\nnames = ['{}']",
    "[schemes]\nnames = ['rope+{}']",
    "tasks = ['{}']",
    "[schemes.'{}']\nx = 1",
    "[kback.schemes.'{}']\nx = 1",
)


@pytest.mark.parametrize("text", PLACES)
def test_a_file_imports_no_installed_module(folder, capsys, text):
    for module in MODULES.split():
        (folder / "a.toml").write_text(text.format(f"{module}:Task"))
        err = refusal(capsys, "compare", "a.toml")
        assert f"{module!r} is of an installed package" in err
        assert f"--trust {module}:Task\n" in err
    assert not {"this", "theirs", "their_package", "linked", "elsewhere"} & {*sys.modules}
    assert not (folder / "results").exists()


@pytest.mark.parametrize("name", ["make", "renamed", "wrapped", "bound"])
def test_functions_of_installed_packages_need_trust_under_other_names(name):
    def scheme():
        return build(f"own:{name}", {"head_dim": 8}, {}, "a model")

    with raises(ConfigError, f"'own:{name}' is a function of an installed package"):
        scheme()
    trust.TRUSTED.add(f"own:{name}")
    assert scheme() == pe.RoPE(8)


def test_trust_is_of_one_object(folder, capsys):
    command = ["compare", "a.toml", "--schemes", "theirs:make", "--workers", "1", "--minutes", "0"]
    command += ["--tasks", "theirs:Task", "--trust"]
    assert refusal(capsys, *command, "theirs:make").endswith("--trust theirs:Task\n")
    assert main([*command, "theirs:make,theirs:Task"]) == 3
    assert "Time is over with 1 runs left" in capsys.readouterr().out


def test_workers_need_no_trust(folder):
    """A run comes to a process that was started without --trust."""
    trust.TRUSTED.add("theirs:make")
    sent = pickle.dumps(Experiment(schemes=("theirs:make",)).run("kback", "theirs:make", 0))
    trust.TRUSTED.clear()
    assert "code theirs" in pickle.loads(sent).sources


@pytest.mark.parametrize("name", ["bare", "numbers", "mixed", "optional", "text", "empty"])
def test_functions_that_return_other_things_are_not_called(folder, name):
    with raises(ConfigError, "a function annotated to return one (-> pe.Scheme)"):
        build(f"own:{name}", {"head_dim": 8}, {}, "a model")
    assert not (folder / "called").exists()


def test_own_objects_and_those_of_this_project_need_no_trust():
    assert find("own:right")() == pe.NoPE()
    assert find("posenc_jax.schemes.rotary.rope:RoPE")(8).head_dim == 8
    assert find_task("experiments.tasks:KBack").name == "kback"


def test_part_files_follow_no_links(folder, monkeypatch):
    """Also where the name of the part file is known."""
    victim, target = folder / "victim", folder / "results" / "report.html"
    victim.write_text("mine")
    target.parent.mkdir()
    names = f".{target.name}.{os.getpid()}.part", f".{target.name}.0123.part"
    for name in names:
        target.with_name(name).symlink_to(victim)
    target.symlink_to(victim)
    monkeypatch.setattr("secrets.token_hex", lambda count: "0123")
    with pytest.raises(ResultsError, match="cannot be written"):
        write_whole(target, "theirs")
    monkeypatch.undo()
    write_whole(target, "theirs \udcff")
    assert victim.read_text() == "mine" and target.read_text() == "theirs \\udcff"
    assert not target.is_symlink()


def test_folders_of_runs_and_of_states_are_no_links(folder):
    (folder / "mine" / "7").mkdir(parents=True)
    (folder / "run").symlink_to(folder / "mine")
    with pytest.raises(ResultsError, match="cannot be written"), locked(folder / "run"):
        pass
    with pytest.raises(ResultsError, match="is a symbolic link"):
        Checkpoints(folder / "run", Deadline(), print).load({"x": jnp.ones(1)})
    assert (folder / "mine" / "7").exists()
