"""Text as it comes: whole characters, and nothing of what stops it."""

import itertools

import pytest
from hypothesis import given
from hypothesis import strategies as st

from interdomain_jax.data.tokenizers import load_tokenizer
from interdomain_jax.inference.texts import TextStream, prompt_ids

TOKENIZERS = {name: load_tokenizer(name) for name in ("bytes", "mistral")}


def streamed(tokenizer, prompt, tokens, cuts, stop=()):
    stream = TextStream(tokenizer, prompt, stop)
    bounds = [0, *sorted(cut % (len(tokens) + 1) for cut in cuts), len(tokens)]
    pieces = [stream.push(tokens[start:end]) for start, end in itertools.pairwise(bounds)]
    return [*pieces, stream.finish()], stream.stopped


@pytest.mark.parametrize("name", TOKENIZERS)
@given(text=st.text(max_size=20), cuts=st.lists(st.integers(0, 100), max_size=6))
def test_the_pieces_are_the_text(name, text, cuts):
    tokenizer = TOKENIZERS[name]
    ids = prompt_ids(tokenizer, f"before{text}")
    before = prompt_ids(tokenizer, "before")
    # Only where the prompt is tokens of its own within the whole.
    is_apart = ids[: len(before)] == before and tokenizer.decode(ids) == f"before{text}"
    if is_apart and "\ufffd" not in text:
        pieces, stopped = streamed(tokenizer, before, ids[len(before) :], cuts)
        assert "".join(pieces) == text
        assert not any("\ufffd" in piece for piece in pieces)
        assert not stopped


@given(
    text=st.text("abc\n", max_size=30),
    stop=st.lists(st.text("abc\n", min_size=1, max_size=4), max_size=3),
    cuts=st.lists(st.integers(0, 100), max_size=6),
)
def test_nothing_of_a_stop_is_told(text, stop, cuts):
    tokenizer = TOKENIZERS["bytes"]
    pieces, stopped = streamed(tokenizer, [256], tokenizer.encode(text).tolist(), cuts, stop)
    found = [place for each in stop if (place := text.find(each)) >= 0]
    assert "".join(pieces) == text[: min(found, default=len(text))]
    assert stopped == bool(found)


def test_a_character_that_never_becomes_whole_is_told_at_the_end():
    stream = TextStream(TOKENIZERS["bytes"], [256])
    assert stream.push([0xE2, 0x82]) == ""
    assert stream.push([0xAC, 0xC3]) == "€"
    assert stream.finish() == "\ufffd"


def test_a_prompt_begins_as_documents_do():
    assert prompt_ids(TOKENIZERS["bytes"], "ab") == [256, 97, 98]
