"""Batches for training and evaluation, from documents of token ids (`token_files`).

Batches are NumPy dicts of `inputs` int32 [B, T], `targets` int32 [B, T] (the inputs, one token on) and `loss_mask`
float32 [B, T] (1 where the target counts); where each document is a context of its own, also `segment_ids` and
`positions` int32 [B, T]. See `windows`.
"""

import math
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, Literal, NamedTuple

import grain
import numpy as np

from interdomain_jax.data.rows import BestFitRows, ConcatenatedRows, Rows
from interdomain_jax.data.windows import CONTEXT, TokenSequences, Windows
from interdomain_jax.errors import MismatchError

Batch = dict[str, np.ndarray]
Packing = Literal["concatenate", "best_fit"]

PACKERS: dict[str, Callable[..., Rows]] = {"concatenate": ConcatenatedRows, "best_fit": BestFitRows}

# Whole batches, so that the training loop only takes one that is ready. Rows are a few reads and copies each: some
# threads hide the disk, and more only fight over the interpreter.
READ_AHEAD = grain.ReadOptions(num_threads=4, prefetch_buffer_size=8)


class CorpusCounts(NamedTuple):
    """Sizes of a split.

    Attributes:
        documents: number of documents.
        tokens: the closing EOS of each document included: the number of targets of one pass.
        bytes: UTF-8 bytes of the texts. Bits per byte of a pass with mean loss `l` nats per token is
            `l * tokens / (bytes * ln 2)`.
    """

    documents: int
    tokens: int
    bytes: int


def corpus_counts(corpora: Sequence[TokenSequences]) -> CorpusCounts:
    """Counts documents, tokens and bytes of all corpora together."""
    return CorpusCounts(
        documents=sum(len(corpus.lengths) for corpus in corpora),
        tokens=sum(int(corpus.lengths.sum()) for corpus in corpora),
        bytes=sum(corpus.text_bytes for corpus in corpora),
    )


class TrainBatches:
    """Endless training batches: row b of global batch k is row k B + b of one order, a function of the seed.

    Each epoch of a corpus visits its rows in a fresh order. Of several corpora the order takes as many rows as their
    weights say, evenly spread; each goes through its own epochs. The order does not depend on the processes, of which
    each loads its own rows. Use `close` when done.

    Args:
        corpora: the documents of each corpus.
        weights: their shares of the rows, in any unit, held to about one in a hundred of the smallest; none for one.
        sequence_length: T, tokens of a row.
        batch_size: B, rows of a global batch.
        packing: how documents are laid into rows, see `rows`.
        reset: whether each document is a context of its own.
        eos_id: the start symbol.
        seed: of the orders, 0 to 2^32 - 1.
        rows: the rows of each global batch to return, in rising order; None for all.

    Raises:
        ValueError: a corpus has no token, or an argument is out of its range.
    """

    def __init__(
        self,
        corpora: Sequence[TokenSequences],
        *,
        weights: Sequence[float] = (),
        sequence_length: int,
        batch_size: int,
        packing: Packing = "concatenate",
        reset: bool = False,
        eos_id: int,
        seed: int,
        rows: Sequence[int] | None = None,
    ):
        _check_arguments(corpora, sequence_length, batch_size, rows)
        require_packing("packing", packing)
        require_weights("weights", weights, len(corpora))
        if not 0 <= seed < 2**32:
            raise ValueError(f"seed must lie between 0 and 2**32 - 1, got {seed}")
        orders = []
        for number, documents in enumerate(corpora):
            pieces = PACKERS[packing](documents.lengths, sequence_length=sequence_length)
            windows = Windows(documents, pieces, sequence_length=sequence_length, eos_id=eos_id)
            # Not a sum: grain adds the epoch to it.
            own_seed = int(np.random.SeedSequence([seed, number]).generate_state(1)[0])
            orders.append(grain.MapDataset.source(windows).shuffle(seed=own_seed).repeat())
        order = orders[0] if len(orders) == 1 else grain.MapDataset.mix(orders, weights=weights)
        if not reset:
            order = order.map(_without_context)
        own_rows = list(range(batch_size)) if rows is None else list(rows)
        self._own = grain.MapDataset.source(_OwnBatches(order, own_rows, batch_size))
        self._digests = [documents.digest for documents in corpora]
        self._count = 0
        self._iterator = self._from(0)

    def __iter__(self) -> "TrainBatches":
        return self

    def __next__(self) -> Batch:
        batch = next(self._iterator)
        self._count += 1
        return batch

    def get_state(self) -> dict[str, Any]:
        """The position, the same in every process: how many global batches of which corpora were returned."""
        return {"batches": self._count, "corpora": self._digests}

    def set_state(self, state: Mapping[str, Any]) -> None:
        """Goes to a position that any number of processes had.

        Raises:
            MismatchError: it is one in other corpora.
        """
        if state["corpora"] != self._digests:
            raise MismatchError(
                f"the run was trained on corpora with the digests {', '.join(state['corpora'])}, and those of "
                f"data.corpora are {', '.join(self._digests)}: give the corpora that it began with"
            )
        self.close()
        self._count = state["batches"]
        self._iterator = self._from(self._count)

    def close(self) -> None:
        """Ends the threads that read ahead."""
        self._iterator.close()

    def _from(self, batch: int) -> grain.DatasetIterator[Batch]:
        return iter(self._own[batch:].to_iter_dataset(READ_AHEAD))


