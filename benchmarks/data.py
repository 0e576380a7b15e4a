"""How fast corpora are prepared and read, beside the tokenizer alone and beside what training takes.

    python -m benchmarks.data
    python -m benchmarks.data --tokenizer=runs/pieces.model --steps=200

Preparation: the embedded corpus, from its files to shards, in one process, in turn with the tokenizer alone on the same
texts in memory. Reading: the loader's rows for `configs/tiny.py`, with as many threads as it has in training, and those
of longer sequences; then the training of `configs/tiny.py` itself, and its wait for data.
"""

import contextlib
import itertools
import statistics
import tempfile
import time
from pathlib import Path

import numpy as np
from absl import app, flags
from etils import epath
from ml_collections import config_flags
from rich.console import Console
from rich.progress import track

from interdomain_jax import cli
from interdomain_jax.data import preparation
from interdomain_jax.data.documents import documents_of
from interdomain_jax.data.loader import TrainBatches
from interdomain_jax.data.rows import BestFitRows
from interdomain_jax.data.sources import make_source
from interdomain_jax.data.token_files import TokenDocuments
from interdomain_jax.data.tokenizers import Tokenizer, load_tokenizer
from interdomain_jax.training import loop
from interdomain_jax.training.metrics import read_metrics

_CONFIG = config_flags.DEFINE_config_file("config", "configs/tiny.py", "The run whose loader is measured.")
_TOKENIZER = flags.DEFINE_string("tokenizer", "mistral", "Of the preparation, as data.tokenizer.")
_REPEATS = flags.DEFINE_integer("repeats", 3, "Measurements of each kind.", lower_bound=1)
_STEPS = flags.DEFINE_integer("steps", 120, "Updates of the training.", lower_bound=2)
_TOKENS = flags.DEFINE_integer("tokens", 4_000_000, "Tokens of a measurement of the loader.", lower_bound=1)

CONSOLE = Console(stderr=True)


def main(_: list[str]) -> None:
    with tempfile.TemporaryDirectory() as directory:
        _preparation(Path(directory))
        _reading(Path(directory))


def _preparation(directory: Path) -> None:
    tokenizer = load_tokenizer(_TOKENIZER.value)
    source = make_source("stdlib_text", data_dir=str(directory / "tfds"))
    part_bytes = 4 << 20
    texts = [
        document
        for part in source.parts(part_bytes)
        for text in source.read(part)
        for document in documents_of(text.content).texts
    ]
    size = sum(len(text.encode()) for text in texts)
    tokens, alone, prepared = 0, [], []
    for repeat in track(range(_REPEATS.value), "preparing", console=CONSOLE):
        start = time.perf_counter()
        tokens = _encode(tokenizer, texts)
        alone.append(time.perf_counter() - start)
        plans = preparation.plan(source, directory / f"corpus{repeat}", _TOKENIZER.value, part_bytes=part_bytes)
        start = time.perf_counter()
        preparation.carry_out(plans, preparation.run_here)
        prepared.append(time.perf_counter() - start)
    print(
        f"{size / 1e6:.1f} MB of text, {tokens:,} tokens of {_TOKENIZER.value}; one core, medians of {_REPEATS.value}:"
    )
    for name, seconds in (("the tokenizer alone", alone), ("preparation", prepared)):
        median = statistics.median(seconds)
        print(f"  {name:20} {size / median / 1e6:6.2f} MB/s  {tokens / median:12,.0f} tokens/s")
    print(
        f"  preparation runs at {statistics.median(alone) / statistics.median(prepared):.0%} of the tokenizer's speed"
    )


def _encode(tokenizer: Tokenizer, texts: list[str]) -> int:
    """Tokenises the texts, and counts their tokens as a corpus does."""
    return sum(len(tokenizer.encode(text)) + 1 for text in texts)


def _reading(directory: Path) -> None:
    config = _CONFIG.value
    with config.unlocked():
        config.num_steps = _STEPS.value
        config.optimizer.warmup_steps = min(config.optimizer.warmup_steps, _STEPS.value // 2)
        config.data.directory = str(directory / "data")
    run = loop.prepare(config, epath.Path(directory) / "run")
    (corpus,) = run.train_corpora
    assert isinstance(corpus, TokenDocuments)
    own = config.data.sequence_length
    kinds = {
        f"{own:,} tokens a row, concatenated": dict(sequence_length=own, packing="concatenate"),
        f"{own:,} tokens a row, best fit, reset": dict(sequence_length=own, packing="best_fit", reset=True),
        "4,096 tokens a row, best fit, reset": dict(sequence_length=4096, packing="best_fit", reset=True),
    }
    shared = dict(batch_size=config.data.batch_size, eos_id=run.tokenizer.eos_id, seed=0)
    rates: dict[str, list[float]] = {kind: [] for kind in kinds}
    for _ in track(range(_REPEATS.value), "reading", console=CONSOLE):
        for kind, options in kinds.items():
            rates[kind].append(_rate(TrainBatches([corpus], **shared, **options)))
    start = time.perf_counter()
    BestFitRows(corpus.lengths, sequence_length=own)
    packed = np.sum(-(-corpus.lengths // own)) / (time.perf_counter() - start)

    loop.train(run)
    rows = [row for row in read_metrics(run.workdir) if "train/loss" in row]
    # Those of the first steps are averages over a compilation's wake.
    training = statistics.median(row["train/tokens_per_second"] for row in rows[len(rows) // 2 :])
    waited = sum(row["train/data_wait_seconds"] for row in rows[1:])
    trained = sum(row["train/tokens"] for row in rows[1:]) / training
    print(
        f"training of {config.name} takes {training:,.0f} tokens/s, {waited / trained:.2%} of the time waiting for data"
    )
    for kind, each in rates.items():
        rate = statistics.median(each)
        print(f"  the loader, {kind:40} {rate:12,.0f} tokens/s, {rate / training:5.0f} times that")
    print(f"  best-fit packing lays out {packed:,.0f} pieces of documents a second, once at the start")


def _rate(batches: TrainBatches) -> float:
    """Tokens per second, from the first batch on."""
    with contextlib.closing(batches):
        tokens = next(batches)["inputs"].size
        count = max(1, _TOKENS.value // tokens)
        start = time.perf_counter()
        for _ in itertools.islice(batches, count):
            pass
        return count * tokens / (time.perf_counter() - start)


if __name__ == "__main__":
    app.run(main, flags_parser=cli.parse_flags)
