"""Trains tiny models to recall, softmax, interdomain and s4d, and tests them: MQAR at a size for two CPU cores.

    python -m experiments.mqar
    python -m experiments.mqar --seeds=0,1,2 --learning_rates=1e-3,3e-3

Each run trains the whole decoder, two layers of a mixer, with the trainer's own update on sequences of several lengths
at once, none of them seen twice, and tests it on others, also longer ones and with more pairs. Writes `mqar.json`,
`mqar.md` and `mqar.png` into `--output`; runs that are in the file already, of the same setting and code, are not done
again.
"""

import json
import shlex
import sys
import time
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

import jax
import numpy as np
from absl import app, flags
from etils import epath
from jax.sharding import Mesh
from ml_collections import ConfigDict
from rich.console import Console
from rich.progress import track

from configs.common import base_config
from interdomain_jax import charts, cli, sharding, strict_json
from interdomain_jax import workdir as workdirs
from interdomain_jax.evaluation.recall.accuracy import answer_sequences, make_count_correct
from interdomain_jax.evaluation.recall.mqar import Part, mqar_mix
from interdomain_jax.evaluation.recall.sequences import Sequences, mixed_batches
from interdomain_jax.evaluation.records import machine
from interdomain_jax.modules.decoder import Decoder
from interdomain_jax.modules.mixers import MIXERS
from interdomain_jax.training.optimizer import make_optimizer
from interdomain_jax.training.state import init_state
from interdomain_jax.training.step import make_train_step
from interdomain_jax.version import code_version

_MIXERS = flags.DEFINE_list("mixers", ["softmax", "interdomain", "s4d"], "Mixers, each in models of its own.")
_LEARNING_RATES = flags.DEFINE_list("learning_rates", ["3e-3"], "Peak rates; a mixer is shown at its best one.")
_SEEDS = flags.DEFINE_list("seeds", ["0"], "Of the parameters and of all sequences.")
_NUM_STEPS = flags.DEFINE_integer("num_steps", 1_200, "Updates of a run.", lower_bound=2)
_OUTPUT = flags.DEFINE_string("output", "experiments/results", "Directory of the results.")

VOCAB_SIZE = 64
TRAINING_LENGTHS_AND_PAIRS = ((16, 2), (32, 4), (64, 8))
TEST_LENGTHS_AND_PAIRS = ((16, 2), (32, 4), (32, 8), (64, 8), (64, 16), (128, 8))
TEST_SEQUENCES = 1_000
# Updates at the end whose loss tells runs apart.
LAST_UPDATES = 50

STYLES: dict[str, dict[str, Any]] = {
    "softmax": dict(color=charts.INK, marker="o"),
    "interdomain": dict(color=charts.ACCENT, marker="o"),
    "s4d": dict(color=charts.INK, marker="o", linestyle=":"),
}


class Run(NamedTuple):
    """One model, trained and tested.

    Attributes:
        mixer: of its layers.
        learning_rate: the peak rate.
        seed: of its parameters and of all sequences.
        parameters: number of them.
        loss: nats per answer, the mean of the last updates; of sequences not seen before, as all are.
        accuracies: shares of right answers, in the order of `TEST_LENGTHS_AND_PAIRS`.
        seconds: it took, compilation included.
    """

    mixer: str
    learning_rate: float
    seed: int
    parameters: int
    loss: float
    accuracies: tuple[float, ...]
    seconds: float


def mqar_config(mixer: str, learning_rate: float, num_steps: int) -> ConfigDict:
    """The config of a run: the paper's recipe for a model of 0.1 million parameters; fields of text stay unused."""
    config = base_config(mixer)
    config.name = "mqar"
    config.model.vocab_size = VOCAB_SIZE
    config.model.d_model = 64
    config.model.num_layers = 2
    config.model.num_heads = 2
    config.model.head_dim = 32
    config.model.mlp_dim = 128
    # 0.02 sqrt(768 / 64), rounded up: what a projection puts out then starts as large as in the 125M model, as in
    # `configs/tiny.py`.
    config.model.init_std = 0.08
    config.model.scan_layers = False
    config.model.remat = "none"
    config.model.dtype = "float32"
    config.data.batch_size = 32
    config.optimizer.peak_learning_rate = learning_rate
    config.optimizer.warmup_steps = num_steps // 10
    config.vocab_chunks = 1
    config.num_steps = num_steps
    return config


