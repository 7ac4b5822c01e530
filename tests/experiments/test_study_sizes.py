"""Studies of several sizes: transferred rates, gains by size, the clock of an accelerator."""

import jax.numpy as jnp
import pytest

from experiments.errors import ConfigError
from experiments.runs.run import Result
from experiments.study import clock, gains, plan
from experiments.study.clock import Clock
from experiments.study.rows import rows_of
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
equal_time = ["t5"]
budgets = [0.5, 2.0]
kback.model = {model_dim = 16, num_heads = 2}

[sizes.b]
rates_of = "a"
seeds = 2
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
    for size, expected in (("a", 2**0.5), ("b", float("inf"))):
        rows = rows_of(study.cells[size], "rope", result, CLOCK)
        gain = gains.gain(rows["t5"], gains.curve_of(rows["rope"], result))
        assert gain == pytest.approx([expected] * 3)


def test_the_clock_of_accelerators_has_the_programs_of_the_runs(study, monkeypatch, tmp_path):
    asked = []

    def prepare(task, position, data):
        asked.append(of_program(task))
        return lambda: jnp.zeros(()), 0.0

    monkeypatch.setattr("experiments.bench.step.prepare", prepare)
    monkeypatch.setattr("jax.default_backend", lambda: "gpu")
    times = clock.measure({"b": study.cells["b"]}, tmp_path, print)
    assert list(times.steps["b"]) == ["rope", "t5"] and times.rounds == {"b": 3}
    assert asked == [of_program(cell.grid[0].task) for cell in study.cells["b"].values()]


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (('rates_of = "a"', 'rates_of = "c"'), "sizes.b: rates_of: must be a size above"),
        (('rates_of = "a"', 'rates_of = "a"\nrates = [1.0]'), "rates: and rates_of exclude"),
        (('equal_time = ["t5"]', 'equal_time = ["t6"]'), "sizes.a: equal_time: t6 is not compared"),
    ],
)
def test_wrong_files_are_one_line(tmp_path, change, message):
    (tmp_path / "mine.toml").write_text(STUDY.replace(*change))
    with pytest.raises(ConfigError) as caught:
        plan.load(tmp_path / "mine.toml")
    assert message in str(caught.value) and "\n" not in str(caught.value)
