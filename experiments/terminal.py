"""Results as a table in the terminal, complete or in part."""

from rich import box
from rich.console import Group
from rich.markup import escape
from rich.table import Table
from rich.text import Text

from experiments import tables

TEXTS = {"waiting": "·", "missing": "", "failed": "failed", "unfitted": "-"}
NARROW, WIDE = 80, 130
STYLES = {"waiting": "dim", "failed": "red", "unfitted": "dim"}


def final_table(results: dict, width: int = 80) -> Group:
    """Returns the results as tables with their footnotes, for `Console.print`.

    Args:
      results: what results.json holds, whole or in part.
      width: of the terminal. Narrow: one table per task. Wide: all lengths of all tasks;
        otherwise some tasks show the training length and the longest (`Labels.every_length`).
    """
    grids = [grid for task in tables.tasks(results) if (grid := tables.grid(results, task))]
    groups = [grids] if width >= NARROW else [[grid] for grid in grids]
    lines = []
    for group in groups:
        lines += [_table(results, group, width >= WIDE), Text("")] if group else []
    return Group(*lines, *_notes(results, grids))


def _table(results: dict, grids: list[tables.Grid], every: bool) -> Table:
    table = Table(box=box.SIMPLE_HEAD, pad_edge=False, show_edge=False, collapse_padding=True)
    table.add_column("\nscheme", no_wrap=True)
    keep = [_columns(grid, every) for grid in grids]
    for grid, places in zip(grids, keep, strict=True):
        for at in places:
            column = grid.columns[at]
            name = escape(grid.task) if at == places[0] else ""
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
            cells += [_text(row.cells[at]) if row else Text("") for at in places]
        table.add_row(Text(label), *cells)
    return table


def _columns(grid: tables.Grid, every: bool) -> list[int]:
    places = list(range(len(grid.columns)))
    if every or grid.labels.every_length:
        return places
    trained = [at for at in places if grid.columns[at].trained]
    return sorted({*trained[-1:], places[-1]})


def _text(cell: tables.Cell) -> Text:
    if cell.kind != "value":
        return Text(TEXTS[cell.kind], STYLES.get(cell.kind, ""))
    mark = tables.note_mark(cell.note)
    return Text.assemble((cell.text, "bold" if cell.best else ""), (mark, "dim"))


def _notes(results: dict, grids: list[tables.Grid]):
    """The lines below the table."""
    runs = results.get("runs", [])
    units: dict[str, list[str]] = {}
    for grid in grids:
        mode = "" if grid.mode == "plain" else f" ({grid.mode})"
        better = "higher" if grid.labels.higher_is_better else "lower"
        unit = f"{grid.labels.unit}{mode} at each length, {better} is better"
        units.setdefault(unit, []).append(grid.task)
    for unit, names in units.items():
        yield Text(f"{', '.join(names)}: {unit}.", "dim")
    if any(column.trained for grid in grids for column in grid.columns):
        yield Text("* the training length.", "dim")
    rules = tables.ordered(
        run.get("fit_rule") or "fitted"
        for run in runs
        if tables.done(run) and not run.get("fitted")
    )
    if rules:
        yield Text(f"- not fitted: fails {' or '.join(rules)}.", "dim")
    if (seeds := max((len(run.get("seeds") or [0]) for run in runs), default=1)) > 1:
        yield Text(f"Means of {seeds} seeds.", "dim")
    for i, note in enumerate(tables.footnotes(results), 1):
        yield Text(f"{tables.note_mark(i)} {note}", "dim")
    for run in runs:
        if run.get("status") == "failed":
            reason = tables.one_line(run.get("error") or "no reason was given")
            yield Text(f"{run['task']}, {run['scheme']} failed: {reason}", "red")