def train(
    config: ConfigDict, mesh: Mesh, *, seed: int, lengths_and_pairs: Sequence[tuple[int, int]]
) -> tuple[Any, list]:
    """Trains a model on sequences of several kinds, equally many of each, none of them twice.

    Args:
        config: its model, optimizer, batch size and number of updates.
        mesh: from `sharding.make_mesh`.
        seed: of the parameters, the sequences and their order.
        lengths_and_pairs: the kinds.

    Returns:
        The parameters, and the loss of each update in nats per answer.
    """
    batch_size = config.data.batch_size
    optimizer = make_optimizer(num_steps=config.num_steps, **config.optimizer)
    model = Decoder(**config.model)
    step = make_train_step(
        model,
        optimizer,
        accumulation_steps=config.accumulation_steps,
        vocab_chunks=config.vocab_chunks,
        mesh=mesh,
    )
    batches_of_each = -(-config.num_steps // len(lengths_and_pairs))
    parts = [Part(length, pairs, batches_of_each * batch_size) for length, pairs in lengths_and_pairs]
    sequences = mqar_mix(parts, split="train", seed=seed, vocab_size=config.model.vocab_size)
    batches = mixed_batches(sequences, batch_size=batch_size, seed=seed)
    state = init_state(model, optimizer, seed=seed, mesh=mesh)
    losses = []
    for _ in track(range(config.num_steps), config.model.mixers[0], console=Console(stderr=True)):
        state, metrics = step(state, sharding.place_batch(_as_batch(next(batches)), mesh, batch_size))
        losses.append(metrics.loss)
    return state.params, [float(loss) for loss in losses]


def _as_batch(sequences: Sequences) -> dict[str, np.ndarray]:
    return {
        "inputs": sequences.tokens,
        "targets": sequences.targets,
        "loss_mask": sequences.is_scored.astype(np.float32),
    }


def recall_accuracies(
    config: ConfigDict,
    params: Any,
    mesh: Mesh,
    *,
    seed: int,
    lengths_and_pairs: Sequence[tuple[int, int]],
    sequences: int,
) -> tuple[float, ...]:
    """The share of right answers in so many sequences of each kind, drawn apart from those of the training."""
    parts = [Part(length, pairs, sequences) for length, pairs in lengths_and_pairs]
    count_correct = make_count_correct(Decoder(**config.model), mesh)
    accuracies = []
    for part in mqar_mix(parts, split="test", seed=seed, vocab_size=config.model.vocab_size):
        shares = answer_sequences(count_correct, params, part, mesh, batch_size=100)
        accuracies.append(float(np.concatenate(list(shares)).mean()))
    return tuple(accuracies)


def best_runs(runs: Sequence[Run]) -> dict[str, list[Run]]:
    """The runs of each mixer at the peak rate whose mean loss is the smallest."""
    best = {}
    for mixer in dict.fromkeys(run.mixer for run in runs):
        own = [run for run in runs if run.mixer == mixer]
        rates = {run.learning_rate for run in own}
        of_rate = [[run for run in own if run.learning_rate == rate] for rate in sorted(rates)]
        best[mixer] = min(of_rate, key=lambda runs: np.mean([run.loss for run in runs]))
    return best


def as_markdown(runs: Sequence[Run], header: Mapping[str, Any]) -> str:
    """The table: a row for each mixer, mean accuracies over the seeds, in per cent, and their range."""
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
        f"| mixer | peak rate | seeds | loss | {' | '.join(kinds)} |",
        f"|---|---:|---:|---:|{'---:|' * len(kinds)}",
    ]
    for mixer, own in best_runs(runs).items():
        cells = [_cell([run.accuracies[kind] for run in own]) for kind in range(len(kinds))]
        loss = float(np.mean([run.loss for run in own]))
        lines.append(f"| {mixer} | {own[0].learning_rate:g} | {len(own)} | {loss:.3f} | {' | '.join(cells)} |")
    chance = " | ".join(f"{100 / pairs:.1f}" for _, pairs in TEST_LENGTHS_AND_PAIRS)
    lines += [
        f"| any value of the sequence | | | | {chance} |",
        "",
        "All runs:",
        "",
        f"| mixer | peak rate | seed | loss | {' | '.join(kinds)} | seconds |",
        f"|---|---:|---:|---:|{'---:|' * len(kinds)}---:|",
    ]
    for run in runs:
        cells = [f"{100 * accuracy:.1f}" for accuracy in run.accuracies]
        lines.append(
            f"| {run.mixer} | {run.learning_rate:g} | {run.seed} | {run.loss:.3f} | {' | '.join(cells)} | "
            f"{run.seconds:.0f} |"
        )
    lines += ["", f"`{header['command']}`, commit {header['versions']['commit']}, {header['machine']}.", ""]
    return "\n".join(lines)


