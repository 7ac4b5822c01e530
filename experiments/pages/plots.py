"""The report's plots, as inline SVG: text stays text, equal numbers give equal bytes.

A scheme has the same colour and marker in every plot of a page. The colours suit colour-blind
readers (after Okabe and Ito) and light and dark pages; lines are labelled at their ends.
"""

import io
import itertools
import math
import re
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import matplotlib as mpl
import numpy as np
from matplotlib.backends.backend_svg import FigureCanvasSVG
from matplotlib.figure import Figure

from experiments.models.schemes import label
from experiments.runs.scores import Results, of_section, places, schemes
from experiments.stats import mean, ordered

PALETTE = (
    *("#0072b2", "#d55e00", "#009e73", "#c2649b", "#d08f00"),
    *("#22b8cf", "#8a63d2", "#a0705a", "#8a9a1b", "#e05a6d"),
)
BASELINE = "#8c8c8c"
MARKERS = "osD^vP*X"
INK = "#010203"  # replaced by the page's own text colour
_CUT = -0.3, 1.0  # Differences of losses by place, in nats.
_MOST, _CHANCE = 14.0, 5 * math.log(10)  # Of the loss of five digits.
_MAP = mpl.colormaps["viridis"].resampled(32)
STYLE: dict[Any, Any] = {
    "svg.fonttype": "none",
    "font.family": "sans-serif",
    "font.size": 10.0,
    "text.color": INK,
    "axes.edgecolor": INK,
    "axes.labelcolor": INK,
    "xtick.color": INK,
    "ytick.color": INK,
    "axes.spines.top": False,
    "axes.spines.right": False,
    "axes.grid": True,
    "axes.grid.axis": "y",
    "grid.color": INK,
    "grid.alpha": 0.12,
    "lines.linewidth": 1.8,
    "lines.markersize": 5.0,
}


