"""The report over many runs as files: `report.md`, `report.json`, `figure_2.png` and `length_extrapolation.png`."""

import itertools
import math
import os
from collections.abc import Mapping, Sequence
from typing import Any

from etils import epath
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.ticker import FuncFormatter, LogLocator, MaxNLocator, NullLocator

from interdomain_jax import charts, markdown, strict_json
from interdomain_jax.evaluation import published
from interdomain_jax.evaluation.published import Quantity
from interdomain_jax.evaluation.tables import Cell, Found, Grid, Report, Source

FIGURE_2 = "figure_2.png"
LENGTHS = "length_extrapolation.png"
MISSING = "—"

# Of perplexity records: a row for each length and bucket of positions would bury the rest of the Markdown.
_LOSSES = ("loss", "loss_by_position")
_LENGTH_TABLES = (published.LENGTHS, published.LENGTHS_BY_CORPUS)

# One colour for each mixer of the paper's figures, and more for the cells of the cube and hybrids, by turns.
_COLOURS = {"interdomain": charts.ACCENT, "softmax": charts.INK, "s4d": "#c8553d"}
_MORE_COLOURS = ("#3b8e5a", "#8a5fa8", "#b8862b", "#3aa6a6", "#b0487f")
# One marker for each size of model.
_MARKERS = "os^Dvp"
_PANELS_IN_A_ROW = 4
# The least distance between two labels of an axis, as a share of it.
_LABELS_APART = 0.09


def prepare(directory: epath.PathLike) -> epath.Path:
    """Makes the directory, and returns it.

    Raises:
        ValueError: nothing can be written there.
    """
    path = epath.Path(directory)
    try:
        path.mkdir(parents=True, exist_ok=True)
        probe = path / f".{os.getpid()}.tmp"
        probe.write_text("")
        probe.unlink()
    except OSError as error:
        raise ValueError(f"--report is {os.fspath(directory)!r}, where nothing can be written: {error}") from error
    return path


def write(directory: epath.Path, report: Report) -> None:
    """Writes all files into a directory from `prepare`, over those of an earlier report."""
    for name, figure in ((FIGURE_2, draw_compute(report)), (LENGTHS, draw_lengths(report))):
        with (directory / name).open("wb") as file:
            figure.savefig(file, format="png")
    strict_json.write(directory / "report.json", as_json(report))
    (directory / "report.md").write_text(as_markdown(report))


def as_markdown(report: Report) -> str:
    """All tables, the figures by their files' names, what no table shows, and where each number is from."""
    lines = [
        "# The paper's tables, published and measured",
        "",
        f"Lines of the paper are from {published.SOURCE}. Measured numbers are followed by their sources in brackets;",
        "the list at the end has those. Where several runs differ in their seeds alone, a number is their mean, with",
        "the standard deviation between them and the number of each.",
        f"{MISSING} was not measured, or is not in the paper.",
    ]
    for table, grids in report.tables:
        lines += ["", f"## Table {table.number}. {table.title}"]
        for grid in grids:
            lines += ["", *([f"{grid.label}:", ""] if grid.label else []), *_grid_rows(grid, table.across)]
    lines += ["", "## Figure 2. Validation perplexity by training compute", "", f"![Figure 2]({FIGURE_2})", ""]
    lines += ["Of the paper's four sizes it prints the losses of 125M and 1.3B; the others are drawn only.", ""]
    lines += _point_rows(report)
    lines += ["", "## Length extrapolation", "", f"![Perplexity by context length]({LENGTHS})"]
    if rows := _other_rows(report):
        lines += [
            "",
            "## What no table of the paper has",
            "",
            "In the units of the records; shares lie in [0, 1].",
            "",
            *rows,
        ]
    if any(_is_in_json_alone(report, found) for found in report.others):
        lines += ["", "Losses by context length and by position are in `report.json`."]
    lines += ["", "## Sources", "", *map(_source_row, report.sources)]
    return "\n".join(lines) + "\n"


def as_json(report: Report) -> dict[str, Any]:
    """The whole report; a measured number names its sources, which hold command, config, versions and machine."""
    return {
        "paper": published.SOURCE,
        "sources": [
            {"number": number, "workdir": workdir}
            | {field: value for field, value in record._asdict().items() if field != "measurements"}
            for number, workdir, record in report.sources
        ],
        "runs": [
            {field: value for field, value in run._asdict().items() if field not in ("recipe", "numbers")}
            for run in report.runs
        ],
        "tables": [
            {
                "table": table.number,
                "title": table.title,
                "blocks": [
                    {
                        "label": grid.label,
                        "quantities": [quantity._asdict() for quantity in grid.quantities],
                        "lines": [
                            line._asdict() | {"cells": [cell and _cell_as_json(cell) for cell in line.cells]}
                            for line in grid.lines
                        ],
                    }
                    for grid in grids
                ],
            }
            for table, grids in report.tables
        ],
        "figure_2": {
            "published": [point._asdict() for point in report.published_points],
            "measured": [point._asdict() for point in report.measured_points],
        },
        "others": [{"source": source} | measurement._asdict() for source, measurement in report.others],
    }


