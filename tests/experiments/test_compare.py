"""compare at tiny size: files, resumption, refusals, user schemes and tasks."""

import json
import os
import re
import textwrap
import tomllib

import numpy as np
import pytest

from experiments import compare as compare_module
from experiments.__main__ import main

SMALL = """
tasks = ["kback"]
[schemes]
names = ["none", "rope"]
[kback]
test_lengths = [32, 48]
eval_batch = 8
[kback.model]
model_dim = 16
num_layers = 1
num_heads = 2
[kback.train]
steps = 4
steps_per_call = 2
warmup = 1
batch = 4
[text]
train_length = 16
test_lengths = [16, 32]
sliding_lengths = [16, 32]
eval_bytes = 64
stride = 4
[text.model]
model_dim = 16
num_layers = 1
num_heads = 2
[text.train]
steps = 4
steps_per_call = 2
warmup = 1
batch = 4
"""


@pytest.fixture
def run(tmp_path, capsys, monkeypatch):
    """Runs a command on the small experiment in a folder of its own."""
    file = tmp_path / "small.toml"
    file.write_text(SMALL)
    monkeypatch.chdir(tmp_path)

    def call(command, *arguments):
        status = main([command, str(file), "--name", "small", *arguments])
        out, err = capsys.readouterr()
        return status, out, err

    call.file = file
    call.folder = tmp_path / "results" / "small"
    call.read = lambda: json.loads((call.folder / "results.json").read_text())
    return call


@pytest.fixture
def own_module(tmp_path, monkeypatch):
    """A module of the user's own beside the experiment."""
    import pathlib

    source = pathlib.Path(__file__).with_name("mine.py").read_text()
    (tmp_path / "my_schemes.py").write_text(source)
    monkeypatch.syspath_prepend(tmp_path)


def test_compare_writes_results_and_report_with_a_user_scheme(run, own_module):
    mine = "my_schemes:Parity"
    status, out, err = run("compare", "--schemes", f"rope,{mine}", "--seeds", "2")
    assert (status, err) == (0, "")
    results = run.read()
    assert {"name", "created", "config", "environment", "runs"} <= results.keys()
    assert [r["scheme"] for r in results["runs"]] == ["rope", mine]
    for r in results["runs"]:
        assert r["status"] == "done" and r["error"] is None and r["seeds"] == [0, 1]
        assert r["curve"]["step"] == [2, 4]
        assert np.shape(r["curve"]["loss"]) == (2, 2) and r["final_loss"] == r["curve"]["loss"][-1]
        assert [e["length"] for e in r["evaluations"]] == [32, 48]
        assert [e["in_distribution"] for e in r["evaluations"]] == [True, False]
        assert all(len(e["values"]) == 2 for e in r["evaluations"])
        assert r["parameters"] > 0 and r["train_seconds"] > 0 and r["cpu_seconds"] > 0
        # Parameters and both moments of AdamW, of two seeds.
        assert 2 * 3 * 4 * r["parameters"] < r["memory_bytes"] < 1e9
        assert r["fitted"] is False and "0.9" in r["fit_rule"]
    files = {f.name for f in run.folder.iterdir()}
    assert files == {
        "config.toml",
        "environment.json",
        "metrics.jsonl",
        "results.json",
        "report.html",
    }
    resolved = tomllib.loads((run.folder / "config.toml").read_text())
    assert resolved["schemes"]["names"] == ["rope", mine] and resolved["seeds"] == 2
    assert json.loads((run.folder / "environment.json").read_text())["jax"]
    lines = [json.loads(x) for x in (run.folder / "metrics.jsonl").read_text().splitlines()]
    assert [(x["scheme"], x["step"]) for x in lines] == [
        ("rope", 2),
        ("rope", 4),
        (mine, 2),
        (mine, 4),
    ]
    assert "report.html" in out


