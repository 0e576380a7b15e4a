"""SentencePiece models from texts: the texts to train on, and what the trainer is told.

Nothing is normalised, so decoding gives back the text that was encoded, whatever it is; but U+2581 comes back as a
space, which is what SentencePiece means by it. What has no piece is UTF-8 bytes, and so are line ends: no piece spans
two lines. Runs of spaces have pieces of their own, and each digit is one.

Ids: 0 for the unknown, which never occurs; 1 for the end of a document; 2 to 257 for the bytes; then the pieces.
"""

import collections
import io
import itertools
import random
import re
from collections.abc import Iterable, Iterator

import sentencepiece

from interdomain_jax.data.documents import documents_of
from interdomain_jax.data.sources import Part, TextSource
from interdomain_jax.data.tokenizers import Tokenizer

MIN_VOCAB_SIZE = 1 + 1 + 256 + 1
"""The unknown, the end of a document, the bytes, and something to learn."""

# Characters the trainer gets at once: it drops what exceeds its limit, and counts those of a word in 16 bits.
_MAX_SENTENCE = 4096
# What "unigram" finds depends on it, so it is not the number of cores.
_NUM_THREADS = 4
# As many places of a corpus are read at once: files that are open, and their texts in memory.
_OPEN_PARTS = 64


def train_model(texts: Iterable[str], *, vocab_size: int, model_type: str = "bpe") -> bytes:
    """Trains a model; the same texts give the same bytes.

    Args:
        texts: to find the pieces in; read once.
        vocab_size: number of ids, at least `MIN_VOCAB_SIZE`.
        model_type: "bpe" or "unigram".

    Returns:
        The content of a SentencePiece model file.

    Raises:
        ValueError: there is no text, or a vocabulary of this size is too large or too small for it.
    """
    model = io.BytesIO()
    sentences = _Sentences(texts)
    try:
        sentencepiece.SentencePieceTrainer.train(
            sentence_iterator=iter(sentences),
            model_writer=model,
            model_type=model_type,
            vocab_size=vocab_size,
            byte_fallback=True,
            split_digits=True,
            allow_whitespace_only_pieces=True,
            normalization_rule_name="identity",
            add_dummy_prefix=False,
            remove_extra_whitespaces=False,
            unk_id=0,
            eos_id=1,
            bos_id=-1,
            # In bytes, four of which a character has at most.
            max_sentence_length=4 * _MAX_SENTENCE,
            num_threads=_NUM_THREADS,
            minloglevel=2,
        )
    except RuntimeError as error:
        # The library hands on no exception but its own.
        if sentences.error is not None:
            raise sentences.error from None
        raise ValueError(_explained(str(error), vocab_size)) from error
    return model.getvalue()


def sample_documents(source: TextSource, split: str, *, part_bytes: int, max_bytes: int) -> Iterator[str]:
    """Documents from all over a split: of `_OPEN_PARTS` parts in turn one each, and where one ends the next begins.

    The parts come in a shuffled order, always the same. All documents are returned if they have `max_bytes` at most.

    Args:
        source: of the texts.
        split: of the source.
        part_bytes: of the source in a part, about.
        max_bytes: of text; the last document is cut there.
    """
    parts = source.parts(part_bytes)
    streams = (_documents(source, part, split) for part in random.Random(0).sample(parts, len(parts)))
    opened = collections.deque(itertools.islice(streams, _OPEN_PARTS))
    while opened and max_bytes:
        stream = opened.popleft()
        document = next(stream, None)
        if document is None:
            opened.extend(itertools.islice(streams, 1))
            continue
        opened.append(stream)
        content = document.encode()[:max_bytes]
        max_bytes -= len(content)
        yield content.decode(errors="ignore")


def bytes_per_token(documents: Iterable[str], tokenizer: Tokenizer) -> float | None:
    """UTF-8 bytes for each token, the EOS of each document among them; None if there is no document."""
    size, tokens = 0, 0
    for document in documents:
        size += len(document.encode())
        tokens += len(tokenizer.encode(document)) + 1
    return size / tokens if tokens else None


def _documents(source: TextSource, part: Part, split: str) -> Iterator[str]:
    for text in source.texts(part, split):
        yield from documents_of(text.content).texts


class _Sentences:
    """The lines of the texts, the longest in pieces.

    Attributes:
        error: what ended the texts before their end.
    """

    def __init__(self, texts: Iterable[str]):
        self._texts = texts
        self.error: BaseException | None = None

    def __iter__(self) -> Iterator[str]:
        try:
            for text in self._texts:
                for line in text.split("\n"):
                    for start in range(0, len(line), _MAX_SENTENCE):
                        yield line[start : start + _MAX_SENTENCE]
        except BaseException as error:
            self.error = error
            raise


def _explained(message: str, vocab_size: int) -> str:
    """What the trainer's message means, for it speaks of options that nobody has given."""
    if most := re.search(r"value <= (\d+)", message):
        return f"vocab_size {vocab_size} is too high for the text, in which there are {most[1]} pieces at most"
    if least := re.search(r"smaller than required_chars\. \d+ vs (\d+)", message):
        return f"vocab_size {vocab_size} is too low for the text: bytes and characters alone are {least[1]} pieces"
    if "sentences_.empty()" in message or "all_chars_count" in message:
        return "there is no text to train on"
    return f"vocab_size {vocab_size} does not suit the text: {message}"