def _cell_as_json(cell: Cell) -> dict[str, Any]:
    return {"value": cell.mean, "spread": cell.spread, "values": cell.values, "sources": cell.sources}


def _grid_rows(grid: Grid, across: bool) -> list[str]:
    """A table with a row for each model, or with a column for each."""
    cells = [
        [_cell_text(cell, quantity) for cell, quantity in zip(line.cells, grid.quantities, strict=True)]
        for line in grid.lines
    ]
    labels = [quantity.label for quantity in grid.quantities]
    heads = [[_label(line.mixer), line.size, line.origin] for line in grid.lines]
    if across:
        columns = [", ".join(head) for head in heads]
        return markdown.table(
            ["", *columns], [[label, *row] for label, row in zip(labels, zip(*cells, strict=True), strict=True)]
        )
    return markdown.table(
        ["model", "size", "from", *labels], [head + row for head, row in zip(heads, cells, strict=True)], left=3
    )


def _cell_text(cell: Cell | None, quantity: Quantity) -> str:
    if cell is None:
        return MISSING
    text = _number(cell.mean, quantity.digits)
    if cell.spread is not None:
        each = "; ".join(_number(value, quantity.digits) for value in cell.values)
        text += f" ± {_number(cell.spread, quantity.digits)} ({each})"
    return text + (f" [{', '.join(map(str, cell.sources))}]" if cell.sources else "")


def _number(value: float, digits: int) -> str:
    return f"{value:,.{digits}f}" if math.isfinite(value) else "not finite"


def _label(mixer: str) -> str:
    return published.LABELS.get(mixer, mixer)


def _point_rows(report: Report) -> list[str]:
    rows = [
        [_label(point.mixer), point.size, origin, f"{point.compute:.3g}", _number(point.perplexity, 2)]
        for origin, points in (("paper", report.published_points), ("measured", report.measured_points))
        for point in points
    ]
    return markdown.table(["model", "size", "from", "C = 6 N D, flops", "validation perplexity"], rows, left=3)


def _other_rows(report: Report) -> list[str]:
    rows = [
        [
            report.sources[source - 1].workdir,
            each.task,
            each.metric,
            MISSING if each.at is None else f"{each.at:,}",
            "not finite" if each.value is None else f"{each.value:.4g}",
            MISSING if each.error is None else f"{each.error:.2g}",
            f"{each.samples:,}",
            f"[{source}]",
        ]
        for source, each in (found for found in report.others if not _is_in_json_alone(report, found))
    ]
    heads = ["run", "task", "metric", "at", "value", "standard error", "samples", "source"]
    return markdown.table(heads, rows, left=3) if rows else []


def _is_in_json_alone(report: Report, found: Found) -> bool:
    kind = report.sources[found.source - 1].record.kind
    return kind == "perplexity" and found.measurement.metric in _LOSSES


def _source_row(source: Source) -> str:
    record = source.record
    settings = [
        f"{name} {value}"
        for name, value in record.settings.items()
        if isinstance(value, str | int | float) and not isinstance(value, bool)
    ]
    parts = [
        f"{source.workdir}, {record.kind} `{record.name}`: `{record.command}`",
        f"config {record.model['name']}, step {record.model['step']:,}",
        f"commit {record.versions.get('commit') or 'unknown'}",
        record.machine,
        f"finished {record.finished}",
        *([", ".join(settings)] if settings else []),
    ]
    return f"{source.number}. " + "; ".join(parts)


def draw_compute(report: Report) -> Figure:
    """Figure 2: validation perplexity against C, both logarithmic; the paper's points hollow, on dashed lines.

    Returns:
        A figure that belongs to no window.
    """
    chart = charts.new_chart(
        title="Validation perplexity by training compute",
        x_label="training compute C = 6 N D (flops)",
        y_label="validation perplexity",
    )
    colours = _colours(report)
    for origin, points in (("paper", report.published_points), ("measured", report.measured_points)):
        for mixer in dict.fromkeys(point.mixer for point in points):
            own = sorted((point.compute, point.perplexity) for point in points if point.mixer == mixer)
            _plot(chart.axes, own, f"{_label(mixer)}, {origin}", colours[mixer], hollow=origin == "paper")
    chart.axes.set_xscale("log")
    chart.axes.tick_params(which="minor", length=0)
    _logarithmic_perplexity(chart.axes)
    chart.axes.margins(x=0.06, y=0.08)
    chart.axes.legend(frameon=False, fontsize=8, labelcolor=charts.INK)
    return chart.figure


