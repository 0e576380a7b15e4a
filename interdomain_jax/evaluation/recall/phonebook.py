"""Looking up a number in a phonebook, as in Jelassi et al. 2024.

A line for each entry, two of them once more as examples of what is asked, then a third name whose number has to follow.
The words and names are our own.
"""

from collections.abc import Sequence

import numpy as np

from interdomain_jax.data.tokenizers import Tokenizer
from interdomain_jax.evaluation.recall.questions import Question, count_tokens
from interdomain_jax.evaluation.recall.sequences import draw_distinct, random_generator, require_at_least

ENTRIES = (16, 32, 64, 128)
"""Those of the paper's table."""

EXAMPLES = 2
REQUEST = "Give the number that stands behind each of these names in the phonebook above."

FIRST_NAMES = """
    Adam Alice Anna Arthur Ben Bruno Carl Clara Daniel Diana Edith Elena Emil Eva Felix Flora Frank Grace Greta Hannah
    Hugo Ida Iris Jack Jane John Julia Karen Laura Leo Linda Lucy Maria Mark Martin Nina Nora Oliver Oscar Paul Peter
    Rita Robert Rosa Ruth Sam Sara Simon Sofia Stella Theo Thomas Tina Victor Vera Walter
"""
LAST_NAMES = """
    Adler Baker Barnes Becker Bell Berg Brooks Carter Clark Cole Cooper Cruz Davis Dixon Evans Fischer Fisher Ford
    Fox Garcia Gray Green Hall Harris Hill Hunt Jensen Jones Keller Kelly Kim King Lane Larsen Lee Lopez Marsh Mason
    Miller Moore Morgan Murphy Nolan Olsen Park Parker Perez Porter Reed Rossi Ryan Schmidt Scott Shaw Silva Stone
    Turner Walker Ward Weber West White Wood Young
"""


def phonebook(
    tokenizer: Tokenizer,
    *,
    entries: int,
    budget: int,
    count: int,
    seed: int | np.random.SeedSequence,
    answer_tokens: int = 0,
) -> list[Question]:
    """Makes questions, each about a phonebook of its own.

    Args:
        tokenizer: of the model.
        entries: in each phonebook; names and numbers are different.
        budget: most tokens of a prompt and its answer, without the start symbol.
        count: N.
        seed: of all that is drawn.
        answer_tokens: room for the answer, where that is more than it takes.

    Returns:
        N questions.

    Raises:
        ValueError: an argument is out of its range, or a question is over the budget.
    """
    names = [f"{first} {last}" for first in FIRST_NAMES.split() for last in LAST_NAMES.split()]
    if not EXAMPLES < entries <= len(names):
        raise ValueError(
            f"entries is {entries}; it must lie between {EXAMPLES + 1}, of which {EXAMPLES} are examples, and "
            f"{len(names)}, which is the number of names"
        )
    require_at_least("count", count, 1)
    require_at_least("budget", budget, 1)
    require_at_least("answer_tokens", answer_tokens, 0)
    rng = random_generator(seed)
    drawn = draw_distinct(rng, len(names), rows=count, columns=entries)
    numbers = draw_distinct(rng, 10**10, rows=count, columns=entries)
    chosen = draw_distinct(rng, entries, rows=count, columns=EXAMPLES + 1)
    questions = [
        _write([names[name] for name in drawn[row]], [_digits(number) for number in numbers[row]], chosen[row])
        for row in range(count)
    ]
    for question in questions:
        tokens = count_tokens(tokenizer, question, answer_tokens=answer_tokens)
        if tokens > budget:
            raise ValueError(
                f"budget is {budget}; a question about a phonebook of {entries} entries and its answer take {tokens} "
                "tokens: give a larger budget or fewer entries"
            )
    return questions


def _write(names: Sequence[str], numbers: Sequence[str], chosen: np.ndarray) -> Question:
    lines = [f"{name}: {number}" for name, number in zip(names, numbers, strict=True)]
    *examples, asked = chosen
    text = [*lines, "", REQUEST, *[lines[example] for example in examples], f"{names[asked]}:"]
    return Question("\n".join(text), f" {numbers[asked]}")


def _digits(number: int) -> str:
    digits = f"{number:010d}"
    return f"{digits[:3]}-{digits[3:6]}-{digits[6:]}"
