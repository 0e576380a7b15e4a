"""Draws how a mixer's data flows and how the code is layered: docs/images/architecture.png.

Run as

    python docs/draw_architecture.py
"""

import itertools
from pathlib import Path

from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.patches import FancyBboxPatch

from interdomain_jax import charts

PATH = Path(__file__).parent / "images" / "architecture.png"
_HEIGHT = 0.62


def main() -> None:
    """Writes the picture."""
    figure = Figure(figsize=(12.0, 7.2), dpi=110, layout="constrained")
    mixer, code = figure.subplots(1, 2, width_ratios=(1.15, 1.0))
    _draw_mixer(mixer)
    _draw_code(code)
    figure.savefig(PATH)


def _draw_mixer(axes: Axes) -> None:
    _begin(axes, "One head of the mixer", width=9.0, height=9.6)
    columns = {"query": 1.5, "key": 4.5, "value": 7.5}
    _box(axes, 4.5, 9.0, "x: normed residual stream", width=8.2)
    for name, x in columns.items():
        _arrow(axes, (x, 9.0), (x, 8.0))
        _box(axes, x, 8.0, f"W_{name[0].upper()}: {name}")
    for x in (columns["query"], columns["key"]):
        _arrow(axes, (x, 8.0), (x, 7.0))
        _box(axes, x, 7.0, "short convolution,\nRoPE")
        _arrow(axes, (x, 7.0), (x, 6.0))
        _box(axes, x, 6.0, "SiLU, L2 norm")
    _arrow(axes, (columns["key"], 6.0), (columns["key"], 5.0))
    _arrow(axes, (columns["value"], 8.0), (columns["value"], 5.0))
    _box(axes, 6.0, 5.0, "RMSNorm, scale and bias; weights of B", width=5.4)
    _arrow(axes, (6.0, 5.0), (6.0, 3.8))
    _box(axes, 6.0, 3.8, "state  x = λ x + b [k, v]\nM complex modes of R + D channels", width=5.4, filled=True)
    _arrow(axes, (6.0, 3.8), (6.0, 2.6))
    _arrow(axes, (columns["query"], 6.0), (columns["query"], 2.6), (3.3, 2.6))
    _box(axes, 6.0, 2.6, "read  y = X_k q,  w = CᵀC y,  o = Re(w X_v)", width=5.4, filled=True)
    _arrow(axes, (6.0, 2.6), (6.0, 1.4))
    _box(axes, 4.5, 1.4, "W_O over all heads", width=8.2)


def _draw_code(axes: Axes) -> None:
    _begin(axes, "The code: a row uses what lies below it", width=9.0, height=9.6)
    rows = (
        (9.0, ("train.py", "eval.py", "generate.py")),
        (7.4, ("training", "evaluation", "inference", "export")),
        (5.8, ("data", "sharding, checkpoints,\nscoring, workdir")),
        (4.2, ("modules",)),
        (2.8, ("ops",)),
        (1.4, ("pallas_kernels",)),
    )
    for y, names in rows:
        for place, name in enumerate(names):
            width = 8.4 / len(names) - 0.3
            x = 4.5 + (place - (len(names) - 1) / 2) * 8.4 / len(names)
            _box(axes, x, y, name, width=width, filled=name in ("ops", "pallas_kernels"))
    for (above, _), (below, _) in itertools.pairwise(rows):
        _arrow(axes, (4.5, above - _HEIGHT), (4.5, below))


def _begin(axes: Axes, title: str, *, width: float, height: float) -> None:
    axes.set_xlim(0, width)
    axes.set_ylim(0.8, height)
    axes.axis("off")
    axes.set_title(title, loc="left", fontsize=13, fontweight="bold", color=charts.INK)


def _box(axes: Axes, x: float, y: float, text: str, *, width: float = 2.5, filled: bool = False) -> None:
    corner = (x - width / 2, y - _HEIGHT / 2)
    face = charts.FAINT if filled else "white"
    style = "round,pad=0.02,rounding_size=0.12"
    axes.add_patch(
        FancyBboxPatch(corner, width, _HEIGHT, boxstyle=style, facecolor=face, edgecolor=charts.ACCENT, zorder=2)
    )
    axes.text(x, y, text, ha="center", va="center", fontsize=10, color=charts.INK, zorder=3)


def _arrow(axes: Axes, *points: tuple[float, float]) -> None:
    """From the box at the first point to that at the last one."""
    *way, before, last = points
    if way:
        axes.plot(*zip(*way, before, strict=True), color=charts.INK, linewidth=1.0, zorder=1)
    end = (last[0], last[1] + _HEIGHT / 2) if before[0] == last[0] else last
    axes.annotate("", end, before, arrowprops=dict(arrowstyle="->", color=charts.INK, shrinkA=0, shrinkB=1), zorder=1)


if __name__ == "__main__":
    main()
