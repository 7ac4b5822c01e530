"""Numbers of docs/choose.md, docs/evidence.md and README.md's decisions are committed results.

The numbers of studies and claims are compared with the results themselves in tests/experiments.
"""

import csv
import itertools
import json
import re

import numpy as np
from scipy import stats

from experiments.runs.results import packed
from experiments.stats import holm
from posenc_jax.hf.model_types import MODEL_TYPES
from tests.docs import pages


def number(cell):
    """The mean of a cell such as `2.130 [2.048, 2.212]` or `**10 x: -0.023**`, or its text."""
    try:
        return float(cell.rpartition(": ")[2].strip("* ").split(" ")[0])
    except ValueError:
        return cell.strip()


def rows(text):
    """The tables of a text: {(first cell, column): value}; empty cells are left out."""
    cells = {}
    for head, body in re.findall(r"(?m)^\| (.*) \|\n\|[-:| ]+\|\n((?:\|.*\|\n)+)", text):
        columns = [c.strip() for c in head.split("|")[1:]]
        for line in body.splitlines():
            first, *values = (c.strip() for c in line.strip("|").split("|"))
            named = zip(columns, values, strict=False)
            cells |= {(first.strip("`"), c): number(v) for c, v in named if v}
    return cells


def cells_of(name, size):
    """The numbers of a study at a size: {(scheme, column): text}."""
    lines = [line for line in lines_of(name) if line.get("size", size) == size]
    return {(line["scheme"], c): v for line in lines for c, v in line.items() if v}


def numbers_of(name, size):
    return {key: number(text) for key, text in cells_of(name, size).items()}


def lines_of(name):
    """The lines of a CSV file, as dicts."""
    return [*csv.DictReader(pages.read(f"docs/{name}.csv").splitlines())]


SMALL = numbers_of("study", "small")
CATALOGUE = pages.read("docs/study_catalogue.md")
SCORES = {(x["claim"], x["name"]): x for x in lines_of("results") if x["kind"] == "score"}
AGREEMENT = {x["case"]: x["greatest difference of logits"] for x in lines_of("models_agreement")}
CLOCK = json.loads(pages.read("results/gpu/first/clock.json"))["steps"]["25 million"]
GAINS = rows(pages.read("docs/methods.md"))
"""Among others, what 512 bytes are worth over 64."""
TRAINED, LONGEST = "score", "nonoverlapping 1024"
DIFFERENCE = "difference to rope"
WORTH = "512 over 64"


CORPORA = {
    name: numbers_of("study_corpora", name) for name in ("speeches", "code", "wordings", "tunes")
}


def slides(scheme):
    """The greatest loss in sliding windows of 4 times the length, of a corpus, which is tunes."""
    losses = {n: x[scheme, "sliding 512"] - x[scheme, "sliding 128"] for n, x in CORPORA.items()}
    assert max(losses, key=losses.get) == "tunes" or max(losses.values()) < 5e-4
    return max(losses.values())


def claim(name, run, length):
    return number(SCORES[name, run][f"at {length}"])


def varied(table, variant, length=1024):
    """What trained models with RoPE lose with a variant."""
    return table["rope", f"rope + {variant} {length}"]


def change(scheme):
    """What a scheme of the study loses at 8 times the length."""
    return SMALL[scheme, LONGEST] - SMALL[scheme, TRAINED]


def scores_of(name):
    """The scores of a study of lengths by method, view and length."""
    rows = [x for x in lines_of(name) if x["kind"] == "score"]
    return {(x["name"], x["view"], x["length"]): x for x in rows}


def of_gemma3():
    """The nats of answers at 1.4 times the length of Gemma 3, of six documents each."""
    scores, names = scores_of("lengths_gemma3"), ("yarn", "self_extend", "dual_chunk")
    window = "sinks_4_window_32764"
    rows = {name: scores[name, "answer", "45056"] for name in ("rope", *names, window)}
    assert {row["documents"] for row in rows.values()} == {"6"}
    nats = {name: float(row["mean"]) for name, row in rows.items()}
    three = sorted(nats[name] for name in names)
    return (
        "at 1.4 times the length of Gemma 3 270M an answer costs Self-Extend, DualChunk and YaRN "
        f"{three[0]:.1f} to {three[-1]:.1f} nats, RoPE {nats['rope']:.1f} and that window "
        f"{nats[window]:.1f}"
    )


