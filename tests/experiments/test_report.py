"""The report: one self-contained page, with captions computed from results."""

import copy
import itertools
import json
import math
import os
import re
import xml.etree.ElementTree as ElementTree
from html.parser import HTMLParser

import pytest

from experiments import plots, tables
from experiments.errors import ConfigError, ResultsError
from experiments.plot_labels import spread
from experiments.report import render, write_plot, write_report
from experiments.tasks import TASKS

LENGTHS = {"kback": (32, 64, 128), "kth": (32, 64, 128), "text": (128, 256, 512)}
ERROR = 'ValueError: loss is NaN <script>alert("x")</script> & more\nTraceback </pre>'


def make_run(task, scheme, seeds=1, fitted=True):
    """A run that worked, with numbers made up from the names."""
    level = 0.9 - 0.01 * len(scheme)
    evaluations = []
    for mode in ("nonoverlapping", "sliding") if task == "text" else ("plain",):
        for variant in (None, "ntk") if (task, scheme) == ("text", "rope") else (None,):
            for i, length in enumerate(LENGTHS[task]):
                evaluations.append(
                    dict(
                        metric="bits_per_byte" if task == "text" else "accuracy",
                        mode=mode,
                        length=length,
                        values=[level - 0.1 * i + 0.01 * seed for seed in range(seeds)],
                        in_distribution=i == 0,
                        variant=variant,
                        note="rows never trained" if scheme == "learned" and i else None,
                    )
                )
    return dict(
        task=task,
        scheme=scheme,
        scheme_repr=f"{scheme}(num_heads=4)",
        status="done",
        error=None,
        seeds=list(range(seeds)),
        steps=300,
        learning_rate=0.003,
        train_length=LENGTHS[task][0],
        parameters=12345,
        compile_seconds=3.2,
        train_seconds=9.0 if scheme == "none" else 9.9,
        cpu_seconds=18.0,
        memory_bytes=5 * 2**20,
        final_loss=[0.1] * seeds,
        curve=dict(step=[100, 200, 300], loss=[[2.0] * seeds, [1.0] * seeds, [0.1] * seeds]),
        fitted=fitted,
        fit_rule="accuracy at the training length >= 0.9",
        evaluations=evaluations,
    )


def make_results(seeds=1):
    runs = [
        make_run(task, scheme, seeds, fitted=(task, scheme) != ("kback", "none"))
        for task in LENGTHS
        for scheme in ("none", "learned", "rope", "mypkg.mine:MyScheme")
    ]
    failed = dict(task="kth", scheme="shaw", status="failed", error=ERROR, evaluations=[])
    return dict(
        name="compare",
        created="2026-01-02T03:04:05+00:00",
        tasks={name: json.loads(json.dumps(vars(t.labels))) for name, t in TASKS.items()},
        config=dict(seeds=seeds, kback=dict(k=4)),
        environment=dict(command="python -m experiments compare", jax="0.10.2"),
        runs=[*runs, failed],
    )


class Page(HTMLParser):
    """What a page loads, its elements' ids, its words and the JSON in it."""

    def __init__(self, html):
        super().__init__()
        self.loads, self.ids, self.words, self.json, self.tags = [], [], [], "", []
        self._inside = ""
        self.feed(html)

    def handle_starttag(self, tag, attrs):
        attributes = dict(attrs)
        self.tags.append(tag)
        self._inside = tag if tag in ("script", "style") else ""
        if self._inside == "script" and attributes.get("type") != "application/json":
            self._inside = "program"
        self.ids += [attributes["id"]] if "id" in attributes else []
        names = ("src", "href", "xlink:href", "data", "srcset", "action")
        self.loads += [attributes[name] for name in names if attributes.get(name)]

    def handle_endtag(self, tag):
        self._inside = ""

    def handle_data(self, data):
        if self._inside == "script":
            self.json += data
        elif not self._inside:
            self.words.append(data)

    @property
    def text(self):
        return " ".join(" ".join(self.words).split())


@pytest.fixture(scope="module")
def html():
    return render(make_results())


@pytest.fixture(scope="module")
def page(html):
    return Page(html)


def test_report_is_self_contained(html, page):
    assert all(link.startswith("#") for link in page.loads)
    assert not re.search(r"https?://|@import|url\((?!#)", html)
    assert not {"link", "img", "iframe", "object", "base"} & set(page.tags)
    assert not re.search(r"\son[a-z]+=", html)


