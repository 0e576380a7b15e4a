"""Between text and the ids that a generator takes and gives."""

from collections.abc import Sequence

from interdomain_jax.data.tokenizers import Tokenizer

# Tokens of the prompt that are decoded with what follows: some tokenizers write a space only behind another word.
_BEFORE = 16


def prompt_ids(tokenizer: Tokenizer, text: str) -> list[int]:
    """The ids of a text behind the start symbol, as in training: that of the end of the document before."""
    return [tokenizer.eos_id, *tokenizer.encode(text).tolist()]


class TextStream:
    """Turns tokens into text as they come, whole characters only, up to the first text that stops it.

    Args:
        tokenizer: of the model.
        prompt: the ids that the tokens follow.
        stop: texts; where the first one begins, the text ends, however it is cut into tokens.

    Attributes:
        stopped: whether one of them came.
    """

    def __init__(self, tokenizer: Tokenizer, prompt: Sequence[int], stop: Sequence[str] = ()):
        self._tokenizer = tokenizer
        self._before = list(prompt[-_BEFORE:])
        self._stop = stop
        self._tokens: list[int] = []
        self._told = 0
        self.stopped = False

    def push(self, tokens: Sequence[int]) -> str:
        """The text that these tokens complete, but for what may begin a text that stops it."""
        self._tokens += tokens
        text = self._text()
        # Bytes that are no character yet are decoded as U+FFFD.
        whole = text.rstrip("\ufffd")
        begun = (length for stop in self._stop for length in range(len(stop)) if whole.endswith(stop[:length]))
        return self._tell(whole if self.stopped else whole[: len(whole) - max(begun, default=0)])

    def finish(self) -> str:
        """What is left, characters that never became whole among it."""
        return self._tell(self._text())

    def _tell(self, text: str) -> str:
        new, self._told = text[self._told :], max(self._told, len(text))
        return new

    def _text(self) -> str:
        before = self._tokenizer.decode(self._before)
        text = self._tokenizer.decode([*self._before, *self._tokens])[len(before) :]
        found = [place for stop in self._stop if (place := text.find(stop)) >= 0]
        self.stopped = bool(found)
        return text[: min(found)] if found else text
