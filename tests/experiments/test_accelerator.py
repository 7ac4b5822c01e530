"""The program of `make gpu` and `make tpu` on a CPU: its parts, one by one, at tiny size."""

import argparse
import json
import pathlib
import subprocess
import sys
import textwrap

import numpy as np
import pytest

import posenc_jax as pe
from experiments.bench import accelerator, accelerator_page, accelerator_schemes
from experiments.bench import accelerator_times as times
from posenc_jax.kernels.checks.runner import Runner
from posenc_jax.kernels.checks.steps import FAMILIES
from tests.support import slow

ROOT = pathlib.Path(__file__).parents[2]
STEP = {
    "implementation": "pallas",
    "family": "backward",
    "step": "backward: sinks",
    "outcome": "ok",
    "place": "",
}


def breaks():
    raise RuntimeError("out of memory")


def job(name, length, call, **figures):
    row = {"name": name, "by": "x", "what": "forward", "T": length, "flop": 1e6}
    return times.Job(row, lambda: (call, figures))


@pytest.fixture
def measured(tmp_path):
    sizes = times.Sizes(rounds=2, seconds=0.001)

    def make(seconds=60.0):
        return times.Times(tmp_path / "times.json", seconds, sizes, threads=2)

    return make


@slow
def test_programs_are_timed_in_rounds_and_counted(measured):
    run, shape = measured(), (1, 32, 2, 2, 8)
    run.measure(times.scheme_jobs("t5", "xla", shape) + times.scheme_jobs("t5", "pallas", shape))
    run.measure(times.decode_jobs(shape, ["t5"])[:2])
    bias = lambda: times.random((1, 2, 16, 16))  # noqa: E731
    run.measure(times.bias_jobs("pair", ("xla",), (1, 16, 2, 8), False, bias, lambda x: x))
    rows = json.loads(run.path.read_text())["times"]
    forward, both, *refused, jax_nn, decode, pair, _ = rows
    assert both["flop"] == 3.5 * forward["flop"] == 3.5 * 2 * 2 * 32**2 * 8
    assert both["rounds"] == 2 and both["megabytes"] > 0
    assert both["TFLOP/s"] == pytest.approx(both["flop"] / both["ms"] / 1e9)
    assert all("there are kernels for TPUs" in row["unsupported"] for row in refused)
    assert (jax_nn["by"], decode["by"], decode["bytes"]) == ("jax.nn", "default", 2 * 2 * 32 * 16)
    assert pair["flop"] == 4 * 2 * 16**2 * 8


def test_what_failed_is_left_out_at_larger_lengths_and_others_go_on(measured):
    run = measured()
    for length in (8, 16):
        run.measure([job("a", length, breaks), job("b", length, lambda: None)])
    rows = [(row["name"], row["T"], row.get("error")) for row in run.rows]
    error = "RuntimeError: out of memory"
    assert rows == [("a", 8, error), ("b", 8, None), ("b", 16, None)]


def test_nothing_is_begun_when_the_time_is_over(measured):
    run = measured(0.0)
    run.measure([job("a", 8, breaks)])
    assert [row["skipped"] for row in run.rows] == ["out of time"]


def test_a_call_without_an_answer_costs_its_group(tmp_path):
    code = f"""
        import time
        from experiments.bench import accelerator_times as times
        def job(name, length, seconds):
            row = {{"name": name, "by": "pallas", "what": "forward", "T": length, "flop": 1e6}}
            return times.Job(row, lambda: (lambda: time.sleep(seconds), {{}}))
        times.NO_ANSWER = 0.1
        jobs = [[job("none", 8, 20), job("t5", 8, 0)], [job("none", 16, 20), job("t5", 16, 0)]]
        times.groups = lambda *_: jobs
        times.main(["--json", {str(tmp_path / "times.json")!r}])
    """
    command = [sys.executable, "-c", textwrap.dedent(code)]
    for status in 1, 0:
        done = subprocess.run(command, capture_output=True, text=True, cwd=ROOT)
        assert done.returncode == status, done.stderr
        assert ("Timeout" in done.stderr) == status
    rows = json.loads((tmp_path / "times.json").read_text())["times"]
    assert [(row["name"], row["T"], row.get("error"), row.get("skipped")) for row in rows] == [
        ("none", 8, "its process ended", None),
        ("t5", 8, None, "the process ended"),
        ("t5", 16, None, None),
    ]


