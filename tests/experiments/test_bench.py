"""Benchmarks run in small, print ratios, and write what they printed."""

import json
import subprocess
import sys

import jax.numpy as jnp
import pytest

from experiments import bench
from experiments.bench import rope
from experiments.bench.clock import side_by_side
from experiments.bench.machine import WARM_HEAP


def test_the_first_case_is_the_reference():
    a, b = side_by_side({"a": lambda: jnp.zeros(3), "b": lambda: jnp.ones(3)}, rounds=3, seconds=0)
    assert (a.name, a.ratio, a.median_ratio, a.rounds) == ("a", 1.0, 1.0, 3)
    assert b.ratio == b.least / a.least


def test_rope_in_small(tmp_path, monkeypatch, capsys):
    monkeypatch.setattr(rope, "SHAPES", ((1, 8, 2, 4),))
    monkeypatch.setattr(rope, "TABLE", (64, 8))
    path = tmp_path / "rope.json"
    arguments = ["rope", "--cold-heap", "--rounds=2", "--seconds=0", f"--json={path}"]
    assert bench.main(arguments) == 0
    out, written = capsys.readouterr().out, json.loads(path.read_text())
    assert "heap: as the system has it" in out and "x + 1, y + 1" in out
    assert [r["what"] for r in written["results"]] == ["forward", "forward+backward"] * 2 + [
        "table"
    ]
    errors = written["results"][-1]["errors"]
    assert errors["posenc_jax.cos_sin"] < 2e-7 < 1e-3 < errors["jnp.cos and jnp.sin"]


def test_the_heap_is_kept_by_default():
    code = (
        "import os, sys; from experiments.bench.machine import use_warm_heap; "
        "os.execve = lambda path, command, env: print(*command[1:], env['GLIBC_TUNABLES']); "
        "use_warm_heap(['rope', '--rounds=2'])"
    )
    run = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    if run.stdout:  # glibc
        command, _, tunables = run.stdout.strip().rpartition(" ")
        assert command == "-m experiments.bench rope --rounds=2"
        assert tunables.count(":") == len(WARM_HEAP) - 1


@pytest.mark.parametrize("arguments", [[], ["roep"], ["rope", "--rounds=many"]])
def test_bad_arguments_end_with_status_two(arguments, capsys):
    with pytest.raises(SystemExit) as stop:
        bench.main(arguments)
    assert stop.value.code == 2
    assert "usage: python -m experiments bench" in capsys.readouterr().err
