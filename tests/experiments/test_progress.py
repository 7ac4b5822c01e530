"""Progress: lines in a pipe, a live table on a terminal."""

import io

import pytest
from rich.console import Console

from experiments.progress import Progress, TimeLeft, final_table
from experiments.tasks import TASKS

LABELS = {name: task.labels for name, task in TASKS.items()}
TABLES = {name: vars(labels) for name, labels in LABELS.items()}
GUESS = {"kback": 15.0, "text": 15.0}
PLAN = [("kback", "none"), ("kback", "rope"), ("text", "none"), ("text", "rope")]


def make_run(task, scheme, fitted=True, **changes):
    lengths, metric = ((32, 128), "accuracy") if task == "kback" else ((128, 256), "bits_per_byte")
    values = (0.97, 0.41) if task == "kback" else (3.125, 3.456)
    evaluations = [
        dict(
            metric=metric,
            mode="plain",
            length=length,
            values=[value],
            in_distribution=length == lengths[0],
            variant=None,
            note=None,
        )
        for length, value in zip(lengths, values, strict=True)
    ]
    run = dict(task=task, scheme=scheme, status="done", seeds=[0], final_loss=[0.25])
    return run | dict(fitted=fitted, fit_rule="accuracy >= 0.9", evaluations=evaluations) | changes


def failed(task, scheme):
    return dict(task=task, scheme=scheme, status="failed", error="ValueError: [red]NaN\nmore")


def printed(thing, width=80, **options):
    console = Console(file=io.StringIO(), width=width, **options)
    console.print(thing)
    return console.file.getvalue()


def follow(console, runs, plan=PLAN):
    with Progress(LABELS, console) as progress:
        progress.start(plan, GUESS)
        for run in runs:
            progress.update(run["task"], run["scheme"], step=150, steps=300, loss=2.5)
            progress.finish(run)
        progress.message("a [message]")
    return console.file.getvalue()


def test_pipe_prints_lines_and_one_table():
    out = follow(Console(file=io.StringIO(), width=80), [make_run(*key) for key in PLAN])
    lines = out.splitlines()
    assert lines[0].startswith("[1/4] kback none: loss 0.250;") and lines[0].endswith("left)")
    assert lines[3].startswith("[4/4] text rope:") and "left" not in lines[3]
    assert lines[4] == "a [message]"
    assert out.count("kback") == 2 + 2  # two lines, the table's head, one note
    assert "\x1b" not in out and "\r" not in out
    assert "0.97" in out and "3.456" in out


def test_terminal_shows_live_table(monkeypatch):
    monkeypatch.delenv("NO_COLOR", raising=False)
    monkeypatch.setenv("TERM", "xterm-256color")
    console = Console(file=io.StringIO(), width=80, height=40, force_terminal=True)
    with Progress(LABELS, console) as progress:
        progress.start(PLAN, GUESS)
        progress.update("kback", "none", step=100, steps=300, loss=2.5)
        shown = printed(progress._render())
        assert "0 of 4 runs" in shown and "left" in shown
        assert "kback none: step 100 of 300, loss 2.500" in shown
        progress.finish(make_run("kback", "none"))
        shown = printed(progress._render())
        assert "1 of 4 runs" in shown and "0.97" in shown
        assert any("rope" in line and "·" in line for line in shown.splitlines())
    end = printed(progress._render())
    assert "runs" not in end and "0.97" in end
    assert "\x1b[?25h" in console.file.getvalue(), "the cursor was not given back"


def test_no_color_disables_colours(monkeypatch):
    results = dict(tasks=TABLES, runs=[make_run("kback", "none"), failed("kback", "rope")])
    console = dict(force_terminal=True, color_system="standard")
    assert "\x1b[31m" in printed(final_table(results), **console, no_color=False)
    monkeypatch.setenv("NO_COLOR", "1")
    assert "\x1b[31m" not in printed(final_table(results), **console)


