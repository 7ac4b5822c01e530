"""Studies and claims on a GPU, before there is one: counts, forecasts, transferred rates, gains."""

import dataclasses
import json
import tarfile

import jax
import jax.numpy as jnp
import pytest

from experiments.__main__ import main
from experiments.errors import ConfigError
from experiments.runs import forecast, run_queue
from experiments.runs.experiment import Experiment
from experiments.runs.files import pack
from experiments.runs.run import Result
from experiments.settings.common import Model, Train
from experiments.study import clock, gains, plan
from experiments.study.clock import Clock
from experiments.study.on_gpu import lanes_of, plan_in_words
from experiments.tasks import Text
from experiments.training import cost
from experiments.training.train import of_program

STUDY = """
schemes = ["rope", "t5"]
task = "kback"

[kback]
test_lengths = [32, 48]
[kback.model]
num_layers = 1
[kback.train]
steps = 100
steps_per_call = 10
warmup = 10
base_width = 16

[sizes.a]
rates = [1e-3, 2e-3, 4e-3]
selection_seeds = 2
seeds = 2
lanes = 2
equal_time = ["t5"]
budgets = [0.5, 2.0]
kback.model = {model_dim = 16, num_heads = 2}

[sizes.b]
rates_of = "a"
seeds = 2
lanes = 3
equal_time = true
budgets = [0.5, 2.0]
kback.model = {model_dim = 32, num_heads = 2}
"""
CLOCK = Clock(
    steps={size: {"rope": 1.0, "t5": 2.0} for size in "ab"},
    rounds={"a": 5, "b": 5},
    others={"a": 0.0, "b": 0.0},
    environment={},
)


@pytest.fixture
def study(tmp_path):
    (tmp_path / "mine.toml").write_text(STUDY)
    return plan.load(tmp_path / "mine.toml")


def result(run):
    """Scores that are best at 2e-3, and grow by 0.1 each time that the steps double."""
    train, wide = run.task.train, run.task.model.model_dim == 32
    score = 0.5 - 50 * abs(train.learning_rate - 2e-3) + 0.001 * (run.seed % 10)
    score += 0.1 * {25: -2, 50: -1, 100: 0, 200: 1}[train.steps]
    score += (0.15 + 0.1 * wide) * (run.scheme == "t5")
    parameters = 20_000_000 if wide else 5_000_000
    scores = {"plain": {"32": score, "48": 0.0}}
    return Result({}, "done", "", {}, "", "", parameters=parameters, scores=scores)


def test_products_of_a_step_are_those_of_the_formula():
    """6 FLOPs for each weight and token, and 12 D for each layer and pair of tokens."""
    model = Model(model_dim=32, num_layers=2, num_heads=4, dtype="bfloat16")
    task = Text(train_length=64, test_lengths=(64,), model=model, train=Train(batch=3))
    schemes = {
        name: Experiment(tasks={"text": task}).scheme("text", name) for name in ("none", "t5")
    }
    none, t5 = (cost.of_step(task, position) for position in schemes.values())
    weights = 12 * 2 * 32**2 + 32 * 256
    assert none.flops == 6 * 3 * 64 * weights + 12 * 32 * 2 * 3 * 64**2 == t5.flops
    norms, embedding = 5 * 32, 256 * 32
    assert none.parameters == weights + norms + embedding
    assert t5.parameters == none.parameters + 4 * 32
    # Each layer writes and reads logits of 4 heads, at least forward and backward.
    assert t5.traffic - none.traffic > 2 * 4 * 2 * 3 * 4 * 64**2
    # Without rules bytes do not depend on the length at which tokens are.
    long = dataclasses.replace(task, train_length=128, test_lengths=(128,), train=Train(batch=3))
    of_tokens = cost.of_step(long, schemes["none"]).traffic - none.traffic
    assert of_tokens < none.traffic < t5.traffic


