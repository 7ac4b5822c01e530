"""compare at tiny size: files, resumption, refusals, user schemes and tasks."""

import dataclasses
import importlib
import os
import re
import sys
import tomllib
from pathlib import Path

import jax
import pytest

from experiments.__main__ import main
from experiments.models import schemes
from experiments.pages import plots
from experiments.runs import run as runs_module
from experiments.runs.experiment import experiment_of, load, objects_in
from experiments.runs.run import Run, load_data
from tests.docs import pages
from tests.experiments.one_line import refusal
from tests.experiments.stub_tasks import KBACK, TINY
from tests.support import slow

SMALL = f"""
tasks = ["kback"]
[schemes]
names = ["none", "rope"]
{KBACK}
[text]
train_length = 16
test_lengths = [16, 32]
sliding_lengths = [32]
eval_bytes = 64
stride = 4
{TINY.format("text")}"""


@pytest.fixture
def run(tmp_path, capsys, monkeypatch):
    """Runs a command on the small experiment in a folder of its own.

    Nothing is trained or drawn before `train` and `draw` are called.
    """
    file = tmp_path / "small.toml"
    file.write_text(SMALL)
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr("experiments.runs.run_queue.default_count", lambda: 1)
    drawing = plots.drawing
    monkeypatch.setattr(plots, "drawing", lambda *_: "")

    def call(command, *arguments):
        status = main([command, str(file), "--name", "small", *arguments])
        return status, *capsys.readouterr()

    def refused(*arguments):
        return refusal(capsys, "compare", file, "--name", "small", *arguments)

    def results():
        experiment = experiment_of(call.folder, objects_in(call.settings()))
        runs = [(r, r.result(call.folder)) for r in experiment.all_runs()]
        return {(r.task.name, r.scheme, r.seed): result for r, result in runs if result}

    def pretend(self, *_):
        call.pretended.append(self.scheme)
        scores = {view: {"32": 0.5, "48": 0.25} for view in self.task.views}
        return self.ended("done", load_data(self.task).facts, scores=scores)

    measured = Run.measured
    monkeypatch.setattr(Run, "measured", pretend)
    call.train = lambda: monkeypatch.setattr(Run, "measured", measured)
    call.pretended = []
    call.draw = lambda: monkeypatch.setattr(plots, "drawing", drawing)
    call.file, call.folder = file, tmp_path / "results" / "small"
    call.results, call.refused = results, refused
    call.settings = lambda: tomllib.loads((call.folder / "config.toml").read_text())
    call.files = lambda: {f: f.read_bytes() for f in call.folder.rglob("*") if f.is_file()}
    return call


@pytest.fixture
def of_none(run):
    """The folder has a result of one scheme."""
    assert run("compare", "--schemes", "none")[0] == 0


@pytest.fixture
def own_module(tmp_path, monkeypatch):
    """A module of the user's own beside the experiment."""
    source = Path(__file__).with_name("mine.py").read_text()
    (tmp_path / "my_schemes.py").write_text(source)
    monkeypatch.syspath_prepend(tmp_path)


@pytest.fixture
def of_page(tmp_path, monkeypatch):
    """The name of the scheme of docs/add_a_scheme.md, pasted into a module."""
    (block,) = [code for code in pages.code("docs/add_a_scheme.md") if "(pe.Scheme)" in code]
    (tmp_path / "pasted.py").write_text(block)
    monkeypatch.syspath_prepend(tmp_path)
    (name,) = re.findall(r"class (\w+)\(pe.Scheme\)", block)
    return f"pasted:{name}"


