"""The program of `make gpu` and `make tpu` at tiny size, on the CPU."""

import json
import os
import subprocess
import sys
import threading
from xml.etree import ElementTree

import jax.numpy as jnp
import pytest

from experiments.bench import accelerator, anchors
from experiments.bench.accelerator_peers import Case, peers
from posenc_jax.prove import contact
from posenc_jax.prove.__main__ import machine

TINY = ["--batch=1", "--heads=2", "--head-dim=8", "--slots=16", "--rounds=2", "--inner-ms=1"]
TINY += ["--threads=2", "--pair-batch=1", "--pair-length=32"]
BY = "default", "jax.nn"
STEPS = [
    {
        "implementation": "pallas",
        "family": "forward",
        "step": f"forward: {name}",
        "outcome": outcome,
    }
    for name, outcome in (("window", "ok"), ("softcap", "wrong"), ("sinks", "died"))
]
STEPS[1] |= {"place": "output: batch 0, head 1, tile row 2", "second run": "ok"}


def breaks(q, k, v, params):
    raise RuntimeError("out of memory")


def some_peers(length, heads, table, platform):
    found = peers(length, heads, table, platform)
    matrix = [case for case in found if (case.name, case.by) == ("matrix", "einsum")]
    return [*matrix, Case("none", "a library", breaks, {})]


@pytest.fixture
def right_steps(monkeypatch):
    """The processes of the steps have tests of their own."""
    monkeypatch.setattr(contact.Contact, "machine", lambda self: machine())
    monkeypatch.setattr(contact.Contact, "run", lambda self, platform: STEPS[:1])


@pytest.fixture
def few_programs(monkeypatch, right_steps):
    few = {name: accelerator.IMPLEMENTATIONS[name] for name in ("reference", "xla", "pallas")}
    monkeypatch.setattr(accelerator, "IMPLEMENTATIONS", few)
    monkeypatch.setattr(accelerator, "peers", some_peers)


def test_the_whole_program_at_tiny_size(few_programs, tmp_path, capsys):
    file, drawn = tmp_path / "out" / "cpu.json", tmp_path / "cpu.svg"
    arguments = [*TINY, "--lengths=64", "--schemes", "none", "t5", f"--json={file}"]
    assert accelerator.main([*arguments, f"--plot={drawn}"]) == 0
    numbers = json.loads(file.read_text())
    assert numbers["machine"]["device"] == "cpu: cpu" and numbers["peak TFLOP/s"] > 0

    assert numbers["steps"] == STEPS[:1]

    times = {(row["name"], row["by"], row["what"]): row for row in numbers["times"]}
    backward = times["t5", "xla", "forward+backward"]
    assert (
        backward["flop"] == 3.5 * times["t5", "xla", "forward"]["flop"] == 3.5 * 2 * 2 * 64**2 * 8
    )
    assert backward["rounds"] == 2 and backward["megabytes"] > 0
    none = times["none", "xla", "forward+backward"]
    assert backward["/none"] == pytest.approx(backward["ms"] / none["ms"])
    assert times["matrix", "einsum", "forward+backward"]["TFLOP/s"] > 0
    assert times["none", "a library", "forward"]["error"] == "RuntimeError: out of memory"
    assert {times[name, by, "decode"]["bytes"] for name in ("none", "t5") for by in BY} == {1024}
    assert "platform is cpu" in times["t5", "pallas", "decode"]["unsupported"]

    assert times["pair", "xla", "forward"]["flop"] == 4 * 4 * 32**2 * 32
    assert "platform is cpu" in times["pair", "pallas", "forward"]["unsupported"]
    out = capsys.readouterr().out
    assert "pallas  forward      1 ok" in out and f"send {file}, {file}l" in out
    written = map(json.loads, file.with_suffix(".jsonl").read_text().splitlines())
    assert "t5 xla forward+backward 64" in {row["running"] for row in written}
    again = tmp_path / "again.svg"
    assert accelerator.main([f"--replot={file}", f"--plot={again}"]) == 0
    assert again.read_text() == drawn.read_text()
    assert "einsum, matrix" in "".join(ElementTree.parse(drawn).getroot().itertext())


