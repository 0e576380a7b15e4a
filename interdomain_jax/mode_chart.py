"""The picture of a mode report: each head's timescales and angles, its lag kernel, and the kernel's diagonal."""

import math
from collections.abc import Sequence
from functools import partial

import numpy as np
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.layout_engine import ConstrainedLayoutEngine
from matplotlib.ticker import MaxNLocator, StrMethodFormatter

from interdomain_jax import charts
from interdomain_jax.ops.modes import ModeReport

# The largest entries of a kernel, mostly at the shortest lags, take the end of the colour scale together; otherwise
# they alone would have colour.
_SHARE_SATURATED = 0.01


def draw_modes(report: ModeReport, *, title: str, heads: Sequence[int] | None = None) -> Figure:
    """Draws a row for each head: timescale against angle, the lag kernel, and its diagonal over lags.

    All heads share the axes of the first column, where a triangle at the top is a mode that does not decay. Each
    kernel has its own colours, symmetric around zero; one entry in a hundred lies beyond their ends.

    Args:
        report: from `interdomain_jax.ops.describe`.
        title: of the figure.
        heads: which to draw, in this order; every head if None.

    Returns:
        A figure that belongs to no window; `figure.savefig(path)` writes it.

    Raises:
        ValueError: no heads, or one that the report does not have.
    """
    timescales, angles, kernels = (np.asarray(array, np.float64) for array in report)
    heads = range(len(timescales)) if heads is None else heads
    if not len(heads) or not all(0 <= head < len(timescales) for head in heads):
        raise ValueError(f"heads must be some of 0 to {len(timescales) - 1}; got {list(heads)}.")
    layout = ConstrainedLayoutEngine(w_pad=0.12, h_pad=0.08)
    figure = Figure(figsize=(11.0, 1.3 + 2.35 * len(heads)), dpi=110, layout=layout)
    figure.suptitle(title, x=0.012, horizontalalignment="left", fontsize=13, fontweight="bold", color=charts.INK)
    rows = figure.subplots(len(heads), 3, squeeze=False, sharex="col", width_ratios=(1.0, 0.95, 1.1))
    for head, (modes, kernel, diagonal) in zip(heads, rows, strict=True):
        modes.sharey(rows[0, 0])
        _draw_modes(modes, angles[head], timescales[head])
        _draw_kernel(kernel, kernels[head])
        _draw_diagonal(diagonal, kernels[head])
        modes.set_ylabel(f"head {head}", fontweight="bold", color=charts.INK)
        kernel.set_ylabel("lag of the key (tokens)", fontsize=9, color=charts.INK)
    titles = ("timescale of each mode (steps)", "lag kernel W", "its diagonal: key and value of one token")
    x_labels = ("angle of the mode (radians per step)", "lag of the value (tokens)", "lag (tokens)")
    for axes, text, x_label in zip(rows.T, titles, x_labels, strict=True):
        axes[0].set_title(text, loc="left", fontsize=10, color=charts.INK)
        axes[-1].set_xlabel(x_label, color=charts.INK)
    return figure


def _draw_modes(axes: Axes, angles: np.ndarray, timescales: np.ndarray) -> None:
    charts.style(axes)
    axes.set_yscale("log")
    axes.tick_params(which="minor", length=0)
    axes.margins(y=0.15)
    dots = partial(axes.scatter, s=16, color=charts.ACCENT, alpha=0.55, linewidth=0)
    endless = np.isinf(timescales)
    dots(angles[~endless], timescales[~endless])
    dots(angles[endless], np.full(endless.sum(), 0.97), marker="^", transform=axes.get_xaxis_transform())
    axes.set_xlim(-1.05 * math.pi, 1.05 * math.pi)
    axes.set_xticks(math.pi * np.linspace(-1, 1, 5), [r"$-\pi$", r"$-\pi/2$", "0", r"$\pi/2$", r"$\pi$"])


def _draw_kernel(axes: Axes, kernel: np.ndarray) -> None:
    limit = float(np.quantile(np.abs(kernel), 1 - _SHARE_SATURATED)) or 1.0
    image = axes.imshow(kernel, cmap="RdBu_r", vmin=-limit, vmax=limit, origin="lower", interpolation="nearest")
    axes.spines[:].set_visible(False)
    axes.tick_params(colors=charts.INK, labelsize=9, length=0)
    bar = axes.figure.colorbar(image, ax=axes, extend="both", ticks=[-limit, 0, limit], format="{x:.2g}")
    bar.outline.set_visible(False)
    bar.ax.tick_params(colors=charts.INK, labelsize=9, length=0)


def _draw_diagonal(axes: Axes, kernel: np.ndarray) -> None:
    charts.style(axes)
    axes.axhline(0, color=charts.FAINT, linewidth=1.0)
    axes.plot(np.diagonal(kernel), color=charts.ACCENT, linewidth=1.6)
    axes.yaxis.set_major_locator(MaxNLocator(4))
    axes.yaxis.set_major_formatter(StrMethodFormatter("{x:.2g}"))
