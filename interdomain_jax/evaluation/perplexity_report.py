"""One record of perplexities as a table on the terminal, and as a figure."""

import math
from collections.abc import Callable, Sequence

from etils import epath
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.ticker import FuncFormatter, LogLocator, NullLocator
from rich.table import Table

from interdomain_jax import charts
from interdomain_jax.evaluation.records import MEAN, Measurement, Record

# Of the first corpus, the second, and so on.
_COLOURS = (charts.ACCENT, "#c8553d", "#3b8e5a", "#8a5fa8", "#b8862b", "#4a5568")

# Tokens of a mean that is drawn, where a corpus has any such; of fewer it is mostly noise.
_ENOUGH = 1000


def as_table(record: Record) -> Table:
    """Returns one row for each corpus and context length, and the means over several corpora."""
    corpora, settings = record.settings["corpora"], record.settings
    sizes = [
        f"{name}: {split['tokens']:,} tokens of {split['bytes']:,} bytes in {split['documents']:,} documents"
        for name, split in corpora.items()
    ]
    stride = f", stride {settings['stride']:,}" if settings["stride"] else ""
    table = Table(
        title=f"{_title(record)}: {settings['mode']}{stride}", caption="\n".join([f"{settings['split']} split", *sizes])
    )
    # Of a single corpus the name stands below.
    named = len(corpora) > 1
    if named:
        table.add_column("corpus", overflow="fold")
    for header in ("context", "x training", "tokens", "nats/token", "perplexity", "bits/byte"):
        table.add_column(header, justify="right", no_wrap=True)
    for name, shown in (_short_names(record) | {MEAN: MEAN}).items():
        table.add_section()
        losses, perplexities, bits = (_of(record, name, metric) for metric in ("loss", "perplexity", "bits_per_byte"))
        for row, (loss, perplexity, bits_per_byte) in enumerate(zip(losses, perplexities, bits, strict=True)):
            table.add_row(
                *([shown if row == 0 else ""] if named else []),
                "whole split" if loss.at is None else f"{loss.at:,}",
                "" if loss.at is None else f"{loss.at / _training_context(record):.4g}x",
                f"{loss.samples:,}",
                *(_number(each.value) for each in (loss, perplexity, bits_per_byte)),
            )
    return table


def draw(record: Record, path: epath.Path) -> None:
    """Draws perplexity by context length, if there are several, and loss by position, and saves a PNG."""
    corpora = list(record.settings["corpora"])
    by_length = [_of(record, name, "perplexity") for name in corpora]
    by_position = [_of(record, name, "loss_by_position") for name in corpora]
    has_lengths = len(by_length[0]) > 1
    figure = Figure(figsize=(13.0 if has_lengths else 8.0, 4.8), dpi=130, layout="constrained")
    figure.suptitle(
        _title(record), x=0.012, horizontalalignment="left", fontsize=12, fontweight="bold", color=charts.INK
    )
    *first, last = figure.subplots(1, 2 if has_lengths else 1, squeeze=False)[0]
    for axes in first:
        _draw_curves(axes, record, by_length, labelled=True)
        _label(axes, "perplexity by context length", "context length (tokens)", "perplexity")
    _draw_curves(last, record, by_position)
    longest = record.settings["lengths"][-1]
    where = "the whole split" if longest is None else f"contexts of {longest:,}"
    _label(last, f"loss by position, in {where}", "position in the context, up to (tokens)", "loss (nats per token)")
    if len(corpora) > 1:
        last.legend(frameon=False, fontsize=9, labelcolor=charts.INK)
    with path.open("wb") as file:
        figure.savefig(file, format="png")


def _draw_curves(
    axes: Axes, record: Record, curves: Sequence[Sequence[Measurement]], *, labelled: bool = False
) -> None:
    """A line for each corpus over sizes, on a logarithmic axis, and the training context."""
    charts.style(axes)
    axes.axvline(_training_context(record), color=charts.FAINT, linewidth=1.2, linestyle="--")
    axes.annotate(
        "training context",
        (_training_context(record), 0.02),
        xycoords=axes.get_xaxis_transform(),
        xytext=(5, 0),
        textcoords="offset points",
        color=charts.INK,
        fontsize=8,
    )
    names = _short_names(record)
    for number, curve in enumerate(curves):
        enough = [each for each in curve if each.samples >= _ENOUGH] or curve
        points = [(each.at, each.value) for each in enough if each.value is not None and math.isfinite(each.value)]
        colour, label = _COLOURS[number % len(_COLOURS)], names[curve[0].task]
        x, y = zip(*points, strict=True) if points else ((), ())
        axes.plot(x, y, color=colour, linewidth=1.7, marker="o", markersize=4, label=label)
        for point in points if labelled else ():
            axes.annotate(
                f"{point[1]:.3f}",
                point,
                xytext=(0, 8),
                textcoords="offset points",
                horizontalalignment="center",
                color=colour,
                fontsize=9,
                fontweight="bold",
            )
    axes.set_xscale("log", base=2)
    axes.xaxis.set_minor_locator(NullLocator())
    whole: Callable[[float, int], str] = lambda value, _: f"{value:,.0f}" if value >= 1 else ""
    axes.xaxis.set_major_locator(LogLocator(base=2, numticks=12))
    axes.xaxis.set_major_formatter(FuncFormatter(whole))
    if labelled:
        axes.set_xticks(sorted({each.at for curve in curves for each in curve if each.at}))
        _widen(axes)


def _widen(axes: Axes) -> None:
    """Limits around the values, but never so close that noise looks like a trend."""
    low, high = axes.dataLim.intervaly
    if math.isfinite(low):
        centre = (low + high) / 2
        half = max(0.7 * (high - low), 0.1 * centre)
        axes.set_ylim(centre - half, centre + half)
    axes.margins(x=0.08)


def _label(axes: Axes, title: str, x_label: str, y_label: str) -> None:
    axes.set_title(title, loc="left", fontsize=10, color=charts.INK)
    axes.set_xlabel(x_label, color=charts.INK)
    axes.set_ylabel(y_label, color=charts.INK)


def _of(record: Record, task: str, metric: str) -> list[Measurement]:
    return [each for each in record.measurements if (each.task, each.metric) == (task, metric)]


def _short_names(record: Record) -> dict[str, str]:
    """The last parts of the corpora's paths, or all of them where two end alike."""
    short = {name: epath.Path(name).name for name in record.settings["corpora"]}
    return short if len({*short.values()}) == len(short) else {name: name for name in short}


def _number(value: float | None) -> str:
    return "" if value is None else f"{value:.4f}"


def _training_context(record: Record) -> int:
    return int(record.config["data"]["sequence_length"])


def _title(record: Record) -> str:
    return f"{record.model['name']}: {', '.join(record.model['mixers'])}, step {record.model['step']:,}"
