"""Claims, criteria, runs and outcomes; runs are of tiny models."""

import dataclasses
import os
import re
import signal

import jax.numpy as jnp
import numpy as np
import pytest

from experiments.__main__ import main
from experiments.claims import parse
from experiments.errors import ConfigError
from experiments.runs import checkpoints
from experiments.runs.checkpoints import Checkpoints, Deadline, OutOfTime
from experiments.runs.experiment import Experiment
from experiments.runs.files import locked
from experiments.runs.results import packed, write
from experiments.runs.run import Result, Run, here
from experiments.scoreboard import plan
from experiments.scoreboard.outcomes import outcomes
from experiments.scoreboard.page import numbers, page
from tests.experiments.one_line import refusal
from tests.experiments.stub_tasks import KBACK, TASK
from tests.support import slow

CLAIM = f"""
source = "a test"
protocol = "tiny"
seeds = 2
minutes = 0.1

[[claims]]
claim = "RoPE is better than nothing"
gate = ["rope[32] >= 0"]
criteria = ["rope[48] - none[48] >= -99", "-99 <= late[32] <= 99"]

{KBACK}
[runs.rope]
task = "kback"
scheme = "rope"
[runs.none]
task = "kback"
scheme = "none"
[runs.late]
task = "kback"
scheme = "none"
kback.train.learning_rate = 1e-30
"""


