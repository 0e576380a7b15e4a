"""A corpus to score, as contexts that a model reads one by one, each from its empty state on, and in pieces if long.

* `StreamContexts`: the documents end to end, in windows that follow each other or overlap, or as a single one.
* `DocumentContexts`: no document sees another; those that are longer than a context are cut.

Whatever the contexts, every token of the corpus is scored in exactly one of them.
"""

from collections.abc import Iterator, Sequence
from typing import NamedTuple, Protocol

import numpy as np

from interdomain_jax.data.loader import Batch
from interdomain_jax.data.rows import BestFitRows, ConcatenatedRows, Piece
from interdomain_jax.data.windows import TokenSequences, Windows


class Contexts(Protocol):
    """Stretches of tokens by number, in any order.

    Attributes:
        context_length: tokens of the longest, or more.
    """

    context_length: int

    def __len__(self) -> int: ...

    def length(self, number: int) -> int:
        """Tokens of a context."""

    def first_scored(self, number: int) -> int:
        """Where the tokens begin that count; those before have been scored in another context."""

    def pieces(self, number: int, start: int, stop: int) -> list[Piece]:
        """The tokens `start` to `stop` (exclusive) of a context, as far as there are any."""


class StreamContexts:
    """The documents end to end, in windows of `context_length` tokens, one every `stride` tokens.

    The first window scores all its tokens, every other one its last `stride` tokens, or what is left.

    Args:
        lengths: int [documents], tokens of each, EOS counted.
        context_length: at least 1.
        stride: at most the context length; equal to it, no windows overlap.
    """

    def __init__(self, lengths: np.ndarray, *, context_length: int, stride: int):
        self.context_length = context_length
        self._stream = ConcatenatedRows(lengths, sequence_length=context_length)
        self._total = int(np.sum(lengths, dtype=np.int64))
        self._stride = stride

    def __len__(self) -> int:
        return 1 + max(0, -(-(self._total - self.context_length) // self._stride))

    def length(self, number: int) -> int:
        """Tokens of a context; the last may be shorter."""
        return min(self.context_length, self._total - number * self._stride)

    def first_scored(self, number: int) -> int:
        """`context_length - stride`, up to which the window before has scored; 0 in the first one."""
        return self.context_length - self._stride if number else 0

    def pieces(self, number: int, start: int, stop: int) -> list[Piece]:
        """The tokens `start` to `stop` (exclusive) of a context, as far as there are any."""
        begin = number * self._stride
        return self._stream.between(begin + start, begin + min(stop, self.context_length))


class DocumentContexts:
    """Documents cut after every `context_length` tokens, and packed into as few contexts as `BestFitRows` needs.

    What lies together in a context is told apart by its segment ids.

    Args:
        lengths: int [documents], tokens of each, EOS counted.
        context_length: at least 1.
    """

    def __init__(self, lengths: np.ndarray, *, context_length: int):
        self.context_length = context_length
        self._rows = BestFitRows(lengths, sequence_length=context_length)

    def __len__(self) -> int:
        return len(self._rows)

    def length(self, number: int) -> int:
        """Tokens of the documents in a context."""
        return sum(piece.stop - piece.start for piece in self._rows[number])

    def first_scored(self, number: int) -> int:
        """0: no token lies in two contexts."""
        return 0

    def pieces(self, number: int, start: int, stop: int) -> list[Piece]:
        """The tokens `start` to `stop` (exclusive) of a context, as far as there are any."""
        found, begin = [], 0
        for piece in self._rows[number]:
            first, last = max(start - begin, 0), min(stop - begin, piece.stop - piece.start)
            if first < last:
                found.append(Piece(piece.document, piece.start + first, piece.start + last))
            begin += piece.stop - piece.start
        return found


class ContextPiece(NamedTuple):
    """The same stretch of several contexts.

    Attributes:
        begins: whether it is the first of its contexts: what was read before is to be forgotten.
        batch: `inputs`, `targets` and `loss_mask` as the loader gives them; `segment_ids` that last from piece to piece
            of a context; and `positions`, how many tokens of a segment come before each token in its context.
    """

    begins: bool
    batch: Batch


def first_tokens(lengths: np.ndarray, max_tokens: int | None) -> np.ndarray:
    """The lengths of the documents if no more than so many tokens from the start of the corpus were there."""
    if max_tokens is None:
        return lengths
    before = np.cumsum(lengths, dtype=np.int64) - lengths
    return np.clip(max_tokens - before, 0, lengths)


def context_pieces(
    documents: TokenSequences,
    contexts: Contexts,
    *,
    piece_tokens: int,
    batch_size: int,
    reset: bool,
    eos_id: int,
    rows: Sequence[int],
) -> Iterator[ContextPiece]:
    """Goes through all contexts, `batch_size` at a time and `piece_tokens` of each at a time.

    All processes get the same number of pieces, the last batch filled up with rows of mask 0; memory is that of one.

    Args:
        documents: of the contexts.
        contexts: what to read.
        piece_tokens: T; where it does not divide a context, the last piece of that is filled up with mask 0.
        batch_size: B, rows of a global batch.
        reset: whether each document is a segment of its own; if not, a context is one segment.
        eos_id: the start symbol.
        rows: the rows of each global batch to return, in rising order.
    """
    cut = _CutContexts(contexts, piece_tokens)
    windows = Windows(documents, cut, sequence_length=piece_tokens, eos_id=eos_id)
    place = np.arange(piece_tokens)

    def row(number: int, start: int) -> Batch:
        if number >= len(contexts):
            return windows.empty_row()
        piece = number * cut.pieces_each + start // piece_tokens
        window = windows[piece]
        counts = start + place >= contexts.first_scored(number)
        window["loss_mask"] = np.where(counts, window["loss_mask"], 0)
        # By the document, not by its place in the piece: it goes on in the next one.
        ids = [np.full(each.stop - each.start, each.document + 1) for each in cut[piece]]
        window["segment_ids"][: sum(map(len, ids))] = np.concatenate([np.zeros(0, int), *ids])
        return window

    for first in range(0, len(contexts), batch_size):
        lengths = [contexts.length(number) for number in range(first, min(first + batch_size, len(contexts)))]
        last_id, seen = np.full((len(rows), 1), -1), np.zeros((len(rows), 1), np.int32)
        for start in range(0, max(lengths), piece_tokens):
            own = [row(first + number, start) for number in rows]
            batch = {name: np.stack([each[name] for each in own]) for name in own[0]}
            if reset:
                batch["positions"] += np.where(batch["segment_ids"] == last_id, seen, 0)
                last_id, seen = batch["segment_ids"][:, -1:], batch["positions"][:, -1:] + 1
            else:
                batch["segment_ids"] = np.ones_like(batch["segment_ids"])
                batch["positions"] = np.broadcast_to((start + place).astype(np.int32), batch["positions"].shape)
            yield ContextPiece(start == 0, batch)


class _CutContexts:
    """The pieces of all contexts as rows, equally many for each."""

    def __init__(self, contexts: Contexts, piece_tokens: int):
        self._contexts = contexts
        self._piece_tokens = piece_tokens
        self.pieces_each = -(-contexts.context_length // piece_tokens)

    def __len__(self) -> int:
        return len(self._contexts) * self.pieces_each

    def __getitem__(self, row: int) -> list[Piece]:
        number, piece = divmod(row, self.pieces_each)
        return self._contexts.pieces(number, piece * self._piece_tokens, (piece + 1) * self._piece_tokens)
