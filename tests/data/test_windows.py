"""Rows of ids: every token a target once, inputs one place behind, boundaries where documents begin."""

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from interdomain_jax.data.rows import BestFitRows, ConcatenatedRows
from interdomain_jax.data.windows import Windows
from tests.token_lists import TokenLists

EOS = 9
# Any id may stand inside a document, EOS too.
DOCUMENTS = st.lists(
    st.lists(st.integers(0, EOS), max_size=12).map(lambda ids: np.array([*ids, EOS], np.int32)), max_size=12
)


def windows_of(documents, packer, sequence_length):
    corpus = TokenLists(documents)
    rows = packer(corpus.lengths, sequence_length=sequence_length)
    return Windows(corpus, rows, sequence_length=sequence_length, eos_id=EOS), rows


@pytest.mark.parametrize("packer", [ConcatenatedRows, BestFitRows])
@given(documents=DOCUMENTS, sequence_length=st.integers(1, 20))
def test_every_token_is_a_target_once_and_follows_its_input(packer, documents, sequence_length):
    windows, rows = windows_of(documents, packer, sequence_length)
    found = {}
    for number in range(len(windows)):
        window = windows[number]
        assert {name: (value.shape, value.dtype.name) for name, value in window.items()} == {
            name: ((sequence_length,), "float32" if name == "loss_mask" else "int32")
            for name in ("inputs", "targets", "loss_mask", "segment_ids", "positions")
        }
        pieces = rows[number]
        for segment, piece in enumerate(pieces, 1):
            here = window["segment_ids"] == segment
            document = [EOS, *documents[piece.document]]
            assert list(window["inputs"][here]) == document[piece.start : piece.stop]
            assert list(window["targets"][here]) == document[piece.start + 1 : piece.stop + 1]
            assert list(window["positions"][here]) == list(range(piece.stop - piece.start))
            assert window["loss_mask"][here].all()
            found |= {(piece.document, token): number for token in range(piece.start, piece.stop)}
        padding = window["segment_ids"] == 0
        assert padding.sum() == sequence_length - sum(piece.stop - piece.start for piece in pieces)
        assert not window["loss_mask"][padding].any()
        assert (window["inputs"][padding] == EOS).all()
    assert len(found) == sum(len(ids) for ids in documents)


def test_by_hand():
    documents = [np.array([1, 2, EOS]), np.array([3, EOS, 4, EOS])]
    windows, _ = windows_of(documents, ConcatenatedRows, 5)
    assert {name: list(value) for name, value in windows[0].items()} == {
        "inputs": [EOS, 1, 2, EOS, 3],
        "targets": [1, 2, EOS, 3, EOS],
        "loss_mask": [1, 1, 1, 1, 1],
        "segment_ids": [1, 1, 1, 2, 2],
        "positions": [0, 1, 2, 0, 1],
    }
    assert {name: list(value) for name, value in windows[1].items()} == {
        # The rest of the second document: the EOS in its text is no boundary.
        "inputs": [EOS, 4, EOS, EOS, EOS],
        "targets": [4, EOS, EOS, EOS, EOS],
        "loss_mask": [1, 1, 0, 0, 0],
        "segment_ids": [1, 1, 0, 0, 0],
        "positions": [0, 1, 0, 0, 0],
    }