def beyond():
    """What methods for a released model lose to YaRN at twice its length, and in which unit."""
    scores = scores_of("lengths")
    window = "sinks_4_window_8188"

    def behind(name, view):
        rows = [scores[method, view, "16384"] for method in (name, "yarn")]
        assert len({row["documents"] for row in rows}) == 1
        return float(rows[0]["difference to rope"]) - float(rows[1]["difference to rope"])

    return (
        f"at twice SmolLM2's length Self-Extend is {-behind('self_extend', 'at'):.3f} nats per "
        f"token and {-behind('self_extend', 'answer'):.2f} nats per answer ahead of YaRN, which "
        "finds facts to 11k back, 1.4 times the length; a window of the trained length with sink "
        f"tokens has {-behind(window, 'at'):.3f} nats per token less than YaRN and "
        f"{behind(window, 'answer'):.2f} per answer more"
    )


def beyond_windows():
    """Scores in rows of 4 times the length minus RoPE's in windows of the length, with p."""
    runs = {}
    for result in packed(pages.ROOT / "results/study_context").values():
        if result.settings["text"]["train"]["steps"] == 4000:
            name = result.settings["scheme"].rpartition(":")[2]
            runs.setdefault(name, {})[result.settings["seed"]] = result.scores
    windows = {seed: scores["window"]["2048"] for seed, scores in runs["rope"].items()}
    out = {}
    for name, seeds in runs.items():
        pairs = [scores["nonoverlapping"]["2048"] - windows[s] for s, scores in seeds.items()]
        test = stats.ttest_1samp(pairs, 0.0)
        out[name] = np.mean(pairs), *test.confidence_interval(), test.pvalue
    return out


BEYOND_WINDOWS = beyond_windows()


def lead(middle, low, high):
    """A difference with its interval, as what a scheme is ahead."""
    return f"{-middle:.3f} [{-high:.3f}, {-low:.3f}]"


def ahead_of_windows(name):
    return lead(*BEYOND_WINDOWS[name][:3])


def middle_of_windows(name):
    return abs(BEYOND_WINDOWS[name][0])


CHOOSE = [
    f"{len(MODEL_TYPES)} model types",
    f"a training step takes {CLOCK['rope'] / CLOCK['none']:.2f} times as long as without",
    "tiny models then lose nothing at 8 times the length in disjoint chunks, RoPE alone "
    f"{change('rope'):.2f} bits per byte",
    "in sliding windows of 4 times the length, KERPLE loses up to "
    f"{slides('kerple'):.3f}, ALiBi {slides('alibi'):.3f} and FoX nothing",
    "at least 0.0424 L^1.628",  # Of the paper.
    f"with RoPE {claim('R07', 'rope', 32):.3f} of masked symbols are right",
    f"within {AGREEMENT['qwen2_vl']}",
    f"RoPE finds the k-th symbol in {claim('R10', 'rope', 32):.3f} of rows",
    f"ALiBi finds it in {claim('R08', 'alibi', 32):.3f} of places; after 600, at 1.5 times the "
    f"length, T5 does in {claim('R09', 't5', 48):.3f} and RoPE in {claim('R09', 'rope', 48):.3f}",
    f"{claim('R11', 'alibi', 42):.3f} of the symbols of ALiBi's copies are right at 1.25 times the "
    f"length, {claim('R11', 'alibi', 66):.3f} at twice",
    beyond(),
    of_gemma3(),
    f"T5 is {ahead_of_windows('t5')} ahead of RoPE in windows of that length and KERPLE "
    f"{ahead_of_windows('kerple')}; windows with `NoPE` layers are "
    f"{middle_of_windows('local_rope_nope'):.3f} ahead and FoX {middle_of_windows('fox'):.3f} "
    "behind, not resolved.",
    "three seeds of 0.27 million parameters",
]
README = [
    CHOOSE[1],
    "YaRN those more than 1.4 times the length back",  # Computed in test_lengths.py.
    f"at {45056 / 32768:.1f} times, `SelfExtend`, `DualChunk` and YaRN serve",
    "lose nothing at 8 times the length in disjoint chunks, with RoPE alone "
    f"{change('rope'):.2f} bits per byte",
    f"{claim('R07', 'rope', 32):.3f} of masked symbols right with RoPE, "
    f"{claim('R07', 'none', 32):.3f} without an encoding",
]
SIZES = {
    f"{size} million": numbers_of("study_sizes", f"{size} million")
    for size in ("0.1", "0.3", "0.9", "2.5")
}
TABLES = [*CORPORA.values(), *SIZES.values()]
YARN, REROPE = ([varied(table, name) for table in TABLES] for name in ("YaRN", "ReRoPE"))


