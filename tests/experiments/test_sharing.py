"""Processes that share a folder of results."""

import contextlib
import json
import os
import signal
import subprocess
import sys
import threading
import types
from concurrent.futures import ThreadPoolExecutor

import pytest

from experiments.__main__ import main
from experiments.errors import Locked, ResultsError
from experiments.runs import files, run_queue
from experiments.runs.files import is_locked, locked
from experiments.runs.results import write
from experiments.runs.run_queue import Queue
from tests.experiments.one_line import raises, refusal
from tests.experiments.stub_tasks import order
from tests.experiments.test_compare import SMALL
from tests.support import slow

# The process that is killed: it stops in the middle of its first run, with a state written.
_VICTIM = """
import sys, time
from experiments.__main__ import main
from experiments.runs.checkpoints import Checkpoints
save = getattr(Checkpoints.save, "before", Checkpoints.save)  # Dask may load this twice.
def stop(self, *arguments):
    self.written = -1e9
    save(self, *arguments)
    print("held", self.path.parent.name, flush=True)
    time.sleep(600)
stop.before = save
Checkpoints.save = stop
main(sys.argv[1:])
"""


def measured(folder):
    """Returns what training and evaluation determine, by name of the run."""
    known = {path.parent.name: json.loads(path.read_text()) for path in folder.glob("*/*.json")}
    return {
        name: [result[key] for key in ("scores", "places", "curve", "parameters")]
        for name, result in known.items()
    }


@pytest.fixture
def folder(tmp_path, monkeypatch):
    """A folder with an experiment of two runs, which other processes compile as this one does."""
    for name, value in (("DISABLE_MOST_OPTIMIZATIONS", "1"), ("NUM_CPU_DEVICES", "8")):
        monkeypatch.setenv(f"JAX_{name}", value)
    monkeypatch.setenv("PYTHONPATH", os.getcwd())
    monkeypatch.chdir(tmp_path)
    (tmp_path / "small.toml").write_text(SMALL)
    return tmp_path / "results"


ALONE = ["compare", "small.toml", "--name", "alone", "--workers", "1"]


@pytest.fixture
def start():
    """Starts a Python process, which ends with the test."""
    with contextlib.ExitStack() as stack:

        def process(*command):
            pipe = subprocess.PIPE
            started = subprocess.Popen([sys.executable, *command], stdout=pipe, text=True)
            stack.enter_context(started)
            stack.callback(started.kill)
            return started

        yield process


@slow
def test_a_killed_process_leaves_its_run_to_the_others(folder, start, capsys):
    assert main(ALONE) == 0
    words = ["compare", "small.toml", "--name", "shared", "--workers", "1"]
    victim, shared = start("-c", _VICTIM, *words), folder / "shared"
    killed = next(line.split()[1] for line in victim.stdout if line.startswith("held"))
    assert is_locked(shared / killed)
    assert capsys.readouterr() and main(words) == 0
    out = capsys.readouterr().out
    assert "Report" not in out
    assert f"Other processes hold 1 runs, and show the results: {killed}\n" in out
    victim.kill()
    victim.wait()
    assert [path.name for path in (shared / killed).glob("checkpoints/*")] == ["2.npz"]
    assert main(words) == 0 and (shared / "report.html").exists()
    assert measured(shared) == measured(folder / "alone") and len(measured(shared)) == 2
    assert not list(shared.rglob(".lock")) and not list(shared.rglob("checkpoints"))


def threads():
    """An executor without `cancel_futures`, as that of dask."""
    pool = ThreadPoolExecutor(2)
    return types.SimpleNamespace(submit=pool.submit, shutdown=lambda wait: pool.shutdown(wait))


def test_runs_of_another_executor(folder, capsys):
    """Threads stand for the processes of a cluster: the bits are those of one process."""
    words = ["compare", "small.toml", "--name", "other", "--executor"]
    assert main(ALONE) == 0 and main([*words, f"{__name__}:threads"]) == 0
    assert measured(folder / "other") == measured(folder / "alone")
    assert "[2/2]" in capsys.readouterr().out
    for name, message in (
        ("nowhere:make", "nowhere:make: ModuleNotFoundError: No module named 'nowhere'"),
        ("experiments:make", "AttributeError: module 'experiments' has no attribute 'make'"),
        ("builtins:dict", "builtins:dict returns no Executor, but {}"),
    ):
        assert message in refusal(capsys, *words, name)


