"""The figures of the report on the small language models."""

import itertools
from collections.abc import Sequence
from typing import TYPE_CHECKING

import numpy as np
from etils import epath
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.ticker import FuncFormatter, MaxNLocator, NullLocator

from experiments.text_runs import SCALED
from interdomain_jax import charts
from interdomain_jax.evaluation import published

if TYPE_CHECKING:
    from experiments.text_report import Model

CUBE, LENGTHS, SCALING = "cube.png", "lengths.png", "scaling.png"
_COLOURS = {
    "interdomain": charts.ACCENT,
    "softmax": charts.INK,
    "s4d": "#c8553d",
    "interdomain_no_rope": "#3aa6a6",
    "single_query": "#8a5fa8",
    "dual_linear": "#b8862b",
    "s4d_rope": "#b0487f",
}


def draw_cube(cube: Sequence["Model"], path: epath.Path) -> None:
    """Draws how far each cell lies above interdomain, every seed and their mean, beside the paper's cell at 125M."""
    figure = Figure(figsize=(9.5, 4.2), dpi=140, layout="constrained")
    axes, beside = figure.subplots(1, 2, sharey=True)
    paper = {mixer: numbers[0] for mixer, numbers in published.CUBE.blocks[0].published.items()}
    rows = sorted(cube, key=lambda model: model.loss)
    for row, model in enumerate(rows):
        colour = _COLOURS[model.mixer]
        losses = model.losses[:, 0]
        axes.plot(losses, np.full(len(losses), row), "o", color=colour, markersize=6, alpha=0.45, markeredgewidth=0)
        axes.plot([losses.mean()], [row], "|", color=colour, markersize=20, markeredgewidth=2.2)
        beside.plot([paper[model.mixer]], [row], "D", color=colour, markersize=6)
    tokens = f"{cube[0].parameters / 1e6:.1f}M parameters, {cube[0].tokens / 1e6:.0f}M tokens"
    for each, title in ((axes, f"here: {tokens}"), (beside, "paper: 125M parameters, 2.5B tokens")):
        charts.style(each)
        each.grid(axis="x", color=charts.GRID, linewidth=0.8)
        each.set_title(title, loc="left", fontsize=10, color=charts.INK)
        each.set_xlabel("validation loss (nats per token)", color=charts.INK)
        each.xaxis.set_major_locator(MaxNLocator(5))
        each.margins(x=0.12)
    axes.set_yticks(range(len(rows)), [model.label for model in rows])
    axes.invert_yaxis()
    _title(figure, "The mechanism cube: every seed, and their mean")
    _save(figure, path)


def draw_lengths(cube: Sequence["Model"], path: epath.Path) -> None:
    """Draws perplexity by context length, and the loss by position in the longest context; bands over the seeds."""
    figure = Figure(figsize=(11.0, 4.4), dpi=140, layout="constrained")
    axes, by_position = figure.subplots(1, 2)
    for model in cube:
        colour = _COLOURS[model.mixer]
        _band(axes, model.lengths, np.exp(model.losses), colour, model.label)
        _band(by_position, model.position_ends, model.position_losses, colour, model.label)
    context = cube[0].lengths[0]
    for each, title, y_label in (
        (axes, "by context length", "perplexity"),
        (by_position, f"by position, in contexts of {cube[0].lengths[-1]:,}", "loss (nats per token)"),
    ):
        charts.style(each)
        each.set_xscale("log", base=2)
        each.xaxis.set_minor_locator(NullLocator())
        each.xaxis.set_major_formatter(FuncFormatter(lambda value, _: f"{value:,.0f}"))
        each.axvline(context, color=charts.FAINT, linewidth=1.2, linestyle="--")
        each.set_title(title, loc="left", fontsize=10, color=charts.INK)
        each.set_xlabel("tokens; the training context is dashed", color=charts.INK)
        each.set_ylabel(y_label, color=charts.INK)
    axes.set_yscale("log")
    axes.yaxis.set_major_locator(MaxNLocator(6))
    axes.yaxis.set_major_formatter(FuncFormatter(lambda value, _: f"{value:g}"))
    axes.yaxis.set_minor_locator(NullLocator())
    _title(figure, "Beyond the training context")
    handles, labels = axes.get_legend_handles_labels()
    figure.legend(handles, labels, loc="outside lower center", ncols=4, frameon=False, fontsize=9)
    _save(figure, path)


def draw_scaling(scaled: Sequence["Model"], path: epath.Path) -> None:
    """Draws perplexity against compute, both logarithmic, in the form of the paper's Figure 2."""
    chart = charts.new_chart(
        title="Validation perplexity by training compute",
        x_label="training compute C = 6 N D (flops)",
        y_label="validation perplexity",
    )
    for mixer, group in itertools.groupby(
        sorted(scaled, key=lambda model: SCALED.index(model.mixer)), lambda m: m.mixer
    ):
        own = sorted(group, key=lambda model: model.compute)
        computes, perplexities = [model.compute for model in own], [float(np.exp(model.loss)) for model in own]
        chart.axes.plot(computes, perplexities, "o-", color=_COLOURS[mixer], linewidth=1.8, label=own[0].label)
    chart.axes.set_xscale("log")
    chart.axes.set_yscale("log")
    chart.axes.yaxis.set_major_locator(MaxNLocator(6))
    chart.axes.yaxis.set_major_formatter(FuncFormatter(lambda value, _: f"{value:g}"))
    chart.axes.yaxis.set_minor_locator(NullLocator())
    chart.axes.legend(frameon=False, fontsize=9)
    _save(chart.figure, path)


def _band(axes: Axes, x: Sequence[int], curves: np.ndarray, colour: str, label: str) -> None:
    axes.plot(x, curves.mean(axis=0), "o-", color=colour, linewidth=1.7, markersize=4, label=label)
    axes.fill_between(x, curves.min(axis=0), curves.max(axis=0), color=colour, alpha=0.15, linewidth=0)


def _title(figure: Figure, text: str) -> None:
    figure.suptitle(text, x=0.012, horizontalalignment="left", fontsize=12, fontweight="bold", color=charts.INK)


def _save(figure: Figure, path: epath.Path) -> None:
    with path.open("wb") as file:
        figure.savefig(file, format="png")
