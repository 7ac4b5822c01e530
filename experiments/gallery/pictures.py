"""The pictures of one scheme as PNG, in the style of the report's plots."""

import io

import matplotlib as mpl
import numpy as np
from matplotlib.figure import Figure
from PIL import Image
from PIL.PngImagePlugin import PngInfo

from experiments.gallery.probe import EVERY, LENGTH, MATCH, Probe
from experiments.pages.plots import INK, PALETTE, STYLE

GREY = "#7d8590"
"""The colour of axes and text, for light and dark pages."""


def image(p: Probe) -> bytes:
    """Returns a PNG: the first picture, and below it the effect by distance if there is one.

    It suits light and dark pages. The text "Description" is its caption.
    """
    kinds = (
        (p.encoding, _encoding),
        (p.image, _image),
        (p.picture, _picture),
        (p.wavelengths, _wavelengths),
    )
    above = next(draw for numbers, draw in kinds if numbers is not None)
    coloured = {key: GREY for key, value in STYLE.items() if value == INK}
    pictures, captions = [], []
    with mpl.rc_context({**STYLE, **coloured, "font.size": 9.0, "lines.linewidth": 1.4}):
        for figure, caption in (above(p), *([_heads(p)] if p.heads is not None else [])):
            buffer = io.BytesIO()
            figure.savefig(buffer, format="png", dpi=260)
            pictures.append(Image.open(buffer))
            captions.append(caption)
    sheet = Image.new("RGBA", (pictures[0].width, sum(x.height for x in pictures)))
    for number, picture in enumerate(pictures):
        sheet.paste(picture, (0, number * picture.height))
    return png(sheet, 96, Description=" Below: ".join(captions))


def png(picture: Image.Image, colours: int, **texts: str) -> bytes:
    """Returns a PNG with a palette, a third of the bytes: every redrawing stays in git."""
    info, buffer = PngInfo(), io.BytesIO()
    for name, text in texts.items():
        info.add_text(name, text)
    small = picture.quantize(colours, method=Image.Quantize.FASTOCTREE)
    small.save(buffer, format="PNG", optimize=True, pnginfo=info)
    return buffer.getvalue()


def thumbnail(axes, p: Probe) -> None:
    axes.set_axis_off()
    encoding = None if p.encoding is None else p.encoding[:, :LENGTH]
    values = next((x for x in (encoding, p.image, p.picture) if x is not None), None)
    if values is not None:
        raster(axes, values).set_interpolation("nearest")  # Smaller files than smooth ones.
    elif p.wavelengths is not None:
        for turns, colour in zip(p.wavelengths, ("#9aa4b0", PALETTE[1]), strict=True):
            axes.plot(np.log(_drawable(turns)), color=colour)


def _encoding(p):
    labels = "dimension (of 512, the first 128)", "position"
    figure = _with_bar(p.encoding[:, :128], "added", labels)
    return figure, "Added to the embedding of a token at each position."


def _picture(p):
    labels = "position of the key", "position of the query"
    figure = _with_bar(p.picture, "added to the logit", labels)
    if p.marked:
        return figure, (
            f"Added to each logit where every {EVERY}th key matches the queries (a logit of "
            f"{MATCH:g}, {-MATCH:g} for others), relative to the median of the row: mean over "
            "heads. Blue is positive, red negative. Parameters that are zero at first are random."
        )
    return figure, (
        "Added to each logit by positions, relative to the query's own key: mean over heads. "
        "Blue is positive, red negative."
    )


def _image(p):
    side = len(p.image) // 2
    extent = -side - 0.5, side + 0.5, side + 0.5, -side - 0.5
    labels = "columns to the right of the query", "rows below the query"
    figure = _with_bar(p.image, "added to the logit", labels, extent)
    return figure, "Added to the logit of each patch, for a query in the middle of an image."


def _heads(p):
    figure, axes = _figure()
    distance = np.arange(p.heads.shape[1])
    if len(p.heads) > 1:
        axes.plot(distance, p.heads.T, color="#3d9fdb", linewidth=0.8, alpha=0.55)
    axes.plot(distance, p.heads.mean(0), color=PALETTE[0], linewidth=2.2)
    label = "cosine similarity" if p.encoding is not None else "added to the logit"
    axes.set(xlabel="distance of the key, tokens", ylabel=label, xlim=(0, distance[-1]))
    spread = float(np.ptp(p.heads, axis=1).max())
    if p.encoding is not None:
        caption = "Cosine similarity of the codes of two positions, by distance."
    elif spread < 1e-4:
        caption = "Nothing is added in any head: only the mask depends on positions."
    else:
        caption = f"The last query's row. Thin: each head; bold: their mean. Range {spread:.3g}."
    return figure, caption


def _wavelengths(p):
    figure, axes = _figure()
    plain, scaled = map(_drawable, p.wavelengths)
    pair = np.arange(len(plain))
    axes.plot(pair, plain, color="#8c8c8c", linestyle="--", label="as trained")
    axes.plot(pair, scaled, color=PALETTE[1], marker=".", label=p.name)
    axes.axhline(4096, color=mpl.rcParams["text.color"], linewidth=0.8, linestyle=":", alpha=0.7)
    axes.set(yscale="log", xlabel="pair of dimensions", ylabel="wavelength, tokens")
    axes.legend(frameon=False, loc="upper left")
    stopped = int(np.isinf(p.wavelengths[1]).sum())
    note = f" {stopped} pairs of frequency zero are not drawn." if stopped else ""
    return figure, f"Tokens per turn; dotted: the trained length, 4096, to be extended by 8.{note}"


def _drawable(turns: np.ndarray) -> np.ndarray:
    return np.where(np.isfinite(turns), turns, np.nan)


def _figure():
    figure = Figure(figsize=(4.3, 3.2), layout="constrained")
    figure.patch.set_alpha(0.0)
    axes = figure.add_subplot()
    axes.patch.set_alpha(0.0)
    return figure, axes


def raster(axes, values, extent=None, top: float | None = None):
    """Draws an array, white at zero; colours saturate at `top`, or at the 98th percentile."""
    top = top or float(np.nanpercentile(np.abs(values), 98)) or 1.0
    axes.grid(False)
    return axes.imshow(
        values, cmap="RdBu", vmin=-top, vmax=top, aspect="auto", extent=extent, rasterized=True
    )


def _with_bar(values, added: str, labels: tuple[str, str], extent=None):
    figure, axes = _figure()
    bar = figure.colorbar(raster(axes, values, extent=extent), shrink=0.9, aspect=30)
    bar.set_label(added)
    bar.outline.set_visible(False)
    axes.set(xlabel=labels[0], ylabel=labels[1])
    return figure
