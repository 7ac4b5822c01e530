"""First contact: the clock, with processes that hang, die or never start, and one process."""

import json
import sys
import textwrap
import time

import pytest

from posenc_jax.kernels import __main__ as program
from posenc_jax.kernels.checks import contact, steps

FAKE = """
    import json, os, sys, time
    arguments = dict(x.removeprefix("--").partition("=")[::2] for x in sys.argv[1:])
    def write(row):
        with open(arguments["log"], "a") as stream:
            print(json.dumps(row), file=stream)
    if "machine" in arguments:
        write({"machine": {"device": "gpu: NVIDIA H100"}})
        sys.exit()
    if arguments["family"] == "decode":
        sys.exit("no such kernel")
    names = [f"{arguments['family']}: {x}" for x in os.environ["KINDS"].split()]
    write({"steps": names})
    once = "only" in arguments
    for name in names[int(arguments.get("first", 0)):]:
        if once and name != arguments["only"]:
            continue
        write({"running": name})
        kind = name.split()[1].partition("#")[0]
        if kind == "compiles":
            time.sleep(1)
            kind = "right"
        write({"compiled": name})
        if kind == "hang":
            time.sleep(30)
        if kind == "loses":
            write({"step": name, "outcome": "error", "place": "CUDA_ERROR_ILLEGAL_ADDRESS"})
            sys.exit(75)
        if kind == "dies":
            print("an illegal address", file=sys.stderr, flush=True)
            os.abort()
        row = {"step": name, "outcome": "ok" if kind == "right" else kind, "seconds": 0.5}
        if kind == "wrong":
            row["place"] = os.environ.get("CUDA_LAUNCH_BLOCKING", "tile row 2")
        write(row)
"""


@pytest.fixture
def fake(tmp_path, monkeypatch):
    monkeypatch.setattr(contact.shutil, "which", lambda name: None)
    monkeypatch.setenv("KINDS", "right hang wrong dies refused")
    program = tmp_path / "fake.py"
    program.write_text(textwrap.dedent(FAKE))

    def make(**settings):
        log = tmp_path / "out" / "gpu.jsonl"
        command = sys.executable, str(program)
        limits = {"timeout": 0.5, "patience": 30.0, "pause": 0.1}
        return contact.Contact(log, command=command, **limits | settings)

    return make


def test_a_step_that_hangs_or_dies_costs_itself_alone(fake, monkeypatch, capsys):
    monkeypatch.setattr(contact, "SHARES", [("pallas", "forward", 0.5), ("pallas", "decode", 1.0)])
    run = fake(again=10.0)
    assert run.machine() == {"device": "gpu: NVIDIA H100"}
    rows = run.run("gpu")
    outcomes = [row["outcome"] for row in rows]
    assert outcomes == ["ok", "hang", "wrong", "died", "refused", "died"]
    assert rows[3]["place"] == "SIGABRT: an illegal address"
    assert rows[2]["place"] == "tile row 2" and rows[2]["second run"] == "wrong: 1"
    assert rows[1]["second run"].startswith("hang: no end within")
    assert rows[5]["place"] == "exit status 1: no such kernel"

    written = [json.loads(text) for text in run.log.read_text().splitlines()]
    names = [row["running"].split()[1] for row in written if "running" in row]
    # What dies may have been compiled ahead, so it runs alone before it is named.
    assert names[:6] == ["right", "hang", "wrong", "dies", "dies", "refused"]
    assert "pallas  forward: wrong" in capsys.readouterr().out
    text = "\n".join(contact.table(rows))
    assert "once more, with checks: wrong: 1" in text and "1 ok, 1 hang, 1 wrong" in text


def test_what_the_time_does_not_allow_is_skipped(fake):
    run = fake(seconds=0.4, timeout=30.0, again=0.0, shares=[("pallas", "forward", 1.0)])
    run.machine()
    began = time.monotonic()
    rows = run.run("gpu")
    assert time.monotonic() - began < 5
    assert [row["outcome"] for row in rows] == ["ok", *["skipped"] * 4]


def test_after_an_error_that_a_gpu_does_not_survive_another_process_goes_on(fake, monkeypatch):
    monkeypatch.setattr(contact, "SHARES", [("pallas", "forward", 1.0)])
    monkeypatch.setenv("KINDS", "right loses wrong")
    run = fake(again=0.0, timeout=5.0)
    run.machine()
    rows = run.run("gpu")
    assert [row["outcome"] for row in rows] == ["ok", "error", "wrong"]
    names = [json.loads(text).get("running") for text in run.log.read_text().splitlines()]
    assert [x for x in names if x] == ["forward: right", "forward: loses", "forward: wrong"]


