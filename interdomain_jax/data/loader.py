"""From a corpus of documents to batches of token windows, through grain.

A source is anything with a length and random access to documents `{"text": str, ...}`: a prepared
corpus (`open_corpus`), or a plain list. Batches are NumPy dicts of `inputs` int32 [B, T], `targets`
int32 [B, T] (the inputs, one token on) and `loss_mask` float32 [B, T] (1 where the target counts).
"""

import functools
import itertools
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any, NamedTuple, Protocol

import grain
import numpy as np

from interdomain_jax.data.packing import PackedWindows, Window
from interdomain_jax.data.tokenizers import Tokenizer, utf8_bytes

Batch = dict[str, np.ndarray]

# One thread reads and tokenises a few documents ahead, so that a long one is ready before its turn;
# more threads would only fight over the interpreter lock. Packing and batching are cheap copies,
# done in the calling thread. Evaluation starts no thread that could outlive it.
READ_AHEAD = grain.ReadOptions(num_threads=1, prefetch_buffer_size=16)
READ_IN_CALLER = grain.ReadOptions(num_threads=0, prefetch_buffer_size=0)


class DocumentSource(Protocol):
    """Random access to documents `{"text": str, ...}`."""

    def __len__(self) -> int: ...

    def __getitem__(self, index: int, /) -> Mapping[str, Any]: ...


class CorpusCounts(NamedTuple):
    """Sizes of a split.

    Attributes:
        documents: number of documents.
        tokens: length of the token stream, closing EOS of each document included: the number of
            targets of one pass.
        bytes: UTF-8 bytes of the texts. Bits per byte of a pass with mean loss `l` nats per token
            is `l * tokens / (bytes * ln 2)`.
    """

    documents: int
    tokens: int
    bytes: int


def open_corpus(name: str, split: str, data_dir: str) -> DocumentSource:
    """Opens one split of a corpus, preparing the corpus under `data_dir` on first use.

    Args:
        name: "stdlib_text", the text of the running Python's own standard library.
        split: "train" or "validation", or a slice of one in the TFDS notation ("train[:10%]").
        data_dir: directory of prepared corpora; created if missing.

    Raises:
        ValueError: `name` or `split` does not exist.
    """
    if name != "stdlib_text":
        raise ValueError(f"corpus {name!r} is unknown: the corpora are 'stdlib_text'")
    # Imported here so that training on another source does not pay for TFDS.
    from interdomain_jax.data import stdlib_text

    return stdlib_text.open_split(stdlib_text.prepare(data_dir), split)


def train_iterator(
    source: DocumentSource,
    tokenizer: Tokenizer,
    *,
    sequence_length: int,
    batch_size: int,
    seed: int,
    shuffle_buffer: int = 1,
    rows: Sequence[int] | None = None,
) -> grain.DatasetIterator[Batch]:
    """Endless training batches.

    Each epoch visits the documents in a fresh order, a function of `seed` and the epoch alone. Their
    windows (see `packing`) are shuffled within consecutive buffers, for those of one long document
    would otherwise fill whole batches. Row b of global batch k is window `k B + b` of that order,
    however many processes there are: each walks the whole of it and keeps its own rows. The price is
    that every process reads and tokenises every document; what is prepared ahead, as tokens, makes
    that cheap.

    `get_state()` is a small JSON-serialisable dict describing exactly the batches returned so far;
    `set_state` on a fresh iterator with the same arguments continues bitwise. It fits grain's orbax
    handlers (`grain.checkpoint.CheckpointSave` and `CheckpointRestore`).

    Args:
        source: the documents.
        tokenizer: turns their text into ids.
        sequence_length: T, tokens per row.
        batch_size: B, rows of a global batch.
        seed: order of the documents and of the windows, 0 to 2^32 - 1.
        shuffle_buffer: windows in a buffer; 1 keeps the order of the documents.
        rows: the rows of each global batch to return, in rising order; None for all.

    Raises:
        ValueError: the source is empty, or an argument is out of its range.
    """
    _check_arguments(source, sequence_length, batch_size, rows)
    if shuffle_buffer < 1:
        raise ValueError(f"shuffle_buffer must be at least 1, got {shuffle_buffer}")
    if not 0 <= seed < 2**32:
        raise ValueError(f"seed must lie between 0 and 2**32 - 1, got {seed}")
    documents = (
        grain.MapDataset.source(source)
        .shuffle(seed=seed)
        .repeat()
        .map(functools.partial(_tokenise, tokenizer=tokenizer))
        .to_iter_dataset(READ_AHEAD)
    )
    windows = PackedWindows(documents, sequence_length=sequence_length, eos_id=tokenizer.eos_id)
    shuffled = grain.experimental.WindowShuffleIterDataset(windows, window_size=shuffle_buffer, seed=seed)
    return iter(shuffled.batch(batch_size, drop_remainder=True, batch_fn=functools.partial(_stack, rows=rows)))