def rises(tables, scheme):
    return [table[scheme, LONGEST] - table[scheme, TRAINED] for table in tables]


behind = {
    s: [numbers[s, DIFFERENCE] for numbers in CORPORA.values()] for s in ("sinusoidal", "none")
}
of_corpora = rises(CORPORA.values(), "rope")
of_sizes = rises(SIZES.values(), "rope")
((AHEAD, SCHEMES, RESOLVED, LEADERS),) = re.findall(
    r"(\d+) of (\d+) have a better mean than rope's.*? comparisons,\s(\d+) of these are ahead: "
    r"(.*)\.\n",
    CATALOGUE,
    re.DOTALL,
)
FINALISTS = rows(CATALOGUE.partition("\n## Finalists\n")[2])
OWN_SCALES = dict(re.findall(r"(\w+) ([-+]\d\.\d+) \(matters\)", CATALOGUE))
CONTEXT = numbers_of("study_context", "4,000")
STEPS = rows(pages.read("docs/study_steps.md"))
SCREEN = {x["scheme"]: x["128"] for x in lines_of("study_catalogue")}
ROPE_BY_RULE = float(SCREEN["rope"]), FINALISTS["rope", "bits per byte"]
NUMBERS_OF_STEPS = "1,000", "4,000", "16,000"


def context(scheme):
    """The scores in sliding windows of the trained length and of four times as much."""
    return "{:.3f} to {:.3f}".format(*(CONTEXT[scheme, f"sliding {n}"] for n in (512, 2048)))


def bounds(scheme):
    """The difference to RoPE and its bounds, of models that use their context."""
    cell = cells_of("study_context", "4,000")[scheme, DIFFERENCE]
    return [float(x) for x in re.findall(r"[-+]\d+\.\d+", cell)]


def ahead(scheme):
    return lead(*bounds(scheme))


def p_value(distribution, middle, low, high):
    """Of a difference, from its interval of 95 %."""
    return 2 * distribution.sf(abs(middle) / ((high - low) / 2) * distribution.ppf(0.975))


def left_by_holm(column):
    """The differences of study_steps.md after so many steps that Holm's correction leaves."""
    p_values = {}
    for line in re.findall(r"(?m)^\| \w+.* \|$", pages.read("docs/study_steps.md")):
        name, *cells = line.strip("| ").split(" | ")
        if match := re.search(r"([-+]\d.\d+) \[(\S+), (\S+)\]", cells[column]):
            p_values[name.split(",")[0]] = p_value(stats.norm, *map(float, match.groups()))
    assert len(p_values) == 9
    return holm(p_values)


def steps(scheme, sign=1):
    """The differences to the best RoPE after each number of steps."""
    first, second, last = (f"{sign * STEPS[scheme, n]:.3f}" for n in NUMBERS_OF_STEPS)
    return f"{first}, {second} and {last}"


