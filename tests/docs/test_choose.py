"""Every number of docs/choose.md, and of the decision table of README.md, is a committed result.

The numbers of studies and claims are compared with the results themselves in tests/experiments.
"""

import csv
import math
import re

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
    lines = csv.DictReader(pages.read(f"docs/{name}.csv").splitlines())
    of_size = {line["scheme"]: line for line in lines if line.get("size", size) == size}
    return {(s, c): v for s, line in of_size.items() for c, v in line.items() if v}


def numbers_of(name, size):
    return {key: number(text) for key, text in cells_of(name, size).items()}


SMALL, SCREEN = numbers_of("study", "small"), numbers_of("study_catalogue", "small")
CATALOGUE = pages.read("docs/study_catalogue.md")
BEST = rows(CATALOGUE.partition("\n## Finalists\n")[2])
SCORES = {
    (line["claim"], line["name"]): line
    for line in csv.DictReader(pages.read("docs/results.csv").splitlines())
    if line["kind"] == "score"
}
MODELS = rows(pages.read("docs/models.md"))
TRAINED, LONGEST, STEP = "score", "nonoverlapping 1024", "step relative to rope"
BITS, DIFFERENCE = "bits per byte", "difference to rope"
ERROR = "greatest difference of logits"


def claim(name, run, length):
    return number(SCORES[name, run][f"at {length}"])


def undone(length):
    """The part of RoPE's rise beyond the trained length that NTK undoes."""
    rise = SMALL["rope", f"nonoverlapping {length}"] - SMALL["rope", TRAINED]
    left = SMALL["rope", f"ntk {length}"] - SMALL["rope", TRAINED]
    return round(100 * (1 - left / rise))


def difference(scheme):
    """The difference of a scheme to RoPE with its interval, in words."""
    return cells_of("study", "small")[scheme, DIFFERENCE]


((LEAST, MOST),) = re.findall(
    r"([\d.]+) to ([\d.]+) million parameters", pages.read("docs/study.md")
)
FACTS = [
    f"Models have {LEAST} to {MOST} million parameters",
    f"{len(MODEL_TYPES)} model types",
    f"a training step takes {claim('R18b', 'rope', 2048):.3f} times as long as without",
    f"in {SCREEN['rope+short_conv', 'step'] / SCREEN['rope', 'step']:.2f} times RoPE's time",
    f"{SMALL['t5', TRAINED]:.3f} and {BEST['rope+short_conv', BITS]:.3f} bits per byte "
    f"against RoPE's {SMALL['rope', TRAINED]:.3f} and {BEST['rope', BITS]:.3f}",
    f"KERPLE goes from {SMALL['kerple', TRAINED]:.3f} to {SMALL['kerple', LONGEST]:.3f} and "
    f"RoPE from {SMALL['rope', TRAINED]:.3f} to {SMALL['rope', LONGEST]:.3f}; "
    f"T5 from {SMALL['t5', TRAINED]:.3f} to {SMALL['t5', LONGEST]:.3f} at the rates that were "
    f"chosen, and from {BEST['t5', BITS]:.3f} to {BEST['t5', 'at 1024']:.3f} at half the rate",
    f"{SMALL['rope', 'ntk 256']:.3f} with NTK, {SMALL['rope', 'nonoverlapping 256']:.3f} without",
    f"{claim('R05', 'rope_100', 512):.3f} after 100 steps with RoPE as it was, "
    f"{claim('R05', 'pi_100', 512):.3f} with interpolation",
    f"{claim('R07', 'rope', 32):.3f} of masked symbols right with RoPE, "
    f"{claim('R07', 'none', 32):.3f} without an encoding",
    f"within {MODELS['swin', ERROR]:.0e}",
    f"within {MODELS['qwen2_vl', ERROR]:.0e}",
    f"the k-th symbol is right in {claim('R10', 'learned', 32):.3f} of rows, "
    f"with RoPE in {claim('R10', 'rope', 32):.3f}",
    f"the symbol 4 places back is right in {claim('R08', 'rope', 32):.3f} of places, "
    f"with ALiBi in {claim('R08', 'alibi', 32):.3f}",
    f"T5, trained for longer, has {claim('R09', 't5', 32):.3f} too",
    f"{claim('R11', 'alibi', 42):.3f} of copied tokens right at 1.25 times the length, "
    f"with RoPE {claim('R11', 'rope', 42):.3f}",
    f"{claim('R25', 'rope_random', 50):.3f} of copied tokens right at 1.5 times the length, "
    f"without {claim('R25', 'rope', 50):.3f}",
    f"{claim('R23', 'convolved', 128):.3f} bits per byte, without the convolutions "
    f"{claim('R23', 'none', 128):.3f}, in another protocol than the study's. RoPE has "
    f"{claim('R23', 'rope', 128):.3f} there",
    f"from {SMALL['t5', 'rate 0.001']:.3f} to {SMALL['t5', 'rate 0.016']:.3f} bits per byte "
    "between the rates 0.001 and 0.016",
    f"NTK undoes {undone(256)} % of RoPE's rise at twice the length, {undone(1024)} % at eight",
    f"T5's bias ({difference('t5')}), Inkling's ({difference('inkling')}) and FIRE's "
    f"({difference('fire')}) are ahead of RoPE",
    f"KERPLE ({difference('kerple')}) and FoX ({difference('fox')}) are not resolved against it",
    f"ALiBi ({difference('alibi')}) is behind",
    f"T5 takes {claim('R18b', 't5', 2048) / claim('R18b', 'rope', 2048):.2f} times RoPE's",
    f"T5's bias loses {SMALL['t5', 'sliding 512'] - SMALL['t5', 'sliding 128']:.3f}",
]
NEW = dict(
    re.findall(
        r"(?m)^\| (\S+) \| [\d.]+ \[[^|]*\| [+-][^|]*\| ([+-][\d.]+ \[[^\]]*\]) \|",
        CATALOGUE.partition("\n## Finalists\n")[2],
    )
)
"""Differences to RoPE of the best schemes of the catalogue, of seeds that did not choose these."""
FACTS += [f"({NEW[name]})" for name in ("rope+short_conv", "stick_breaking", "bam")]
NAMES = ("speeches", "code", "wordings", "tunes")


