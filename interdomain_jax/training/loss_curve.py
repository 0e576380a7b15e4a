"""The picture of a run: training loss, and validation loss over it."""

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
from etils import epath

from interdomain_jax import charts

# The running mean spans this share of the run: long enough to calm the noise of single batches.
_SMOOTHED_SHARE = 0.04
# The first steps fall from ln V; drawn in full, they would press all the rest to a flat line.
_SHARE_OFF_SCALE = 0.06


def draw_loss_curve(rows: Sequence[Mapping[str, Any]], *, title: str, path: epath.Path) -> None:
    """Draws `train/loss` and `validation/loss` against the step and saves a PNG.

    Args:
        rows: from `metrics.read_metrics`; losses in nats per token, None where not finite.
        title: names the run.
        path: the file to write.
    """
    chart = charts.new_chart(title=title, x_label="step", y_label="loss (nats per token)")
    steps, losses = _column(rows, "train/loss")
    validation_steps, validation_losses = _column(rows, "validation/loss")
    if len(losses):
        mean = _running_mean(losses, window=max(1, round(_SMOOTHED_SHARE * len(losses))))
        chart.axes.plot(steps, losses, color=charts.FAINT, linewidth=0.8, label="train, each step")
        chart.axes.plot(steps, mean, color=charts.ACCENT, linewidth=1.8, label="train, mean")
        shown = np.concatenate([losses[int(_SHARE_OFF_SCALE * len(losses)) :], validation_losses])
        margin = 0.08 * float(np.ptp(shown)) or 0.1
        chart.axes.set_ylim(float(np.min(shown)) - margin, float(np.max(shown)) + margin)
    if len(validation_losses):
        chart.axes.plot(
            validation_steps,
            validation_losses,
            color=charts.INK,
            linewidth=1.0,
            marker="o",
            markersize=4,
            label="validation",
        )
        chart.axes.annotate(
            f"{validation_losses[-1]:.3f}",
            (validation_steps[-1], validation_losses[-1]),
            xytext=(8, 0),
            textcoords="offset points",
            verticalalignment="center",
            annotation_clip=False,
            color=charts.INK,
            fontweight="bold",
        )
    if len(losses) or len(validation_losses):
        chart.axes.legend(frameon=False, loc="upper right", labelcolor=charts.INK)
    charts.save(chart, path)


def _column(rows: Sequence[Mapping[str, Any]], name: str) -> tuple[np.ndarray, np.ndarray]:
    """Steps and values of the rows that have a finite value of that name."""
    found = [(row["step"], row[name]) for row in rows if row.get(name) is not None]
    steps, values = np.array(found, dtype=np.float64).reshape(-1, 2).T
    return steps, values


def _running_mean(values: np.ndarray, *, window: int) -> np.ndarray:
    """Mean of the values around each place, half a window to either side, cut off at the ends."""
    sums = np.cumsum(np.concatenate([[0.0], values]))
    places = np.arange(len(values))
    starts = np.maximum(places - window // 2, 0)
    ends = np.minimum(places + window // 2 + 1, len(values))
    return (sums[ends] - sums[starts]) / (ends - starts)
