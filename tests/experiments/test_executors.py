"""Runs in processes of this machine."""

import argparse
import contextlib
import dataclasses
import os
import signal

import pytest

from experiments.errors import ConfigError, ResultsError
from experiments.runs.experiment import Experiment
from experiments.runs.run import Run, RunFolder
from experiments.runs.run_queue import Queue, add_arguments, grouped, number_of_workers
from tests.experiments.stub_tasks import TASK, order
from tests.support import slow


class Quiet(Queue):
    """Two processes; shows nothing, and calls a function when a run has ended."""

    def __init__(self, folder, then=lambda ended: None):
        super().__init__(folder, workers=2)
        self.ended, self.then = {}, then

    def finish(self, ended):
        self.ended[ended.run] = ended
        self.then(ended)


def make_run(seed, scheme="t5", rate=1e-3):
    task = dataclasses.replace(TASK, train=dataclasses.replace(TASK.train, learning_rate=rate))
    position = Experiment(tasks={"kback": task}).scheme("kback", scheme)
    return Run(task, scheme, {}, position, seed)


def test_runs_of_one_program_are_one_group():
    t5 = [make_run(seed, rate=rate) for seed in (0, 1) for rate in (1e-3, 2e-3)]
    rope = [make_run(seed, "rope") for seed in range(3)]
    mixed = [rope[0], t5[0], rope[1], *t5[1:], rope[2], t5[0]]
    assert grouped(mixed, 1) == [rope, t5]
    assert grouped(mixed, 2) == [rope[:2], t5[:2], t5[2:], rope[2:]]
    assert sorted(map(len, grouped(mixed, 99))) == [1] * 7


def test_each_process_has_a_processor_of_its_own(tmp_path):
    queue = Quiet(tmp_path)
    queue.work([order(seed) for seed in range(4)] + [order(4, "raise")])
    scores = [queue.ended[order(seed).name].result.scores["plain"] for seed in range(4)]
    assert [each["seed"] for each in scores] == [0, 1, 2, 3]
    assert {each["others"] for each in scores} == {0}
    if len(os.sched_getaffinity(0)) > 1:
        pairs = {(each["process"], each["processor"]) for each in scores}
        assert len(pairs) == len(dict(pairs)) == len({processor for _, processor in pairs})
    assert queue.errors[order(4).name].endswith("RuntimeError: no memory") and not queue.over
    # The last run has one processor too: with all it would round differently.
    queue.work([order(5)])
    assert queue.ended[order(5).name].result.scores["plain"]["others"] == 0


def test_a_process_that_dies_loses_no_result(tmp_path):
    runs = [order(seed, "die" if seed == 3 else "") for seed in range(4)]
    with pytest.raises(ResultsError, match=r"ended \(.*; the same command continues") as caught:
        Quiet(tmp_path).work(runs)
    assert "\n" not in str(caught.value)
    known = [RunFolder(tmp_path, run).result() for run in runs]
    assert known[0] and known[3] is None


@pytest.mark.parametrize("how", ["SIGTERM", pytest.param("Ctrl-C", marks=slow)])
def test_processes_that_are_stopped_write_their_states(tmp_path, how, request):
    number = signal.SIGTERM if how == "SIGTERM" else signal.SIGINT
    # A shell that starts tests in the background has them ignore Ctrl-C.
    before = signal.signal(signal.SIGINT, signal.default_int_handler)
    request.addfinalizer(lambda: signal.signal(signal.SIGINT, before))
    runs = [order(0, "wait"), order(1), order(2, "wait"), order(3)]
    queue = Quiet(tmp_path, lambda ended: os.kill(os.getpid(), number))
    with pytest.raises(KeyboardInterrupt) if how == "Ctrl-C" else contextlib.nullcontext():
        queue.work(runs)
    assert queue.over == (how == "SIGTERM")
    assert list(queue.ended) == [order(1).name]
    files = {path.name for path in (tmp_path / order(0).name).glob("checkpoints/*")}
    assert files == {"2.npz"}


def test_the_number_of_processes(monkeypatch):
    parser = argparse.ArgumentParser()
    add_arguments(parser)

    def count(*words):
        return number_of_workers(parser.parse_args(words))

    assert count("--workers", "3") == 3 and count() >= 1
    with pytest.raises(ConfigError, match="--workers: must be at least 1"):
        count("--workers", "0")
    monkeypatch.setattr("jax.default_backend", lambda: "gpu")
    assert count() == count("--workers", "1") == 1
    with pytest.raises(ConfigError, match="--workers: processes would share one gpu"):
        count("--workers", "2")
