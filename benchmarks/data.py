"""How fast corpora are prepared and read, beside the tokenizer alone, public tools, and what training takes.

    python -m benchmarks.data
    python -m benchmarks.data --tokenizer=runs/pieces.model --steps=200

Preparation: the embedded corpus, from its files to shards, in one process, in turn with the tokenizer alone on the same
texts in memory. Reading: the loader's rows for `configs/tiny.py`, with as many threads as it has in training, and those
of longer sequences; then the training of `configs/tiny.py` itself, and its wait for data. `CASES` says what is beside
them.
"""

import itertools
import statistics
import tempfile
import time
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any

import numpy as np
from absl import app, flags
from etils import epath
from ml_collections import config_flags
from rich.console import Console
from rich.progress import track

from benchmarks import cells, data_peers, tables
from benchmarks.cells import Cell, Grid
from interdomain_jax import cli
from interdomain_jax.data import preparation
from interdomain_jax.data.documents import documents_of
from interdomain_jax.data.loader import Packing, TrainBatches
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
_TOKENS = flags.DEFINE_integer("tokens", 2_000_000, "Tokens of a measurement of the loader.", lower_bound=1)

_JSON = flags.DEFINE_string("json", None, "A file for the figures.")

CONSOLE = Console(stderr=True)

PREPARATION = {
    "preparation": "from files to shards of ids, in one process: documents found, tokenised, counted and checksummed",
    "tokenizer": "the tokenizer alone, on the same texts in memory: the lower bound",
    **data_peers.PREPARATION,
}
READING = {
    "loader": "`TrainBatches`: rows of prepared files in one random order, with targets and mask, as trained on",
    **data_peers.READING,
}
# One name stands for two uses of a package.
CASES = PREPARATION | READING | {"datasets": f"{PREPARATION['datasets']}. {READING['datasets']}"}


def main(_: list[str]) -> None:
    """Measures everything, and prints it."""
    with tempfile.TemporaryDirectory() as directory:
        prepared = measure_preparation(Path(directory))
        read, remarks = measure_reading(Path(directory))
    grids = [
        Grid("Preparing the embedded corpus", "preparation", ("tokenizer",), "tokens/s", [prepared]),
        Grid("Reading rows", "loader", (), "tokens/s", read),
    ]
    measured = cells.record(f"{_CONFIG.value.name}, medians of {_REPEATS.value}", CASES, grids, remarks)
    tables.show(measured)
    if _JSON.value:
        cells.save(_JSON.value, measured)


def measure_preparation(directory: Path) -> Cell:
    """The whole corpus, prepared by each case."""
    tokenizer = load_tokenizer(_TOKENIZER.value)
    source = make_source("stdlib_text", data_dir=str(directory / "tfds"))
    part_bytes = 4 << 20
    texts = [
        document
        for part in source.parts(part_bytes)
        for text in source.read(part)
        for document in documents_of(text.content).texts
    ]
    tokens = _count_tokens(tokenizer, texts)

    def prepare(repeat: int) -> Callable[[], object]:
        plans = preparation.plan(source, directory / f"corpus{repeat}", _TOKENIZER.value, part_bytes=part_bytes)
        return lambda: preparation.carry_out(plans, preparation.run_here)

    seconds = _in_turn(
        {
            "preparation": prepare,
            "tokenizer": lambda _: lambda: _count_tokens(tokenizer, texts),
            "datasets": lambda repeat: lambda: data_peers.prepare(texts, tokenizer, directory / f"{repeat}.arrow"),
        },
        "preparing",
    )
    megabytes = sum(len(text.encode()) for text in texts) / 1e6
    return Cell({"tokenizer": _TOKENIZER.value, "MB of text": f"{megabytes:.1f}"}, seconds, tokens=tokens)


def _count_tokens(tokenizer: Tokenizer, texts: list[str]) -> int:
    """Tokenises the texts, and counts their tokens as a corpus does."""
    return sum(len(tokenizer.encode(text)) + 1 for text in texts)