def test_forecasts_add_up(monkeypatch, study):
    counts = {"rope": cost.Cost(2e12, 4e9, 100, 10**7), "t5": cost.Cost(2e12, 8e9, 100, 10**7)}
    monkeypatch.setattr(
        cost, "of_step", lambda task, position: counts["t5" if "T5" in repr(position) else "rope"]
    )
    gpu = forecast.GPU(
        flops={"float32": 1e15}, bandwidth=1e12, flops_share=0.5, bandwidth_share=0.5
    )
    # 4 ms and 8 or 16 ms a lane; a step of many operations takes their launches.
    assert gpu.step(counts["rope"], 2, "float32") == pytest.approx(0.024)
    assert gpu.step(cost.Cost(1e6, 1e3, 100, 1), 2, "float32") == pytest.approx(6e-4)
    cell = study.cells["a"]["rope"]
    part = forecast.Part("x", cell.grid[0], 2, [[100] * 3, [50, 50, 200]])
    assert part.runs == 6 and part.groups == [100, 100, 50, 200]
    lines = list(forecast.forecast("Title:", [part], 0.1, gpu))
    # 450 steps, 6 evaluations, and one layer to compile for training and evaluation.
    seconds = 450 * 0.024 + 6 * 0.7
    row = lines[3].split()
    assert row == [
        "3",
        "x",
        "10.0",
        "2",
        "6",
        "4",
        "2.000",
        "4.00",
        "100",
        "24.0",
        f"{seconds:.0f}",
    ]
    assert lines[-2].startswith("6 runs; 1 programs of training and 1 of evaluation, 1 s without")
    assert lines[-2].endswith("16 s in all; pieces of 0.1 minutes: 3.")
    # 13.5 ms at 148 TFLOP/s and 2.0 ms at 2.01 TB/s a lane, and the same evaluations.
    assert lines[-1] == "An H100, with 3.35 TB/s and else the same: 19 s in all."
    text = "\n".join(plan_in_words(study, 9.0))
    # rope a: 3 rates, 2 others, 1, 2 seeds, 2 budgets of 2; t5 in equal time too.
    assert [line.split()[4:7] for line in text.split("\n")[3:7]] == [
        ["2", "12", "7"],
        ["2", "10", "6"],
        ["3", "6", "3"],
        ["3", "4", "2"],
    ]
    assert lanes_of(study)(study.cells["b"]["t5"].grid[0]) == 3


def test_a_size_takes_the_rates_of_another(study):
    of_a, of_b = study.cells["a"]["rope"], study.cells["b"]["rope"]
    assert not of_b.finals(lambda run: None)
    runs = of_b.finals(result)
    assert [run.seed for run in runs] == [0, 1]
    assert {run.task.train.learning_rate for run in runs} == {2e-3}
    assert {run.task.model.model_dim for run in runs} == {32}
    assert of_a.finals(result)[0].task.test_lengths == runs[0].task.test_lengths == (32, 48)
    names = {run.name for run in study.runs_of("b", result, None)}
    # Of b: two seeds of two schemes and two budgets.
    assert len(names) == 2 * 2 + 2 * 2
    # One program for the choice, the seeds and all budgets.
    every = [run for run in study.runs_of("a", result, CLOCK) if run.scheme == "rope"]
    assert len({run.program for run in every}) == 1
    assert [run.task.train.steps for run in study.cells["a"]["t5"].timed(result, of_a, CLOCK)] == [
        50,
        50,
    ]


def test_gains_by_size(study):
    """In half of the steps T5 loses 0.1 of its lead. Twice the steps are worth 0.1 to RoPE."""
    by_scheme = gains.by_scheme(study, result, CLOCK)
    assert list(by_scheme) == ["t5"] and list(by_scheme["t5"]) == ["a", "b"]
    for size, parameters, expected in (("a", 5.0, 2**0.5), ("b", 20.0, float("inf"))):
        million, bounds = by_scheme["t5"][size]
        assert million == parameters and bounds == pytest.approx([expected] * 3)
    assert list(gains.trends(study, result, CLOCK)) == [
        "* The gain of t5 in equal time grows from the first to the last size."
    ]
    picture = gains.gains_picture(study, result, CLOCK)
    assert picture.startswith("<svg") and "million parameters" in picture
    assert not gains.gains_picture(study, lambda run: None, CLOCK)


