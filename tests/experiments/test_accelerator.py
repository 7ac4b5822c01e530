"""The program of `make gpu` and `make tpu` at tiny size, on the CPU."""

import json
import subprocess
import sys
from xml.etree import ElementTree

import jax.numpy as jnp
import pytest

from experiments.bench import accelerator
from experiments.bench.accelerator_peers import Case, peers

TINY = ["--batch=1", "--heads=2", "--head-dim=8", "--check-length=16", "--slots=16", "--rounds=2"]
TINY += ["--inner-ms=1", "--threads=2"]
BY = "default", "jax.nn"
PARTS = "checks", "times"


def breaks(q, k, v, params):
    raise RuntimeError("out of memory")


def some_peers(length, heads, table, platform):
    found = peers(length, heads, table, platform)
    matrix = [case for case in found if (case.name, case.by) == ("matrix", "einsum")]
    return [*matrix, Case("none", "a library", breaks, {})]


@pytest.fixture
def few_programs(monkeypatch):
    few = {name: accelerator.IMPLEMENTATIONS[name] for name in ("reference", "xla", "pallas")}
    monkeypatch.setattr(accelerator, "IMPLEMENTATIONS", few)
    monkeypatch.setattr(accelerator, "peers", some_peers)


def test_the_whole_program_at_tiny_size(few_programs, tmp_path, capsys):
    file, drawn = tmp_path / "out" / "cpu.json", tmp_path / "cpu.svg"
    arguments = [*TINY, "--lengths=64", "--schemes", "none", "t5", f"--json={file}"]
    assert accelerator.main([*arguments, f"--plot={drawn}"]) == 0
    numbers = json.loads(file.read_text())
    assert numbers["machine"]["device"] == "cpu: cpu" and numbers["peak TFLOP/s"] > 0

    checks = {(row["name"], row["by"], row["what"]): row for row in numbers["checks"]}
    assert len(checks) == 12
    learned = checks["t5", "xla", "float32"]
    arrays = ["['output']", "['q']", "['k']", "['v']", "['params']['table']"]
    assert sorted(learned["errors"]) == sorted(arrays)
    assert 0 < learned["worst"] < 1e-5 and learned["same bits"]
    assert 1e-4 < checks["t5", "reference", "bfloat16"]["worst"] < 4e-2
    assert "TPU" in checks["none", "pallas", "float32"]["unsupported"]

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

    out = capsys.readouterr().out
    assert "same bits  ok" in out and "WRONG" not in out
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


def test_the_file_is_kept_when_the_program_is_stopped(monkeypatch, tmp_path, capsys):
    row = {"name": "t5", "by": "xla", "what": "float32", "T": 8, "errors": {"q": 0.5}}
    row |= {"allowed": {"q": 0.1}, "worst": 0.5, "same bits": True}
    monkeypatch.setattr(accelerator, "check", lambda report, *rest: report.add("checks", row))

    def stop(*arguments):
        raise KeyboardInterrupt

    monkeypatch.setattr(accelerator, "measure", stop)
    file = tmp_path / "cpu.json"
    assert accelerator.main([*TINY, "--schemes", "none", f"--json={file}"]) == 130
    numbers = json.loads(file.read_text())
    assert numbers["checks"] == [row] and numbers["times"][0]["name"] == "matmul"
    assert "WRONG" in capsys.readouterr().out


def test_nothing_is_begun_when_the_time_is_over(tmp_path, capsys):
    file = tmp_path / "cpu.json"
    arguments = [*TINY, "--minutes=0", "--lengths=64", "--schemes", "none", "shaw_keys"]
    assert accelerator.main([*arguments, f"--json={file}"]) == 0
    numbers = json.loads(file.read_text())
    assert all(row["skipped"] == "out of time" for part in PARTS for row in numbers[part])
    checks = {(row["name"], row["by"], row["what"]) for row in numbers["checks"]}
    assert len(checks) == 2 * 2 * len(accelerator.IMPLEMENTATIONS)
    assert "s in all" in capsys.readouterr().out


def test_every_scheme_by_default_has_the_sizes_of_the_options():
    options = accelerator._parser().parse_args(TINY)
    schemes = {accelerator._scheme(name, options) for name in accelerator.SCHEMES}
    assert len(schemes) == len(accelerator.SCHEMES) == 15


@pytest.mark.parametrize(
    ("dtype", "errors", "same_bits", "wrong"),
    [
        ("float32", {"q": 9e-5, "params": 9e-4}, True, False),
        ("float32", {"q": 2e-4, "params": 0.0}, True, True),
        ("float32", {"q": 0.0, "params": 2e-3}, True, True),
        ("float32", {"q": float("nan"), "params": 0.0}, True, True),
        ("float32", {"q": 0.0, "params": 0.0}, False, True),
        ("bfloat16", {"q": 3e-2, "params": 0.3}, True, False),
        ("bfloat16", {"q": 5e-2, "params": 0.3}, True, True),
    ],
)
def test_which_checks_fail(dtype, errors, same_bits, wrong):
    greatest = accelerator.allowed(dtype, {"q": 0.0, "params": 0.1})
    row = {"errors": errors, "allowed": greatest, "same bits": same_bits}
    assert accelerator.failed(row) == wrong


def test_differences_are_parts_of_the_largest_value():
    got = {"a": jnp.array([1.0, 4.5]), "zero": jnp.zeros(2)}
    assert accelerator.differences(got, {"a": jnp.array([1.0, 5.0]), "zero": jnp.zeros(2)}) == {
        "a": pytest.approx(0.1),
        "zero": 0.0,
    }


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
def test_wrong_arguments_end_with_one_line(arguments, message, capsys):
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
