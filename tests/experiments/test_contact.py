"""First contact: the clock, with processes that hang, die or never start, and one process."""

import json
import sys
import textwrap
import time

import pytest

from experiments.bench import contact

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
    names = [f"{arguments['family']}: {x}" for x in ("right", "hang", "wrong", "dies", "refused")]
    write({"steps": names})
    once = "only" in arguments
    for name in names[int(arguments.get("first", 0)):]:
        if once and name != arguments["only"]:
            continue
        write({"running": name})
        kind = name.split()[1]
        if kind == "hang":
            time.sleep(30)
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
    program = tmp_path / "fake.py"
    program.write_text(textwrap.dedent(FAKE))

    def make(**settings):
        log = tmp_path / "out" / "gpu.jsonl"
        command = sys.executable, str(program)
        return contact.Contact(log, command=command, **{"timeout": 0.5} | settings)

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


def test_what_the_time_does_not_allow_is_skipped(fake, monkeypatch):
    monkeypatch.setattr(contact, "SHARES", [("pallas", "forward", 1.0)])
    run = fake(seconds=0.4, timeout=30.0, again=0.0)
    run.machine()
    began = time.monotonic()
    rows = run.run("gpu")
    assert time.monotonic() - began < 5
    assert [row["outcome"] for row in rows] == ["ok", *["skipped"] * 4]


def test_a_device_that_does_not_start_is_an_error(fake, tmp_path):
    (tmp_path / "fake.py").write_text("import time; time.sleep(30)")
    with pytest.raises(contact.ExperimentError, match=r"does not start: .*no end within"):
        fake().machine()


def test_a_process_writes_before_and_after_each_step(tmp_path, monkeypatch):
    from posenc_jax.prove import steps

    def refuses():
        raise NotImplementedError('attention: implementation="pallas": the platform is cpu')

    def lowering():
        raise NotImplementedError("Unimplemented primitive")

    runs = {"right": lambda: None, "wrong": lambda: "tile row 2", "refused": refuses, "x": lowering}
    chosen = [
        steps.Step(name, "forward", "none", "bfloat16", 64, run) for name, run in runs.items()
    ]
    monkeypatch.setattr(steps, "steps", lambda *_, **__: chosen)
    log = tmp_path / "log"
    assert contact.main([f"--log={log}", "--implementation=pallas", "--family=forward"]) == 0
    first, *rows = (json.loads(text) for text in log.read_text().splitlines())
    assert first == {"steps": list(runs)}
    assert [row["running"] for row in rows[::2]] == list(runs)
    outcomes = [(row["outcome"], row.get("place")) for row in rows[1::2]]
    assert outcomes == [
        ("ok", None),
        ("wrong", "tile row 2"),
        ("refused", "the platform is cpu"),
        ("error", "NotImplementedError: Unimplemented primitive"),
    ]
