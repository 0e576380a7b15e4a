"""Selective copying (Gu and Dao 2023): a few tokens among blanks, to be given back in order at the end.

Id 0 is blank, the last id asks, and those between are to be kept. What asks is the same each time: a model has to know
how many it has given.
"""

import numpy as np

from interdomain_jax.evaluation.recall.sequences import Sequences, draw_distinct, random_generator, require_at_least

VOCAB_SIZE = 16
KEPT = 16
LENGTH = 4_096 + KEPT
"""As in the paper: 16 tokens among 4,096."""


def selective_copying(
    count: int,
    *,
    seed: int | np.random.SeedSequence,
    length: int = LENGTH,
    kept: int = KEPT,
    vocab_size: int = VOCAB_SIZE,
) -> Sequences:
    """Makes sequences.

    Args:
        count: N.
        seed: of all that is drawn.
        length: T; the last `kept` tokens ask.
        kept: tokens to be given back, at most half of the length.
        vocab_size: V, at least 3.

    Returns:
        N sequences of T tokens, the last `kept` of them scored.

    Raises:
        ValueError: an argument is out of its range.
    """
    require_at_least("count", count, 1)
    require_at_least("kept", kept, 1)
    require_at_least("vocab_size", vocab_size, 3)
    if length < 2 * kept:
        raise ValueError(f"length is {length}; {kept} tokens and as many that ask for them need at least {2 * kept}")
    rng = random_generator(seed)
    places = np.sort(draw_distinct(rng, length - kept, rows=count, columns=kept), axis=1)
    answers = rng.integers(1, vocab_size - 1, size=(count, kept), dtype=np.int32)
    tokens, targets = np.zeros((2, count, length), np.int32)
    np.put_along_axis(tokens, places, answers, axis=1)
    tokens[:, -kept:] = vocab_size - 1
    targets[:, -kept:] = answers
    return Sequences(tokens, targets, targets > 0)