def test_user_task_is_one_file(run, own_module):
    given = ["--tasks", "kback,my_schemes:Repeat", "--schemes", "none", "--repeat.eval-batch", "4"]
    small = [f"--repeat.{x}" for x in ("train.steps=2", "train.steps-per-call=1", "train.warmup=1")]
    given += [*small, "--repeat.model.model-dim=16", "--repeat.model.num-heads=2"]
    status, out, err = run("compare", *given)
    assert (status, err) == (0, "")
    assert "repeat: share of echoes at each length" in " ".join(out.split())
    _, repeat = run.read()["runs"]
    assert repeat["task"] == "repeat" and repeat["status"] == "done"
    assert [e["length"] for e in repeat["evaluations"]] == [32, 48, 64, 128]
    page = (run.folder / "report.html").read_text()
    assert "Say it again." in page and "length in words" in page
    resolved = tomllib.loads((run.folder / "config.toml").read_text())
    assert resolved["tasks"] == ["kback", "my_schemes:Repeat"]
    assert resolved["repeat"]["eval_batch"] == 4 and resolved["repeat"]["pause"] == 1
    assert run("compare", *given)[0] == 0  # Settings are those of before: nothing runs again.
    assert run.read()["runs"][1] == repeat
    status, _, err = run("compare", *given, "--repeat.pause", "2")
    assert status == 2 and "repeat.pause (1 there, 2 here)" in err
    status, _, err = run("compare", *given, "--repeat.puase", "2")
    assert status == 2 and "repeat.puase: unknown setting of Repeat; did you mean 'pause'?" in err
    with pytest.raises(SystemExit):
        main(["compare", str(run.file), "--tasks", "my_schemes:Repeat", "--help"])


def test_readme_scheme_runs_as_pasted(run, tmp_path, monkeypatch, request):
    readme = (request.config.rootpath / "README.md").read_text()
    blocks = re.findall(r"^( *)```python\n(.*?)^ *```", readme, re.DOTALL | re.MULTILINE)
    (block,) = [textwrap.dedent(text) for _, text in blocks if "(pe.Scheme)" in text]
    (tmp_path / "pasted.py").write_text(block)
    monkeypatch.syspath_prepend(tmp_path)
    (name,) = re.findall(r"class (\w+)\(pe.Scheme\)", block)
    status, _, err = run("compare", "--schemes", f"pasted:{name}")
    assert (status, err) == (0, "")


def test_compare_takes_chains_patterns_and_factories(run, own_module):
    names = ["rope+alibi", "my_schemes:both", "my_schemes:layers", "my_schemes:biased"]
    status, _, err = run(
        "compare", "--schemes", ", ".join(names), "--schemes.my_schemes:biased.theta", "100",
        "--kback.model.num-layers", "2",
    )  # fmt: skip
    assert (status, err) == (0, "")
    runs = run.read()["runs"]
    assert [r["scheme"] for r in runs] == names
    assert {r["status"] for r in runs} == {"done"}
    chained, both, layers, biased = (r["scheme_repr"] for r in runs)
    assert chained == both and "RoPE(head_dim=8" in both and "ALiBi(num_heads=2" in both
    assert runs[0]["final_loss"] == runs[1]["final_loss"]
    assert "window=16" in layers and "NoPE()" in layers
    assert "theta=100.0" in biased and "T5(num_heads=2" in biased


def test_finished_runs_are_skipped(run, monkeypatch):
    assert run("compare", "--schemes", "none")[0] == 0
    first = run.read()["runs"][0]
    trained = []
    original = compare_module.train
    monkeypatch.setattr(
        compare_module,
        "train",
        lambda task, scheme, *a, **k: trained.append(scheme) or original(task, scheme, *a, **k),
    )
    status, out, _ = run("compare", "--schemes", "rope,none")
    assert status == 0 and [type(s).__name__ for s in trained] == ["RoPE"]
    assert "[1/2] kback none:" in out and "[2/2] kback rope:" in out  # Finished runs come first.
    runs = run.read()["runs"]
    assert first in runs and {r["scheme"] for r in runs} == {"none", "rope"}
    assert run("compare", "--schemes", "rope")[0] == 0
    assert len(trained) == 1 and len(run.read()["runs"]) == 2
    resolved = tomllib.loads((run.folder / "config.toml").read_text())
    assert resolved["schemes"]["names"] == ["none", "rope"]


def test_interrupt_keeps_finished_runs(run, monkeypatch):
    original = compare_module.train

    def stop_at_rope(task, scheme, *rest, **options):
        if type(scheme).__name__ == "RoPE":
            raise KeyboardInterrupt
        return original(task, scheme, *rest, **options)

    monkeypatch.setattr(compare_module, "train", stop_at_rope)
    status, out, _ = run("compare")
    assert status == 130 and "continues with the others" in out
    assert [r["scheme"] for r in run.read()["runs"]] == ["none"]
    assert (run.folder / "report.html").exists()
    monkeypatch.setattr(compare_module, "train", original)
    assert run("compare")[0] == 0
    assert [r["scheme"] for r in run.read()["runs"]] == ["none", "rope"]


