"""The look that every figure of this package shares."""

from typing import NamedTuple

from etils import epath
from matplotlib.axes import Axes
from matplotlib.figure import Figure

INK = "#1d2733"
ACCENT = "#1f6fb2"
FAINT = "#b9d3ea"
GRID = "#e6e9ed"


class Chart(NamedTuple):
    """A figure with one set of axes."""

    figure: Figure
    axes: Axes


def new_chart(*, title: str, x_label: str, y_label: str) -> Chart:
    """Starts a chart: title at the left, a light grid behind, no frame but the axes.

    A bare `Figure` draws to a file on any machine, with none of pyplot's global state and windows.
    """
    figure = Figure(figsize=(8.0, 4.5), dpi=160, layout="constrained")
    axes = figure.add_subplot()
    axes.set_title(title, loc="left", fontsize=12, fontweight="bold", color=INK, pad=12)
    axes.set_xlabel(x_label, color=INK)
    axes.set_ylabel(y_label, color=INK)
    style(axes)
    axes.margins(x=0.02)
    return Chart(figure, axes)


def save(chart: Chart, path: epath.Path) -> None:
    """Writes the chart as a PNG."""
    with path.open("wb") as file:
        chart.figure.savefig(file, format="png")


def style(axes: Axes) -> None:
    """Gives axes the package's look: a light grid behind, no frame but the axes, no tick marks."""
    axes.spines[["top", "right"]].set_visible(False)
    axes.spines[["left", "bottom"]].set_color(GRID)
    axes.tick_params(colors=INK, labelsize=9, length=0)
    axes.grid(axis="y", color=GRID, linewidth=0.8)
    axes.set_axisbelow(True)
