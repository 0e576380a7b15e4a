"""One fact in a repeated noise: S-NIAH-1 of RULER (Hsieh et al. 2024), at any context length.

As there, the noise is one line of five short sentences over and over, the fact gives a number of seven digits to a key
of two words, and the prompt ends where the number has to follow. The words are our own; and facts do not lie at random
depths but evenly spread ones.
"""

import functools
from collections.abc import Callable

import numpy as np

from interdomain_jax.data.tokenizers import Tokenizer
from interdomain_jax.evaluation.recall.questions import Question, count_tokens, largest
from interdomain_jax.evaluation.recall.sequences import random_generator, require_at_least

CONTEXTS = (1_024, 2_048, 4_096, 8_192)
"""Those of the paper's table."""

RULER_ANSWER_TOKENS = 128
"""The room that RULER keeps for the answer."""

OPENING = "A special number is hidden in the text below. Keep it in mind: a question about it follows."
NOISE = "The lake is calm. The road is long. The night is cold. On we walk. Soon we are home again."
FACT = "The special number of {key} is {value}."
QUESTION = "Which special number does the text above give to {key}? The special number of {key} is"

FIRST_WORDS = """
    amber ancient bitter blue bold brave brief bright calm clever cold curious deep eager early faint gentle golden
    grand green heavy hidden honest humble jolly kind late lively lonely loud mellow modest narrow noble pale patient
    plain proud quick quiet rapid rough royal silent simple slow smooth solid steady stern sudden sunny sweet tall tidy
    tiny vast warm wild wise
"""
SECOND_WORDS = """
    anchor apple arrow barrel basket beacon bottle bridge bucket button candle canyon carpet castle cellar circle
    copper cradle desert drawer engine falcon feather fiddle forest garden glacier hammer harbor helmet island jacket
    kettle ladder lantern lemon magnet marble meadow mirror needle orchard paddle parrot pebble pencil pepper pillow
    planet pocket ribbon river saddle shadow silver spider stable temple thunder timber tunnel valley velvet violin
    walnut window winter
"""


def needle(
    tokenizer: Tokenizer,
    *,
    budget: int,
    count: int,
    seed: int | np.random.SeedSequence,
    answer_tokens: int = 0,
) -> list[Question]:
    """Makes questions, each with as much noise as the budget holds.

    The fact of question i lies i / (N - 1) of the noise deep: the first one above all of it, the last one below.

    Args:
        tokenizer: of the model.
        budget: most tokens of a prompt and its answer, without the start symbol.
        count: N.
        seed: of the keys and the numbers.
        answer_tokens: room for the answer, where that is more than it takes, such as `RULER_ANSWER_TOKENS`.

    Returns:
        N questions. One more line of noise and any of them would be over the budget.

    Raises:
        ValueError: an argument is out of its range, or the budget does not hold one line of noise.
    """
    require_at_least("count", count, 1)
    require_at_least("budget", budget, 1)
    require_at_least("answer_tokens", answer_tokens, 0)
    keys = [f"{first}-{second}" for first in FIRST_WORDS.split() for second in SECOND_WORDS.split()]
    rng = random_generator(seed)
    lines = 1
    questions = []
    for number in range(count):
        key = keys[rng.integers(len(keys))]
        value = int(rng.integers(1_000_000, 10_000_000))
        depth = number / (count - 1) if count > 1 else 0.5
        write = functools.partial(_write, key, value, depth)
        # The lines of the question before are a good guess.
        lines = _most_lines(tokenizer, write, budget=budget, answer_tokens=answer_tokens, guess=lines)
        questions.append(write(lines))
    return questions


def _most_lines(
    tokenizer: Tokenizer, write: Callable[[int], Question], *, budget: int, answer_tokens: int, guess: int
) -> int:
    def tokens(lines: int) -> int:
        return count_tokens(tokenizer, write(lines), answer_tokens=answer_tokens)

    # A line has at least one token.
    lines = largest(lambda lines: tokens(lines) <= budget, start=guess, limit=budget)
    if lines == 0:
        raise ValueError(
            f"budget is {budget}; with one line of noise the question and its answer take {tokens(1)} tokens"
        )
    return lines


def _write(key: str, value: int, depth: float, lines: int) -> Question:
    above = int(depth * lines + 0.5)
    fact = FACT.format(key=key, value=value)
    text = [OPENING, *[NOISE] * above, fact, *[NOISE] * (lines - above), QUESTION.format(key=key)]
    return Question("\n".join(text), f" {value}")
