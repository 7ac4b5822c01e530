"""One model over several devices, in one process and in two."""

import dataclasses
import functools
import json
import os
import subprocess
import sys

import jax
import numpy as np
import pytest

from experiments.__main__ import main
from experiments.errors import ConfigError
from experiments.runs import hosts
from experiments.runs.checkpoints import Checkpoints
from experiments.runs.experiment import Experiment
from experiments.settings.common import Train
from experiments.training.layout import layout_of
from experiments.training.train import train
from tests.experiments.one_line import raises, refusal
from tests.experiments.stub_tasks import TASK
from tests.experiments.test_compare import SMALL
from tests.support import slow, slow_but

FLAGS = ["compare", "small.toml", "--schemes", "fox", "--kback.train.batch", "8"]


@pytest.fixture
def folder(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "small.toml").write_text(SMALL)
    return tmp_path / "results"


def result(folder):
    (path,) = folder.glob("*/result.json")
    return json.loads(path.read_text())


def close(a, b):
    """Losses and scores are those of one device, within rounding."""
    np.testing.assert_allclose(a["curve"]["loss"], b["curve"]["loss"], atol=2e-5)
    assert a["scores"] == b["scores"] and a["parameters"] == b["parameters"]


@functools.cache
def trained(layout=None):
    task = dataclasses.replace(TASK, train=Train(steps=4, steps_per_call=2, warmup=1, batch=8))
    scheme = Experiment(tasks={"kback": task}).scheme("kback", "fox")
    return train(task, scheme, 0, None, layout=layout)


@pytest.mark.parametrize("shards_parameters", slow_but([False, True], False))
def test_losses_of_eight_devices_are_those_of_one(shards_parameters):
    layout, alone = layout_of(8, shards_parameters), trained()
    parts = trained(layout)
    np.testing.assert_allclose(parts.curve["loss"], alone.curve["loss"], atol=2e-5)
    for a, b in zip(jax.tree.leaves(parts.params), jax.tree.leaves(alone.params), strict=True):
        np.testing.assert_allclose(a, b, atol=1e-5)
    assert parts.memory < alone.memory / 2  # Activations of one row, not of eight.
    specs = {str(each.spec) for each in jax.tree.leaves(layout.of_state(alone.params))}
    sharded = {"P('data',)", "P(None, 'data')", "P('data', None)"}
    assert specs & sharded if shards_parameters else specs == {"P()"}


@slow
def test_a_run_on_devices_continues(folder, monkeypatch):
    """The state is written, and read again, as that of one device."""
    monkeypatch.setattr(hosts, "join", lambda: None)  # JAX has opened devices here.
    assert main([*FLAGS, "--name", "alone", "--workers", "1"]) == 0
    words = [*FLAGS, "--name", "mesh", "--devices", "8", "--shard-parameters"]

    def stop(self, *arguments):
        self.deadline.asked = True
        save(self, *arguments)

    with monkeypatch.context() as patch:
        save = Checkpoints.save
        patch.setattr(Checkpoints, "save", stop)
        assert main(words) == 3
    assert [path.name for path in (folder / "mesh").glob("*/checkpoints/*")] == ["2.npz"]
    assert main(words) == 0
    close(result(folder / "mesh"), result(folder / "alone"))
    assert result(folder / "mesh")["environment"]["devices"] == 8
    assert "devices" not in result(folder / "alone")["environment"]


def test_refusals(folder, monkeypatch, capsys):
    monkeypatch.setattr(hosts, "join", lambda: None)
    words = ["compare", "small.toml", "--name", "refused"]
    for more, message in (
        (["--devices", "0"], "--devices: must be from 1 to 8 here, got 0"),
        (["--devices", "9"], "--devices: must be from 1 to 8 here, got 9; XLA_FLAGS="),
        (["--devices", "2", "--workers", "2"], "--workers: and --devices exclude each other"),
        (["--shard-parameters"], "--shard-parameters: needs --devices"),
    ):
        assert refusal(capsys, *words, *more).startswith(f"config error: {message}")
    monkeypatch.undo()
    with raises(ConfigError, "--devices: jax.distributed.initialize() must be called"):
        hosts.join()
    monkeypatch.setattr(jax, "process_count", lambda: 2)
    with raises(ConfigError, "must be 8, those of all processes, got 4"):
        layout_of(4)


@slow
def test_two_processes_train_one_model(folder, monkeypatch):
    """They find each other as tasks of Slurm do; the first alone writes."""
    monkeypatch.setattr(hosts, "join", lambda: None)
    assert main([*FLAGS, "--name", "alone", "--workers", "1"]) == 0
    task = {
        "SLURM_JOB_ID": str(os.getpid()),  # It decides the port.
        "SLURM_STEP_NODELIST": "localhost",
        "SLURM_NTASKS": "2",
        "SLURM_STEP_TASKS_PER_NODE": "2",
        "PYTHONPATH": os.path.dirname(os.path.dirname(hosts.__file__.rpartition("/")[0])),
        "JAX_NUM_CPU_DEVICES": "2",
        "JAX_DISABLE_MOST_OPTIMIZATIONS": "1",
    }
    words = [*FLAGS, "--name", "two", "--devices", "4", "--shard-parameters"]

    def start(i):
        numbers = {"SLURM_PROCID": str(i), "SLURM_LOCALID": str(i)}
        command = [sys.executable, "-m", "experiments", *words]
        pipes = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE, "text": True}
        return subprocess.Popen(command, **pipes, env=os.environ | task | numbers)

    started = [start(0), start(1)]
    first, second = [process.communicate(timeout=300) for process in started]
    assert [process.returncode for process in started] == [0, 0], first[1][-2000:]
    assert "[1/1] kback-fox" in first[0] and "Report" in first[0]
    assert "kback" not in second[0] and "Report" not in second[0]
    close(result(folder / "two"), result(folder / "alone"))