EVIDENCE = [
    "brackets are 95 % intervals",
    f"Models of {min(SIZES).split()[0]} to {max(SIZES).split()[0]} million parameters",
    "The picture and the table have models of 0.3 million parameters on speeches.",
    f"of sinusoidal ones by {min(behind['sinusoidal']):.3f} to {max(behind['sinusoidal']):.3f} and "
    f"of none by {min(behind['none']):.3f} to {max(behind['none']):.3f}; "
    f"of learned ones by {SMALL['learned', DIFFERENCE]:.3f} on speeches",
    f"At 8 times the length it loses {min(of_corpora):.2f} to {max(of_corpora):.2f} on [four "
    f"corpora](study_corpora.md) and {min(of_sizes):.2f} to {max(of_sizes):.2f} at [four sizes]",
    f"in sliding windows of 512 bytes KERPLE loses up to {slides('kerple'):.3f} and ALiBi "
    f"{slides('alibi'):.3f}, both on tunes, and FoX nothing",
    f"With ReRoPE they lose up to {max(REROPE):.2f}, with YaRN up to {max(YARN):.2f}",
    f"three seeds are {ahead('t5')} and {ahead('kerple')} ahead;",
    f"T5 goes from {context('t5')} and RoPE from {context('rope')}.",
    f"T5 is {ahead_of_windows('t5')} ahead of that in rows of 2048, which is resolved",
    f"T5 is {steps('t5', -1)} ahead of RoPE with the best theta after 1,000, 4,000 and 16,000",
    f"and ALiBi is {steps('alibi')} behind",
    f"of {int(SCHEMES) - 1} schemes, chains and scales are ahead of RoPE** after equal steps and "
    f"Holm's correction, of {AHEAD} with",
    "by which it has {:.3f} in place of {:.3f}".format(*ROPE_BY_RULE),
    f"lose {varied(SMALL, 'window of 16', 128):.3f} on speeches, "
    f"{varied(CORPORA['code'], 'window of 16', 128):.3f} on code and "
    f"{varied(CORPORA['tunes'], 'window of 16', 128):.3f} on tunes",
    f"512 bytes are worth {GAINS['sympy', WORTH]:.3f} over 64 there, with them "
    f"{GAINS['sympy, with convolutions', WORTH]:.3f}",
    f"theta 10,000 has {STEPS['rope, theta 10,000', '4,000']:.3f} after 4,000 and "
    f"{STEPS['rope, theta 10,000', '16,000']:.3f} after 16,000",
    f"500 is {CONTEXT['rope_500', DIFFERENCE]:.3f} behind",
    "T5 is {1} [-{3}, {2}] ahead.".format(
        *re.findall(r"\d\.\d{3}", re.findall(r"(?m)^\| t5 \|.*\]", CATALOGUE)[0])
    ),
    f"makes T5 {OWN_SCALES['t5'].strip('+')} worse and TUPE {OWN_SCALES['tupe'].strip('-')} better",
    f"{int(AHEAD) - int(RESOLVED)} of the {AHEAD} leads may be chance",
]
NAMES = {
    "t5": "T5", "kerple": "KERPLELog", "fox": "FoX", "rope": "RoPE", "alibi": "ALiBi",
}  # fmt: skip


def table():
    """The scores of the study, best first."""
    text = "| scheme | at 128 | at 1024 |\n|---|---:|---:|\n"
    for name in (n for n, column in SMALL if column == TRAINED):
        if name in NAMES:
            scores = " | ".join(f"{SMALL[name, column]:.3f}" for column in (TRAINED, LONGEST))
            text += f"| [`{NAMES[name]}`](schemes.md) | {scores} |\n"
    return text


def joined(text):
    return " ".join(text.split())


def check(text, facts):
    """Every fact is in the text, and no other number with a point or in percent is."""
    text = joined(text)
    for fact in facts:
        assert fact in text, fact
        text = text.replace(fact, "")
    text = re.sub(r"`[^`]*`|\]\([^)]*\)|```.*?```", "", text)
    assert not re.findall(r"\d\.\d+|\d+ %", text)


def test_every_number_is_a_result():
    assert slides("fox") < 5e-4
    # Shares of symbols: a copy is right if all of its symbols are.
    assert all(SCORES["R11", name]["unit"] == "accuracy" for name in ("alibi", "rope", "learned"))
    # Biases lose nothing at 8 times the length, and RoPE in a window next to nothing: the greatest
    # upper bounds are the study's third criterion.
    window = "window of 128"
    biases = [x for name in ("kerple", "fox", "alibi") for x in rises(CORPORA.values(), name)]
    assert max(*biases, *(varied(table, window) for table in TABLES)) < 0 and RESOLVED == "9"
    for name, sizes in (("study_corpora", CORPORA), ("study_sizes", SIZES)):
        cells = [cells_of(name, size)["rope", f"rope + {window} 1024"] for size in sizes]
        assert all(float(cell.strip("]").split(", ")[1]) < 0.05 for cell in cells)
        # T5's table has the greatest rate that was tried, 10 times the other, at so many sizes.
        assert sum("(10 x)" in cells_of(name, size)["t5", "rate"] for size in sizes) == 3
    check(pages.read("docs/choose.md"), CHOOSE)
    p_values = {name: p for name, (*_, p) in BEYOND_WINDOWS.items()}
    (choices,) = re.findall(r"\|---\|---\|---\|\n((?:\| .*\n)+)", pages.read("docs/choose.md"))
    assert len(choices.splitlines()) <= 12 and "[-" not in choices and "[+" not in choices
    assert len(p_values) == 9 and holm(p_values) == {"t5", "rope", "rope_500"}


