"""From what a source holds to documents: the rules that every text goes through before it becomes tokens.

1. Bytes are UTF-8. Bytes that are not are no document; nothing is guessed or replaced.
2. A byte order mark at the start is dropped, and line ends CR LF and CR become LF.
3. The text is brought to Unicode's form NFC, so that one character is written in one way.
4. White space at both ends is dropped. What is empty then is no document.
5. A text of more than `MAX_BYTES` bytes becomes several documents, cut behind the last line end that fits, or the last
   space, or else anywhere between two characters.

What is no document is counted under its reason, and so is a record that has no text.
"""

import unicodedata
from typing import Literal, NamedTuple

MAX_BYTES = 1 << 24
"""16 MiB: some four million tokens; more in one piece than any context, and little to hold in memory."""

SkipReason = Literal["no text", "invalid utf-8", "empty"]


class Documents(NamedTuple):
    """What became of one text.

    Attributes:
        texts: the documents, in order; none if it was skipped.
        skipped: why it was skipped; None if it was not.
    """

    texts: tuple[str, ...]
    skipped: SkipReason | None = None


def documents_of(content: bytes | str | None, *, max_bytes: int = MAX_BYTES) -> Documents:
    """The documents in a text of a source.

    Args:
        content: the text, or its bytes; None where a source has a record without one.
        max_bytes: bytes of a document, at least 4, so that every character fits.
    """
    if content is None:
        return Documents((), "no text")
    try:
        # Text may hold lone surrogates, which no UTF-8 can express.
        text = content.decode("utf-8") if isinstance(content, bytes) else content.encode("utf-8").decode("utf-8")
    except UnicodeError:
        return Documents((), "invalid utf-8")
    text = text.removeprefix("\ufeff").replace("\r\n", "\n").replace("\r", "\n")
    text = unicodedata.normalize("NFC", text).strip()
    if not text:
        return Documents((), "empty")
    return Documents(tuple(_cut(text, max_bytes)))


def _cut(text: str, max_bytes: int) -> list[str]:
    encoded = text.encode("utf-8")
    parts = []
    start = 0
    while len(encoded) - start > max_bytes:
        limit = start + max_bytes
        stop = limit
        for mark in (b" ", b"\n"):
            found = encoded.rfind(mark, start + 1, limit)
            stop = found + 1 if found > 0 else stop
        while encoded[stop] & 0b1100_0000 == 0b1000_0000:
            # Inside a character.
            stop -= 1
        parts.append(encoded[start:stop].decode("utf-8"))
        start = stop
    parts.append(encoded[start:].decode("utf-8"))
    return parts
