"""Contexts: every token scored once, behind exactly the tokens that its mode says, however they are cut and batched."""

import itertools

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from interdomain_jax.data.contexts import DocumentContexts, StreamContexts, context_pieces, first_tokens
from tests.token_lists import TokenLists

EOS = 0


def corpus_of(lengths):
    """Documents of which no two tokens have the same id."""
    ids = itertools.count(1)
    return TokenLists([next(ids) for _ in range(length)] for length in lengths)


def expected_of(corpus, contexts_start, *, reset):
    """Maps each token to the tokens that it is predicted from, the symbol before it first, as the definition says.

    Args:
        contexts_start: (document, its place in it, its place in the stream) of a token -> where its context begins in
            the stream.
    """
    found, before, stream = {}, 0, []
    for number, ids in enumerate(corpus.documents):
        stream += list(zip([EOS, *ids[:-1]], ids, strict=True))
        for place, token in enumerate(ids):
            start = contexts_start(number, place, before + place)
            start = max(start, before) if reset else start
            found[int(token)] = [int(given) for given, _ in stream[start : before + place + 1]]
        before += len(ids)
    return found


def read(corpus, contexts, **options):
    """Maps each scored token to the inputs of its segment so far and its position, by the pieces of its row."""
    found = {}
    rows = options["rows"]
    seen = [[] for _ in rows]
    for begins, batch in context_pieces(corpus, contexts, eos_id=EOS, **options):
        if begins:
            seen = [[] for _ in rows]
        for row, inputs in enumerate(seen):
            for ids in zip(*(batch[name][row] for name in sorted(batch)), strict=True):
                given, counts, position, segment, target = (value.item() for value in ids)
                inputs.append((segment, given))
                if counts:
                    assert target not in found, "a token is scored twice"
                    found[target] = [value for other, value in inputs if other == segment]
                    assert position == len(found[target]) - 1
    return found


LENGTHS = st.lists(st.integers(1, 13), min_size=1, max_size=8)


@settings(max_examples=60)
@given(data=st.data(), lengths=LENGTHS, context_length=st.integers(1, 16), piece_tokens=st.integers(1, 16))
def test_every_token_once_behind_the_tokens_of_its_context(data, lengths, context_length, piece_tokens):
    corpus = corpus_of(lengths)
    mode = data.draw(st.sampled_from(["windows", "strided", "carried", "documents"]))
    reset = mode == "documents" or data.draw(st.booleans())
    stride = data.draw(st.integers(1, context_length)) if mode == "strided" else context_length
    if mode == "carried":
        context_length = stride = sum(lengths)

    def start(document, place, i):
        if mode == "documents":
            return i - place % context_length
        return 0 if i < context_length else -(-(i + 1 - context_length) // stride) * stride

    if mode == "documents":
        contexts = DocumentContexts(corpus.lengths, context_length=context_length)
    else:
        contexts = StreamContexts(corpus.lengths, context_length=context_length, stride=stride)
    batch_size = data.draw(st.integers(1, 3))
    found = {}
    # As if each row were another process's.
    for row in range(batch_size):
        own = read(corpus, contexts, piece_tokens=piece_tokens, batch_size=batch_size, reset=reset, rows=[row])
        assert not found.keys() & own.keys()
        found |= own
    assert found == expected_of(corpus, start, reset=reset)


@pytest.mark.parametrize("total", [1, 2047, 2048, 2049, 7576])
@pytest.mark.parametrize("stride", [512, 1000, 2048])
def test_windows_around_the_length(total, stride):
    """lm-eval#339: sliding windows scored tokens twice or never. Each once, with as many tokens before it as it can."""
    corpus = TokenLists([range(1, total + 1)])
    contexts = StreamContexts(corpus.lengths, context_length=2048, stride=stride)
    scored = []
    for begins, batch in context_pieces(
        corpus, contexts, piece_tokens=2048, batch_size=1, reset=False, eos_id=EOS, rows=[0]
    ):
        assert begins
        counts = batch["loss_mask"][0] > 0
        scored += batch["targets"][0][counts].tolist()
        if len(scored) > 2048:
            assert batch["positions"][0][counts].min() >= 2048 - stride
    assert scored == list(range(1, total + 1))


@given(lengths=LENGTHS, max_tokens=st.integers(1, 60))
def test_the_first_tokens_of_a_corpus(lengths, max_tokens):
    kept = first_tokens(np.array(lengths), max_tokens)
    stream = [number for number, length in enumerate(lengths) for _ in range(length)]
    assert [number for number, length in enumerate(kept) for _ in range(length)] == stream[:max_tokens]
