"""Processes that share a folder of results."""

import json
import os
import signal
import subprocess
import sys
import threading

import pytest

from experiments.__main__ import main
from experiments.errors import Locked, ResultsError
from experiments.runs import files, run_queue
from experiments.runs.files import is_locked, locked
from experiments.runs.run import RunFolder
from experiments.runs.run_queue import Queue
from tests.experiments.stub_tasks import order
from tests.experiments.test_compare import SMALL

# The process that is killed: it stops in the middle of its first run, with a state written.
_VICTIM = """
import sys, time
from experiments.__main__ import main
from experiments.runs.checkpoints import Checkpoints
save = Checkpoints.save
def stop(self, state, curve, times):
    self.written = -1e9
    save(self, state, curve, times)
    print(self.path.parent.name, flush=True)
    time.sleep(600)
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


def test_a_killed_process_leaves_its_run_to_the_others(tmp_path, monkeypatch, capsys):
    for name, value in (("DISABLE_MOST_OPTIMIZATIONS", "1"), ("NUM_CPU_DEVICES", "8")):
        monkeypatch.setenv(f"JAX_{name}", value)  # As here: they use the programs of this process.
    monkeypatch.setenv("PYTHONPATH", os.getcwd())
    monkeypatch.chdir(tmp_path)
    (tmp_path / "small.toml").write_text(SMALL)
    words = ["compare", "small.toml", "--workers", "1"]
    assert main([*words, "--name", "alone"]) == 0
    words += ["--name", "shared"]

    def start(*command):
        pipe = subprocess.PIPE
        return subprocess.Popen([sys.executable, *command, *words], stdout=pipe, text=True)

    with start("-c", _VICTIM) as victim, start("-m", "experiments") as other:
        killed = next(line.strip() for line in victim.stdout if line.startswith("kback-none-s"))
        folder = tmp_path / "results" / "shared"
        assert is_locked(folder / killed)
        out = other.communicate()[0]
        assert other.returncode == 0 and "Report" not in out
        assert f"Other processes hold 1 runs, and show the results: {killed}\n" in out
        victim.send_signal(signal.SIGKILL)
    assert [path.name for path in (folder / killed).glob("checkpoints/*")] == ["2.npz"]
    assert main(words) == 0 and (folder / "report.html").exists()
    assert measured(folder) == measured(tmp_path / "results" / "alone")
    assert len(measured(folder)) == 2
    assert not list(folder.rglob(".lock")) and not list(folder.rglob("checkpoints"))


def test_a_queue_waits_where_later_runs_depend_on_it(tmp_path, monkeypatch, capsys):
    runs = [order(seed) for seed in range(3)]
    released = threading.Event()

    def hold():
        with locked(tmp_path / runs[1].name):
            began.set()
            released.wait()
            RunFolder(tmp_path, runs[1])._write("done", scores={"plain": {"32": 1.0}})

    began = threading.Event()
    other = threading.Thread(target=hold)
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
    assert RunFolder(tmp_path, runs[1]).result().scores == {"plain": {"32": 1.0}}


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
    with pytest.raises(ResultsError, match=r"run: its file system has no locks \(flock\), which"):
        locked(tmp_path / "run").__enter__()