def test_what_failed_is_not_tried_at_a_larger_length(few_programs):
    report = accelerator.Report(None, minutes=1)
    options = accelerator._parser().parse_args([*TINY, "--heads=1"])
    for length in (8, 16):
        accelerator.measure(report, options, [], length, report.until(0.5))
    failed = [(row["what"], row["T"]) for row in report.numbers["times"] if "error" in row]
    assert failed == [("forward", 8), ("forward+backward", 8)]
    timed = [row for row in report.numbers["times"] if "ms" in row]
    assert [row["T"] for row in timed] == [8, 8, 16, 16]
    assert timed[2]["expected ms"] == pytest.approx(4 * timed[0]["ms"])


def test_a_call_that_would_end_too_late_is_not_begun():
    report = accelerator.Report(None, minutes=1)
    options = accelerator._parser().parse_args(TINY)
    row = {"name": "t5", "by": "xla", "what": "decode", "T": 1, "bytes": 8, "expected ms": 40e3}
    accelerator.time_rounds(report, [(row, lambda: breaks)], options, report.until(0.9))
    assert row["skipped"] == "out of time"


def test_a_failure_of_a_call_is_kept_beside_the_other_times():
    report = accelerator.Report(None, minutes=1)
    options = accelerator._parser().parse_args(TINY)
    rows = [{"name": name, "by": "x", "what": "decode", "T": 1, "bytes": 8} for name in "ab"]
    calls = [lambda: breaks(*"qkvp"), lambda: jnp.zeros(2)]
    running = [(row, lambda call=call: call) for row, call in zip(rows, calls, strict=True)]
    accelerator.time_rounds(report, running, options, report.until(0.9))
    assert rows[0]["error"] == "RuntimeError: out of memory" and "ms" not in rows[0]
    assert rows[1]["ms"] > 0 and rows[1]["rounds"] == 2


def test_a_call_without_an_answer_ends_the_measurements(monkeypatch, tmp_path, capsys):
    monkeypatch.setattr(accelerator, "NO_ANSWER", 0.05)
    stopped = threading.Event()
    monkeypatch.setattr(os, "_exit", lambda status: stopped.set())
    report = accelerator.Report(tmp_path / "cpu.json", minutes=1)
    report.numbers["machine"] = machine()
    options = accelerator._parser().parse_args([*TINY, "--rounds=1"])
    rows = [{"name": n, "by": "x", "what": "decode", "T": 1, "bytes": 8} for n in ("ends", "waits")]
    calls = [lambda: jnp.zeros(2), lambda: stopped.wait(10)]
    running = [(row, lambda call=call: call) for row, call in zip(rows, calls, strict=True)]
    accelerator.time_rounds(report, running, options, report.until(0.9))
    (waits,) = json.loads((tmp_path / "cpu.json").read_text())["times"]
    assert waits["name"] == "waits" and waits["error"] == "no answer in 0.05 s"
    assert "waits" in (tmp_path / "cpu.jsonl").read_text().splitlines()[-1]
    out = capsys.readouterr().out
    assert "Other programs are not timed." in out and "To report a failure, send" in out


def test_failed_steps_are_in_the_file_and_what_ended_is_not_timed(monkeypatch, tmp_path, capsys):
    monkeypatch.setattr(contact.Contact, "machine", lambda self: machine())
    monkeypatch.setattr(contact.Contact, "run", lambda self, platform: STEPS)
    cases = []

    def stop(report, options, chosen, *rest):
        cases.extend(chosen)
        raise KeyboardInterrupt

    monkeypatch.setattr(accelerator, "measure", stop)
    file = tmp_path / "cpu.json"
    assert accelerator.main([*TINY, "--schemes", "none", f"--json={file}"]) == 130
    numbers = json.loads(file.read_text())
    assert numbers["steps"] == STEPS and numbers["times"][0]["name"] == "matmul"
    assert {case.by for case in cases} == {*accelerator.IMPLEMENTATIONS} - {"pallas"}
    assert "pallas is not timed" in capsys.readouterr().out