@pytest.mark.parametrize(
    ("kinds", "place", "count"),
    [
        ("hang#1 hang#2 right", "2 steps hung", 2),
        ("dies#1 dies#2 dies#3 dies#4 right", "4 processes were lost", 4),
    ],
)
def test_an_implementation_ends_after_enough_losses(fake, monkeypatch, capsys, kinds, place, count):
    shares = [("pallas", "forward", 0.5), ("pallas", "backward", 0.8), ("xla", "backward", 1.0)]
    monkeypatch.setattr(contact, "SHARES", shares)
    monkeypatch.setenv("KINDS", kinds)
    run = fake(again=0.0)
    run.machine()
    rows = run.run("gpu")
    outcomes = [(row["implementation"], row["outcome"], row.get("place")) for row in rows]
    of_pallas = [x for x in outcomes if x[0] == "pallas"]
    assert len(of_pallas) == count + 1 and of_pallas[-1] == ("pallas", "skipped", place)
    assert sum(x[0] == "xla" for x in outcomes) == count + 1
    assert f"pallas backward: left out, {place}" in capsys.readouterr().out


def test_a_step_may_compile_for_longer_than_it_may_run(fake, monkeypatch):
    monkeypatch.setattr(contact, "SHARES", [("pallas", "forward", 1.0)])
    monkeypatch.setenv("KINDS", "compiles")
    run = fake(again=0.0)
    run.machine()
    assert [row["outcome"] for row in run.run("gpu")] == ["ok"]
    (row,) = fake(again=0.0, patience=0.5).run("gpu")
    assert row["outcome"] == "hang" and row["place"] == "no end within 0.5 s"


def test_a_process_that_ends_before_its_first_step_starts_once_more(fake, monkeypatch, tmp_path):
    monkeypatch.setattr(contact, "SHARES", [("pallas", "forward", 1.0)])
    monkeypatch.setenv("KINDS", "right")
    busy = tmp_path / "busy"
    lines = f"""
        if "family" in arguments and os.path.exists({str(busy)!r}):
            os.remove({str(busy)!r})
            sys.exit("the chip is busy")
    """
    program = textwrap.dedent(FAKE).replace(
        'if arguments["family"] == "decode":', textwrap.dedent(lines) + "if False:"
    )
    (tmp_path / "fake.py").write_text(program)
    run = fake(again=0.0)
    run.machine()
    busy.write_text("")
    assert [row["outcome"] for row in run.run("gpu")] == ["ok"] and not busy.exists()


def test_no_seconds_run_no_steps(fake):
    assert fake(seconds=0.0).run("gpu") == []


def test_a_device_that_does_not_start_is_an_error(fake, tmp_path):
    (tmp_path / "fake.py").write_text("import time; time.sleep(30)")
    with pytest.raises(contact.DeviceError, match=r"does not start: .*no end within"):
        fake(patience=0.5).machine()


def test_a_process_ends_when_its_chip_no_longer_answers(tmp_path, monkeypatch):
    def illegal():
        raise RuntimeError("CUDA_ERROR_ILLEGAL_ADDRESS")

    chosen = [steps.Step(x, "forward", "bfloat16", illegal) for x in ("first", "next")]
    monkeypatch.setattr(program, "steps", lambda *_, **__: chosen)
    monkeypatch.setattr(program, "_answers", lambda: False)
    monkeypatch.setattr(program.os, "_exit", sys.exit)
    log = tmp_path / "log"
    with pytest.raises(SystemExit) as ended:
        program.main([f"--log={log}", "--implementation=pallas", "--family=forward"])
    assert ended.value.code == contact.LOST
    rows = [json.loads(text) for text in log.read_text().splitlines()]
    assert [row["step"] for row in rows if "outcome" in row] == ["first"]


def test_a_process_writes_before_and_after_each_step(tmp_path, monkeypatch):
    def refuses():
        raise NotImplementedError('attention: implementation="pallas": the platform is cpu')

    def lowering():
        raise NotImplementedError("Unimplemented primitive")

    runs = {"right": lambda: None, "wrong": lambda: "tile row 2", "refused": refuses, "x": lowering}
    chosen = [steps.Step(name, "forward", "bfloat16", run) for name, run in runs.items()]
    monkeypatch.setattr(program, "steps", lambda *_, **__: chosen)
    log = tmp_path / "log"
    assert program.main([f"--log={log}", "--implementation=pallas", "--family=forward"]) == 0
    first, *rows = (json.loads(text) for text in log.read_text().splitlines())
    assert first == {"steps": list(runs)}
    assert [row["running"] for row in rows[::3]] == list(runs)
    assert [row["compiled"] for row in rows[1::3]] == list(runs)
    outcomes = [(row["outcome"], row.get("place")) for row in rows[2::3]]
    assert outcomes == [
        ("ok", None),
        ("wrong", "tile row 2"),
        ("refused", "the platform is cpu"),
        ("error", "NotImplementedError: Unimplemented primitive"),
    ]
