"""The runner of the steps, with processes that hang, die or never start, and one process."""

import json
import sys
import textwrap
import time
import types

import pytest

from posenc_jax.kernels import __main__ as program
from posenc_jax.kernels.checks import runner

FAKE = """
    import json, os, sys, time
    arguments = dict(x.removeprefix("--").partition("=")[::2] for x in sys.argv[1:])
    def write(row):
        with open(arguments["log"], "a") as stream:
            print(json.dumps(row), file=stream)
    if "machine" in arguments:
        write({"machine": {"device": "gpu: NVIDIA H100"}})
        sys.exit()
    if arguments["family"] == "tiles":
        sys.exit("no such kernel")
    part, parts = map(int, arguments["part"].split("/"))
    names = [f"{arguments['family']}: {x}" for x in os.environ["KINDS"].split()][part - 1::parts]
    write({"steps": names})
    for name in names[int(arguments["first"]):]:
        print(f"{name}, {'ahead' in arguments}", flush=True)
        kind = name.split()[1].partition("#")[0]
        if kind == "compiles":
            time.sleep(0.7)
            kind = "ok"
        write({"compiled": name})
        if kind == "hang":
            time.sleep(30)
        if kind == "loses":
            write({"step": name, "outcome": "error", "place": "CUDA_ERROR_ILLEGAL_ADDRESS"})
            sys.exit(75)
        if kind == "dies":
            print("an illegal address", file=sys.stderr, flush=True)
            os.abort()
        write({"step": name, "outcome": kind, "seconds": 0.5})
"""


@pytest.fixture
def fake(tmp_path, monkeypatch):
    """A run of one family of steps, whose outcomes are given."""
    monkeypatch.setattr(runner, "RUNS", [("pallas", "forward", 1)])
    file = tmp_path / "fake.py"
    file.write_text(textwrap.dedent(FAKE))

    def make(kinds="ok hang wrong dies refused", **settings):
        monkeypatch.setenv("KINDS", kinds)
        command = sys.executable, str(file)
        limits = {"timeout": 0.5, "patience": 30.0, "log": tmp_path / "out" / "gpu.jsonl"}
        run = runner.Runner(command=command, **limits | settings)
        assert run.machine() == {"device": "gpu: NVIDIA H100"}
        return run

    return make


def test_a_step_that_hangs_or_dies_costs_itself_alone(fake, monkeypatch, capsys):
    monkeypatch.setattr(runner, "RUNS", [("pallas", "forward", 1), ("library", "tiles", 1)])
    run = fake()
    rows = run.run("gpu")
    outcomes = [row["outcome"] for row in rows]
    assert outcomes == ["ok", "hang", "wrong", "died", "refused", "died"]
    assert rows[1]["place"] == "no end within 0.5 s"
    assert rows[3]["place"] == "SIGABRT: an illegal address"
    assert rows[5]["implementation"] == "cudnn"
    assert rows[5]["place"] == "exit status 1: no such kernel"
    # What dies may have been compiled ahead, so it runs alone before it is named.
    printed = (run.log.parent / "gpu.pallas-forward-1.txt").read_text()
    names = [x.split(": ")[1] for x in printed.splitlines() if x.startswith("forward")]
    assert [x for x in names if "dies" in x] == ["dies, True", "dies, False"]
    assert [json.loads(x) for x in run.log.read_text().splitlines()] == rows
    assert "pallas  forward: wrong" in capsys.readouterr().out
    text = "\n".join(runner.table(rows))
    assert "SIGABRT" in text and "1 ok, 1 hang, 1 wrong, 1 died, 1 refused" in text


@pytest.mark.parametrize(
    ("kinds", "settings", "outcomes"),
    [
        ("ok hang wrong", {"seconds": 1.0, "timeout": 30.0}, ["ok", "skipped", "skipped"]),
        ("ok loses wrong", {"timeout": 5.0}, ["ok", "error", "wrong"]),
        ("loses#1 loses#2 loses#3 loses#4 ok", {}, [*["error"] * 4, "skipped"]),
        ("compiles", {}, ["ok"]),
    ],
    ids=["out of time", "lost", "many losses", "compiles"],
)
def test_how_steps_end(fake, kinds, settings, outcomes):
    run, began = fake(kinds, **settings), time.monotonic()
    assert [row["outcome"] for row in run.run("gpu")] == outcomes
    assert time.monotonic() - began < 15


