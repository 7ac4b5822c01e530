"""The report: one page that loads nothing, with tables and plots of results."""

import dataclasses
import html as html_module
import itertools
import math
import re
import xml.etree.ElementTree as ElementTree

import pytest

from experiments.pages import plots, tables
from experiments.pages.page import as_html, plain
from experiments.pages.report import conclusions
from experiments.pages.report import render as whole_page
from experiments.runs import scores
from experiments.runs.experiment import load
from experiments.settings.common import Rates
from tests.experiments.result_rows import LENGTHS, make_row
from tests.support import slow

ERROR = 'ValueError: loss is NaN <script>alert("x")</script> & more\n\n* Traceback </pre>'


def make_results(seeds=1):
    """Returns the rows of a comparison, with one scheme that raised."""
    rows = [
        make_row(task, scheme, seeds, fitted=(task, scheme) != ("kback", "none"))
        for task in LENGTHS
        for scheme in ("none", "learned", "rope", "mypkg.mine:MyScheme")
    ]
    return [*rows, make_row("kth", "shaw", raised=ERROR)]


def make_resolved():
    """Of three seeds: learned differs from RoPE by another amount in each."""
    differs = {"scores": lambda view, i, n: 0.83 + (0.0, 0.03, 0.02)[n]}
    return [
        make_row(row.section, row.scheme, 3, **differs) if row.scheme == "learned" else row
        for row in make_results(seeds=3)
    ]


def render(results, baseline=None):
    settings = {"seeds": 1, "kback": {"k": 4}}
    return whole_page("compare", results, "python -m experiments compare", settings, baseline)


def words_of(html):
    """The text of a page."""
    text = re.sub(r"<style>.*?</style>|<[^>]*>", " ", html, flags=re.DOTALL)
    return " ".join(html_module.unescape(text).split())


@pytest.fixture
def undrawn(monkeypatch):
    monkeypatch.setattr(plots, "drawing", lambda *_: "<svg/>")


@pytest.fixture(scope="module")
def html():
    return render(make_results())


@pytest.fixture(scope="module")
def text(html):
    return words_of(html)


def test_the_page_loads_nothing_and_is_reproducible(html):
    links = re.findall(r'\b(?:src|href|xlink:href|data|srcset|action)="([^"]*)"', html)
    assert links and all(link.startswith("#") for link in links)
    assert not re.search(r"https?://|@import|url\((?!#)|<script|<link|<img|<iframe", html)
    ids = re.findall(r'\bid="([^"]*)"', html)
    assert len(set(ids)) == len(ids) and {link[1:] for link in links} <= set(ids)
    assert render(make_results()) == html


def test_errors_and_names_are_text(html, text):
    assert "<script>alert" not in html
    assert 'loss is NaN <script>alert("x")</script> & more * Traceback </pre>' in text
    hostile = '![x](https://x.y) <img src="z"> [a](b) *c* | `d` & e\n# f'
    page = as_html(f"# Title\n\n| a |\n|---|\n| {plain(hostile)} |\n", {})
    assert "<img" not in page and "<a" not in page and "<em>" not in page and "<h1>f" not in page
    assert words_of(page).endswith(" ".join(hostile.split()))
    page = as_html("# T\n\n[a](b.csv) [c](#d) [e](https://f.g) ![h](i.svg)\n", {}, "../docs")
    assert re.findall('(?:href|src)="(.*?)"', page) == ["../docs/b.csv", "#d", "https://f.g"]


def test_the_page_names_command_and_runs(text):
    for words in ("compare: position", "12 runs done", "1 failed", "kback.k = 4", "jax = 0.10.2"):
        assert words in text
    assert "python -m experiments compare" in text
    assert "One seed: no ranking follows" in text
    assert "† beyond the trained length a learned table" in text
    assert "†" not in words_of(render([make_row("kback", "rope")]))