def test_the_summary_has_paired_differences_with_intervals():
    results = make_results(seeds=3)
    for run in results["runs"]:
        for e in run["evaluations"] if run["scheme"] == "learned" else []:
            e["values"] = [e["values"][0] + x for x in (0.0, 0.03, 0.02)]
    text = Page(render(results)).text
    # learned - rope: -0.03 plus (0.00, 0.02, 0.00), whose mean has t * s / sqrt(3) = 0.0287.
    assert "learned 0.847 [0.809, 0.885] -0.023 [-0.052, +0.005]" in text
    none = text.index("none 0.870 [0.845, 0.895] +0.000")
    assert none < text.index("MyScheme 0.720 [0.695, 0.745] -0.150 [-0.150, -0.150]")
    assert "none 0.870 [0.845, 0.895] +0.000 [+0.000, +0.000] rope" in text  # Did not fit at 128.
    text = Page(render(results, "learned")).text
    assert "rope 0.870 [0.845, 0.895] +0.023 [-0.005, +0.052]" in text
    assert "Summary" not in Page(render(make_results())).text  # One seed has no intervals.


def test_a_baseline_without_runs_is_refused(tmp_path):
    (tmp_path / "results.json").write_text(json.dumps(make_results(seeds=2)))
    with pytest.raises(ConfigError, match=r"--baseline: 'rpoe' is not among the runs.*rope"):
        write_report(tmp_path, "rpoe")
    assert "minus learned" in write_report(tmp_path, "learned").read_text()


def test_maps_are_those_of_the_main_way_of_evaluating():
    results = make_results()
    for run in results["runs"]:
        main = [e for e in run["evaluations"] if e["mode"] == "plain"]
        run["evaluations"] += [dict(e, mode="sparse", places=[0.1] * 4) for e in main[1:]]
        for e in main:
            e["places"] = [0.9] * 4
    found = tables.places(results, "kback")
    assert found["rope"] == {length: [0.9] * 4 for length in LENGTHS["kback"]}


def test_runs_with_other_seeds_are_not_paired():
    results = make_results(seeds=3)
    run = next(run for run in results["runs"] if run["scheme"] == "learned")
    run["seeds"] = [0, 1, 7]
    values, differences = tables.paired(results, "kback", "plain", 32, "rope")["learned"]
    assert len(values) == 3 and differences == []
    assert len(tables.paired(results, "kback", "plain", 32, "rope")["rope"][1]) == 3


def test_maps_of_scores_have_the_schemes_that_fitted():
    results = make_results(seeds=2)
    assert not plots.maps(results, "kback")  # Results of earlier versions.
    for run in results["runs"]:
        for e in run["evaluations"]:
            if e["mode"] in ("plain", "nonoverlapping"):
                e["places"] = [None] * 8 + [e["values"][0]] * 8
    svg = plots.maps(results, "kback")
    assert all(f">{name}<" in svg for name in ("learned", "rope", "MyScheme"))
    assert ">none<" not in svg
    html = render(results)
    ElementTree.fromstring(plots.standalone(svg))
    assert not {link for link in Page(html).loads if not link.startswith("#")}
    assert html.count("by length and place") == 3 and html.count("Orange lines") == 3


def test_ids_are_unique_and_references_resolve(page):
    assert len(set(page.ids)) == len(page.ids)
    assert {link[1:] for link in page.loads} <= set(page.ids)


def test_report_embeds_results_as_json(page):
    assert json.loads(page.json) == make_results()


def test_report_names_command_and_runs(page):
    for words in ("compare: position", "12 runs done", "1 failed", "kback.k", "0.10.2"):
        assert words in page.text
    assert "python -m experiments compare" in page.text
    assert "One seed: the spread between seeds is unknown" in page.text


def test_scores_beyond_the_training_length_need_fitting(page):
    grid = tables.grid(make_results(), "kback")
    none = next(row for row in grid.rows if row.scheme == "none")
    assert [cell.kind for cell in none.cells] == ["value", "unfitted", "unfitted"]
    assert not any(cell.best for cell in none.cells[1:])
    assert "Not fitted: none;" in page.text
    assert "none (not fitted)" in page.text


def test_captions_are_computed_from_results(page):
    # learned: 0.83 at 32, 0.63 at 128. `none` is left out, since it did not fit.
    caption = next(iter(re.findall(r"Change in accuracy.*?\.(?=\D)", page.text)))
    assert "from 32 to 128" in caption and "learned -0.20" in caption
    assert "none" not in caption


def test_variants_notes_and_own_schemes_are_rows(page):
    grid = tables.grid(make_results(), "text", "sliding")
    assert [row.label for row in grid.rows] == ["none", "learned", "rope", "rope + NTK", "MyScheme"]
    assert grid.rows[1].cells[1].note == 1
    assert "† rows never trained" in page.text


def test_cost_is_a_table_and_a_plot_per_task(page):
    assert "rope 12,345 33.0 1.10 5.0 3.2 9.9 18.0 0.100" in page.text
    drawn = page.text.count("time of a training step, relative to none")
    assert drawn == len(LENGTHS) and "accuracy at 32" in page.text


