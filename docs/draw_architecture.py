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
_HEIGHT = 0.66


def main() -> None:
    """Writes the picture."""
    figure = Figure(figsize=(12.0, 7.2), dpi=110, layout="constrained")
    mixer, code = figure.subplots(1, 2, width_ratios=(1.15, 1.0))
    _draw_mixer(mixer)
    _draw_code(code)
    figure.savefig(PATH)


def _draw_mixer(axes: Axes) -> None:
    _begin(axes, "The mixer: H heads over T tokens")
    columns = {"query": 1.5, "key": 4.5, "value": 7.5}
    widths = {"query": "T, H, R", "key": "T, Hkv, R", "value": "T, Hkv, D"}
    _box(axes, 4.5, 9.0, "x [T, d_model], after the block's norm", width=8.6)
    for name, x in columns.items():
        _arrow(axes, (x, 9.0), (x, 8.0))
        _box(axes, x, 8.0, f"{name} projection\n[{widths[name]}]")
    for x in (columns["query"], columns["key"]):
        _arrow(axes, (x, 8.0), (x, 7.0))
        _box(axes, x, 7.0, "short convolution,\nRoPE")
        _arrow(axes, (x, 7.0), (x, 6.0))
        _box(axes, x, 6.0, "feature map:\nSiLU, L2 norm")
    _arrow(axes, (columns["key"], 6.0), (columns["key"], 5.0))
    _arrow(axes, (columns["value"], 8.0), (columns["value"], 5.0))
    _box(
        axes,
        6.0,
        5.0,
        "input norm: RMSNorm of k and of v, scale and\nbias of each head; B's weight of each channel",
        width=5.6,
    )
    _arrow(axes, (6.0, 5.0), (6.0, 3.8))
    _box(axes, 6.0, 3.8, "recurrence:  X = λ X + b [k, v]\nM complex modes of R + D channels", width=5.6, filled=True)
    _arrow(axes, (6.0, 3.8), (6.0, 2.6))
    _arrow(axes, (columns["query"], 6.0), (columns["query"], 2.6), (3.2, 2.6))
    _box(axes, 6.0, 2.6, "read:  y = $X_k$ q,  w = CᵀC y,  o = Re(w $X_v$)\n[T, H, D]", width=5.6, filled=True)
    _arrow(axes, (6.0, 2.6), (6.0, 1.4))
    _box(axes, 4.5, 1.4, "output projection [T, d_model]", width=8.6)


def _draw_code(axes: Axes) -> None:
    _begin(axes, "The code: a row imports rows below it alone")
    rows = (
        ("train.py", "eval.py", "generate.py"),
        ("evaluation", "export"),
        ("training", "inference"),
        ("what they share: checkpoints,\nsharding, scoring, experiment",),
        ("data", "modules"),
        ("ops",),
        ("pallas_kernels",),
    )
    gap = (9.0 - 1.4) / (len(rows) - 1)
    heights = [9.0 - place * gap for place in range(len(rows))]
    for y, names in zip(heights, rows, strict=True):
        for place, name in enumerate(names):
            width = 8.6 / len(names)
            _box(
                axes, 0.2 + (place + 0.5) * width, y, name, width=width - 0.2, filled=name in ("ops", "pallas_kernels")
            )
    for above, below in itertools.pairwise(heights):
        _arrow(axes, (4.5, above - _HEIGHT / 2), (4.5, below))


def _begin(axes: Axes, title: str) -> None:
    axes.set_xlim(0, 9.0)
    axes.set_ylim(0.9, 9.5)
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