@pytest.mark.parametrize(("platform", "cores", "order"), [("gpu", 8, "02413"), ("tpu", 8, "01234")])
def test_processes_share_the_steps_of_a_family(platform, cores, order, fake, monkeypatch):
    monkeypatch.setattr(runner, "RUNS", [("pallas", "forward", 3)])
    monkeypatch.setattr(runner.os, "cpu_count", lambda: cores)
    kinds = "ok wrong ok#1 hang ok#2".split()
    rows = fake(" ".join(kinds)).run(platform)
    assert [row["step"] for row in rows] == [f"forward: {kinds[int(n)]}" for n in order]


def test_ctrl_c_ends_all_families(fake, monkeypatch):
    monkeypatch.setattr(runner, "RUNS", [("pallas", "forward", 1), ("xla", "forward", 1)])

    def show(text):
        if text.startswith("pallas"):
            raise KeyboardInterrupt

    run, began = fake("ok hang", timeout=30.0, show=show), time.monotonic()
    with pytest.raises(KeyboardInterrupt):
        run.run("gpu")
    assert time.monotonic() - began < 15


def test_a_step_is_not_wrong_where_others_are_as_wrong():
    rows = [
        {"implementation": word, "family": "", "step": step, "outcome": "wrong", "place": place}
        for word, step, place in (
            ("pallas", "forward: sinks", "output: batch 0, head 1: 1.0064 times what is expected"),
            ("xla", "backward: sinks", "output: batch 1, head 0: 0.9970 times what is expected"),
            ("pallas", "backward: slopes", "dq: batch 0, head 0: -1.00 times what is expected"),
            ("xla", "backward: slopes", "dq: batch 0, head 0: 1.0060 times what is expected"),
            ("pallas", "backward: pair", "dk: batch 0, head 0, token 3: nan, expected 1.0; 5 of 9"),
            ("cudnn", "backward: no rule", "dq: batch 0, head 0: 1.0060 times what is expected"),
        )
    ]
    outcomes = [row["outcome"] for row in runner.judged(rows)]
    assert outcomes == ["inconclusive"] * 2 + ["wrong", "inconclusive", "wrong", "wrong"]
    assert sum("times what" in x for x in runner.table(runner.judged(rows))) == 5


def test_a_device_that_does_not_start_is_an_error(fake, tmp_path):
    make = fake().machine
    (tmp_path / "fake.py").write_text("raise SystemExit('the chip is busy')")
    with pytest.raises(runner.DeviceError, match="does not start: died: exit status 1: the chip"):
        make()


def _steps(monkeypatch, **runs):
    case = types.SimpleNamespace(dtype="bfloat16")
    fakes = [
        types.SimpleNamespace(name=name, case=case, run=run, compile=lambda: None)
        for name, run in runs.items()
    ]
    monkeypatch.setattr(program, "steps", lambda *_, **__: fakes)


def _raises(error):
    def run():
        raise error

    return run


ARGUMENTS = "--implementation=pallas", "--family=forward"


def test_a_process_ends_when_its_chip_no_longer_answers(tmp_path, monkeypatch):
    illegal = _raises(RuntimeError("CUDA_ERROR_ILLEGAL_ADDRESS"))
    _steps(monkeypatch, first=illegal, next=illegal)
    monkeypatch.setattr(program, "_answers", lambda: False)
    monkeypatch.setattr(program.os, "_exit", sys.exit)
    log = tmp_path / "log"
    with pytest.raises(SystemExit) as ended:
        program.main([f"--log={log}", *ARGUMENTS])
    assert ended.value.code == runner.LOST
    rows = [json.loads(text) for text in log.read_text().splitlines()]
    assert [row["step"] for row in rows if "outcome" in row] == ["first"]


def test_a_process_writes_before_and_after_each_step(tmp_path, monkeypatch):
    refusal = 'attention: implementation="pallas": the platform is cpu'
    runs = {
        "right": lambda: None,
        "wrong": lambda: "token 2",
        "refused": _raises(NotImplementedError(refusal)),
        "x": _raises(NotImplementedError("Unimplemented primitive")),
    }
    _steps(monkeypatch, **runs)
    log = tmp_path / "log"
    assert program.main([f"--log={log}", *ARGUMENTS]) == 0
    first, *rows = (json.loads(text) for text in log.read_text().splitlines())
    assert program.main([f"--log={log}.2", "--part=2/3", *ARGUMENTS]) == 0
    assert json.loads(log.with_name("log.2").read_text().splitlines()[0]) == {"steps": ["wrong"]}
    assert first == {"steps": list(runs)}
    assert [row["running"] for row in rows[::3]] == list(runs)
    assert [row["compiled"] for row in rows[1::3]] == list(runs)
    assert [(row["outcome"], row.get("place")) for row in rows[2::3]] == [
        ("ok", None),
        ("wrong", "token 2"),
        ("refused", "the platform is cpu"),
        ("error", "NotImplementedError: Unimplemented primitive"),
    ]
