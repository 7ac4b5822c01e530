"""Studies: stages, choices and pages, of runs that are not trained."""

import dataclasses
import itertools
import json
import re

import pytest

from experiments.__main__ import main
from experiments.errors import ConfigError
from experiments.runs.run import Result, RunFolder
from experiments.settings.config_io import convert
from experiments.study import plan
from experiments.study.command import known
from experiments.study.page import page

STUDY = """
task = "kback"
baseline = "rope"
schemes = ["none", "rope", "kerple"]

[kback]
test_lengths = [32, 48]
[kback.train]
steps = 100
steps_per_call = 10
warmup = 10

[sizes.small]
rates = [1e-3, 2e-3, 4e-3, 8e-3]
seeds = 2
equal_time = true
budgets = [0.5, 2.0]
own_rates.kerple = [10.0]

[sizes.large]
rates = [1e-3, 2e-3, 4e-3]
seeds = 1
kback.model.num_layers = 3
"""
BEST = {"none": 2e-3, "rope": 4e-3, "kerple": 8e-3}
HEIGHT = {"none": 0.3, "rope": 0.9, "kerple": 0.4}


def measured(run):
    """The score of a run: highest at the scheme's best rate, and with a large rate of its own."""
    train = run.task.train
    score = HEIGHT[run.scheme] - 20 * abs(train.learning_rate - BEST[run.scheme])
    score += 0.01 * (train.scheme_rate > 1) + 0.002 * (run.seed % 100) * (run.scheme == "rope")
    return score - 0.0001 * (100 - train.steps)