def test_the_kernels_of_all_schemes_come_before_other_libraries():
    groups = list(times.groups(times.Sizes(), (4096, 16384), ["none", "t5", "alibi"]))
    order = [(job.row["name"], job.row["by"], job.row["T"]) for group in groups for job in group]
    kernels = [x for x in order if x[1] == "pallas" and x[0] in ("none", "t5", "alibi")][:12]
    assert order[1:13] == kernels and {x[2] for x in kernels} == {4096, 16384}
    cases = {case for case in order if case[1].startswith("jax.nn")}
    assert ("matrix", "jax.nn", 4096) in cases and ("matrix", "jax.nn", 16384) not in cases
    assert ("rope", "pallas", 8192) in order and ("none", "default", 8192) in order


@slow
def test_a_wrong_number_of_a_scheme_is_found(monkeypatch, tmp_path):
    attend = pe.scheme_attention

    def spoilt(*arguments, implementation=None, **options):
        if implementation == "dense":
            raise RuntimeError("illegal address")
        out, cache = attend(*arguments, implementation=implementation, **options)
        return out * (1.001 if implementation == "xla" else 1.0), cache

    monkeypatch.setattr(pe, "scheme_attention", spoilt)
    cases = [("xla", "float32"), ("dense", "float32"), ("cudnn", "bfloat16"), ("decode", "float32")]
    monkeypatch.setattr(accelerator_schemes, "CASES", cases)
    assert accelerator_schemes.main([f"--log={tmp_path / 'log'}", "--schemes", "alibi"]) == 0
    rows = [json.loads(line) for line in (tmp_path / "log").read_text().splitlines()]
    assert [row["outcome"] for row in rows] == ["wrong", "error", "refused", "right"]
    assert rows[0]["error"] == pytest.approx(1e-3, rel=0.1)
    assert rows[1]["error"] == "RuntimeError: illegal address"
    assert np.isnan(
        accelerator_schemes.error([np.ones(3), np.r_[np.nan]], [np.ones(3), np.ones(1)])
    )


@pytest.mark.needs("torch")
def test_torch_has_the_biases_of_the_papers():
    import torch

    from experiments.bench import accelerator_torch as peers

    table = torch.randn(peers.HEADS, 32)
    distance = np.maximum(np.subtract.outer(np.arange(300), np.arange(300)), 0)
    far = 16 + np.floor(16 * np.log(np.maximum(distance, 1) / 16) / np.log(128 / 16) + 1e-6)
    bucket = np.where(distance < 16, distance, np.minimum(far, 31)).astype(int)
    slopes = 2.0 ** (-8 * np.arange(1, peers.HEADS + 1) / peers.HEADS)
    later = np.triu(np.full((300, 300), -np.inf), 1)
    for rule, want in (
        ("alibi", -slopes[:, None, None] * distance),
        ("t5", table.numpy()[:, bucket]),
    ):
        _, bias = peers.attention(rule, "sdpa flash", 300, table, {})
        np.testing.assert_allclose(bias(table).numpy(), want + later, rtol=1e-6)


@pytest.fixture
def run(monkeypatch, tmp_path):
    """Parts that only leave their names, and steps without processes."""
    about = {"device": "gpu: NVIDIA H100", "kernels": "for this chip", "runtime": "cuda 13000"}
    about |= dict.fromkeys(("jax", "jaxlib"), "0.11.2")
    monkeypatch.setattr(Runner, "machine", lambda self: about)
    monkeypatch.setattr(accelerator.importlib.util, "find_spec", lambda name: name)
    monkeypatch.setattr(accelerator, "usable_cores", lambda: 3)
    parts, statuses = [], []

    def children(self, name, arguments, seconds, *_, **__):
        assert (self.out / "page.md").exists()  # Of the parts before.
        parts.append((name, seconds, arguments[0]))
        (self.out / f"{name}.txt").write_text("")
        if name == "schemes":
            (self.out / "schemes_1.jsonl").write_text('{"outcome": "right"}\n{"outc')
        return [statuses.pop()] if statuses else [0]

    monkeypatch.setattr(accelerator.Run, "children", children)

    def start(steps, *more, ended=()):
        statuses.extend(ended)
        monkeypatch.setattr(Runner, "run", lambda self, platform: steps)
        tmp_path.joinpath("out").mkdir(exist_ok=True)
        return accelerator.main([f"--out={tmp_path / 'out'}", *more]), parts, tmp_path / "out"

    return start