def test_modes_share_one_range():
    svgs = [plots.lengths(make_results(), "text", m) for m in ("nonoverlapping", "sliding")]
    ticks = [re.findall(r"<text[^>]*>([\d.]+)</text>", svg) for svg in svgs]
    assert ticks[0] and ticks[0] == ticks[1]


def test_seeds_are_shown_with_their_spread():
    page = Page(render(make_results(seeds=3)))
    assert "means of 3 seeds" in page.text
    assert "0.83\u20130.85" in page.text  # learned at the training length


def test_errors_are_text_not_markup(html, page):
    assert "<script>alert" not in html
    assert 'loss is NaN <script>alert("x")</script> & more' in page.text
    assert page.tags.count("script") == 2  # The program and the data.


def test_report_is_reproducible(html):
    assert render(make_results()) == html


def test_colours_and_markers_are_unique():
    looks = plots.looks(["rope", "none", "t5"])
    assert looks["none"][0] == plots.BASELINE
    assert looks == plots.looks(["rope", "t5"])
    assert len(set(plots.looks([f"s{i}" for i in range(19)]).values())) == 20


@pytest.mark.parametrize(
    "change",
    [
        lambda r: r.update(runs=[]),
        lambda r: r.update(runs=r["runs"][:1]),
        lambda r: r.update(runs=r["runs"][-1:]),
        lambda r: r.update(runs=[run for run in r["runs"] if run["scheme"] != "none"]),
        lambda r: [run.update(evaluations=[], curve=None, final_loss=None) for run in r["runs"]],
        lambda r: [run.pop(key, None) for run in r["runs"] for key in ("cpu_seconds", "fit_rule")],
        lambda r: [r.pop(key) for key in ("created", "config", "environment", "name")],
    ],
    ids=["nothing", "one run", "one failure", "no baseline", "no numbers", "old", "no header"],
)
def test_incomplete_results_render(change):
    results = make_results()
    change(results)
    page = Page(render(results))
    assert json.loads(page.json) == results
    assert "None" not in page.text and "nan" not in page.text


def test_non_finite_numbers_render_as_nan():
    results = make_results()
    run = copy.deepcopy(results["runs"][1])
    run["evaluations"][1]["values"] = [math.nan]
    run["curve"]["loss"] = [[2.0], [math.inf], [math.nan]]
    results["runs"][1] = run
    page = Page(render(results))
    data = json.loads(page.json, parse_constant=pytest.fail)
    assert data["runs"][1]["evaluations"][1]["values"] == [None]
    assert "nan" in page.text


def test_write_report(tmp_path):
    (tmp_path / "results.json").write_text(json.dumps(make_results()), encoding="utf-8")
    path = write_report(tmp_path)
    assert path == tmp_path / "report.html"
    assert path.read_text(encoding="utf-8") == render(make_results())
    assert sorted(os.listdir(tmp_path)) == ["report.html", "results.json"]


@pytest.mark.parametrize("text", ["{", "[]", '{"runs": 3}', ""])
def test_damaged_results_keep_the_old_report(tmp_path, text):
    (tmp_path / "report.html").write_text("old")
    (tmp_path / "results.json").write_text(text)
    with pytest.raises(ResultsError, match=r"results\.json"):
        write_report(tmp_path)
    assert (tmp_path / "report.html").read_text() == "old"
    assert len(os.listdir(tmp_path)) == 2


def test_failed_write_keeps_the_old_report(tmp_path, monkeypatch):
    (tmp_path / "report.html").write_text("old")
    (tmp_path / "results.json").write_text(json.dumps(dict(runs=[])))
    monkeypatch.setattr(os, "replace", lambda *_: (_ for _ in ()).throw(OSError("disk full")))
    with pytest.raises(ResultsError, match="disk full"):
        write_report(tmp_path)
    assert (tmp_path / "report.html").read_text() == "old"
    assert len(os.listdir(tmp_path)) == 2


@pytest.mark.parametrize(
    "wanted", [[], [5.0], [0.0] * 5, [9.9] * 9, [1.0, 2.0, 2.1, 9.0], [-3, 40]]
)
def test_spread_keeps_labels_apart(wanted):
    places = spread(wanted, gap=1.0, room=10.0)
    assert all(b - a >= 1.0 - 1e-9 for a, b in itertools.pairwise(places))
    assert all(-1e-9 <= place <= 10.0 + 1e-9 for place in places)


def test_plot_is_a_standalone_svg(tmp_path):
    results = make_results()
    (tmp_path / "results.json").write_text(json.dumps(results))
    target = write_plot(tmp_path, tmp_path / "docs" / "length.svg")
    root = ElementTree.fromstring(target.read_text())
    assert root.tag == "{http://www.w3.org/2000/svg}svg"
    assert "currentColor" not in target.read_text()
    (tmp_path / "results.json").write_text(json.dumps(results | {"runs": []}))
    with pytest.raises(ResultsError, match="no evaluation of any task"):
        write_plot(tmp_path, target)
