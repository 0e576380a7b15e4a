"""Multi-query associative recall against a solver in plain Python, and its distributions against their formulas."""

import collections
import itertools

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from interdomain_jax.evaluation.recall.mqar import GRID, TEST_MIX, TRAINING_MIX, Part, mqar, mqar_mix

FILLERS = ("blank", "random")


def answers(tokens: list[int], half: int) -> list[int | None]:
    """The value of each key that has come before, as a reader would tell; None for all else."""
    values = {}
    found = []
    for token, following in itertools.zip_longest(tokens, tokens[1:]):
        found.append(values.get(token))
        if 0 < token < half:
            values.setdefault(token, following)
    return found


def rows_of(*parts) -> set[bytes]:
    return {row.tobytes() for part in parts for row in part.tokens}


@pytest.mark.parametrize("filler", FILLERS)
@given(
    pairs=st.integers(1, 9),
    more=st.integers(0, 30),
    vocab_size=st.integers(20, 60),
    power=st.sampled_from([0.01, 0.5, 1.0, 2.0]),
    seed=st.integers(0, 2**40),
)
def test_every_question_has_one_answer_and_it_is_the_target(filler, pairs, more, vocab_size, power, seed):
    part = Part(4 * pairs + more, pairs, 6)
    made = mqar(part, seed=seed, vocab_size=vocab_size, power=power, filler=filler)
    half = vocab_size // 2
    assert (made.tokens.dtype, made.targets.dtype, made.is_scored.dtype) == (np.int32, np.int32, bool)
    assert made.tokens.shape == made.targets.shape == made.is_scored.shape == (6, part.length)
    assert made.tokens.min() >= 0
    assert made.tokens.max() < vocab_size
    for tokens, targets, is_scored in zip(*(array.tolist() for array in made), strict=True):
        keys, values = tokens[0 : 2 * pairs : 2], tokens[1 : 2 * pairs : 2]
        assert len({*keys}) == len({*values}) == pairs
        assert 0 < min(keys) <= max(keys) < half <= min(values)
        asked = [place for place, scored in enumerate(is_scored) if scored]
        assert sorted(tokens[place] for place in asked) == sorted(keys)
        assert all(place >= 2 * pairs and place % 2 == 0 for place in asked)
        solved = answers(tokens, half)
        assert [solved[place] for place in asked] == [targets[place] for place in asked]
        assert not any(target for target, scored in zip(targets, is_scored, strict=True) if not scored)
        # Nothing looks like a question that is none.
        others = [tokens[place] for place in range(2 * pairs, part.length) if place not in asked]
        assert not {*others} & {*keys}
        assert filler == "random" or not any(others)


def test_a_single_question_lies_as_the_power_law_says():
    slots = np.arange(1, 13)
    for power in (0.01, 0.5, 1.0):
        made = mqar(Part(2 + 2 * len(slots), 1, 20_000), seed=1, power=power)
        drawn = np.argmax(made.is_scored, axis=1) // 2 - 1
        expected = slots ** (power - 1)
        np.testing.assert_allclose(np.bincount(drawn) / 20_000, expected / expected.sum(), atol=0.015)


