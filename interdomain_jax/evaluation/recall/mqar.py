"""Multi-query associative recall (MQAR, Arora et al. 2023): pairs of keys and values, then keys whose value is asked.

The ids below half the vocabulary are keys, but for 0, which is blank; the others are values. A sequence begins with its
pairs, key and value in turn. Behind them lie slots of two tokens. Each key comes once more, at the start of a slot, and
is scored there: its value is the answer, which the sequence does not show again. Slot n is taken with a weight of
n^(power - 1): most questions come early, some after a long time.
"""

from collections.abc import Sequence
from typing import Literal, NamedTuple, get_args

import numpy as np

from interdomain_jax.evaluation.recall.sequences import Sequences, draw_distinct, random_generator, require_at_least

Split = Literal["train", "test"]
Filler = Literal["blank", "random"]

VOCAB_SIZE = 8_192
POWER = 0.01


class Part(NamedTuple):
    """Sequences of one kind.

    Attributes:
        length: T.
        pairs: P, of a key and a value.
        sequences: N.
    """

    length: int
    pairs: int
    sequences: int


GRID = (Part(64, 4, 3_000), Part(128, 8, 3_000), Part(256, 16, 3_000), Part(512, 64, 3_000))
"""The kinds of figure 2 in Arora et al., with blanks: tested on each, after training on 100,000 of the same kind."""

TRAINING_MIX = (
    Part(64, 4, 100_000),
    Part(128, 8, 20_000),
    Part(256, 16, 20_000),
    Part(256, 32, 20_000),
    Part(256, 64, 20_000),
)
"""The one of zoology, with random filler. Short and long at once: models that see long sequences alone learn them by
heart (zoology#24)."""

TEST_MIX = (
    Part(64, 4, 1_000),
    Part(64, 8, 1_000),
    Part(64, 16, 1_000),
    Part(128, 32, 1_000),
    Part(256, 64, 1_000),
    Part(512, 128, 1_000),
    Part(1_024, 256, 1_000),
)
"""What goes with `TRAINING_MIX`: up to four times as many pairs, in sequences four times as long."""


def mqar(
    part: Part,
    *,
    seed: int | np.random.SeedSequence,
    vocab_size: int = VOCAB_SIZE,
    power: float = POWER,
    filler: Filler = "blank",
) -> Sequences:
    """Makes sequences of one kind.

    Args:
        part: their length, at least four times their pairs, and how many there are.
        seed: of all that is drawn.
        vocab_size: V.
        power: of the law of the slots; 1 makes all of them alike, less brings the questions nearer to the pairs.
        filler: what lies between the questions: 0, or random ids that are none of the sequence's keys.

    Returns:
        N sequences of T tokens, P of them scored in each.

    Raises:
        ValueError: an argument is out of its range.
    """
    length, pairs, count = part
    require_at_least("pairs", pairs, 1)
    require_at_least("sequences", count, 1)
    if length < 4 * pairs:
        raise ValueError(
            f"length is {length}; {pairs} pairs and as many questions need {4 * pairs} tokens: give at least as many"
        )
    half = vocab_size // 2
    if half - 1 < pairs:
        raise ValueError(
            f"vocab_size is {vocab_size}; {pairs} different keys below the half of it need at least {2 * pairs + 2}"
        )
    if not 0 < power < np.inf:
        raise ValueError(f"power is {power}; it must be above 0 and finite")
    if filler not in get_args(Filler):
        raise ValueError(f"filler is {filler!r}; it must be one of {get_args(Filler)}")

    rng = random_generator(seed)
    keys = 1 + draw_distinct(rng, half - 1, rows=count, columns=pairs)
    values = half + draw_distinct(rng, vocab_size - half, rows=count, columns=pairs)
    questions = 2 * pairs + 2 * _draw_slots(rng, (length - 2 * pairs) // 2, power, rows=count, columns=pairs)

    tokens = np.zeros((count, length), np.int64) if filler == "blank" else _draw_others(rng, keys, vocab_size, length)
    tokens[:, 0 : 2 * pairs : 2] = keys
    tokens[:, 1 : 2 * pairs : 2] = values
    np.put_along_axis(tokens, questions, keys, axis=1)
    targets = np.zeros((count, length), np.int32)
    np.put_along_axis(targets, questions, values.astype(np.int32), axis=1)
    # Values are never 0.
    return Sequences(tokens.astype(np.int32), targets, targets > 0)


def mqar_mix(
    parts: Sequence[Part],
    *,
    split: Split,
    seed: int,
    vocab_size: int = VOCAB_SIZE,
    power: float = POWER,
    filler: Filler = "blank",
) -> tuple[Sequences, ...]:
    """Makes sequences of several kinds, such as `TRAINING_MIX` or `TEST_MIX`.

    Each part of each split has a stream of random numbers of its own: what is tested is drawn anew, with the same seed
    too.

    Args:
        parts: the kinds.
        split: "train" or "test".
        seed: of both splits.
        vocab_size: as `mqar` takes it.
        power: as `mqar` takes it.
        filler: as `mqar` takes it.

    Returns:
        One for each part.

    Raises:
        ValueError: an argument is out of its range.
    """
    if split not in get_args(Split):
        raise ValueError(f"split is {split!r}; it must be one of {get_args(Split)}")
    require_at_least("seed", seed, 0)
    place = get_args(Split).index(split)
    seeds = [np.random.SeedSequence(seed, spawn_key=(place, number)) for number in range(len(parts))]
    return tuple(
        mqar(part, seed=own, vocab_size=vocab_size, power=power, filler=filler)
        for part, own in zip(parts, seeds, strict=True)
    )


def _draw_slots(rng: np.random.Generator, slots: int, power: float, *, rows: int, columns: int) -> np.ndarray:
    """Different slots [rows, columns], drawn one after the other by their weights from those that are left."""
    weights = (power - 1) * np.log(np.arange(1, slots + 1))
    # The order of logarithms of weights with Gumbel noise is that of such draws.
    return np.argsort(-(weights + rng.gumbel(size=(rows, slots))), axis=1)[:, :columns]


def _draw_others(rng: np.random.Generator, keys: np.ndarray, vocab_size: int, length: int) -> np.ndarray:
    """Ids [rows, length] of the vocabulary but for the keys of the row, all alike."""
    rows, pairs = keys.shape
    others = rng.integers(vocab_size - pairs, size=(rows, length))
    # From places among the ids that are left to ids: one further for each key at or below it.
    for key in np.sort(keys, axis=1).T:
        others += others >= key[:, None]
    return others
