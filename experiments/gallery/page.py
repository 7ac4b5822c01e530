"""Writes the self-contained page gallery.html and the contact sheet."""

import io
import sys
from pathlib import Path

import numpy as np
from markupsafe import Markup
from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.figure import Figure
from PIL import Image
from PIL.PngImagePlugin import PngInfo

import posenc_jax as pe
from experiments.errors import ConfigError
from experiments.gallery.pictures import images, pictures, thumbnail
from experiments.gallery.probe import Probe, frequency_maps, probe, probe_map
from experiments.pages.report import fill
from experiments.runs.files import write_whole
from experiments.settings.config_io import Parser, names, near

STRIP = ("rope", "alibi", "t5", "fire", "shaw", "deberta", "inkling", "tupe")


def main(arguments: list[str]) -> int:
    """Draws the gallery; returns the exit status."""
    parser = Parser(
        prog="python -m experiments gallery",
        description="Draws the encoding of every scheme or its effect on logits, by distance, "
        "over ten times the length, and the wavelengths of frequency maps.",
    )
    parser.add_argument(
        "--schemes", type=names, metavar="A,B", help="schemes and frequency maps (default: all)"
    )
    parser.add_argument("--out", type=Path, default=Path("results/gallery"), help="folder")
    parser.add_argument("--sheet", type=Path, help="write the contact sheet here too, as PNG")
    parser.add_argument("--strip", type=Path, help="write the strip of README.md and no page")
    parser.add_argument(
        "--pictures", type=Path, metavar="FOLDER", help="write the pictures of each here, as PNG"
    )
    options = parser.parse_args(arguments)
    if options.strip is not None:
        write_whole(options.strip, strip([probe(name) for name in STRIP]))
        print(options.strip)
        return 0
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
    target = options.out / "gallery.html"
    write_whole(target, render(probes))
    print(target)
    if options.sheet is not None:
        write_whole(options.sheet, contact_sheet(probes))
        print(options.sheet)
    if options.pictures is not None:
        files = {name: content for p in probes for name, content in images(p).items()}
        for name, content in files.items():
            write_whole(options.pictures / name, content)
        print(options.pictures)
    return 0


def render(probes: list[Probe]) -> str:
    """Returns the page."""
    cards = [(p, [(Markup(svg), caption) for svg, caption in pictures(p)]) for p in probes]
    template = Path(__file__).with_name("gallery.html.jinja")
    return fill(template, cards=cards, version=pe.__version__)


def contact_sheet(probes: list[Probe], columns: int = 9) -> bytes:
    """Returns a PNG with one small picture per scheme; its text "Schemes" has their names."""
    rows = -(-len(probes) // columns)
    figure = Figure(figsize=(1.5 * columns, 1.75 * rows), layout="constrained")
    for number, p in enumerate(probes, 1):
        axes = figure.add_subplot(rows, columns, number)
        thumbnail(axes, p)
        axes.set_title(p.name, fontsize=9)
    figure.set_dpi(72)
    # A palette: a third of the bytes, and every redrawing stays in git.
    return _png(_pixels(figure).convert("RGB").quantize(256), probes)


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
        axes.set_title(pe.SCHEMES[p.name].__name__, fontsize=22, color="#7d8590")
    return _png(_pixels(figure), probes)


def _pixels(figure: Figure) -> Image.Image:
    canvas = FigureCanvasAgg(figure)
    canvas.draw()
    return Image.fromarray(np.asarray(canvas.buffer_rgba()))


def _png(image: Image.Image, probes: list[Probe]) -> bytes:
    buffer = io.BytesIO()
    text = PngInfo()
    text.add_text("Schemes", ", ".join(p.name for p in probes))
    image.save(buffer, format="PNG", optimize=True, pnginfo=text)
    return buffer.getvalue()
