"""An evaluation as JSON, as a table on the terminal, and as a figure."""

from etils import epath
from matplotlib.ticker import NullLocator
from rich.console import Console
from rich.table import Table

from interdomain_jax import charts, strict_json
from interdomain_jax.evaluation.perplexity import Evaluation


def write(workdir: epath.Path, evaluation: Evaluation) -> None:
    """Writes `eval.json` and `eval.png` into `workdir`, and prints the table to stdout."""
    strict_json.write(workdir / "eval.json", as_json(evaluation))
    draw(evaluation, workdir / "eval.png")
    Console().print(as_table(evaluation))


def as_json(evaluation: Evaluation) -> dict[str, object]:
    """Returns the evaluation as nested dicts, one entry of `results` for each context length."""
    return evaluation._asdict() | {"results": [each._asdict() for each in evaluation.results]}


def as_table(evaluation: Evaluation) -> Table:
    """Returns one row for each context length."""
    table = Table(
        title=f"{_title(evaluation)}, step {evaluation.step:,}",
        caption=(
            f"{' and '.join(evaluation.corpora)}, {evaluation.split} split: {evaluation.results[0].tokens:,} of "
            f"{evaluation.split_tokens:,} tokens scored; {evaluation.split_bytes:,} bytes in "
            f"{evaluation.documents:,} documents"
        ),
    )
    for header in ("context", "times training", "loss (nats/token)", "perplexity", "bits/byte"):
        table.add_column(header, justify="right")
    training_context = evaluation.results[0].context_length
    for result in evaluation.results:
        table.add_row(
            f"{result.context_length:,}",
            f"{result.context_length // training_context}x",
            f"{result.loss:.4f}",
            f"{result.perplexity:.4f}",
            f"{result.bits_per_byte:.4f}",
        )
    return table


def draw(evaluation: Evaluation, path: epath.Path) -> None:
    """Draws perplexity against context length and saves a PNG."""
    lengths = [result.context_length for result in evaluation.results]
    perplexities = [result.perplexity for result in evaluation.results]
    chart = charts.new_chart(
        title=f"{_title(evaluation)}, step {evaluation.step:,}",
        x_label="context length (tokens)",
        y_label=f"{evaluation.split} perplexity",
    )
    chart.axes.axvline(lengths[0], color=charts.FAINT, linewidth=1.0, linestyle="--")
    chart.axes.plot(lengths, perplexities, color=charts.ACCENT, linewidth=1.8, marker="o")
    for result in evaluation.results:
        chart.axes.annotate(
            f"{result.perplexity:.3f}",
            (result.context_length, result.perplexity),
            xytext=(0, 9),
            textcoords="offset points",
            horizontalalignment="center",
            color=charts.INK,
            fontweight="bold",
        )
    chart.axes.set_xscale("log", base=2)
    chart.axes.set_xticks(lengths, [f"{length:,}" for length in lengths])
    chart.axes.xaxis.set_minor_locator(NullLocator())
    # Around the values, but never so close that noise looks like a trend.
    centre = (min(perplexities) + max(perplexities)) / 2
    half = max(max(perplexities) - min(perplexities), 0.1 * centre)
    chart.axes.set_ylim(centre - half, centre + half)
    chart.axes.annotate(
        "training context",
        (lengths[0], centre - half),
        xytext=(6, 6),
        textcoords="offset points",
        color=charts.INK,
        fontsize=9,
    )
    chart.axes.margins(x=0.08)
    charts.save(chart, path)


def _title(evaluation: Evaluation) -> str:
    return f"{evaluation.name}: {', '.join(evaluation.mixers)}"