def measure_reading(directory: Path) -> tuple[list[Cell], list[str]]:
    """Rows of each kind, and what the training needs of them."""
    config = _CONFIG.value
    with config.unlocked():
        config.num_steps = _STEPS.value
        config.optimizer.warmup_steps = min(config.optimizer.warmup_steps, _STEPS.value // 2)
        config.data.directory = str(directory / "data")
    run = loop.prepare(config, epath.Path(directory) / "run")
    (corpus,) = run.train_corpora
    assert isinstance(corpus, TokenDocuments)
    own = config.data.sequence_length
    kinds: list[tuple[int, Packing]] = [(own, "concatenate"), (own, "best_fit"), (4096, "best_fit")]
    measured = [_measure_rows(corpus, *kind, run.tokenizer.eos_id, directory) for kind in kinds]
    start = time.perf_counter()
    BestFitRows(corpus.lengths, sequence_length=own)
    packed = np.sum(-(-corpus.lengths // own)) / (time.perf_counter() - start)

    loop.train(run)
    rows = [row for row in read_metrics(run.workdir) if "train/loss" in row]
    # Those of the first steps are averages over a compilation's wake.
    training = statistics.median(row["train/tokens_per_second"] for row in rows[len(rows) // 2 :])
    waited = sum(row["train/data_wait_seconds"] for row in rows[1:])
    trained = sum(row["train/tokens"] for row in rows[1:]) / training
    own_rate = _TOKENS.value / measured[0].seconds["loader"]
    return measured, [
        f"training of {config.name} takes {training:,.0f} tokens/s, the loader gives {own_rate / training:.0f} times "
        f"as many, and {waited / trained:.2%} of the time is spent waiting for data",
        f"best-fit packing lays out {packed:,.0f} pieces of documents a second, once, when a run starts",
    ]


def _measure_rows(corpus: TokenDocuments, length: int, packing: Packing, eos_id: int, directory: Path) -> Cell:
    """Rows of one length, laid out in one way; best fit with each document a context of its own."""
    batch_size = _CONFIG.value.data.batch_size
    shape: dict[str, Any] = dict(sequence_length=length, batch_size=batch_size, packing=packing)
    makers: dict[str, Callable[[int], Iterator[Any]]] = {
        "loader": lambda seed: TrainBatches([corpus], **shape, reset=packing == "best_fit", eos_id=eos_id, seed=seed),
        "grain": lambda _: data_peers.grain_batches(corpus, **shape),
    }
    if packing == "concatenate":
        rows = data_peers.dataset_rows(corpus, length, directory / "rows")
        makers["datasets"] = lambda _: data_peers.dataset_batches(rows, batch_size)
    count = max(1, _TOKENS.value // (length * batch_size))
    drains = {name: lambda repeat, name=name: _drain(makers[name](repeat), count) for name in makers}
    seconds = _in_turn(drains, f"reading, {packing}")
    kind = "concatenated" if packing == "concatenate" else "best fit, reset"
    return Cell({"tokens of a row": length, "rows": kind}, seconds, tokens=count * length * batch_size)


def _drain(batches: Iterator[Any], count: int) -> Callable[[], object]:
    """Takes as many batches, once the first one has come and all is open."""
    next(batches)

    def run() -> None:
        for _ in itertools.islice(batches, count):
            pass
        # Grain's iterators have threads to end.
        close: Callable[[], None] | None = getattr(batches, "close", None)
        if close:
            close()

    return run


def _in_turn(cases: Mapping[str, Callable[[int], Callable[[], object]]], what: str) -> dict[str, float]:
    """Median seconds of each case; `cases[name](repeat)` makes what is timed, which runs once."""
    seconds: dict[str, list[float]] = {name: [] for name in cases}
    for repeat in track(range(_REPEATS.value), what, console=CONSOLE):
        for name, make in cases.items():
            run = make(repeat)
            start = time.perf_counter()
            run()
            seconds[name].append(time.perf_counter() - start)
    return {name: statistics.median(times) for name, times in seconds.items()}


if __name__ == "__main__":
    app.run(main, flags_parser=cli.parse_flags)
