"""Documents of token ids in memory, in the place of files."""

import hashlib
from collections.abc import Iterable, Sequence

import numpy as np

from interdomain_jax.data.tokenizers import BytesTokenizer, Tokenizer


class TokenLists:
    """A corpus of the documents given.

    Args:
        documents: the ids of each, its closing EOS among them.
        text_bytes: of their texts.
    """

    def __init__(self, documents: Iterable[Sequence[int]], text_bytes: int = 0):
        self.documents = [np.array(ids, np.int32) for ids in documents]
        self.lengths = np.array([len(ids) for ids in self.documents], np.int32)
        self.text_bytes = text_bytes
        self.digest = hashlib.sha256(repr([ids.tolist() for ids in self.documents]).encode()).hexdigest()

    def read(self, document: int, start: int, stop: int) -> np.ndarray:
        return self.documents[document][start:stop]


def tokenised(texts: Iterable[str], tokenizer: Tokenizer | None = None) -> TokenLists:
    """The corpus of these texts, as bytes if no tokenizer is given."""
    tokenizer, texts = tokenizer or BytesTokenizer(), list(texts)
    return TokenLists(
        [[*tokenizer.encode(text), tokenizer.eos_id] for text in texts],
        sum(len(text.encode()) for text in texts),
    )
