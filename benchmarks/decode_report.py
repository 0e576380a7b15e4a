"""What the decode benchmark gives: ratios and times as tables, JSON, and the figure."""

import itertools
import math
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.ticker import FuncFormatter, NullLocator
from rich.table import Column, Table

from benchmarks.decode_steps import HEADS_FIRST, OURS
from interdomain_jax import charts
from interdomain_jax.compiled_program import ProgramCosts

FIRST = "first prefix"
COPY = "copy"

# Colour, width and dashes of each line; those not named are thin.
_LINES: dict[str, dict[str, Any]] = {
    OURS: dict(color=charts.ACCENT, linewidth=2.2, marker="o", markersize=4, zorder=4),
    HEADS_FIRST: dict(color=charts.INK, linewidth=1.4, linestyle="--", marker="o", markersize=4, zorder=3),
    "softmax": dict(color=charts.INK, linewidth=1.8, marker="o", markersize=4, zorder=3),
    "op": dict(color=charts.ACCENT, linewidth=1.0),
    "paper": dict(color=charts.ACCENT, linewidth=1.4, linestyle="--"),
    "s4d": dict(color=charts.INK, linewidth=1.2, linestyle=":"),
    COPY: dict(color=charts.FAINT, linewidth=4.0, zorder=1),
}


class Timing(NamedTuple):
    """Seconds of a step, NaN if its loop does not fit, and the bytes that the loop needs."""

    seconds: float
    memory: int


class Cell(NamedTuple):
    """All cases that compile, for a batch of rows with `prefix` tokens each."""

    batch: int
    prefix: int
    timings: dict[str, Timing]

    def seconds(self, name: str) -> float:
        """Of a step; NaN if it did not run."""
        return self.timings[name].seconds if name in self.timings else math.nan

    def ratio(self, name: str, unit: str = OURS) -> float:
        """How many times as long as another case one takes; NaN if one of them did not run."""
        return self.seconds(name) / self.seconds(unit)


class Machine(NamedTuple):
    """Where it ran, what it can do at most, and what starting a loop takes."""

    name: str
    bytes_per_second: float
    flops_per_second: float
    start_seconds: float

    @property
    def summary(self) -> str:
        """All of it in one line."""
        return (
            f"{self.name}; at most {self.bytes_per_second / 1e9:,.1f} GB/s read and written, "
            f"{self.flops_per_second / 1e9:,.0f} GFLOP/s in float32; starting a loop takes "
            f"{1e6 * self.start_seconds:,.0f} us"
        )


class Program(NamedTuple):
    """One compiled step: the bytes that it carries from token to token, and its costs, None if it does not fit."""

    name: str
    batch: int
    prefix: int
    carried: int
    costs: ProgramCosts | None


def ratio_table(cells: Sequence[Cell], names: Sequence[str]) -> Table:
    """How many times as long as ours the others take, and how far ours is from the bound and from flat."""
    others = [name for name in names if name not in (OURS, COPY)]
    headers = [*others, f"ours / {COPY}", f"ours / {FIRST}"]

    def ratios(cell: Cell) -> list[str]:
        values = [*(cell.ratio(name) for name in others), cell.ratio(OURS, COPY), cell.ratio(OURS, FIRST)]
        return [_number(value) for value in values]

    return _table(cells, headers, ratios, title="Times in units of ours")


def time_table(cells: Sequence[Cell], names: Sequence[str]) -> Table:
    """Milliseconds a token of every case."""

    def times(cell: Cell) -> list[str]:
        return [_milliseconds(cell, name) for name in names]

    return _table(cells, names, times, title="Milliseconds a token, all rows of the batch together")


def flatness(cells: Sequence[Cell]) -> str:
    """In one line, how far ours is from flat."""
    ratios = [(abs(ratio - 1), cell) for cell in cells if not math.isnan(ratio := cell.ratio(OURS, FIRST))]
    if not ratios:
        return "nothing was timed"
    furthest, cell = max(ratios, key=lambda pair: pair[0])
    return (
        f"{OURS}: within {furthest:.1%} of its time at the first prefix in every cell, "
        f"the furthest at batch {cell.batch}, prefix {cell.prefix:,}"
    )


def program_table(programs: Sequence[Program]) -> Table:
    """Arithmetic and memory traffic of each compiled step, the latter also in units of ours."""
    table = Table(
        "case",
        *(
            Column(each, justify="right")
            for each in ("batch", "prefix", "carried, MB", "MFLOP in products", "moved, MB")
        ),
    )
    table.add_column(f"moved, times {OURS}", justify="right")
    moved = {each.batch: each.costs.bytes_accessed for each in programs if each.name == OURS and each.costs}
    for each in programs:
        cells = ["does not fit", "", ""]
        if each.costs:
            ratio = each.costs.bytes_accessed / moved.get(each.batch, math.nan)
            cells = [f"{each.costs.flops / 1e6:,.2f}", f"{each.costs.bytes_accessed / 1e6:,.2f}", _number(ratio)]
        table.add_row(each.name, f"{each.batch}", f"{each.prefix:,}", f"{each.carried / 1e6:,.2f}", *cells)
    return table