def test_the_summary_has_paired_differences_with_intervals(undrawn):
    results = make_resolved()
    text = words_of(render(results))
    assert "means of 3 seeds" in text
    # learned - rope: -0.03 plus (0.00, 0.02, 0.00), whose mean has t * s / sqrt(3) = 0.0287.
    assert "learned 0.847 [0.809, 0.885] -0.023 [-0.052, +0.005]" in text
    none = text.index("none 0.870 [0.845, 0.895] +0.000")
    assert none < text.index("MyScheme 0.720 [0.695, 0.745] -0.150 [-0.150, -0.150]")
    assert "none 0.870 [0.845, 0.895] +0.000 [+0.000, +0.000] rope" in text  # Did not fit at 128.
    text = words_of(render(results, "learned"))
    assert "rope 0.870 [0.845, 0.895] +0.023 [-0.005, +0.052]" in text
    assert "0.83\u20130.86" in text  # learned at the training length
    assert "Summary" not in words_of(render(make_results()))  # One seed has no intervals.


def test_the_page_begins_with_what_is_missing(text, undrawn):
    assert "so far" not in text
    row = make_row("kback", "rope", 3)
    rows = [dataclasses.replace(row, results=row.results[:1]), make_row("kth", "rope")]
    rows += [dataclasses.replace(make_row("kth", "none"), results=())]
    text = words_of(whole_page("mine", rows, "command"))
    assert "Without a result so far: kback: rope (1 of 3 seeds); kth: none." in text
    assert "2 runs done" in text


def test_scores_as_text():
    names = itertools.product(("kback", "text"), ("rope", "t5"))
    rows = [make_row(task, name, 2, fitted=name != "t5") for task, name in names]
    rows += [make_row("kback", "none", 2, error="the loss is not finite")]
    rows += [
        make_row("text", "learned", 2),
        make_row("text", "none", raised="ValueError: NaN\nmore"),
    ]
    table, second, rest = tables.as_text(rows).split("\n\n")
    assert table.splitlines() == [
        "kback               32*      64     128",
        "rope               0.86    0.77    0.66",
        "t5 (not fitted)    0.89       -       -",
        "none             failed  failed  failed",
        "accuracy at each length, higher is better; * the training length; means of 2 seeds",
    ]
    assert "rope + NTK" in second and "0.735†" in second
    assert rest.splitlines() == [
        "- not fitted: needs accuracy at the training length >= 0.9",
        tables.UNTRAINED,
        "kback, none failed: 2 of 2 seeds: the loss is not finite",
        "text, none failed: ValueError: NaN",
    ]
    assert tables.as_text([]) == ""


def test_tasks_that_no_scheme_fitted_are_folded(undrawn):
    rows = [make_row(task, "rope", fitted=task == "kth") for task in ("kback", "kth")]
    folded, shown = re.split("<h2>k(?:back|th)</h2>", render(rows))[1:]
    assert "<details><summary>Its scores</summary>" in folded and "Not fitted: rope" in folded
    assert "<details>" not in shown.partition("<h2>")[0]


def test_schemes_with_other_seeds_are_not_paired():
    results = [make_row("kback", "rope", 3), make_row("kback", "learned", [0, 1, 7])]
    values, differences = scores.paired(results, "kback", "plain", 32, "rope")["learned"]
    assert len(values) == 3 and differences == []
    assert len(scores.paired(results, "kback", "plain", 32, "rope")["rope"][1]) == 3


def test_schemes_without_a_rate_have_that_of_rope(undrawn):
    def at_rates(row, rope):
        rates = {"rope": Rates(rope), "learned": Rates(2e-3, 10.0)}
        runs = []
        for run in row.runs:
            task = dataclasses.replace(run.task, rates=rates)
            task = task.at_rates_of(run.scheme) if run.scheme in rates else task
            runs.append(dataclasses.replace(run, task=task))
        return dataclasses.replace(row, runs=runs)

    results = make_results()
    assert "one learning rate on kback, kth, text: another" in words_of(render(results))
    for rope in (3e-3, 8e-3):  # The task has 3e-3.
        rows = [at_rates(row, rope) if row.section == "text" else row for row in results]
        text = words_of(render(rows))
        assert "one learning rate on kback, kth: another" in text
        tuned = text.count("On text no rate was tuned for none, MyScheme: RoPE's was taken.")
        assert tuned == (2 if rope == 3e-3 else 0)  # In the conclusions and with the scores.