def test_sigterm_leaves_other_executors_alone(tmp_path, capsys):
    executor = ThreadPoolExecutor(1)
    queue = Queue(tmp_path, executor=executor)
    queue.finish = lambda ended: os.kill(os.getpid(), signal.SIGTERM)
    queue.work([order(0), order(1, "wait"), order(2)])
    assert queue.over and "Time is over with 2 runs left" in capsys.readouterr().out
    executor.shutdown()
    assert (tmp_path / order(0).name / "result.json").exists()
    assert not (tmp_path / order(2).name).exists()


_DASK = """
from distributed import Client
def executor():
    return Client(scheduler_file="scheduler.json", set_as_default=False).get_executor(pure=False)
"""


@slow
@pytest.mark.needs("distributed")
def test_a_worker_of_dask_that_dies(folder, start, tmp_path, monkeypatch):
    assert main(ALONE) == 0
    (tmp_path / "of_dask.py").write_text(_DASK)
    (tmp_path / "victim.py").write_text(_VICTIM.replace("main(sys.argv[1:])", ""))
    monkeypatch.setenv("PYTHONPATH", f"{os.getcwd()}:{os.environ['PYTHONPATH']}")
    file, one = ("--scheduler-file", "scheduler.json"), ("--no-nanny", "--nthreads", "1")
    dask = ("-m", "dask")
    words = ["compare", "small.toml", "--name", "dask", "--executor", "of_dask:executor"]
    start(*dask, "scheduler", "--port", "0", "--no-dashboard", *file)
    victim = start(*dask, "worker", *file, *one, "--preload", "victim.py")
    queue = start("-m", "experiments", *words)
    killed = next(line.split()[1] for line in victim.stdout if line.startswith("held"))
    start(*dask, "worker", *file, *one)
    assert is_locked(folder / "dask" / killed)
    victim.kill()
    out = queue.communicate()[0]
    assert queue.returncode == 0 and "[2/2]" in out and "Report" in out
    assert measured(folder / "dask") == measured(folder / "alone")


def test_a_queue_waits_where_later_runs_depend_on_it(tmp_path, monkeypatch, capsys):
    runs = [order(seed) for seed in range(3)]
    released = threading.Event()

    def hold():
        with locked(tmp_path / runs[1].name):
            began.set()
            released.wait()
            result = runs[1].ended("done", scores={"plain": {"32": 1.0}})
            write(tmp_path, runs[1].name, result)

    began = threading.Event()
    other = threading.Thread(target=hold, daemon=True)
    other.start()
    began.wait()
    queue = Queue(tmp_path, wait=False)
    queue.work(runs)
    assert queue.held == {runs[1].name} and not queue.over
    queue = Queue(tmp_path, wait=True)
    monkeypatch.setattr(run_queue, "_POLL", 0.01)
    say = run_queue.say
    monkeypatch.setattr(run_queue, "say", lambda line: say(line) or released.set())
    queue.work(runs[1:2])
    other.join()
    assert not queue.held and not queue.over
    assert "Waiting for 1 runs of other processes.\n[1/1]" in capsys.readouterr().out
    assert runs[1].result(tmp_path).scores == {"plain": {"32": 1.0}}


def test_time_ends_a_queue_that_waits(tmp_path, monkeypatch, capsys):
    monkeypatch.setattr(run_queue, "_POLL", 0.01)
    with locked(tmp_path / order(0).name):
        queue = Queue(tmp_path, minutes=0.005, wait=True)
        queue.work([order(0)])
    assert queue.over and "Time is over with 1 runs left" in capsys.readouterr().out


def test_a_lock_that_its_holder_removes_is_taken_again(tmp_path, monkeypatch):
    """Between opening a file and locking it, the file is removed."""
    flock, holders = files.fcntl.flock, []

    def late(descriptor, how):
        if not holders:
            holders.append((tmp_path / "run" / ".lock").unlink())
        flock(descriptor, how)

    monkeypatch.setattr(files.fcntl, "flock", late)
    with locked(tmp_path / "run"):
        assert holders and (tmp_path / "run" / ".lock").exists()
        with pytest.raises(Locked, match="another process works in this folder"):
            locked(tmp_path / "run").__enter__()
        assert is_locked(tmp_path / "run")
    assert not is_locked(tmp_path / "run") and not list((tmp_path / "run").iterdir())


def test_file_systems_without_locks(tmp_path, monkeypatch):
    def unsupported(descriptor, how):
        raise OSError(files.errno.ENOSYS, "Function not implemented")

    monkeypatch.setattr(files.fcntl, "flock", unsupported)
    with raises(ResultsError, "run: its file system has no locks (flock), which"):
        locked(tmp_path / "run").__enter__()
