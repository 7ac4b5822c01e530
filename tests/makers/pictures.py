"""The pictures of README.md and of docs/masks.md.

python -m tests.makers pictures            write docs/attention.svg and docs/masks.svg
python -m tests.makers pictures --measure  compile for the memory again first: a minute

The first has memory of a bias as a rule and as an array, and times on an H100; the second ten masks
of 48 tokens, computed by the library.
"""

import json
import math
import pathlib

import jax
import jax.numpy as jnp
import numpy as np

import posenc_jax as pe
from experiments.bench import peers
from posenc_jax.engine.api import make_problem
from posenc_jax.positions import from_tree

ROOT = pathlib.Path(pe.__file__).parents[1]
MEMORY = ROOT / "results" / "memory.json"
LENGTHS = 1024, 2048, 4096, 8192, 16384
BLUE, ORANGE, INK = "#0072b2", "#d55e00", "#7d8590"
LEFT, RIGHT, TOP, BOTTOM = 58, 330, 64, 246  # Of the plot of memory, in points.
NAMES, FROM, TO, ROW = 612, 634, 870, 26  # Of the times: ends of names, the scale, a row.
T, SIZE, COLUMNS = 48, 144, 5  # Tokens, and points of a mask.


def measure() -> dict:
    """Returns MiB of temporary memory of a training step, by tokens."""
    scheme = pe.T5(2)
    params = jax.eval_shape(scheme.init, jax.random.key(0))

    def rule(q, k, v, params):
        return pe.scheme_attention(scheme, params, q, k, v, is_causal=True, scale=0.125)[0]

    def array(q, k, v, params):
        bias = peers.t5_matrix(params["table"], q.shape[1])
        return jax.nn.dot_product_attention(q, k, v, bias=bias, is_causal=True)

    def mebibytes(f, length):
        q = jax.ShapeDtypeStruct((1, length, 2, 64), "float32")
        _, facts = peers.compile_program(peers.with_gradients(f), (q, q, q, params))
        return round(facts["megabytes"] * 1e6 / 2**20, 2)

    lines = {f.__name__: [mebibytes(f, n) for n in LENGTHS] for f in (rule, array)}
    of = "T5's bias, B 1, N 2, H 64, float32, causal, CPU: output and all gradients"
    return {"of": of, "jax": jax.__version__, "lengths": LENGTHS, "MiB": lines}


def times() -> list[tuple[str, float]]:
    """Returns names and times of attention and its gradients, in multiples of "pallas"."""
    gpu = ROOT / "results" / "gpu"
    rows = json.loads((gpu / "times.json").read_text())["times"]
    ms = {
        (row["name"], row["by"]): row["ms"]
        for row in rows
        if row["T"] == 4096 and row["what"] == "forward+backward"
    }
    (flex,) = (
        row["ms"]
        for row in json.loads((gpu / "torch.json").read_text())["rows"]
        if (row["by"], row["T"], row["what"]) == ("torch flex", 4096, "forward+backward")
    )
    return [
        ("no bias, cuDNN", ms["none", "jax.nn cudnn"] / ms["none", "pallas"]),
        ("no bias, FlexAttention", flex / ms["none", "pallas"]),
        ("ALiBi, array by cuDNN", ms["alibi", "cudnn"] / ms["alibi", "pallas"]),
        ("ALiBi, tiles in XLA", ms["alibi", "xla"] / ms["alibi", "pallas"]),
        ("T5, array by cuDNN", ms["t5", "jax.nn cudnn"] / ms["t5", "pallas"]),
    ]


def text(x: float, y: float, words: str, colour: str = INK, **attributes: str) -> str:
    """Returns a text of SVG; `anchor` and `weight` are of its font."""
    names = {"anchor": "text-anchor", "weight": "font-weight"}
    more = "".join(f' {names[name]}="{value}"' for name, value in attributes.items())
    return f'<text x="{x:.0f}" y="{y:.0f}" fill="{colour}"{more}>{words}</text>'


