"""Labels at the ends of lines, in place of a legend."""

import math
from collections.abc import Sequence


def label_ends(axes, ends):
    """Writes a label next to the end of each line; labels that would overlap move apart.

    Args:
      axes: of the lines.
      ends: (x, y, colour, alpha, label) of each line's last point.
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

    Places that are too close form a block around their mean. More places than fit exceed the room.

    >>> spread([1.0, 5.0, 5.0, 9.9], gap=1.0, room=10.0)
    [1.0, 4.5, 5.5, 9.9]
    """
    blocks: list[list[float]] = []  # preferred places minus gap x rank in the block

    def start(block):
        highest = max(0.0, room - gap * (len(block) - 1))
        return min(max(sum(block) / len(block), 0.0), highest)

    for place in preferred:
        blocks.append([place])
        while len(blocks) > 1:
            low, high = blocks[-2], blocks[-1]
            if start(low) + gap * len(low) <= start(high) + 1e-9:
                break
            blocks[-2:] = [low + [place - gap * len(low) for place in high]]
    return [start(block) + gap * i for block in blocks for i in range(len(block))]
