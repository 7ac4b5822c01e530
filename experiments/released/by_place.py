"""Losses of one text by place: their table, conclusions and picture.

Sentences are computed from the numbers.
"""

import dataclasses
import itertools
from collections.abc import Iterator, Mapping

import numpy as np

from experiments.models.methods import window, window_of
from experiments.pages import plots

_COLUMNS = 6
_POINTS = 24


@dataclasses.dataclass(frozen=True)
class ByPlace:
    """Losses of one text.

    Attributes:
      text: its name.
      trained: the trained length L.
      losses: [N] in nats by method.
    """

    text: str
    trained: int
    losses: Mapping[str, np.ndarray]

    @property
    def count(self) -> int:
        """The number of losses N."""
        return len(next(iter(self.losses.values())))

    @property
    def edges(self) -> list[int]:
        """Where columns of the table begin and end: L / 4 apart if that fits, else N / 6."""
        width = max(1, self.trained // 4)
        if not 3 <= self.count / width <= _COLUMNS:
            width = -(-self.count // _COLUMNS)
        return [*range(0, self.count, width), self.count]

    @property
    def names(self) -> list[str]:
        """The edges in words, as in 0, 2k, 4k."""
        thousands = all(edge % 1024 == 0 for edge in self.edges)
        return [f"{edge // 1024}k" if thousands and edge else f"{edge}" for edge in self.edges]

    def table(self) -> tuple[list[str], list[list[str]]]:
        """Returns the heads of columns, with † beyond the trained length, and a row per method."""
        pairs = list(itertools.pairwise(self.edges))
        marks = ["†" if edge > self.trained else "" for edge in self.edges]
        heads = [
            f"{a}-{b}{m}" for a, b, m in zip(self.names, self.names[1:], marks[1:], strict=False)
        ]
        rows = [
            [name, *(f"{x[a:b].mean():.3f}" for a, b in pairs)] for name, x in self.losses.items()
        ]
        return heads, rows

    def mean(self, method: str, first: int, last: int | None = None) -> float:
        """Returns the mean loss of a method at places from `first` to before `last`."""
        return float(self.losses[method][first:last].mean())

    def beside_rope(self, first: int, last: int | None = None) -> str:
        """Returns the mean of rope at some places and the differences of others, in words."""
        base = self.mean("rope", first, last)
        others = {x: self.mean(x, first, last) - base for x in self.losses if x != "rope"}
        order = sorted(others, key=others.__getitem__)
        words = ", ".join(f"{name} {_words(others[name])}" for name in order)
        return f"rope has {base:.3f} nats per token, {words}"

    def sentences(self) -> Iterator[str]:
        """Yields conclusions from the numbers."""
        trained = self.trained
        if "rope" in self.losses and len(self.losses) > 1:
            if self.count > trained:
                yield f"Beyond the trained {trained:,} tokens {self.beside_rope(trained)}."
            within = min(self.count, trained)
            yield f"On the first {within:,} tokens {self.beside_rope(0, within)}."
        for name in self.losses:
            sinks, last = window_of(name) or (0, 0)
            seen, plain = sinks + last, window(sinks + last)
            if sinks and plain in self.losses and self.count > seen:
                alone = self.mean(plain, seen)
                gain = _words(self.mean(name, seen) - alone)
                yield (
                    f"From token {seen:,} on, a window of as many tokens has {alone:.3f}; with "
                    f"{sinks} of them the first of the text, {gain}."
                )
        yield "This is one text, without an interval: small differences may be chance."

    def picture(self) -> str:
        """Returns the plot of losses by place, as <svg>, minus a window with sinks among others."""
        starts = range(0, self.count - self.smooth + 1, self.smooth)
        sinks = (name for name in self.losses if (window_of(name) or (0,))[0])
        minus = next(sinks, "") if len(self.losses) > 1 else ""
        base = self.losses.get(minus, np.zeros(self.count))
        lines = {
            name: [float((x - base)[start : start + self.smooth].mean()) for start in starts]
            for name, x in self.losses.items()
            if name != minus
        }
        return plots.by_place(lines, self.smooth, self.trained, minus, "released")

    @property
    def smooth(self) -> int:
        """How many tokens a point of the picture has."""
        return max(1, self.count // _POINTS)


def _words(difference: float) -> str:
    """Returns a difference in words.

    >>> _words(-0.2764), _words(0.0123), _words(0.0)
    ('0.276 less', '0.012 more', 'the same')
    """
    if f"{abs(difference):.3f}" == "0.000":
        return "the same"
    return f"{abs(difference):.3f} {'less' if difference < 0 else 'more'}"
