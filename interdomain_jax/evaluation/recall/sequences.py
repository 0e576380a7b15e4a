"""What the tasks of tokens give, how they draw, and batches of them."""

from collections.abc import Iterator, Sequence
from typing import NamedTuple

import numpy as np


class Sequences(NamedTuple):
    """Sequences of one length.

    Attributes:
        tokens: int32 [N, T], what a model reads.
        targets: int32 [N, T], the answer after each scored token; 0 elsewhere.
        is_scored: bool [N, T], where there is an answer to give.
    """

    tokens: np.ndarray
    targets: np.ndarray
    is_scored: np.ndarray


def random_generator(seed: int | np.random.SeedSequence) -> np.random.Generator:
    """A fresh generator.

    Raises:
        ValueError: the seed is a number below 0.
    """
    if isinstance(seed, int) and seed < 0:
        raise ValueError(f"seed is {seed}; it must be 0 or more")
    return np.random.default_rng(seed)


def require_at_least(name: str, value: int, least: int) -> None:
    """Checks a number.

    Raises:
        ValueError: it is too small; it names the argument.
    """
    if value < least:
        raise ValueError(f"{name} is {value}; it must be at least {least}")


def draw_distinct(rng: np.random.Generator, below: int, *, rows: int, columns: int) -> np.ndarray:
    """Rows of different numbers in random order, every choice and order alike.

    Args:
        rng: moves on.
        below: the numbers are 0 to `below` - 1.
        rows: N.
        columns: numbers of a row, `below` at most.

    Returns:
        int64 [N, columns].
    """
    # Floyd's way to draw a set: as many steps as there are columns, however few numbers are left to choose from.
    drawn = np.empty((rows, columns), np.int64)
    for column, last in enumerate(range(below - columns, below)):
        number = rng.integers(last + 1, size=rows)
        is_taken = np.any(drawn[:, :column] == number[:, None], axis=1)
        drawn[:, column] = np.where(is_taken, last, number)
    return rng.permuted(drawn, axis=1)


def mixed_batches(
    parts: Sequence[Sequences], *, batch_size: int, seed: int | np.random.SeedSequence
) -> Iterator[Sequences]:
    """Batches without end, each of one part and so of one length, all parts mixed by their sizes.

    Each pass shuffles the sequences of every part and the order of the batches; what does not fill a batch is left out
    of that pass.

    Args:
        parts: of any lengths and sizes.
        batch_size: sequences of a batch.
        seed: of the order.

    Raises:
        ValueError: a part has fewer sequences than a batch.
    """
    require_at_least("batch_size", batch_size, 1)
    if not parts:
        raise ValueError("parts is empty; it must hold at least one")
    for number, part in enumerate(parts):
        if len(part.tokens) < batch_size:
            raise ValueError(
                f"part {number} has {len(part.tokens)} sequences, which do not fill a batch of {batch_size}: "
                "make more of them, or the batch smaller"
            )
    rng = random_generator(seed)

    def batches() -> Iterator[Sequences]:
        while True:
            groups = []
            for part in parts:
                order = rng.permutation(len(part.tokens))
                whole = len(order) - len(order) % batch_size
                groups += [(part, rows) for rows in order[:whole].reshape(-1, batch_size)]
            for number in rng.permutation(len(groups)):
                part, rows = groups[number]
                yield Sequences(part.tokens[rows], part.targets[rows], part.is_scored[rows])

    return batches()
