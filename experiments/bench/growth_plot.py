"""Plots growth with length: logarithmic axes next to each other, one labelled line per case.

A scheme has the same colour in all panels. Lines of other libraries are dashed.
"""

from collections.abc import Sequence
from typing import Any, NamedTuple

import matplotlib as mpl
from matplotlib.figure import Figure
from matplotlib.ticker import LogLocator, NullFormatter

from experiments.pages.plot_labels import label_ends
from experiments.pages.plots import STYLE, drawing, looks, standalone


class Panel(NamedTuple):
    """One pair of axes: values by length, for each case."""

    title: str
    lines: dict[str, dict[int, float]]


def growth_plot(
    panels: Sequence[Panel], *, against: str, title: str, dashed: Sequence[str] = ()
) -> str:
    """Returns the plot as an SVG file's text.

    Args:
      panels: to plot; panels without lines are left out.
      against: label of the horizontal axes.
      title: the plot in words, for screen readers.
      dashed: cases of other libraries.
    """
    panels = [panel for panel in panels if any(panel.lines.values())]
    names = list(dict.fromkeys(name for panel in panels for name in panel.lines))
    style: Any = {**STYLE, "axes.grid.axis": "both", "axes.titlesize": 10.5, "svg.hashsalt": title}
    with mpl.rc_context(style):
        plot_width, names_width, margin = 3.0, 0.25 + 0.077 * max(map(len, names)), 0.62
        panel_width, height, bottom, top = margin + plot_width + names_width, 4.0, 0.55, 0.35
        width = panel_width * len(panels)
        figure = Figure(figsize=(width, height))
        figure.patch.set_alpha(0.0)
        for i, panel in enumerate(panels):
            axes = figure.add_axes(
                (
                    (i * panel_width + margin) / width,
                    bottom / height,
                    plot_width / width,
                    (height - bottom - top) / height,
                )
            )
            axes.patch.set_alpha(0.0)
            _draw(axes, panel, names, dashed)
            axes.set_xlabel(against)
        return standalone(drawing(figure, "growth", title))


def _draw(axes, panel: Panel, names: list[str], dashed: Sequence[str]) -> None:
    axes.set_xscale("log", base=2)
    axes.set_yscale("log")
    ends, ticks, styles = [], set(), looks(names, baseline=names[0])
    for name, line in panel.lines.items():
        if not line:
            continue
        colour, marker = styles[name]
        style = "--" if name in dashed else "-"
        axes.plot(list(line), list(line.values()), style, color=colour, marker=marker, zorder=3)
        ends.append((*list(line.items())[-1], colour, 1.0, name))
        ticks |= set(line)
    axes.set_xticks(sorted(ticks), [_count(n) for n in sorted(ticks)])
    axes.set_xticks([], minor=True)
    low, high = axes.get_ylim()
    if high < 100 * low:  # Few powers of ten: ticks between them.
        axes.yaxis.set_major_locator(LogLocator(subs=(1.0, 2.0, 5.0)))
    axes.yaxis.set_major_formatter(lambda value, _: f"{value:g}")
    axes.yaxis.set_minor_formatter(NullFormatter())
    axes.set_title(panel.title, loc="left")
    label_ends(axes, ends)


def _count(n: int) -> str:
    return f"{n // 1024}k" if n >= 1024 and n % 1024 == 0 else f"{n}"
