"""Markdown that the pages of studies and of the scoreboard share."""

from collections.abc import Iterable, Iterator, Sequence
from typing import NamedTuple

from experiments.pages.tables import ordered
from experiments.runs.run import Result


def table(heads: Sequence[str], rows: Iterable[Sequence[str]], words: int = 1) -> Iterator[str]:
    """Yields the lines of a table and an empty line.

    Args:
      heads: of the columns.
      rows: of cells.
      words: number of columns at the left that hold words; the others hold numbers.

    >>> list(table(["scheme", "32"], [["rope", "0.9"]]))
    ['| scheme | 32 |', '|---|---:|', '| rope | 0.9 |', '']
    """
    yield _row(heads)
    yield f"|{'---|' * words}{'---:|' * (len(heads) - words)}"
    yield from map(_row, rows)
    yield ""


def _row(cells: Sequence[str]) -> str:
    return f"| {' | '.join(cells).lstrip()} |"


class Provenance(NamedTuple):
    """Distinct versions, processors and commits of results, each as text."""

    versions: str
    python: str
    processors: str
    commits: str


def provenance(results: Sequence[Result]) -> Provenance:
    """Returns the distinct versions, processors and commits of results."""
    commits = ordered(result.commit for result in results)
    changed = " (+: with uncommitted changes)" if any(x.endswith("+") for x in commits) else ""
    return Provenance(
        "; ".join(ordered(", ".join(result.versions) for result in results)),
        ", ".join(ordered(str(result.environment.get("python")) for result in results)),
        "; ".join(ordered(result.processor for result in results)),
        ", ".join(commits) + changed,
    )
