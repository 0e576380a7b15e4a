"""What the heads of a model remember: their lag kernels before the first update and after the last one."""

import json
from typing import Any

import jax
import numpy as np
from etils import epath
from matplotlib.figure import Figure

from interdomain_jax import charts, sharding, strict_json
from interdomain_jax.evaluation.records import machine
from interdomain_jax.modules.mixers import layer_dynamics
from interdomain_jax.ops import describe
from interdomain_jax.trained import find_trained
from interdomain_jax.training.optimizer import make_optimizer
from interdomain_jax.training.state import init_state
from interdomain_jax.version import code_version

RUN = "interdomain_42"
"""With the bilinear read: what a kernel becomes that begins as a random one."""
KERNELS = "lag_kernels.json"
FIGURE = "lag_kernels.png"
MAX_LAG = 31
# The largest entries of a kernel take the end of the colour scale together.
_SHARE_SATURATED = 0.02


def write_kernels(workdir: epath.Path, output: epath.Path) -> None:
    """Works out the kernels of a run and writes them; its first parameters are made once more, from the seed.

    Args:
        workdir: of a finished run whose layers are all interdomain.
        output: directory of the results.
    """
    trained = find_trained(workdir, sharding.mesh_config(), "latest", jax.devices()[:1])
    config = trained.config
    optimizer = make_optimizer(num_steps=config.num_steps, **config.optimizer)
    first = init_state(trained.model, optimizer, seed=config.seed, mesh=trained.mesh).params
    heads: list[dict[str, Any]] = []
    last = trained.restore_params()
    for layer in range(config.model.num_layers):
        before, after = (
            describe(layer_dynamics(params[f"layers_{layer}"]["block_0"]["mixer"]), max_lag=MAX_LAG)
            for params in (first, last)
        )
        for head in range(config.model.num_heads):
            heads.append(
                {
                    "layer": layer,
                    "head": head,
                    "steps": [float(np.exp(_log_delta(params, layer)[head])) for params in (first, last)],
                    "lag_kernels": [_rounded(report.lag_kernel[head]) for report in (before, after)],
                }
            )
    header = {"run": workdir.name, "config": config.to_dict(), "machine": machine(), "versions": code_version()}
    strict_json.write(output / KERNELS, header | {"heads": heads})


def _log_delta(params: Any, layer: int) -> np.ndarray:
    return np.asarray(params[f"layers_{layer}"]["block_0"]["mixer"]["log_delta"])


def _rounded(kernel: jax.Array) -> list[list[float]]:
    """Three digits of the largest entry: what a picture shows."""
    values = np.asarray(kernel, np.float64)
    digits = 3 - int(np.ceil(np.log10(np.abs(values).max())))
    return np.round(values, digits).tolist()


def draw_kernels(output: epath.Path) -> None:
    """Draws the kernels among the results: a row for each head, before training, after it, and both diagonals."""
    heads = json.loads((output / KERNELS).read_text())["heads"]
    figure = Figure(figsize=(10.5, 1.0 + 2.1 * len(heads)), dpi=100, layout="constrained")
    figure.suptitle(
        "Lag kernels W(lag of the key, lag of the value)",
        x=0.012,
        horizontalalignment="left",
        fontsize=13,
        fontweight="bold",
        color=charts.INK,
    )
    rows = figure.subplots(len(heads), 3, squeeze=False, width_ratios=(1.0, 1.0, 1.5))
    for head, row in zip(heads, rows, strict=True):
        kernels = [np.array(kernel) for kernel in head["lag_kernels"]]
        for axes, kernel in zip(row[:2], kernels, strict=True):
            limit = float(np.quantile(np.abs(kernel), 1 - _SHARE_SATURATED)) or 1.0
            axes.imshow(kernel, cmap="RdBu_r", vmin=-limit, vmax=limit, origin="lower", interpolation="nearest")
            axes.spines[:].set_visible(False)
            axes.tick_params(colors=charts.INK, labelsize=8, length=0)
        row[0].set_ylabel(f"layer {head['layer']}, head {head['head']}", fontsize=9, color=charts.INK)
        charts.style(row[2])
        row[2].axhline(0, color=charts.FAINT, linewidth=1.0)
        for kernel, label, colour in zip(kernels, ("before", "after"), (charts.FAINT, charts.ACCENT), strict=True):
            diagonal = np.diagonal(kernel)
            row[2].plot(diagonal / np.abs(diagonal).max(), color=colour, linewidth=1.8, label=label)
        row[2].set_title(
            f"step length {head['steps'][0]:.2g} before, {head['steps'][1]:.2g} after",
            loc="left",
            fontsize=9,
            color=charts.INK,
        )
    for axes, title in zip(rows[0][:2], ("before training", "after training"), strict=True):
        axes.set_title(title, loc="left", fontsize=10, color=charts.INK)
    rows[0][2].legend(frameon=False, fontsize=8, labelcolor=charts.INK)
    labels = ("lag of the value", "lag of the value", "lag, on the diagonal (share of the largest)")
    for axes, label in zip(rows[-1], labels, strict=True):
        axes.set_xlabel(label, fontsize=9, color=charts.INK)
    with (output / FIGURE).open("wb") as file:
        figure.savefig(file, format="png")
