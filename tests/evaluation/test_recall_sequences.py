"""Selective copying, induction heads, and what the tasks of tokens share, against plain Python."""

import collections
import itertools

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from interdomain_jax.evaluation.recall.induction_heads import induction_heads
from interdomain_jax.evaluation.recall.selective_copying import selective_copying
from interdomain_jax.evaluation.recall.sequences import Sequences, draw_distinct, mixed_batches

SEEDS = st.integers(0, 2**40)


def scored_targets(made: Sequences) -> list[list[int]]:
    assert (made.tokens.dtype, made.targets.dtype, made.is_scored.dtype) == (np.int32, np.int32, bool)
    assert made.tokens.shape == made.targets.shape == made.is_scored.shape
    assert not made.targets[~made.is_scored].any()
    return [row[scored].tolist() for row, scored in zip(made.targets, made.is_scored, strict=True)]


@given(kept=st.integers(1, 8), more=st.integers(0, 20), vocab_size=st.integers(3, 20), seed=SEEDS)
def test_selective_copying_gives_back_what_is_not_blank(kept, more, vocab_size, seed):
    made = selective_copying(5, seed=seed, length=2 * kept + more, kept=kept, vocab_size=vocab_size)
    assert made.tokens.shape == (5, 2 * kept + more)
    asks = vocab_size - 1
    for tokens, targets in zip(made.tokens.tolist(), scored_targets(made), strict=True):
        assert tokens[-kept:] == [asks] * kept
        assert [token for token in tokens if 0 < token < asks] == targets
        assert len(targets) == kept
        assert tokens.count(0) == len(tokens) - 2 * kept
    assert made.is_scored[:, -kept:].all()


def test_selective_copying_keeps_tokens_of_every_place_and_id():
    made = selective_copying(4_000, seed=0, length=13, kept=3, vocab_size=6)
    assert {*np.unique(made.targets[made.is_scored])} == {1, 2, 3, 4}
    np.testing.assert_allclose(np.mean(made.tokens[:, :10] > 0, axis=0), 0.3, atol=0.03)


def test_selective_copying_is_as_long_as_in_its_paper():
    made = selective_copying(2, seed=0)
    assert made.tokens.shape == (2, 4_112)
    assert made.tokens.max() == 15
    assert made.is_scored.sum(axis=1).tolist() == [16, 16]


@given(length=st.integers(3, 40), vocab_size=st.integers(3, 20), seed=SEEDS)
def test_induction_heads_asks_what_followed_the_sign(length, vocab_size, seed):
    made = induction_heads(5, seed=seed, length=length, vocab_size=vocab_size)
    assert made.tokens.shape == (5, length)
    sign = vocab_size - 1
    for tokens, targets in zip(made.tokens.tolist(), scored_targets(made), strict=True):
        assert [place for place, token in enumerate(tokens) if token == sign][1:] == [length - 1]
        assert targets == [tokens[tokens.index(sign) + 1]]
        assert 0 <= targets[0] < sign
    assert made.is_scored[:, -1].all()


def test_induction_heads_puts_the_sign_anywhere():
    made = induction_heads(4_000, seed=0, length=12, vocab_size=4)
    places = np.argmax(made.tokens == 3, axis=1)
    np.testing.assert_allclose(np.bincount(places, minlength=10) / 4_000, 0.1, atol=0.03)
    assert {*made.targets[:, -1]} == {0, 1, 2}


@pytest.mark.parametrize("task", [selective_copying, induction_heads])
def test_sequences_are_a_function_of_the_seed(task):
    first, again, other = (task(20, seed=seed, length=64) for seed in (7, 7, 8))
    for one, two in zip(first, again, strict=True):
        np.testing.assert_array_equal(one, two)
    assert not np.all(first.tokens == other.tokens, axis=1).any()


