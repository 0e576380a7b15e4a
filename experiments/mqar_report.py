"""Results of the MQAR experiment: JSON, a table in Markdown and a figure."""

import json
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
from etils import epath

from experiments.mqar_runs import TEST_LENGTHS_AND_PAIRS, TEST_SEQUENCES, TRAINING_LENGTHS_AND_PAIRS, Run
from interdomain_jax import charts, strict_json

STYLES: dict[str, dict[str, Any]] = {
    "softmax": dict(color=charts.INK, marker="o"),
    "interdomain": dict(color=charts.ACCENT, marker="o"),
    "interdomain_hermitian": dict(color=charts.ACCENT, marker="s", linestyle="--"),
    "s4d": dict(color=charts.INK, marker="o", linestyle=":"),
}


def best_runs(runs: Sequence[Run]) -> dict[str, list[Run]]:
    """The runs of each kind of model at the peak rate whose mean loss is the smallest."""
    best = {}
    for model in dict.fromkeys(run.model for run in runs):
        own = [run for run in runs if run.model == model]
        rates = {run.learning_rate for run in own}
        of_rate = [[run for run in own if run.learning_rate == rate] for rate in sorted(rates)]
        best[model] = min(of_rate, key=lambda runs: np.mean([run.loss for run in runs]))
    return best


def as_markdown(runs: Sequence[Run], header: Mapping[str, Any]) -> str:
    """The table: a row for each kind of model, mean accuracies over the seeds, in per cent, and their range."""
    kinds = [f"{length}, {pairs}" for length, pairs in TEST_LENGTHS_AND_PAIRS]
    sizes = [run.parameters for run in runs]
    lines = [
        "# Multi-query associative recall",
        "",
        f"Accuracy in per cent by length, pairs. Models of {min(sizes):,} to {max(sizes):,} parameters in two layers, "
        f"trained with {header['num_steps']:,} updates of {header['batch_size']} sequences, as many of each of "
        f"the kinds {' / '.join(f'{length}, {pairs}' for length, pairs in TRAINING_LENGTHS_AND_PAIRS)}; tested on "
        f"{TEST_SEQUENCES:,} others of each kind. The mean over the seeds, in brackets the smallest and the largest.",
        "",
        f"| model | peak rate | seeds | loss | {' | '.join(kinds)} |",
        f"|---|---:|---:|---:|{'---:|' * len(kinds)}",
    ]
    for model, own in best_runs(runs).items():
        cells = [_cell([run.accuracies[kind] for run in own]) for kind in range(len(kinds))]
        loss = float(np.mean([run.loss for run in own]))
        lines.append(f"| {model} | {own[0].learning_rate:g} | {len(own)} | {loss:.3f} | {' | '.join(cells)} |")
    chance = " | ".join(f"{100 / pairs:.1f}" for _, pairs in TEST_LENGTHS_AND_PAIRS)
    lines += [
        f"| any value of the sequence | | | | {chance} |",
        "",
        "All runs:",
        "",
        f"| model | peak rate | seed | loss | {' | '.join(kinds)} | seconds |",
        f"|---|---:|---:|---:|{'---:|' * len(kinds)}---:|",
    ]
    for run in runs:
        cells = [f"{100 * accuracy:.1f}" for accuracy in run.accuracies]
        lines.append(
            f"| {run.model} | {run.learning_rate:g} | {run.seed} | {run.loss:.3f} | {' | '.join(cells)} | "
            f"{run.seconds:.0f} |"
        )
    commits = sorted({str(run.commit) for run in runs})
    lines += ["", f"`{header['command']}`, commits {', '.join(commits)}, {header['machine']}.", ""]
    return "\n".join(lines)


def _cell(accuracies: Sequence[float]) -> str:
    shares = [f"{100 * share:.1f}" for share in (np.mean(accuracies), min(accuracies), max(accuracies))]
    return shares[0] if len(accuracies) == 1 else f"{shares[0]} ({shares[1]}-{shares[2]})"


def draw(runs: Sequence[Run], path: epath.Path) -> None:
    """Draws accuracy by kind, a line for each kind of model and a band over its seeds, and saves a PNG."""
    chart = charts.new_chart(
        title="Multi-query associative recall, two layers", x_label="length, pairs", y_label="accuracy (%)"
    )
    places = range(len(TEST_LENGTHS_AND_PAIRS))
    for model, own in best_runs(runs).items():
        accuracies = 100 * np.array([run.accuracies for run in own])
        style = STYLES.get(model, {})
        chart.axes.plot(places, accuracies.mean(axis=0), linewidth=1.8, markersize=5, label=model, **style)
        chart.axes.fill_between(
            places, accuracies.min(axis=0), accuracies.max(axis=0), color=style.get("color"), alpha=0.12, linewidth=0
        )
    chance = [100 / pairs for _, pairs in TEST_LENGTHS_AND_PAIRS]
    chart.axes.plot(
        places, chance, color=charts.FAINT, linewidth=1.4, linestyle="--", label="any value of the sequence"
    )
    chart.axes.set_xticks(places, [f"{length}, {pairs}" for length, pairs in TEST_LENGTHS_AND_PAIRS])
    chart.axes.set_ylim(0, 104)
    chart.axes.legend(frameon=False, fontsize=9)
    charts.save(chart, path)


def write(output: epath.Path, runs: Sequence[Run], header: Mapping[str, Any]) -> None:
    """Writes the results of all runs so far."""
    output.mkdir(parents=True, exist_ok=True)
    strict_json.write(output / "mqar.json", dict(header) | {"runs": [run._asdict() for run in runs]})
    (output / "mqar.md").write_text(as_markdown(runs, header))
    draw(runs, output / "mqar.png")


def saved_runs(path: epath.Path, same: Mapping[str, Any]) -> list[Run]:
    """The runs in a file of results of the same setting and code; none if there is no such file."""
    if not path.exists():
        return []
    content = json.loads(path.read_text())
    if any(content.get(name) != strict_json.plain(value) for name, value in same.items()):
        return []
    return [Run(**run | {"accuracies": tuple(run["accuracies"])}) for run in content["runs"]]