def test_parts_run_in_order_and_share_the_time(run, capsys):
    steps = [STEP | {"family": family, "dtype": "bfloat16"} for family in FAMILIES]
    status, parts, out = run(steps, "--minutes=1")
    assert status == 0
    assert [name for name, *_ in parts] == ["train", "times", "torch", "schemes"]
    # What the steps leave is for the others.
    shares = np.cumsum([*accelerator.PARTS.values()])[1:]
    assert [seconds for _, seconds, _ in parts] == pytest.approx(60 * shares, abs=5)
    printed = capsys.readouterr().out
    assert printed == (out / "log.txt").read_text() and "schemes: {'right': 1}" in printed
    assert "posenc_jax/engine/chips.py: Chip(device_kind='NVIDIA H100', jax='0.11.2'" in printed
    assert "--parts times --minutes 3 --lengths 8192" in printed.splitlines()[-1]


def test_a_wrong_step_is_the_next_to_look_at(run, capsys):
    status, *_ = run([STEP, STEP | {"outcome": "wrong"}], "--parts", "steps")
    last = capsys.readouterr().out.splitlines()[-1]
    assert status == 1
    assert "compute-sanitizer --tool memcheck" in last and '"--only=backward: sinks"' in last


def test_what_lost_the_chip_is_not_timed(run):
    steps = [STEP | {"outcome": "hang", "place": "no end within 40 s"}]
    _, parts, _ = run(steps, "--parts", "steps", "times")
    assert parts[0][2][-2:] == ["--without", "pallas"]


def test_times_go_on_after_a_lost_process(run):
    _, parts, _ = run([STEP], "--parts", "steps", "times", ended=[0, -6])
    assert [name for name, *_ in parts] == ["times", "times"]


def test_a_part_ends_when_its_time_is_over(monkeypatch, tmp_path, capsys):
    slow = tmp_path / "slow"
    slow.write_text("#!/bin/sh\necho measured\nsleep 20\n")
    slow.chmod(0o700)
    monkeypatch.setattr(accelerator.sys, "executable", str(slow))
    run = accelerator.Run(argparse.Namespace(out=tmp_path, lengths=()))
    assert run.children("times", [[], []], 0.5) == ["ended after 0 s"] * 2
    assert capsys.readouterr().out == "times: ended after 0 s\nmeasured\nmeasured\n" * 2


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--on=tpu"], "--on tpu: JAX runs on gpu here"),
        (["--minutes=nan"], "argument --minutes: must be above 0, got nan"),
    ],
)
def test_wrong_arguments_end_with_one_line(arguments, message, run, capsys):
    status, *_ = run([], *arguments)
    err = capsys.readouterr().err
    assert status == 2 and message in err and err.count("\n") == 1


def test_the_page_has_the_tables_of_the_results():
    page = (ROOT / "docs" / "gpu.md").read_text()
    tables = [accelerator_page.tables(ROOT / "results" / folder) for folder in ("gpu", "gpu/first")]
    assert tables[0] in page
    assert {x for x in page.splitlines() if x[:1] == "|"} <= set("\n".join(tables).splitlines())


def test_it_is_imported_without_the_extras():
    code = """import sys, experiments.bench.accelerator, experiments.bench.accelerator_schemes
roots = {name.partition('.')[0] for name in sys.modules}
print(roots & {'flax', 'pydantic', 'rich', 'matplotlib', 'optax', 'torch'})"""
    run = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert run.stdout == "set()\n"