def test_nothing_is_begun_when_the_time_is_over(right_steps, tmp_path, capsys):
    file = tmp_path / "cpu.json"
    arguments = [*TINY, "--minutes=0", "--lengths=64", "--schemes", "none", "shaw_keys"]
    assert accelerator.main([*arguments, f"--json={file}"]) == 0
    numbers = json.loads(file.read_text())
    assert all(row["skipped"] == "out of time" for row in numbers["times"])
    assert "s in all" in capsys.readouterr().out


def test_every_scheme_by_default_has_the_sizes_of_the_options():
    options = accelerator._parser().parse_args(TINY)
    schemes = {accelerator._scheme(name, options) for name in accelerator.SCHEMES}
    assert len(schemes) == len(accelerator.SCHEMES) == 15


def test_rates_of_others_and_the_goals():
    """Of 595 and 645 TFLOP/s that cuDNN has, and of 408 to 452 in tokamax's backward pass."""
    rates = {(a.by, a.name, a.what, a.length): round(a.rate) for a in anchors.ANCHORS}
    cudnn = [rates["cuDNN by jax.nn", "none", "forward", n] for n in (4096, 8192, 16384)]
    assert cudnn == [595, 630, 645]
    assert rates["tokamax, Mosaic", "none", "backward", 16384] == 452
    assert rates["tokamax, Mosaic", "pair", "backward", 2048] == 67

    def times(name, by, forward, both):
        flop = anchors.flop("none", "forward", 4096)
        row = {"name": name, "by": by, "T": 4096}
        first = row | {"what": "forward", "ms": forward, "flop": flop}
        second = row | {"what": "forward+backward", "ms": both, "flop": 3.5 * flop}
        return [x | {"TFLOP/s": x["flop"] / x["ms"] / 1e9} for x in (first, second)]

    rows = [*times("none", "pallas", 0.5, 2.0), *times("none", "jax.nn cudnn", 0.46, 1.6)]
    rows += times("t5", "pallas", 0.6, 2.3)
    lines = anchors.show(rows, "gpu: NVIDIA H100 80GB HBM3")
    said = [line.split(": ", 1)[1] for line in lines if line.startswith("goal: T = 4096")]
    assert said == [
        "T = 4096, none, forward, 0.9 of cuDNN: 550 TFLOP/s, wanted 538: reached",
        "T = 4096, none, backward: 458 TFLOP/s, wanted 400: reached",
        "T = 4096, t5, forward, 0.85 of none: 458 TFLOP/s, wanted 467: NOT reached",
        "T = 4096, t5, backward, 0.85 of none: 404 TFLOP/s, wanted 389: reached",
    ]
    assert lines[-1] == "goal: a bias per pair, backward, twice tokamax with Mosaic: not measured"
    assert "The goals are for an H100." in anchors.show(rows, "gpu: NVIDIA L4")


def test_lengths_have_the_tokens_of_the_times_of_others():
    options = accelerator._parser().parse_args([])
    assert [accelerator.batch_of(options, n) for n in options.lengths] == [8, 4, 2, 1]


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--lengths=64,x"], "argument --lengths: must be an integer from 1, got 'x'"),
        (["--schemes", "t6"], "invalid choice: 't6'"),
        (["--on=tpu"], "--on tpu: JAX runs on cpu here"),
        (["--rouds=3"], "unrecognized arguments: --rouds=3"),
        (["--replot=none.json", "--plot=x.svg"], "none.json: cannot be read"),
    ],
)
def test_wrong_arguments_end_with_one_line(arguments, message, right_steps, capsys):
    assert accelerator.main(arguments) == 2
    err = capsys.readouterr().err
    assert message in err and err.count("\n") == 1


def test_it_is_imported_without_the_extras():
    code = (
        "import sys, experiments.bench.accelerator; "
        "roots = {name.partition('.')[0] for name in sys.modules}; "
        "print(roots & {'flax', 'pydantic', 'rich', 'matplotlib', 'optax', 'docstring_parser'})"
    )
    run = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert run.stdout == "set()\n"
