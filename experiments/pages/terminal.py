"""Results as a table in the terminal, complete or in part."""

from rich import box
from rich.console import Group
from rich.markup import escape
from rich.table import Table
from rich.text import Text

from experiments.pages import tables

TEXTS = {"waiting": "·", "missing": "", "failed": "failed", "unfitted": "-"}
NARROW, WIDE = 80, 130
STYLES = {"waiting": "dim", "failed": "red", "unfitted": "dim"}


def final_table(results: tables.Results, width: int = 80) -> Group:
    """Returns the results as tables with their footnotes, for `Console.print`.

    Args:
      results: complete or in part.
      width: of the terminal. Narrow: one table per task. Wide: all lengths of all tasks;
        otherwise some tasks show the training length and the longest (`Labels.every_length`).
    """
    grids = [grid for name in tables.sections(results) if (grid := tables.grid(results, name))]
    groups = [grids] if width >= NARROW else [[grid] for grid in grids]
    lines = []
    for group in groups:
        lines += [_table(results, group, width >= WIDE), Text("")] if group else []
    return Group(*lines, *_notes(results, grids))


def _table(results: tables.Results, grids: list[tables.Grid], every: bool) -> Table:
    table = Table(box=box.SIMPLE_HEAD, pad_edge=False, show_edge=False, collapse_padding=True)
    table.add_column("\nscheme", no_wrap=True)
    keep = [_columns(grid, every) for grid in grids]
    for grid, places in zip(grids, keep, strict=True):
        for place in places:
            column = grid.columns[place]
            name = escape(grid.section) if place == places[0] else ""
            length = f"[bold]{column.length}*[/]" if column.trained else f"{column.length}"
            table.add_column(f"{name}\n{length}", justify="right", no_wrap=True)
    rows = {
        (row.scheme, row.variant): row.label
        for scheme in tables.schemes(results)
        for grid in grids
        for row in grid.rows
        if row.scheme == scheme
    }
    for key, label in rows.items():
        cells = []
        for grid, places in zip(grids, keep, strict=True):
            row = next((row for row in grid.rows if (row.scheme, row.variant) == key), None)
            cells += [_text(row.cells[place]) if row else Text("") for place in places]
        table.add_row(Text(label), *cells)
    return table


def _columns(grid: tables.Grid, every: bool) -> list[int]:
    places = list(range(len(grid.columns)))
    if every or grid.labels.every_length:
        return places
    trained = [place for place in places if grid.columns[place].trained]
    return sorted({*trained[-1:], places[-1]})


def _text(cell: tables.Cell) -> Text:
    if cell.kind != "value":
        return Text(TEXTS[cell.kind], STYLES.get(cell.kind, ""))
    mark = tables.note_mark(cell.note)
    return Text.assemble((cell.text, "bold" if cell.best else ""), (mark, "dim"))


def _notes(results: tables.Results, grids: list[tables.Grid]):
    """The lines below the table."""
    units: dict[str, list[str]] = {}
    for grid in grids:
        mode = "" if grid.mode == "plain" else f" ({grid.mode})"
        unit = f"{grid.labels.unit}{mode} at each length, {grid.labels.better} is better"
        units.setdefault(unit, []).append(grid.section)
    for unit, names in units.items():
        yield Text(f"{', '.join(names)}: {unit}.", "dim")
    if any(column.trained for grid in grids for column in grid.columns):
        yield Text("* the training length.", "dim")
    unfitted = [row.first for row in results if row.done and not row.fitted]
    if rules := tables.ordered(result.fit_rule for result in unfitted if result):
        yield Text(f"- not fitted: fails {' or '.join(rules)}.", "dim")
    if (seeds := max((len(row.seeds) for row in results), default=1)) > 1:
        yield Text(f"Means of {seeds} seeds.", "dim")
    for i, note in enumerate(tables.footnotes(results), 1):
        yield Text(f"{tables.note_mark(i)} {note}", "dim")
    for row in results:
        if row.error:
            yield Text(f"{row.section}, {row.scheme} failed: {tables.one_line(row.error)}", "red")
