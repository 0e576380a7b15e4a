"""Draws images/kernel_regression.png: the error of `kernel_regression` by order and by number of features.

    python docs/draw_kernel_regression.py

Keys and values are smooth curves over the tokens, queries random directions. The error is the root mean square
difference from exact Gaussian attention over all tokens (and all draws of the frequencies), relative to the attention's
own output. Takes about a minute.
"""

from collections.abc import Sequence
from pathlib import Path
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from matplotlib.axes import Axes
from matplotlib.colors import LinearSegmentedColormap, to_hex
from matplotlib.ticker import NullLocator

from interdomain_jax import charts
from interdomain_jax.ops.kernel_regression import draw_frequencies, fourier_features, kernel_regression

_PATH = Path(__file__).parent / "images" / "kernel_regression.png"
_LENGTH = 512
_CYCLES = 4
_WIDTH = 4
_BANDWIDTH = 1.25
_ORDERS = (1, 2, 4, 6, 8, 12, 16, 24, 32)
_FEATURES = (32, 128, 512, 2048)
# The fewer the features, the more their draws differ: as many draws of each as make this many features.
_ALL_FEATURES = 2**14


def band_limited(rng: np.random.Generator, *, length: int, width: int, cycles: int) -> jax.Array:
    """Random sums of the sinusoids of 1..cycles periods in the whole: [1, T, 1, width], of unit mean square norm."""
    phase = 2 * np.pi * np.arange(1, cycles + 1) * (np.arange(length) + 0.5)[:, None] / length
    cosines, sines = rng.normal(size=(2, cycles, width)) / np.sqrt(cycles * width)
    return jnp.asarray(np.cos(phase) @ cosines + np.sin(phase) @ sines)[None, :, None]


class Features(NamedTuple):
    """Features of queries and keys, [N, T, 1, R]: one draw by batch row."""

    q: jax.Array
    k: jax.Array


def random_features(q: jax.Array, k: jax.Array, *, count: int) -> Features:
    """`count` random features of q and k [1, T, 1, d], in as many draws as make `_ALL_FEATURES`."""
    frequencies = draw_frequencies(jax.random.key(0), features=_ALL_FEATURES, width=_WIDTH, bandwidth=_BANDWIDTH)
    draws = frequencies.reshape(-1, count // 2, _WIDTH)
    return Features(*(jax.vmap(fourier_features, (None, 0))(x[0], draws) for x in (q, k)))


def gaussian_kernel(x: jax.Array, y: jax.Array) -> jax.Array:
    """exp(-|x - y|^2 / (2 bandwidth^2)) for x [T, d] and y [S, d]: [T, S]."""
    return jnp.exp(-jnp.sum((x[:, None] - y) ** 2, axis=-1) / (2 * _BANDWIDTH**2))


def gaussian_attention(q: jax.Array, k: jax.Array, v: jax.Array) -> jax.Array:
    """Exact causal attention with the Gaussian kernel: [1, T, 1, D]."""
    kernel = jnp.tril(gaussian_kernel(q[0, :, 0], k[0, :, 0]))
    return jnp.einsum("ts,bshd->bthd", kernel / kernel.sum(axis=1, keepdims=True), v)


def exact_features(q: jax.Array, k: jax.Array) -> Features:
    """Features of q and k [1, T, 1, d] whose products are the Gaussian kernel of these very points.

    They are the rows of a square root of the points' kernel matrix: the limit of ever more random features.
    """
    points = jnp.concatenate([q, k], axis=1)[0, :, 0]
    eigenvalues, vectors = np.linalg.eigh(gaussian_kernel(points, points))
    kept = eigenvalues > 1e-13 * eigenvalues[-1]
    root = jnp.asarray(vectors[:, kept] * np.sqrt(eigenvalues[kept]))[None, :, None]
    return Features(*jnp.split(root, 2, axis=1))


def relative_errors(features: Features, v: jax.Array, exact: jax.Array) -> list[float]:
    """RMS(kernel_regression - exact) / RMS(exact) at each order."""
    regression = jax.jit(kernel_regression, static_argnames="order")
    values = jnp.repeat(v, len(features.q), axis=0)
    differences = [regression(features.q, features.k, values, order=order) - exact for order in _ORDERS]
    return [float(jnp.sqrt(jnp.mean(difference**2) / jnp.mean(exact**2))) for difference in differences]


def draw_line(axes: Axes, errors: Sequence[float], *, label: str, color: str) -> None:
    """Draws the errors by order, with the label at the end of the line."""
    axes.plot(_ORDERS, errors, color=color, linewidth=1.8, marker="o", markersize=4)
    axes.annotate(
        label,
        (_ORDERS[-1], errors[-1]),
        xytext=(9, 0),
        textcoords="offset points",
        verticalalignment="center",
        annotation_clip=False,
        color=charts.INK,
        fontsize=9,
    )


def main() -> None:
    """Computes every error in double precision, and draws them."""
    rng = np.random.default_rng(0)
    directions = rng.normal(size=(1, _LENGTH, 1, _WIDTH))
    q = jnp.asarray(directions / np.linalg.norm(directions, axis=-1, keepdims=True))
    k, v = (band_limited(rng, length=_LENGTH, width=_WIDTH, cycles=_CYCLES) for _ in range(2))
    exact = gaussian_attention(q, k, v)
    chart = charts.new_chart(
        title=f"Gaussian attention over {_LENGTH} tokens, from M coefficients of the past",
        x_label="M, Legendre coefficients kept",
        y_label="relative error",
    )
    shades = LinearSegmentedColormap.from_list("features", [charts.FAINT, charts.ACCENT])
    for count, shade in zip(_FEATURES, np.linspace(0, 1, len(_FEATURES)), strict=True):
        errors = relative_errors(random_features(q, k, count=count), v, exact)
        draw_line(chart.axes, errors, label=f"{count:,} random features", color=to_hex(shades(shade)))
    errors = relative_errors(exact_features(q, k), v, exact)
    draw_line(chart.axes, errors, label="exact kernel", color=charts.INK)
    chart.axes.annotate(
        "what remains: the steps between tokens",
        (_ORDERS[-1], errors[-1]),
        xytext=(0, -8),
        textcoords="offset points",
        horizontalalignment="right",
        verticalalignment="top",
        color=charts.INK,
        fontsize=9,
        fontstyle="italic",
    )
    chart.axes.set_xscale("log", base=2)
    chart.axes.set_yscale("log")
    chart.axes.set_ylim(1e-5, 1)
    chart.axes.set_xticks(_ORDERS, [str(order) for order in _ORDERS])
    chart.axes.xaxis.set_minor_locator(NullLocator())
    chart.axes.yaxis.set_minor_locator(NullLocator())
    chart.figure.savefig(_PATH)


if __name__ == "__main__":
    with jax.enable_x64(True):
        main()