@pytest.fixture
def call(tmp_path, capsys, monkeypatch):
    """Runs `scoreboard` on claims in a folder of their own."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr("experiments.runs.run_queue.default_count", lambda: 1)
    folder = tmp_path / "configs" / "scoreboard"
    folder.mkdir(parents=True)
    (folder / "T1.toml").write_text(CLAIM)

    def scoreboard(*arguments):
        status = main(["scoreboard", *arguments])
        out, err = capsys.readouterr()
        return status, out, err

    scoreboard.claims = folder
    scoreboard.results = tmp_path / "results" / "scoreboard"
    scoreboard.numbers = lambda: (tmp_path / "docs" / "results.csv").read_text()
    scoreboard.page = lambda: (tmp_path / "docs" / "results.md").read_text()
    return scoreboard


def make_run(**changes):
    task = dataclasses.replace(TASK, **changes)
    position = Experiment(tasks={"kback": task}).scheme("kback", "rope")
    return Run(task, "rope", {}, position, 0)


def test_a_claim_is_run_decided_and_not_run_again(call):
    status, out, _ = call()
    assert status == 0 and "not run (0 of 2 seeds)" in out and "Not run: [T1](" in call.page()
    status, out, err = call("--run", "--seeds", "1", "T1")
    assert (status, err) == (0, "") and "3 runs, 0 with a result" in out
    assert "not run (1 of 2 seeds)" in out and "1 of 1" in call.numbers()
    status, out, _ = call("T1", "--run")
    assert status == 0 and "6 runs, 3 with a result" in out and "holds (2 of 2 seeds)" in out
    page = call.page()
    assert " | holds |" in page and "Not run" not in page
    assert "T1,holds,criterion,late[32] <= 99," in call.numbers()
    before = {path: path.read_bytes() for path in call.results.glob("*/*")}
    assert {path.name for path in before} == {"result.json"}
    status, out, _ = call("--run")
    assert status == 0 and "6 runs, 6 with a result" in out and call.page() == page
    assert before == {path: path.read_bytes() for path in call.results.glob("*/*")}


def test_claims_of_another_folder_have_their_own_page_and_results(call, tmp_path):
    call()
    library = call.page()
    assert "[T1](../configs/scoreboard/T1.toml)" in library
    assert call("--results", "other")[0] == 0
    assert "`python -m experiments scoreboard --results other` writes" in call.page()
    call()
    (tmp_path / "my claims").mkdir()
    (tmp_path / "my claims" / "Z1.toml").write_text(CLAIM)
    (tmp_path / "my claims" / "remark.md").write_text("Two others never ran.\n")
    status, out, _ = call("--folder", "my claims", "Z1")
    assert status == 0 and "Page: my claims/results.md" in out and call.page() == library
    (tmp_path / "my claims" / "remark.md").write_bytes(b"\xff")
    status, _, err = call("--folder", "my claims", "Z1")
    assert status == 2 and "remark.md: cannot be read: " in err
    page = (tmp_path / "my claims" / "results.md").read_text()
    assert "[Z1](Z1.toml)" in page and "T1" not in page
    assert "\n\nTwo others never ran.\n\n" in page and "never ran" not in library
    assert "scoreboard --folder 'my claims' NAME --run --results FOLDER`" in page
    assert "`my claims/results/`" in page
    assert "[methods](../docs/methods.md#claims)" in page


def test_the_committed_page_is_that_of_the_committed_results(request, monkeypatch):
    root = request.config.rootpath
    monkeypatch.chdir(root)
    claims = plan.load_all(root / "configs" / "scoreboard")
    decided = [x for each in claims for x in outcomes(each, root / "results" / "scoreboard")]
    assert (root / "docs" / "results.md").read_text() == page(decided)
    assert (root / "docs" / "results.csv").read_text() == numbers(decided)
    names = {run.name for c in claims for s in c.seeds for run in c.of_seed(s).values()}
    known = packed(root / "results" / "scoreboard")
    assert known.keys() <= names  # Others would never be read.


def test_other_versions_are_not_mixed(call, capsys):
    for name, run in plan.load(call.claims / "T1.toml").runs.items():
        end(call.results, run, 0.9, **({"jax": "0.1"} if name == "rope" else {}))
    for flags in ((), ("--run",)):
        err = refusal(capsys, "scoreboard", *flags)
        assert "T1" in err
        assert re.search(r"versions: jax 0\.1 and jax 0\.\d+\.", err)
        assert len(list(call.results.glob("*/result.json"))) == 3
    assert "or take another --results" in err
    assert call("--results", "other")[0] == 0


def test_a_diverged_run_is_marked_and_the_others_go_on(call):
    text = CLAIM.replace('scheme = "rope"', 'scheme = "rope"\nkback.train.learning_rate = 1e38', 1)
    (call.claims / "T1.toml").write_text(text.replace("seeds = 2", "seeds = 1"))
    status, out, _ = call("--run")
    assert status == 0 and "diverged: the loss is not finite at step" in out
    assert "gate failed" in out
    assert "Diverged: T1 rope, seed 0: the loss is not finite" in call.page()
    assert "3 runs, 3 with a result" in call("--run")[1]


def test_runs_of_another_process_are_left_out(call, monkeypatch):
    scores = {"plain": {"32": 0.5, "48": 0.5}}
    monkeypatch.setattr(Run, "measured", lambda self, *_: self.ended("done", scores=scores))
    name = next(iter(plan.load(call.claims / "T1.toml").runs.values())).name
    with locked(call.results / name):
        status, out, err = call("--run", "--seeds", "1", "--pack")
    assert (status, err) == (0, "")
    assert f"Other processes hold 1 runs, and show the results: {name}\n" in out
    assert len(list(call.results.glob("*/result.json"))) == 2
    assert not list(call.results.glob("*.gz")) and "Page" not in out
    assert "[1/1]" in call("--run", "--seeds", "1")[1]


def test_sigterm_writes_the_state_and_the_same_command_continues(call, monkeypatch):
    def terminated(self, *arguments):
        os.kill(os.getpid(), signal.SIGTERM)
        save(self, *arguments)

    before = signal.getsignal(signal.SIGTERM)
    with monkeypatch.context() as patch:
        patch.setattr(Checkpoints, "save", terminated)
        status, out, _ = call("--run", "--seeds", "1")
    assert status == 3 and "Time is over with 3 runs left" in out
    assert [path.name for path in call.results.glob("*/*")] == ["checkpoints"]
    assert signal.getsignal(signal.SIGTERM) is before
    assert "3 runs, 0 with a result" in call("--run", "--seeds", "1")[1]


@slow
def test_a_stopped_run_continues_with_equal_bits(tmp_path, monkeypatch):
    run, folder, messages = make_run(), tmp_path / "parts", []
    whole = run.carry_out(tmp_path / "whole")
    for _ in range(2):  # At the deadline the state is written after one call of two steps.
        with pytest.raises(OutOfTime):
            monkeypatch.setattr(Checkpoints, "save", stop_after_saving)
            run.carry_out(folder, messages.append)
    monkeypatch.undo()
    states = {path.name for path in run.states(folder).iterdir()}
    assert states == {"2.npz", "4.npz"} and run.result(folder) is None
    parts = run.carry_out(folder, messages.append)
    assert parts.curve == whole.curve and parts.scores == whole.scores and not messages
    assert [path.name for path in (folder / run.name).iterdir()] == ["result.json"]


save = Checkpoints.save


def stop_after_saving(self, *arguments):
    self.every = 0.0
    save(self, *arguments)
    raise OutOfTime


@pytest.mark.parametrize("how", ["truncated", "one bit", "head", "other versions"])
def test_a_state_that_is_damaged_or_of_other_versions_is_never_used(tmp_path, how, monkeypatch):
    first, second = ({"x": jnp.arange(6144.0) * n} for n in (1, 2))
    lines = []
    checkpoint = Checkpoints(tmp_path / "c", Deadline(), lines.append, every=0.0, lines=0.0)
    checkpoint.save(first, {"step": [1], "loss": [1.0]}, (1.0, 1.0), 2000)
    with monkeypatch.context() as patch:
        if how == "other versions":
            patch.setattr(checkpoints, "versions_of", lambda environment: ("jax 99",))
        checkpoint.save(second, {"step": [2], "loss": [2.0]}, (1.0, 1.0), 2000)
    assert lines[1] == f"{tmp_path.name}: step 2 of 2,000, loss 2.000"
    path = tmp_path / "c" / "2.npz"
    data = bytearray(path.read_bytes())
    assert len(data) > 1000
    data[len(data) // 2] ^= 4 * (how == "one bit")
    if how == "head":  # NumPy reads it before the checksum.
        assert data.count(b"{'descr'")
        data = data.replace(b"{'descr'", b"{('descr")
    path.write_bytes(data[:100] if how == "truncated" else data)
    messages = []
    state, curve, _ = Checkpoints(tmp_path / "c", Deadline(), messages.append).load(second)
    np.testing.assert_array_equal(state["x"], first["x"])
    reason = "is of other versions" if how == "other versions" else "cannot be used"
    assert curve["step"] == [1] and f"2.npz: {reason}" in messages[0]


def test_the_name_of_a_run_depends_on_every_setting():
    base = make_run()
    assert make_run().name == base.name
    others = [
        make_run(offset=5),
        make_run(train=dataclasses.replace(TASK.train, learning_rate=1e-3)),
        make_run(model=dataclasses.replace(TASK.model, num_heads=1)),
        dataclasses.replace(base, seed=1),
        dataclasses.replace(base, options={"rope": {"theta": 100.0}}),
    ]
    assert len({run.name for run in [base, *others]}) == 6
    assert re.fullmatch(r"kback-rope-s0-[0-9a-f]{12}", base.name)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (("criteria", "critera"), "claims[0].criteria: is missing"),
        (('criteria = ["rope[48] - none[48] >= -99", "-99 <= late[32] <= 99"]', "criteria = []"),
         "criteria: must hold at least one condition"),
        (("none[48] >=", "none[47] >="), "length 47 is not among [32, 48]"),
        (("none[48] >=", "nune[48] >="), "no run is named nune; did you mean 'none'?"),
        (("none[48] >=", "none.sliding[48] >="), "unknown view; did you mean 'plain'?"),
        (("rope[48] - none[48] >= -99", "rope[48] - none[48]"), "criteria[0]: must compare scores"),
        (("rope[48] - none[48] >= -99", "rope[48] > open(3)"), "'open(3)', which is no score"),
        (('scheme = "none"', 'schem = "none"'), "runs.none: scheme: is missing"),
        (('scheme = "none"', 'scheme = "none"\nseeds = 3'), "none: seeds: is a setting of compare"),
        (("seeds = 2", 'seeds = 2\nresults = "here"'), "results: is a setting of compare"),
    ],
)  # fmt: skip
def test_a_wrong_claim_is_one_line(call, capsys, change, message):
    assert change[0] in CLAIM
    (call.claims / "T1.toml").write_text(CLAIM.replace(*change, 1))
    err = refusal(capsys, "scoreboard", "--run")
    assert "T1.toml: " in err and message in err
    assert not call.results.exists() and not (call.claims.parents[1] / "docs").exists()


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (("T2",), "unknown claim 'T2'; known: T1"),
        (("--run", "--seeds", "0"), "--seeds: must be at least 1"),
        (("--run", "--seeds", "3"), "--seeds: must be at most 2, as in the claims, got 3"),
        (("--folder", "nowhere"), "nowhere: has no files of claims"),
    ],
)
def test_wrong_arguments_are_one_line(call, capsys, arguments, message):
    assert message in refusal(capsys, "scoreboard", *arguments)


def test_conditions_equal_python():
    scores = {("a", None, 8): 0.25, ("b", None, 8): 0.5, ("b", "sliding", 16): 0.125}
    first, second = parse("a[8] < b[8] - 2 * b.sliding[16] <= 1.5 / 2", "gate")

    def look(*key):
        return scores[key]

    assert not first.holds_at(first.margin(look)) and second.holds_at(-0.5)
    assert first.margin(look) == 0.0 and second.margin(look) == -0.5
    assert list(first.scores()) == [("a", None, 8), ("b", None, 8), ("b", "sliding", 16)]
    (missing,) = parse("a[8] >= -1", "gate")
    assert not missing.holds_at(missing.margin(lambda *key: float("nan")))
    for text in ("a[8]", "1 < 2", "a < b", "a[8] == 1", "a[n] < 1", "a[8] < b.c.d[8]", "a[8] <"):
        with pytest.raises(ConfigError):
            parse(text, "gate")
    for text in ("-" * 20000 + "a[8] < 1", "a[8] + " * 20000 + "1 < 1", "a[8] < 1\0"):
        with pytest.raises(ConfigError) as error:
            parse(text, "gate")
        assert len(str(error.value)) < 300


def end(folder, run, score, **jax):
    """Writes the result of a run, which diverged if it has no score."""
    scores = {} if score is None else {"plain": {"32": score, "48": score}}
    status, environment = "diverged" if score is None else "done", here() | jax
    write(folder, run.name, Result(run.settings, status, "", environment, "", "", scores=scores))


def test_a_division_by_zero_is_no_score(call):
    text = re.sub("criteria = .*", 'criteria = ["rope[48] / (rope[48] - rope[48]) <= 1"]', CLAIM)
    (call.claims / "T1.toml").write_text(text)
    claim = plan.load(call.claims / "T1.toml")
    for run in (run for seed in (0, 1) for run in claim.of_seed(seed).values()):
        end(call.results, run, 0.9)
    status, out, _ = call()
    assert status == 0 and "not resolved (0 of 2 seeds)" in out
    assert "<= 1,missing,0 of 2" in call.numbers()


@pytest.mark.parametrize(
    ("rope", "none", "word"),
    [
        ([0.9, 0.9, 0.9], [0.1, 0.1, 0.1], "holds"),
        ([0.9, 0.9, 0.9], [0.8, 0.1, 0.1], "not resolved"),  # It holds in all seeds.
        ([0.9, 0.9, 0.9], [0.95, 0.96, 0.95], "fails"),
        ([0.9, 0.2, 0.9], [0.1, 0.1, 0.1], "gate failed"),
        ([0.9, None, 0.9], [0.1, 0.1, 0.1], "gate failed"),
        ([0.9, 0.9], [0.1, 0.1], "not run"),
    ],
)
def test_outcomes(tmp_path, rope, none, word):
    text = CLAIM.split("[runs.late]")[0]
    text = re.sub("criteria = .*", 'criteria = ["rope[48] > none[48]"]', text)
    text = text.replace(">= 0", ">= 0.8").replace("seeds = 2", "seeds = 3\nfirst_seed = 4")
    (tmp_path / "T1.toml").write_text(text)
    claim = plan.load(tmp_path / "T1.toml")
    for seed, *scores in zip(claim.seeds, rope, none, strict=False):
        for run, score in zip(claim.of_seed(seed).values(), scores, strict=True):
            end(tmp_path, run, score)
    (outcome,) = outcomes(claim, tmp_path)
    assert outcome.word == word and not outcome.mixed
    assert ("no finite score in 1 of 3" in numbers([outcome])) == (None in rope)
    assert outcome.seeds == (4, 5, 6)[: len(rope)]
    (check,) = outcome.criteria
    pairs = [a - b for a, b in zip(rope, none, strict=True) if a is not None]
    np.testing.assert_allclose([m for m in check.values if m == m], pairs)