def on(corpus, scheme):
    """The difference to RoPE on a corpus with its interval, in words."""
    return cells_of("study_corpora", corpus)[scheme, DIFFERENCE]


def losses(scheme, longest=LONGEST, trained=TRAINED):
    """What a scheme loses at 8 times the length, or between two columns, on each corpus."""
    for name in NAMES:
        of_corpus = numbers_of("study_corpora", name)
        yield of_corpus[scheme, longest] - of_corpus[scheme, trained]


def upwards(loss):
    """A bound with two decimals."""
    return f"{math.ceil(100 * loss - 1e-9) / 100:.2f}"


BIASES = ("t5", "kerple", "fox", "alibi")
FLAT = max(x for scheme in BIASES for x in losses(scheme))
FLAT_SLIDING = max(x for scheme in BIASES for x in losses(scheme, "sliding 512", "sliding 128"))
assert max(x for scheme in BIASES[1:] for x in losses(scheme)) < 0  # README: they lose none.
FACTS += [
    f"RoPE loses {min(losses('rope')):.2f} to {max(losses('rope')):.2f} bits per byte, where "
    f"T5's bias, KERPLE, FoX and ALiBi lose at most {upwards(FLAT)} in windows side by side; with "
    f"full contexts, at four times the length, they lose at most {upwards(FLAT_SLIDING)}",
    f"on speeches, scripture ({on('wordings', 't5')}) and tunes ({on('tunes', 't5')}), but not on "
    f"code ({on('code', 't5')})",
]
LADDER = pages.read("docs/study_sizes.md")


def at_size(size, scheme):
    """The difference to RoPE at a size with its interval, in words."""
    return cells_of("study_sizes", f"{size} million")[scheme, DIFFERENCE]


assert "From 0.1 million to 2.5 million these change: t5." in LADDER  # Its lead alone shrinks.


def rises_of_rope():
    """What RoPE loses at 8 times the length, by size; T5, KERPLE and FoX lose at most 0.05."""
    flat = "these lose at most 0.05 by their intervals: t5 .*, kerple .*, fox .*; the others lose"
    return [float(x) for x in re.findall(rf"(?m)^\* At 8 times .*{flat}: rope \+([\d.]+)", LADDER)]


FACTS += [
    f"T5's bias is ahead of RoPE at 0.1 ({at_size('0.1', 't5')}), 0.3 ({at_size('0.3', 't5')}), "
    f"0.9 ({at_size('0.9', 't5')}) and 2.5 million parameters ({at_size('2.5', 't5')})",
    f"RoPE loses {min(rises_of_rope()):.2f} to {max(rises_of_rope()):.2f} at eight times the "
    "length, T5, KERPLE and FoX at most 0.05",
]
SINUSOIDAL = (
    f"{SMALL['sinusoidal', TRAINED]:.3f} bits per byte at 128, "
    f"{SMALL['sinusoidal', 'nonoverlapping 256']:.3f} at 256, "
    f"{SMALL['sinusoidal', LONGEST]:.3f} at 1024"
)

COLUMNS = {
    "128, trained": (SMALL, TRAINED),
    "256": (SMALL, "nonoverlapping 256"),
    "1024": (SMALL, LONGEST),
    "step": (SMALL, STEP),
    "compute gain": (SMALL, "compute gain"),
}


def names():
    """The schemes of the study, best first."""
    return [n for n, c in SMALL if c == TRAINED]


def table():
    """The scores of the study, best first."""
    lines = ["scheme | " + " | ".join(COLUMNS), "---|" + "|".join(["---:"] * len(COLUMNS))]
    for name in names():
        values = [cells.get((name, column), "") for cells, column in COLUMNS.values()]
        decimals = [2 if column in ("step", "compute gain") else 3 for column in COLUMNS]
        texts = [
            f"{v:.{d}f}" if isinstance(v, float) else v.split(" [")[0]
            for v, d in zip(values, decimals, strict=True)
        ]
        lines.append(f"`{name}` | {' | '.join(texts)}")
    return (
        "".join(f"| {line} |\n" for line in lines)
        .replace("| ---|", "|---|")
        .replace(": |\n", ":|\n")
    )


def joined(text):
    return " ".join(text.split())


def test_the_table_of_the_study_is_copied():
    assert table() in pages.read("docs/choose.md"), table()


def test_every_number_is_a_result():
    text = joined(pages.read("docs/choose.md").replace(table(), ""))
    for fact in FACTS:
        assert fact in text, fact
        text = text.replace(fact, "")
    text = re.sub(r"`[^`]*`|\]\([^)]*\)|```.*?```", "", text)
    assert not re.findall(r"\d\.\d+|\d+ %", text)


def test_claims_have_the_same_numbers():
    assert SINUSOIDAL in pages.read("docs/claims.md")


def test_the_readme_decides_by_the_same_numbers():
    (decisions,) = re.findall(r"(?s)\n## Which one\?\n(.*?)\n## ", pages.read("README.md"))
    facts = " ".join(FACTS)
    numbers = re.findall(r"\d+\.\d+", decisions)
    assert numbers and all(n in facts for n in numbers)
    lines = [line for line in decisions.splitlines() if line.startswith("| ")]
    assert len(lines) == 7
