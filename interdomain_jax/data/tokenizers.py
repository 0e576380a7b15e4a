"""Text to token ids and back, behind one small interface.

Three kinds of tokenizer: raw bytes, a SentencePiece model file, a Hugging Face `tokenizer.json`.
All three follow the same rules:

* `encode` adds no special token. What looks like one in the text (`</s>`, say) is ordinary text, so
  that no document can forge a document boundary.
* A lone surrogate, which UTF-8 cannot represent, is encoded as `?`.
* `decode` leaves special tokens out, and bytes that form no UTF-8 character become U+FFFD.
"""

import hashlib
import importlib.util
import json
from collections.abc import Iterable
from pathlib import Path
from typing import Protocol

import numpy as np

EOS_NAMES = (
    "</s>",
    "<|endoftext|>",
    "<|end_of_text|>",
    "<eos>",
    "<|eos|>",
    "[EOS]",
    "<\uff5cend\u2581of\u2581sentence\uff5c>",
)


class Tokenizer(Protocol):
    """What the data pipeline asks of a tokenizer."""

    @property
    def vocab_size(self) -> int:
        """Number of ids: every id that `encode` returns, and `eos_id`, is below it."""

    @property
    def eos_id(self) -> int:
        """Id of the token that ends a document."""

    @property
    def definition(self) -> bytes:
        """What its ids are a function of, such as the content of its file."""

    def encode(self, text: str) -> np.ndarray:
        """Token ids of `text`, int32 [T], without special tokens."""

    def decode(self, ids: Iterable[int]) -> str:
        """Text of `ids`, special tokens left out; ValueError if an id is not in the vocabulary."""


class BytesTokenizer:
    """One token per UTF-8 byte, and id 256 as the end of a document."""

    vocab_size = 257
    eos_id = 256
    definition = b"UTF-8 bytes, end 256"

    def encode(self, text: str) -> np.ndarray:
        """The UTF-8 bytes of `text`, int32 [T]."""
        return np.frombuffer(utf8_bytes(text), dtype=np.uint8).astype(np.int32)

    def decode(self, ids: Iterable[int]) -> str:
        """Text of `ids`, the end of a document left out; bytes that are no UTF-8 become replacement characters."""
        checked = _checked_ids(ids, self.vocab_size)
        return bytes(i for i in checked if i != self.eos_id).decode("utf-8", errors="replace")


class SentencePieceTokenizer:
    """A SentencePiece model.

    Args:
        path: model file with an end-of-sequence piece.

    Raises:
        FileNotFoundError: there is no such file.
        ValueError: the file is not a SentencePiece model, or defines no end-of-sequence piece.
    """

    def __init__(self, path: str):
        import sentencepiece

        _require_file(path)
        try:
            self._processor = sentencepiece.SentencePieceProcessor(model_file=path)
        except (OSError, RuntimeError) as error:
            raise ValueError(f"tokenizer file {path} is not a SentencePiece model") from error
        self.definition = self._processor.serialized_model_proto()
        self.vocab_size: int = self._processor.vocab_size()
        self.eos_id: int = self._processor.eos_id()
        if self.eos_id < 0:
            raise ValueError(f"SentencePiece model {path} defines no end-of-sequence piece")

    def encode(self, text: str) -> np.ndarray:
        """The pieces of `text`, int32 [T], without special ones."""
        ids = self._processor.encode(utf8_bytes(text).decode(), add_bos=False, add_eos=False)
        return np.asarray(ids, dtype=np.int32)

    def decode(self, ids: Iterable[int]) -> str:
        """Text of `ids`, special pieces left out."""
        return self._processor.decode(_checked_ids(ids, self.vocab_size))


