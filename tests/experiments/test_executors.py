"""Runs in processes of this machine."""

import argparse
import contextlib
import os
import signal
import subprocess
import sys
import time

import jax
import pytest

from experiments.errors import ConfigError, ResultsError
from experiments.runs import accelerators, environment, run_queue
from experiments.runs.accelerators import Devices, variables
from experiments.runs.executors import processes
from experiments.runs.run_queue import (
    Queue,
    add_arguments,
    carry_out,
    number_of_workers,
)
from tests.experiments.one_line import raises
from tests.experiments.stub_tasks import order
from tests.support import slow


class Quiet(Queue):
    """Two processes; shows nothing, and calls a function when a run has ended."""

    def __init__(self, folder, then=lambda ended: None):
        super().__init__(folder, workers=2)
        self.ended, self.then = {}, then

    def finish(self, ended):
        self.ended[ended.run] = ended
        self.then(ended)


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


@slow
def test_a_process_that_dies_loses_no_result(tmp_path):
    first = tmp_path / order(0).name / "result.json"
    runs = [order(seed, f"die after {first}" if seed == 3 else "") for seed in range(4)]
    with raises(ResultsError, "; the same command continues"):
        Quiet(tmp_path).work(runs)
    known = [run.result(tmp_path) for run in runs]
    assert known[0] and known[3] is None
    (queue := Quiet(tmp_path)).work([order(5)])  # With all processors it would round differently.
    assert queue.ended[order(5).name].result.scores["plain"]["others"] == 0


@slow
@pytest.mark.parametrize("how", ["SIGTERM", "Ctrl-C"])
def test_processes_that_are_stopped_write_their_states(tmp_path, how, request):
    number = signal.SIGTERM if how == "SIGTERM" else signal.SIGINT
    # A shell that starts tests in the background has them ignore Ctrl-C.
    before = signal.signal(signal.SIGINT, signal.default_int_handler)
    request.addfinalizer(lambda: signal.signal(signal.SIGINT, before))
    runs = [order(0, "wait"), order(1), order(2, "wait"), order(3)]

    def stop(ended):
        while not order(0, "wait").states(tmp_path).exists():
            time.sleep(0.01)
        os.kill(os.getpid(), number)

    queue = Quiet(tmp_path, stop)
    with pytest.raises(KeyboardInterrupt) if how == "Ctrl-C" else contextlib.nullcontext():
        queue.work(runs)
    assert queue.over == (how == "SIGTERM")
    assert list(queue.ended) == [order(1).name]
    files = {path.name for path in (tmp_path / order(0).name).glob("checkpoints/*")}
    assert files == {"2.npz"}


def test_processes_end_with_the_one_that_started_them():
    """Its output ends when both have ended."""
    code = """import os
from experiments.runs.executors import processes
pool = processes(1)
pool.submit(os.getpid).result()
os.kill(os.getpid(), 9)"""
    command = [sys.executable, "-c", code]
    assert subprocess.run(command, stdout=subprocess.PIPE, timeout=60).returncode == -9


def options_of(*words):
    parser = argparse.ArgumentParser()
    add_arguments(parser)
    return parser.parse_args(words)


def test_the_number_of_processes(monkeypatch):
    def count(*words):
        return number_of_workers(options_of(*words))

    assert count("--workers", "3") == 3 and count() == len(os.sched_getaffinity(0))
    with pytest.raises(ConfigError, match="--workers: must be at least 1"):
        count("--workers", "0")
    assert count("--executor", "any:thing") == 1
    with pytest.raises(ConfigError, match="--workers: and --executor exclude each other"):
        count("--executor", "any:thing", "--workers", "2")
    monkeypatch.setattr(run_queue, "look", lambda: Devices("gpu", "H100", 8))
    assert count() == count("--workers", "8") == 8 and count("--workers", "1") == 1
    with pytest.raises(ConfigError, match="must be at most 8, one for each gpu, got 9"):
        count("--workers", "9")