def test_the_page_says_what_follows(request):
    results = make_resolved()
    texts = conclusions(results)
    assert not any("One seed" in text for text in texts)
    # none has RoPE's scores; those of MyScheme are 0.15 lower, which is better for bits per byte.
    assert texts[1] == "On kth at 32, against rope: behind: MyScheme; not resolved: none, learned."
    assert texts[2] == "On text at 128, against rope: ahead: MyScheme; not resolved: none, learned."
    wide = make_row("text", "alibi", 3, scores=lambda view, i, n: 2.0 + (0.0, 0.3, 0.1)[n])
    spread = "On text seeds have a standard deviation above 0.1, which a lower learning rate"
    assert f"{spread} may mend: alibi (2.000 to 2.300)." in conclusions([*results, wide])
    assert not any("deviation" in text for text in texts)
    texts = conclusions([make_row("text", name, 3, fitted=False) for name in ("rope", "MyScheme")])
    assert texts[0].startswith("On text no scheme learned the task in 400 steps, so its scores say")
    assert not any("against" in text for text in texts)
    tasks = load(request.config.rootpath / "configs" / "compare.toml").tasks

    def at(steps, corpus, scheme, **rates):
        row, rates = make_row("text", scheme), rates or tasks["text"].rates
        (run,) = row.runs
        train = dataclasses.replace(run.task.train, steps=steps, learning_rate=4e-3)
        task = dataclasses.replace(run.task, train=train, corpus=corpus, rates=rates)
        return dataclasses.replace(row, runs=(dataclasses.replace(run, task=task),))

    study = "The rates on text are the study's, chosen with 1000 steps on sotu: "
    assert f"{study}with 400 steps on sotu none is tuned." in conclusions(
        [at(400, "sotu", "rope"), at(400, "sotu", "alibi")]
    )
    texts = conclusions([at(1000, "docs.md", "rope"), at(1000, "docs.md", "mypkg.mine:My")])
    assert "On text no rate was tuned for My: RoPE's was taken." in texts
    assert texts[-2].endswith("with 1000 steps on docs.md none is tuned.")
    for rows in (
        [at(1000, "sotu", "rope"), at(1000, "sotu", "alibi")],
        [at(400, "sotu", "rope", rope=Rates(4e-3))],
    ):
        assert not any("tuned" in text for text in conclusions(rows))


@slow
def test_maps_of_scores_have_the_schemes_that_fitted():
    results = make_results(seeds=2)
    assert not plots.maps(results, "kback")
    results = []
    for row in make_results(seeds=2)[:-1]:
        places = {
            str(n): [None] * 8 + [0.9 - 0.1 * i] * 8 for i, n in enumerate(LENGTHS[row.section])
        }
        results.append(make_row(row.section, row.scheme, 2, fitted=row.fitted, places=places))
    assert scores.places(results, "kback")["rope"][64][8:] == pytest.approx((0.8,) * 8)
    svg = plots.maps(results, "kback")
    assert all(f">{name}<" in svg for name in ("learned", "rope", "MyScheme"))
    assert ">none<" not in svg
    ElementTree.fromstring(plots.standalone(svg))
    html = render(results)
    assert html.count("by length and place") == 3 and html.count("Orange lines") == 3


def test_scores_beyond_the_training_length_need_fitting(text):
    grid = tables.grid(make_results(), "kback", "plain")
    none = next(row for row in grid.rows if row.label == "none (not fitted)")
    assert [cell.kind for cell in none.cells] == ["value", "unfitted", "unfitted"]
    assert not any(cell.best for cell in none.cells[1:])
    assert "Not fitted: none;" in text and "none (not fitted)" in text
    grid = tables.grid(make_results(), "text", "nonoverlapping")
    assert [row.label for row in grid.rows] == ["none", "learned", "rope", "rope + NTK", "MyScheme"]
    assert [cell.untrained for cell in grid.rows[1].cells] == [False, True, True]


def test_schemes_that_end_far_apart_have_two_panels():
    def scores(height):
        return lambda view, i, n: height + 0.1 * i

    heights = {"none": 4.0, "rope": 2.1, "learned": 2.3}
    rows = [make_row("text", name, scores=scores(height)) for name, height in heights.items()]
    for split, among, count in ((True, rows, 2), (False, rows, 1), (True, rows[1:2], 1)):
        svg = plots.lengths(among, "text", "sliding", split=split)
        assert svg.count('id="lengths-text-sliding-axes_') == count
        assert svg.count(">rope<") == 1  # In the panel in which it ends.