class HuggingFaceTokenizer:
    """A Hugging Face `tokenizer.json`.

    Args:
        path: the JSON file; its end-of-sequence token must bear one of the names in `EOS_NAMES`.

    Raises:
        FileNotFoundError: there is no such file.
        ValueError: the file is not a tokenizer.json, or has no token of a known end name.
    """

    def __init__(self, path: str):
        import tokenizers

        _require_file(path)
        try:
            content = Path(path).read_text(encoding="utf-8")
            fields = json.loads(content)
        except ValueError as error:
            raise ValueError(f"tokenizer file {path} is not JSON") from error
        if not isinstance(fields, dict) or "model" not in fields:
            raise ValueError(f"tokenizer file {path} has no field 'model': not a tokenizer.json")
        self.definition = content.encode()
        self._tokenizer = tokenizers.Tokenizer.from_str(content)
        self._tokenizer.no_truncation()
        self._tokenizer.no_padding()
        self._tokenizer.encode_special_tokens = True
        vocabulary = self._tokenizer.get_vocab(with_added_tokens=True)
        # The ids may have holes, so the size of the vocabulary is not a bound on them.
        self.vocab_size: int = max(vocabulary.values()) + 1
        names = [name for name in EOS_NAMES if name in vocabulary]
        if not names:
            raise ValueError(
                f"tokenizer file {path} has no end-of-sequence token under any of the names {', '.join(EOS_NAMES)}"
            )
        self.eos_id: int = vocabulary[names[0]]

    def encode(self, text: str) -> np.ndarray:
        """Token ids of `text`, int32 [T]; the names of special tokens in it are text too."""
        encoding = self._tokenizer.encode(utf8_bytes(text).decode(), add_special_tokens=False)
        return np.asarray(encoding.ids, dtype=np.int32)

    def decode(self, ids: Iterable[int]) -> str:
        """Text of `ids`, special tokens left out."""
        checked = _checked_ids(ids, self.vocab_size)
        kept = [i for i in checked if i != self.eos_id]
        return self._tokenizer.decode(kept, skip_special_tokens=True)


def load_tokenizer(spec: str) -> Tokenizer:
    """The tokenizer that `spec` names.

    Args:
        spec: "bytes" (257 ids); "mistral" (the open SentencePiece model of 32,000 pieces that the
            `mistral-common` package carries, of the size of the paper's Llama 2 vocabulary); the
            path of a SentencePiece model ending in `.model`; or the path of a Hugging Face
            tokenizer ending in `.json`.

    Raises:
        FileNotFoundError: the file is missing, or `mistral-common` is not installed.
        ValueError: `spec` is none of these, or the file is not what its ending says.
    """
    if spec == "bytes":
        return BytesTokenizer()
    if spec == "mistral":
        return SentencePieceTokenizer(_mistral_model_path())
    if spec.endswith(".model"):
        return SentencePieceTokenizer(spec)
    if spec.endswith(".json"):
        return HuggingFaceTokenizer(spec)
    raise ValueError(
        f"tokenizer {spec!r} is unknown: give 'bytes', 'mistral', the path of a SentencePiece "
        "model ending in .model, or the path of a Hugging Face tokenizer ending in .json"
    )


def fingerprint(tokenizer: Tokenizer) -> str:
    """Sixteen hexadecimal digits that tell tokenizers apart which give other ids to some text."""
    return hashlib.sha256(tokenizer.definition).hexdigest()[:16]


def utf8_bytes(text: str) -> bytes:
    """UTF-8 bytes of `text`, each lone surrogate replaced by `?`."""
    return text.encode("utf-8", errors="replace")


def _mistral_model_path() -> str:
    # Found through the import system but not imported: the package itself takes seconds to load.
    package = importlib.util.find_spec("mistral_common")
    if package is None or not package.submodule_search_locations:
        raise FileNotFoundError("tokenizer 'mistral' needs the package mistral-common, which is not installed")
    return str(Path(package.submodule_search_locations[0]) / "data" / "tokenizer.model.v1")


def _require_file(path: str) -> None:
    if not Path(path).is_file():
        raise FileNotFoundError(f"tokenizer file {path} does not exist")


def _checked_ids(ids: Iterable[int], vocab_size: int) -> list[int]:
    checked = [int(i) for i in ids]
    for i in checked:
        if not 0 <= i < vocab_size:
            raise ValueError(f"token id {i} is outside the vocabulary of {vocab_size} ids")
    return checked