def test_slots_are_drawn_one_after_the_other_from_those_left():
    """Two keys in three slots: the second key's slot by the weights of the two that the first has left."""
    made = mqar(Part(10, 2, 40_000), seed=2, power=0.5)
    count = collections.Counter()
    for tokens in made.tokens.tolist():
        first, second = tokens[0], tokens[2]
        count[tokens.index(first, 4) // 2 - 2, tokens.index(second, 4) // 2 - 2] += 1
    weights = np.arange(1, 4) ** -0.5
    chances = weights / weights.sum()
    for first, second in itertools.permutations(range(3), 2):
        expected = chances[first] * chances[second] / (1 - chances[first])
        assert count[first, second] / 40_000 == pytest.approx(expected, abs=0.01)


def test_random_filler_is_any_id_but_the_keys():
    made = mqar(Part(40, 2, 4_000), seed=3, vocab_size=12, filler="random")
    ranks = collections.Counter()
    for tokens in made.tokens.tolist():
        keys = {tokens[0], tokens[2]}
        others = [token for token in range(12) if token not in keys]
        # The second tokens of the slots are filler, whatever is asked.
        ranks.update(others.index(token) for token in tokens[5::2])
    shares = np.array([ranks[rank] for rank in range(10)]) / ranks.total()
    np.testing.assert_allclose(shares, 0.1, atol=0.005)


def test_sequences_are_a_function_of_the_seed():
    part = Part(32, 4, 50)
    first, again, other = (mqar(part, seed=seed, filler="random") for seed in (7, 7, 8))
    for one, two in zip(first, again, strict=True):
        np.testing.assert_array_equal(one, two)
    assert not rows_of(first) & rows_of(other)


def test_the_presets_can_be_made():
    for part in (*GRID, *TRAINING_MIX, *TEST_MIX):
        made = mqar(part._replace(sequences=2), seed=0, filler="random")
        assert made.tokens.shape == (2, part.length)
        assert made.is_scored.sum(axis=1).tolist() == [part.pairs] * 2


def test_the_training_mix_has_short_and_long_sequences():
    """zoology#24: models trained on long sequences alone scored 0."""
    lengths = [part.length for part in TRAINING_MIX]
    assert min(lengths) == min(part.length for part in TEST_MIX)
    assert max(lengths) == 4 * min(lengths)
    assert max(TRAINING_MIX, key=lambda part: part.sequences).length == min(lengths)


def test_training_and_test_share_no_sequence():
    parts = [Part(64, 4, 200), Part(64, 4, 200), Part(64, 16, 200)]
    made = {(split, seed): mqar_mix(parts, split=split, seed=seed) for split in ("train", "test") for seed in range(3)}
    rows = [rows_of(part) for mix in made.values() for part in mix]
    assert [len(each) for each in rows] == [200] * 18
    assert len(set.union(*rows)) == 200 * 18
    # Made again, and with another part behind them, they are the same.
    again = mqar_mix([*parts, Part(8, 2, 1)], split="test", seed=2)
    for one, two in zip(made["test", 2], again, strict=False):
        np.testing.assert_array_equal(one.tokens, two.tokens)


@pytest.mark.parametrize(
    ("part", "options", "message"),
    [
        (Part(64, 0, 1), {}, "pairs is 0; it must be at least 1"),
        (Part(64, 4, 0), {}, "sequences is 0; it must be at least 1"),
        (Part(15, 4, 1), {}, "length is 15; 4 pairs and as many questions need 16 tokens: give at least as many"),
        (
            Part(64, 4, 1),
            {"vocab_size": 9},
            "vocab_size is 9; 4 different keys below the half of it need at least 10",
        ),
        (Part(64, 4, 1), {"power": 0.0}, "power is 0.0; it must be above 0 and finite"),
        (Part(64, 4, 1), {"power": float("nan")}, "power is nan; it must be above 0 and finite"),
        (Part(64, 4, 1), {"filler": "noise"}, "filler is 'noise'; it must be one of ('blank', 'random')"),
        (Part(64, 4, 1), {"seed": -1}, "seed is -1; it must be 0 or more"),
    ],
)
def test_arguments_out_of_range_are_refused_in_a_sentence(part, options, message):
    with pytest.raises(ValueError) as caught:
        mqar(part, **{"seed": 0} | options)
    assert str(caught.value) == message


def test_the_least_that_is_allowed_works():
    made = mqar(Part(16, 4, 3), seed=0, vocab_size=10)
    assert made.is_scored.sum(axis=1).tolist() == [4, 4, 4]


def test_a_split_that_is_none_is_refused():
    with pytest.raises(ValueError) as caught:
        mqar_mix([Part(64, 4, 1)], split="validation", seed=0)
    assert str(caught.value) == "split is 'validation'; it must be one of ('train', 'test')"
