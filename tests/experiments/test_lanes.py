"""Runs side by side in one program."""

import argparse
import dataclasses
import json

import pytest

from experiments.errors import ConfigError
from experiments.runs import lanes
from experiments.runs.checkpoints import Deadline, OutOfTime
from experiments.runs.experiment import Experiment
from experiments.runs.run import Run, RunFolder
from experiments.runs.run_queue import Queue, add_arguments, number_of_lanes
from experiments.settings.common import Model, Train
from experiments.tasks import KBack

TASK = KBack(
    test_lengths=(32, 48),
    eval_batch=8,
    eval_batches=1,
    model=Model(model_dim=16, num_layers=1, num_heads=2),
    train=Train(steps=4, steps_per_call=2, warmup=1, batch=4),
)


def make_run(seed, rate=1e-3, scheme="t5", **changes):
    train = dataclasses.replace(TASK.train, learning_rate=rate, **changes)
    task = dataclasses.replace(TASK, train=train)
    position = Experiment(tasks={"kback": task}).scheme("kback", scheme)
    return Run(task, scheme, {}, position, seed)


def content(folder, run):
    return json.loads((folder / run.name / "result.json").read_text())


class Quiet:
    """Shows nothing; has the messages."""

    def __init__(self):
        self.messages, self.steps = [], []

    def start(self, runs):
        self.ended = []

    def update(self, step):
        self.steps.append((step.run, step.step))

    def finish(self, ended):
        self.ended.append(ended)

    def message(self, text):
        self.messages.append(text)


def test_runs_are_grouped_by_program_and_steps():
    a = [make_run(seed, rate) for seed in (0, 1) for rate in (1e-3, 2e-3)]
    longer, other = make_run(0, steps=6), make_run(0, scheme="rope")
    start = make_run(3)
    late = dataclasses.replace(make_run(4), start=start)
    units = [[a[0]], [longer], [a[1]], [other], [start, late], [a[2]], [a[3]]]
    parts = lanes.groups(units, lambda run: 3)
    assert parts == [[a[0], a[1], a[2]], [a[3]], [longer], [other], [start, late]]
    assert [lanes.is_group(part) for part in parts] == [True] * 4 + [False]
    assert longer.program == a[0].program != other.program


def test_lanes_equal_runs_alone(tmp_path):
    """Seeds and rates side by side, with a lane that diverges, a copy, and a run after another."""
    runs = [make_run(0, 1e-3), make_run(1, 4e-3), make_run(2, 1e38)]
    late = dataclasses.replace(make_run(4), start=runs[0])
    show = Quiet()
    queue = Queue(tmp_path / "lanes", show=show, lanes=lambda run: 2)
    queue.work([*runs, make_run(3)])
    queue.work([late])
    assert show.messages[0].startswith("4 runs in 2 groups; 1 programs: ")
    assert (runs[2].name, 2) in show.steps and queue.status == 0
    for run in (*runs, make_run(3), late):
        RunFolder(tmp_path / "alone", run).carry_out()
        one, other = (content(tmp_path / part, run) for part in ("lanes", "alone"))
        assert list(one) == list(other) and one["settings"] == other["settings"]
        for entry in ("status", "error", "parameters", "fitted", "scheme_repr"):
            assert one[entry] == other[entry]
        for view, scores in other["scores"].items():
            assert one["scores"][view] == pytest.approx(scores, abs=1e-3)
        if other["curve"]:
            assert one["curve"]["step"] == other["curve"]["step"]
            assert one["curve"]["loss"] == pytest.approx(other["curve"]["loss"], abs=2e-5)
    assert content(tmp_path / "lanes", runs[2])["status"] == "diverged"
    fact = content(tmp_path / "lanes", runs[1])["environment"]["lanes"]
    assert fact == "2 in one program; memory and times are shares"
    assert "lanes" not in content(tmp_path / "lanes", late)["environment"]
    files = {path.name for path in (tmp_path / "lanes").glob("*/*")}
    assert files == {"result.json", "parameters.npz"}  # Of the run that another begins with.


def test_a_group_continues_with_equal_bits(tmp_path):
    runs, limit = [make_run(seed, steps=6) for seed in (0, 1)], Deadline()

    def report(step, losses):
        assert len(losses) == 2
        limit._at = float("-inf")  # Over when the second call ends.

    with pytest.raises(OutOfTime):
        list(lanes.carry_out(tmp_path / "b", runs, 2, limit, report=report))
    assert not list((tmp_path / "b").glob("*/result.json"))
    steps = []
    for part in "ab":
        record = [lambda *_: None, lambda step, losses: steps.append(step)][part == "b"]
        list(lanes.carry_out(tmp_path / part, runs, 2, Deadline(), report=record))
    assert steps == [6]
    for run in runs:
        one, other = (content(tmp_path / part, run) for part in "ab")
        assert one["curve"] == other["curve"] and one["scores"] == other["scores"]


def test_a_group_that_raises_leaves_others_alone(tmp_path, monkeypatch):
    runs = [make_run(0), make_run(1), make_run(0, scheme="rope")]
    finish = RunFolder.finish

    def broken(self, *arguments):
        if self.run is runs[1]:
            raise RuntimeError("no\nmemory")
        return finish(self, *arguments)

    monkeypatch.setattr(RunFolder, "finish", broken)
    show = Quiet()
    queue = Queue(tmp_path, show=show, lanes=lambda run: 2)
    queue.work(runs)
    errors = {ended.run: ended.error for ended in show.ended}
    assert errors.pop(runs[1].name).endswith("in broken: RuntimeError: no memory")
    assert errors == {runs[0].name: "", runs[2].name: ""}
    assert queue.status == 1


def test_the_number_of_lanes(monkeypatch):
    parser = argparse.ArgumentParser()
    add_arguments(parser)

    def count(*words, workers=1):
        number = number_of_lanes(parser.parse_args(words), workers, lambda run: 5)
        return number and number(None)

    assert count() is None and count("--lanes", "1") is None and count("--lanes", "3") == 3
    with pytest.raises(ConfigError, match="--lanes: must be at least 1"):
        count("--lanes", "0")
    with pytest.raises(ConfigError, match="--lanes: must be 1 with --mesh"):
        count("--lanes", "2", "--mesh", "data=8")
    with pytest.raises(ConfigError, match="--lanes: needs --workers 1"):
        count("--lanes", "2", workers=2)
    monkeypatch.setattr("jax.default_backend", lambda: "gpu")
    assert count() == 5 and count("--mesh", "data=8") is None