def test_other_configuration_is_refused_without_loss(run):
    assert run("compare", "--schemes", "none")[0] == 0
    before = {f.name: f.read_bytes() for f in run.folder.iterdir()}
    status, _, err = run("compare", "--schemes", "none", "--kback.train.batch", "5")
    assert status == 2 and err.count("\n") == 1
    assert "kback.train.batch (4 there, 5 here)" in err
    assert "--name" in err and "--fresh" in err
    assert {f.name: f.read_bytes() for f in run.folder.iterdir()} == before
    assert run("compare", "--schemes", "none", "--kback.train.batch", "5", "--fresh")[0] == 0
    assert run.read()["config"]["kback"]["train"]["batch"] == 5


def test_failing_scheme_does_not_stop_the_others(run, own_module):
    status, out, _ = run("compare", "--schemes", "my_schemes:Broken,none")
    assert status == 1
    broken, none = run.read()["runs"]
    assert broken["status"] == "failed" and none["status"] == "done"
    assert broken["error"] == "RuntimeError: this scheme is broken"
    assert "this scheme is broken" in out
    assert run("compare", "--schemes", "none")[0] == 0  # What was not asked for is no failure.


def test_text_variants_and_evaluate_on_kept_parameters(run, tmp_path):
    rng = np.random.default_rng(0)
    (tmp_path / "own.txt").write_bytes(rng.integers(97, 105, 4000).astype(np.uint8).tobytes())
    given = [
        "--tasks",
        "text",
        "--text.corpus",
        str(tmp_path / "own.txt"),
        "--schemes",
        "rope,learned",
    ]
    assert run("train", *given)[0] == 0
    rope, learned = run.read()["runs"]
    found = {(e["mode"], e["variant"], e["length"]): e for e in rope["evaluations"]}
    assert set(found) == {
        ("nonoverlapping", None, 16),
        ("nonoverlapping", None, 32),
        ("nonoverlapping", "ntk", 32),
        ("nonoverlapping", "pi", 32),
        ("sliding", None, 16),
        ("sliding", None, 32),
    }
    beyond = [e for e in learned["evaluations"] if not e["in_distribution"]]
    assert {e["note"] for e in beyond} == {"rows beyond position 15 were never trained"}
    assert "table of byte pairs" in rope["fit_rule"]
    assert "corpus" in str(run.read()["environment"])

    status, _, err = run("evaluate", *given)
    assert (status, err) == (0, "")
    assert run.read()["runs"][0]["evaluations"] == rope["evaluations"]
    assert run("evaluate", *given, "--text.eval-bytes", "128", "--text.variants", ",")[0] == 0
    again = run.read()["runs"][0]["evaluations"]
    assert {e["variant"] for e in again} == {None}
    assert again[0]["values"] != rope["evaluations"][0]["values"]
    status, _, err = run("evaluate", *given, "--text.train.steps", "6")
    assert status == 2 and "text.train.steps (4 there, 6 here)" in err


def test_parameters_are_stored_by_path(run):
    assert run("train", "--schemes", "none")[0] == 0
    file = run.folder / "parameters" / "kback-none.npz"
    with np.load(file) as kept:
        arrays = dict(kept)
    assert "blocks/0/attention/query/kernel" in arrays
    query, key = (f"blocks/0/attention/{x}/kernel" for x in ("query", "key"))
    assert arrays[query].shape == arrays[key].shape
    assert run("evaluate", "--schemes", "none")[0] == 0
    before = run.read()["runs"][0]["evaluations"]
    np.savez(file, **dict(reversed(arrays.items())))
    assert run("evaluate", "--schemes", "none")[0] == 0
    assert run.read()["runs"][0]["evaluations"] == before
    np.savez(file, **{k: v for k, v in arrays.items() if k != key})
    status, _, err = run("evaluate", "--schemes", "none")
    assert status == 2 and f"{key} is nothing, wanted" in err and err.count("\n") == 1


def test_per_sequence_scaling_has_no_zero_shot_variants(run, tmp_path):
    (tmp_path / "own.txt").write_bytes(bytes(range(97, 105)) * 500)
    given = ["--tasks", "text", "--text.corpus", str(tmp_path / "own.txt")]
    assert run("compare", *given, "--schemes", "rope_by_length")[0] == 0
    (done,) = run.read()["runs"]
    assert done["status"] == "done" and {e["variant"] for e in done["evaluations"]} == {None}


def test_evaluate_needs_kept_parameters(run):
    status, _, err = run("evaluate", "--schemes", "none")
    assert status == 2 and "holds no finished run" in err
    assert not run.folder.exists()
    assert run("compare", "--schemes", "none")[0] == 0
    status, _, err = run("evaluate", "--schemes", "none")
    assert status == 2 and "python -m experiments train" in err
    status, _, err = run("evaluate", "--schemes", "none", "--fresh")
    assert status == 2 and "fresh: unknown setting of Experiment" in err


