"""The figures of the benchmarks as tables, on a console and in Markdown: ratios first, then what they come from."""

import math
import sys
from collections.abc import Iterable
from typing import Any, NamedTuple

import rich.table
from rich.console import Console

from benchmarks.cells import Cell, Grid, Record


class Table(NamedTuple):
    """Text in columns."""

    title: str
    headers: list[str]
    rows: list[list[str]]


def ratio_table(grid: Grid) -> Table:
    """Times in units of ours; ours in units of its lower bounds; and the fractions of the peak."""
    others = [name for name in grid.cases if name not in (grid.ours, *grid.bounds)]
    counted = [name for name in grid.cases if any(name in cell.of_peak for cell in grid.cells)]

    def ratios(cell: Cell) -> list[str]:
        values = [cell.ratio(name, grid.ours) for name in others]
        values += [cell.ratio(grid.ours, name) for name in grid.bounds]
        return [*map(_number, values), *(_percent(cell.of_peak.get(name, math.nan)) for name in counted)]

    headers = [*others, *(f"{grid.ours} / {name}" for name in grid.bounds), *(f"{name}, of peak" for name in counted)]
    return _table(grid, f"{grid.title}: time, in units of {grid.ours}", headers, ratios)


def time_table(grid: Grid) -> Table:
    """The time or the rate of every case, with how it was run."""

    def times(cell: Cell) -> list[str]:
        return [_time(cell, name, grid.unit) for name in grid.cases]

    return _table(grid, f"{grid.title}: {grid.unit}", grid.cases, times)


def memory_table(grid: Grid) -> Table:
    """Megabytes of every case; no rows if they are not known."""
    cells = [cell for cell in grid.cells if cell.memory]
    megabytes = lambda cell: [f"{cell.memory[name] / 1e6:,.1f}" if name in cell.memory else "" for name in grid.cases]
    return _table(grid._replace(cells=cells), f"{grid.title}: MB allocated", grid.cases, megabytes)


def tables(grids: Iterable[Grid]) -> tuple[list[Table], list[Table]]:
    """The tables of ratios, and those of times and memory."""
    grids = list(grids)
    figures = [table for grid in grids for table in (time_table(grid), memory_table(grid)) if table.rows]
    return [ratio_table(grid) for grid in grids], figures


def show(measured: Record) -> None:
    """Prints a record: ratios, remarks, then times and memory."""
    console = Console(width=None if sys.stdout.isatty() else 160)
    console.print(f"{measured.setting}; {measured.machine}, jax {measured.versions['jax']}", highlight=False)
    ratios, figures = tables(measured.grids)
    for table in ratios:
        console.print(_on_console(table))
    for remark in measured.remarks:
        console.print(remark, highlight=False, markup=False)
    for table in figures:
        console.print(_on_console(table))


def as_markdown(table: Table) -> list[str]:
    """The table as lines of Markdown, numbers to the right."""
    numeric = [all(not row[i] or row[i][0].isdigit() for row in table.rows) for i in range(len(table.headers))]
    line = lambda cells: "| " + " | ".join(cells) + " |"
    rule = line("---:" if right else "---" for right in numeric)
    return [f"{table.title}", "", line(table.headers), rule, *map(line, table.rows)]


def _on_console(table: Table) -> rich.table.Table:
    result = rich.table.Table(*table.headers, title=table.title)
    for column in result.columns:
        column.justify = "right"
    for row in table.rows:
        result.add_row(*row)
    return result


def _table(grid: Grid, title: str, headers: list[str], values: Any) -> Table:
    rows = [[*map(_condition, cell.at.values()), *values(cell)] for cell in grid.cells]
    return Table(title, [*(grid.cells[0].at if grid.cells else ()), *headers], rows)


def _condition(value: Any) -> str:
    return f"{value:,}" if isinstance(value, int) else str(value)


def _time(cell: Cell, name: str, unit: str) -> str:
    if name not in cell.seconds:
        return ""
    seconds = cell.seconds[name]
    if math.isnan(seconds):
        return "does not fit"
    if unit == "ms":
        text = f"{1e3 * seconds:,.3f}" if seconds < 1e-2 else f"{1e3 * seconds:,.1f}"
    else:
        assert cell.tokens is not None
        text = f"{cell.tokens / seconds:,.0f}"
    return f"{text} ({cell.labels[name]})" if name in cell.labels else text


def _number(value: float) -> str:
    return "" if math.isnan(value) else f"{value:.2f}" if value < 10 else f"{value:,.1f}"


def _percent(value: float) -> str:
    return "" if math.isnan(value) else f"{value:.0%}"