@pytest.mark.parametrize(
    "results",
    [
        [],
        make_results()[:1],
        make_results()[-1:],
        [row for row in make_results() if row.scheme != "none"],
        [make_row("kback", "rope", curve={}, parameters=None, memory_bytes=None, fit_rule="")],
        [make_row("kback", "rope", error="the loss is not finite at step 10")],
    ],
    ids=["nothing", "one run", "one failure", "no baseline", "no numbers", "diverged"],
)
def test_incomplete_results_render(results):
    text = words_of(render(results))
    assert "How it was made" in text and "None" not in text and "nan" not in text


def test_scores_that_are_not_finite_are_counted():
    """At 128 the second of three seeds has none: no mean, least, greatest or interval is left."""
    loss = {"step": [100, 200, 300], "loss": [2.0, math.inf, math.nan]}
    results = [make_row("kback", "rope", scores=lambda view, i, n: math.nan, curve=loss)]
    assert f"rope {' '.join(['no finite score in 1 of 1'] * 3)}" in words_of(render(results))
    bands = set()
    for lacking in (0, 1, 2):
        scores = lambda view, i, n: None if i == 2 and n == lacking else 0.9 - 0.1 * i  # noqa: B023, E731
        rows = [make_row("kback", "rope", 3), make_row("kback", "none", 3, scores=scores)]
        cells = tables.grid(rows, "kback", "plain").rows[1].cells
        assert [cell.text for cell in cells] == ["0.90", "0.80", "no finite score in 1 of 3"]
        assert [bool(cell.spread) for cell in cells] == [True, True, False]
        assert tables.grid(rows, "kback", "plain").rows[0].cells[2].kind == "value"
        line = tables.as_text(rows).splitlines()[2]
        assert line.split() == "none 0.90 0.80 no finite score in 1 of 3".split()
        html = render(rows)
        text = words_of(html)
        assert "<td>no finite score in 1 of 3</td>" in re.sub(r' style="[^"]*"', "", html)
        assert "none 0.900 [0.900, 0.900] +0.030 [+0.005, +0.055] no finite score in 1 of 3" in text
        assert "nan" not in text and "diverged" not in text
        bands.add(plots.lengths(rows[1:], "kback", "plain"))
    assert len(bands) == 1  # Bands have no place where a seed has none, whichever it is.


def test_schemes_without_all_scores_are_last(undrawn):
    levels = {"rope": 0.5, "none": math.nan, "learned": 0.9, "mypkg.mine:MyScheme": 0.7}

    def row(name):
        return make_row("kback", name, 2, scores=lambda view, i, n: levels[name] if n else 0.5)

    for names in (("none", "rope", "mypkg.mine:MyScheme", "learned"), tuple(levels)[::-1]):
        summary = words_of(render([row(name) for name in names])).partition("Summary")[2]
        order = re.findall("(?:learned|rope|none|MyScheme) (?=0|no)", summary)[:4]
        assert "".join(order) == "learned MyScheme rope none "


def test_means_say_how_many_seeds_they_have():
    rows = [make_row("kback", name, 3) for name in ("rope", "none")]
    rows[1] = dataclasses.replace(rows[1], results=rows[1].results[:2])
    assert "means of 2 to 3 seeds" in tables.as_text(rows)
    text = words_of(render(rows))
    assert "means of 2 to 3 seeds, with" in text and "higher is better, 2 to 3 seeds" in text
    svg = plots.curves([make_row("kback", "rope", 2)], "kback")
    assert ">rope<" in svg
    row = make_row("kback", "rope", 2)
    diverged = dataclasses.replace(row.results[1], status="diverged", scores={}, curve={})
    row = dataclasses.replace(row, results=(row.results[0], diverged))
    assert ">rope (1 of 2 seeds)<" in plots.curves([row], "kback")


def test_the_main_scores_are_first_though_others_have_more_lengths():
    row = make_row("text", "rope", seeds=2)
    for result in row.results:
        result.scores["sliding"] |= {"32": 1.0, "64": 1.0}
        del result.scores["ntk"]["128"]  # Variants have no score at the trained length.
    assert tables.grid([row], "text", "nonoverlapping").rows[1].cells[0] == tables.Cell()
    assert scores.modes([row], "text") == ["nonoverlapping", "sliding"]