def test_compare_writes_results_and_report_with_the_scheme_of_the_page(run, of_page):
    run.train()
    status, out, err = run("compare", "--schemes", of_page, "--seeds", "2")
    assert (status, err) == (0, "")
    results = run.results()
    assert list(results) == [("kback", of_page, seed) for seed in (0, 1)]
    for r in results.values():
        assert r.status == "done" and r.error is None and r.environment["jax"]
        assert r.curve["step"] == [2, 4] and len(r.curve["loss"]) == 2
        assert r.scores["plain"].keys() == {"32", "48"}
        assert r.parameters > 0 and r.train_seconds >= 0 and r.cpu_seconds >= 0
        # Parameters and both moments of AdamW.
        assert 3 * 4 * r.parameters < r.memory_bytes < 1e9
        assert r.fitted is False and "0.9" in r.fit_rule
    files = {f.name for f in run.folder.rglob("*") if f.is_file()}
    assert files == {"config.toml", "report.html", "result.json"}
    assert run.settings()["schemes"]["names"] == [of_page] and run.settings()["seeds"] == 2
    assert "report.html" in out and "means of 2 seeds" in out
    assert of_page in (run.folder / "report.html").read_text()


@slow
def test_the_task_of_the_page_is_one_file(run, tmp_path, monkeypatch):
    (block,) = [code for code in pages.code("docs/experiments.md") if "(Lookup)" in code]
    (tmp_path / "own_task.py").write_text(block)
    monkeypatch.syspath_prepend(tmp_path)
    run.file.write_text(SMALL + TINY.format("period"))
    run.train()
    flags = ["--tasks", "own_task:Period", "--schemes", "none", "--period.eval-batch", "4"]
    flags += ["--period.test-lengths=32,48"]
    status, out, err = run("compare", *flags)
    assert (status, err) == (0, "")
    assert "share of right tokens at each length" in out and "no ranking follows" in out
    period = run.results()["period", "none", 0]
    assert period.scores["plain"].keys() == {"32", "48"}
    assert "Continue a stream that repeats itself." in (run.folder / "report.html").read_text()
    assert run.settings()["tasks"] == ["own_task:Period"]
    settings = run.settings()["period"]
    assert settings["eval_batch"] == 4 and settings["longest_period"] == 8
    assert "1 of 1 runs were done before" in run("compare", *flags)[1]
    hint = "period.longest_preiod: unknown setting of Period; did you mean 'longest_period'?"
    assert hint in run.refused(*flags, "--period.longest-preiod", "2")
    with pytest.raises(SystemExit):
        main(["compare", str(run.file), "--tasks", "own_task:Period", "--help"])


def test_compare_takes_chains_patterns_and_factories(run, own_module):
    """The factory makes a pattern of a chain and T5."""
    names = ["rope+alibi", "my_schemes:both", "my_schemes:layers", "my_schemes:biased"]
    flags = ["--schemes.my_schemes:biased.theta", "100", "--kback.model.num-layers", "2"]
    status, _, err = run("compare", "--schemes", names[-1], *flags)
    assert (status, err) == (0, "")
    (result,) = run.results().values()
    assert result.settings["scheme"] == names[-1] and result.status == "done"
    assert "theta=100.0" in result.scheme_repr and "T5(num_heads=2" in result.scheme_repr
    experiment = experiment_of(run.folder, names[-1:])
    experiment = dataclasses.replace(experiment, schemes=tuple(names))
    chained, both, layers, biased = (repr(r.position) for r in experiment.all_runs())
    assert chained == both and "RoPE(head_dim=8" in both and "ALiBi(num_heads=2" in both
    assert "window=16" in layers and "NoPE()" in layers
    assert biased == result.scheme_repr


def test_finished_runs_are_skipped(run, of_none):
    first, trained = run.results(), run.pretended
    trained.clear()
    status, out, _ = run("compare", "--schemes", "rope,none")
    assert status == 0 and trained == ["rope"]
    assert "1 of 2 runs were done before." in out and "[1/1] kback-rope-s0-" in out
    assert first.items() <= run.results().items() and len(run.results()) == 2
    assert run("compare", "--schemes", "rope")[0] == 0
    assert len(trained) == 1 and list(run.results()) == [("kback", "rope", 0)]
    assert run("compare", "--schemes", "rope", "--seeds", "2")[0] == 0
    assert len(trained) == 2 and ("kback", "rope", 1) in run.results()


