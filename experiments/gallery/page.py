"""Draws the gallery: a contact sheet, pictures of every scheme, and the strip of README.md."""

import sys
from pathlib import Path

import numpy as np
from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.figure import Figure
from PIL import Image

import posenc_jax as pe
from experiments.errors import ConfigError
from experiments.gallery.pictures import GREY, image, png, thumbnail
from experiments.gallery.probe import Probe, frequency_maps, probe, probe_map
from experiments.runs.files import write_whole
from experiments.settings.config_io import Parser, names, near

FAMILIES = {
    "additive": "Added to the embedding",
    "logit_scale": "Factors on the logits",
    "rotary": "Rotary",
    "bias": "Biases",
    "content": "Position and content",
    "contrib": "Few users",
    "scaling": "Frequency maps of RoPE",
}
"""Headings by the folder of a scheme or map."""
STRIP = ("rope", "alibi", "t5", "fire", "shaw", "deberta", "inkling", "tupe")


def main(arguments: list[str]) -> int:
    parser = Parser(
        prog="python -m experiments gallery",
        description="Draws the encoding of every scheme or its effect on logits, by distance, "
        "and the wavelengths of frequency maps: gallery.png, and a PNG file of each.",
    )
    parser.add_argument(
        "--schemes", type=names, metavar="A,B", help="schemes and frequency maps (default: all)"
    )
    parser.add_argument("--out", type=Path, default=Path("results/gallery"), help="folder")
    options = parser.parse_args(arguments)
    maps = {cls.__name__: cls for cls in frequency_maps()}
    chosen = options.schemes or [*pe.SCHEMES, *maps]
    for name in chosen:
        if name not in pe.SCHEMES and name not in maps:
            raise ConfigError(f"--schemes: unknown {name!r}{near(name, (*pe.SCHEMES, *maps))}")
    probes = []
    for number, name in enumerate(chosen, 1):
        print(f"\r{number:3d}/{len(chosen)} {name:24s}", end="", file=sys.stderr, flush=True)
        probes.append(probe_map(maps[name]) if name in maps else probe(name))
    print(file=sys.stderr)
    write_whole(options.out / "gallery.png", contact_sheet(probes))
    for each in probes:
        write_whole(options.out / "gallery" / f"{each.name}.png", image(each))
    print(options.out)
    return 0


def contact_sheet(probes: list[Probe], columns: int = 9) -> bytes:
    """Returns a PNG with one small picture per scheme, by family; its text "Schemes" has the names.

    It suits light and dark pages, and is twice as wide as pages show it.
    """
    groups: dict[str, list[Probe]] = {}
    for p in probes:
        groups.setdefault(p.family, []).append(p)
    places, heads, row, column = [], [], 0, 0
    for family in sorted(groups, key=list(FAMILIES).index):
        count = len(groups[family])
        if column and column + 1 + count > columns:  # The family does not fit into this row.
            row, column = row + 1, 0
        column += bool(column)
        heads.append((row, column, FAMILIES[family]))
        for p in groups[family]:
            row, column = (row + 1, 0) if column == columns else (row, column)
            places.append((row, column, p))
            column += 1
    tops = [1.6 * r + 0.46 * len({h for h, _, _ in heads if h <= r}) for r in range(row + 1)]
    width, height = 1.5 * columns, tops[-1] + 1.5
    figure = Figure(figsize=(width, height), dpi=144)
    figure.patch.set_alpha(0.0)

    def box(row: int, column: int, wide: float = 1.4, down: float = 0.2, high: float = 1.24):
        left, bottom = 1.5 * column + 0.05, height - tops[row] - down - high
        return left / width, bottom / height, wide / width, high / height

    for top, left, p in places:
        axes = figure.add_axes(box(top, left))
        thumbnail(axes, p)
        axes.set_title(p.name, fontsize=8.5, color=GREY, pad=3.0)
    for top, left, text in heads:
        x, y, _, _ = box(top, left, down=-0.1, high=0.0)
        figure.text(x, y, text, fontsize=12, fontweight="bold", color=GREY, va="bottom")
    if column < columns - 3:  # Room for a legend.
        _legend(figure.add_axes(box(row, columns - 3, wide=4.4, down=0.7, high=0.12)))
    return _png(figure, probes)


def _legend(axes) -> None:
    axes.imshow(np.linspace(-1, 1, 128)[None], cmap="RdBu", aspect="auto")
    axes.set_axis_off()
    options = {"fontsize": 9, "color": GREY, "transform": axes.transAxes, "va": "top"}
    axes.text(0.0, -0.5, "lower", ha="left", **options)
    axes.text(0.5, -0.5, "as without positions", ha="center", **options)
    axes.text(1.0, -0.5, "higher", ha="right", **options)
    axes.text(0.0, -2.6, "curves: tokens per turn, as trained (grey) and mapped", **options)
    title = "logit of a query (down) and a key (across)"
    axes.set_title(title, fontsize=9, color=GREY, pad=4.0, loc="left")


def strip(probes: list[Probe]) -> bytes:
    """Returns a PNG of 2400 x 390 pixels with a row of pictures, named by the classes.

    Queries run down, keys across. The background is transparent and the names are grey, for light
    and dark pages.
    """
    figure = Figure(figsize=(12.0, 1.95), dpi=200, layout="constrained")
    figure.patch.set_alpha(0.0)
    for axes, p in zip(figure.subplots(1, len(probes)), probes, strict=True):
        thumbnail(axes, p)
        axes.set_box_aspect(1.0)
        axes.set_title(pe.SCHEMES[p.name].__name__, fontsize=22, color=GREY)
    return _png(figure, probes)


def _png(figure: Figure, probes: list[Probe]) -> bytes:
    canvas = FigureCanvasAgg(figure)
    canvas.draw()
    picture = Image.fromarray(np.asarray(canvas.buffer_rgba()))
    return png(picture, 256, Schemes=", ".join(p.name for p in probes))