def cells_as_json(layer: str, dtype: str, machine: Machine, cells: Sequence[Cell]) -> dict[str, Any]:
    """All figures of a run."""
    return {
        "layer": layer,
        "dtype": dtype,
        "machine": machine._asdict(),
        "cells": [
            {
                "batch": cell.batch,
                "prefix": cell.prefix,
                "seconds": {name: timing.seconds for name, timing in cell.timings.items()},
                "bytes": {name: timing.memory for name, timing in cell.timings.items()},
            }
            for cell in cells
        ],
    }


def programs_as_json(layer: str, chip: str, programs: Sequence[Program]) -> dict[str, Any]:
    """The costs of all compiled steps."""
    return {
        "layer": layer,
        "chip": chip,
        "programs": [
            {
                "case": each.name,
                "batch": each.batch,
                "prefix": each.prefix,
                "carried_bytes": each.carried,
                "flops": each.costs and each.costs.flops,
                "bytes_accessed": each.costs and each.costs.bytes_accessed,
            }
            for each in programs
        ],
    }


def draw(cells: Sequence[Cell], names: Sequence[str], *, title: str) -> Figure:
    """Milliseconds a token against the prefix, a panel for each batch; a cross at the top is a case that does not fit.

    Returns:
        A figure that belongs to no window.
    """
    batches = list(dict.fromkeys(cell.batch for cell in cells))
    figure = Figure(figsize=(1.2 + 2.5 * len(batches), 4.2), dpi=130, layout="constrained")
    figure.suptitle(title, x=0.01, horizontalalignment="left", fontsize=12, fontweight="bold", color=charts.INK)
    panels = figure.subplots(1, len(batches), squeeze=False, sharey=True)[0]
    for axes, batch in zip(panels, batches, strict=True):
        _draw_panel(axes, [cell for cell in cells if cell.batch == batch], names)
        axes.set_title(f"batch {batch}", loc="left", fontsize=10, color=charts.INK)
    panels[0].set_ylabel("milliseconds a token", color=charts.INK)
    # A label of the whole figure would lie under the legend.
    panels[len(panels) // 2].set_xlabel("tokens before it", color=charts.INK)
    lines, labels = panels[0].get_legend_handles_labels()
    figure.legend(lines, labels, loc="outside lower center", ncols=len(labels), frameon=False, labelcolor=charts.INK)
    return figure


def _draw_panel(axes: Axes, cells: Sequence[Cell], names: Sequence[str]) -> None:
    charts.style(axes)
    axes.set_xscale("log", base=2)
    axes.set_yscale("log")
    prefixes = [cell.prefix for cell in cells]
    for name in names:
        line: dict[str, Any] = _LINES.get(name, dict(linewidth=1.0))
        axes.plot(prefixes, [1e3 * cell.seconds(name) for cell in cells], label=name, **line)
        missing = [cell.prefix for cell in cells if name in cell.timings and math.isnan(cell.seconds(name))]
        axes.plot(
            missing,
            [0.97] * len(missing),
            transform=axes.get_xaxis_transform(),
            color=line.get("color", charts.INK),
            linestyle="",
            marker="x",
            markersize=6,
        )
    axes.set_xticks(prefixes, [f"{prefix // 1024}K" if prefix >= 1024 else f"{prefix}" for prefix in prefixes])
    axes.xaxis.set_minor_locator(NullLocator())
    axes.tick_params(which="minor", length=0)
    axes.yaxis.set_major_formatter(FuncFormatter(lambda value, _: f"{value:g}"))


def _table(cells: Sequence[Cell], headers: Sequence[str], values: Callable[[Cell], list[str]], *, title: str) -> Table:
    """A line for each cell, a section for each batch."""
    table = Table(*(Column(header, justify="right") for header in ("batch", "prefix", *headers)), title=title)
    for _, section in itertools.groupby(cells, key=lambda cell: cell.batch):
        for cell in section:
            table.add_row(f"{cell.batch}", f"{cell.prefix:,}", *values(cell))
        table.add_section()
    return table


def _milliseconds(cell: Cell, name: str) -> str:
    if name not in cell.timings:
        return ""
    seconds, memory = cell.timings[name]
    return f"wants {memory / 1e9:.1f} GB" if math.isnan(seconds) else f"{1e3 * seconds:,.3f}"


def _number(value: float) -> str:
    return "" if math.isnan(value) else f"{value:.2f}" if value < 10 else f"{value:,.1f}"
