"""A prepared split on disk: its documents as token ids, in files of records, and a manifest that says what they are.

    <directory>/tokens-00003-of-00016.array_record   a record for each document: its ids, the closing EOS among them
    <directory>/tokens-00003-of-00016.npy            int32, the number of ids of each
    <directory>/tokens-00003-of-00016.json           the counts of the shard, written last: it is complete
    <directory>/manifest.json                        all of them, and the tokenizer, written when all are complete

Ids are little-endian uint16 if the vocabulary fits, else uint32. Nothing says how long a row will be, or how documents
are packed into it: that is the loader's choice.
"""

import json
import zlib
from collections import Counter
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import grain
import numpy as np
from array_record.python.array_record_module import ArrayRecordWriter

from interdomain_jax import strict_json
from interdomain_jax.data.documents import documents_of
from interdomain_jax.data.tokenizers import Tokenizer, fingerprint

FORMAT = 1
MANIFEST = "manifest.json"


class Shard(NamedTuple):
    """What a file of records holds.

    Attributes:
        name: of the file, without what follows the dot.
        size: of the file of records, in bytes.
        crc32: of that file.
        documents: number of records.
        tokens: ids in them, the closing EOS of each among them.
        bytes: UTF-8 bytes of their texts.
        cut: texts that became several documents, for they were too long.
        skipped: texts that became none, by reason.
    """

    name: str
    size: int
    crc32: int
    documents: int
    tokens: int
    bytes: int
    cut: int
    skipped: dict[str, int]


class Manifest(NamedTuple):
    """What a prepared split is.

    Attributes:
        format: of the files, `FORMAT`.
        corpus: where the texts come from, as the user named it.
        split: which part of them this is, by which rule.
        tokenizer: as the user named it.
        fingerprint: of the tokenizer, see `tokenizers.fingerprint`.
        vocab_size: of the tokenizer.
        eos_id: of the tokenizer.
        shards: the files.
    """

    format: int
    corpus: str
    split: str
    tokenizer: str
    fingerprint: str
    vocab_size: int
    eos_id: int
    shards: tuple[Shard, ...]


def shard_name(index: int, count: int) -> str:
    return f"tokens-{index:05d}-of-{count:05d}"


def write_shard(directory: Path, name: str, texts: Iterable[bytes | str], tokenizer: Tokenizer) -> Shard:
    """Writes one shard, all or nothing; the same texts give the same bytes.

    Args:
        directory: that exists.
        name: from `shard_name`.
        texts: in the order in which their documents are stored.
        tokenizer: makes them ids.
    """
    dtype = _dtype(tokenizer.vocab_size)
    skipped: Counter[str] = Counter()
    lengths: list[int] = []
    size, cut = 0, 0
    records = directory / f"{name}.array_record"
    unfinished = directory / f"{name}.tmp"
    writer = ArrayRecordWriter(str(unfinished), "group_size:1")
    for content in texts:
        documents = documents_of(content)
        if documents.skipped:
            skipped[documents.skipped] += 1
        cut += len(documents.texts) > 1
        for text in documents.texts:
            ids = np.append(tokenizer.encode(text), np.int32(tokenizer.eos_id))
            writer.write(ids.astype(dtype).tobytes())
            lengths.append(len(ids))
            size += len(text.encode())
    writer.close()
    content = unfinished.read_bytes()
    unfinished.replace(records)
    np.save(directory / f"{name}.npy", np.array(lengths, np.int32))
    shard = Shard(
        name=name,
        size=len(content),
        crc32=zlib.crc32(content),
        documents=len(lengths),
        tokens=sum(lengths),
        bytes=size,
        cut=cut,
        skipped=dict(sorted(skipped.items())),
    )
    strict_json.write(directory / f"{name}.json", shard._asdict())
    return shard


def read_shard(directory: Path, name: str) -> Shard | None:
    """What is known of a shard that is complete; None if it is not."""
    path = directory / f"{name}.json"
    return Shard(**json.loads(path.read_text())) if path.exists() else None


def write_manifest(
    directory: Path, shards: Sequence[Shard], tokenizer: Tokenizer, *, corpus: str, split: str, tokenizer_name: str
) -> Manifest:
    """Says that a split is complete."""
    manifest = Manifest(
        format=FORMAT,
        corpus=corpus,
        split=split,
        tokenizer=tokenizer_name,
        fingerprint=fingerprint(tokenizer),
        vocab_size=tokenizer.vocab_size,
        eos_id=tokenizer.eos_id,
        shards=tuple(shards),
    )
    content = manifest._asdict() | {"shards": [shard._asdict() for shard in shards]}
    strict_json.write(directory / MANIFEST, content)
    return manifest


def read_manifest(directory: Path) -> Manifest:
    """Reads what a prepared split is.

    Raises:
        FileNotFoundError: the directory holds none that is complete.
        ValueError: it is of another format.
    """
    path = directory / MANIFEST
    if not path.is_file():
        raise FileNotFoundError(f"{directory} holds no prepared corpus: there is no {path}")
    content: dict[str, Any] = json.loads(path.read_text())
    if content.get("format") != FORMAT:
        raise ValueError(
            f"{path} is of format {content.get('format')}; this version reads format {FORMAT}: prepare the corpus again"
        )
    return Manifest(**content | {"shards": tuple(Shard(**shard) for shard in content["shards"])})


class TokenDocuments:
    """Random access to the documents of a prepared split, as ids.

    Args:
        directory: of the split.
        tokenizer: that the model will be trained with.

    Raises:
        FileNotFoundError: the directory holds no complete split, or a file of it is gone.
        ValueError: it was made with another tokenizer, a file is not what was written, or it holds no document.
    """

    def __init__(self, directory: Path, tokenizer: Tokenizer):
        self.manifest = read_manifest(directory)
        if self.manifest.fingerprint != fingerprint(tokenizer):
            raise ValueError(
                f"{directory} was prepared with the tokenizer {self.manifest.tokenizer!r}, fingerprint "
                f"{self.manifest.fingerprint}; data.tokenizer has fingerprint {fingerprint(tokenizer)}: give the same "
                "one, or prepare the corpus again"
            )
        files = [directory / f"{shard.name}.array_record" for shard in self.manifest.shards]
        for path, shard in zip(files, self.manifest.shards, strict=True):
            if not path.is_file():
                raise FileNotFoundError(
                    f"{path} is gone, though {directory / MANIFEST} names it: prepare the corpus again"
                )
            if path.stat().st_size != shard.size:
                raise ValueError(
                    f"{path} has {path.stat().st_size} bytes and had {shard.size} when it was written: "
                    "delete it and prepare the corpus again"
                )
        self.lengths = np.concatenate(
            [np.zeros(0, np.int32), *(np.load(directory / f"{shard.name}.npy") for shard in self.manifest.shards)]
        )
        """int32 [documents], the number of ids of each, its EOS among them."""
        if not len(self.lengths):
            raise ValueError(f"{directory} holds no document: give a corpus with at least one")
        self._dtype = _dtype(self.manifest.vocab_size)
        self._records = grain.sources.ArrayRecordDataSource([str(path) for path in files])

    def __len__(self) -> int:
        return len(self.lengths)

    def __getitem__(self, document: int) -> np.ndarray:
        """The ids of a document, its EOS the last, int32 [length]."""
        return np.frombuffer(self._records[document], self._dtype).astype(np.int32)


def _dtype(vocab_size: int) -> np.dtype:
    return np.dtype("<u2" if vocab_size <= 1 << 16 else "<u4")