def line(x: float, y: float, to_x: float, to_y: float, opacity: float) -> str:
    ends = f'x1="{x:.1f}" y1="{y:.1f}" x2="{to_x:.1f}" y2="{to_y:.1f}"'
    return f'<line {ends} stroke="{INK}" stroke-opacity="{opacity}"/>'


def dot(x: float, y: float, colour: str) -> str:
    return f'<circle cx="{x:.1f}" cy="{y:.1f}" r="4" fill="{colour}"/>'


def memory_plot() -> list[str]:
    """Returns two lines in a plot with logarithmic scales."""
    facts = json.loads(MEMORY.read_text())

    def place(tokens, mebibytes):
        x = LEFT + 16 + (RIGHT - LEFT - 16) * math.log(tokens / 1024, 16)
        return x, BOTTOM - (BOTTOM - TOP) * math.log10(mebibytes) / 4

    parts = [
        text(LEFT - 46, 20, "Memory of a training step, MiB", weight="bold"),
        text(LEFT - 46, 38, "temporary, T5's bias, 2 heads of 64"),
        text((LEFT + RIGHT) / 2, BOTTOM + 38, "tokens", anchor="middle"),
    ]
    for exponent in range(5):
        _, y = place(1024, 10**exponent)
        words = text(LEFT - 8, y + 4, f"{10**exponent:,}", anchor="end")
        parts += [line(LEFT, y, RIGHT, y, 0.25), words]
    for tokens in facts["lengths"]:
        x, _ = place(tokens, 1)
        parts.append(text(x, BOTTOM + 18, f"{tokens // 1024}k", anchor="middle"))
    names = {"array": ("an array, by jax.nn", ORANGE, -6), "rule": ("posenc_jax", BLUE, -12)}
    for name, (words, colour, above) in names.items():
        sizes = facts["MiB"][name]
        places = [place(*pair) for pair in zip(facts["lengths"], sizes, strict=True)]
        points = " ".join(f"{x:.1f},{y:.1f}" for x, y in places)
        drawn = f'fill="none" stroke="{colour}" stroke-width="2"'
        parts.append(f'<polyline points="{points}" {drawn}/>')
        parts += [dot(x, y, colour) for x, y in places]
        x, y = places[-1]
        parts.append(text(x + 10, y + 4, f"{sizes[-1]:,.0f}", colour))
        x, y = places[3]
        parts.append(text(x - 10, y + above, words, colour, anchor="end"))
    return parts


def times_plot() -> list[str]:
    """Returns a row with a dot for each case, on a logarithmic scale from 1/2 to 32."""

    def place(multiple):
        return FROM + (TO - FROM) * math.log2(2 * multiple) / 6

    rows = times()
    y, bottom = TOP + 22, TOP + 22 + ROW * len(rows)
    parts = [
        text(430, 20, "Time on an H100, in multiples of posenc_jax's kernel", weight="bold"),
        text(430, 38, "attention and its gradients, 4,096 tokens, 16 heads of 128, bfloat16"),
        text(place(1) + 4, TOP + 4, "posenc_jax", BLUE, anchor="end"),
        f'<line x1="{place(1):.1f}" y1="{TOP + 10}" x2="{place(1):.1f}" y2="{bottom - 6}" '
        f'stroke="{BLUE}" stroke-width="2"/>',
    ]
    for multiple in (2, 4, 8, 16, 32):
        x = place(multiple)
        parts += [
            line(x, TOP + 10, x, bottom - 6, 0.25),
            text(x, TOP + 4, f"{multiple}", anchor="middle"),
        ]
    for n, (words, multiple) in enumerate(rows):
        x, at = place(multiple), y + ROW * n + 4
        number, anchor = f"{multiple:.2f}" if multiple < 2 else f"{multiple:.1f}", "end"
        parts += [text(NAMES, at, words, anchor=anchor), dot(x, at - 4, ORANGE)]
        if multiple > 1:
            parts.append(text(x + 9, at, number, ORANGE))
        else:
            parts.append(text(x - 9, at, number, ORANGE, anchor=anchor))
    note = "the gradient of T5's table is in its time: XLA scatters it from the array's"
    return [*parts, text(430, bottom + 22, note)]


