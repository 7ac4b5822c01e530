"""Progress: lines in a pipe, a live table on a terminal."""

import io

import pytest
from rich.console import Console

from experiments.pages.progress import Progress, TimeLeft
from experiments.pages.terminal import final_table
from experiments.runs.run_queue import Ended, Step
from tests.experiments.result_rows import make_row

PLAN = [("kback", "none"), ("kback", "rope"), ("text", "none"), ("text", "rope")]


def printed(text, width=80, **options):
    console = Console(file=io.StringIO(), width=width, **options)
    console.print(text)
    return console.file.getvalue()


def make_rows(**options):
    return [make_row(*key, **options) for key in PLAN]


def failed():
    return make_row("kback", "rope", raised="ValueError: [red]NaN\nmore")


def follow(console, rows, known=()):
    runs = [run for row in rows for run in row.runs]
    results = {run.name: result for row in rows for run, result in row.ended}
    with Progress(console) as progress:
        progress.plan(runs, {name: results[name] for name in known})
        for run in runs:
            if run.name not in known:
                progress.update(Step(run.name, step=150, loss=2.5))
                progress.finish(Ended(run.name, results.get(run.name), "ValueError: NaN", 10.0))
        progress.message("a [message]")
    return console.file.getvalue()


def test_pipe_prints_lines_and_one_table():
    out = follow(Console(file=io.StringIO(), width=80), make_rows())
    lines = out.splitlines()
    assert lines[0].startswith("[1/4] kback none: loss 0.100; 10 s (about ")
    assert lines[0].endswith("left)")
    assert lines[3].startswith("[4/4] text rope:") and "left" not in lines[3]
    assert lines[4] == "a [message]"
    assert out.count("kback") == 2 + 2  # Two lines, the table's head, one note.
    assert "\x1b" not in out and "\r" not in out
    assert "0.86" in out and "0.860" in out


def test_seeds_are_runs_and_earlier_ones_are_counted():
    rows = [make_row("kback", scheme, seeds=2) for scheme in ("none", "rope")]
    known = [rows[0].runs[0].name]
    out = follow(Console(file=io.StringIO(), width=80), rows, known)
    assert out.startswith("1 of 4 runs were done before.\n[2/4] kback none, seed 1: loss")
    assert "Means of 2 seeds." in out


def test_terminal_shows_live_table(monkeypatch):
    monkeypatch.delenv("NO_COLOR", raising=False)
    monkeypatch.setenv("TERM", "xterm-256color")
    console = Console(file=io.StringIO(), width=80, height=40, force_terminal=True)
    runs = [run for row in make_rows() for run in row.runs]
    with Progress(console) as progress:
        progress.plan(runs, {})
        progress.update(Step(runs[0].name, step=100, loss=2.5))
        shown = printed(progress._render())
        assert "0 of 4 runs" in shown and "left" in shown
        assert "kback none: step 100 of 300, loss 2.500" in shown
        progress.finish(Ended(runs[0].name, make_rows()[0].first, "", 10.0))
        shown = printed(progress._render())
        assert "1 of 4 runs" in shown and "0.86" in shown
        assert any("rope" in line and "·" in line for line in shown.splitlines())
    end = printed(progress._render())
    assert "runs" not in end and "0.86" in end
    assert "\x1b[?25h" in console.file.getvalue(), "the cursor was not given back"


def test_no_color_disables_colours(monkeypatch):
    results = [make_row("kback", "none"), failed()]
    console = dict(force_terminal=True, color_system="standard")
    assert "\x1b[31m" in printed(final_table(results), **console, no_color=False)
    monkeypatch.setenv("NO_COLOR", "1")
    assert "\x1b[31m" not in printed(final_table(results), **console)


def test_an_interrupt_prints_finished_runs_once():
    console = Console(file=io.StringIO(), width=80)
    (run,) = make_rows()[0].runs
    with pytest.raises(KeyboardInterrupt), Progress(console) as progress:
        progress.plan([run], {})
        progress.finish(Ended(run.name, make_rows()[0].first, "", 10.0))
        raise KeyboardInterrupt
    once = console.file.getvalue()
    progress.stop()
    assert "0.86" in once and console.file.getvalue() == once


def test_not_fitted_replaces_scores_beyond_the_training_length():
    out = printed(final_table([make_row("kback", "none", fitted=False)]))
    assert "0.86" in out and "0.66" not in out
    assert "not fitted: fails accuracy at the training length >= 0.9." in out


def test_failures_are_listed_with_their_error():
    out = printed(final_table([make_row("kback", "none"), failed()]))
    assert "kback, rope failed: ValueError: [red]NaN" in out and "more" not in out
    diverged = make_row("kback", "rope", seeds=2, error="the loss is not finite")
    out = printed(final_table([make_row("kback", "none", seeds=2), diverged]))
    assert "kback, rope failed: 2 of 2 seeds: the loss is not finite" in out
    assert "failed: ValueError" in printed(final_table([failed()]))
    assert printed(final_table([])).strip() == ""


@pytest.mark.parametrize("width", [20, 40, 60, 80, 100, 200])
def test_table_fits_any_width(width):
    out = printed(final_table(make_rows(), width), width=width)
    assert max(map(len, out.splitlines())) <= width
    if width >= 40:
        assert "0.86" in out and "0.660" in out and "…" not in out


def test_seven_schemes_fit_eighty_columns():
    schemes = ("none", "learned", "sinusoidal", "shaw", "t5", "alibi", "rope")
    rows = [make_row(task, s, fitted=s != "t5") for task in ("kback", "text") for s in schemes]
    assert "…" not in printed(final_table(rows))


def test_time_left_follows_measured_times():
    left = TimeLeft({"kback": 10.0, "text": 10.0})
    assert left.of_plan(["kback", "kback", "text", "text"]) == pytest.approx(40)
    left.learn("kback", 20.0)  # Twice as long as was guessed.
    assert left.of_plan(["kback", "text", "text"]) == pytest.approx(60)
    assert left.of_plan(["kback", "text"], [0.75]) == pytest.approx(25)
    assert left.of_plan([]) == 0
    left = TimeLeft({"kback": 5.0, "text": 30.0})
    assert left.of_plan(["kback", "text"]) == pytest.approx(35)