def looks(names: Sequence[str], baseline: str = "none") -> dict[str, tuple[str, str]]:
    """Returns the colour and the marker of each name; grey is reserved for the baseline."""
    out = {baseline: (BASELINE, MARKERS[-1])}
    for i, name in enumerate(n for n in names if n != baseline):
        marker = MARKERS[(i + i // len(PALETTE)) % (len(MARKERS) - 1)]
        out[name] = (PALETTE[i % len(PALETTE)], marker)
    return out


def lengths(results: Results, section: str, mode: str, split: bool = False) -> str:
    """Returns the plot of a section's scores against length.

    With `split`, schemes that end near the lowest score have a panel of their own, with a larger
    scale, if others end far from them.
    """
    with mpl.rc_context({**STYLE, "svg.hashsalt": f"lengths-{section}-{mode}"}):
        rows = of_section(results, section)
        views = [(row, view) for row in rows.values() for shown, view in row.views if shown == mode]
        if not views:
            return ""
        labels = next(iter(rows.values())).labels
        lines = [[mean(score.values) for score in row.scores(mode, v).values()] for row, v in views]
        limit = _limit_of_the_lowest(lines) if split else None
        if limit is None:
            figure, axes = new_figure()
            panels = {axes: labels.limits or _common_limits(results, section)}
            axes.set_ylabel(labels.unit)
        else:
            figure, above, below = _stacked()
            known = [value for line in lines for value in line if math.isfinite(value)]
            low, high = min(known), max(known)
            panels = {above: (limit, high + 0.2 * (high - limit))}
            panels[below] = low - 0.1 * (limit - low), limit
            figure.text(0.015, 0.56, labels.unit, rotation="vertical", ha="left", va="center")
        styles = looks(schemes(results))
        for axes, limits in panels.items():
            ends, ticks, trained = [], set(), set()
            for row, variant in views:
                scores = row.scores(mode, variant)
                ticks |= set(scores)
                trained |= {n for n, score in scores.items() if score.in_distribution}
                values = [score.values for score in scores.values()]
                end = _line(axes, list(scores), values, styles[row.scheme], variant, row.fitted)
                name = row.label(variant) + ("" if row.fitted else " (not fitted)")
                if limit is None or limits[0] <= end[1] < limits[1]:
                    ends.append((*end, name))
            axes.set_xscale("log", base=2)
            _length_ticks(axes, sorted(ticks), trained)
            axes.set_ylim(*limits)
            label_ends(axes, ends)
        axes.set_xlabel(f"length in {labels.length_unit}")
        title = f"{section}: {labels.metric} against length, {mode}"
        return drawing(figure, f"lengths-{section}-{mode}", title)


def _limit_of_the_lowest(lines: Sequence[Sequence[float]]) -> float | None:
    """Returns a limit above the lines that end near the lowest score.

    None if no others are far, or if these lines have most of the range from their beginning.

    >>> _limit_of_the_lowest([[1.0, 1.0], [1.0, 2.0], [1.5, 9.0]]), _limit_of_the_lowest([[1.0]])
    (2.15, None)
    >>> _limit_of_the_lowest([[9.0, 1.0], [9.0, 8.5]])
    """
    ends = sorted(line[-1] for line in lines if math.isfinite(line[-1]))
    gaps = [(b - a, a) for a, b in itertools.pairwise(ends)]
    gap, last = max(gaps, default=(0.0, 0.0))
    if not gap or gap < 0.25 * (ends[-1] - ends[0]):
        return None
    lowest = [x for line in lines if line[-1] <= last for x in line if math.isfinite(x)]
    limit = max(lowest) + 0.15 * (max(lowest) - min(lowest))
    return limit if limit - min(lowest) < 0.5 * (ends[-1] - min(lowest)) else None


def maps(results: Results, section: str) -> str:
    """Returns maps of scores by length and place in the row, a map per fitted scheme."""
    maps = places(results, section)
    lengths = sorted({length for rows in maps.values() for length in rows})
    scores = [x for rows in maps.values() for row in rows.values() for x in row]
    values = [x for x in scores if math.isfinite(x)]
    if not values:
        return ""
    first = next(iter(of_section(results, section).values()))
    labels, trained = first.labels, first.task.train_length
    limits = (0.0, 1.0) if labels.higher_is_better else (min(values), max(values))
    with mpl.rc_context({**STYLE, "svg.hashsalt": f"maps-{section}", "axes.grid": False}):
        figure, all_axes = _small_multiples(len(maps), 0.18 * len(lengths))
        for axes, (scheme, rows) in zip(all_axes, maps.items(), strict=True):
            axes.set_title(label(scheme), fontsize=9.5, pad=3.0)
            for y, length in enumerate(lengths):
                if length in rows:
                    _map_row(axes, y, rows[length], limits, trained / length)
            axes.set_ylim(len(lengths) - 0.5, -0.5)
            axes.set_yticks(range(len(lengths)), lengths)
            axes.tick_params(length=0, labelsize=8.5)
        left, right = all_axes[0].get_position().x0, max(a.get_position().x1 for a in all_axes)
        bottom, top = all_axes[-1].get_position().y0, all_axes[0].get_position().y1
        figure.text((left + right) / 2, 0.0, "place in the row", va="bottom", ha="center")
        width, height = figure.get_size_inches()
        high = min(top - bottom, 1.6 / height)
        scale = figure.add_axes((right + 0.2 / width, (top + bottom - high) / 2, 0.1 / width, high))
        colours = mpl.cm.ScalarMappable(mpl.colors.Normalize(*limits), _MAP)
        figure.colorbar(colours, cax=scale)
        scale.set_title(labels.unit, fontsize=8.5, loc="left")
        return drawing(figure, f"maps-{section}", f"{section}: {labels.metric} by length and place")


def _map_row(axes, y: int, row: Sequence[float], limits: tuple[float, float], mark: float):
    edges = np.linspace(0.0, 1.0, len(row) + 1)
    heights = y - 0.45, y + 0.45
    cells = np.ma.masked_invalid([row])
    axes.pcolormesh(
        edges, heights, cells, vmin=limits[0], vmax=limits[1], cmap=_MAP, ec="face", lw=0.2
    )
    if mark < 1:
        axes.plot((mark, mark), heights, color=PALETTE[1], linewidth=1.6)


def _small_multiples(count: int, height: float, across: int = 4):
    """A figure of `count` axes in rows of like length, with room for a scale; inches."""
    width, space, gap, left, bottom = 1.14, 0.2, 0.36, 0.5, 0.42
    down = math.ceil(count / across)
    across = math.ceil(count / down)
    size = left + across * (width + space) + 1.0, down * (height + gap) + bottom
    figure = Figure(figsize=size)
    figure.patch.set_alpha(0.0)
    panels = []
    for i in range(count):
        x, y = left + i % across * (width + space), size[1] - (i // across + 1) * (height + gap)
        axes = figure.add_axes((x / size[0], y / size[1], width / size[0], height / size[1]))
        axes.patch.set_alpha(0.0)
        axes.spines[:].set_visible(False)
        axes.set_xlim(0.0, 1.0)
        axes.set_xticks((0.0, 0.5, 1.0), ("0", "0.5", "1"))
        axes.tick_params(labelleft=i % across == 0, labelbottom=i + across >= count)
        panels.append(axes)
    return figure, panels


def curves(results: Results, section: str) -> str:
    """Returns the plot of a section's training loss against steps."""
    with mpl.rc_context({**STYLE, "svg.hashsalt": f"curves-{section}"}):
        figure, axes = new_figure()
        styles, ends = looks(schemes(results)), []
        for scheme, row in of_section(results, section).items():
            curves = [result.curve for result in row.results if result.curve]
            if not curves:
                continue
            seeds, name = len(row.results), label(scheme)
            name += f" ({len(curves)} of {seeds} seeds)" if len(curves) < seeds else ""
            values = list(zip(*(curve["loss"] for curve in curves), strict=False))
            steps, style = curves[0]["step"][: len(values)], (styles[scheme][0], "")
            ends.append((*_line(axes, steps, values, style, "", True), name))
        if not ends:
            return ""
        axes.set_xlabel("optimiser steps")
        axes.set_ylabel("training loss in nats")
        axes.set_xlim(left=0)
        label_ends(axes, ends)
        return drawing(figure, f"curves-{section}", f"{section}: training loss against steps")


def differences(
    rows: Mapping[str, Mapping[str, tuple[float, float, float]]],
    unit: str,
    title: str,
    name: str = "differences",
) -> str:
    """Returns a plot of means with their intervals, a row per scheme, around zero.

    `rows` has the mean, the lower and the upper bound (or NaN) by scheme, then by size; `title` is
    for readers who do not see the plot, and `name` is unique on its page.
    """
    with mpl.rc_context({**STYLE, "svg.hashsalt": title, "axes.grid.axis": "both"}):
        height, names = 0.85 + 0.34 * len(rows), [label(name) for name in rows]
        margin = max(1.15, 0.1 + 0.085 * max(map(len, names)))
        figure, axes = new_figure(height, left=margin, bottom=0.6, right=1.3)
        kinds = ordered(kind for row in rows.values() for kind in row)
        for i, kind in enumerate(kinds):
            colour, marker = PALETTE[i % len(PALETTE)], MARKERS[i % len(MARKERS)]
            shown = {y: row[kind] for y, row in enumerate(rows.values()) if kind in row}
            heights = [y + 0.2 * (i - (len(kinds) - 1) / 2) for y in shown]
            means = [mean for mean, _, _ in shown.values()]
            reach = [[max(m - low, 0.0), max(high - m, 0.0)] for m, low, high in shown.values()]
            bars = np.nan_to_num(np.array(reach, float)).T.reshape(2, -1)
            axes.errorbar(
                means, heights, xerr=bars, fmt=marker, color=colour, label=kind, elinewidth=1.4
            )
        axes.set_yticks(range(len(rows)), names)
        axes.set_ylim(len(rows) - 0.5, -0.5)
        axes.axvline(0.0, color=INK, linewidth=0.8, alpha=0.6)
        axes.locator_params(axis="x", nbins=6)
        axes.set_xlabel(unit)
        if len(kinds) > 1:
            figure.legend(loc="center right", frameon=False)
        return drawing(figure, name, title)


def by_place(
    lines: Mapping[str, Sequence[float]], width: int, trained: int, minus: str, name: str
) -> str:
    """Returns the plot of losses by place in a text, as <svg>.

    `lines` has means over `width` tokens by method: differences to the method `minus`, cut where
    they are great, or losses if it is "".
    """
    with mpl.rc_context({**STYLE, "svg.hashsalt": name, "lines.linewidth": 1.5}):
        figure, axes = new_figure(right=_room_for(lines))
        styles, ends, count = looks([*lines], baseline="rope"), [], 0
        for method, values in lines.items():
            count = len(values)
            x = [width / 1024 * (i + 0.5) for i in range(count)]
            axes.plot(x, values, color=styles[method][0])
            end = max(_CUT[0], min(values[-1], _CUT[1])) if minus else values[-1]
            ends.append((x[-1], end, styles[method][0], 1.0, method))
        if minus:
            axes.axhline(0.0, color=INK, linewidth=0.8, alpha=0.6)
            axes.set_ylim(*_CUT)
        if trained < width * count:
            mark_trained(axes, trained / 1024)
        axes.set_xlim(0, width * count / 1024)
        axes.set_xlabel("place in the text, thousand tokens")
        axes.set_ylabel(f"nats per token, minus {minus}" if minus else "nats per token")
        label_ends(axes, ends)
        title = "Loss by place" + (f" minus that of {minus}" if minus else "")
        return drawing(figure, name, title)


def answers(
    lines: Mapping[str, Sequence[tuple[float, float]]],
    names: Sequence[str],
    trained: int,
    name: str,
) -> str:
    """Returns the plot of losses of five-digit answers by the distance of their facts, as <svg>.

    `lines` has distances in tokens and losses in nats by method; greater losses are cut. `names`
    has all methods of the page, for their colours.
    """
    with mpl.rc_context({**STYLE, "svg.hashsalt": name, "lines.linewidth": 1.5}):
        figure, axes = new_figure(right=_room_for(lines))
        styles, ends = looks(names, baseline="rope"), []
        for method, points in lines.items():
            x, y = [distance / 1024 for distance, _ in points], [loss for _, loss in points]
            colour, marker = styles[method]
            axes.plot(x, y, color=colour, marker=marker, markersize=4.0)
            far = max(points)[1]
            ends.append((max(x), min(far, _MOST), colour, 1.0, method))
        axes.axhline(_CHANCE, color=INK, linewidth=0.8, linestyle="--", alpha=0.6)
        place = dict(xy=(0.01, _CHANCE - 0.1), xycoords=("axes fraction", "data"), va="top")
        axes.annotate("chance", **place, fontsize=9.0)
        axes.set_xlim(left=0)
        axes.set_ylim(0, _MOST)
        if trained / 1024 < axes.get_xlim()[1]:
            mark_trained(axes, trained / 1024)
        axes.set_xlabel("distance of the fact, thousand tokens")
        axes.set_ylabel(f"nats of the answer, up to {_MOST:g}")
        label_ends(axes, ends)
        return drawing(figure, name, "Nats of an answer by the distance of its fact")


def _room_for(names: Iterable[str]) -> float:
    """The inches that labels of lines need at the right."""
    return max(1.3, 0.25 + 0.085 * max(map(len, names)))


def new_figure(height: float = 3.7, left: float = 0.65, bottom: float = 0.7, right: float = 1.8):
    """Returns a figure and its axes, with room at the right for labels; sizes in inches."""
    width = 6.2
    figure = Figure(figsize=(width, height))
    figure.patch.set_alpha(0.0)
    size = (width - left - right) / width, (height - bottom - 0.15) / height
    axes = figure.add_axes((left / width, bottom / height, *size))
    axes.patch.set_alpha(0.0)
    return figure, axes


def _stacked():
    figure = Figure(figsize=(6.6, 5.4))
    figure.patch.set_alpha(0.0)
    above, below = (figure.add_axes((0.1, y, 0.68, 0.42)) for y in (0.56, 0.125))
    for axes in (above, below):
        axes.patch.set_alpha(0.0)
    above.tick_params(labelbottom=False, bottom=False)
    above.spines["bottom"].set_visible(False)
    return figure, above, below


def _line(axes, x: Sequence[Any], values, look, variant, fitted: bool):
    """Draws a line with a band from least to greatest seed; returns its end and its style."""
    colour, marker = look
    means = [mean(row) for row in values]
    style = "-" if fitted and not variant else (":" if variant else "--")
    alpha = 1.0 if fitted else 0.45
    face = "none" if variant else colour
    axes.plot(
        x, means, style, color=colour, marker=marker, markerfacecolor=face, alpha=alpha, zorder=3
    )
    if any(len(row) > 1 for row in values):
        scores = np.array(values, float)  # Of NumPy, least and greatest are NaN where a seed's is.
        low, high = scores.min(1), scores.max(1)
        axes.fill_between(x, low, high, color=colour, alpha=0.16, linewidth=0)
    real = [(a, b) for a, b in zip(x, means, strict=True) if math.isfinite(b)]
    return (*(real[-1] if real else (x[-1], math.nan)), colour, alpha)


def _length_ticks(axes, ticks: list[int], trained: set[int]):
    """Ticks at the lengths, the training length marked; of two that are too close, one."""
    shown: list[int] = []
    for n in sorted(ticks, key=lambda n: (n not in trained, -n)):
        if all(abs(math.log2(n / other)) >= 0.3 for other in shown):
            shown.append(n)
    names = [f"{n}\n(trained)" if n in trained else f"{n}" for n in shown]
    axes.set_xticks(shown, names)
    axes.set_xticks([], minor=True)
    for n in trained:
        axes.axvline(n, color=INK, linestyle=":", linewidth=1.0, alpha=0.6)


def _common_limits(results: Results, section: str) -> tuple[float, float]:
    """One range for all modes of a section, so that adjacent plots can be compared."""
    values = [
        value
        for row in of_section(results, section).values()
        for mode, variant in row.views
        for score in row.scores(mode, variant).values()
        for value in score.values
        if math.isfinite(value)
    ]
    low, high = min(values, default=0.0), max(values, default=1.0)
    room = 0.05 * (high - low) or 0.1
    return low - room, high + room


def drawing(figure, name: str, title: str) -> str:
    """Returns a figure as an <svg> element whose ids are unique on a page of many."""
    buffer = io.StringIO()
    nothing = dict.fromkeys(("Date", "Creator", "Format", "Type"))
    FigureCanvasSVG(figure).print_svg(buffer, metadata=nothing)
    svg = buffer.getvalue()
    svg = svg[svg.index("<svg") :].strip()
    svg = re.sub(r"<metadata>.*?</metadata>", "", svg, flags=re.DOTALL)
    svg = re.sub(r' xmlns(:\w+)?="[^"]*"', "", svg)
    name = re.sub(r"[^\w.-]", "-", name)  # A space would end url(#...), and nothing be clipped.
    svg = re.sub(r'(\bid="|href="#|url\(#)', rf"\g<1>{name}-", svg)
    svg = svg.replace(INK, "currentColor")
    words = title.replace("&", "&amp;").replace('"', "&quot;").replace("<", "&lt;")
    return svg.replace("<svg", f'<svg role="img" aria-label="{words}"', 1)


def standalone(svg: str, ink: str = "#7d8590") -> str:
    """Returns an <svg> element as the text of a file, by default in an ink for light and dark."""
    spaces = 'xmlns="http://www.w3.org/2000/svg" xmlns:xlink="http://www.w3.org/1999/xlink"'
    return svg.replace("<svg", f"<svg {spaces}", 1).replace("currentColor", ink) + "\n"


def mark_trained(axes, place: float) -> None:
    axes.axvline(place, color=INK, linestyle=":", linewidth=1.0)
    where = ("data", "axes fraction")
    axes.annotate("trained ", (place, 1.0), xycoords=where, ha="right", va="top", fontsize=9.0)


def label_ends(axes, ends):
    """Writes a label next to the end of each line; labels that would overlap move apart.

    `ends` has (x, y, colour, alpha, label) of each line's last point.
    """
    ends = sorted((end for end in ends if math.isfinite(end[1])), key=lambda end: end[1])
    room = axes.get_position().height * axes.figure.get_figheight() * 72
    edge = axes.get_xlim()[1]
    # From values to fractions of the height, on logarithmic axes too.
    to_fraction = axes.transScale + axes.transLimits
    heights = [to_fraction.transform((edge, end[1]))[1] * room for end in ends]
    places = spread(heights, gap=12.5, room=room)
    for (_, y, colour, alpha, name), height, place in zip(ends, heights, places, strict=True):
        axes.annotate(
            name,
            xy=(edge, y),
            xytext=(18, place - height),
            textcoords="offset points",
            color=colour,
            alpha=max(alpha, 0.75),
            va="center",
            fontsize=9.5,
            annotation_clip=False,
            arrowprops=dict(
                arrowstyle="-", color=colour, alpha=0.5 * alpha, linewidth=0.8, relpos=(0.0, 0.5)
            ),
        )


def spread(preferred: Sequence[float], gap: float, room: float) -> list[float]:
    """Returns ascending places at least `gap` apart, near the preferred ones and within [0, room].

    More places than fit exceed the room.

    >>> spread([1.0, 5.0, 5.0, 9.9], gap=1.0, room=10.0)
    [1.0, 4.5, 5.5, 9.9]
    """
    from scipy.optimize import isotonic_regression  # Slow to import.

    ranks = gap * np.arange(len(preferred))
    places = isotonic_regression(np.asarray(preferred) - ranks).x
    return (places.clip(0.0, max(0.0, room - gap * (len(preferred) - 1))) + ranks).tolist()
