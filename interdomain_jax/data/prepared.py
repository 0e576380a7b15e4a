"""Endless batches of rows that are known by number, for any number of processes, with a position that is one number."""

import sys
from collections.abc import Sequence
from typing import Any

import grain
import numpy as np

from interdomain_jax.data.windows import Windows

# Rows are a few reads and copies each: some threads hide the disk, and more only fight over the interpreter.
READ_AHEAD = grain.ReadOptions(num_threads=4, prefetch_buffer_size=64)


class PreparedBatches:
    """Row b of global batch k is row k B + b of one endless order, a function of the seed, whoever asks for it.

    Each epoch of a corpus visits its rows in a fresh order. Of several corpora the order takes as many rows as their
    weights say, evenly spread; each goes through its own epochs. Use `close` when done.

    Args:
        corpora: the rows of each corpus.
        weights: their shares of the rows, in any unit; equal if None.
        batch_size: B, rows of a global batch.
        seed: of the orders, 0 to 2^32 - 1.
        rows: the rows of each global batch to return, in rising order; None for all.

    Raises:
        ValueError: a corpus has no row, or an argument is out of its range.
    """

    def __init__(
        self,
        corpora: Sequence[Windows],
        *,
        weights: Sequence[float] | None = None,
        batch_size: int,
        seed: int,
        rows: Sequence[int] | None = None,
    ):
        weights = [1.0] * len(corpora) if weights is None else weights
        if not corpora or not all(len(corpus) for corpus in corpora):
            raise ValueError("corpora must each have at least one row, and there must be one")
        if len(weights) != len(corpora) or min(weights) <= 0:
            raise ValueError(
                f"weights must be above 0, one for each of the {len(corpora)} corpora; got {list(weights)}"
            )
        orders = [
            grain.MapDataset.source(corpus).shuffle(seed=(seed + number) % 2**32).repeat()
            for number, corpus in enumerate(corpora)
        ]
        order = orders[0] if len(orders) == 1 else grain.MapDataset.mix(orders, weights=weights)
        self._rows = list(range(batch_size)) if rows is None else list(rows)
        self._own = grain.MapDataset.source(_OwnRows(order, self._rows, batch_size))
        self._count = 0
        self._iterator = self._from(0)

    def __iter__(self) -> "PreparedBatches":
        return self

    def __next__(self) -> dict[str, np.ndarray]:
        batch = next(self._iterator)
        self._count += 1
        return batch

    def get_state(self) -> dict[str, Any]:
        """The position, the same in every process: how many global batches were returned."""
        return {"batches": self._count}

    def set_state(self, state: dict[str, Any]) -> None:
        """Goes to a position that any number of processes had."""
        self.close()
        self._count = state["batches"]
        self._iterator = self._from(self._count)

    def close(self) -> None:
        """Ends the threads that read ahead."""
        self._iterator.close()

    def _from(self, batch: int) -> grain.DatasetIterator[dict[str, np.ndarray]]:
        own = self._own[batch * len(self._rows) :]
        return iter(own.to_iter_dataset(READ_AHEAD).batch(len(self._rows), drop_remainder=True))


class _OwnRows:
    """The rows that one process loads, as if there were no others."""

    def __init__(self, order: grain.MapDataset[dict[str, np.ndarray]], rows: list[int], batch_size: int):
        self._order = order
        self._rows = rows
        self._batch_size = batch_size

    def __len__(self) -> int:
        return sys.maxsize // self._batch_size * len(self._rows)

    def __getitem__(self, index: int) -> dict[str, np.ndarray]:
        batch, place = divmod(index, len(self._rows))
        row = self._order[batch * self._batch_size + self._rows[place]]
        assert row is not None
        return row

    def __repr__(self) -> str:
        return f"_OwnRows(rows={self._rows}, batch_size={self._batch_size})"
