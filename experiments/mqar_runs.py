"""MQAR at a size for two CPU cores: the models, their training and their tests."""

import time
from collections.abc import Sequence
from typing import Any, NamedTuple

import jax
import numpy as np
from jax.sharding import Mesh
from ml_collections import ConfigDict
from rich.console import Console
from rich.progress import track

from configs.common import base_config
from interdomain_jax import sharding
from interdomain_jax.evaluation.recall.accuracy import answer_sequences, make_count_correct
from interdomain_jax.evaluation.recall.mqar import Part, mqar_mix
from interdomain_jax.evaluation.recall.sequences import Sequences, mixed_batches
from interdomain_jax.modules.decoder import Decoder
from interdomain_jax.ops.dynamics import Read
from interdomain_jax.training.optimizer import make_optimizer
from interdomain_jax.training.state import init_state
from interdomain_jax.training.step import make_train_step
from interdomain_jax.version import code_version

MODELS: dict[str, tuple[str, Read]] = {
    "softmax": ("softmax", "bilinear"),
    "interdomain": ("interdomain", "bilinear"),
    "interdomain_hermitian": ("interdomain", "hermitian"),
    "s4d": ("s4d", "bilinear"),
}
"""The mixer and the read of each kind of model; softmax and s4d have no read."""
VOCAB_SIZE = 64
TRAINING_LENGTHS_AND_PAIRS = ((16, 2), (32, 4), (64, 8))
TEST_LENGTHS_AND_PAIRS = ((16, 2), (32, 4), (32, 8), (64, 8), (64, 16), (128, 8))
TEST_SEQUENCES = 1_000
# Updates at the end whose loss tells runs apart.
LAST_UPDATES = 50


class Run(NamedTuple):
    """One model, trained and tested.

    Attributes:
        model: one of `MODELS`.
        learning_rate: the peak rate.
        seed: of its parameters and of all sequences.
        parameters: number of them.
        loss: nats per answer, the mean of the last updates; of sequences not seen before, as all are.
        accuracies: shares of right answers, in the order of `TEST_LENGTHS_AND_PAIRS`.
        seconds: it took, compilation included.
        commit: of the code.
    """

    model: str
    learning_rate: float
    seed: int
    parameters: int
    loss: float
    accuracies: tuple[float, ...]
    seconds: float
    commit: str | None


def run(model: str, learning_rate: float, seed: int, *, num_steps: int, mesh: Mesh) -> Run:
    """Trains and tests a model of the experiment."""
    started = time.perf_counter()
    config = mqar_config(model, learning_rate, num_steps)
    params, losses = train(config, mesh, seed=seed, lengths_and_pairs=TRAINING_LENGTHS_AND_PAIRS)
    accuracies = recall_accuracies(
        config, params, mesh, seed=seed, lengths_and_pairs=TEST_LENGTHS_AND_PAIRS, sequences=TEST_SEQUENCES
    )
    return Run(
        model=model,
        learning_rate=learning_rate,
        seed=seed,
        parameters=sum(leaf.size for leaf in jax.tree.leaves(params)),
        loss=float(np.mean(losses[-LAST_UPDATES:])),
        accuracies=accuracies,
        seconds=time.perf_counter() - started,
        commit=code_version()["commit"],
    )


def mqar_config(model: str, learning_rate: float, num_steps: int) -> ConfigDict:
    """The config of a run: the paper's recipe for a model of 0.1 million parameters; fields of text stay unused."""
    mixer, read = MODELS[model]
    config = base_config(mixer)
    config.name = "mqar"
    config.model.read = read
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
) -> tuple[Any, list[float]]:
    """Trains a model on sequences of several kinds, equally many of each, none of them read twice.

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
