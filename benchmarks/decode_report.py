"""What the decode benchmark gives beside its cells: the costs of compiled steps, and the figure."""

import math
from collections.abc import Sequence
from typing import Any, NamedTuple

from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.ticker import FuncFormatter, NullLocator
from rich.table import Column, Table

from benchmarks.cells import Cell
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
    "mamba2": dict(color=charts.FAINT, linewidth=1.4, linestyle="--"),
    "mlstm": dict(color=charts.FAINT, linewidth=1.4, linestyle=":"),
    COPY: dict(color=charts.FAINT, linewidth=4.0, zorder=1),
}


class Machine(NamedTuple):
    """What the machine can do at most, and what starting a loop takes."""

    bytes_per_second: float
    flops_per_second: float
    start_seconds: float

    @property
    def summary(self) -> str:
        """All of it in words."""
        return (
            f"at most {self.bytes_per_second / 1e9:,.1f} GB/s read and written, "
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


def flatness(cells: Sequence[Cell]) -> str:
    """In one line, how far ours is from flat."""
    ratios = [(abs(ratio - 1), cell) for cell in cells if not math.isnan(ratio := cell.ratio(OURS, FIRST))]
    if not ratios:
        return "nothing was timed"
    furthest, cell = max(ratios, key=lambda pair: pair[0])
    return (
        f"{OURS}: within {furthest:.1%} of its time at the first prefix in every cell, "
        f"the furthest at batch {cell.at['batch']}, prefix {cell.at['prefix']:,}"
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
    batches = list(dict.fromkeys(cell.at["batch"] for cell in cells))
    figure = Figure(figsize=(1.2 + 2.5 * len(batches), 4.2), dpi=130, layout="constrained")
    figure.suptitle(title, x=0.01, horizontalalignment="left", fontsize=12, fontweight="bold", color=charts.INK)
    panels = figure.subplots(1, len(batches), squeeze=False, sharey=True)[0]
    for axes, batch in zip(panels, batches, strict=True):
        _draw_panel(axes, [cell for cell in cells if cell.at["batch"] == batch], names)
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
    prefixes = [cell.at["prefix"] for cell in cells]
    for name in names:
        line: dict[str, Any] = _LINES.get(name, dict(linewidth=1.0))
        axes.plot(prefixes, [1e3 * cell.seconds.get(name, math.nan) for cell in cells], label=name, **line)
        missing = [cell.at["prefix"] for cell in cells if math.isnan(cell.seconds.get(name, 0.0))]
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


def _number(value: float) -> str:
    return "" if math.isnan(value) else f"{value:.2f}" if value < 10 else f"{value:,.1f}"