def test_interrupt_keeps_finished_runs(run, monkeypatch):
    pretend = Run.measured

    def stop_at_rope(self, *arguments):
        if self.scheme == "rope":
            raise KeyboardInterrupt
        return pretend(self, *arguments)

    with monkeypatch.context() as patch:
        patch.setattr(Run, "measured", stop_at_rope)
        status, out, _ = run("compare")
    assert status == 130 and "continues with the others" in out
    assert list(run.results()) == [("kback", "none", 0)]
    assert (run.folder / "report.html").exists()
    assert run("compare")[0] == 0
    assert list(run.results()) == [("kback", "none", 0), ("kback", "rope", 0)]


def test_the_command_that_continues_is_named(run):
    for flags, words in (([], "command"), (["--fresh"], "command without --fresh")):
        status, out, _ = run("compare", "--schemes", "none", "--minutes", "0", *flags)
        assert status == 3 and f"Time is over with 1 runs left; the same {words} continues." in out


def test_another_configuration_loses_nothing(run, of_none):
    before = run.results()
    other = ["--schemes", "none", "--kback.train.learning-rate", "0.1"]
    status, out, _ = run("compare", *other)
    assert status == 0 and "done before" not in out and run.results() != before
    assert "1 of 1 runs were done before" in run("compare", "--schemes", "none")[1]
    assert run.results() == before
    assert run("compare", *other, "--fresh")[0] == 0
    assert run.settings()["kback"]["train"]["learning_rate"] == 0.1
    assert len(list(run.folder.glob("*/result.json"))) == 1


def test_what_cannot_run_removes_nothing(run, of_none, monkeypatch):
    """A batch that the devices do not divide, and numbers of 64 bits."""
    monkeypatch.setattr("experiments.runs.hosts.join", lambda: None)
    before = run.files()
    err = run.refused("--schemes", "none,rope", "--fresh", "--devices", "8")
    assert "kback.train.batch: 4 is not a multiple of --devices 8" in err
    with jax.enable_x64(True):
        err = run.refused("--schemes", "none", "--fresh")
    assert err.startswith("config error: JAX_ENABLE_X64: ")
    assert run.files() == before


def test_a_report_needs_no_settings_of_this_repository(run, monkeypatch):
    monkeypatch.setattr("experiments.pages.report._CONFIGS", (run.file, run.file))
    assert run("compare", "--schemes", "none", "--tasks", "text,kback")[0] == 0


def test_tasks_of_one_name_share_no_results(run, tmp_path, monkeypatch):
    """A task of your own may inherit the name of another, in its file or from here."""
    names = "First", "Second"
    lines = (f"@dataclass(frozen=True)\nclass {name}(KBack):\n    'A task.'\n" for name in names)
    imports = "from dataclasses import dataclass\nfrom experiments.tasks import KBack\n"
    (tmp_path / "my_tasks.py").write_text(imports + "".join(lines))
    monkeypatch.syspath_prepend(tmp_path)
    for count, name in enumerate(("kback", "my_tasks:First", "my_tasks:Second"), 1):
        status, out, _ = run("compare", "--schemes", "none", "--tasks", name)
        assert status == 0 and "done before" not in out
        assert len(list(run.folder.glob("*/result.json"))) == count


@pytest.mark.parametrize(
    ("method", "line", "message"),
    [
        ("check", r'raise ValueError("no\nperiod")', "ValueError: no period"),
        ("load", 'raise FileNotFoundError("nowhere")', "FileNotFoundError: nowhere"),
        ("load", "return 3", "TypeError: load() must return Data, got 3"),
        ("__hash__", "return hash([])", "TypeError: unhashable type: 'list'"),
    ],
)
def test_an_error_of_a_task_of_your_own_is_one_line(
    run, tmp_path, monkeypatch, method, line, message
):
    (tmp_path / "of_task.py").write_text(f"""
from dataclasses import dataclass
from experiments.tasks import KBack
@dataclass(frozen=True)
class Fails(KBack):
    def {method}(self):
        {line}
""")
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.delitem(sys.modules, "of_task", raising=False)
    place = "" if "Data" in message else f"of_task.py:7, in {method}: "
    err = run.refused("--schemes", "none", "--tasks", "of_task:Fails")
    assert err == f"config error: kback: {place}{message}\n"
    assert not run.folder.exists()