def _cell(accuracies: Sequence[float]) -> str:
    shares = [f"{100 * share:.1f}" for share in (np.mean(accuracies), min(accuracies), max(accuracies))]
    return shares[0] if len(accuracies) == 1 else f"{shares[0]} ({shares[1]}-{shares[2]})"


def draw(runs: Sequence[Run], path: epath.Path) -> None:
    """Draws accuracy by kind, a line for each mixer, a faint one for each of its seeds, and saves a PNG."""
    chart = charts.new_chart(
        title="Multi-query associative recall, two layers", x_label="length, pairs", y_label="accuracy (%)"
    )
    places = range(len(TEST_LENGTHS_AND_PAIRS))
    for mixer, own in best_runs(runs).items():
        accuracies = 100 * np.array([run.accuracies for run in own])
        style = STYLES.get(mixer, {})
        chart.axes.plot(places, accuracies.mean(axis=0), linewidth=1.8, markersize=5, label=mixer, **style)
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


def _runs_of(path: epath.Path, same: Mapping[str, Any]) -> list[Run]:
    """The runs in a file of results of the same setting and code; none if there is no such file."""
    if not path.exists():
        return []
    content = json.loads(path.read_text())
    if any(content.get(name) != json.loads(strict_json.dumps(value)) for name, value in same.items()):
        return []
    return [Run(**run | {"accuracies": tuple(run["accuracies"])}) for run in content["runs"]]


def main(_: list[str]) -> None:
    output = epath.Path(_OUTPUT.value)
    with cli.exit_on_bad_input():
        unknown = [mixer for mixer in _MIXERS.value if mixer not in MIXERS]
        if unknown:
            raise ValueError(f"--mixers={','.join(_MIXERS.value)}; they must be names from {tuple(MIXERS)}")
        rates = [float(rate) for rate in _LEARNING_RATES.value]
        seeds = [int(seed) for seed in _SEEDS.value]
        workdirs.require_writable("--output", output)
        configs = {
            (mixer, rate): mqar_config(mixer, rate, _NUM_STEPS.value) for mixer in _MIXERS.value for rate in rates
        }
        for config in configs.values():
            make_optimizer(num_steps=config.num_steps, **config.optimizer)
    mesh = sharding.make_mesh(sharding.mesh_config(), jax.devices()[:1])
    some = next(iter(configs.values()))
    same = {
        "num_steps": some.num_steps,
        "batch_size": some.data.batch_size,
        "vocab_size": VOCAB_SIZE,
        "training": TRAINING_LENGTHS_AND_PAIRS,
        "test": TEST_LENGTHS_AND_PAIRS,
        "versions": code_version(),
    }
    header = same | {"command": shlex.join(["python", "-m", "experiments.mqar", *sys.argv[1:]]), "machine": machine()}
    runs = _runs_of(output / "mqar.json", same)
    for seed in seeds:
        for (mixer, rate), config in configs.items():
            if (mixer, rate, seed) in [run[:3] for run in runs]:
                continue
            started = time.perf_counter()
            params, losses = train(config, mesh, seed=seed, lengths_and_pairs=TRAINING_LENGTHS_AND_PAIRS)
            accuracies = recall_accuracies(
                config,
                params,
                mesh,
                seed=seed,
                lengths_and_pairs=TEST_LENGTHS_AND_PAIRS,
                sequences=TEST_SEQUENCES,
            )
            runs.append(
                Run(
                    mixer=mixer,
                    learning_rate=rate,
                    seed=seed,
                    parameters=sum(leaf.size for leaf in jax.tree.leaves(params)),
                    loss=float(np.mean(losses[-LAST_UPDATES:])),
                    accuracies=accuracies,
                    seconds=time.perf_counter() - started,
                )
            )
            write(output, runs, header)
    print(as_markdown(runs, header))


if __name__ == "__main__":
    app.run(main, flags_parser=cli.parse_flags)
