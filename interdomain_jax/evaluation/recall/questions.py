"""What the tasks of text give, and how they are fitted to a budget of tokens."""

from collections.abc import Callable
from typing import NamedTuple

from interdomain_jax.data.tokenizers import Tokenizer


class Question(NamedTuple):
    """A text and how it goes on.

    Attributes:
        prompt: ends in the middle of a sentence, without a space.
        answer: begins with a space; the text is one behind the other.
    """

    prompt: str
    answer: str


def count_tokens(tokenizer: Tokenizer, question: Question, *, answer_tokens: int = 0) -> int:
    """Tokens of a prompt and its answer, without the start symbol.

    It is what a model reads as well: the start symbol too, but not the last token of the answer.

    Args:
        tokenizer: of the model.
        question: the texts.
        answer_tokens: room for the answer, where that is more than it takes.
    """
    whole = len(tokenizer.encode(question.prompt + question.answer))
    return max(whole, len(tokenizer.encode(question.prompt)) + answer_tokens)


def largest(holds: Callable[[int], bool], *, start: int, limit: int) -> int:
    """The largest number for which something holds that holds for all numbers below it.

    It asks 2 log2(limit) + 3 times at most, and twice if the answer is `start`.

    Args:
        holds: what is asked of numbers from 1 to `limit`.
        start: the first one to ask of, 1 to `limit`.
        limit: the largest there is.

    Returns:
        0 if it holds for none.
    """
    low, high = 0, limit + 1
    number, step = start, 1
    while low + 1 < high:
        if holds(number):
            low = number
        else:
            high = number
        if low == 0:
            number = max(high - step, 1)
        elif high > limit:
            number = min(low + step, limit)
        else:
            number = (low + high) // 2
        step *= 2
    return low