def test_results_of_another_commit_are_named(run, of_none, monkeypatch, capsys):
    for module in ("runs.run", "commands.compare"):
        monkeypatch.setattr(f"experiments.{module}.commit", lambda: "new")
    (before,) = {result.commit for result in run.results().values()}
    mixed = f"commit {before} (1 run) and commit new (1 run)"
    _, out, err = run("compare", "--schemes", "none,rope")
    assert f"1 of 2 runs were done before, at commit {before}; the others run at new." in out
    assert err == f"Results are of {mixed}, which may be why they differ.\n"
    assert mixed in (run.folder / "report.html").read_text()
    assert main(["report", str(run.folder)]) == 0 and mixed in capsys.readouterr().err
    assert "2 of 2 runs were done before." in run("compare", "--schemes", "none,rope")[1]
    status, out, err = run("compare", "--schemes", "none,rope", "--fresh")
    assert status == 0 and "before" not in out and err == ""


def test_results_of_other_code_are_refused(run, own_module, tmp_path, monkeypatch):
    module, names = tmp_path / "my_schemes.py", "rope,my_schemes:Parity,rope+my_schemes:Parity"

    def edit(old, new):
        module.write_text(module.read_text().replace(old, new))
        monkeypatch.delitem(sys.modules, "my_schemes")
        monkeypatch.setattr(sys, "dont_write_bytecode", True)
        importlib.invalidate_caches()
        schemes._digest.cache_clear()

    assert run("compare", "--schemes", names)[0] == 0
    before = run.files()
    folders = {path.name.split("-")[1] for path in run.folder.glob("kback-*")}
    assert folders == {"Parity", "rope", "rope+Parity"}
    edit("strength: float = 0.1", "strength: float = 0.25")
    err = run.refused("--schemes", names, "--seeds", "2")
    assert "code my_schemes has changed since its results; choose another --name, or --fre" in err
    assert run.files() == before
    assert run("compare", "--schemes", "rope")[0] == 0  # It needs none of this code.
    edit("strength: float = 0.25", "strength: float = 0.1")
    assert "3 of 3 runs were done before" in run("compare", "--schemes", names)[1]
    (tmp_path / "named.py").write_text("from my_schemes import Parity\n")
    words = ["--schemes", "named:Parity", "--trust", "named:Parity"]
    assert run("compare", *words)[0] == 0
    edit("strength: float = 0.1", "strength: float = 0.25")
    monkeypatch.delitem(sys.modules, "named")
    assert "code my_schemes has changed since its results" in run.refused(*words)


def test_states_of_other_code_are_not_continued(run, own_module, tmp_path, monkeypatch):
    experiment = load(run.file, ["--schemes", "my_schemes:Parity", "--name", "small"])
    states = experiment.all_runs()[0].states(run.folder)
    monkeypatch.setattr(schemes, "_digest", lambda module: "sha256 of another file")
    others = experiment.all_runs()[0].states(run.folder)
    assert states.parent == others.parent and states != others
    (states.parent / "checkpoints-0").mkdir(parents=True)
    assert run("compare", "--schemes", "my_schemes:Parity")[0] == 0
    assert [path.name for path in states.parent.iterdir()] == ["result.json"]


def test_a_corpus_that_changed_is_refused(run, tmp_path):
    """Seeds of one mean have one text."""
    corpus = tmp_path / "some.txt"
    corpus.write_text("All work and no play makes a dull boy. " * 300)
    text = ["--tasks", "text", "--schemes", "none", "--text.corpus", str(corpus)]
    assert run("compare", *text)[0] == 0
    corpus.write_text("No work and all play makes another boy. " * 300)
    runs_module.load_data.cache_clear()
    assert f"text of corpus {corpus} has changed since" in run.refused(*text, "--seeds", "2")