def test_the_clock_of_accelerators_has_the_programs_of_the_runs(study, monkeypatch):
    asked = []

    def prepare(task, position, data, lanes):
        asked.append((of_program(task), lanes))
        return lambda: jnp.zeros(()), 0.0

    monkeypatch.setattr("experiments.bench.step.prepare", prepare)
    monkeypatch.setattr("experiments.runs.lanes.compiled", lambda *arguments: None)
    ((steps, rounds, _),) = clock._on_accelerator(study.cells["b"])
    assert list(steps) == ["rope", "t5"] and rounds == 3
    assert asked == [(of_program(cell.grid[0].task), 3) for cell in study.cells["b"].values()]


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (('rates_of = "a"', 'rates_of = "c"'), "sizes.b: rates_of: must be a size above"),
        (('rates_of = "a"', 'rates_of = "a"\nrates = [1.0]'), "rates: and rates_of exclude"),
        (('equal_time = ["t5"]', 'equal_time = ["t6"]'), "sizes.a: equal_time: t6 is not compared"),
        (("lanes = 3", "lanes = 0"), "sizes.b: lanes: must be greater than or equal to 1"),
    ],
)
def test_wrong_files_are_one_line(tmp_path, change, message):
    (tmp_path / "mine.toml").write_text(STUDY.replace(*change))
    with pytest.raises(ConfigError) as caught:
        plan.load(tmp_path / "mine.toml")
    assert message in str(caught.value) and "\n" not in str(caught.value)


def test_plans_run_nothing(monkeypatch, tmp_path, capsys, request):
    monkeypatch.setattr(cost, "of_step", lambda task, position: cost.Cost(1e12, 1e9, 100, 10**7))
    folder = str(request.config.rootpath / "configs" / "scoreboard")
    monkeypatch.chdir(tmp_path)
    (tmp_path / "mine.toml").write_text(STUDY)
    assert main(["study", "mine.toml", "--plan", "--minutes", "5"]) == 0
    out = capsys.readouterr().out
    assert "b t5" in out and "pieces of 5 minutes: 1." in out and "H200, not measured" in out
    assert main(["scoreboard", "--folder", folder, "--plan"]) == 0
    out = capsys.readouterr().out
    assert out.startswith("Claims R12a, R12b, R15, R20, R21, R24:") and "R24 inkling" in out
    assert [path.name for path in tmp_path.iterdir()] == ["mine.toml"]


def test_the_committed_study_transfers_its_rates(request):
    study = plan.load(request.config.rootpath / "configs" / "study_gpu.toml")
    models = [cells["rope"].task.model for cells in study.cells.values()]
    assert {(m.head_dim, m.num_layers, m.dtype) for m in models} == {(64, 8, "bfloat16")}
    bases = {
        cell.task.train.base_width for cells in study.cells.values() for cell in cells.values()
    }
    assert bases == {models[0].model_dim}


def test_results_travel_in_one_file(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    folder = tmp_path / "results" / "mine" / "run"
    (folder / "checkpoints").mkdir(parents=True)
    (folder / "result.json").write_text("{}")
    (folder / "checkpoints" / "state.json").write_bytes(b"{}")
    (folder.parent / "clock.json").write_text("[]")
    assert pack(tmp_path / "results" / "mine", tmp_path / "out" / "all.tar.gz") == 2
    with tarfile.open(tmp_path / "out" / "all.tar.gz") as archive:
        names = archive.getnames()
        content = json.loads(archive.extractfile("results/mine/clock.json").read())
    assert sorted(names) == ["results/mine/clock.json", "results/mine/run/result.json"]
    assert content == []


def test_programs_of_accelerators_are_kept(monkeypatch, tmp_path):
    settings, named = {}, jax.config.jax_compilation_cache_dir
    jax.config.update("jax_compilation_cache_dir", None)
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(jax.config, "update", settings.__setitem__)
    monkeypatch.setattr(run_queue.compilation_cache, "reset_cache", lambda: None)
    run_queue.keep_programs()
    assert not settings
    monkeypatch.setattr("jax.default_backend", lambda: "gpu")
    run_queue.keep_programs()
    monkeypatch.undo()
    jax.config.update("jax_compilation_cache_dir", named)
    assert settings["jax_compilation_cache_dir"] == str(tmp_path / ".cache" / "jax")
