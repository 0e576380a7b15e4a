"""Rows of token ids, ready for a model, from documents and the pieces of them that belong to each row."""

from typing import Protocol

import numpy as np

from interdomain_jax.data.rows import Rows

CONTEXT = ("segment_ids", "positions")
"""What tells the documents of a row apart."""


class TokenSequences(Protocol):
    """Documents as ids, the closing EOS of each among them: `token_files.TokenDocuments`, or any others.

    Attributes:
        lengths: int [documents], the number of ids of each.
        text_bytes: UTF-8 bytes of their texts.
        digest: tells them from others.
    """

    lengths: np.ndarray
    text_bytes: int
    digest: str

    def read(self, document: int, start: int, stop: int) -> np.ndarray:
        """The ids `start` to `stop` (exclusive) of a document, int32 [stop - start]."""


class Windows:
    """Rows by number, as `inputs`, `targets`, `segment_ids`, `positions` int32 [T] and `loss_mask` float32 [T].

    Each token of a piece is a target; its input is the token before it in the document, or EOS, the start symbol,
    before the first. So every token of the corpus is a target exactly once, whatever the length of a row.

    Segment ids count the pieces of a row from 1, and positions the tokens of a piece from 0; both are known from where
    the documents begin, not from the ids, so that an EOS inside a text is no boundary. Padding is EOS, segment id 0,
    position 0 and mask 0.

    Args:
        documents: of token ids.
        rows: which pieces of them lie in which row.
        sequence_length: T, that of `rows`.
        eos_id: the start symbol.
    """

    def __init__(self, documents: TokenSequences, rows: Rows, *, sequence_length: int, eos_id: int):
        self._documents = documents
        self._rows = rows
        self._sequence_length = sequence_length
        self._eos_id = eos_id

    def __len__(self) -> int:
        return len(self._rows)

    def empty_row(self) -> dict[str, np.ndarray]:
        """A row of padding."""
        length = self._sequence_length
        return {
            "inputs": np.full(length, self._eos_id, np.int32),
            "targets": np.full(length, self._eos_id, np.int32),
            "loss_mask": np.zeros(length, np.float32),
            "segment_ids": np.zeros(length, np.int32),
            "positions": np.zeros(length, np.int32),
        }

    def __getitem__(self, row: int) -> dict[str, np.ndarray]:
        window = self.empty_row()
        end = 0
        for number, piece in enumerate(self._rows[row], 1):
            begin, end = end, end + piece.stop - piece.start
            before = min(piece.start, 1)
            ids = self._documents.read(piece.document, piece.start - before, piece.stop)
            window["targets"][begin:end] = ids[before:]
            window["inputs"][begin + 1 - before : end] = ids[:-1]
            window["loss_mask"][begin:end] = 1
            window["segment_ids"][begin:end] = number
            window["positions"][begin:end] = np.arange(end - begin)
        return window