class _OwnBatches:
    """The rows of each global batch that one process loads, as batches."""

    def __init__(self, order: grain.MapDataset[Batch], rows: list[int], batch_size: int):
        self._order = order
        self._rows = rows
        self._batch_size = batch_size

    def __len__(self) -> int:
        return sys.maxsize // self._batch_size

    def __getitem__(self, batch: int) -> Batch:
        rows = [self._order[batch * self._batch_size + row] for row in self._rows]
        return _stacked(rows)

    def __repr__(self) -> str:
        return f"_OwnBatches(rows={self._rows}, batch_size={self._batch_size})"


def evaluation_batches(
    corpora: Sequence[TokenSequences],
    *,
    sequence_length: int,
    batch_size: int,
    reset: bool = False,
    eos_id: int,
    max_tokens: int | None = None,
    rows: Sequence[int] | None = None,
) -> Iterator[Batch]:
    """One pass over the documents end to end, in their stored order, every token a target exactly once.

    The tokens and their order do not depend on `sequence_length`, so evaluations at several context lengths score the
    same ones. Row b of global batch k is row k B + b, whatever rows a process asks for: all processes return the same
    number of batches, the last one filled up with rows of mask 0.

    Args:
        corpora: the documents of each corpus.
        sequence_length: T, tokens of a row.
        batch_size: B, rows of a global batch.
        reset: whether each document is a context of its own.
        eos_id: the start symbol.
        max_tokens: score only this many tokens from the start of each corpus (all rows together); None for all.
        rows: the rows of each global batch to return, in rising order; None for all.

    Raises:
        ValueError: a corpus has no token, or an argument is out of its range.
    """
    _check_arguments(corpora, sequence_length, batch_size, rows)
    if max_tokens is not None and max_tokens < 1:
        raise ValueError(f"max_tokens must be at least 1, or None for all, got {max_tokens}")
    scored = [_Scored(documents, sequence_length, eos_id, max_tokens) for documents in corpora]
    kept = range(batch_size) if rows is None else rows
    total = sum(map(len, scored))

    def row_of(number: int) -> Batch:
        for each in scored:
            if number < len(each):
                return each[number]
            number -= len(each)
        return scored[0].padding

    def batches() -> Iterator[Batch]:
        for first in range(0, total, batch_size):
            batch = _stacked([row_of(first + row) for row in kept])
            yield batch if reset else _without_context(batch)

    return batches()


class _Scored:
    """The rows up to `max_tokens` targets of a corpus, the mask of the last one cut to fit."""

    def __init__(self, documents: TokenSequences, sequence_length: int, eos_id: int, max_tokens: int | None):
        pieces = ConcatenatedRows(documents.lengths, sequence_length=sequence_length)
        self._windows = Windows(documents, pieces, sequence_length=sequence_length, eos_id=eos_id)
        self._max_tokens = len(pieces) * sequence_length if max_tokens is None else max_tokens
        self._places = np.arange(sequence_length)
        self.padding = self._windows.empty_row()

    def __len__(self) -> int:
        return min(len(self._windows), -(-self._max_tokens // len(self._places)))

    def __getitem__(self, row: int) -> Batch:
        window = self._windows[row]
        left = self._max_tokens - row * len(self._places)
        return window | {"loss_mask": np.where(self._places < left, window["loss_mask"], 0)}


def require_packing(name: str, packing: str) -> None:
    """Checks the name of a way of packing.

    Raises:
        ValueError: there is no such way; it names the field.
    """
    if packing not in PACKERS:
        raise ValueError(f"{name} is {packing!r}; it must be one of {tuple(PACKERS)}")


def require_weights(name: str, weights: Sequence[float], corpora: int) -> None:
    """Checks that these weights can mix so many corpora; one needs none.

    Raises:
        ValueError: they cannot; it names the field.
    """
    if not weights and corpora == 1:
        return
    if len(weights) != corpora:
        raise ValueError(f"{name} is {weights}; it must have one number for each of the corpora, {corpora}")
    for weight in weights:
        if not (isinstance(weight, int | float) and math.isfinite(weight) and weight > 0):
            raise ValueError(f"{name} is {weights}; all of them must be numbers above 0")


def _stacked(rows: Sequence[Batch]) -> Batch:
    return {key: np.stack([row[key] for row in rows]) for key in rows[0]}


def _without_context(batch: Batch) -> Batch:
    return {key: value for key, value in batch.items() if key not in CONTEXT}


def _check_arguments(
    corpora: Sequence[TokenSequences], sequence_length: int, batch_size: int, rows: Sequence[int] | None
) -> None:
    if sequence_length < 1:
        raise ValueError(f"sequence_length must be at least 1, got {sequence_length}")
    if batch_size < 1:
        raise ValueError(f"batch_size must be at least 1, got {batch_size}")
    if rows is not None and (not rows or sorted({*rows} & {*range(batch_size)}) != list(rows)):
        raise ValueError(f"rows must be some of a batch of {batch_size}, in rising order, got {rows}")
    if not corpora or not all(len(documents.lengths) for documents in corpora):
        raise ValueError("corpora must each have at least one document, and there must be one")
