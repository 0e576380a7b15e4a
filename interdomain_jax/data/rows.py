"""Which tokens of which documents make up each row of a batch, for any row length, without reading a token.

A document is its tokens and the end-of-sequence token (EOS) behind them, which is a target like any other. A row holds
pieces of documents; every token of the corpus lies in exactly one piece of exactly one row. Rows are known by their
number alone, so that they can be shuffled, shared out among processes and found again by an index.

* `ConcatenatedRows`: all documents end to end, cut every T tokens, as the paper does. Nothing is padding but the end of
  the last row; most documents that are longer than what is left of a row are cut.
* `BestFitRows`: a document is cut only if it is longer than T; the pieces are laid where they fit best. A few tokens
  in a thousand are padding.
"""

import bisect
from collections.abc import Iterator
from typing import NamedTuple, Protocol

import numpy as np

# Documents that best-fit packing looks at together; bounds the memory, and the time of a change.
GROUP = 1 << 17


class Piece(NamedTuple):
    """The tokens `start` to `stop` (exclusive) of a document, EOS counted."""

    document: int
    start: int
    stop: int


class Rows(Protocol):
    """The rows of a corpus, by number."""

    def __len__(self) -> int: ...

    def __getitem__(self, row: int, /) -> list[Piece]: ...


class ConcatenatedRows:
    """The documents end to end, cut every `sequence_length` tokens.

    Args:
        lengths: int [documents], tokens of each, EOS counted.
        sequence_length: T, at least 1.
    """

    def __init__(self, lengths: np.ndarray, *, sequence_length: int):
        self._ends = np.cumsum(lengths, dtype=np.int64)
        self._sequence_length = sequence_length

    def __len__(self) -> int:
        total = int(self._ends[-1]) if len(self._ends) else 0
        return -(-total // self._sequence_length)

    def __getitem__(self, row: int) -> list[Piece]:
        _require_row(row, len(self))
        return self.between(row * self._sequence_length, (row + 1) * self._sequence_length)

    def between(self, first: int, last: int) -> list[Piece]:
        """The tokens `first` to `last` (exclusive) of all, as far as there are any."""
        pieces = []
        last = min(last, int(self._ends[-1]))
        document = int(np.searchsorted(self._ends, first, side="right"))
        while first < last:
            end = int(self._ends[document])
            begin = int(self._ends[document - 1]) if document else 0
            stop = min(end, last)
            if stop > first:
                pieces.append(Piece(document, first - begin, stop - begin))
            first, document = stop, document + 1
        return pieces


class BestFitRows:
    """Pieces of at most `sequence_length` tokens, each laid into the fullest row that still has room for it.

    Longest first, within groups of `GROUP` documents: best-fit decreasing. A document of more than T tokens fills
    whole rows, and its rest is a piece like the short documents.

    Args:
        lengths: int [documents], tokens of each, EOS counted.
        sequence_length: T, at least 1.
    """

    def __init__(self, lengths: np.ndarray, *, sequence_length: int):
        # Arrays group by group: the pieces as Python objects take ten times the room.
        pieces, counts = [np.zeros((0, 3), np.int64)], [np.zeros(0, np.int64)]
        for first in range(0, len(lengths), GROUP):
            rows = _best_fit(lengths[first : first + GROUP], first, sequence_length)
            pieces.append(np.array([piece for row in rows for piece in row], np.int64).reshape(-1, 3))
            counts.append(np.array([len(row) for row in rows], np.int64))
        self._pieces = np.concatenate(pieces)
        self._ends = np.cumsum(np.concatenate(counts))

    def __len__(self) -> int:
        return len(self._ends)

    def __getitem__(self, row: int) -> list[Piece]:
        _require_row(row, len(self))
        first = int(self._ends[row - 1]) if row else 0
        return [Piece(*piece) for piece in self._pieces[first : self._ends[row]].tolist()]


def _best_fit(lengths: np.ndarray, first_document: int, sequence_length: int) -> list[list[Piece]]:
    pieces = [
        piece
        for document, length in enumerate(lengths.tolist(), first_document)
        for piece in _cut(document, length, sequence_length)
    ]
    # Stable: of equal lengths the earlier document comes first, whatever machine sorts.
    pieces.sort(key=lambda piece: piece.start - piece.stop)
    rows: list[list[Piece]] = []
    # The rows that have so much room, and the amounts of room that some row has, in rising order.
    with_room: dict[int, list[int]] = {}
    rooms: list[int] = []
    for piece in pieces:
        length = piece.stop - piece.start
        place = bisect.bisect_left(rooms, length)
        if place == len(rooms):
            room, row = sequence_length, len(rows)
            rows.append([])
        else:
            room = rooms[place]
            row = with_room[room].pop()
            if not with_room[room]:
                del with_room[room], rooms[place]
        rows[row].append(piece)
        if left := room - length:
            if left not in with_room:
                with_room[left] = []
                bisect.insort(rooms, left)
            with_room[left].append(row)
    return rows


def _cut(document: int, length: int, sequence_length: int) -> Iterator[Piece]:
    for start in range(0, length, sequence_length):
        yield Piece(document, start, min(start + sequence_length, length))


def _require_row(row: int, count: int) -> None:
    if not 0 <= row < count:
        raise IndexError(f"row {row} of {count}")
