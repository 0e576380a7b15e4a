"""Induction heads (Olsson et al. 2022, as Gu and Dao 2023 train them): what followed the sign when it came before.

All ids are random but for the last one, the sign. It comes twice: somewhere, and at the end, where the token that
followed it the first time is the answer.
"""

import numpy as np

from interdomain_jax.evaluation.recall.sequences import Sequences, random_generator, require_at_least

VOCAB_SIZE = 16
TRAINING_LENGTH = 256
TEST_LENGTHS = tuple(2**n for n in range(6, 21))
"""As in the paper: trained on one length, tested on those from 64 to 1,048,576."""


def induction_heads(
    count: int,
    *,
    seed: int | np.random.SeedSequence,
    length: int = TRAINING_LENGTH,
    vocab_size: int = VOCAB_SIZE,
) -> Sequences:
    """Makes sequences.

    Args:
        count: N.
        seed: of all that is drawn.
        length: T, at least 3.
        vocab_size: V, at least 3.

    Returns:
        N sequences of T tokens, the last one of each scored.

    Raises:
        ValueError: an argument is out of its range.
    """
    require_at_least("count", count, 1)
    require_at_least("length", length, 3)
    require_at_least("vocab_size", vocab_size, 3)
    rng = random_generator(seed)
    tokens = rng.integers(vocab_size - 1, size=(count, length), dtype=np.int32)
    # The answer lies before the end.
    places = rng.integers(length - 2, size=count)
    rows = np.arange(count)
    tokens[rows, places] = tokens[:, -1] = vocab_size - 1
    targets = np.zeros_like(tokens)
    targets[:, -1] = tokens[rows, places + 1]
    is_scored = np.zeros(tokens.shape, bool)
    is_scored[:, -1] = True
    return Sequences(tokens, targets, is_scored)
