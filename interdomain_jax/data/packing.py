"""Documents, laid end to end, cut into windows of one length.

The token stream of a corpus is `d1 EOS d2 EOS ...`: the end-of-sequence token (EOS) after a
document is the boundary, and is itself a target. Window w holds the targets
`stream[w T : (w + 1) T]`, and the inputs are the same tokens one place earlier. The first input of
the stream is an EOS, the start symbol, so every token of the stream is a target exactly once,
whatever the window length T.

grain has such a packer (`ConcatThenSplitIterDataset`), but in 0.2.18 its state does not survive
the JSON of grain's own checkpoints: the slice markers come back as lists instead of tuples, and a
whole document is dropped on restoring.
"""

from collections.abc import Mapping
from typing import Any

import grain
import numpy as np

Window = dict[str, np.ndarray]


class PackedWindows(grain.IterDataset[Window]):
    """Windows over a dataset of token arrays.

    Elements are `inputs` int32 [T], `targets` int32 [T] and `loss_mask` float32 [T] (1 where the
    target counts). If the documents end, the last window is filled up with EOS under mask 0.

    Args:
        documents: dataset of int32 arrays, each one a document and its closing EOS.
        sequence_length: T, at least 1.
        eos_id: the boundary token.
    """

    def __init__(self, documents: grain.IterDataset[np.ndarray], *, sequence_length: int, eos_id: int):
        super().__init__(documents)
        self._documents = documents
        self._sequence_length = sequence_length
        self._eos_id = eos_id

    def __iter__(self) -> "PackedWindowIterator":
        return PackedWindowIterator(iter(self._documents), sequence_length=self._sequence_length, eos_id=self._eos_id)

    def __str__(self) -> str:
        return f"PackedWindows(sequence_length={self._sequence_length})"


class PackedWindowIterator(grain.DatasetIterator[Window]):
    """Iterator of `PackedWindows`.

    Its state is the state of the document iterator before the current document, and how many of
    that document's tokens have been targets: two plain numbers, whatever the length of a document.
    """

    def __init__(self, documents: grain.DatasetIterator[np.ndarray], *, sequence_length: int, eos_id: int):
        super().__init__(documents)
        self._documents = documents
        self._sequence_length = sequence_length
        self._eos_id = eos_id
        self._document_state = documents.get_state()
        self._document = np.zeros(0, dtype=np.int32)
        self._offset = 0

    def __next__(self) -> Window:
        previous = self._document[self._offset - 1] if self._offset else self._eos_id
        targets = np.full(self._sequence_length, self._eos_id, dtype=np.int32)
        filled = 0
        while filled < self._sequence_length:
            if self._offset == len(self._document) and not self._advance():
                break
            piece = self._document[self._offset : self._offset + self._sequence_length - filled]
            targets[filled : filled + len(piece)] = piece
            filled += len(piece)
            self._offset += len(piece)
        if filled == 0:
            raise StopIteration
        inputs = np.empty_like(targets)
        inputs[0] = previous
        inputs[1:] = targets[:-1]
        loss_mask = (np.arange(self._sequence_length) < filled).astype(np.float32)
        return {"inputs": inputs, "targets": targets, "loss_mask": loss_mask}

    def _advance(self) -> bool:
        """Moves on to the next document; False, and the state unchanged, if there is none."""
        state = self._documents.get_state()
        document = next(self._documents, None)
        if document is None:
            return False
        self._document_state, self._document, self._offset = state, document, 0
        return True

    def get_state(self) -> dict[str, Any]:
        return {"document": self._document_state, "offset": self._offset}

    def set_state(self, state: Mapping[str, Any]) -> None:
        self._documents.set_state(state["document"])
        self._document_state = state["document"]
        self._document = next(self._documents)
        self._offset = state["offset"]
