"""The pictures of docs/drawn.md: each function draws the arrays that its parameters name."""

import numpy as np
from matplotlib.figure import Figure
from matplotlib.patches import Circle, Rectangle

from experiments.gallery.pictures import raster


def panels(rows: int, columns: int, height: float, **options):
    """Returns a figure of the width of a phone, and its axes."""
    figure = Figure(figsize=(5.0, height), layout="constrained")
    return figure, figure.subplots(rows, columns, **options)


def cells(axes, numbers, shown, colours=None) -> None:
    """Draws rows of cells with a number in each that is shown, and shades the others."""
    numbers, shown = np.asarray(numbers), np.asarray(shown)
    for (row, column), number in np.ndenumerate(numbers):
        colour = "#8c8c8c"
        if shown[row, column]:
            colour = "tab:blue" if colours is None else f"C{colours[row][column]}"
            axes.text(column, row, number, ha="center", va="center")
        box = Rectangle((column - 0.46, row - 0.42), 0.92, 0.84)
        box.set(facecolor=colour, alpha=0.28 if shown[row, column] else 0.12)
        axes.add_patch(box)
    rows, columns = numbers.shape
    axes.set(xlim=(-0.6, columns - 0.4), ylim=(rows - 0.4, -0.6))
    axes.set(xticks=range(columns), yticks=range(rows))
    axes.tick_params(length=0)
    axes.grid(False)
    axes.spines[:].set_visible(False)


def draw_permutation(words, nope, rope):
    figure, axes = panels(2, 3, 2.7, sharex=True)
    colours = dict(zip(words, ("tab:blue", "tab:green", "tab:orange"), strict=True))
    outputs = np.asarray([nope, rope])[:, :, :, 0]  # [scheme, order, T, H]
    changes = outputs[:, 0] - outputs[:, 1, ::-1]
    times = int(np.abs(outputs).max() / np.abs(changes).max())
    for i, line in enumerate(axes):
        shown = (outputs[i, 0], words), (outputs[i, 1], words[::-1]), (times * changes[i], words)
        for each, (rows, order) in zip(line, shown, strict=True):
            raster(each, rows, top=float(np.abs(outputs).max()))
            each.set(xticks=[], yticks=range(len(order)), yticklabels=order)
            for label in each.get_yticklabels():
                label.set(color=colours[label.get_text()], fontweight="bold", fontsize=10)
    titles = " ".join(words), " ".join(words[::-1]), f"{times} x difference"
    for each, title in zip(axes[0], titles, strict=True):
        each.set_title(title, fontsize=10)
    for each, name in zip(axes[:, 0], ("no positions", "RoPE"), strict=True):
        each.set_ylabel(name)
    return figure


def draw_sinusoid(codes, similarity):
    figure, (left, right) = panels(1, 2, 2.7)
    raster(left, codes, top=1.0)
    left.set(title="codes", xlabel="dimension", ylabel="position")
    raster(right, similarity, top=float(np.max(similarity)))
    right.set(title="dot products", xlabel="position")
    return figure


def draw_bias(bias, weights, causal):
    figure, (left, right) = panels(1, 2, 2.8)
    raster(left, np.where(causal, bias[0], np.nan))
    left.set(title="bias, head 1", xlabel="position of the key", ylabel="position of the query")
    for head, row in enumerate(np.asarray(weights)[:, -1, ::-1], 1):
        right.plot(row, label=f"head {head}")
    right.set(title="weights", xlabel="distance of the key", ylim=(0, None), xlim=(0, None))
    right.legend(frameon=False)
    return figure


def draw_rotation(turned, scores):
    figure, (left, right) = panels(1, 2, 2.7)
    for position, (a, b) in enumerate(np.asarray(turned)):
        left.annotate("", (a, b), (0, 0), arrowprops={"arrowstyle": "->", "color": "tab:blue"})
        left.text(1.16 * a, 1.16 * b, position, ha="center", va="center")
    left.add_patch(Circle((0, 0), 1.0, fill=False, edgecolor="#8c8c8c", alpha=0.5))
    left.set(title="q at positions 0 to 5", xlim=(-1.3, 1.3), ylim=(-1.3, 1.3), aspect="equal")
    left.set_axis_off()
    raster(right, scores, top=1.0)
    right.set(title="q . k", xlabel="position of the key", ylabel="position of the query")
    return figure


def draw_wavelengths(wavelengths, waves):
    figure, (left, right) = panels(1, 2, 2.9)
    for theta, tokens in wavelengths.items():
        left.plot(tokens, label=f"theta = {theta:.0e}".replace("e+0", "e"))
    left.set(title="tokens per turn", xlabel="pair", yscale="log", xlim=(0, len(tokens) - 1))
    left.legend(frameon=False, fontsize=9)
    raster(right, waves, top=1.0).set_interpolation("nearest")
    right.set(title="cosine of the angle", xlabel="position", ylabel="pair")
    return figure


def draw_scaling(ratios, turns, factor):
    figure, axes = panels(1, 1, 3.1)
    for (name, ratio), style in zip(ratios.items(), (":", "--", "-", "-"), strict=True):
        axes.plot(ratio, style, label=name, linewidth=2.2)
    for count, side in ((32, "right"), (1, "left")):
        pair = int(np.sum(turns > count)) - 0.5  # Between the last pair with more and the next.
        axes.axvline(pair, color="#8c8c8c", linewidth=1.0)
        words = f"more than {count} turns " if side == "right" else " less than a turn"
        axes.text(pair, 1.08, words, ha=side, va="bottom")
    ticks = [2.0**-n for n in range(int(np.log2(factor)) + 1)]
    axes.set_yscale("log", base=2)
    axes.set_yticks(ticks, [f"1/{1 / t:.0f}" if t < 1 else "1" for t in ticks])
    axes.set(xlabel="pair", ylabel="frequency, new / old", xlim=(0, len(turns) - 1))
    axes.set_ylim(0.9 / factor, 1.3)
    axes.legend(frameon=False, loc="lower left")
    return figure


def draw_padding(positions, segment_ids, cache):
    figure, (top, bottom) = panels(2, 1, 3.1, sharex=True)
    cells(top, positions, segment_ids >= 0)
    top.set_title("positions of two prompts, padded on the left")
    top.tick_params(labelbottom=True)
    cells(bottom, cache.positions, cache.segment_ids >= 0)
    bottom.set_title("positions in the cache")
    for axes in (top, bottom):
        axes.set_xlabel("slot")
        axes.set_yticks((0, 1), ("row 0", "row 1"))
    return figure


def draw_packing(positions, segment_ids, seen):
    figure, (top, bottom) = panels(2, 1, 4.6, height_ratios=(1, 7), sharex=True)
    ids = np.asarray(segment_ids)
    cells(top, positions, ids >= 0, colours=ids)
    top.set_title("positions")
    top.set_yticks([])
    top.tick_params(labelbottom=False)
    raster(bottom, np.where(ids[0, :, None] < 0, 0, np.asarray(seen)[0, :, 0]), top=1.0)
    bottom.set(title="weights", xlabel="slot of the key", ylabel="slot of the query")
    return figure