def test_variables_of_devices():
    gpu, tpu = Devices("gpu", "H100", 4), Devices("tpu", "TPU v5 lite", 4)

    def numbers(devices, **here):
        (name, *_) = (variables(devices, here) or [{"CUDA_VISIBLE_DEVICES": ""}])[0]
        return [each[name] for each in variables(devices, here)]

    assert numbers(Devices("cpu", "cpu", 1)) == []
    assert numbers(gpu) == ["0", "1", "2", "3"]
    # The names of the user's own variable, such as those of parts of a GPU.
    assert numbers(gpu, CUDA_VISIBLE_DEVICES="7,5,GPU-8a, MIG-1") == ["7", "5", "GPU-8a", "MIG-1"]
    assert numbers(gpu._replace(count=1), CUDA_VISIBLE_DEVICES="6") == ["6"]
    # Tasks of `srun` that see the same GPUs divide them; others have them to themselves.
    of_task = {"SLURM_LOCALID": "1", "SLURM_NODEID": "2"}
    for tasks, devices in (
        ("2(x3)", ["1", "3"]),
        ("4(x2),4", ["1"]),
        ("1(x3)", ["0", "1", "2", "3"]),
        ("4(x2),1", ["0", "1", "2", "3"]),
    ):
        assert numbers(gpu, **of_task, SLURM_STEP_TASKS_PER_NODE=tasks) == devices
    bound = gpu._replace(count=1)  # By --gpus-per-task.
    alone = of_task | {"SLURM_STEP_TASKS_PER_NODE": "4(x3)", "CUDA_VISIBLE_DEVICES": "3"}
    assert numbers(bound, **alone) == ["3"]
    assert variables(tpu, {})[2] == {
        "TPU_VISIBLE_CHIPS": "2",
        "TPU_CHIPS_PER_PROCESS_BOUNDS": "1,1,1",
        "TPU_PROCESS_BOUNDS": "1,1,1",
        "ALLOW_MULTIPLE_LIBTPU_LOAD": "1",
    }


def test_devices_are_looked_at_from_another_process(monkeypatch):
    monkeypatch.setattr(accelerators.importlib.metadata, "entry_points", lambda group: ["a plugin"])
    monkeypatch.setenv("JAX_PLATFORMS", "")
    look = accelerators.look.__wrapped__
    monkeypatch.setattr(accelerators, "_LOOK", "print('noise\\ngpu\\nNVIDIA H100\\n2')")
    assert look() == ("gpu", "NVIDIA H100", 2)
    monkeypatch.setattr(accelerators, "_LOOK", "raise RuntimeError('no driver')")
    with pytest.raises(ConfigError, match="devices of this machine: RuntimeError: no driver"):
        look()
    monkeypatch.setattr(accelerators.importlib.metadata, "entry_points", lambda group: [])
    monkeypatch.setenv("JAX_PLATFORMS", "cuda")
    with pytest.raises(ConfigError, match=r"\(JAX_PLATFORMS='cuda'\): RuntimeError: no driver"):
        look()
    monkeypatch.setenv("JAX_PLATFORMS", "cpu")
    assert look() == ("cpu", "cpu", 1)


def test_each_process_has_a_device_of_its_own(tmp_path, monkeypatch):
    """The variable is set before the process imports JAX, and the command itself stays off it."""
    seen = "os.environ['CUDA_VISIBLE_DEVICES'], 'jax' in sys.modules"
    code = f"(lambda os, sys: ({seen}))(*map(__import__, ('os', 'sys')))"
    with processes(1, environments=[{"CUDA_VISIBLE_DEVICES": "7"}]) as pool:
        assert pool.submit(eval, code).result() == ("7", False)
    monkeypatch.setattr(run_queue, "look", lambda: Devices("gpu", "H100", 2))
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "3,5")
    monkeypatch.setattr(environment, "_others", [])
    platforms = jax.config.jax_platforms
    try:
        runs = [order(seed) for seed in range(4)]
        assert carry_out(options_of("--workers", "2"), tmp_path, [runs]) == (0, False)
        assert jax.config.jax_platforms == "cpu"
        assert environment.environment()["device"] == "gpu: H100"
    finally:
        jax.config.update("jax_platforms", platforms)
    scores = [run.result(tmp_path).scores["plain"] for run in runs]
    pairs = {(each["process"], each["device"]) for each in scores}
    assert {device for _, device in pairs} <= {3, 5} and len(pairs) == len(dict(pairs))
    assert os.environ["CUDA_VISIBLE_DEVICES"] == "3,5"
    assert carry_out(options_of("--workers", "1"), tmp_path, [runs]) == (0, False)
    assert os.environ["CUDA_VISIBLE_DEVICES"] == "3"