@pytest.mark.parametrize(
    ("task", "arguments", "message"),
    [
        (selective_copying, {"count": 0}, "count is 0; it must be at least 1"),
        (selective_copying, {"kept": 0}, "kept is 0; it must be at least 1"),
        (selective_copying, {"vocab_size": 2}, "vocab_size is 2; it must be at least 3"),
        (
            selective_copying,
            {"length": 15, "kept": 8},
            "length is 15; 8 tokens and as many that ask for them need at least 16",
        ),
        (selective_copying, {"seed": -1}, "seed is -1; it must be 0 or more"),
        (induction_heads, {"count": 0}, "count is 0; it must be at least 1"),
        (induction_heads, {"length": 2}, "length is 2; it must be at least 3"),
        (induction_heads, {"vocab_size": 2}, "vocab_size is 2; it must be at least 3"),
        (induction_heads, {"seed": -1}, "seed is -1; it must be 0 or more"),
    ],
)
def test_arguments_out_of_range_are_refused_in_a_sentence(task, arguments, message):
    with pytest.raises(ValueError) as caught:
        task(**{"count": 1, "seed": 0} | arguments)
    assert str(caught.value) == message


def test_distinct_numbers_come_in_every_order_alike():
    drawn = draw_distinct(np.random.default_rng(0), 4, rows=24_000, columns=2)
    count = collections.Counter(map(tuple, drawn.tolist()))
    assert {*count} == {*itertools.permutations(range(4), 2)}
    assert all(number == pytest.approx(2_000, rel=0.1) for number in count.values())


@given(below=st.integers(1, 30), data=st.data())
def test_distinct_numbers_are_distinct(below, data):
    columns = data.draw(st.integers(1, below))
    drawn = draw_distinct(np.random.default_rng(below), below, rows=7, columns=columns)
    assert drawn.shape == (7, columns)
    assert drawn.min() >= 0
    assert drawn.max() < below
    assert all(len({*row}) == columns for row in drawn.tolist())


def numbered(first: int, count: int, length: int) -> Sequences:
    """Sequences whose tokens are all their own number, the targets one more, and scored where that is even."""
    tokens = np.repeat(np.arange(first, first + count, dtype=np.int32)[:, None], length, axis=1)
    return Sequences(tokens, tokens + 1, tokens % 2 == 0)


def test_mixed_batches_take_each_sequence_once_a_pass():
    parts = [numbered(0, 11, 5), numbered(100, 6, 8), numbered(200, 3, 8)]
    batches = mixed_batches(parts, batch_size=3, seed=0)
    passes = [[next(batches) for _ in range(6)] for _ in range(3)]
    orders = []
    for batch in itertools.chain(*passes):
        tokens = batch.tokens
        assert len(tokens) == 3
        # One part, and the rows of its arrays go together.
        assert len({*(tokens[:, 0] // 100)}) == 1
        assert tokens.shape[1] == (5 if tokens[0, 0] < 100 else 8)
        np.testing.assert_array_equal(batch.targets, tokens + 1)
        np.testing.assert_array_equal(batch.is_scored, tokens % 2 == 0)
    for each in passes:
        seen = [number for batch in each for number in batch.tokens[:, 0].tolist()]
        assert len(seen) == len({*seen}) == 18
        assert sorted(number // 100 for number in seen) == [0] * 9 + [1] * 6 + [2] * 3
        orders.append(seen)
    # Other sequences together in each pass, and the parts in turn.
    together = [{frozenset(seen[first : first + 3]) for first in range(0, 18, 3)} for seen in orders]
    assert together[0] != together[1] != together[2] != together[0]
    turns = [[number // 100 for number in seen] for seen in orders]
    assert any(turn != sorted(turn) for turn in turns)
    assert turns[0] != turns[1] or turns[1] != turns[2]
    again = mixed_batches(parts, batch_size=3, seed=0)
    assert orders[0] == [number for _ in range(6) for number in next(again).tokens[:, 0].tolist()]


def test_batches_that_cannot_be_made_are_refused_at_once():
    for parts, batch_size, message in (
        ([], 1, "parts is empty; it must hold at least one"),
        ([numbered(0, 2, 3)], 0, "batch_size is 0; it must be at least 1"),
        (
            [numbered(0, 4, 3), numbered(0, 2, 3)],
            3,
            "part 1 has 2 sequences, which do not fill a batch of 3: make more of them, or the batch smaller",
        ),
    ):
        with pytest.raises(ValueError) as caught:
            mixed_batches(parts, batch_size=batch_size, seed=0)
        assert str(caught.value) == message
