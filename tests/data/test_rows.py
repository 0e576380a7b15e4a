"""Every token in exactly one piece of exactly one row, whatever the documents, the length of a row and the packer."""

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from interdomain_jax.data import rows as packing
from interdomain_jax.data.rows import BestFitRows, ConcatenatedRows, Piece

PACKERS = (ConcatenatedRows, BestFitRows)
LENGTHS = st.lists(st.integers(1, 40), max_size=60).map(lambda values: np.array(values, np.int64))


def tokens_in(rows) -> list[tuple[int, int]]:
    return [
        (piece.document, token)
        for row in range(len(rows))
        for piece in rows[row]
        for token in range(piece.start, piece.stop)
    ]


@pytest.mark.parametrize("packer", PACKERS)
@given(lengths=LENGTHS, sequence_length=st.integers(1, 50))
def test_every_token_once(packer, lengths, sequence_length):
    rows = packer(lengths, sequence_length=sequence_length)
    tokens = tokens_in(rows)
    assert sorted(tokens) == [(document, token) for document, n in enumerate(lengths) for token in range(n)]
    for row in range(len(rows)):
        assert 0 < sum(piece.stop - piece.start for piece in rows[row]) <= sequence_length
        assert all(piece.start < piece.stop for piece in rows[row])


@given(lengths=LENGTHS, sequence_length=st.integers(1, 50))
def test_concatenation_keeps_the_order_and_fills_every_row_but_the_last(lengths, sequence_length):
    rows = ConcatenatedRows(lengths, sequence_length=sequence_length)
    tokens = tokens_in(rows)
    assert tokens == sorted(tokens)
    sizes = [sum(piece.stop - piece.start for piece in rows[row]) for row in range(len(rows))]
    assert all(size == sequence_length for size in sizes[:-1])


@given(lengths=LENGTHS, sequence_length=st.integers(1, 50))
def test_best_fit_cuts_none_but_the_documents_that_do_not_fit(lengths, sequence_length):
    rows = BestFitRows(lengths, sequence_length=sequence_length)
    cut = [
        piece
        for row in range(len(rows))
        for piece in rows[row]
        if (piece.start, piece.stop) != (0, lengths[piece.document])
    ]
    assert all(lengths[piece.document] > sequence_length for piece in cut)
    assert all(piece.start % sequence_length == 0 for piece in cut)


def test_documents_of_10_to_19_tokens_cut_at_7_lose_none():
    """grain#981: they did."""
    lengths = np.arange(10, 20)
    for packer in PACKERS:
        assert len(tokens_in(packer(lengths, sequence_length=7))) == lengths.sum()


def test_best_fit_by_hand():
    rows = BestFitRows(np.array([3, 8, 5, 4, 12]), sequence_length=10)
    assert [rows[row] for row in range(len(rows))] == [
        # The longest pieces first: ten tokens of document 4, then the documents 1, 2, 3, 0 and the rest of 4.
        [Piece(4, 0, 10)],
        [Piece(1, 0, 8), Piece(4, 10, 12)],
        [Piece(2, 0, 5), Piece(3, 0, 4)],
        [Piece(0, 0, 3)],
    ]


@pytest.mark.parametrize("sequence_length", [512, 4096])
def test_best_fit_pads_less_than_one_percent(sequence_length):
    """Documents with the spread of web pages: log-normal, a median of 600 tokens."""
    lengths = np.exp(np.random.default_rng(0).normal(np.log(600), 1.1, 20_000)).astype(np.int64) + 1
    rows = BestFitRows(lengths, sequence_length=sequence_length)
    assert len(rows) * sequence_length < 1.01 * lengths.sum()


def test_groups_are_packed_apart(monkeypatch):
    monkeypatch.setattr(packing, "GROUP", 2)
    rows = BestFitRows(np.array([1, 2, 3, 4]), sequence_length=10)
    assert [{piece.document for piece in rows[row]} for row in range(len(rows))] == [{0, 1}, {2, 3}]


@pytest.mark.parametrize("packer", PACKERS)
def test_a_row_that_is_not_there(packer):
    rows = packer(np.array([5]), sequence_length=4)
    for row in (-1, 2):
        with pytest.raises(IndexError, match=f"row {row} of 2"):
            rows[row]