def test_train_makes_the_parameters_that_a_comparison_did_not_keep(run):
    assert run("compare", "--schemes", "none")[0] == 0
    (first,) = run.read()["runs"]
    assert run("train", "--schemes", "none")[0] == 0
    assert run("evaluate", "--schemes", "none")[0] == 0
    (again,) = run.read()["runs"]
    assert again["evaluations"] == first["evaluations"]


def test_damaged_parameters_are_one_line(run):
    assert run("train", "--schemes", "none")[0] == 0
    file, before = run.folder / "parameters" / "kback-none.npz", run.read()
    whole = file.read_bytes()
    for content in (whole[:1000], b"", b"parameters"):
        file.write_bytes(content)
        status, _, err = run("evaluate", "--schemes", "none")
        assert status == 2 and err.count("\n") == 1 and f"{file.name}: cannot be read" in err
    assert run.read() == before


@pytest.mark.parametrize("where", ["experiments.compare.plan_runs", "os.fsync"])
def test_interrupt_at_any_time_ends_without_traceback(run, monkeypatch, where):
    assert run("train", "--schemes", "none")[0] == 0
    before = run.read()

    def stop(*arguments):
        raise KeyboardInterrupt

    monkeypatch.setattr(where, stop)
    for command in ("compare", "evaluate"):
        status, _, err = run(command, "--schemes", "none")
        assert (status, err) == (130, "Stopped.\n")
    assert run.read() == before
    assert not [f for f in run.folder.iterdir() if f.name.endswith(".part")]


def test_fresh_leaves_no_parameters_of_another_configuration(run, monkeypatch):
    assert run("train", "--schemes", "none")[0] == 0

    def refuse(path):
        raise PermissionError(13, "Permission denied", str(path))

    monkeypatch.setattr("shutil.rmtree", refuse)
    status, _, err = run("compare", "--schemes", "none", "--kback.train.batch", "5", "--fresh")
    assert status == 2 and err.count("\n") == 1 and "parameters: cannot be removed" in err


def test_missing_corpus_writes_nothing(run):
    status, _, err = run("compare", "--tasks", "text", "--text.corpus", "nowhere.txt")
    assert status == 2 and err.count("\n") == 1 and "nowhere.txt: no such file" in err
    assert not run.folder.exists()


DAMAGED = [
    *("{", "[]", '{"runs": 3}', '{"runs": [{"task": "kback"}]}', '{"runs": [{}]}', '{"runs": [3]}'),
    '{"runs": [{"task": ["kback"], "scheme": "none", "status": "done"}]}',
    '{"runs": [], "tasks": []}',
    '{"runs": [], "tasks": {"kback": {"colour": "red"}}}',
    '{"runs": [{"task": "kback", "scheme": "none", "status": "done", "evaluations": [{}]}], '
    '"tasks": {"kback": {}}}',
]


@pytest.mark.parametrize("content", DAMAGED)
def test_damaged_results_are_not_overwritten(run, content):
    run.folder.mkdir(parents=True)
    (run.folder / "results.json").write_text(content)
    status, _, err = run("compare", "--schemes", "none")
    assert status == 2 and err.count("\n") == 1 and "cannot be read" in err
    assert main(["report", str(run.folder)]) == 2
    assert (run.folder / "results.json").read_text() == content


def test_fresh_replaces_damaged_results(run):
    run.folder.mkdir(parents=True)
    (run.folder / "results.json").write_text("{")
    assert run("compare", "--schemes", "none", "--fresh")[0] == 0
    assert len(run.read()["runs"]) == 1


def test_unwritable_folder_is_one_line(run):
    run.folder.parent.write_text("a file where the folder should be")
    status, _, err = run("compare", "--schemes", "none")
    assert status == 2 and err.count("\n") == 1 and "cannot be written" in err


def test_full_disk_keeps_earlier_results(run, monkeypatch):
    assert run("compare", "--schemes", "none")[0] == 0
    before = run.read()

    def full(file):
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(os, "fsync", full)
    status, _, err = run("compare", "--schemes", "none,rope")
    assert status == 2 and err.count("\n") == 1 and "No space left on device" in err
    assert run.read() == before
    assert not [f for f in run.folder.iterdir() if f.name.endswith(".part")]


def test_report_is_rewritten_from_results(run, capsys):
    assert run("compare", "--schemes", "none")[0] == 0
    (run.folder / "report.html").unlink()
    assert main(["report", str(run.folder)]) == 0
    assert (run.folder / "report.html").exists()
    assert main(["report", "nowhere"]) == 2
    assert "nowhere" in capsys.readouterr().err
