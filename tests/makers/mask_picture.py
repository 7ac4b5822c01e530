"""The picture of docs/masks.md: ten masks of 48 tokens, computed by the library.

python -m tests.makers mask_picture      write docs/masks.svg
"""

import pathlib

import jax.numpy as jnp
import numpy as np

import posenc_jax as pe
from posenc_jax.engine.api import make_problem
from posenc_jax.positions import from_tree

PICTURE = pathlib.Path(pe.__file__).parents[1] / "docs" / "masks.svg"
T, SIZE, COLUMNS = 48, 144, 5  # Tokens, and points of a mask.


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


def picture() -> str:
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


def main(argv: list[str]) -> None:
    PICTURE.write_text(picture())