@pytest.fixture
def call(tmp_path, capsys, monkeypatch):
    """Runs `study` with scores from `measured`, and counts what it runs."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr("experiments.runs.run_queue.default_count", lambda: 1)
    (tmp_path / "mine.toml").write_text(STUDY)
    carried_out = []

    def pretend(self, *arguments):
        carried_out.append(self.run)
        if (self.run.scheme, self.run.task.train.learning_rate) == call.raises:
            raise RuntimeError("no memory")
        if (self.run.scheme, self.run.task.train.learning_rate) in call.diverges:
            return self._write("diverged", error="the loss is not finite at step 10")
        score = measured(self.run)
        return self._write(
            "done",
            parameters=1000,
            fitted=True,
            scores={"plain": {"32": score, "48": score / 2}},
            cpu_seconds={"none": 5.0, "rope": 8.0, "kerple": 10.0}[self.run.scheme],
        )

    monkeypatch.setattr(RunFolder, "_train", pretend)

    def call(*arguments):
        status = main(["study", "mine.toml", *arguments])
        out, err = capsys.readouterr()
        return status, out, err

    call.made, call.raises, call.diverges = carried_out, None, ()
    call.results = tmp_path / "results" / "mine"
    call.page = lambda: (tmp_path / "docs" / "mine.md").read_text()
    call.plot = tmp_path / "docs" / "mine.svg"
    return call


def test_stages_follow_from_results(call, tmp_path):
    assert call()[0] == 0 and "**0 of 39 runs" in call.page() and not call.plot.exists()
    status, out, err = call("--run")
    assert (
        (status, err) == (0, "") and "12 of small are next" in out and "9 of large are next" in out
    )
    assert len(call.made) == 39 == len({run.name for run in call.made})
    page = call.page()
    assert "runs have ended" not in page and "<svg" in call.plot.read_text()
    study, results = plan.load(tmp_path / "mine.toml"), known(call.results)
    small, large = study.cells["small"], study.cells["large"]
    for name, cell in small.items():
        finals = cell.finals(results)
        assert [run.seed for run in finals] == [0, 1]
        assert {run.task.train.learning_rate for run in finals} == {BEST[name]}
    assert {run.task.train.scheme_rate for run in small["kerple"].finals(results)} == {10.0}
    # The baseline takes 8 s, so none may make 8 / 5 of its steps and kerple 8 / 10.
    steps = [small[s].timed(results, small["rope"])[0].task.train.steps for s in ("none", "kerple")]
    assert steps == [160, 80] and not small["rope"].timed(results, small["rope"])
    assert large["kerple"].finals(results)[0].task.train.learning_rate == 4e-3
    assert large["kerple"].finals(results)[0].task.model.num_layers == 3
    # Paired differences: 0.41 - 0.9 - 0.002 seed, and with 80 steps 0.002 less.
    row = next(line for line in page.split("\n") if line.startswith("| kerple | 0.410"))
    cells = [cell.strip() for cell in row.split("|")]
    assert cells[3].startswith("-0.491 [-0.504") and cells[4] == "0.008 (10 x)"
    assert cells[5].startswith("-0.493 [-0.506")
    assert "lies at the edge of the grid for kerple" in page
    assert "* kerple, 10 x: 0.410 (+0.010)" in page
    assert (
        page.index("| rope | 0.901") < page.index("| kerple | 0.410") < page.index("| none | 0.3")
    )


def test_finished_runs_are_not_run_again_and_shards_share_the_work(call):
    assert call("--run", "--shard", "1/2")[0] == 0
    assert {run.scheme for run in call.made} == {"none", "kerple"}
    assert {run.seed for run in call.made} == {0, 1, 100}
    assert "| none | 0.3" not in call.page()  # There is no baseline yet.
    assert call("--run")[0] == 0
    before = call.page()
    assert len(call.made) == 39 == len({run.name for run in call.made})
    assert call("--run", "--minutes", "0")[0] == 0
    assert len(call.made) == 39 and call.page() == before


def test_time_limits_and_failures_lose_nothing(call):
    status, out, _ = call("--run", "--minutes", "0")
    assert status == 0 and "Time is over with 12 runs left" in out and not call.made
    call.raises = ("none", 1e-3)
    status, out, _ = call("--run")
    assert status == 1 and "failed: RuntimeError: no memory" in out
    assert len(call.made) == 39 - 5  # Without seeds and equal times of none.
    assert "| rope | 0.901" in call.page() and "runs have ended" in call.page()
    report = call.results / "report.html"
    assert "far:</strong>\nsmall: none (3 of 4 learning rates); large: " in report.read_text()
    call.raises = None
    assert call("--run")[0] == 0 and "runs have ended" not in call.page()
    assert "so far" not in report.read_text()


def test_rates_that_diverge_are_not_chosen(call, tmp_path):
    call.diverges = [("rope", 8e-3)]
    assert call("--run")[0] == 0
    assert re.search(r"\| rope \|.*\*\*0\.900\*\* \| diverged \|", call.page())
    call.diverges = [("rope", 4e-3)]
    for path in call.results.glob("*/result.json"):
        path.unlink()
    assert call("--run")[0] == 0
    study, results = plan.load(tmp_path / "mine.toml"), known(call.results)
    rates = {run.task.train.learning_rate for run in study.cells["small"]["rope"].finals(results)}
    assert rates == {2e-3}


def test_seeds_that_diverge_are_counted_and_a_score_of_zero_is_one(call, monkeypatch):
    monkeypatch.setitem(HEIGHT, "none", 0.0)
    assert call("--run")[0] == 0
    page = call.page()
    assert re.search(r"\| none \| 0\.000 \[.* \| -0\.901 \[", page)
    for path in call.results.glob("kback-none-s1-*/result.json"):
        content = json.loads(path.read_text())
        path.write_text(json.dumps(content | {"status": "diverged", "scores": {}}))
    assert call()[0] == 0 and re.search(r"\| none \|.*\| diverged in 1 of 2 \|", call.page())
    assert "Seeds that diverged: none in 1 of 2." in call.page()


def test_compute_gains(call, monkeypatch, tmp_path):
    monkeypatch.setitem(HEIGHT, "none", 0.893)
    assert call("--run")[0] == 0
    study, results = plan.load(tmp_path / "mine.toml"), known(call.results)
    steps = [
        [run.task.train.steps for run in study.cells["small"]["rope"].budgeted(results, budget)]
        for budget in (0.5, 2.0)
    ]
    assert steps == [[50, 50], [200, 200]]
    # With 50 steps RoPE has 0.005 less, with 200 0.01 more; none with 160 has 0.002 less.
    assert "by training time, at the rate that is best for 1 x: 0.5 x: 0.896, 1 x: 0.901" in (
        call.page()
    )
    row = next(line for line in call.page().split("\n") if line.startswith("| none | 0.893"))
    gain = 2 ** (-0.002 / 0.005)
    assert row.endswith(f" | {gain:.2f} [< 0.5, > 2] |")
    row = next(line for line in call.page().split("\n") if line.startswith("| kerple | 0.410"))
    assert row.endswith(" | < 0.5 |")


def test_equal_times_leave_out_what_diverged(call, tmp_path):
    call.diverges = [("none", 1e-3), ("none", 4e-3), ("none", 8e-3)]
    call.diverges += [("kerple", rate) for rate in (1e-3, 2e-3, 4e-3, 8e-3)]
    assert call("--run")[0] == 0 and "runs have ended" not in call.page()
    study, results = plan.load(tmp_path / "mine.toml"), known(call.results)
    small = study.cells["small"]
    assert small["none"].timed(results, small["rope"])[0].task.train.steps == 160
    assert not small["kerple"].timed(results, small["rope"])  # All of its grid diverged.


def test_times_of_several_processors_are_told(call):
    assert call("--run")[0] == 0 and "not comparable" not in call.page()
    for path in call.results.glob("kback-none-s100-*/result.json"):
        content = json.loads(path.read_text())
        content["environment"]["processor"] = "Other 3"
        path.write_text(json.dumps(content))
    assert call()[0] == 0
    assert call.page().count("compute gains are not comparable") == 1  # The larger size has none.
    assert re.search(r"\* Processor: .*Other 3", call.page())


def test_training_time_is_wall_time_on_accelerators(call):
    assert call("--run")[0] == 0
    path = next(call.results.glob("kback-rope-*/result.json"))
    content = json.loads(path.read_text()) | {"train_seconds": 3.0}
    result = convert(Result, content, "")
    assert result.seconds == 8.0
    gpu = result.environment | {"device": "gpu: NVIDIA H100"}
    assert dataclasses.replace(result, environment=gpu).seconds == 3.0


def test_the_order_with_parts_of_the_grid(call):
    assert call("--run")[0] == 0
    lines = call.page().split("\n")
    orders = [line for line in lines if line.startswith("* 0.00")][:2]
    assert orders == [
        "* 0.001, 0.004: rope 0.900, kerple 0.320, none 0.280",
        "* 0.002, 0.008: rope 0.860, kerple 0.400, none 0.300",
    ]
    assert "The order is the same." in lines and not any("**" in line for line in lines[:40])


def test_an_order_that_depends_on_the_grid_fails_the_criterion(call, monkeypatch):
    monkeypatch.setitem(HEIGHT, "none", 0.885)
    assert call("--run")[0] == 0
    small = call.page().partition("## Small")[2].partition("## Large")[0]
    failed = "* **Criterion 2 fails**: with the half of the grid, these change places: "
    assert failed + "rope and none.\n" in small
    assert "Pairs that change places: rope and none (0.035 and 0.025 apart)." in small


def test_rates_that_one_run_cannot_tell_apart_are_named(call):
    """Two reported seeds differ by 0.002: twice their standard deviation is 0.0028."""
    assert call("--run")[0] == 0 and "The best rate is not resolved" not in call.page()
    for rate, value in ((2e-3, 0.8973), (1e-3, 0.897)):
        change(call, "rope", 100, rate, scores={"plain": {"32": value, "48": value}})
    assert call()[0] == 0 and "**The best rate is not resolved** for rope (0.002)." in call.page()


@pytest.mark.parametrize(("seconds", "even"), [(5.1, True), (5.2, False)])
def test_nothing_is_concluded_from_disturbed_times(call, seconds, even):
    assert call("--run")[0] == 0
    for seed in (0, 1):
        change(call, "none", seed, 2e-3, cpu_seconds=seconds)
    assert call()[0] == 0
    small = call.page().partition("## Small")[2].partition("## Large")[0]
    assert ("compute gain |" in small) == even and ("in equal time, difference" in small) == even
    caution = (
        "* **Nothing is concluded from time**: with none, training took 0.62 of the time of rope "
        "in the grid and 0.65 in the reported runs."
    )
    assert (caution in small) != even


def change(call, scheme, seed, rate, **entries):
    """Changes entries of the result of the small size with a scheme, a seed and a rate."""
    study = plan.load(call.results.parents[1] / "mine.toml")
    cell = study.cells["small"][scheme]
    (run,) = (run for run in cell.grid if run.task.train.learning_rate == rate)
    path = call.results / cell.variant(run, seed).name / "result.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | entries))


def test_a_size_may_have_another_task(call, tmp_path):
    file = tmp_path / "mine.toml"
    change = 'seeds = 1\ntask = "kth"\nkth.train.steps = 100\nkth.model.num_layers = 3'
    file.write_text(STUDY.replace("seeds = 1\nkback.model.num_layers = 3", change))
    assert call("--run")[0] == 0
    large = call.page().partition("## Large")[2]
    assert "Task kth: " in large and "Task k" not in call.page().partition("## Large")[0]
    assert {run.task.name for run in call.made} == {"kback", "kth"}
    assert "small" not in (tmp_path / "docs" / "mine.svg").read_text()  # One size: no legend.
    assert "<h2>large</h2>" in (tmp_path / "results" / "mine" / "report.html").read_text()


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (("seeds = 1", 'task = "kht"'), "sizes.large: tasks: unknown task"),
        (("rates = [1e-3, 2e-3, 4e-3]", "rates = [1e-3, 2e-3]"), "large: rates: must be at least"),
        (("rates = [1e-3, 2e-3, 4e-3]", ""), "sizes.large: rates: is missing"),
        (('baseline = "rope"', 'baseline = "alibi"'), "baseline: must be one of the schemes"),
        (("own_rates.kerple", "own_rates.t5"), "sizes.small: own_rates.t5: is not compared"),
        (("seeds = 2", "seed = 2"), "sizes.small: seed: unknown setting"),
        (("seeds = 2", "seeds = 101"), "seeds: must be up to grid_seed"),
        (("[0.5, 2.0]", "[0.5, 1.0]"), "sizes.small: budgets: must grow, without 1"),
        (("[kback.train]", "[kback.trian]"), "kback.trian: unknown setting"),
        (('schemes = ["none", ', 'schemes = ["nnoe", '), "unknown scheme"),
    ],
)
def test_wrong_files_are_one_line(tmp_path, change, message):
    path = tmp_path / "wrong.toml"
    path.write_text(STUDY.replace(*change))
    with pytest.raises(ConfigError) as caught:
        plan.load(path)
    assert message in str(caught.value) and "\n" not in str(caught.value)


def test_the_committed_study_is_read(request):
    study = plan.load(request.config.rootpath / "configs" / "study.toml")
    for cells in study.cells.values():
        for cell in cells.values():
            rates = [run.task.train.learning_rate for run in cell.grid]
            assert all(b == 2 * a for a, b in itertools.pairwise(rates))
            assert cell.grid[0].task.eval_bytes >= 65536


def test_the_committed_page_is_that_of_the_committed_results(request):
    root = request.config.rootpath
    study, results = plan.load(root / "configs" / "study.toml"), known(root / "results" / "study")
    files = {what: f"study{what}.svg" for what in ("", "-lengths", "-maps")}
    carried_out = page(study, results, "configs/study.toml", "results/study", files)
    assert (root / "docs" / "study.md").read_text() == carried_out
    names = {run.name for run in study.runs(results)}
    content = {path.parent.name for path in (root / "results" / "study").glob("*/result.json")}
    assert content <= names  # A result that no run has any more would never be read.