def test_interrupt_prints_finished_runs():
    console = Console(file=io.StringIO(), width=80)
    with pytest.raises(KeyboardInterrupt), Progress(LABELS, console) as progress:
        progress.start(PLAN, GUESS)
        progress.finish(make_run("kback", "none"))
        raise KeyboardInterrupt
    assert "0.97" in console.file.getvalue()


def test_stop_twice_prints_once():
    console = Console(file=io.StringIO(), width=80)
    progress = Progress(LABELS, console)
    progress.start(PLAN[:1])
    progress.finish(make_run("kback", "none"))
    progress.stop()
    once = console.file.getvalue()
    progress.stop()
    assert console.file.getvalue() == once


def test_not_fitted_replaces_scores_beyond_the_training_length():
    out = printed(final_table(dict(tasks=TABLES, runs=[make_run("kback", "none", fitted=False)])))
    assert "0.97" in out and "0.41" not in out
    assert "not fitted: fails accuracy >= 0.9." in out


def test_failures_are_listed_with_their_error():
    out = printed(
        final_table(dict(tasks=TABLES, runs=[make_run("kback", "none"), failed("kback", "rope")]))
    )
    assert "kback, rope failed: ValueError: [red]NaN" in out and "more" not in out


def test_table_of_failures_only():
    assert "failed: ValueError" in printed(
        final_table(dict(tasks=TABLES, runs=[failed("kback", "rope")]))
    )
    assert printed(final_table(dict(tasks=TABLES, runs=[]))).strip() == ""


@pytest.mark.parametrize("width", [20, 40, 60, 80, 100, 200])
def test_table_fits_any_width(width):
    results = dict(tasks=TABLES, runs=[make_run(*key) for key in PLAN])
    out = printed(final_table(results, width), width=width)
    assert max(map(len, out.splitlines())) <= width
    if width >= 40:
        assert "0.97" in out and "3.456" in out and "…" not in out


def test_seven_schemes_fit_eighty_columns():
    schemes = ("none", "learned", "sinusoidal", "shaw", "t5", "alibi", "rope")
    runs = [make_run(task, s, fitted=s != "t5") for task in ("kback", "text") for s in schemes]
    assert "…" not in printed(final_table(dict(tasks=TABLES, runs=runs)))


def test_time_left_follows_measured_times():
    left = TimeLeft({"kback": 10.0, "text": 10.0})
    assert left.of_plan(["kback", "kback", "text", "text"]) == pytest.approx(40)
    left.learn("kback", 20.0)  # twice as long as was guessed
    assert left.of_plan(["kback", "text", "text"]) == pytest.approx(60)
    assert left.of_plan(["kback", "text"], elapsed=15.0) == pytest.approx(25)
    assert left.of_plan(["kback"], elapsed=90.0, fraction=0.5) > 0
    assert left.of_plan([]) == 0


def test_time_left_by_task():
    left = TimeLeft({"kback": 5.0, "text": 30.0})
    assert left.of_plan(["kback", "text"]) == pytest.approx(35)


def test_earlier_runs_do_not_change_the_estimate():
    console = Console(file=io.StringIO(), width=80)
    with Progress(LABELS, console) as progress:
        progress.start(PLAN, {"kback": 100.0, "text": 100.0})
        progress.finish(make_run("kback", "none"))
        assert "done before (about 5 min 0 s left)" in console.file.getvalue()


def test_elapsed_time_restarts_with_each_run(monkeypatch):
    now = [0.0]
    monkeypatch.setattr("experiments.progress.time.monotonic", lambda: now[0])
    console = Console(file=io.StringIO(), width=80)
    with Progress(LABELS, console) as progress:
        progress.start(PLAN[:2], {"kback": 30.0})
        progress.update("kback", "none", step=1, steps=2, loss=1.0)
        now[0] = 10.0
        progress.finish(make_run("kback", "none"))
    assert "loss 0.250; 10 s (about 10 s left)" in console.file.getvalue()