def test_failing_scheme_does_not_stop_the_others(run, own_module):
    run.train()
    status, out, _ = run("compare", "--schemes", "my_schemes:Broken,none")
    assert status == 1
    assert list(run.results()) == [("kback", "none", 0)]
    words = r"my_schemes\.py:\d+, in embed: RuntimeError: this scheme is broken"
    assert re.search(f"kback, my_schemes:Broken failed: {words}", " ".join(out.split()))
    assert re.search(words, (run.folder / "report.html").read_text())


def test_folders_of_results_call_no_code_that_the_call_does_not_name(
    run, own_module, tmp_path, capsys
):
    """The folder is as somebody else could have made it."""
    mine = "my_schemes:Parity"
    assert run("compare", "--schemes", f"{mine},rope+{mine}", "--tasks", "kback")[0] == 0
    assert run("compare", "--schemes", f"none,{mine}")[0] == 0
    config = run.folder / "config.toml"
    written = config.read_text()
    hostile = "[kback.schemes.'my_schemes:unannotated']\n"
    for text, name in ((written, mine), (written + hostile, "my_schemes:unannotated")):
        config.write_text(text)
        sys.modules.pop("my_schemes", None)
        err = refusal(capsys, "report", run.folder)
        assert "my_schemes" not in sys.modules
        assert err.count("names code, which is not called unless you allow") == 1
        assert err.count(f"--trust '{mine}" if name == mine else name) == 1
    err = refusal(capsys, "report", run.folder, "--trust", f"{mine},my_schemes:unannotated")
    assert "must be a Scheme" in err and not (tmp_path / "called").exists()
    config.write_text(written)
    assert main(["report", str(run.folder), "--trust", mine]) == 0


def test_damaged_results_are_not_overwritten(run, of_none, capsys):
    (path,) = run.folder.glob("*/result.json")
    for content in ("{", "[]", '{"settings": {}}', "", "tasks = 3"):
        path.write_text(content)
        before = run.files()
        assert "cannot be read" in run.refused("--schemes", "none")
        refusal(capsys, "report", run.folder)
        assert run.files() == before
    assert run("compare", "--schemes", "none", "--fresh")[0] == 0 and len(run.results()) == 1
    for content in ("seeds = = 1", "[kbak]"):
        (run.folder / "config.toml").write_text(content)
        refusal(capsys, "report", run.folder)


def test_full_disk_keeps_earlier_results(run, of_none, monkeypatch):
    before = run.files()

    def full(file):
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(os, "fsync", full)
    assert "No space left on device" in run.refused("--schemes", "none,rope")
    assert before.items() <= run.files().items()
    assert not list(run.folder.rglob("*.part"))

    def refuse(path):
        raise PermissionError(13, "Permission denied", str(path))

    monkeypatch.setattr("shutil.rmtree", refuse)
    assert "cannot be removed" in run.refused("--schemes", "none", "--fresh")


def test_a_moved_folder_is_in_the_command_of_its_report(run, of_none, tmp_path):
    run.folder.rename(tmp_path / "moved")
    assert main(["report", "moved"]) == 0
    page = (tmp_path / "moved" / "report.html").read_text()
    assert "compare moved/config.toml --results . --name moved\n" in page


@slow
def test_the_report_is_written_again(run, capsys):
    run.draw()
    assert run("compare", "--schemes", "none,rope", "--seeds", "2")[0] == 0
    before = (run.folder / "report.html").read_text()
    (run.folder / "report.html").unlink()
    assert main(["report", "results/small"]) == 0
    assert (run.folder / "report.html").read_text() == before
    assert main(["report", str(run.folder), "--baseline", "none"]) == 0
    assert "minus none" in (run.folder / "report.html").read_text()
    study = pages.ROOT / "results/study"
    for arguments, message in (
        (["nowhere"], "nowhere: holds no results"),
        ([study], f"{study}: has results of a study"),
        ([run.folder, "--baseline", "rpoe"], "--baseline: 'rpoe' is not among the runs"),
    ):
        assert message in refusal(capsys, "report", *arguments)
