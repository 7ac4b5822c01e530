"""Processes that carry out units of work side by side."""

import argparse
import signal
import types

import pytest

from experiments.errors import ConfigError, ResultsError
from experiments.runs.run_queue import Ended, Queue, add_arguments, number_of_workers
from experiments.runs.workers import Workers
from tests import obedient


def answers(pool, *units, kind=None, go_on=lambda: True):
    return list(pool.answers(units, kind or (lambda unit: unit % 2), go_on))


def test_units_are_shared_and_errors_come_back():
    with Workers(2, obedient.prepare, 10) as pool:
        received = answers(pool, *range(8))
        assert sorted(number for number, _ in received) == list(range(10, 18))
        assert len({process for _, process in received}) == 2
        assert answers(pool, 1, 2, go_on=lambda: False) == []
        with pytest.raises(ResultsError, match="no"):
            answers(pool, "raise", kind=str)
    with (
        Workers(1, obedient.prepare, 0) as pool,
        pytest.raises(ResultsError, match="ended with status -9"),
    ):
        answers(pool, "die", kind=str)
    with Workers(1, obedient.prepare, 0) as pool:
        asked = pool.answers(["wait"], str, lambda: True)
        before = signal.signal(signal.SIGALRM, lambda *_: pool.stop())
        signal.setitimer(signal.ITIMER_REAL, 2.0)  # By then it waits; if not, it stops at once.
        assert list(asked) == ["stopped"]
        signal.signal(signal.SIGALRM, before)


def test_the_last_run_has_a_processor_of_its_own_as_those_before(monkeypatch, tmp_path):
    """With all processors it would round differently."""
    counts = []

    class Pool:
        def __init__(self, count, *_):
            counts.append(count)

        def __enter__(self):
            return self

        def __exit__(self, *_):
            pass

        stop = None

        def answers(self, units, *_):
            return [Ended(run.name, object(), "", 0.0) for (run,) in units]

    monkeypatch.setattr("experiments.runs.run_queue.Workers", Pool)
    show = types.SimpleNamespace(start=lambda runs: None, finish=lambda ended: None)
    runs = [types.SimpleNamespace(name=f"run {i}") for i in range(3)]
    for run in runs:
        run.root = run
    Queue(tmp_path, workers=2, show=show).work(runs)
    Queue(tmp_path, workers=2, show=show).work(runs[:1])
    assert counts == [2, 1]


def test_the_number_of_processes(monkeypatch):
    parser = argparse.ArgumentParser()
    add_arguments(parser)

    def count(*words):
        return number_of_workers(parser.parse_args(words))

    assert count("--workers", "3") == 3 and count() >= 1
    assert count("--mesh", "data=8") == 1
    with pytest.raises(ConfigError, match="--workers: must be 1 with --mesh"):
        count("--mesh", "data=8", "--workers", "2")
    with pytest.raises(ConfigError, match="--workers: must be at least 1"):
        count("--workers", "0")
    monkeypatch.setattr("jax.default_backend", lambda: "gpu")
    assert count() == count("--workers", "1") == 1
    with pytest.raises(ConfigError, match="--workers: processes would share one gpu"):
        count("--workers", "2")
