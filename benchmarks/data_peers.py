"""Public tools that prepare corpora and lay them into rows: Hugging Face's datasets, and grain's own packing."""

import itertools
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import datasets
import grain
import numpy as np
from grain.experimental import BestFitPackIterDataset, ConcatThenSplitIterDataset

from interdomain_jax.data.loader import READ_AHEAD, Packing
from interdomain_jax.data.token_files import TokenDocuments
from interdomain_jax.data.tokenizers import Tokenizer

PREPARATION = {
    "datasets": "preparing: Hugging Face's datasets, `Dataset.map` with the same tokenizer in one process, into an "
    "Arrow file; from texts in memory, where ours reads files, finds the documents in them and writes checksums",
}
READING = {
    "grain": "grain's own packing of the same prepared files, `ConcatThenSplitIterDataset` or `BestFitPackIterDataset` "
    "over documents in random order, read by as many threads; rows as ours, without targets and mask",
    "datasets": "Reading: rows of ids concatenated beforehand, shuffled, out of a memory-mapped Arrow file in batches; "
    "it packs nothing while it reads, and makes no targets, mask, segments or positions",
}
"""The peers, and what they do and do not do."""

# Of grain's best fit: rows that are open at a time.
_OPEN_ROWS = 64


class _Pieces:
    """The documents as a source of grain's, each cut where it is as long as a row; whole ones if `length` is None."""

    def __init__(self, documents: TokenDocuments, length: int | None):
        self._documents = documents
        self._pieces = [
            (document, start, min(start + (length or tokens), tokens))
            for document, tokens in enumerate(documents.lengths.tolist())
            for start in range(0, tokens, length or tokens)
        ]

    def __len__(self) -> int:
        return len(self._pieces)

    def __getitem__(self, number: int) -> dict[str, np.ndarray]:
        return {"ids": self._documents.read(*self._pieces[number])}


def prepare(texts: list[str], tokenizer: Tokenizer, file: Path) -> None:
    """Tokenises the texts into an Arrow file, each with a closing EOS, as documents are prepared here."""

    def encode(batch: dict[str, list[str]]) -> dict[str, Any]:
        return {"ids": [np.append(tokenizer.encode(text), tokenizer.eos_id) for text in batch["text"]]}

    datasets.disable_progress_bars()
    features = datasets.Features({"ids": datasets.Sequence(datasets.Value("uint16"))})
    dataset = datasets.Dataset.from_dict({"text": texts})
    dataset.map(encode, batched=True, remove_columns="text", features=features, cache_file_name=str(file))


def grain_batches(
    documents: TokenDocuments, *, sequence_length: int, batch_size: int, packing: Packing
) -> Iterator[Any]:
    """Endless batches of rows as grain packs them: ids, segment ids and positions."""
    whole = packing == "concatenate"
    pieces = _Pieces(documents, None if whole else sequence_length)
    order = grain.MapDataset.source(pieces).shuffle(seed=0).repeat().to_iter_dataset(READ_AHEAD)
    length = {"ids": sequence_length}
    rows = (
        ConcatThenSplitIterDataset(order, length_struct=length)
        if whole
        else BestFitPackIterDataset(order, length_struct=length, num_packing_bins=_OPEN_ROWS)
    )
    return iter(rows.batch(batch_size))


def dataset_rows(documents: TokenDocuments, sequence_length: int, directory: Path) -> datasets.Dataset:
    """The documents end to end, cut into rows, in a directory of Arrow files; what is left over is dropped."""
    ids = np.concatenate([documents.read(number, 0, length) for number, length in enumerate(documents.lengths)])
    rows = ids[: len(ids) // sequence_length * sequence_length].reshape(-1, sequence_length)
    datasets.disable_progress_bars()
    datasets.Dataset.from_dict({"ids": rows}).save_to_disk(directory)
    return datasets.load_from_disk(directory).with_format("numpy")


def dataset_batches(rows: datasets.Dataset, batch_size: int) -> Iterator[Any]:
    """Endless batches of them, each epoch in another order."""
    for epoch in itertools.count():
        yield from rows.shuffle(seed=epoch).iter(batch_size, drop_last_batch=True)
