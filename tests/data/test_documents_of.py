"""The rules that every text goes through before it becomes tokens."""

import unicodedata

import pytest
from hypothesis import given
from hypothesis import strategies as st

from interdomain_jax.data.documents import Documents, documents_of


@pytest.mark.parametrize(
    ("content", "text"),
    [
        (b"plain", "plain"),
        ("already text", "already text"),
        (b"\xef\xbb\xbfwith a mark", "with a mark"),
        (b"one\r\ntwo\rthree\n", "one\ntwo\nthree"),
        ("  \n around\t", "around"),
        ("cafe\u0301", "caf\u00e9"),
        ("nul \x00 stays", "nul \x00 stays"),
    ],
)
def test_one_document(content, text):
    assert documents_of(content) == Documents((text,))


@pytest.mark.parametrize(
    ("content", "reason"),
    [
        (b"", "empty"),
        (" \r\n\t", "empty"),
        (b"\xef\xbb\xbf", "empty"),
        (b"caf\xe9", "invalid utf-8"),
        (b"cut \xe2\x82", "invalid utf-8"),
        ("a lone \ud800 surrogate", "invalid utf-8"),
    ],
)
def test_no_document(content, reason):
    assert documents_of(content) == Documents((), reason)


def test_long_texts_are_cut_behind_lines_then_words_then_anywhere():
    assert documents_of("aa\nbb cc\ndd", max_bytes=9).texts == ("aa\nbb cc\n", "dd")
    assert documents_of("aa bb cc dd", max_bytes=7).texts == ("aa bb ", "cc dd")
    assert documents_of("abcdefghij", max_bytes=4).texts == ("abcd", "efgh", "ij")
    assert documents_of("\u20ac" * 4, max_bytes=4).texts == ("\u20ac",) * 4


@given(st.text(), st.integers(4, 12))
def test_nothing_is_lost_in_cutting(text, max_bytes):
    documents = documents_of(text, max_bytes=max_bytes)
    assert all(0 < len(part.encode()) <= max_bytes for part in documents.texts)
    whole = unicodedata.normalize("NFC", text.removeprefix("\ufeff").replace("\r\n", "\n").replace("\r", "\n")).strip()
    assert "".join(documents.texts) == whole