def test_the_evidence_is_that_of_the_results():
    text = pages.read("docs/evidence.md")
    assert len(re.findall(r"\d\.\d+", text)) <= 60
    text = re.sub(r"schemes\.md#[-\w]+", "schemes.md", text)
    assert table() in text, table()
    check(text.replace(table(), ""), EVIDENCE)
    corpora = pages.read("docs/study_corpora.md")
    assert "| t5 | on speeches, wordings, tunes |" in corpora
    assert "| alibi | depends on the corpus |" in corpora
    assert CONTEXT["rope", "rope + window of 512 2048"] < 0
    answer = pages.read("docs/study_context.md")
    beyond = dict(re.findall(r"(?m)^\| (\w+) \|.*\| (\w+) \|$", answer))
    assert [beyond[x] for x in ("t5", "kerple", "none", "rope")] == ["gains"] * 2 + ["loses"] * 2
    schemes = [x for x, column in CONTEXT if column == DIFFERENCE and "+" not in x]
    assert len(schemes) == 8 and not holm({x: p_value(stats.t(2), *bounds(x)) for x in schemes})
    assert numbers_of("study_context", "1,000")["kerple", DIFFERENCE] > 0
    near = {x for x in schemes if CONTEXT[x, "sliding 128"] - CONTEXT[x, "sliding 512"] < 0.05}
    assert near == {"local_rope", "rope_500"}  # The remark on docs/study_context.md.
    no_sign = set(re.findall(r"(?m)^\| (\S+) \| \S+ \| \S+ \[-\S+ \+\S+\] \|", CATALOGUE))
    assert no_sign & {*LEADERS.split(", ")} == {"dape", "rope+alibi"}
    assert OWN_SCALES.keys() == {"t5", "tupe"}
    assert left_by_holm(1) == left_by_holm(2) == {"alibi", "none"}
    assert STEPS["t5", "outcome"] == "not resolved" and STEPS["alibi", "outcome"] == "limit"


def test_the_readme_decides_by_the_same_numbers():
    (decisions,) = re.findall(r"(?s)\n## Which one\?\n(.*?)\n## ", pages.read("README.md"))
    check(decisions, README)
    lines = [line for line in decisions.splitlines() if line.startswith("| ")]
    assert len(lines) == 7


def test_the_table_of_steps_is_of_the_committed_run():
    run = json.loads(pages.read("results/serving/xeon_167.json"))
    titles = {result["title"]: result["rows"] for result in run["results"]}
    page = joined(pages.read("docs/serving.md"))
    for case in itertools.product((1, 4), ("440, 512", "64, 8192", "8120, 8192")):
        cells = ["{}, {}".format(*case)]
        for dtype in ("float32", "bfloat16"):
            count, slots = case[1].split(", ")
            title = f"decode: {dtype}, batch {case[0]}, {count} tokens in {slots} slots"
            least = {row["name"]: f"{1e3 * row['least']:.1f}" for row in titles[title]}
            ours = [least["ours"], least.get("ours, scan", "")]
            cells += ours if dtype == "float32" else [", ".join(filter(None, ours))]
            others = (value for name, value in least.items() if name.startswith("transformers"))
            cells += [least["jax.nn"], min(others, key=float)]
        assert joined(f"| {' | '.join(cells)} |") in page
    ours, theirs = (row["least"] for row in titles["prefill: float32, 8192 tokens"])
    assert f"takes {ours:.1f} s there, in transformers with SDPA {theirs:.1f} s" in page
    assert "Xeon" in run["machine"]["processor"]


def test_constraints_are_the_versions_of_all_results():
    lines = pages.read("results/constraints.txt").splitlines()[1:]
    folders = [pages.ROOT / "results/scoreboard", *pages.ROOT.glob("results/study*")]
    versions = {x.versions[:-1] for folder in folders for x in packed(folder).values()}
    assert versions == {tuple(line.replace("==", " ") for line in lines)} and len(folders) >= 6