def attention() -> str:
    """Returns the SVG, transparent, for light and dark pages."""
    head = (
        '<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 920 290" '
        'font-family="sans-serif" font-size="13">'
    )
    return "\n".join([head, *memory_plot(), *times_plot(), "</svg>", ""])


def _branches(*lengths):
    """Parents of a prompt of 12 tokens and of answers to it."""
    starts = 12 + np.cumsum((0, *lengths))[:-1]
    return np.r_[
        np.arange(-1, 11), *(np.r_[11, s : s + n - 1] for s, n in zip(starts, lengths, strict=True))
    ]


def options():
    """Returns options of attention by title."""
    i = np.arange(T)
    tree = from_tree(_branches(16, 12, 8))
    drafts = from_tree(np.r_[np.arange(-1, 23), 20 + np.arange(24) // 2 * 2 + 3 * (i[:24] % 2 - 1)])
    noisy, block = i < T // 2, i % (T // 2) // 4
    image = (i >= 16) & (i < 32)

    def by_tree(tree):
        return {"q_positions": tree.positions, "k_visible_until": tree.visible_until}

    def dilated(b, h, q, k):
        return (q - k) % 3 == 0

    def near(b, h, q, k):
        return (abs(q // 8 - k // 8) <= 1) & (abs(q % 8 - k % 8) <= 1)

    causal = {"is_causal": True}
    return {
        "causal": causal,
        "block diffusion": causal | {"q_positions": i // 8},
        "prefixes of documents": causal
        | {"q_positions": np.where(i % 24 < 8, 0, i % 24), "q_segment_ids": i[None] // 24},
        "image in a window": causal
        | {"q_positions": np.where(image, 16, i), "q_coordinates": i}
        | {"window": pe.SlidingWindow((19, -1), by="coordinates")},
        "answers to a prompt": causal | by_tree(tree),
        "tree of drafts": causal | by_tree(drafts),
        "BD3-LM": causal
        | {"q_positions": 2 * block + ~noisy}
        | {"k_visible_until": np.where(noisy, 2 * block + 1, 2**31 - 1)},
        "sinks and a window": causal | {"window": pe.SlidingWindow(12, num_sink_tokens=4)},
        "dilated window": causal | {"mask": pe.block_mask(dilated, T, T), "window": 24},
        "neighbours in an image": {"mask": pe.block_mask(near, T, T)},
    }


def masks() -> str:
    """Returns the SVG: a rectangle for each run of keys that a query sees."""
    q = jnp.zeros((1, T, 1, 1))
    names = options()
    rows = -(-len(names) // COLUMNS)
    step, high = SIZE + 24, SIZE + 40
    lines = [
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {COLUMNS * step} {rows * high}" '
        'font-family="sans-serif" font-size="12">',
        '<rect width="100%" height="100%" fill="#ffffff"/>',
    ]
    for n, (title, of_mask) in enumerate(names.items()):
        x, y = n % COLUMNS * step + 12, n // COLUMNS * high + 26
        call = pe.AttentionCall(**of_mask)
        seen = np.asarray(make_problem(q, q, q, (), call).visible())[0, 0]
        side = SIZE // T
        lines += [
            f'<text x="{x}" y="{y - 8}" fill="#222222">{title}</text>',
            f'<rect x="{x}" y="{y}" width="{SIZE}" height="{SIZE}" fill="#e8edf2"/>',
        ]
        for row, keys in enumerate(seen):
            edges = np.flatnonzero(np.diff(np.r_[0, keys.astype(int), 0]))
            lines += [
                f'<rect x="{x + side * a}" y="{y + side * row}" width="{side * (b - a)}" '
                f'height="{side}" fill="#0072b2"/>'
                for a, b in edges.reshape(-1, 2)
            ]
    return "\n".join([*lines, "</svg>", ""])


PICTURES = {"attention": attention, "masks": masks}


def path_of(name: str) -> pathlib.Path:
    return ROOT / "docs" / f"{name}.svg"


def main(argv: list[str]) -> None:
    if argv == ["--measure"]:
        MEMORY.write_text(json.dumps(measure(), indent=1) + "\n")
    for name, draw in PICTURES.items():
        path_of(name).write_text(draw())