def evaluation_batches(
    source: DocumentSource,
    tokenizer: Tokenizer,
    *,
    sequence_length: int,
    batch_size: int,
    max_tokens: int | None = None,
    rows: Sequence[int] | None = None,
) -> Iterator[Batch]:
    """One pass over a split in its stored order, every token a target exactly once.

    The token stream does not depend on `sequence_length`, so evaluations at several context lengths
    score the same tokens. Row b of global batch k is window `k B + b`, whatever rows a process asks
    for: all processes return the same number of batches, the last one filled up with rows of mask 0.

    Args:
        source: the documents.
        tokenizer: turns their text into ids.
        sequence_length: T, tokens per row.
        batch_size: B, rows of a global batch.
        max_tokens: score only this many tokens from the start of the split (all rows together);
            None for all.
        rows: the rows of each global batch to return, in rising order; None for all.

    Raises:
        ValueError: the source is empty, or an argument is out of its range.
    """
    _check_arguments(source, sequence_length, batch_size, rows)
    if max_tokens is not None and max_tokens < 1:
        raise ValueError(f"max_tokens must be at least 1, or None for all, got {max_tokens}")
    documents = (
        grain.MapDataset.source(source)
        .map(functools.partial(_tokenise, tokenizer=tokenizer))
        .to_iter_dataset(READ_IN_CALLER)
    )
    windows = PackedWindows(documents, sequence_length=sequence_length, eos_id=tokenizer.eos_id)
    padding = {
        "inputs": np.full(sequence_length, tokenizer.eos_id, np.int32),
        "targets": np.full(sequence_length, tokenizer.eos_id, np.int32),
        "loss_mask": np.zeros(sequence_length, np.float32),
    }
    return _padded_batches(_first_tokens(windows, max_tokens), padding, batch_size, rows)


def corpus_counts(source: DocumentSource, tokenizer: Tokenizer) -> CorpusCounts:
    """Counts the documents, tokens and bytes of a split in one pass over it.

    Raises:
        ValueError: the source is empty.
    """
    _check_not_empty(source)
    tokens = 0
    size = 0
    for index in range(len(source)):
        text = source[index]["text"]
        tokens += len(tokenizer.encode(text)) + 1
        size += len(utf8_bytes(text))
    return CorpusCounts(documents=len(source), tokens=tokens, bytes=size)


def _tokenise(document: Mapping[str, Any], *, tokenizer: Tokenizer) -> np.ndarray:
    return np.append(tokenizer.encode(document["text"]), np.int32(tokenizer.eos_id))


def _first_tokens(windows: Iterable[Window], max_tokens: int | None) -> Iterator[Window]:
    """The windows up to `max_tokens` targets, the mask of the last one cut to fit."""
    left = max_tokens
    for window in windows:
        if left is None:
            yield window
            continue
        positions = np.arange(len(window["loss_mask"]))
        yield window | {"loss_mask": np.where(positions < left, window["loss_mask"], 0)}
        left -= len(positions)
        if left <= 0:
            return


def _padded_batches(
    windows: Iterator[Window], padding: Window, batch_size: int, rows: Sequence[int] | None
) -> Iterator[Batch]:
    while group := list(itertools.islice(windows, batch_size)):
        group += [padding] * (batch_size - len(group))
        yield _stack(group, rows=rows)


def _stack(windows: Sequence[Window], *, rows: Sequence[int] | None) -> Batch:
    """These rows of a global batch."""
    kept = windows if rows is None else [windows[row] for row in rows]
    return {key: np.stack([window[key] for window in kept]) for key in kept[0]}


def _check_not_empty(source: DocumentSource) -> None:
    if len(source) == 0:
        raise ValueError("source holds no documents: give a corpus with at least one")


def _check_arguments(source: DocumentSource, sequence_length: int, batch_size: int, rows: Sequence[int] | None) -> None:
    if sequence_length < 1:
        raise ValueError(f"sequence_length must be at least 1, got {sequence_length}")
    if batch_size < 1:
        raise ValueError(f"batch_size must be at least 1, got {batch_size}")
    if rows is not None and (not rows or sorted({*rows} & {*range(batch_size)}) != list(rows)):
        raise ValueError(f"rows must be some of a batch of {batch_size}, in rising order, got {rows}")
    _check_not_empty(source)