def draw_lengths(report: Report) -> Figure:
    """Tables 2 and 8: perplexity against the context length, a panel for each corpus that has any.

    Returns:
        A figure that belongs to no window.
    """
    panels = [grid for table, grids in report.tables if table in _LENGTH_TABLES for grid in grids]
    sizes = dict.fromkeys(line.size for grid in panels for line in grid.lines if line.origin == "measured")
    markers = dict(zip(sizes, itertools.cycle(_MARKERS), strict=False))
    rows = math.ceil(len(panels) / _PANELS_IN_A_ROW)
    figure = Figure(figsize=(3.4 * _PANELS_IN_A_ROW, 3.2 * rows + 1.0), dpi=130, layout="constrained")
    figure.suptitle(
        "Perplexity by context length (tokens)",
        x=0.01,
        horizontalalignment="left",
        fontsize=12,
        fontweight="bold",
        color=charts.INK,
    )
    colours = _colours(report)
    handles: dict[str, Any] = {}
    places = figure.subplots(rows, _PANELS_IN_A_ROW, squeeze=False).flatten()
    for axes, grid in zip(places, panels, strict=False):
        _draw_grid(axes, grid, colours, markers)
        axes.set_title(grid.label or "mean over the five corpora of Table 2", loc="left", fontsize=10, color=charts.INK)
        lines, labels = axes.get_legend_handles_labels()
        handles |= dict(zip(labels, lines, strict=True))
    for axes in places[len(panels) :]:
        axes.set_visible(False)
    figure.legend(
        handles.values(),
        handles.keys(),
        loc="outside lower center",
        ncols=min(3, len(handles)),
        frameon=False,
        fontsize=9,
        labelcolor=charts.INK,
    )
    return figure


def _draw_grid(axes: Axes, grid: Grid, colours: Mapping[str, str], markers: Mapping[str, str]) -> None:
    charts.style(axes)
    for line in grid.lines:
        points = [
            (quantity.at, cell.mean)
            for quantity, cell in zip(grid.quantities, line.cells, strict=True)
            if quantity.at is not None and cell is not None and math.isfinite(cell.mean)
        ]
        if points:
            label = f"{_label(line.mixer)}, {line.size}, {line.origin}"
            hollow = line.origin == "paper"
            _plot(axes, points, label, colours[line.mixer], hollow=hollow, marker="o" if hollow else markers[line.size])
    lengths = [quantity.at for quantity in grid.quantities if quantity.at is not None]
    # A length just behind another one has no label: the two would overlap.
    apart = (lengths[-1] / lengths[0]) ** _LABELS_APART
    labels = [""] * len(lengths)
    last = 0.0
    for place, length in enumerate(lengths):
        if length >= apart * last:
            labels[place] = f"{length / 1024:g}K" if length >= 1024 else f"{length}"
            last = length
    axes.set_xscale("log", base=2)
    axes.set_xticks(lengths, labels)
    axes.xaxis.set_minor_locator(NullLocator())
    _logarithmic_perplexity(axes)
    axes.margins(x=0.1, y=0.1)


def _plot(
    axes: Axes, points: Sequence[tuple[float, float]], label: str, colour: str, *, hollow: bool, marker: str = "o"
) -> None:
    axes.plot(
        *zip(*points, strict=True),
        label=label,
        color=colour,
        linewidth=1.1 if hollow else 1.8,
        linestyle="--" if hollow else "-",
        marker=marker,
        markersize=5,
        markerfacecolor="white" if hollow else colour,
    )


def _logarithmic_perplexity(axes: Axes) -> None:
    """A logarithmic axis with numbers on it, however little the values differ."""
    axes.set_yscale("log")
    low, high = axes.get_ylim()
    axes.yaxis.set_major_locator(LogLocator(subs=(1.0, 2.0, 5.0)) if high / low > 4 else MaxNLocator(5))
    axes.yaxis.set_major_formatter(FuncFormatter(lambda value, _: f"{value:g}"))
    axes.yaxis.set_minor_locator(NullLocator())


def _colours(report: Report) -> dict[str, str]:
    mixers = dict.fromkeys([*published.LABELS, *(run.mixer for run in report.runs)])
    others = [mixer for mixer in mixers if mixer not in _COLOURS]
    return _COLOURS | {mixer: _MORE_COLOURS[n % len(_MORE_COLOURS)] for n, mixer in enumerate(others)}
